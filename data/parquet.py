"""Parquet files -> polars frames with the columns user, item, timestamp and action; the first bad row is named."""

from __future__ import annotations

from pathlib import Path

from .formats import RawFormat
from .text import finish, require_columns
from .types import DataError, shown
from .values import checks, problem


def read_parquet(file: Path, fmt: RawFormat):
    """One file -> polars frame; DataError with the bad row, column and value."""
    import polars as pl

    try:
        schema = pl.read_parquet_schema(file)
        require_columns(file, fmt, list(schema))
        frame = pl.read_parquet(file, columns=list(fmt.columns.values()))
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = shown((str(error).strip() or type(error).__name__).splitlines()[0], 200)
        raise DataError(f"{file}: not a readable Parquet file: {reason}") from error
    raw, frame = (
        frame,
        frame.select(_cast(file, role, column, schema[column], fmt) for role, column in fmt.columns.items()),
    )
    for role, good in checks(frame, fmt).items():
        row = frame.select((~good).arg_true().first()).item()
        if row is not None:
            original, value = raw[fmt.columns[role]][row], frame[role][row]
            what = problem(role, "" if original is None else str(original if value is None else value), fmt)
            raise DataError(f"{file.name} row {row + 1}, column {fmt.columns[role]}: {what}")
    return finish(frame, fmt)


def _cast(file: Path, role: str, column: str, kind, fmt: RawFormat):
    """The expression that reads a column of polars type `kind` as `role`; DataError for a type that cannot be it."""
    import polars as pl

    value = pl.col(column)
    if role in ("user", "item"):
        good = kind.is_integer() or kind in (pl.String, pl.Categorical) or isinstance(kind, pl.Enum)
        expected, target = "integers or strings", pl.Int64 if kind.is_integer() else pl.String
    elif role == "timestamp":
        good = kind.is_integer() or isinstance(kind, pl.Datetime)
        expected, target = "integers or a datetime", pl.Int64
        if isinstance(kind, pl.Datetime):
            value = value.dt.epoch(fmt.timestamp_unit)
    else:
        good, expected, target = kind.is_numeric(), "numbers", pl.Float64
    if not good:
        raise DataError(f"{file.name}, column {column}: expected {expected}, got {kind}")
    return value.cast(target, strict=False).alias(role)
