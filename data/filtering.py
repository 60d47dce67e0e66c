"""Compute the k-core of a data set: drop users and items with too few events, until all others have enough.

Requires only numpy. Letters: E events, U users.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from data.features.features import select_features
from data.types import DataError, Dataset


def k_core(users: np.ndarray, items: np.ndarray, min_user_events: int, min_item_events: int) -> np.ndarray:
    """Return the ascending indices of the events in the k-core; duplicate events count. users, items: [E].

    Examples:
        >>> import numpy as np
        >>> users, items = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 5])
        >>> k_core(users, items, min_user_events=2, min_item_events=2)
        array([0, 1, 2, 3])
    """
    index = np.arange(len(users))
    while len(index):
        few_users = np.bincount(users) < min_user_events
        few_items = np.bincount(items) < min_item_events
        drop = few_users[users] | few_items[items]
        if not drop.any():
            break
        index, users, items = index[~drop], users[~drop], items[~drop]
    return index


def filter_dataset(dataset: Dataset, *, min_user_events: int, min_item_events: int) -> Dataset:
    """Return the k-core of a data set, with users and items renumbered in the same order. DataError if it is empty."""
    if min_user_events <= 1 and min_item_events <= 1:
        return dataset
    users = np.repeat(np.arange(dataset.num_users, dtype=np.int32), np.diff(dataset.user_offsets))
    index = k_core(users, dataset.items, min_user_events, min_item_events)
    if not len(index):
        raise nothing_left(dataset.name, min_user_events, min_item_events)
    user_events = np.bincount(users[index], minlength=dataset.num_users)
    item_events = np.bincount(dataset.items[index], minlength=dataset.num_items)
    new_item = np.cumsum(item_events > 0, dtype=np.int64) - 1
    key = f"{dataset.fingerprint}/{min_user_events}/{min_item_events}"
    return dataclasses.replace(
        dataset,
        items=new_item[dataset.items[index]].astype(np.int32),
        timestamps=dataset.timestamps[index],
        actions=None if dataset.actions is None else dataset.actions[index],
        user_offsets=offsets_of(user_events[user_events > 0]),
        user_ids=dataset.user_ids[user_events > 0],
        item_ids=dataset.item_ids[item_events > 0],
        events_fingerprint=None,  # that of `dataset` does not include the filter's options
        features=select_features(dataset.features, np.flatnonzero(item_events), np.flatnonzero(user_events), index),
        fingerprint=hashlib.sha256(key.encode()).hexdigest(),
    )


def nothing_left(name: str, min_user_events: int, min_item_events: int) -> DataError:
    """Return the error for an empty k-core."""
    return DataError(
        f"{name}: no event is left with min_user_events={min_user_events} and min_item_events={min_item_events}; "
        "lower them"
    )


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return the offsets [n+1] int64 of sequences with these lengths [n].

    Examples:
        >>> import numpy as np
        >>> offsets_of(np.array([2, 3]))
        array([0, 2, 5])
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
