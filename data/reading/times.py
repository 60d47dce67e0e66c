"""Read columns of times: choose how to read a column, and convert each value to a number with the same order.

A reading is chosen for a source from its first values; rows with other values are bad. Requires polars, imported inside
the functions that use it.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from datetime import datetime

from data.types import DataError, shown

PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
# The range of plausible times in each unit: from 1973 to 5138 (ns: to the limit of int64). Smaller numbers may be times
# since another origin.
BANDS = {"s": (10**8, 10**11), "ms": (10**11, 10**14), "us": (10**14, 10**17), "ns": (10**17, 2**63 - 1)}
LAST_SECOND = 2**63 // 10**9  # the last second whose nanoseconds fit into int64: in the year 2262

INTEGER, DECIMAL = r"^ *[+-]?[0-9]+$", r"^ *[+-]?[0-9]+(\.[0-9]*)?$"
ISO = (
    r"^ *(?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2})(?:[Tt ](?P<minute>[0-9]{2}:[0-9]{2})(?::(?P<second>[0-9]{2})"
    r"(?:[.,](?P<fraction>[0-9]{1,9}))?)? ?(?P<zone>[Zz]|UTC|[+-][0-9]{2}(?::?[0-9]{2})?)?)?$"
)
# Integers that are dates: 20240423, 2024042302, 202404230233, 20240423023342.
DIGITS = r"^(?:19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])(?:(?:[01][0-9]|2[0-3])(?:[0-5][0-9]){0,2})?$"
WRITTEN = {"iso": "a time like 2024-04-23T02:33:42Z", "integer": "an integer", "decimal": "a number"}


@dataclass(frozen=True)
class Reading:
    """The way of reading the times of a source.

    kind: integer, decimal (numbers with a fraction), iso, format (text in `format`) or datetime (a Parquet type); unit:
    s, ms, us or ns, the unit of the resulting numbers since 1970; low: numbers from 10^8 to `low` look like times in
    another unit, 0 if unknown; format: the user's format, for kind format.
    """

    kind: str = "integer"
    unit: str = "s"
    low: int = 0
    format: str | None = None

    @property
    def latest(self) -> int:
        """The end of the range of valid times, exclusive."""
        return BANDS[self.unit][1]

    @property
    def expected(self) -> str:
        """A description of correct values, for messages."""
        return f"a time like {self.format}" if self.kind == "format" else WRITTEN.get(self.kind, "a time")


SECONDS = Reading()
FULL_HOUR = "=%M"  # appended to a format that ends with the hour
DATES = ("%d-%m-%Y", "%m-%d-%Y", "%Y-%m-%d", "%d-%m-%y", "%m-%d-%y")
CLOCKS = (
    "",
    " %H:%M",
    " %H:%M:%S",
    " %H:%M:%S.%f",
    " %I:%M %p",
    " %I:%M:%S %p",
    "T%H:%M:%S",
    "T%H:%M:%S.%f",
    " %H:%M:%S %z",
)


def choose(
    values, named_unit: str | None, named_column: bool, format: str | None = None, numbers: bool = True
) -> Reading:
    """Choose the reading for the first values of a column of text or numbers (a polars Series); DataError if none fits.

    named_unit: the unit set by the user or the format, or None. named_column: the user may set the column's unit and
    format. numbers: whether text may be numbers.
    """
    import polars as pl

    if values.dtype != pl.String:
        kind = "integer" if values.dtype.is_integer() else "decimal"
        return _with_unit(kind, values, named_unit, named_column)
    if format is not None:
        polars_format(format)  # check it
        return Reading("format", "ns", format=format)
    counts = {
        name: values.str.contains(pattern).sum() or 0
        for name, pattern in (("integer", INTEGER), ("decimal", DECIMAL), ("iso", ISO))
    }
    fractions = counts["decimal"] - counts["integer"]
    if not named_column:
        return _with_unit(
            "integer", values.str.strip_chars_start(" ").cast(pl.Int64, strict=False), named_unit, named_column
        )
    if counts["iso"] > counts["decimal"] or not numbers:
        return Reading("iso", "ns")
    kind = "decimal" if 10 * fractions >= max(1, counts["integer"]) else "integer"
    return _with_unit(
        kind, values.str.strip_chars_start(" ").cast(pl.Float64, strict=False), named_unit, named_column, values
    )


def _with_unit(kind: str, values, named_unit: str | None, named_column: bool, text=None) -> Reading:
    import polars as pl

    numbers = values.drop_nulls()
    if numbers.dtype.is_float():
        numbers = numbers.filter(numbers.is_finite())
    counts = {unit: ((numbers >= low) & (numbers < high)).sum() for unit, (low, high) in BANDS.items()}
    band: str | None = max(counts, key=counts.__getitem__)
    if band and counts[band] <= (numbers < BANDS["s"][0]).sum():
        band = None
    if named_unit and band and PER_SECOND[band] < PER_SECOND[named_unit]:
        low, high = BANDS[band]
        example = numbers.filter((numbers >= low) & (numbers < high))[0]
        key = "data.columns.timestamp_unit" if named_column else "timestamps"
        raise DataError(f"{key}: expected {NAMES[named_unit]}, got times like {NAMES[band]}, e.g. {example:.15g}")
    if named_column and not named_unit and kind == "integer" and len(numbers):
        digits = numbers.cast(pl.Int64, strict=False).cast(pl.String).drop_nulls()
        if len(digits) and digits.str.contains(DIGITS).all():
            raise DataError(
                f"data.columns.timestamp_format: the times look like dates, e.g. {digits[0]}; set it to "
                f'"{"%Y%m%d%H%M%S"[: len(digits[0]) - 2]}" (or set timestamp_unit, if they are not dates)'
            )
    unit = named_unit or band or "s"
    return Reading(kind, unit, BANDS[unit][0] if band == unit and unit != "s" else 0)


def polars_format(format: str) -> str:
    """Translate a format of `datetime.strptime` to one of polars; DataError for a format that gives no time."""
    import polars as pl

    key = "data.columns.timestamp_format"
    text = format.replace(".%f", "%.f").replace(",%f", ",%.f").replace("%z", "%#z")
    if re.search("%[de]", format) and "%H" in format and "%M" not in format:
        text += FULL_HOUR  # polars cannot read an hour without minutes
    directives = re.findall(r"%[.#:0-9]*([A-Za-z])", text)
    if not set(directives) & set("YyFDsc"):
        raise DataError(f"{key}: {shown(format)} has no year, like %Y")
    if "Z" in directives:
        raise DataError(f"{key}: %Z, the name of a zone, cannot be read; %z reads +05:30 and Z")
    if "%f" in text:
        raise DataError(
            f'{key}: write the fraction of a second as ".%f", or without a point as "%3f", "%6f" or "%9f" (its number '
            f"of digits), got {shown(format)}"
        )
    try:
        pl.Series(["x"]).str.to_datetime(text.replace(",%.f", "%.f"), strict=False, time_unit="us")
    except pl.exceptions.PolarsError as error:
        raise DataError(f"{key}: {shown(format)}: {shown(str(error).splitlines()[0], 200)}") from None
    return text


def format_of(text: str) -> str | None:
    """Return a format of `datetime.strptime` for this text, or None; the day is before the month if both fit."""
    for date, time in itertools.product(DATES, CLOCKS):
        for separator in ".", "/", "-":
            format = date.replace("-", separator) + time
            try:
                datetime.strptime(text.strip(), format)
            except ValueError:
                continue
            return format
    return None


def from_text(value, reading: Reading):
    """Return the polars expression of the numbers of text values; null for text that does not fit the reading."""
    import polars as pl

    bare = value.str.strip_chars_start(" ")
    if reading.kind == "integer":
        return pl.when(value.str.contains(INTEGER)).then(bare.str.strip_prefix("+")).cast(pl.Int64, strict=False)
    if reading.kind == "decimal":
        number = pl.when(value.str.contains(DECIMAL)).then(bare.str.strip_prefix("+"))
        return number.cast(pl.Decimal(38, 9), strict=False)
    if reading.kind == "format":
        return _from_format(value, polars_format(reading.format or ""))
    part = value.str.extract_groups(ISO).struct.field
    text = part("date") + "T" + part("minute").fill_null("00:00") + ":" + part("second").fill_null("00")
    seconds = text.str.to_datetime("%Y-%m-%dT%H:%M:%S", strict=False, time_unit="us").dt.epoch("s")
    zone = part("zone").fill_null("")
    digits = zone.str.replace_all("[^0-9]", "").str.pad_end(4, "0")
    offset = digits.str.slice(0, 2).cast(pl.Int64) * 3600 + digits.str.slice(2, 2).cast(pl.Int64) * 60
    seconds = seconds - pl.when(zone.str.starts_with("-")).then(-offset).otherwise(offset)
    fraction = part("fraction").fill_null("").str.pad_end(9, "0").cast(pl.Int64)
    return _in_nanoseconds(seconds, fraction)


def _from_format(value, format: str):
    """Return the polars expression of the nanoseconds of text in a format; null if they do not fit into int64."""
    import polars as pl

    if format.endswith(FULL_HOUR):
        value = value + FULL_HOUR.replace("%M", "00")
    if ",%.f" in format:
        format, value = format.replace(",%.f", "%.f"), value.str.replace_all(r",([0-9]{1,9})", ".$1")
    seconds = value.str.to_datetime(format, strict=False, time_unit="us").dt.epoch("s")
    inside = seconds.is_between(-LAST_SECOND, LAST_SECOND, closed="none")
    if not re.search(r"%[.0-9]*f", format):
        return pl.when(inside).then(seconds) * 10**9
    return pl.when(inside).then(value).str.to_datetime(format, strict=False, time_unit="ns").dt.epoch("ns")


def _in_nanoseconds(seconds, fraction):
    import polars as pl

    return pl.when(seconds.is_between(-LAST_SECOND, LAST_SECOND, closed="none")).then(seconds) * 10**9 + fraction


def is_good(value, reading: Reading):
    """Return the polars expression that is true for valid times."""
    good = (value >= 0) & (value < reading.latest)
    if reading.low:
        good &= ~value.is_between(BANDS["s"][0], reading.low, closed="left")
    return good


def problem(number: int | float, reading: Reading, named_column: bool) -> str | None:
    """Return the fault of a number as a time, or None."""
    name = NAMES[reading.unit]
    if number < 0:
        return f"expected a timestamp >= 0, got {number}"
    if number >= reading.latest:
        if reading.kind not in ("integer", "decimal"):
            return "expected a time before the year 2262"
        hint = (
            "; if these are milliseconds set data.columns.timestamp_unit to ms"
            if named_column and reading.unit == "s"
            else ""
        )
        return f"expected {name}, got {number}{hint}"
    if reading.low and BANDS["s"][0] <= number < reading.low:
        other = next(unit for unit, (low, high) in BANDS.items() if low <= number < high)
        return f"expected {name}, got {number}, which looks like {NAMES[other]}"
    return None


def to_seconds(column, unit: str):
    """Convert a column of numbers >= 0 (integers, decimals or floats) in a unit to integer seconds, numpy int64."""
    import polars as pl

    integers = column if column.dtype == pl.Int64 else column.cast(pl.Int64)  # truncation rounds down for numbers >= 0
    return integers.to_numpy() // PER_SECOND[unit]
