"""Select rows by the user's condition, `data.where`: an SQL expression of polars on the columns of the file.

Requires polars, imported inside the functions that use it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

from data.reading.decimals import swapped
from data.reading.formats import RawFormat
from data.types import DataError, shown

KEY = "data.where"
MARK = "?"  # prefix of a condition's columns in frames whose other columns are roles
KEYWORDS = ("AND", "BETWEEN", "CASE", "ELSE", "ILIKE", "IN", "LIKE", "NOT", "OR", "THEN", "WHEN")
FUNCTIONS = (
    "ABS", "CAST", "CEIL", "COALESCE", "CONCAT", "DATE", "DATE_PART", "ENDS_WITH", "EXTRACT", "FLOOR", "GREATEST", "IF",
    "IFNULL", "LEAST", "LEFT", "LENGTH", "LOWER", "LTRIM", "MOD", "NULLIF", "POW", "REGEXP_LIKE", "REPLACE", "RIGHT",
    "ROUND", "RTRIM", "SIGN", "SQRT", "STARTS_WITH", "STRPTIME", "STRPOS", "SUBSTR", "TRIM", "TRY_CAST", "UPPER",
)  # fmt: skip
OTHER_ROWS = ("SELECT", "OVER", "CURRENT_DATE", "CURRENT_TIME", "CURRENT_TIMESTAMP")
MOST_TYPED = 10  # columns for which both types, number and text, are tried


def checked_condition(where: str) -> tuple[str, ...]:
    """Return the columns in a condition; DataError if it is not a condition on single rows."""
    import polars as pl

    try:
        expression = pl.sql_expr(where)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        hint = " (write numbers in it with a decimal point: 12.5)" if re.search("[0-9],[0-9]", where) else ""
        raise DataError(f"{KEY}: {shown(repr(where))} is not a condition: {_line(error)}{hint}") from None
    names = tuple(dict.fromkeys(expression.meta.root_names()))
    if not names:
        raise DataError(f"{KEY}: {shown(repr(where))} names no column (text is quoted by ', a name by \")")
    # polars can find that an expression needs other rows only when the types of its columns are known.
    unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", where)
    for word, call in re.findall(r"(\w+)\s*(\()?", unquoted):
        if word.upper() in OTHER_ROWS or (call and word.upper() not in KEYWORDS + FUNCTIONS):
            functions = ", ".join(FUNCTIONS)
            raise DataError(
                f"{KEY}: {word}: a condition can use only values of one row, with the functions {functions}"
            )
    return names


def _line(error: BaseException) -> str:
    return shown((str(error).strip() or type(error).__name__).splitlines()[0], 200)


def choose_numbers(sample, fmt: RawFormat) -> tuple[str, ...]:
    """Return the text columns whose values the condition compares as numbers.

    These are the columns whose values in the first rows are all numbers or missing, unless the condition compares them
    with text. sample: a polars frame of the first rows with the condition's columns.
    """
    import polars as pl

    if not fmt.where_columns:
        return ()
    numbers = []
    for name in fmt.where_columns:
        column = sample[MARK + name]
        if column.dtype == pl.String:
            is_number = as_number(column, fmt).is_not_null()
            if is_number.any() and (is_number | _missing(column)).all():
                numbers.append(name)
    failure: Exception | None = None
    for count in range(len(numbers), -1, -1) if len(numbers) <= MOST_TYPED else (len(numbers),):
        for chosen in itertools.combinations(numbers, count):
            try:
                _evaluated(sample, fmt, chosen)
                return chosen
            except pl.exceptions.PolarsError as error:
                failure = failure or error
    raise _unfit(failure, sample, fmt) if failure else DataError(f"{KEY}: too many columns")


def as_number(column, fmt: RawFormat):
    """Return a text column as numbers, null for text that is not a number."""
    import polars as pl

    text = column.str.strip_chars()
    return (text if fmt.decimal == "." else swapped(text)).str.strip_prefix("+").cast(pl.Float64, strict=False)


def _missing(column):
    return column.is_null() | (column.str.strip_chars() == "")


def _evaluated(frame, fmt: RawFormat, numbers: tuple[str, ...]):
    import polars as pl

    columns = {}
    for name in fmt.where_columns:
        column = frame[MARK + name]
        if name in numbers:
            column = as_number(column, fmt)
        elif column.dtype == pl.String:
            column = column.set(column == "", None)
        columns[name] = column
    result = pl.DataFrame(columns).select(pl.sql_expr(fmt.where or "").alias("keep"))["keep"]
    if result.dtype == pl.Null:
        return pl.repeat(False, frame.height, eager=True)
    if result.dtype != pl.Boolean:
        raise DataError(f"{KEY}: {shown(repr(fmt.where))} is not a condition: its result is {result.dtype}")
    return result.fill_null(False)


def _unfit(error: BaseException, frame, fmt: RawFormat) -> DataError:
    """Return the error for a condition that polars cannot evaluate; it says which columns have the wrong type.

    These are the fewest columns with which it can be evaluated if they are numbers in place of text, or text in place
    of another type.
    """
    import polars as pl

    names, first, message = fmt.where_columns[:MOST_TYPED], frame.head(1), f"{KEY}: {_line(error)}"
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            columns = [first[MARK + name] for name in chosen]
            try:
                others = [as_number(c, fmt) if c.dtype == pl.String else c.cast(pl.String) for c in columns]
                _evaluated(first.with_columns(others), fmt, ())
            except (pl.exceptions.PolarsError, DataError):
                continue
            cures = [_cure(name, frame[MARK + name], fmt) for name in chosen]
            return DataError(": ".join([message, "; ".join(filter(None, cures))]).removesuffix(": "))
    return DataError(message)


def _cure(name: str, column, fmt: RawFormat) -> str:
    """Return what a column of a condition has and what cures that; the empty string for text that is all numbers."""
    import polars as pl

    quoted = shown(name if name.isidentifier() else f'"{name}"')
    if column.dtype != pl.String:
        kind = f"{quoted} has type {column.dtype.base_type()}: compare it with"
        if column.dtype.is_temporal():
            return f"{kind} DATE '2024-04-23'"
        return f"{kind} numbers without quotes, or as text with CAST({quoted} AS VARCHAR)"
    values = column.filter(~_missing(column)).str.strip_chars()
    right = as_number(values, fmt).is_not_null()
    if len(values) and fmt.kind == "text" and right.all():
        return ""
    texts = values if right.all() else values.filter(~right)
    what = f"is text, like {shown(repr(texts[0]))}" if len(values) else "has no value in the first rows"
    sign = "," if fmt.decimal == "." else "."
    as_other = as_number(values, dataclasses.replace(fmt, decimal=sign)).is_not_null()
    if len(values) and fmt.kind == "text" and as_other.all():
        return f"{quoted} {what} (set data.decimal to {sign!r})"
    return f"{quoted} {what}: compare it with text in quotes, or as a number with TRY_CAST({quoted} AS DOUBLE)"


def selected(frame, fmt: RawFormat, numbers: tuple[str, ...]):
    """Return (the mask of rows that the condition selects, name of a column -> the mask of its bad values).

    A bad value is text in a column of numbers; its row is selected, so that it is reported. frame: a polars frame with
    the condition's columns; numbers: the result of `choose_numbers`.
    """
    import polars as pl

    if not fmt.where_columns:
        return pl.repeat(True, frame.height, eager=True), {}
    if not frame.height:
        return pl.Series([], dtype=pl.Boolean), {}
    categories = [column for column in frame if column.dtype in (pl.Categorical, pl.Enum)]
    frame = frame.with_columns(column.cast(pl.String) for column in categories if column.name.startswith(MARK))
    wrong = {}
    for name in numbers:
        column = frame[MARK + name]
        if column.dtype == pl.String and (bad := as_number(column, fmt).is_null() & ~_missing(column)).any():
            wrong[name] = bad
    try:
        keep = _evaluated(frame, fmt, numbers)
    except pl.exceptions.PolarsError as error:
        raise _unfit(error, frame, fmt) from None
    for bad in wrong.values():
        keep |= bad
    return keep, wrong


def note_of_condition(left_out: int, rows: int, fmt: RawFormat) -> str:
    """Return a sentence about the rows that a condition left out."""
    return f"{left_out:,} of {rows:,} rows were left out by {KEY}: {shown(fmt.where, 200)}"
