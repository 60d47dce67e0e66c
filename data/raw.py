"""Raw files -> a `Dataset`: parsed and checked, the ids numbered, the events sorted.

Takes polars, imported inside the functions that need it: whoever reads a prepared cache can do without.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .bad_rows import BadRows
from .feature_files import features_of
from .filtering import offsets_of
from .formats import RawFormat
from .memory import require_memory
from .parquet import read_parquet
from .progress import Progress
from .sequences import read_sequences
from .sources import RawFile, unpacked
from .text import read_text
from .times import NAMES, to_seconds
from .types import ACTION_CODES, DataError, Dataset, shown
from .values import Readings

READERS = {"text": read_text, "sequences": read_sequences, "parquet": read_parquet}
MOST_TEXT_ACTIONS = 10_000  # distinct ones: more is taken for a column read wrongly
NOTED_ACTIONS = 10


@dataclass(frozen=True)
class Handling:
    """on_bad_row: error or drop. duplicates: keep or drop events that equal an earlier one in every column."""

    on_bad_row: str = "error"
    duplicates: str = "keep"


PLAIN = Handling()


def read_raw(
    name: str,
    fmt: RawFormat,
    sources: list[RawFile],
    fingerprint: str,
    handling: Handling = PLAIN,
    scratch: Path | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Parse, validate, number the ids and sort. DataError with the bad line, column and value.

    scratch: where compressed files are unpacked meanwhile. progress: is told the stages, and may end them.
    """
    try:
        import polars as pl
    except ImportError as error:
        raise DataError(
            "preparing raw files needs polars (pip install polars); a prepared cache folder as data.path does not"
        ) from error
    progress = progress or Progress()
    first = sources[0]
    with unpacked(sources, scratch) as files:
        frame, readings, bad, notes = _read_all(fmt, files, handling, progress)
    if frame.height == 0:
        dropped = f" but {bad.count:,} bad rows" if bad.count else ""
        raise DataError(f"{first.name}: no events in the file{dropped}")
    if bad.count:
        notes.append(bad.note())
    if handling.duplicates == "drop":
        if not fmt.has_timestamps:
            raise DataError("data.duplicates=drop needs timestamps: without them a repetition is an event of its own")
        height = frame.height
        frame = frame.unique(keep="first", maintain_order=True)
        notes.append(f"{height - frame.height:,} events equal to an earlier one were left out (data.duplicates: drop)")

    progress.stage(f"numbering the ids of {frame.height:,} events")
    action_names = None
    if "action" in frame.columns and frame["action"].dtype == pl.String:
        frame, action_names = _number_actions(frame, first)
    elif fmt.action_codes is not None:
        action_names = names_of(fmt.action_codes)
    if action_names:
        codes = [f"{shown(text)} {code}" for code, text in enumerate(action_names[:NOTED_ACTIONS]) if text]
        notes.append(f"{ACTION_CODES}{', '.join(codes)}{', ...' if len(action_names) > len(codes) else ''}")
    user_ids, users = _number(frame["user"], first, "user")
    item_ids, items = _number(frame["item"], first, "item")
    columns = {"user": users, "item": items}
    columns |= {role: frame[role] for role in ("timestamp", "action", *fmt.features) if role in frame.columns}
    frame = pl.DataFrame(columns)
    del users, items, columns
    progress.stage(f"sorting {frame.height:,} events")
    # Stable, so that equal timestamps keep the order of the file.
    frame = frame.sort(["user", "timestamp"] if fmt.has_timestamps else ["user"], maintain_order=True)
    if fmt.has_timestamps:
        # Only now: what is finer than seconds has put them in order.
        timestamps = to_seconds(frame["timestamp"], readings.time.unit)
    else:
        timestamps = np.zeros(frame.height, np.int64)
    return Dataset(
        name=_name(first, fmt) if fmt.own_columns or name in ("lines", "sequences", "amazon") else name,
        items=frame["item"].to_numpy(),
        timestamps=timestamps,
        actions=frame["action"].to_numpy() if "action" in frame.columns else None,
        user_offsets=offsets_of(np.bincount(frame["user"].to_numpy(), minlength=len(user_ids))),
        user_ids=user_ids,
        item_ids=item_ids,
        has_timestamps=fmt.has_timestamps,
        fingerprint=fingerprint,
        action_names=action_names,
        notes=tuple(notes),
        features=tuple(
            features_of("events", name, kind, frame[role], first.name) for role, (kind, name) in fmt.features.items()
        ),
    )


def _read_all(fmt: RawFormat, files: list[RawFile], handling: Handling, progress: Progress):
    """(the good rows of all files, their readings, the bad rows, notes)."""
    import polars as pl

    size = sum(file.path.stat().st_size for file in files)
    if fmt.kind != "parquet":  # whose reader knows better
        require_memory(2 * size, f"{files[0].name}: {size / 2**30:.1f} GiB of rows")
    bad, frames, notes = BadRows(handling.on_bad_row == "drop"), [], []
    readings: Any = None
    rows = 0
    for number, file in enumerate(files):
        part = f" (file {number + 1} of {len(files)}, {rows:,} rows so far)" if len(files) > 1 else ""
        progress.stage(f"reading {file.name}{part}")
        before = readings
        try:
            frame, readings, told = READERS[fmt.kind](file, fmt, bad, readings)
        except (
            pl.exceptions.PanicException
        ) as error:  # of a changed file, say: no Exception, which would end in a trace
            raise DataError(f"{file.name}: cannot be read: {shown(str(error).strip(), 200)}") from None
        if before is not None and before.time.unit != readings.time.unit:
            raise DataError(
                f"{file.name}: times in {NAMES[readings.time.unit]}, in {files[0].name} they are in "
                f"{NAMES[before.time.unit]}"
            )
        rows += frame.height
        frames.append(frame)
        notes += [note for note in told if note not in notes]
    if fmt.own_columns and fmt.has_timestamps:
        notes.append(_time_note(fmt, readings))
    return pl.concat(_alike(frames, files)), readings, bad, notes


def _alike(frames: list, files: list[RawFile]) -> list:
    """The frames with ids as text in all where one has text, and times of one type; DataError where that cannot be."""
    import polars as pl

    for role in frames[0].columns:
        kinds = {frame[role].dtype for frame in frames}
        if len(kinds) == 1:
            continue
        if role in ("user", "item"):
            kind: Any = pl.String
        elif role == "timestamp" and pl.Float64 not in kinds:
            kind = pl.Decimal(38, 9)
        else:
            other = next(n for n, frame in enumerate(frames) if frame[role].dtype != frames[0][role].dtype)
            raise DataError(
                f"{files[other].name}: the column of the {role} holds {frames[other][role].dtype}, in {files[0].name} "
                f"it holds {frames[0][role].dtype}"
            )
        frames = [frame.with_columns(pl.col(role).cast(kind)) for frame in frames]
    return frames


def _time_note(fmt: RawFormat, readings: Readings) -> str:
    reading, column = readings.time, fmt.columns["timestamp"]
    if reading.kind in ("integer", "decimal"):
        told = "" if fmt.timestamp_unit else ", told from the values"
        return f"times ({shown(column)}) are numbers of {NAMES[reading.unit]}{told}"
    text = {"iso": "ISO 8601 text", "format": "text", "datetime": "datetimes"}[reading.kind]
    return f"times ({shown(column)}) are {text}; without a zone they are taken for UTC"


def _number_actions(frame, first: RawFile):
    """(the frame with codes in order of frequency in place of the actions' text, the text of each code)."""
    import polars as pl

    counts = frame["action"].value_counts(name="count").sort(["count", "action"], descending=[True, False])
    if counts.height > MOST_TEXT_ACTIONS:
        raise DataError(
            f"{first.name}: {counts.height:,} different texts as actions, at most {MOST_TEXT_ACTIONS:,} are supported: "
            "is this the action's column?"
        )
    texts = counts["action"]
    codes = pl.Series(np.arange(len(texts), dtype=np.int32))
    return frame.with_columns(pl.col("action").replace_strict(texts, codes)), tuple(texts.to_list())


def names_of(codes: dict[str, int]) -> tuple[str, ...] | None:
    """The text of each code, "" for a code without one; of several texts with one code the first. None for codes with
    too many gaps for that."""
    if max(codes.values()) >= MOST_TEXT_ACTIONS:
        return None
    names = [""] * (max(codes.values()) + 1)
    for text, code in codes.items():
        names[code] = names[code] or text
    return tuple(names)


def _name(first: RawFile, fmt: RawFormat) -> str:
    """The file's name without its endings."""
    stem = Path(first.name).name
    for end in (".gz", ".zst"):
        stem = stem.removesuffix(end)
    return Path(stem).stem


def _number(ids, first: RawFile, role: str):
    """Original ids (Series) -> (distinct ids ascending, numpy int64 or str; codes, Series of int32)."""
    import polars as pl

    distinct = ids.unique().sort()
    if len(distinct) >= 2**31:
        raise DataError(f"{first.name}: {len(distinct)} distinct {role} ids, at most 2147483647 are supported")
    if distinct.dtype == pl.String:
        as_int = distinct.cast(pl.Int64, strict=False)
        # "007" and "7" are different ids: numbers only if no id changes when written back.
        if as_int.null_count() or not (as_int.cast(pl.String) == distinct).all():
            codes = ids.cast(pl.Enum(distinct)).to_physical().cast(pl.Int32)
            return distinct.to_numpy().astype(np.str_), codes
        ids, distinct = ids.cast(pl.Int64), as_int.sort()
    values = distinct.to_numpy()
    codes = np.searchsorted(values, ids.to_numpy()).astype(np.int32)
    return values.astype(np.int64), pl.Series(codes)
