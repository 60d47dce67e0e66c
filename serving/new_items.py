"""Check new items of a running service, which the model represents by their features.

Letters: n items of a request, M new ones among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.errors import UserError
from data.features.new_items import NewItems, check_known_by_features, features_of_columns, new_items
from data.reading.values import MAX_ID_LENGTH
from data.types import shown
from data.vocabulary import Vocabulary
from serving.errors import InvalidRequest
from serving.ids import ItemIds, array_of_ids


@dataclass(frozen=True)
class Additions:
    """The new items of a request.

    places  [M] int64, their positions in the request
    ids     [M], of the type of the run's ids
    items   their features
    """

    places: np.ndarray
    ids: np.ndarray
    items: NewItems


def checked_items(
    known_ids: ItemIds, vocabulary: Vocabulary, ids: Any, features: Mapping[str, Sequence[Any]], strict: bool = True
) -> Additions:
    """Return those of the items [n] that the catalogue does not contain; of items with equal ids, the first.

    features: name -> a value for each item, as in `features_of_columns`. strict: raise InvalidRequest if the run has no
    features of items, or if an item has none of them; otherwise leave these items out.
    """
    requested = array_of_ids("items", ids)
    try:
        known = check_known_by_features(vocabulary.features)
    except UserError as error:
        if strict:
            raise InvalidRequest(str(error)) from None
        nothing = np.zeros(0, np.int64)
        return Additions(nothing, known_ids.ids[:0], NewItems(0, (), (), ()))
    comparable, valid = known_ids.comparable(requested)
    valid = np.broadcast_to(valid, requested.shape)
    if comparable.dtype.kind == "U":
        lengths = np.char.str_len(comparable)
        valid = valid & (lengths > 0) & (lengths <= MAX_ID_LENGTH)
    if strict and not valid.all():
        kind = "whole numbers" if known_ids.ids.dtype.kind == "i" else f"1 to {MAX_ID_LENGTH} characters"
        raise InvalidRequest(f"items: expected {kind} like the run's ids, got {shown(repr(requested[~valid][0]))}")
    first = np.zeros(len(requested), bool)
    first[np.unique(comparable, return_index=True)[1]] = True
    places = np.flatnonzero(valid & first & ~known_ids.lookup(comparable)[1])

    def described(places: np.ndarray) -> NewItems:
        columns = {name: [column[place] for place in places] for name, column in features.items()}
        return new_items(known, len(places), features_of_columns(known, len(places), columns, strict))

    try:
        for name, column in features.items():
            if len(column) != len(requested):
                raise InvalidRequest(
                    f"features: {shown(name)}: expected a value for each of {len(requested)} items, got {len(column)}"
                )
        items = described(places)
    except InvalidRequest:
        raise
    except UserError as error:
        raise InvalidRequest(str(error)) from None
    if not items.described.all():
        if strict:
            which = shown(comparable[places[~items.described]][0])
            all_names = [*(one.name for one in known.of("items")), *(one.name for one in known.vectors)]
            names = ", ".join(map(shown, all_names))
            raise InvalidRequest(f"items: {which} has no feature of the run, expected at least one of {names}")
        places = places[items.described]
        items = described(places)
    return Additions(places, comparable[places], items)
