"""Ids as users of the service write them, and what they are inside.

Items become rows of the item table. A user is a text inside, so that 7 and "7" are one user, whether the id comes from
Python, from a saved store or over the wire.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np

from data.types import shown
from models.serving.errors import InvalidRequest, UnknownItem

NAMED = 5  # ids that an error names


def array_of_ids(name: str, ids: object, dimensions: int = 1) -> np.ndarray:
    """`ids` as an array of int64 or text; InvalidRequest for other types and another number of dimensions."""
    try:
        found = np.asarray(ids)
    except ValueError:
        raise InvalidRequest(f"{name}: expected rows of one length") from None
    if found.ndim != dimensions:
        raise InvalidRequest(f"{name}: expected {dimensions} dimension{'s'[: dimensions - 1]}, got {found.ndim}")
    if found.size == 0:
        return np.zeros(found.shape, np.int64)
    if found.dtype.kind in "iu" and found.dtype != np.uint64:
        return found.astype(np.int64)
    if found.dtype == object and all(isinstance(one, str) for one in found.flat):  # a column of text of a frame
        found, ids = found.astype(str), found.astype(str)
    if found.dtype.kind == "U":
        if not isinstance(ids, np.ndarray) and not all(
            isinstance(x, str) for x in _flat(cast(Sequence, ids), dimensions)
        ):
            raise InvalidRequest(f"{name}: expected integers or text, got both")
        return found
    raise InvalidRequest(f"{name}: expected integers or text, got {found.dtype}")


def _flat(ids: Sequence, dimensions: int):
    return ids if dimensions == 1 else [x for row in ids for x in row]


def user_keys(users: object) -> list[str]:
    """The users as the store names them: [B] ids -> B texts."""
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
        """What stands in place of an item where there is none: -1 or the empty text."""
        return -1 if self.ids.dtype.kind == "i" else ""

    def rows(self, name: str, ids: object, dimensions: int = 1) -> np.ndarray:
        """Rows of the items `ids`, int64 of their shape; UnknownItem names those that the run does not know."""
        given = array_of_ids(name, ids, dimensions)
        if given.size == 0:
            return np.zeros(given.shape, np.int64)
        asked, valid = self._comparable(given)
        place = np.searchsorted(self.ids, asked, sorter=self._order).clip(max=len(self.ids) - 1)
        if self._order is not None:
            place = self._order[place]
        unknown = ~valid | (self.ids[place] != asked)
        if unknown.any():
            wrong = given[unknown]
            some = ", ".join(shown(x) for x in wrong[:NAMED].tolist())
            raise UnknownItem(f"{name}: {len(wrong):,} of {given.size:,} items are not known to the run: {some}")
        return place.astype(np.int64)

    def original(self, rows: np.ndarray) -> np.ndarray:
        """The ids of rows, `missing` for rows of -1."""
        known = self.ids[np.maximum(rows, 0)]
        return np.where(rows >= 0, known, np.array(self.missing, self.ids.dtype))

    def _comparable(self, given: np.ndarray) -> tuple[np.ndarray, np.ndarray | bool]:
        """(ids of the catalogue's type, which of them can be ids of that type at all)."""
        if given.dtype.kind == self.ids.dtype.kind:
            return given, np.ones(given.shape, bool)
        if self.ids.dtype.kind == "U":
            return given.astype(str), np.ones(given.shape, bool)
        numbers, valid = np.zeros(given.shape, np.int64), np.zeros(given.shape, bool)
        for place, text in np.ndenumerate(given):
            # An integer as it is written: no sign of plus, no leading zero, no other script's digits.
            if len(text) <= 20 and text.isascii() and text.removeprefix("-").isdigit() and text == str(int(text)):
                value = int(text)
                if -(2**63) <= value < 2**63:
                    numbers[place], valid[place] = value, True
        return numbers, valid
