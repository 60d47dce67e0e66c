"""What the service knows of its users: their latest events, how many there were, and all items seen. numpy alone.

Letters: E events of a call, n events of a user, C events that a window holds at most, S its slide.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from models.serving.errors import LimitReached


@dataclass(frozen=True)
class Window:
    """Which events of a user the model sees: those from `begin(n)` on.

    capacity  C, the events that the model has positions for
    slide     S, from 1 to C: how many events leave the window at a time; 1 keeps the latest C events
    """

    capacity: int
    slide: int

    def begin(self, count: int) -> int:
        """The first event of the window of a user with `count` events. It depends on nothing but that number."""
        return self.slide * -(-max(0, count - self.capacity) // self.slide)


@dataclass
class History:
    """The events of one user, in time order, ties in the order in which they came.

    count       n, all events that the user had
    first       the number of the first event that is kept; those before it have left every window to come
    items       [n - first] int32, rows of the item table
    timestamps  [n - first] int64, seconds
    actions     [n - first] int32, or None
    seen        int32, ascending: every item that the user ever met, once
    """

    count: int
    first: int
    items: np.ndarray
    timestamps: np.ndarray
    actions: np.ndarray | None
    seen: np.ndarray

    def nbytes(self) -> int:
        arrays = (self.items, self.timestamps, self.actions, self.seen)
        return sum(array.nbytes for array in arrays if array is not None)


class Histories:
    """The histories of all users, by the text of their ids.

    A window slides after at most S more events, and an event that comes late may push one from before the window back
    into it: so events are kept from S before the window's begin on, and no window ever lacks one.
    """

    def __init__(self, window: Window, has_actions: bool, most_users: int, most_events: int):
        self.window, self.has_actions = window, has_actions
        self.most_users, self.most_events = most_users, most_events
        self._users: dict[str, History] = {}

    def __len__(self) -> int:
        return len(self._users)

    def __contains__(self, user: str) -> bool:
        return user in self._users

    def __iter__(self) -> Iterator[tuple[str, History]]:
        return iter(self._users.items())

    def get(self, user: str) -> History | None:
        return self._users.get(user)

    def forget(self, user: str) -> bool:
        """Drops everything known of a user; returns whether there was something."""
        return self._users.pop(user, None) is not None

    def put(self, user: str, history: History) -> None:
        self._users[user] = history

    @property
    def nbytes(self) -> int:
        return sum(history.nbytes() for history in self._users.values())

    def check_room(self, users: list[str], counts: list[int]) -> None:
        """LimitReached where `counts` more events of each of `users` (which are distinct) are too many."""
        new = sum(user not in self._users for user in users)
        if len(self._users) + new > self.most_users:
            raise LimitReached(f"the store holds at most {self.most_users:,} users")
        for user, more in zip(users, counts):
            known = self._users.get(user)
            if (known.count if known else 0) + more > self.most_events:
                raise LimitReached(f"a user may have at most {self.most_events:,} events")

    def add(self, user: str, items: np.ndarray, timestamps: np.ndarray, actions: np.ndarray | None) -> int:
        """Adds events of one user; an event earlier than the last one is put in its place in time, behind its ties.

        items: [E] int; timestamps: [E] int64; actions: [E] int, or None without actions.

        Returns the number of events, from the user's first on, which are what and where they were.
        """
        items, actions = items.astype(np.int32), None if actions is None else actions.astype(np.int32)
        if not len(items):
            known = self._users.get(user)
            return known.count if known else 0
        old = self._users.get(user)
        if old is None:
            nothing = np.zeros(0, np.int32)
            old = History(0, 0, nothing, np.zeros(0, np.int64), nothing if self.has_actions else None, nothing)
        # What is earlier than the first kept event belongs among those that are gone: it is counted, and it was seen.
        gone = timestamps < old.timestamps[0] if old.first else np.zeros(len(items), bool)
        stay = ~gone
        times = np.concatenate([old.timestamps, timestamps[stay]])
        order = np.argsort(times, kind="stable")
        moved = order != np.arange(len(order))
        moved[len(old.items) :] = True
        unchanged = 0 if gone.any() else old.first + int(np.argmax(np.append(moved, True)))

        def merged(before: Any, new: Any) -> np.ndarray:
            return np.concatenate([before, new[stay]])[order]

        count, first = old.count + len(items), old.first + int(gone.sum())
        cut = max(0, self.window.begin(count) - self.window.slide - first)
        self._users[user] = History(
            count,
            first + cut,
            merged(old.items, items)[cut:].copy(),
            times[order][cut:].copy(),
            merged(old.actions, actions)[cut:].copy() if self.has_actions else None,
            np.union1d(old.seen, items).astype(np.int32),
        )
        return unchanged

    def add_one(self, user: str, item: int, timestamp: int, action: int | None) -> int:
        """As `add`, of one event; behind all others, as a service mostly has it, without sorting anything."""
        old = self._users.get(user)
        if old is None or timestamp < old.timestamps[-1]:
            actions = None if action is None else np.array([action])
            return self.add(user, np.array([item]), np.array([timestamp], np.int64), actions)
        count, row = old.count + 1, np.int32(item)
        place = int(old.seen.searchsorted(row))
        seen = old.seen
        if place == len(seen) or seen[place] != item:
            seen = np.concatenate([seen[:place], [row], seen[place:]], dtype=np.int32)
        cut = max(0, self.window.begin(count) - self.window.slide - old.first)
        self._users[user] = History(
            count,
            old.first + cut,
            longer(old.items, cut, item),
            longer(old.timestamps, cut, timestamp),
            longer(cast(np.ndarray, old.actions), cut, cast(int, action)) if self.has_actions else None,
            seen,
        )
        return old.count


def longer(x: np.ndarray, cut: int, value: int) -> np.ndarray:
    """A copy of x without its first `cut` entries, with a value behind the last."""
    found = np.empty(len(x) - cut + 1, x.dtype)
    found[:-1] = x[cut:]
    found[-1] = value
    return found
