"""Handle decimal commas, and columns with both integers and decimals.

Requires polars, imported inside the functions that use it.
"""

from __future__ import annotations

from data.reading.formats import RawFormat

DECIMAL_COMMA = r"^ *[+-]?[0-9]+,[0-9]*$"
SWAP = str.maketrans(",.", ".,")


def swapped(value):
    """Exchange decimal commas and points in a polars expression or column of text."""
    return value.str.replace_many([",", "."], [".", ","])


def has_fractions(column, fmt: RawFormat) -> bool:
    """Return whether a text column has a number with a fraction, so that its integers are decimals, too."""
    point = "[.]" if fmt.decimal == "." else ","
    return column.str.contains(rf"^ *[+-]?[0-9]+{point}[0-9]*$").any()


def alike_times(frames: list) -> list:
    """Return polars frames with the same type of `timestamp`: decimals if the types differ."""
    import polars as pl

    kinds = {frame.schema.get("timestamp") for frame in frames}
    if len(kinds) == 1:
        return frames
    return [frame.with_columns(pl.col("timestamp").cast(pl.Decimal(38, 9))) for frame in frames]
