"""Read text files as polars frames with the columns user, item, timestamp and action, and collect bad rows.

First the number of fields in each row is checked, then the whole file is parsed strictly. If that fails, the file is
read again, block by block and value by value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from data.reading.bad_rows import BadRows
from data.reading.conditions import MARK, selected
from data.reading.decimals import alike_times
from data.reading.formats import RawFormat
from data.reading.lines import SEARCH_BLOCK, Shape, are_whole, blocks, first_line, read_header, split_row
from data.reading.lists import separated
from data.reading.sources import RawFile, literal
from data.reading.times import SECONDS
from data.reading.values import Readings, checks, choose_readings, named, not_decoded, problem, typed
from data.types import DataError, did_you_mean, shown

SEPARATORS = ",;\t|"
NAMES = {"\t": "a tab", " ": "a blank", ",": "a comma", ";": "a semicolon"}
SAMPLE = 1 << 20  # bytes of the first rows, from which the readings of columns are chosen
MOST_SAMPLES = 1000  # files whose first rows are used


class Names(NamedTuple):
    """The columns of a file: their names, or indices without a header; and name -> value of columns in folder names."""

    columns: list
    folder_values: dict[str, str]

    @property
    def width(self) -> int:
        """The number of columns in the file."""
        return len(self.columns)


def read_text(source: RawFile, fmt: RawFormat, bad: BadRows, readings: Readings | None = None):
    """Read one file; return (a polars frame, the readings of its columns, notes about the file).

    readings: the readings of earlier files. bad: gets the bad rows. DataError for a file that cannot be read.
    """
    import polars as pl

    fmt, notes = with_separator(source, fmt)
    names = column_names(source, fmt)
    all_whole = are_whole(source, fmt, names.width)
    readings = readings or text_readings([source], fmt)
    for attempt in _attempts(fmt, readings) if all_whole else ():
        try:
            with literal(source.path) as file:
                parsed = _parse(file, fmt, names, attempt)
            frame, left_out = _typed_strictly(parsed, fmt, attempt)
            if is_valid(frame, fmt, attempt):
                bad.rows, bad.left_out = bad.rows + parsed.height, bad.left_out + left_out
                return finish(with_lists(frame, fmt), fmt), readings, notes
        except (pl.exceptions.PolarsError, ValueError):
            pass
    before = bad.count
    frame = _read_in_blocks(source, fmt, names, readings, bad)
    if all_whole and bad.count == before and frame.height:
        raise DataError(f"{source.name}: cannot be read")  # the parser fails, but no bad row is found
    bad.check(source.name)
    return finish(with_lists(frame, fmt), fmt), readings, notes


def text_pieces(
    source: RawFile, fmt: RawFormat, bad: BadRows, readings: Readings | None, size: int, begin: tuple[int, int] | None
) -> Iterator[tuple]:
    """Yield a file in pieces of about `size` bytes: (frame, readings, notes, the begin of the next piece).

    begin: the begin of the first piece, from an earlier call; None: the first row. Otherwise as `read_text`, but
    without `bad.check`.
    """
    fmt, notes = with_separator(source, fmt)
    names = column_names(source, fmt)
    readings = readings or text_readings([source], fmt)
    place = len(first_line(source, fmt)) if fmt.header else 0
    for line, data in blocks(source, fmt, size, begin):
        place = begin[0] if begin is not None else place
        frame = _strictly(data, fmt, names, readings, bad)
        if frame is None:
            frame = _good_rows(source, line, data, fmt, names, readings, bad)
        begin = place + len(data), line + data.count(b"\n")
        yield finish(with_lists(frame, fmt), fmt), readings, notes, begin


def _typed_strictly(parsed, fmt: RawFormat, readings: Readings):
    """Return (the typed rows that the user's condition selects, the number of other rows).

    ValueError if a row has text in a column that the condition compares as numbers.
    """
    keep, wrong = selected(parsed, fmt, readings.numbers)
    if wrong:
        raise ValueError("the row is bad")
    frame = parsed if keep.all() else parsed.filter(keep)
    return typed(frame.select(*source_columns(fmt)), fmt, readings), parsed.height - frame.height


def _strictly(data: bytes, fmt: RawFormat, names: Names, readings: Readings, bad: BadRows):
    """Return the rows of a block, or None if a row is bad."""
    import polars as pl

    shape = Shape(data, fmt, names.width)
    if len(shape.wrong) or shape.misquoted:
        return None
    for attempt in _attempts(fmt, readings):
        try:
            parsed = _parse(data, fmt, names, attempt)
            frame, left_out = _typed_strictly(parsed, fmt, attempt)
        except (pl.exceptions.PolarsError, ValueError):
            continue
        if parsed.height == len(shape.ends) and is_valid(frame, fmt, attempt):
            bad.rows, bad.left_out = bad.rows + parsed.height, bad.left_out + left_out
            return frame
    return None


def with_separator(source: RawFile, fmt: RawFormat) -> tuple[RawFormat, list[str]]:
    """Return (the format with this file's separator, notes: one if a detected separator differs from the format's)."""
    if fmt.separator == " " and not fmt.named_columns:
        tabs = b"\t" in first_line(source, fmt)
        return dataclasses.replace(fmt, separator="\t" if tabs else " "), []
    if not fmt.detect_separator:
        return fmt, []
    candidates = [dataclasses.replace(fmt, separator=separator, detect_separator=False) for separator in SEPARATORS]
    headers = [[*read_header(source, candidate), *dict(source.folder_columns)] for candidate in candidates]
    # If no separator gives every column, choose one for which the error lists the header as the user sees it.
    named = [sum(column in header for column in source_columns(fmt).values()) for header in headers]
    chosen = candidates[max(range(len(headers)), key=lambda n: (named[n], len(headers[n]), -n))]
    name = NAMES.get(chosen.separator, chosen.separator)
    note = f"fields are separated by {name} ({fmt.section}.separator)"
    return chosen, [note] if chosen.separator != fmt.separator else []


def column_names(source: RawFile, fmt: RawFormat) -> Names:
    """Return the columns of a file; DataError unless it has every column of the format exactly once."""
    names = read_header(source, fmt) if fmt.header else list(range(fmt.width or len(fmt.columns)))
    folder_values = {name: value for name, value in source.folder_columns if name not in names}
    require_columns(source, fmt, [*names, *folder_values])
    return Names(names, folder_values)


def source_columns(fmt: RawFormat) -> dict[str, str | int]:
    """Map each role or flag to its source column."""
    return {**fmt.columns, **{flag: flag for flag in fmt.flags}}


def _option(fmt: RawFormat, role: str) -> str:
    """Return the key of the configuration that names the column of a role of events or of a file of features."""
    kind, _, name = role.rpartition(":")  # such as category:brand, or an id
    if fmt.section == "data":
        return f"data.features.events.columns.{name}" if kind else f"{fmt.option}.{name}"
    return f"{fmt.option}.{name}" if kind else f"{fmt.section}.id"


def require_columns(source: RawFile, fmt: RawFormat, present: list) -> None:
    """Raise DataError unless `present` has every column of the format exactly once."""
    for role, column in source_columns(fmt).items():
        if column not in present:
            option = f" ({_option(fmt, role)})" if fmt.named_columns else ""
            has = ", ".join(shown(c) for c in present[:20])[:400]
            raise DataError(f"{source.name}: no column {column!r}{option}{did_you_mean(column, present)}; it has {has}")
        if present.count(column) > 1:
            raise DataError(f"{source.name}: the header has column {column!r} twice")
    for column in fmt.where_columns:
        if column not in present:
            has = ", ".join(shown(c) for c in present[:20])[:400]
            near = did_you_mean(column, present)
            raise DataError(f"{source.name}: no column {shown(repr(column))} (data.where){near}; it has {has}")


def text_readings(sources: list[RawFile], fmt: RawFormat) -> Readings:
    """Choose the readings from the first rows of the files, MOST_SAMPLES at most, that have the right number of fields.

    All of these files count, the first one most: its sample is up to 16 times as large as those of the others.
    """
    import polars as pl

    if not fmt.named_columns and not fmt.where and fmt.timestamp_unit in (None, "s") and fmt.timestamp_format is None:
        return Readings(SECONDS)
    samples: list[Any] = []
    for source in sources[:MOST_SAMPLES]:
        file_fmt, _ = with_separator(source, fmt)
        names = column_names(source, file_fmt)
        for _, data in blocks(source, file_fmt, SAMPLE if not samples else SAMPLE // 16):
            shape = Shape(data, file_fmt, names.width)
            if shape.misquoted is None and len(shape.wrong) < len(shape.ends):
                samples.append(_parse(shape.without(shape.wrong), file_fmt, names, None, lossy=True))
                break
    return choose_readings(pl.concat(samples), fmt) if samples else Readings(SECONDS)


def _attempts(fmt: RawFormat, readings: Readings) -> list[Readings]:
    """Return the readings to try for a whole file: times as integers first, then as decimals."""
    if readings.time.kind != "integer" or not fmt.named_columns:
        return [readings]
    return [readings, dataclasses.replace(readings, time=dataclasses.replace(readings.time, kind="decimal"))]


def _parse(source, fmt: RawFormat, names: Names, readings: Readings | None, lossy: bool = False):
    """Parse a file, or rows as bytes, into a frame with the roles as columns.

    Columns have the types of `readings`; with None, all are text. PolarsError for a value of another type. lossy:
    replace bytes that are not UTF-8.
    """
    import polars as pl

    # polars splits at one byte: with the separator "::", it splits at ":", and every other column is empty.
    step = len(fmt.separator)
    needed: dict[str, str | int] = source_columns(fmt) | {MARK + name: name for name in fmt.where_columns}
    columns = {r: names.columns.index(c) * step for r, c in needed.items() if c in names.columns}
    schema: dict[str, Any] = {str(i): pl.String for i in range((names.width - 1) * step + 1)}
    if readings is not None:
        text_actions = readings.text_actions or fmt.decimal == ","
        types: dict[str, Any] = {"action": pl.String if text_actions else pl.Float64}
        types |= {"timestamp": pl.Int64 if readings.time.kind == "integer" else pl.String}
        types |= dict.fromkeys(("user", "item"), pl.Int64 if fmt.integer_ids else pl.String)
        types |= dict.fromkeys(fmt.features, pl.String)
        types |= {role: types.get(role, pl.UInt8) for role in columns}
        for_condition = {columns[role] for role in columns if role.startswith(MARK)}
        schema |= {str(i): types[role] for role, i in columns.items() if i not in for_condition}
    chosen = sorted({*columns.values()})
    # Columns are named by index: polars treats a user's column name as a pattern if it looks like one.
    frame = pl.read_csv(
        source,
        separator=fmt.separator[0],
        has_header=False,
        skip_rows=int(fmt.header and not isinstance(source, bytes)),
        quote_char='"' if fmt.quoting else None,
        infer_schema=False,
        schema=schema,
        columns=chosen,
        encoding="utf8-lossy" if lossy or fmt.other_text else "utf8",
        glob=False,
    )
    frame.columns = [str(i) for i in chosen]
    values = {role: pl.col(str(i)) for role, i in columns.items()}
    values |= {role: pl.lit(names.folder_values[str(c)]) for role, c in needed.items() if role not in values}
    return frame.select(values[role].alias(role) for role in needed)


def is_valid(frame, fmt: RawFormat, readings: Readings) -> bool:
    """Return whether all values of a typed frame are valid."""
    return all(frame.select(check.all().alias(role) for role, check in checks(frame, fmt, readings).items()).row(0))


def _read_in_blocks(source: RawFile, fmt: RawFormat, names: Names, readings: Readings, bad: BadRows):
    """Return the good rows of a file; bad: gets the bad rows."""
    import polars as pl

    frames = [
        _good_rows(source, line, data, fmt, names, readings, bad) for line, data in blocks(source, fmt, SEARCH_BLOCK)
    ]
    return pl.concat(alike_times(frames or [_no_rows(fmt, readings)]))


def _no_rows(fmt: RawFormat, readings: Readings):
    import polars as pl

    return typed(pl.DataFrame(schema=dict.fromkeys(source_columns(fmt), pl.String)), fmt, readings)


def _good_rows(source: RawFile, line: int, data: bytes, fmt: RawFormat, names: Names, readings: Readings, bad: BadRows):
    """Return the good rows of a block; line: the number of its first line; bad: gets the bad rows."""
    import numpy as np
    import polars as pl

    shape, good_rows = Shape(data, fmt, names.width), _no_rows(fmt, readings)
    order = shape.wrong if shape.misquoted is None else shape.wrong[shape.wrong < shape.misquoted[0]]
    misshapen = set(order.tolist())
    if not fmt.other_text and not _is_text(data):  # some column is not UTF-8
        rows = range(len(shape.ends))
        order = np.union1d(order, [row for row in rows if not _is_text(shape.row(row))]).astype(np.int64)
    remaining = np.setdiff1d(np.arange(len(shape.ends)), order)
    failed: dict[int, list[str]] = {}
    if not shape.misquoted and len(remaining):
        frame = _parse(shape.without(order), fmt, names, None)
        if frame.height != len(remaining):
            raise DataError(f"{source.name}: expected {len(remaining)} rows from line {line} on, got {frame.height}")
        keep, wrong = selected(frame, fmt, readings.numbers)
        frame, remaining = frame.filter(keep), remaining[keep.to_numpy()]
        bad.left_out += len(keep) - len(remaining)
        frame = typed(frame.select(*source_columns(fmt)), fmt, readings)
        by_role = frame.select(good.alias(role) for role, good in checks(frame, fmt, readings).items())
        wrong_here = {MARK + name: ~bad_here.filter(keep) for name, bad_here in wrong.items()}
        by_role = by_role.with_columns(**wrong_here)
        good = by_role.select(pl.all_horizontal(pl.all())).to_series()
        good_rows = frame.filter(good)
        bad_rows = remaining[~good.to_numpy()]
        order = np.union1d(order, bad_rows)
        failed = {
            row: [role for role in checked if not checked[role]]
            for row, checked in zip(bad_rows[: bad.room].tolist(), by_role.filter(~good).iter_rows(named=True))
        }
    descriptions: list[str] = []
    for row in order.tolist():
        if len(descriptions) == bad.room:
            break
        message = (
            f": {shape.problem(row)}"
            if row in misshapen
            else _problem(shape.row(row), fmt, names, readings, failed.get(row), source.encoding)
        )
        descriptions.append(f"{source.name} line {line + shape.lines_before(row)}{message}")
    bad.rows += len(shape.ends)
    bad.add(len(order), descriptions)
    if shape.misquoted:
        row, message = shape.misquoted
        bad.stop(f"{source.name} line {line + shape.lines_before(row)}: {message}")
    return good_rows


def _problem(
    row: bytes, fmt: RawFormat, names: Names, readings: Readings, failed: list[str] | None, encoding: str
) -> str:
    """Return `, column user: message` for the first bad value of a row; failed: the roles of bad values, if known."""
    fields = split_row(row.decode("utf-8", "surrogateescape").removeprefix("\ufeff").removesuffix("\r"), fmt)
    if not fmt.other_text:
        for column, field in zip(names.columns, fields):
            if not _is_text(field.encode("utf-8", "surrogateescape")):
                place = (
                    column if fmt.header else next((r for r, c in source_columns(fmt).items() if c == column), column)
                )
                return f", column {place}: {not_decoded(field, fmt, encoding)}"
    values = dict(zip(names.columns, fields)) | names.folder_values
    for role, column in source_columns(fmt).items():
        if (
            (failed is None or role in failed)
            and column in values
            and (message := problem(role, values[column], fmt, readings))
        ):
            return f", column {column if fmt.header else role}: {message}"
    for role in failed or ():
        if role.startswith(MARK):
            column = role.removeprefix(MARK)
            got = shown(repr(values[column]))
            return f", column {column}: expected a number, as in other rows (data.where), got {got}"
    return f": not valid {named(encoding)}" if not _is_text(row) else ": cannot be read"


def _is_text(row: bytes) -> bool:
    try:
        row.decode()
        return True
    except UnicodeDecodeError:
        return False


def finish(frame, fmt: RawFormat):
    """Select user, item, timestamp, features and action (an int32 code or text)."""
    import polars as pl

    code = None
    if "action" in frame.columns:
        code = pl.col("action")
        if frame["action"].dtype != pl.String:
            code = (code * fmt.action_scale).cast(pl.Int32)
    elif fmt.flags:
        code = pl.sum_horizontal(pl.col(flag).cast(pl.Int32) * (1 << bit) for bit, flag in enumerate(fmt.flags))
    if code is not None:
        frame = frame.with_columns(code.alias("action"))
    columns = dict.fromkeys(("user", "item", "timestamp", "action", *fmt.columns))
    return frame.select(r for r in columns if r in frame.columns)


def with_lists(frame, fmt: RawFormat):
    """Return the frame with BETWEEN as the separator of lists that are text."""
    return frame.with_columns(
        separated(frame[role], separator) for role, separator in fmt.list_separators.items() if role in frame.columns
    )
