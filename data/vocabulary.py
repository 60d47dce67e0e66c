"""Define the vocabulary of a trained model (item ids, actions, features), and encode new data with it.

Requires only numpy and pydantic. Letters: E events, U users.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass

import numpy as np

from data.features.features import select_features
from data.features.new_items import NewItems
from data.features.vocabulary import FeatureVocabulary
from data.filtering import offsets_of
from data.types import ACTION_CODES, DataError, Dataset, shown


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The meaning of the rows of a model's tables.

    item_ids      [num_items] original ids, int64 or text, distinct: row i of the item table is item_ids[i]
    num_actions   the number of rows of the action table; None if the data have no actions
    action_names  [num_actions] the text of each action code; None if actions are numbers
    features      the features of the model, or None

    Examples:
        >>> Vocabulary(dataset.item_ids, num_actions=5, action_names=("1", "2", "3", "4", "5")).item_ids[:3].tolist()
        [1, 2, 3]
    """

    item_ids: np.ndarray
    num_actions: int | None = None
    action_names: tuple[str, ...] | None = None
    features: FeatureVocabulary | None = None


def vocabulary_of(dataset: Dataset, features: FeatureVocabulary | None = None) -> Vocabulary:
    """Return the vocabulary of a model trained on this data set."""
    num_actions = None if dataset.actions is None else int(dataset.actions.max(initial=-1)) + 1
    return Vocabulary(np.asarray(dataset.item_ids), num_actions, dataset.action_names, features)


def with_items(vocabulary: Vocabulary, ids: np.ndarray, items: NewItems) -> Vocabulary:
    """Return the vocabulary with new items after the known ones, which keep their rows; ids: [M].

    It does not include the table rows of the new items' features, which the model gets separately.
    """
    assert vocabulary.features is not None
    by_name = {feature.name: feature for feature in items.features}
    features = tuple(feature.followed_by(by_name[feature.name]) for feature in vocabulary.features.items)
    known = dataclasses.replace(vocabulary.features, items=features)
    return dataclasses.replace(vocabulary, item_ids=np.concatenate([vocabulary.item_ids, ids]), features=known)


def index_of(ids: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return the index in `known` of each of `ids`, -1 for missing ones: int64 [len(ids)].

    Both are int64 or text. If only one is text, integers are compared by their decimal text.
    """
    ids, known = np.asarray(ids), np.asarray(known)
    if ids.dtype.kind != known.dtype.kind:
        ids, known = ids.astype(str), known.astype(str)
    if not len(known):
        return np.full(len(ids), -1, np.int64)
    order = np.argsort(known, kind="stable")
    place = order[np.minimum(np.searchsorted(known, ids, sorter=order), len(known) - 1)]
    return np.where(known[place] == ids, place, -1).astype(np.int64)


def with_vocabulary(dataset: Dataset, vocabulary: Vocabulary, min_user_events: int = 1) -> Dataset:
    """Return the data set with items numbered as in `vocabulary`, without events of other items.

    Users keep their order; those with fewer than `min_user_events` remaining events are left out. `left_out` and
    `notes` have the counts. DataError if no event remains, and for an action that is not in the vocabulary.
    """
    place = index_of(dataset.item_ids, vocabulary.item_ids)
    users = np.repeat(np.arange(dataset.num_users), np.diff(dataset.user_offsets))
    items = place[dataset.items]
    index = np.flatnonzero(items >= 0)
    if not len(index):
        raise DataError(f"{dataset.name}: none of its {dataset.num_items:,} items is known to the trained model")
    counts = np.bincount(users[index], minlength=dataset.num_users)
    stay = counts >= max(1, min_user_events)
    index = index[stay[users[index]]]
    if not len(index):
        raise DataError(f"{dataset.name}: no user has {min_user_events} events with items known to the trained model")
    actions = None if dataset.actions is None else dataset.actions[index]
    if actions is not None and vocabulary.num_actions is not None:
        actions = _known_actions(actions, dataset, vocabulary)
    if actions is not None and vocabulary.num_actions is not None and actions.max() >= vocabulary.num_actions:
        raise DataError(
            f"{dataset.name}: action {actions.max()} is not known to the trained model, which knows 0 to "
            f"{vocabulary.num_actions - 1}"
        )
    left_out = {
        "items": int(np.count_nonzero(place < 0)),
        "events": dataset.num_events - len(index),
        "users": int(np.count_nonzero(~stay)),
    }
    # The note has the codes of this data set, not those of the model.
    notes = tuple(note for note in dataset.notes if not note.startswith(ACTION_CODES))
    if any(left_out.values()):
        notes += (
            f"{left_out['items']:,} items are not known to the trained model; left out: {left_out['events']:,} of "
            f"{dataset.num_events:,} events and {left_out['users']:,} of {dataset.num_users:,} users",
        )
    digest = hashlib.sha256(f"{dataset.fingerprint}/{min_user_events}/{vocabulary.item_ids.dtype}/".encode())
    digest.update(np.ascontiguousarray(vocabulary.item_ids).tobytes())
    return dataclasses.replace(
        dataset,
        items=items[index].astype(np.int32),
        timestamps=dataset.timestamps[index],
        actions=actions,
        user_offsets=offsets_of(counts[stay]),
        user_ids=np.asarray(dataset.user_ids)[stay],
        item_ids=vocabulary.item_ids,
        action_names=None if actions is None else vocabulary.action_names,
        fingerprint=digest.hexdigest(),
        notes=notes,
        left_out=left_out,
        events_fingerprint=None,
        features=select_features(
            (f for f in dataset.features if f.entity != "items"), None, np.flatnonzero(stay), index
        ),
    )


def _known_actions(actions: np.ndarray, dataset: Dataset, vocabulary: Vocabulary) -> np.ndarray:
    """Return the vocabulary's codes [E] for the texts of `actions`; DataError for a text that it does not have."""
    names, known_names = dataset.action_names, vocabulary.action_names
    _check_names(dataset, vocabulary)
    if names is None or known_names is None:
        return actions
    codes = index_of(np.array(names), np.array(known_names))[actions]
    if (codes < 0).any():
        text = names[actions[np.argmax(codes < 0)]]
        raise DataError(
            f"{dataset.name}: action {shown(repr(text))} is not known to the trained model, which knows "
            f"{shown(', '.join(known_names), 200)}"
        )
    return codes.astype(np.int32)


def united(dataset: Dataset, known: Vocabulary) -> Dataset:
    """Return the data set with the items and actions of both the data set and `known`.

    Item ids are ascending; known actions keep their codes. Items that are only in `known` have the features that it
    stores. DataError if actions are text in only one of them.
    """
    ids, known_ids = np.asarray(dataset.item_ids), np.asarray(known.item_ids)
    if ids.dtype.kind != known_ids.dtype.kind:
        ids, known_ids = ids.astype(str), known_ids.astype(str)
    names = _joined_names(dataset, known)
    if np.array_equal(ids, known_ids) and names == dataset.action_names:
        return dataset
    item_ids, actions = np.union1d(ids, known_ids), dataset.actions
    if actions is not None and names is not None and dataset.action_names is not None:
        actions = index_of(np.array(dataset.action_names), np.array(names))[actions].astype(np.int32)
    place, known_place = index_of(item_ids, ids), index_of(item_ids, known_ids)
    known_features = () if known.features is None else (*known.features.items, *known.features.vectors)
    stored = {(one.name, one.kind): one for one in known_features}
    features = []
    for feature in dataset.features:
        if feature.entity == "items":
            known_feature = stored.get((feature.name, feature.kind))
            feature = feature.take(place)
            if known_feature is not None:
                feature = feature.joined(known_feature.take(np.where(place < 0, known_place, -1)))
        features.append(feature)
    return dataclasses.replace(
        dataset,
        items=index_of(ids, item_ids)[dataset.items].astype(np.int32),
        actions=actions,
        item_ids=item_ids,
        action_names=names,
        notes=tuple(
            note for note in dataset.notes if names == dataset.action_names or not note.startswith(ACTION_CODES)
        ),
        features=tuple(features),
    )


def _joined_names(dataset: Dataset, known: Vocabulary) -> tuple[str, ...] | None:
    """Return the known names of actions, then those only in the data set; None if actions are not text."""
    names = dataset.action_names
    if dataset.actions is None or known.num_actions is None:
        return names
    _check_names(dataset, known)
    if names is None or known.action_names is None:
        return names
    return (*known.action_names, *(name for name in names if name not in known.action_names))


def _check_names(dataset: Dataset, known: Vocabulary) -> None:
    kinds = [f"{'text' if names else 'numbers'}" for names in (dataset.action_names, known.action_names)]
    if kinds[0] != kinds[1]:
        raise DataError(f"{dataset.name}: the actions are {kinds[0]}, those of the trained model {kinds[1]}")
