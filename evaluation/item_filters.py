"""Restrict the items of a list: bit masks for the search, and limits on the number of items with the same value.

Letters: B users, I items, M some of the users or items, F masks, k length of a list.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.features.features import Feature
from data.types import shown
from evaluation.scores import Scores, best_items

FIRST = 64  # least number of items in the first search for a list with limits
Search = Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]]


class FilterError(ValueError):
    """Raised for a filter on a feature that items do not have, or that is a number."""


class ItemFilter(NamedTuple):
    """A filter of items.

    mask     [ceil(I / 8)] uint8, bit i of byte b is 1 if item 8 b + i passes; None if all items pass
    limits   (feature, the greatest number of items with the same value) for each feature of `at_most`
    unknown  argument -> the number of its ids or values that no item has
    """

    mask: np.ndarray | None
    limits: tuple[tuple["ItemValues", int], ...] = ()
    unknown: Mapping[str, int] = {}


ALL_ITEMS = ItemFilter(None)


class ItemValues:
    """The values of a feature of the items, indexed by item and by value."""

    def __init__(self, feature: Feature):
        self.feature = feature
        order = np.argsort(feature.codes, kind="stable")
        self._items = feature.rows[order]
        self._ends = np.searchsorted(feature.codes[order], np.arange(len(feature.values)), side="right")

    def with_any(self, values: Iterable[str]) -> tuple[np.ndarray, int]:
        """Return (the items that have one of the values, [M] int64; the number of values that no item has)."""
        requested = np.array(sorted(set(values)), np.str_)
        names, unknown, parts = self.feature.values, 0, [np.zeros(0, np.int64)]
        for code, name in zip(np.searchsorted(names, requested).tolist(), requested):
            items = np.zeros(0, np.int64)
            if code < len(names) and names[code] == name:
                items = self._items[self._ends[code - 1] if code else 0 : self._ends[code]]
            unknown += not len(items)
            parts.append(items)
        return np.concatenate(parts), unknown

    def item_codes(self, item: int) -> list[int]:
        """Return the codes of an item's values."""
        return self.feature.codes[self.feature.offsets[item] : self.feature.offsets[item + 1]].tolist()


@dataclass
class _Limit:
    """The number of items in a list by their values of one feature.

    most: the greatest number for each value; counts: code of a value -> number; full: [n] bool, the values that have
    reached `most`.
    """

    values: ItemValues
    most: int
    counts: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self.full = np.full(len(self.values.feature.values), self.most < 1)

    def open(self, items: np.ndarray) -> np.ndarray:
        """Return the mask of `items` that have no full value."""
        part = self.values.feature.take(items)
        return np.bincount(part.rows[self.full[part.codes]], minlength=len(items)) == 0

    def add(self, item: int) -> None:
        """Count an item that is added to the list."""
        for code in self.values.item_codes(item):
            self.counts[code] += 1
            self.full[code] = self.counts[code] >= self.most


class ItemFilters:
    """Build filters from the features of a catalogue's items."""

    def __init__(self, num_items: int, features: Sequence[Feature] = ()):
        self.num_items = num_items
        self._features = {feature.name: feature for feature in features if feature.entity == "items"}
        self._values: dict[str, ItemValues] = {}

    @property
    def names(self) -> list[str]:
        """The names of the features that filters can use: all but numbers."""
        return [feature.name for feature in self._features.values() if feature.kind != "number"]

    def values(self, argument: str, name: str) -> ItemValues:
        """Return the values of the feature `name`; FilterError, which names `argument`, unless it is one of `names`."""
        feature = self._features.get(name)
        if feature is None or feature.kind == "number":
            known = self.names
            problem = "is a number" if feature is not None else "is not a feature of the items"
            raise FilterError(
                f"{argument}: {shown(name)} {problem}: "
                + (f"expected one of {', '.join(map(shown, known))}" if known else "the run has no categories or lists")
            )
        if name not in self._values:
            self._values[name] = ItemValues(feature)
        return self._values[name]

    def mask(self, items: np.ndarray) -> np.ndarray:
        """Return the mask of these items, [M] rows of the item table."""
        bits = np.zeros(-(-self.num_items // 8) * 8, bool)
        bits[items] = True
        return np.packbits(bits, bitorder="little")

    def build(
        self,
        *,
        allow: np.ndarray | None = None,
        deny: np.ndarray | None = None,
        where: Mapping[str, Sequence[str]] | None = None,
        at_most: Mapping[str, int] | None = None,
        lists: Iterable[np.ndarray] = (),
    ) -> ItemFilter:
        """Build a filter.

        Args:
            allow, deny: [M] rows of the item table; only items in `allow` pass, and items in `deny` do not.
            where: feature -> values; an item must have one of the values of each feature.
            at_most: feature -> the greatest number of items with the same value in a list.
            lists: masks; an item must pass all of them.

        Raises:
            FilterError: a feature of `where` or `at_most` is not one of `names`.
        """
        masks = list(lists)
        unknown: dict[str, int] = {}
        if allow is not None:
            masks.append(self.mask(allow))
        if deny is not None and len(deny):
            masks.append(~self.mask(deny))
        for name, values in (where or {}).items():
            items, missing = self.values("where", name).with_any(values)
            unknown["where"] = unknown.get("where", 0) + missing
            masks.append(self.mask(items))
        limits = tuple((self.values("at_most", name), most) for name, most in (at_most or {}).items())
        return ItemFilter(np.bitwise_and.reduce(masks) if masks else None, limits, unknown)


def stacked_masks(filters: Sequence[ItemFilter], num_items: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (the distinct masks [F, ceil(I / 8)], the index of each filter's mask [B]); None if there are no masks.

    A filter without a mask gets one that all items pass.
    """
    places: dict[int, int] = {}
    masks: list[np.ndarray] = []
    which = []
    for each in filters:
        if id(each.mask) not in places:
            places[id(each.mask)] = len(masks)
            masks.append(np.full(-(-num_items // 8), 255, np.uint8) if each.mask is None else each.mask)
        which.append(places[id(each.mask)])
    if all(each.mask is None for each in filters):
        return None
    return np.stack(masks), np.array(which, np.int64)


def filtered_lists(
    scores: Scores | Tensor, k: int, seen: tuple[Tensor, Tensor] | None, passing: ItemFilter
) -> tuple[np.ndarray, np.ndarray]:
    """Return each user's best k items that pass a filter: (scores, items), [B, k] or narrower each.

    scores, seen: as in `best_items`. If the scores are sharded over ranks, all ranks get the lists.
    """
    scores = Scores.of(scores)
    filters = [passing] * scores.num_users
    masks = stacked_masks(filters, scores.num_items)
    tensors = None if masks is None else (torch.from_numpy(masks[0]), torch.from_numpy(masks[1]))

    def search(length: int, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Sharded scores need the same calls on all ranks, so the search is always for all users.
        best, items = best_items(scores, length, seen, tensors)
        return best.cpu().numpy()[users], items.cpu().numpy()[users]

    return limited_lists(search, min(k, scores.num_items), filters, scores.num_items)


def limited_lists(
    search: Search, k: int, filters: Sequence[ItemFilter], num_items: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return each user's best k items within the limits: (scores, items), [B, k] or narrower each.

    Scores are -inf where there are fewer items.

    A list takes items from the top of the ranking down, and skips an item if it already has as many items with one of
    the item's values as the limit allows.

    search: (length, users [M]) -> (scores, items), [M, length] or narrower each, best first, of the items that pass the
    masks; scores of -inf where there are fewer. It is called again with a greater length for lists that are not full.
    """
    limited = np.array([place for place, each in enumerate(filters) if each.limits], np.int64)
    if not len(limited):
        return search(k, np.arange(len(filters)))
    length = min(num_items, max(FIRST, 2 * k))
    values, items = np.full((len(filters), k), -np.inf, np.float32), np.full((len(filters), k), -1, np.int64)
    rest = np.setdiff1d(np.arange(len(filters)), limited)
    if len(rest):
        part_values, part_items = search(k, rest)
        values[rest, : part_values.shape[1]], items[rest, : part_items.shape[1]] = part_values, part_items
    while len(limited):
        part_values, part_items = search(length, limited)
        unfinished = []
        for user, user_values, user_items in zip(limited, part_values, part_items):
            left = int(np.isfinite(user_values).sum())
            chosen = _within_limits(user_items[:left], k, filters[user].limits)
            if len(chosen) < k and left == length < num_items:
                unfinished.append(user)
                continue
            values[user, : len(chosen)], items[user, : len(chosen)] = user_values[chosen], user_items[chosen]
        limited, length = np.array(unfinished, np.int64), min(num_items, 8 * length)
    return values, items


def _within_limits(items: np.ndarray, k: int, limits: tuple[tuple[ItemValues, int], ...]) -> list[int]:
    """Return the positions in a ranking of the first k items within the limits."""
    counted = [_Limit(values, most) for values, most in limits]
    chosen: list[int] = []
    begin, size = 0, FIRST
    while begin < len(items) and len(chosen) < k:
        part = items[begin : begin + size]
        for place in np.flatnonzero(np.logical_and.reduce([limit.open(part) for limit in counted])).tolist():
            item = int(part[place])
            if any(limit.full[code] for limit in counted for code in limit.values.item_codes(item)):
                continue
            for limit in counted:
                limit.add(item)
            chosen.append(begin + place)
            if len(chosen) == k:
                break
        begin, size = begin + size, 2 * size
    return chosen
