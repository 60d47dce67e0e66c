"""Read lists that are text: values with separators, or in brackets as in Python, JSON, NumPy and Postgres."""

from __future__ import annotations

import ast
import functools
import json
import re

BETWEEN = "\x1f"  # the internal separator of the values of a list
BRACKETS = r"^\s*(?:\[[\s\S]*\]|\{[\s\S]*\}|\(\s*['\"][\s\S]*\))\s*$"
SEVERAL = r"^\s*[\[{][^,]*,[\s\S]*[\]}]\s*$"  # brackets around values with a comma between them
# A value and the comma after it, which NumPy omits between quoted values.
VALUE = re.compile(
    r"""\s*('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,'"\[\](){}][^,\[\](){}]*)\s*(?:,\s*|(?=['"])|$)""", re.S
)
NUMBERS = re.compile(r"[-+.\deE]+(?:\s+[-+.\deE]+)+")
MISSING = ("None", "null", "NULL", "nan", "NaN")


@functools.lru_cache(maxsize=1 << 16)
def values_in_brackets(text: str) -> tuple[str, ...] | None:
    """Return the values of a list in brackets without missing ones; None if the list cannot be read."""
    content, values, place = text.strip()[1:-1].strip(), [], 0
    if NUMBERS.fullmatch(content):
        return tuple(content.split())
    while place < len(content):
        if (match := VALUE.match(content, place)) is None:
            return None
        place, value = match.end(), match[1].strip()
        if value[0] in "'\"":
            try:
                value = value[1:-1] if "\\" not in value else _unescaped(value)
                value.encode()
            except (ValueError, SyntaxError):
                return None
        elif value in MISSING:
            continue
        values.append(value)
    return tuple(values)


def _unescaped(value: str) -> str:
    return json.loads(value) if value[0] == '"' else ast.literal_eval(value)


def unreadable(column) -> list[str]:
    """Return the distinct texts of a polars column that are lists in brackets, but cannot be read."""
    return [text for text in _in_brackets(column) if values_in_brackets(text) is None]


def separated(column, separator: str):
    """Return a polars text column of lists with BETWEEN as the separator of values."""
    import polars as pl

    plain = column.str.replace_all(separator, BETWEEN, literal=True)
    if not (texts := _in_brackets(column)):
        return plain
    joined = pl.Series([BETWEEN.join(values_in_brackets(text) or ()) for text in texts], dtype=pl.String)
    frame = column.to_frame("text").with_columns(plain.alias("plain"))
    lists = pl.col("text").replace_strict(pl.Series(texts, dtype=pl.String), joined, default=None)
    return frame.select(lists.fill_null(pl.col("plain")).alias(column.name))[column.name]


def _in_brackets(column) -> list[str]:
    return column.filter(column.str.contains(BRACKETS)).unique(maintain_order=True).to_list()


def mostly_lists(distinct) -> str | None:
    """Return an example if most texts are lists of several values, else None; distinct: a polars column."""
    lists = distinct.filter(distinct.str.contains(SEVERAL))
    return lists[0] if len(lists) * 2 > len(distinct) else None
