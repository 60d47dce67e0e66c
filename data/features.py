"""Features as they were read: of every item, user or event the values that it has, numbered.

numpy alone; letters: R rows (items, users or events), S values of all rows, n distinct values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

ENTITIES = ("items", "users", "events")
KINDS = ("category", "list", "number")


@dataclass(frozen=True, eq=False)
class Feature:
    """The values of one feature, jagged by row: a row of a category or a number has at most one.

    entity   items, users or events
    name     of the feature
    kind     category, list or number
    values   [n] distinct values, ascending: text, or float64 for numbers
    codes    [S] int32, places in `values`
    offsets  [R+1] int64: the codes of row r are offsets[r] .. offsets[r+1]-1
    """

    entity: str
    name: str
    kind: str
    values: np.ndarray
    codes: np.ndarray
    offsets: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """[S] int64: the row of each code."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def take(self, index: np.ndarray) -> Feature:
        """The feature of the rows `index` [M] int64; of a row that is -1, no value."""
        known = index >= 0
        lengths = np.where(known, np.diff(self.offsets, append=self.offsets[-1])[index], 0)
        begin = np.where(known, self.offsets[index], 0)
        offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
        places = np.repeat(begin - offsets[:-1], lengths) + np.arange(offsets[-1])
        return dataclasses.replace(self, codes=self.codes[places], offsets=offsets)


def feature_of(entity: str, name: str, kind: str, count: int, rows: np.ndarray, values: np.ndarray) -> Feature:
    """The feature whose row rows[s] has the value values[s], of `count` rows.

    rows: [S] int64, ascending. values: [S], text or float64. A value that a row has twice counts once.
    """
    distinct, codes = np.unique(values, return_inverse=True)
    return numbered(entity, name, kind, count, rows, codes, distinct)


def numbered(
    entity: str, name: str, kind: str, count: int, rows: np.ndarray, codes: np.ndarray, values: np.ndarray
) -> Feature:
    """`feature_of` values that have been numbered: codes [S] are places in `values` [n], ascending and distinct."""
    rows, codes = np.asarray(rows, np.int64), np.asarray(codes, np.int32)
    if kind == "list" and len(rows):
        _, first = np.unique(rows * max(1, len(values)) + codes, return_index=True)
        rows, codes = rows[np.sort(first)], codes[np.sort(first)]
    offsets = np.append(0, np.cumsum(np.bincount(rows, minlength=count))).astype(np.int64)
    if kind != "number" and values.dtype.kind != "U":
        values = values.astype(np.str_)
    return Feature(entity, name, kind, values, codes, offsets)


def taken(
    features: Iterable[Feature],
    items: np.ndarray | None = None,
    users: np.ndarray | None = None,
    events: np.ndarray | None = None,
) -> tuple[Feature, ...]:
    """The features of the items, users and events with these indices; None leaves those of an entity as they are."""
    index = {"items": items, "users": users, "events": events}
    return tuple(f if (rows := index[f.entity]) is None else f.take(rows) for f in features)
