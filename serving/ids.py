"""Convert ids of users and items to their internal form.

An item is a row of the item table. A user is the id as text, so that 7 and "7" are the same user in Python, in saved
stores and over HTTP.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np

from data.types import shown
from serving.errors import InvalidRequest, UnknownItem

NAMED = 5  # most ids in an error's message


def array_of_ids(name: str, ids: object, dimensions: int = 1) -> np.ndarray:
    """Return `ids` as an array of int64 or text; raise InvalidRequest for other types or numbers of dimensions."""
    try:
        array = np.asarray(ids)
    except ValueError:
        raise InvalidRequest(f"{name}: expected rows of the same length") from None
    if array.ndim == 0:
        raise InvalidRequest(f"{name}: expected a list of ids, got {shown(repr(ids))}")
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
    """Convert user ids [B] to text."""
    if isinstance(users, list) and all(isinstance(user, str) for user in users):
        return users  # numpy would remove NUL characters at the end of a text
    return [str(user) for user in array_of_ids("users", users).tolist()]


class ItemIds:
    """The original ids [I] of the rows of an item table, int64 or text, and the search for the row of an id."""

    def __init__(self, ids: np.ndarray):
        self.ids = np.asarray(ids)
        self._order = None if (self.ids[1:] > self.ids[:-1]).all() else np.argsort(self.ids, kind="stable")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def missing(self):
        """The id that marks a missing item: -1 or the empty text."""
        return -1 if self.ids.dtype.kind == "i" else ""

    def rows(self, name: str, ids: object, dimensions: int = 1) -> np.ndarray:
        """Return the rows of the items `ids`, int64 of the same shape; raise UnknownItem if some are unknown."""
        requested = array_of_ids(name, ids, dimensions)
        if requested.size == 0:
            return np.zeros(requested.shape, np.int64)
        rows, known = self.lookup(requested)
        if not known.all():
            wrong = requested[~known]
            named = ", ".join(shown(x) for x in wrong[:NAMED].tolist())
            raise UnknownItem(f"{name}: {len(wrong):,} of {requested.size:,} items are not known to the run: {named}")
        return rows

    def lookup(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (rows int64, mask of known ids) for int64 or text ids; rows of unknown ids are arbitrary."""
        comparable, valid = self.comparable(ids)
        place = np.searchsorted(self.ids, comparable, sorter=self._order).clip(max=len(self.ids) - 1)
        if self._order is not None:
            place = self._order[place]
        return place.astype(np.int64), valid & (self.ids[place] == comparable)

    def original(self, rows: np.ndarray) -> np.ndarray:
        """Return the ids of rows; `missing` for row -1."""
        known = self.ids[np.maximum(rows, 0)]
        return np.where(rows >= 0, known, np.array(self.missing, self.ids.dtype))

    def with_more(self, ids: np.ndarray) -> "ItemIds":
        """Return these ids followed by `ids`, which have the same type."""
        return ItemIds(np.concatenate([self.ids, ids]))

    def comparable(self, requested: np.ndarray) -> tuple[np.ndarray, np.ndarray | bool]:
        """Return (ids converted to the catalogue's type, mask of ids that can be converted)."""
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
