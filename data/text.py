"""Text files -> polars frames with the columns user, item, timestamp and action; the first bad row is named.

The rows' shape is checked first, then the file is parsed as a whole, strictly; only if that fails is it searched.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .formats import RawFormat
from .lines import check_rows, find_bad_row, first_line, read_header, split_row
from .types import DataError, did_you_mean, shown
from .values import checks, problem


def read_text(file: Path, fmt: RawFormat):
    """One file -> polars frame; DataError with the bad line, column and value."""
    import polars as pl

    if fmt.separator == " " and b"\t" in first_line(file):
        fmt = dataclasses.replace(fmt, separator="\t")
    names = read_header(file, fmt) if fmt.header else list(range(len(fmt.columns)))
    require_columns(file, fmt, names)
    check_rows(file, fmt, len(names))
    parse = _parser(fmt)

    def good(rows: bytes) -> bool:
        try:
            return is_valid(parse(header + rows), fmt)
        except pl.exceptions.PolarsError:
            return False

    reason = "a value is missing or out of range"
    try:
        frame = parse(file)
        if is_valid(frame, fmt):
            return finish(frame, fmt)
    except pl.exceptions.PolarsError as error:
        reason = shown(str(error).strip().splitlines()[0], 200)
    header = first_line(file) if fmt.header else b""
    if (bad := find_bad_row(file, fmt, good)) is None:
        raise DataError(f"{file}: cannot be read: {reason}")
    line, row = bad
    where = f"{file.name} line {line}"
    fields = _fields(row, fmt)
    for role, column in wanted(fmt).items():
        index = names.index(column)
        if index < len(fields) and (what := problem(role, fields[index], fmt)):
            raise DataError(f"{where}, column {column if fmt.header else role}: {what}")
    raise DataError(f"{where}: cannot be read: {reason}")


def wanted(fmt: RawFormat) -> dict[str, str | int]:
    """role or flag -> source column."""
    return {**fmt.columns, **{flag: flag for flag in fmt.flags}}


def require_columns(file: Path, fmt: RawFormat, present: list) -> None:
    """DataError unless every column that the format wants is there, once."""
    for role, column in wanted(fmt).items():
        if column not in present:
            owned = f" (data.columns.{role})" if fmt.own_columns else ""
            has = ", ".join(shown(c) for c in present[:20])[:400]
            raise DataError(f"{file}: no column {column!r}{owned}{did_you_mean(column, present)}; it has {has}")
        if present.count(column) > 1:
            raise DataError(f"{file}: the header names column {column!r} twice")


def _parser(fmt: RawFormat):
    """A file's path or bytes -> frame with the roles as columns; PolarsError for what is not of its type."""
    import polars as pl

    # polars splits at one byte: with ":" for "::" every other column is empty.
    step = len(fmt.separator)
    id_type = pl.Int64 if fmt.integer_ids else pl.String
    types = {"user": id_type, "item": id_type, "timestamp": pl.Int64, "action": pl.Float64}
    columns = wanted(fmt)
    if fmt.header:
        layout = {"schema_overrides": {c: types.get(role, pl.UInt8) for role, c in columns.items()}}
        layout["columns"] = list(columns.values())
    else:
        schema = {str(i): pl.String for i in range((len(columns) - 1) * step + 1)}
        columns = {role: str(i * step) for role, i in columns.items()}
        layout = {"schema": schema | {c: types[role] for role, c in columns.items()}}
        layout["columns"] = sorted(int(c) for c in columns.values())

    def parse(source):
        frame = pl.read_csv(
            source,
            separator=fmt.separator[0],
            has_header=fmt.header,
            quote_char='"' if fmt.quoting else None,
            infer_schema=False,
            **layout,
        )
        if not fmt.header:
            frame.columns = [str(c) for c in layout["columns"]]
        return frame.select(pl.col(column).alias(role) for role, column in columns.items())

    return parse


def is_valid(frame, fmt: RawFormat) -> bool:
    return all(frame.select(check.all().alias(role) for role, check in checks(frame, fmt).items()).row(0))


def finish(frame, fmt: RawFormat):
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


def _fields(row: bytes, fmt: RawFormat) -> list[str]:
    return split_row(row.decode("utf-8", "surrogateescape").removeprefix("\ufeff").rstrip("\r\n"), fmt)
