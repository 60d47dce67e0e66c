"""What one value of a raw file may be: as polars expressions for whole columns, and in words for the first bad one."""

from __future__ import annotations

import re

from .formats import RawFormat
from .types import shown

MAX_SECONDS = 10**11  # the year 5138; anything later is taken for milliseconds read as seconds
MAX_ID_LENGTH = 256  # characters; ids are stored at fixed width, so that one absurd id would blow up the whole column


def checks(frame, fmt: RawFormat) -> dict:
    """role -> expression, true for each row of the polars frame with a good value and never null."""
    import polars as pl

    checks = {}
    for role, kind in frame.schema.items():
        value = pl.col(role)
        good = value.is_not_null()
        if role in ("user", "item") and kind == pl.String:
            good &= (value != "") & (value.str.len_chars() <= MAX_ID_LENGTH)
            good &= ~value.str.contains("\0", literal=True)  # numpy drops one at the end: two ids would become one
        elif role == "timestamp":
            good &= value.is_between(0, _latest(fmt), closed="left")
        elif role == "action":
            code = value * fmt.action_scale
            good &= code.is_between(0, fmt.most_action) & (code == code.floor())
        elif role in fmt.flags:
            good &= value <= 1
        checks[role] = good.fill_null(False)
    return checks


def _latest(fmt: RawFormat) -> int:
    return MAX_SECONDS * (1000 if fmt.timestamp_unit == "ms" else 1)


def problem(role: str, value: str, fmt: RawFormat) -> str | None:
    """What is wrong with one value, as it stands in the file, or None."""
    if value == "":
        return "the value is missing"
    if any("\udc80" <= c <= "\udcff" for c in value):
        return f"not valid UTF-8: {shown(ascii(value))}"
    got = shown(repr(value))
    if role in ("user", "item"):
        if fmt.integer_ids:
            return _integer_problem(value, got)
        if len(value) > MAX_ID_LENGTH:
            return f"an id of more than {MAX_ID_LENGTH} characters: {got}"
        return "an id with a NUL character" if "\0" in value else None
    if role == "timestamp":
        return _integer_problem(value, got) or _time_problem(int(value), fmt)
    if role == "action":
        try:
            code = float(value) * fmt.action_scale
        except ValueError:
            code = -1.0
        kind = "an integer" if fmt.action_scale == 1 else f"a multiple of 1/{fmt.action_scale}"
        most = f"{fmt.most_action / fmt.action_scale:.15g}"
        return None if 0 <= code <= fmt.most_action and code.is_integer() else f"expected {kind} 0 to {most}, got {got}"
    return None if re.fullmatch(r" *\+?[01]", value) else f"expected 0 or 1, got {got}"


def _time_problem(time: int, fmt: RawFormat) -> str | None:
    if time < 0:
        return f"expected a timestamp >= 0, got {time}"
    if time >= _latest(fmt):
        hint = "; if these are milliseconds set data.columns.timestamp_unit to ms" if fmt.own_columns else ""
        return f"expected {'milliseconds' if fmt.timestamp_unit == 'ms' else 'seconds'}, got {time}{hint}"
    return None


def _integer_problem(value: str, got: str) -> str | None:
    if not re.fullmatch(r" *[+-]?[0-9]+", value):  # polars skips spaces before a number
        return f"expected an integer, got {got}"
    # Python refuses to read an integer of thousands of digits.
    if len(value) > 100 or not -(2**63) <= int(value) < 2**63:
        return f"expected a 64-bit integer, got {got}"
    return None
