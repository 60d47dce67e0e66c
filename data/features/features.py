"""Define `Feature`: the values of a feature of items, users or events, encoded as codes of distinct values.

Requires only numpy. Letters: R rows (items, users or events), S values of all rows, n distinct values, W the size of a
vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from data.errors import UserError

ENTITIES = ("items", "users", "events")
KINDS = ("category", "list", "number")
VECTOR = "vector"  # the kind of a feature whose values are vectors


@dataclass(frozen=True, eq=False)
class Feature:
    """The values of a feature, jagged by row. A row of a category, number or vector has at most one value.

    entity   items, users or events
    name     the name of the feature
    kind     category, list, number or vector
    values   [n] distinct values, ascending: text, or float64 for numbers. For vectors: [n, W] float16, of length one or
             zero, in the order of the items, often memory-mapped
    codes    [S] int32, indices into `values`
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
        """The row of each code, [S] int64."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def take(self, index: np.ndarray) -> Feature:
        """Return the feature of the rows `index` [M] int64; an index of -1 gives a row without values."""
        known = index >= 0
        lengths = np.where(known, np.diff(self.offsets, append=self.offsets[-1])[index], 0)
        begin = np.where(known, self.offsets[index], 0)
        offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
        places = np.repeat(begin - offsets[:-1], lengths) + np.arange(offsets[-1])
        return dataclasses.replace(self, codes=self.codes[places], offsets=offsets)

    def followed_by(self, other: Feature) -> Feature:
        """Return the feature with the rows of `other` after these; not for vectors."""
        values = np.union1d(self.values, other.values)
        both = [np.searchsorted(values, one.values)[one.codes] for one in (self, other)]
        offsets = np.concatenate([self.offsets, self.offsets[-1] + other.offsets[1:]])
        return dataclasses.replace(self, values=values, codes=np.concatenate(both).astype(np.int32), offsets=offsets)

    def joined(self, other: Feature) -> Feature:
        """Return the feature with the values of both in each row; `other` has the same number of rows."""
        rows = np.concatenate([self.rows, other.rows])
        order = np.argsort(rows, kind="stable")
        if self.kind == VECTOR:
            if not len(other.codes):
                return self
            if self.values.shape[1] != other.values.shape[1]:
                widths = self.values.shape[1], other.values.shape[1]
                raise UserError(f"{self.name}: expected vectors of {widths[1]} numbers, got {widths[0]}")
            values = np.concatenate([self.values, other.values[other.codes]])
            codes = np.concatenate([self.codes, len(self.values) + np.arange(len(other.codes))])
            return numbered(self.entity, self.name, self.kind, len(self.offsets) - 1, rows[order], codes[order], values)
        values = np.concatenate([self.values[self.codes], other.values[other.codes]])
        return feature_of(self.entity, self.name, self.kind, len(self.offsets) - 1, rows[order], values[order])


def feature_of(entity: str, name: str, kind: str, count: int, rows: np.ndarray, values: np.ndarray) -> Feature:
    """Build a feature of `count` rows from pairs (rows[s], values[s]).

    rows: [S] int64, ascending; values: [S], text or float64. Repeated values of a row count once.
    """
    distinct, codes = np.unique(values, return_inverse=True)
    return numbered(entity, name, kind, count, rows, codes, distinct)


def numbered(
    entity: str, name: str, kind: str, count: int, rows: np.ndarray, codes: np.ndarray, values: np.ndarray
) -> Feature:
    """Build a feature of `count` rows from pairs (rows[s], codes[s]); codes [S] are indices into distinct, ascending
    `values` [n].
    """
    rows, codes = np.asarray(rows, np.int64), np.asarray(codes, np.int32)
    if kind == "list" and len(rows):
        _, first = np.unique(rows * max(1, len(values)) + codes, return_index=True)
        rows, codes = rows[np.sort(first)], codes[np.sort(first)]
    offsets = np.append(0, np.cumsum(np.bincount(rows, minlength=count))).astype(np.int64)
    if kind in ("category", "list") and values.dtype.kind != "U":
        values = values.astype(np.str_)
    return Feature(entity, name, kind, values, codes, offsets)


def select_features(
    features: Iterable[Feature],
    items: np.ndarray | None = None,
    users: np.ndarray | None = None,
    events: np.ndarray | None = None,
) -> tuple[Feature, ...]:
    """Select the rows with these indices of features of items, users and events; None keeps all rows."""
    index = {"items": items, "users": users, "events": events}
    return tuple(f if (rows := index[f.entity]) is None else f.take(rows) for f in features)
