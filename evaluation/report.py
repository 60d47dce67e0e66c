"""Define the tables of a report."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """A table of a report.

    short: the columns to show on a terminal, empty for none; note: sentences about it; words: the cells are text.
    """

    title: str
    headings: list[str]
    rows: list[list[str]]
    short: Sequence[int] = ()
    note: str = ""
    words: bool = False


def cells(values: dict, names: list[str] | tuple[str, ...]) -> list[str]:
    """Format metrics as the cells of a row; `-` for a metric without a value."""
    return [f"{values[name]:.4f}" if math.isfinite(values[name]) else "-" for name in names]
