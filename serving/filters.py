"""Build the filters of requests from ids of items, and store named lists of items."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.types import shown
from data.vocabulary import Vocabulary
from evaluation.item_filters import FilterError, ItemFilter, ItemFilters
from serving.errors import InvalidRequest, UnknownFilter
from serving.ids import ItemIds, array_of_ids


@dataclass(frozen=True)
class Filter:
    """A filter of the items that may be recommended.

    allow    ids of items: recommend only these
    deny     ids of items: recommend none of these
    where    feature -> values: an item must have one of the values of each feature
    at_most  feature -> number: recommend at most this many items with the same value, the best ones
    filters  names of uploaded lists (`FilterLists.put`): an item must be in all of them

    Examples:
        >>> choice = Filter(deny=["s1"], where={"brand": ["a", "b"]}, at_most={"brand": 1})
        >>> recommender.recommend(["c3"], k=9, exclude_seen=False, **vars(choice), as_frame=True).height
        2
    """

    allow: Any = None
    deny: Any = None
    where: Mapping[str, Sequence[Any]] | None = None
    at_most: Mapping[str, int] | None = None
    filters: Iterable[str] = ()


class FilterLists:
    """The named lists of items of a catalogue, and the construction of filters."""

    def __init__(self, items: ItemIds, vocabulary: Vocabulary):
        self.items = items
        features = () if vocabulary.features is None else vocabulary.features.items
        self._filters = ItemFilters(len(items), features)
        # name -> (mask, number of items, unknown ids)
        self._lists: dict[str, tuple[np.ndarray, int, np.ndarray]] = {}

    def with_items(self, items: ItemIds, vocabulary: Vocabulary) -> "FilterLists":
        """Return the same named lists for a larger catalogue, in which unknown ids may have become items."""
        filters = FilterLists(items, vocabulary)
        for name, (mask, _, unknown) in self._lists.items():
            rows = np.flatnonzero(np.unpackbits(mask, count=len(self.items), bitorder="little"))
            more, known = items.lookup(unknown)
            filters._store(name, np.concatenate([rows, more[known]]), unknown[~known])
        return filters

    def rows(self, name: str, ids: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return (the rows of the known ids, the unknown ids)."""
        ids = array_of_ids(name, list(ids) if isinstance(ids, set | frozenset) else ids)
        rows, known = self.items.lookup(ids)
        return rows[known], ids[~known]

    def put(self, name: str, ids: Any) -> tuple[int, int]:
        """Store or replace a named list; return (the number of its items, the number of unknown ids)."""
        rows, unknown = self.rows("items", ids)
        return self._store(name, rows, unknown), len(unknown)

    def _store(self, name: str, rows: np.ndarray, unknown: np.ndarray) -> int:
        count = len(np.unique(rows))
        self._lists[name] = self._filters.mask(rows), count, unknown
        return count

    def drop(self, name: str) -> bool:
        """Delete a list; return whether there was one."""
        return self._lists.pop(name, None) is not None

    @property
    def features(self) -> list[str]:
        """The names of the features for `where` and `at_most`."""
        return self._filters.names

    @property
    def sizes(self) -> dict[str, int]:
        """The names of the stored lists with the numbers of their items."""
        return {name: count for name, (_, count, _) in self._lists.items()}

    def build(self, requested: Filter) -> ItemFilter:
        """Return the filter in the form of the search; raise UnknownFilter or InvalidRequest if it is invalid."""
        lists = []
        for name in requested.filters:
            if name not in self._lists:
                raise UnknownFilter(f"filters: there is no list named {shown(name)}, upload it first")
            lists.append(self._lists[name][0])
        rows: dict[str, np.ndarray] = {}
        unknown: dict[str, int] = {}
        for name, ids in (("allow", requested.allow), ("deny", requested.deny)):
            if ids is not None:
                rows[name], others = self.rows(name, ids)
                unknown[name] = len(others)
        where = {name: _texts(name, values) for name, values in (requested.where or {}).items()}
        for name, most in (requested.at_most or {}).items():
            if isinstance(most, bool) or not isinstance(most, int | np.integer) or most < 0:
                raise InvalidRequest(f"at_most: {shown(name)}: expected a whole number of at least 0, got {most!r}")
        try:
            built = self._filters.build(**rows, where=where, at_most=requested.at_most, lists=lists)
        except FilterError as error:
            raise InvalidRequest(str(error)) from None
        return built._replace(unknown={**unknown, **built.unknown})


def _texts(name: str, values: Any) -> list[str]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InvalidRequest(f"where: {shown(name)}: expected a list of values, got {shown(repr(values))}")
    return [str(value) for value in values]
