"""Raw files -> a columnar cache of .npy files, which is then memory-mapped.

Reading raw files takes polars, imported inside the functions that need it: reading a prepared cache takes numpy alone.
Letters: E events, U users.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import logging
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .datasets import DataError, Dataset, RawFormat, did_you_mean, find_files

log = logging.getLogger(__name__)

CACHE_VERSION = 1  # part of every key: raise it when the same source would be prepared differently
COLUMNS = ("items", "timestamps", "actions", "user_offsets", "user_ids", "item_ids")
MAX_SECONDS = 10**11  # the year 5138; anything later is taken for milliseconds read as seconds
BLOCK = 1 << 22  # bytes parsed at a time in the search for a bad line
MAX_ID_LENGTH = 256  # ids are stored at fixed width, so that one absurd id would blow up the whole column


class CacheError(Exception):
    """A cache folder that is missing something or damaged."""


# ---- filtering: numpy only, shared with the synthetic data set


def k_core(users: np.ndarray, items: np.ndarray, min_user_events: int, min_item_events: int) -> np.ndarray:
    """Indices [<=E], ascending, of the events left once no user and no item has too few (duplicates count)."""
    index = np.arange(len(users))
    while len(index):
        few_users = np.bincount(users) < min_user_events
        few_items = np.bincount(items) < min_item_events
        drop = few_users[users] | few_items[items]
        if not drop.any():
            break
        index, users, items = index[~drop], users[~drop], items[~drop]
    return index


def filter_dataset(dataset: Dataset, *, min_user_events: int, min_item_events: int) -> Dataset:
    """The dataset's k-core, with users and items numbered anew in their old order. DataError when nothing is left."""
    if min_user_events <= 1 and min_item_events <= 1:
        return dataset
    users = np.repeat(np.arange(dataset.num_users, dtype=np.int32), np.diff(dataset.user_offsets))
    index = k_core(users, dataset.items, min_user_events, min_item_events)
    if not len(index):
        raise DataError(
            f"{dataset.name}: no event is left with min_user_events={min_user_events} and "
            f"min_item_events={min_item_events}; lower them"
        )
    user_events = np.bincount(users[index], minlength=dataset.num_users)
    item_events = np.bincount(dataset.items[index], minlength=dataset.num_items)
    new_item = np.cumsum(item_events > 0, dtype=np.int64) - 1
    key = f"{dataset.fingerprint}/{min_user_events}/{min_item_events}"
    return dataclasses.replace(
        dataset,
        items=new_item[dataset.items[index]].astype(np.int32),
        timestamps=dataset.timestamps[index],
        actions=None if dataset.actions is None else dataset.actions[index],
        user_offsets=offsets_of(user_events[user_events > 0]),
        user_ids=dataset.user_ids[user_events > 0],
        item_ids=dataset.item_ids[item_events > 0],
        fingerprint=hashlib.sha256(key.encode()).hexdigest(),
    )


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """lengths [n] -> offsets [n+1] int64."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


# ---- the cache


def load_or_prepare(name: str, fmt: RawFormat, path, cache_dir: Path, options: dict) -> Dataset:
    """Open the cache of this source and these options; make it first if it is missing or damaged."""
    if path and (Path(path).expanduser() / "meta.json").is_file():
        return _open_given_cache(Path(path).expanduser(), name, options)
    files = find_files(name, fmt, path)
    recipe = {"version": CACHE_VERSION, "format": name, "options": options, "columns": fmt.columns}
    recipe["timestamp_unit"] = fmt.timestamp_unit
    try:
        before = [_stat(f) for f in files]
        for file, (size, _) in zip(files, before):
            if size == 0:
                raise DataError(f"{file}: the file is empty")
        key = [recipe, [_file_sha256(f) for f in files]]
        fingerprint = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        folder = cache_dir / f"{name}-{fingerprint[:16]}"
        if folder.exists():
            try:
                return read_cache(folder, fingerprint)
            except CacheError as error:
                log.warning("cache %s is damaged (%s): preparing it again", folder, error)
        dataset = filter_dataset(read_raw(name, fmt, files, fingerprint), **options)
        if [_stat(f) for f in files] != before:
            raise DataError(f"{files[0]}: the source changed while it was being read; try again")
    except OSError as error:
        raise DataError(f"{error.filename or files[0]}: cannot be read: {error.strerror or error}") from error
    # The filter derives a fingerprint of its own; here the options are part of the key already.
    dataset = dataclasses.replace(dataset, fingerprint=fingerprint)
    try:
        write_cache(dataset, folder, {**recipe, "sources": [str(f) for f in files]})
    except OSError as error:
        raise DataError(f"{cache_dir}: cannot write the cache: {error.strerror or error}") from error
    return read_cache(folder, fingerprint)


def _open_given_cache(folder: Path, name: str, options: dict) -> Dataset:
    try:
        dataset, meta = read_cache(folder), _read_meta(folder)
    except CacheError as error:
        raise DataError(f"{folder}: damaged cache: {error}; prepare it again from the raw file") from error
    if (meta["format"], meta["options"]) != (name, options):
        raise DataError(
            f"{folder}: this cache holds {meta['format']} prepared with {meta['options']}; "
            f"asked for was {name} with {options}"
        )
    return dataset


def _stat(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def _file_sha256(file: Path) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _file_crc32(file: Path) -> int:
    crc = 0
    with open(file, "rb") as f:
        while chunk := f.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc


def _read_meta(folder: Path) -> dict:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for key in ("version", "name", "format", "options", "fingerprint", "has_timestamps", "files"):
            meta[key]
        return meta
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CacheError(f"meta.json: {type(error).__name__}: {error}") from error


def read_cache(folder: Path, fingerprint: str | None = None) -> Dataset:
    """Check size and checksum of every column, then memory-map them. CacheError when anything is off."""
    meta = _read_meta(folder)
    if meta["version"] != CACHE_VERSION:
        raise CacheError(f"version {meta['version']}, expected {CACHE_VERSION}")
    if fingerprint is not None and meta["fingerprint"] != fingerprint:
        raise CacheError("fingerprint differs")
    arrays = dict.fromkeys(COLUMNS)
    try:
        for column, expected in meta["files"].items():
            file = folder / f"{column}.npy"
            size = file.stat().st_size
            if size != expected["size"]:
                raise CacheError(f"{file.name}: expected {expected['size']} bytes, got {size}")
            if _file_crc32(file) != expected["crc32"]:
                raise CacheError(f"{file.name}: wrong checksum")
            # "c": torch wants writable memory; what is written there stays out of the file.
            arrays[column] = np.load(file, mmap_mode="c", allow_pickle=False).view(np.ndarray)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"{type(error).__name__}: {error}") from error
    if missing := [c for c in COLUMNS if arrays[c] is None and c != "actions"]:
        raise CacheError(f"no column {', '.join(missing)}")
    return Dataset(name=meta["name"], has_timestamps=meta["has_timestamps"], fingerprint=meta["fingerprint"], **arrays)


def write_cache(dataset: Dataset, folder: Path, meta: dict) -> None:
    """Write beside `folder`, then rename: a reader sees a whole cache or none, whenever this process dies."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        files = {}
        for column in COLUMNS:
            array = getattr(dataset, column)
            if array is None:
                continue
            file = temporary / f"{column}.npy"
            np.save(file, array, allow_pickle=False)
            files[column] = {"size": file.stat().st_size, "crc32": _file_crc32(file)}
        meta = {
            **meta,
            "name": dataset.name,
            "fingerprint": dataset.fingerprint,
            "has_timestamps": dataset.has_timestamps,
            "num_users": dataset.num_users,
            "num_items": dataset.num_items,
            "num_events": dataset.num_events,
            "files": files,
        }
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        temporary.chmod(0o755)  # mkdtemp's 0o700 would keep colleagues out of a shared cache
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, folder: Path) -> None:
    try:
        os.rename(temporary, folder)
        return
    except OSError:
        if not folder.exists():
            raise
    try:
        read_cache(folder)  # another process was faster: what it wrote is as good as ours
    except CacheError:
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
        os.rename(folder, aside / "damaged")
        os.rename(temporary, folder)
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(folder: Path, older_than: float = 6 * 3600) -> None:
    """Remove what killed processes left behind; a younger folder may belong to a process at work."""
    for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):
        try:
            old = time.time() - leftover.stat().st_mtime > older_than
        except OSError:
            continue
        if old:
            shutil.rmtree(leftover, ignore_errors=True)


# ---- raw files


def read_raw(name: str, fmt: RawFormat, files: list[Path], fingerprint: str) -> Dataset:
    """Parse, validate, number the ids and sort. DataError with the bad line, column and value."""
    try:
        import polars as pl
    except ImportError as error:
        raise DataError(
            "preparing raw files needs polars (pip install polars); a prepared cache folder as data.path does not"
        ) from error
    for file in files:
        with open(file, "rb") as f:
            if f.read(4).startswith((b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"BZh")):
                raise DataError(f"{file}: the file is compressed; unpack it first")
    read = _read_parquet if fmt.kind == "parquet" else _read_text
    frame = pl.concat([read(file, fmt) for file in files])
    if frame.height == 0:
        raise DataError(f"{files[0]}: no events in the file")

    user_ids, users = _number(frame["user"], files[0], "user")
    item_ids, items = _number(frame["item"], files[0], "item")
    columns = {"user": users, "item": items}
    columns |= {role: frame[role] for role in ("timestamp", "action") if role in frame.columns}
    frame = pl.DataFrame(columns)
    del users, items, columns
    # Stable, so that equal timestamps keep the order of the file.
    frame = frame.sort(["user", "timestamp"] if fmt.has_timestamps else ["user"], maintain_order=True)
    if fmt.has_timestamps:
        # Only now: milliseconds may order what seconds do not.
        timestamps = frame["timestamp"].to_numpy() // (1000 if fmt.timestamp_unit == "ms" else 1)
    else:
        timestamps = np.zeros(frame.height, np.int64)
    return Dataset(
        name=files[0].stem if fmt.own_columns or name in ("lines", "amazon") else name,
        items=frame["item"].to_numpy(),
        timestamps=timestamps,
        actions=frame["action"].to_numpy() if "action" in frame.columns else None,
        user_offsets=offsets_of(np.bincount(frame["user"].to_numpy(), minlength=len(user_ids))),
        user_ids=user_ids,
        item_ids=item_ids,
        has_timestamps=fmt.has_timestamps,
        fingerprint=fingerprint,
    )


def _number(ids, file: Path, role: str):
    """Original ids (Series) -> (distinct ids ascending, numpy int64 or str; codes, Series of int32)."""
    import polars as pl

    distinct = ids.unique().sort()
    if len(distinct) >= 2**31:
        raise DataError(f"{file}: {len(distinct)} distinct {role} ids, at most 2147483647 are supported")
    if distinct.dtype == pl.String:
        if distinct.str.len_chars().max() > MAX_ID_LENGTH:
            long = next(x for x in distinct if len(x) > MAX_ID_LENGTH)
            raise DataError(f"{file}: column {role}: an id of more than {MAX_ID_LENGTH} characters: {long[:40]!r}...")
        as_int = distinct.cast(pl.Int64, strict=False)
        # "007" and "7" are different ids: numbers only if no id changes when written back.
        if as_int.null_count() or not (as_int.cast(pl.String) == distinct).all():
            codes = ids.cast(pl.Enum(distinct)).to_physical().cast(pl.Int32)
            return distinct.to_numpy().astype(np.str_), codes
        ids, distinct = ids.cast(pl.Int64), as_int.sort()
    values = distinct.to_numpy()
    codes = np.searchsorted(values, ids.to_numpy()).astype(np.int32)
    return values.astype(np.int64), pl.Series(codes)


def _wanted(fmt: RawFormat) -> dict[str, str | int]:
    """role or flag -> source column."""
    return {**fmt.columns, **{flag: flag for flag in fmt.flags}}


def _require_columns(file: Path, fmt: RawFormat, present: list[str]) -> None:
    for role, column in _wanted(fmt).items():
        if column not in present:
            owned = f" (data.columns.{role})" if fmt.own_columns else ""
            has = ", ".join(c if c.isprintable() else ascii(c) for c in present[:20])[:400]
            raise DataError(f"{file}: no column {column!r}{owned}{did_you_mean(column, present)}; it has {has}")
    doubled = [c for c in _wanted(fmt).values() if list(_wanted(fmt).values()).count(c) > 1]
    if doubled:
        raise DataError(f"data.columns: column {doubled[0]!r} is named twice")


def _read_text(file: Path, fmt: RawFormat):
    import polars as pl

    separator, step = fmt.separator, 1
    if separator == "::":  # polars splits at one byte: with ":" every other column is empty
        separator, step = ":", 2
    if fmt.separator == " " and "\t" in _first_line(file):
        separator = "\t"
        fmt = dataclasses.replace(fmt, separator="\t")

    id_type = pl.Int64 if fmt.integer_ids else pl.String
    types = {"user": id_type, "item": id_type, "timestamp": pl.Int64, "action": pl.Float64}
    wanted = _wanted(fmt)
    if fmt.header:
        _require_columns(file, fmt, _header(file, fmt))
        layout = {"schema_overrides": {c: types.get(role, pl.UInt8) for role, c in wanted.items()}}
        layout["columns"] = list(wanted.values())
    else:
        schema = {str(i): pl.String for i in range((len(fmt.columns) - 1) * step + 1)}
        wanted = {role: str(i * step) for role, i in wanted.items()}
        layout = {"schema": schema | {c: types[role] for role, c in wanted.items()}}
        layout["columns"] = sorted(int(c) for c in wanted.values())

    def parse(source):
        """A file or bytes -> frame with the roles as columns; PolarsError or None when something is wrong."""
        frame = pl.read_csv(
            source,
            separator=separator,
            has_header=fmt.header,
            quote_char='"' if fmt.quoting else None,
            infer_schema=False,
            **layout,
        )
        if not fmt.header:
            frame.columns = [str(c) for c in layout["columns"]]
        frame = frame.select(pl.col(column).alias(role) for role, column in wanted.items())
        return frame if _is_valid(frame, fmt) else None

    reason = "a value is missing or out of range"
    try:
        frame = parse(file)
    except pl.exceptions.PolarsError as error:
        frame, reason = None, str(error).strip().splitlines()[0]
    if frame is None:
        _raise_bad_line(file, fmt, parse)
        raise DataError(f"{file}: cannot be read: {reason}")
    return _finish(frame, fmt)


def _checks(frame, fmt: RawFormat) -> dict:
    """role -> expression, true for each row with a good value."""
    import polars as pl

    checks = {role: pl.col(role).is_not_null() for role in frame.columns}
    for role in ("user", "item"):
        if frame.schema[role] == pl.String:
            checks[role] &= pl.col(role) != ""
    if fmt.has_timestamps:
        limit = MAX_SECONDS * (1000 if fmt.timestamp_unit == "ms" else 1)
        checks["timestamp"] &= pl.col("timestamp").is_between(0, limit, closed="left")
    if "action" in fmt.columns:
        code = pl.col("action") * fmt.action_scale
        checks["action"] &= code.is_between(0, 2**31, closed="left") & (code == code.floor())
    for flag in fmt.flags:
        checks[flag] &= pl.col(flag) <= 1
    return checks


def _is_valid(frame, fmt: RawFormat) -> bool:
    return all(frame.select(check.all().alias(role) for role, check in _checks(frame, fmt).items()).row(0))


def _finish(frame, fmt: RawFormat):
    """Keep user, item, timestamp and an int32 action code."""
    import polars as pl

    code = None
    if "action" in fmt.columns:
        code = pl.col("action") * fmt.action_scale
    elif fmt.flags:
        code = pl.sum_horizontal(pl.col(flag).cast(pl.Int32) * (1 << bit) for bit, flag in enumerate(fmt.flags))
    if code is not None:
        frame = frame.with_columns(code.cast(pl.Int32).alias("action"))
    return frame.select(r for r in ("user", "item", "timestamp", "action") if r in frame.columns)


# ---- the validator: runs only once something is known to be wrong


def _first_line(file: Path) -> str:
    with open(file, encoding="utf-8-sig", errors="replace", newline="") as f:
        return f.readline(1 << 20)


def _header(file: Path, fmt: RawFormat) -> list[str]:
    line = _first_line(file).rstrip("\r\n")
    return next(csv.reader([line], delimiter=fmt.separator)) if fmt.quoting else line.split(fmt.separator)


def _rows(text: str, first: int, fmt: RawFormat) -> Iterator[tuple[int, list[str]]]:
    """(number of the row's first line, fields); `first` is the number of the text's first line."""
    lines = io.StringIO(text, newline="")
    if fmt.quoting:
        reader, start = csv.reader(lines, delimiter=fmt.separator), 0
        for fields in reader:
            yield first + start, fields
            start = reader.line_num
    else:
        for number, line in enumerate(lines, first):
            line = line.rstrip("\r\n")
            yield number, line.split(fmt.separator) if line else []


def _raise_bad_line(file: Path, fmt: RawFormat, parse) -> None:
    """Find the first line that breaks the format and raise; return when the file looks right to us.

    Parses block by block, and looks line by line only into a block that fails.
    """
    import polars as pl

    with open(file, "rb") as f:
        header = f.readline() if fmt.header else b""
        line = 2 if fmt.header else 1
        while block := f.read(BLOCK):
            block += f.readline()
            while fmt.quoting and block.count(b'"') % 2 and (more := f.readline()):
                block += more  # never cut inside a quoted field
            try:
                good = parse(header + block) is not None
            except pl.exceptions.PolarsError:
                good = False
            if not good:
                _raise_bad_row(file, fmt, block.decode("utf-8", "surrogateescape"), line)
            line += block.count(b"\n")


def _raise_bad_row(file: Path, fmt: RawFormat, text: str, first: int) -> None:
    present = _header(file, fmt) if fmt.header else list(range(len(fmt.columns)))
    position = {role: present.index(column) for role, column in _wanted(fmt).items()}
    try:
        for number, fields in _rows(text, first, fmt):
            where = f"{file.name} line {number}"
            if not fields:
                raise DataError(f"{where}: empty line")
            # More fields than columns are an error to polars; fewer leave columns null.
            if len(fields) != len(present) and (len(fields) > len(present) or max(position.values()) >= len(fields)):
                raise DataError(f"{where}: expected {len(present)} columns, got {len(fields)}")
            for role, index in position.items():
                label = present[index] if fmt.header else role
                if problem := _problem(role, fields[index], fmt):
                    raise DataError(f"{where}, column {label}: {problem}")
    except csv.Error as error:
        raise DataError(f"{file.name}: not valid CSV after line {first - 1}: {error}") from error


def _problem(role: str, value: str, fmt: RawFormat) -> str | None:
    """What is wrong with one value, or None."""
    if value == "":
        return "the value is missing"
    shown = ascii(value) if any("\udc80" <= c <= "\udcff" for c in value) else repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    if shown.isascii() and value != value.encode("utf-8", "replace").decode():
        return f"not valid UTF-8: {shown}"
    if role in ("user", "item"):
        if fmt.integer_ids:
            return _integer_problem(value, shown)
        return None
    if role == "timestamp":
        if problem := _integer_problem(value, shown):
            return problem
        if int(value) < 0:
            return f"expected a timestamp >= 0, got {value}"
        if int(value) >= MAX_SECONDS * (1000 if fmt.timestamp_unit == "ms" else 1):
            hint = "; if these are milliseconds set data.columns.timestamp_unit to ms" if fmt.own_columns else ""
            return f"expected {'milliseconds' if fmt.timestamp_unit == 'ms' else 'seconds'}, got {value}{hint}"
        return None
    if role == "action":
        try:
            code = float(value) * fmt.action_scale
        except ValueError:
            code = -1.0
        kind = "an integer" if fmt.action_scale == 1 else f"a multiple of 1/{fmt.action_scale}"
        return None if 0 <= code < 2**31 and code.is_integer() else f"expected {kind} >= 0, got {shown}"
    return None if re.fullmatch(r" *\+?[01]", value) else f"expected 0 or 1, got {shown}"


def _integer_problem(value: str, shown: str) -> str | None:
    if not re.fullmatch(r" *[+-]?[0-9]+", value):  # polars skips spaces before a number
        return f"expected an integer, got {shown}"
    if not -(2**63) <= int(value) < 2**63:
        return f"expected a 64-bit integer, got {shown}"
    return None


def _read_parquet(file: Path, fmt: RawFormat):
    import polars as pl

    try:
        schema = pl.read_parquet_schema(file)
        _require_columns(file, fmt, list(schema))
        frame = pl.read_parquet(file, columns=list(fmt.columns.values()))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file: {str(error).strip().splitlines()[0]}") from error
    casts = []
    for role, column in fmt.columns.items():
        kind = schema[column]
        if role in ("user", "item"):
            good = kind.is_integer() or kind in (pl.String, pl.Categorical) or isinstance(kind, pl.Enum)
            expected, target = "integers or strings", pl.Int64 if kind.is_integer() else pl.String
        elif role == "timestamp":
            good = kind.is_integer() or isinstance(kind, pl.Datetime)
            expected, target = "integers or a datetime", pl.Int64
        else:
            good, expected, target = kind.is_numeric(), "numbers", pl.Float64
        if not good:
            raise DataError(f"{file.name}, column {column}: expected {expected}, got {kind}")
        value = pl.col(column)
        if isinstance(kind, pl.Datetime):
            value = value.dt.epoch(fmt.timestamp_unit)
        casts.append(value.cast(target, strict=False).alias(role))
    raw, frame = frame, frame.select(casts)
    for role, good in _checks(frame, fmt).items():
        row = frame.select((~good).arg_true().first()).item()
        if row is not None:
            original, value = raw[fmt.columns[role]][row], frame[role][row]
            problem = _problem(role, "" if original is None else str(original if value is None else value), fmt)
            raise DataError(f"{file.name} row {row + 1}, column {fmt.columns[role]}: {problem}")
    return _finish(frame, fmt)
