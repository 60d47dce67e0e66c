"""Check values of raw files: polars expressions for whole columns, and messages for single bad values."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from data.reading import times
from data.reading.conditions import choose_numbers
from data.reading.decimals import DECIMAL_COMMA, SWAP, has_fractions, swapped
from data.reading.formats import RawFormat
from data.reading.lists import BRACKETS, unreadable, values_in_brackets
from data.reading.times import Reading
from data.types import shown

MAX_ID_LENGTH = 256  # characters; ids are stored at fixed width, so one long id makes the whole column large
MAX_LIST_LENGTH = 65_536  # characters of a list
NUMBERS = r"[0-9 +.,eE-]+"
FLAG = r"^ *\+?[01]$"


@dataclass(frozen=True)
class Readings:
    """The way of reading the columns of a source.

    time: the reading of times; text_actions: whether actions are text; numbers: the text columns that the user's
    condition compares as numbers.
    """

    time: Reading
    text_actions: bool = False
    numbers: tuple[str, ...] = ()


def choose_readings(sample, fmt: RawFormat, numbers_as_text: bool = True) -> Readings:
    """Choose readings from the first rows of a source, a polars frame with the roles as columns; DataError if none fit.

    numbers_as_text: whether times that are text may be numbers, as in a text file.
    """
    import polars as pl

    time = times.SECONDS
    if fmt.decimal == ",":
        texts = [role for role in ("timestamp", "action") if sample.schema.get(role) == pl.String]
        sample = sample.with_columns(
            pl.when(pl.col(role).str.contains(DECIMAL_COMMA))
            .then(swapped(pl.col(role)))
            .otherwise(pl.col(role))
            .alias(role)
            for role in texts
        )
    if "timestamp" in sample.columns:
        time = times.choose(
            sample["timestamp"], fmt.timestamp_unit, fmt.named_columns, fmt.timestamp_format, numbers_as_text
        )
    text = False
    if fmt.named_columns and "action" in sample.columns:
        actions = sample["action"]
        text = fmt.action_codes is not None
        if not text and actions.dtype == pl.String:
            actions = actions.filter(actions.str.strip_chars() != "")
            text = bool(len(actions)) and not actions.cast(pl.Float64, strict=False).is_not_null().any()
    return Readings(time, text, choose_numbers(sample, fmt))


def typed(frame, fmt: RawFormat, readings: Readings):
    """Convert the text columns of a polars frame to their types; null for a wrong value."""
    import polars as pl

    columns = []
    for role, kind in frame.schema.items():
        value = pl.col(role)
        number = value if fmt.decimal == "." else swapped(value)
        bare = value.str.strip_chars_start(" ").str.strip_prefix("+")
        bare_number = number.str.strip_chars_start(" ").str.strip_prefix("+")
        if role == "action" and readings.text_actions:
            value = value.cast(pl.String)
            if fmt.action_codes is not None:
                codes = pl.Series(list(fmt.action_codes.values()), dtype=pl.Int64)
                value = value.replace_strict(pl.Series(list(fmt.action_codes)), codes, default=None)
        elif kind != pl.String:
            pass
        elif role in fmt.features:
            if fmt.features[role][0] == "number":  # missing: null; not a number: NaN
                missing = value.is_null() | (value.str.strip_chars() == "")
                number = bare_number.cast(pl.Float64, strict=False).fill_null(float("nan"))
                value = pl.when(missing).then(None).otherwise(number)
        elif role in ("user", "item"):
            if fmt.integer_ids:
                value = pl.when(value.str.contains(times.INTEGER)).then(bare).cast(pl.Int64, strict=False)
        elif role == "timestamp":
            reading = readings.time
            if reading.kind == "integer" and fmt.named_columns and has_fractions(frame[role], fmt):
                reading = dataclasses.replace(reading, kind="decimal")
            value = times.from_text(number if reading.kind in ("integer", "decimal") else value, reading)
        elif role == "action":
            value = bare_number.cast(pl.Float64, strict=False)
        else:
            value = pl.when(value.str.contains(FLAG)).then(bare).cast(pl.UInt8, strict=False)
        columns.append(value.alias(role))
    return frame.select(columns)


def checks(frame, fmt: RawFormat, readings: Readings) -> dict:
    """Map each role to a polars expression that is true for good values of the typed frame, and never null."""
    import polars as pl

    checks = {}
    for role, kind in frame.schema.items():
        value = pl.col(role)
        good = value.is_not_null()
        if role in fmt.features:  # features may be missing
            if kind == pl.String:
                most = MAX_LIST_LENGTH if fmt.features[role][0] == "list" else MAX_ID_LENGTH
                good = (value.str.len_chars() <= most) & ~value.str.contains("\0", literal=True)
                if fmt.features[role][0] == "list" and (wrong := unreadable(frame[role])):
                    good &= ~value.is_in(wrong)
            else:
                good = value.is_finite()
            good |= value.is_null()
        elif kind == pl.String:  # ids, and actions that are text
            good &= (value != "") & (value.str.len_chars() <= MAX_ID_LENGTH)
            good &= ~value.str.contains(
                "\0", literal=True
            )  # numpy drops a trailing NUL, so that two ids may become equal
        elif role == "timestamp":
            good &= times.is_good(value, readings.time)
        elif role == "action":
            code = value * fmt.action_scale
            good &= code.is_between(0, fmt.most_action)
            if not kind.is_integer():
                good &= code == code.floor()
        elif role not in ("user", "item"):  # a flag
            good &= value <= 1
        checks[role] = good.fill_null(False)
    return checks


def problem(role: str, value: str, fmt: RawFormat, readings: Readings, number: float | None = None) -> str | None:
    """Return the fault of a value, or None. value: the text in the file; number: the number, if it is not text."""
    if value == "" and role not in fmt.features:
        return "the value is missing"
    got, point = shown(repr(value)), value if fmt.decimal == "." else value.translate(SWAP)
    if re.fullmatch(r" *[+-]?[0-9]*([.,])[0-9]+", value) and fmt.decimal not in value:
        got += f" (set {fmt.section}.decimal to {'.' if fmt.decimal == ',' else ','!r})"
    if role in fmt.features:
        value = point if fmt.features[role][0] == "number" else value
        return _feature_problem(fmt.features[role][0], value, got)
    if role == "action" and readings.text_actions:
        if fmt.action_codes is not None:
            codes = ", ".join(fmt.action_codes)
            return None if value in fmt.action_codes else f"expected one of {shown(codes, 200)}, got {got}"
        return _text_problem(value, got, "an action")
    if role in ("user", "item"):
        return _integer_problem(value, got) if fmt.integer_ids else _text_problem(value, got, "an id")
    if role == "timestamp":
        value = point if readings.time.kind in ("integer", "decimal") else value
        return _time_problem(value, got, fmt, readings.time, number)
    if role == "action":
        try:
            # Unlike polars, Python accepts blanks after a number, and underscores in it.
            code = float(point) * fmt.action_scale if re.fullmatch(r" *[^\s_]+", point) else -1.0
        except ValueError:
            code = -1.0
        kind = "an integer" if fmt.action_scale == 1 else f"a multiple of 1/{fmt.action_scale}"
        most = f"{fmt.most_action / fmt.action_scale:.15g}"
        return None if 0 <= code <= fmt.most_action and code.is_integer() else f"expected {kind} 0 to {most}, got {got}"
    return None if re.fullmatch(FLAG[1:-1], value) else f"expected 0 or 1, got {got}"


def not_decoded(value: str, fmt: RawFormat, encoding: str) -> str:
    """Return the message for a value that is not valid in the encoding of its file."""
    got = shown(repr(value.encode("utf-8", "surrogateescape"))[1:])
    hint = "" if fmt.encoding else f" (if the file has another encoding, set {fmt.section}.encoding to it)"
    return f"not valid {named(encoding)}: {got}{hint}"


def named(encoding: str) -> str:
    """Return the name of an encoding for a message."""
    return "UTF-8" if encoding.startswith("utf-8") else encoding


def _feature_problem(kind: str, value: str, got: str) -> str | None:
    if kind == "number":
        try:
            finite = math.isfinite(float(value)) if re.fullmatch(r" *[^\s_]+", value) else not value.strip()
        except ValueError:
            finite = False
        return None if finite else f"expected a number, got {got}"
    if kind == "list" and len(value) > MAX_LIST_LENGTH:
        return f"a list of more than {MAX_LIST_LENGTH:,} characters: {got}"
    if kind == "list" and re.search(BRACKETS, value) and values_in_brackets(value) is None:
        return f"expected values between separators, or a list like ['a', 'b'], got {got}"
    return None if kind == "list" and "\0" not in value else _text_problem(value, got, "a value")


def _text_problem(value: str, got: str, noun: str) -> str | None:
    if len(value) > MAX_ID_LENGTH:
        return f"{noun} of more than {MAX_ID_LENGTH} characters: {got}"
    return f"{noun} with a NUL character" if "\0" in value else None


def _time_problem(value: str, got: str, fmt: RawFormat, reading: Reading, number: float | None) -> str | None:
    decimals = reading.kind == "decimal" or (reading.kind == "integer" and fmt.named_columns)
    if number is None and decimals and re.fullmatch(times.DECIMAL[1:-1], value):
        number = float(value) if "." in value or len(value) > 100 else int(value)
        if abs(number) >= 2**63:
            return f"expected a 64-bit integer, got {got}"
    elif number is None and reading.kind == "integer":
        if wrong := _integer_problem(value, got):
            return wrong + _format_hint(value, fmt, reading)
        number = int(value)
    if number is not None and number == number:
        return times.problem(number, reading, fmt.named_columns)
    years = " from 1970 to 2262" if reading.kind in ("iso", "format") else ""
    return f"expected {reading.expected}{years}, got {got}{_format_hint(value, fmt, reading)}"


def _format_hint(value: str, fmt: RawFormat, reading: Reading) -> str:
    """Return a hint at the option for times in other forms if the value may be one, or the empty string."""
    if not fmt.named_columns or reading.kind not in times.WRITTEN:
        return ""
    if format := times.format_of(value):
        return f" (dates like this need data.columns.timestamp_format, for example {format!r})"
    other = re.search("[0-9]", value) and not re.fullmatch(NUMBERS, value) and not re.search(times.ISO, value)
    return " (times in another form need data.columns.timestamp_format)" if other else ""


def _integer_problem(value: str, got: str) -> str | None:
    if not re.fullmatch(r" *[+-]?[0-9]+", value):  # polars skips spaces before a number
        return f"expected an integer, got {got}"
    # Python does not parse integers of thousands of digits.
    if len(value) > 100 or not -(2**63) <= int(value) < 2**63:
        return f"expected a 64-bit integer, got {got}"
    return None
