"""Read Parquet files as polars frames with the columns user, item, timestamp and action, and collect bad rows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from data.reading import times
from data.reading.bad_rows import BadRows
from data.reading.conditions import MARK, selected
from data.reading.formats import RawFormat
from data.reading.lists import BETWEEN
from data.reading.memory import require_memory
from data.reading.sources import RawFile, literal
from data.reading.text import finish, require_columns, with_lists
from data.reading.times import Reading
from data.reading.values import Readings, checks, choose_readings, problem, typed
from data.types import DataError, shown

SAMPLE = 100_000  # rows from which the readings of columns are chosen


def read_parquet(source: RawFile, fmt: RawFormat, bad: BadRows, readings: Readings | None = None):
    """Read one file; return (a polars frame, the readings of its columns, notes about the file).

    readings: the readings of earlier files, whose times must have the same unit. bad: gets the bad rows. DataError for
    a file that cannot be read.
    """
    frame, readings = _readable(source, _read(source, fmt), fmt, bad, readings)
    bad.check(source.name)
    return frame, readings, []


def parquet_pieces(
    source: RawFile, fmt: RawFormat, bad: BadRows, readings: Readings | None, size: int, begin: tuple[int, int] | None
) -> Iterator[tuple]:
    """Yield a file in pieces of max(SAMPLE, `size` / 64) rows: (frame, readings, notes, the begin of the next piece).

    begin: the begin of the first piece, (0, a row's number), from an earlier call; None: the first row. Otherwise as
    `read_parquet`, but without `bad.check`.
    """
    first, rows = 0 if begin is None else begin[1], max(SAMPLE, size // 64)
    while True:
        raw = _read(source, fmt, first, rows)
        if not raw.height and first:
            return
        frame, readings = _readable(source, raw, fmt, bad, readings, first)
        first += raw.height
        yield frame, readings, [], (0, first)
        if raw.height < rows:
            return


def _readable(source: RawFile, raw, fmt: RawFormat, bad: BadRows, readings: Readings | None, first: int = 0):
    """Return (the good rows of a raw frame, the readings); first: the number of the frame's first row."""
    time = raw["timestamp"].dtype if "timestamp" in raw.columns else None
    keep, _ = selected(raw, fmt, ())
    bad.rows, bad.left_out = bad.rows + raw.height, bad.left_out + raw.height - keep.sum()
    places = keep.arg_true() + first
    raw = raw.select(*fmt.columns)
    as_read = [_as_read(source, role, raw[role].dtype, fmt) for role in raw.columns]
    if readings is None:
        sample, plain = raw.head(SAMPLE).select(as_read), dataclasses.replace(fmt, where_columns=())
        readings = choose_readings(sample, plain, numbers_as_text=fmt.timestamp_unit is not None)
    raw = raw.filter(keep)
    frame = raw.select(as_read)
    if time is not None and time.is_temporal():
        readings = Readings(Reading("datetime", "ns"), readings.text_actions)
    elif fmt.action_codes is None and readings.text_actions and raw["action"].dtype.is_numeric():
        raise DataError(f"{source.name}: the actions are numbers, but text in other files")
    frame = typed(frame, fmt, readings)
    import polars as pl

    good = frame.select(pl.all_horizontal(*checks(frame, fmt, readings).values())).to_series()
    if not good.all():
        rows = (~good).arg_true()
        bad.add(
            len(rows), [_problem(source, row, raw, frame, fmt, readings, places[row]) for row in rows.head(bad.room)]
        )
        frame = frame.filter(good)
    texts = {role: mark for role, mark in fmt.list_separators.items() if raw[role].dtype == pl.String}
    return finish(with_lists(frame, dataclasses.replace(fmt, list_separators=texts)), fmt), readings


def _read(source: RawFile, fmt: RawFormat, first: int = 0, rows: int | None = None):
    """Read the format's columns with their roles as names; DataError for a file that cannot be read.

    rows: the number of rows from row number `first` on; None: all.
    """
    import polars as pl

    # Datetimes are in UTC whatever their zone, so polars need not know the zone ("+05:30").
    os.environ.setdefault("POLARS_IGNORE_TIMEZONE_PARSE_ERROR", "1")
    try:
        with literal(source.path) as file:
            schema = pl.read_parquet_schema(file)
        names = list(schema)
        folder_values = {name: value for name, value in source.folder_columns if name not in names}
        require_columns(source, fmt, [*names, *folder_values])
        with literal(source.path) as file:
            height = pl.scan_parquet(file).select(pl.len()).collect().item()
        if rows is None:
            require_memory(memory_of(height, fmt), f"{source.name}: {height:,} rows")
        # Columns are selected by index: polars treats a user's column name as a pattern if it looks like one.
        with literal(source.path) as file:
            needed = fmt.columns | {MARK + name: name for name in fmt.where_columns}
            places = {role: names.index(str(c)) for role, c in needed.items() if c in names}
            chosen = sorted({*places.values()})
            if rows is None:
                frame = pl.read_parquet(file, columns=chosen, hive_partitioning=False, glob=False)
            else:
                scan = pl.scan_parquet(file, hive_partitioning=False, glob=False).select(pl.nth(chosen))
                frame = scan.slice(first, rows).collect()
    except DataError:
        raise
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
        with literal(source.path) as file:
            if file.read(4) != b"PAR1":
                raise DataError(
                    f"{source.name}: not a Parquet file; for text set {fmt.section}.format to csv"
                ) from error
        reason = shown((str(error).strip() or type(error).__name__).splitlines()[0], 200)
        raise DataError(f"{source.name}: not a readable Parquet file: {reason}") from error
    by_place = dict(zip(chosen, frame.get_columns()))
    values = {role: by_place[place].alias(role) for role, place in places.items()}
    for role, column in needed.items():
        if role not in values:
            values[role] = pl.Series(role, [folder_values[str(column)]], pl.String).new_from_index(0, frame.height)
    return pl.DataFrame([values[role] for role in needed])


def _as_read(source: RawFile, role: str, kind, fmt: RawFormat):
    """Return the expression that reads a column of polars type `kind` as `role`; DataError for a wrong type."""
    import polars as pl

    value = pl.col(role)
    text = kind in (pl.String, pl.Categorical) or isinstance(kind, pl.Enum)
    if role in ("user", "item"):
        good, expected = kind.is_integer() or text, "integers or strings"
        value = value.cast(pl.Int64 if kind.is_integer() else pl.String, strict=False)
    elif role == "timestamp":
        good = kind.is_integer() or kind in (pl.Float64, pl.Date, pl.Datetime) or kind.is_decimal() or text
        expected = "numbers (Float32 has too few digits), datetimes, dates or text"
        if kind.is_temporal() and good:
            value = _nanoseconds(value.to_physical(), kind)
        elif kind.is_integer():
            value = value.cast(pl.Int64, strict=False)
        elif text:
            value = value.cast(pl.String)
    elif role in fmt.features:
        good, expected, value = _feature_as_read(fmt.features[role][0], value, kind)
    else:
        good, expected = kind.is_numeric() or text, "numbers or text"
        value = value.cast(pl.String if text or fmt.action_codes else pl.Float64, strict=False)
    if not good:
        raise DataError(f"{source.name}, column {fmt.columns[role]}: expected {expected}, got {kind}")
    return value


def _feature_as_read(feature: str, value, kind):
    """Return (whether polars type `kind` is right for this kind of feature, the right types, the expression)."""
    import polars as pl

    def plain(kind) -> bool:
        text = kind in (pl.String, pl.Categorical) or isinstance(kind, pl.Enum)
        return text or kind.is_integer() or kind == pl.Boolean

    if feature == "number":
        return kind.is_numeric() or kind == pl.Boolean, "numbers", value.cast(pl.Float64, strict=False)
    if feature == "category":
        return plain(kind), "text, integers or booleans", value.cast(pl.String, strict=False)
    expected = "lists of text or integers, or text"
    if isinstance(kind, pl.List) and plain(kind.inner):
        return True, expected, value.list.eval(pl.element().cast(pl.String, strict=False)).list.join(BETWEEN)
    return kind == pl.String, expected, value.cast(pl.String, strict=False)


def _nanoseconds(value, kind):
    """Return the expression for datetimes or dates in nanoseconds; null if these do not fit into int64.

    It uses integers, since polars panics on a datetime out of range.
    """
    import polars as pl

    each = 86_400 * 10**9 if kind == pl.Date else 10**9 // times.PER_SECOND[kind.time_unit]
    value = value.cast(pl.Int64)
    most = (2**63 - 1) // each
    return pl.when(value.is_between(-most, most)).then(value) * each


def memory_of(rows: int, fmt: RawFormat) -> int:
    """Return the bytes of memory for reading this number of rows at once."""
    return rows * 8 * (2 + 2 * len(fmt.columns))


def _problem(source: RawFile, row: int, raw, frame, fmt: RawFormat, readings: Readings, place: int) -> str:
    for role, good in checks(frame, fmt, readings).items():
        if frame[row].select(good).item():
            continue
        column = raw[role]
        # As an integer, since a datetime may be out of range.
        original = (column.to_physical() if column.dtype.is_temporal() else column)[row]
        value = frame[role][row]
        number = value if role == "timestamp" and isinstance(value, (int, float)) else None
        text = "" if original is None else str(original)
        message = problem(role, text, fmt, readings, number) or "cannot be read"
        return f"{source.name} row {place + 1}, column {fmt.columns[role]}: {message}"
    return f"{source.name} row {place + 1}: cannot be read"
