"""Store events of many users as columns, in original ids: the content of a segment of the log.

A file is an .npz whose arrays are the fields of `EventColumns`; lists of text and numbers are stored as JSON.
"""

import json
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from serving.histories import time_order

LISTS = ("users", "items", "actions", "deleted")


class EventColumns(NamedTuple):
    """Events, user by user, each user's in time order, ties in order of arrival.

    Letters: U users, E events.

    users       [U] distinct ids as text
    counts      [U] int64, the number of events of each user
    items       the distinct items, integers or text, in the form that clients sent
    item        [E] indices into `items`
    timestamps  [E] int64, seconds
    actions     the distinct actions: numbers, text or None
    action      [E] indices into `actions`
    ids         the ids of events, user by user: a line of JSON for each
    id_ends     [U] int64, the end of each user's part of `ids`
    deleted     users whose events in older segments and in the run's data are deleted
    """

    users: list[str]
    counts: np.ndarray
    items: list
    item: np.ndarray
    timestamps: np.ndarray
    actions: list
    action: np.ndarray
    ids: bytes
    id_ends: np.ndarray
    deleted: AbstractSet[str]

    @property
    def num_events(self) -> int:
        return len(self.timestamps)

    def ids_of(self, place: int) -> list[str]:
        """Return the ids of the events of user number `place`."""
        begin = int(self.id_ends[place - 1]) if place else 0
        return [json.loads(line) for line in self.ids[begin : int(self.id_ends[place])].splitlines()]

    def without(self, users: AbstractSet[str]) -> Self:
        """Return the events and the marks of deletion without those of `users`."""
        if not users:
            return self
        columns, deleted = self, self.deleted - users
        stay = np.array([user not in users for user in self.users], bool)
        if not stay.all():
            events, sizes = np.repeat(stay, self.counts), np.diff(self.id_ends, prepend=0)
            chosen = zip(self.id_ends[stay].tolist(), sizes[stay].tolist())
            columns = self._replace(
                users=[user for user, stays in zip(self.users, stay.tolist()) if stays],
                counts=self.counts[stay],
                item=self.item[events],
                timestamps=self.timestamps[events],
                action=self.action[events],
                ids=b"".join([self.ids[end - size : end] for end, size in chosen]) if self.ids else b"",
                id_ends=np.cumsum(sizes[stay]),
            )
        return columns._replace(deleted=deleted)

    def save(self, file: BinaryIO) -> None:
        arrays: dict[str, Any] = self._asdict()
        for name, values in (("item", self.items), ("action", self.actions)):
            arrays[name] = arrays[name].astype(np.min_scalar_type(len(values)))
        for name in LISTS:
            arrays[name] = np.frombuffer(json.dumps(list(arrays[name])).encode(), np.uint8)
        arrays["ids"] = np.frombuffer(self.ids, np.uint8)
        np.savez(file, **arrays)

    @classmethod
    def load(cls, file: BinaryIO) -> Self:
        with np.load(file, allow_pickle=False) as stored:
            columns: dict[str, Any] = {name: stored[name] for name in cls._fields}
        for name in LISTS:
            columns[name] = json.loads(columns[name].tobytes())
        return cls(**columns | {"ids": columns["ids"].tobytes(), "deleted": set(columns["deleted"])})


class Builder:
    """Collect events and build `EventColumns` from them; ties keep the order in which they are added."""

    def __init__(self) -> None:
        self._users: dict[str, int] = {}
        self._items: dict[Any, int] = {}
        self._actions: dict[Any, int] = {}
        self._ids: dict[str, list[bytes]] = {}
        nothing = np.zeros(0, np.int32)
        self._parts = [(nothing, nothing, np.zeros(0, np.int64), nothing)]

    def add(self, columns: EventColumns) -> None:
        users = _codes(self._users, columns.users)
        items, actions = _codes(self._items, columns.items), _codes(self._actions, columns.actions)
        owners = np.repeat(users, columns.counts)
        self._parts.append((owners, items[columns.item], columns.timestamps, actions[columns.action]))
        if columns.ids:
            begin = 0
            for user, end in zip(columns.users, columns.id_ends.tolist()):
                if end > begin:
                    self._ids.setdefault(user, []).append(columns.ids[begin:end])
                begin = end

    def add_records(self, records: Iterable[dict]) -> None:
        """Add the events of records of a log."""
        users: list[str] = []
        items: list = []
        timestamps: list[int] = []
        actions: list = []
        for record in records:
            users += record["users"]
            items += record["items"]
            timestamps += record["timestamps"]
            actions += record["actions"] or [None] * len(record["users"])
            for user, event in zip(record["users"], record.get("ids", ())):
                if event is not None:
                    self._ids.setdefault(user, []).append(json.dumps(event).encode() + b"\n")
        self._parts.append(
            (
                _codes(self._users, users),
                _codes(self._items, items),
                np.array(timestamps, np.int64),
                _codes(self._actions, actions),
            )
        )

    def build(self, deleted: AbstractSet[str]) -> EventColumns:
        owners, item, timestamps, action = map(np.concatenate, zip(*self._parts))
        order = time_order(owners, timestamps)
        ids = [b"".join(self._ids.get(user, ())) for user in self._users]
        return EventColumns(
            list(self._users),
            np.bincount(owners, minlength=len(self._users)),
            list(self._items),
            item[order],
            timestamps[order],
            list(self._actions),
            action[order],
            b"".join(ids),
            np.cumsum([len(text) for text in ids], dtype=np.int64),
            deleted,
        )


def merged(parts: Sequence[EventColumns]) -> EventColumns:
    """Merge parts, the oldest first; drop the events that later parts delete."""
    deleted: AbstractSet[str] = frozenset()
    remaining = []
    for part in reversed(parts):
        remaining.append(part.without(deleted))
        deleted = deleted | part.deleted
    builder = Builder()
    for part in reversed(remaining):
        builder.add(part)
    return builder.build(deleted)


def _codes(places: dict[Any, int], values: Iterable) -> np.ndarray:
    """Return the codes of values, [values] int32; add new values to `places`."""
    return np.array([places.setdefault(value, len(places)) for value in values], np.int32)
