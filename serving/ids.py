"""Convert ids between the form that callers use and the internal one.

Items become rows of the item table. A user is a text inside, so that 7 and "7" are one user, whether the id comes from
Python, from a saved store or over the wire.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np

from data.types import shown
from serving.errors import InvalidRequest, UnknownItem

NAMED = 5  # ids that an error names


def array_of_ids(name: str, ids: object, dimensions: int = 1) -> np.ndarray:
    """Return `ids` as an array of int64 or text; InvalidRequest for other types and another number of dimensions."""
    try:
        array = np.asarray(ids)
    except ValueError:
        raise InvalidRequest(f"{name}: expected rows of one length") from None
    if array.ndim != dimensions:
        raise InvalidRequest(f"{name}: expected {dimensions} dimension{'s'[: dimensions - 1]}, got {array.ndim}")
    if array.size == 0:
        return np.zeros(array.shape, np.int64)
    if array.dtype.kind in "iu" and array.dtype != np.uint64:
        return array.astype(np.int64)
    if array.dtype == object and all(isinstance(one, str) for one in array.flat):  # a text column of a data frame
        array, ids = array.astype(str), array.astype(str)
    if array.dtype.kind == "U":
        if not isinstance(ids, np.ndarray) and not all(
            isinstance(x, str) for x in _flat(cast(Sequence, ids), dimensions)
        ):
            raise InvalidRequest(f"{name}: expected integers or text, got both")
        return array
    raise InvalidRequest(f"{name}: expected integers or text, got {array.dtype}")


def _flat(ids: Sequence, dimensions: int):
    return ids if dimensions == 1 else [x for row in ids for x in row]


def user_keys(users: object) -> list[str]:
    """Return users as the store names them: [B] ids -> B texts."""
    if isinstance(users, list) and all(isinstance(user, str) for user in users):
        return users  # numpy would drop NUL characters at the end of a text
    return [str(user) for user in array_of_ids("users", users).tolist()]


class ItemIds:
    """The original ids [I] of the rows of an item table, int64 or text, and where each stands."""

    def __init__(self, ids: np.ndarray):
        self.ids = np.asarray(ids)
        self._order = None if (self.ids[1:] > self.ids[:-1]).all() else np.argsort(self.ids, kind="stable")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def missing(self):
        """The id that stands for a missing item: -1 or the empty text."""
        return -1 if self.ids.dtype.kind == "i" else ""

    def rows(self, name: str, ids: object, dimensions: int = 1) -> np.ndarray:
        """Return the rows of the items `ids`, int64 of their shape; UnknownItem names those unknown to the run."""
        requested = array_of_ids(name, ids, dimensions)
        if requested.size == 0:
            return np.zeros(requested.shape, np.int64)
        rows, known = self.lookup(requested)
        if not known.all():
            wrong = requested[~known]
            some = ", ".join(shown(x) for x in wrong[:NAMED].tolist())
            raise UnknownItem(f"{name}: {len(wrong):,} of {requested.size:,} items are not known to the run: {some}")
        return rows

    def lookup(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (rows, int64; which ids are known, bool) of int64 or text ids; rows of unknown ids mean nothing."""
        comparable, valid = self.comparable(ids)
        place = np.searchsorted(self.ids, comparable, sorter=self._order).clip(max=len(self.ids) - 1)
        if self._order is not None:
            place = self._order[place]
        return place.astype(np.int64), valid & (self.ids[place] == comparable)

    def original(self, rows: np.ndarray) -> np.ndarray:
        """Return the ids of rows, `missing` for rows of -1."""
        known = self.ids[np.maximum(rows, 0)]
        return np.where(rows >= 0, known, np.array(self.missing, self.ids.dtype))

    def with_more(self, ids: np.ndarray) -> "ItemIds":
        """Return the ids with those of further rows, which are of the same type."""
        return ItemIds(np.concatenate([self.ids, ids]))

    def comparable(self, requested: np.ndarray) -> tuple[np.ndarray, np.ndarray | bool]:
        """Return (ids of the catalogue's type, which of them can be ids of that type at all)."""
        if requested.dtype.kind == self.ids.dtype.kind:
            return requested, np.ones(requested.shape, bool)
        if self.ids.dtype.kind == "U":
            return requested.astype(str), np.ones(requested.shape, bool)
        numbers, valid = np.zeros(requested.shape, np.int64), np.zeros(requested.shape, bool)
        for place, text in np.ndenumerate(requested):
            # Only canonical integers: no plus sign, no leading zero, no digits of other scripts.
            if len(text) <= 20 and text.isascii() and text.removeprefix("-").isdigit() and text == str(int(text)):
                value = int(text)
                if -(2**63) <= value < 2**63:
                    numbers[place], valid[place] = value, True
        return numbers, valid
