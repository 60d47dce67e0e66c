"""Remove users from prepared data sets. Requires only numpy and pydantic."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.atomic import replace_folder, temporary_beside
from data.cache import REMOVED_FROM, CacheError, read_cache, write_cache
from data.features.features import select_features
from data.filtering import offsets_of
from data.prepare import cache_folder
from data.types import DataError, Dataset, shown


class Removed(NamedTuple):
    """The removed users of a prepared data set (ids as text), the number of their events, the folder of the rest."""

    users: list[str]
    events: int
    folder: Path


def prepared_folders(path: Path) -> list[Path]:
    """Return `path` if it is a prepared data set, else the prepared data sets in this folder."""
    if (path / "meta.json").is_file():
        return [path]
    return sorted(file.parent for file in path.glob("*/meta.json"))


def has_users(ids: np.ndarray, users: Collection[str]) -> np.ndarray:
    """Return the mask of the ids [U] (integers or text) that are among `users` (text)."""
    return np.isin(np.asarray(ids).astype(str), list(users))


def without_users(dataset: Dataset, users: Collection[str]) -> Dataset:
    """Return a data set without the events, ids and features of users, with another fingerprint. All items are kept."""
    stay, counts = ~has_users(dataset.user_ids, users), np.diff(dataset.user_offsets)
    index = np.flatnonzero(np.repeat(stay, counts))
    if not len(index):
        raise DataError(f"{dataset.name}: no event is left without these users: delete the data set")
    names = [str(user) for user in dataset.user_ids[~stay].tolist()]

    def derived(fingerprint: str) -> str:
        return hashlib.sha256("\0".join([fingerprint, "without", *names]).encode("utf-8", "surrogatepass")).hexdigest()

    return dataclasses.replace(
        dataset,
        items=dataset.items[index],
        timestamps=dataset.timestamps[index],
        actions=None if dataset.actions is None else dataset.actions[index],
        user_offsets=offsets_of(counts[stay]),
        user_ids=dataset.user_ids[stay],
        features=select_features(dataset.features, None, np.flatnonzero(stay), index),
        fingerprint=derived(dataset.fingerprint),
        events_fingerprint=None if dataset.events_fingerprint is None else derived(dataset.events_fingerprint),
    )


def remove_users(folder: Path, users: Collection[str]) -> Removed | None:
    """Rewrite a prepared data set without some users; return None if it has none of them. DataError if it is damaged.

    In a cache, the folder is renamed after the new fingerprint. meta.json lists the earlier fingerprints. Arrays
    computed from the old data are deleted.
    """
    try:
        dataset, meta = read_cache(folder)
    except CacheError as error:
        raise DataError(f"{shown(folder, 200)}: damaged cache: {error}; delete it, or prepare it again") from None
    gone = has_users(dataset.user_ids, users)
    if not gone.any():
        return None
    ids = dataset.user_ids[gone].astype(str).tolist()  # read before the files are deleted
    rest = without_users(dataset, users)
    meta = meta | {REMOVED_FROM: [*meta.get(REMOVED_FROM, []), dataset.fingerprint]}
    in_cache = folder == cache_folder(folder.parent, meta["format"], dataset.fingerprint)
    target = cache_folder(folder.parent, meta["format"], rest.fingerprint) if in_cache else folder
    try:
        if in_cache:
            write_cache(rest, target, meta)
            shutil.rmtree(folder)
        else:
            temporary = temporary_beside(folder)
            try:
                write_cache(rest, temporary, meta)
                with replace_folder(folder) as new:
                    for file in list(temporary.iterdir()):
                        os.rename(file, new / file.name)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        for file in folder.parent.glob("*.npz"):
            if file.name.startswith(f"{folder.name}-"):
                file.unlink()
    except OSError as error:
        raise DataError(f"{shown(folder, 200)}: cannot be rewritten: {error.strerror}") from None
    return Removed(ids, dataset.num_events - rest.num_events, target)
