"""Store each user's latest events, number of events, and seen items. Numpy only.

Letters: E events of a call, n events of a user, C events that a window holds at most, S its slide.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from serving.errors import LimitReached

PLACE_BITS = 32


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector: it takes half of the time in which a million objects are created."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def keep_objects() -> None:
    """Collect garbage a last time, then exclude all current objects from garbage collection.

    Each collection of the modules of torch stops all threads for half a second, and a service creates few new cycles.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Window:
    """The window of the events that the model sees: those from `begin(n)` on for a user with n events.

    capacity  C, the number of events that the model has positions for
    slide     S, from 1 to C: the number of events that leave the window at a time; 1 keeps the latest C events
    """

    capacity: int
    slide: int

    def begin(self, count: int) -> int:
        """Return the first event of the window of a user with `count` events; it depends only on this number."""
        return self.slide * -(-max(0, count - self.capacity) // self.slide)

    def stored_from(self, counts: np.ndarray) -> np.ndarray:
        """Return the first stored event of users with `counts` events, see `Histories`."""
        begins = self.slide * -(-np.maximum(0, counts - self.capacity) // self.slide)
        return np.maximum(0, begins - self.slide)


class History:
    """The events of one user, in time order, ties in order of arrival.

    count       n, the number of all events of the user
    first       the number of the first stored event; earlier ones cannot be in any future window
    items       [n - first] int32, rows of the item table
    timestamps  [n - first] int64, seconds
    actions     [n - first] int32, or None
    seen        int32, ascending: the distinct items of all n events

    The columns are views of longer arrays, to which events are added until they are full.
    """

    __slots__ = ("_columns", "_end", "_room", "actions", "count", "first", "items", "last", "seen", "timestamps")

    def __init__(
        self,
        count: int,
        first: int,
        items: np.ndarray,
        timestamps: np.ndarray,
        actions: np.ndarray | None,
        seen: np.ndarray,
    ):
        self.count, self.first, self.seen = count, first, seen
        self._take(items, timestamps, actions)
        self.last = int(timestamps[-1]) if len(timestamps) else 0  # the time of the last event

    def _take(self, items: np.ndarray, timestamps: np.ndarray, actions: np.ndarray | None) -> None:
        """Set the columns, without room for more events."""
        self.items, self.timestamps, self.actions = items, timestamps, actions
        self._columns = items, timestamps, actions
        self._end = self._room = len(items)

    def push(self, item: int, timestamp: int, action: int | None, cut: int) -> None:
        """Add an event that is not earlier than the others, and remove the first `cut` stored events."""
        begin, end = self._end - len(self.items) + cut, self._end + 1
        if end > self._room:
            size = self._end - begin
            room = size + max(8, size // 8)

            def longer(x: np.ndarray) -> np.ndarray:
                copy = np.empty(room, x.dtype)
                copy[:size] = x[cut:]
                return copy

            self._columns = (
                longer(self.items), longer(self.timestamps), None if self.actions is None else longer(self.actions)
            )  # fmt: skip
            begin, end, self._room = 0, size + 1, room
        items, timestamps, actions = self._columns
        items[end - 1], timestamps[end - 1] = item, timestamp
        self.items, self.timestamps, self._end = items[begin:end], timestamps[begin:end], end
        if actions is not None:
            actions[end - 1] = action
            self.actions = actions[begin:end]
        self.count += 1
        self.first += cut
        self.last = timestamp
        place = int(self.seen.searchsorted(np.int32(item)))
        if place == len(self.seen) or self.seen[place] != item:
            self.seen = np.concatenate([self.seen[:place], [item], self.seen[place:]], dtype=np.int32)


class Packed(NamedTuple):
    """The histories of many users as flat columns; a `History` is created when it is first needed.

    counts, firsts   [users] the values of `History`
    ends, seen_ends  [users] the ends of each user's part of the columns, which begins at the previous user's end
    items, timestamps, actions, seen   the columns of `History`, user by user
    """

    counts: np.ndarray
    firsts: np.ndarray
    ends: np.ndarray
    seen_ends: np.ndarray
    items: np.ndarray
    timestamps: np.ndarray
    actions: np.ndarray | None
    seen: np.ndarray

    def history(self, place: int) -> History:
        """Return the history of the user at `place`."""
        begins = (self.ends[place - 1], self.seen_ends[place - 1]) if place else (0, 0)
        events, items = slice(begins[0], self.ends[place]), slice(begins[1], self.seen_ends[place])
        return History(
            int(self.counts[place]),
            int(self.firsts[place]),
            self.items[events].copy(),
            self.timestamps[events].copy(),
            None if self.actions is None else self.actions[events].copy(),
            self.seen[items].copy(),
        )


def time_order(owners: np.ndarray, timestamps: np.ndarray) -> np.ndarray:
    """Return the indices [E] that sort events by owner, then time, stably; fast if long parts are already sorted.

    owners: [E] integers >= 0; timestamps: [E] int64.
    """
    if not len(owners):
        return np.zeros(0, np.int64)
    begin = int(timestamps.min())
    span = int(timestamps.max()) - begin + 1
    if span * (int(owners.max()) + 1) < 2**62:
        return np.argsort(owners.astype(np.int64) * span + (timestamps - begin), kind="stable")
    return np.lexsort((timestamps, owners))


class UserHistory(NamedTuple):
    """The events of a user that the model sees: the latest of all `count` events, in time order.

    items [W] original ids; timestamps [W] int64, seconds; actions [W] int32 codes, or None

    Examples:
        >>> seen = recommender.history("c3")
        >>> int(seen.timestamps[-1] - seen.timestamps[0]), seen.actions is None, seen.count
        (360, True, 7)
    """

    items: np.ndarray
    timestamps: np.ndarray
    actions: np.ndarray | None
    count: int  # type: ignore[assignment]  # a tuple has a method of that name


class Histories:
    """The histories of all users, by id as text.

    A window slides after at most S more events, and a late event may push an event from before the window back into it.
    So events are stored from S events before the window's begin on, which makes every later window complete.
    """

    def __init__(self, window: Window, has_actions: bool, most_users: int, most_events: int):
        self.window, self.has_actions = window, has_actions
        self.most_users, self.most_events = most_users, most_events
        # A number refers to a history in `_packed`: the block in the upper bits, the place in the lower ones.
        self._users: dict[str, History | int] = {}
        self._packed: list[Packed] = []

    def __len__(self) -> int:
        return len(self._users)

    def __contains__(self, user: str) -> bool:
        return user in self._users

    def __iter__(self) -> Iterator[tuple[str, History]]:
        return ((user, cast(History, self.get(user))) for user in self._users)

    def get(self, user: str) -> History | None:
        history = self._users.get(user)
        if isinstance(history, int):
            history = self._packed[history >> PLACE_BITS].history(history & (2**PLACE_BITS - 1))
            self._users[user] = history
        return history

    def forget(self, user: str) -> bool:
        """Delete the events of a user; return whether there were any."""
        return self._users.pop(user, None) is not None

    def put(self, user: str, history: History) -> None:
        self._users[user] = history

    def check_room(self, users: list[str], counts: list[int]) -> None:
        """Raise LimitReached if there is no room for `counts` more events of each of `users`, who are distinct."""
        if len(self._users) + len(users) > self.most_users:
            new = sum(user not in self._users for user in users)
            if len(self._users) + new > self.most_users:
                raise LimitReached(f"expected at most {self.most_users:,} users with events (--max-users, most_users)")
        for user, more in zip(users, counts):
            known = self.get(user)
            if (known.count if known else 0) + more > self.most_events:
                raise LimitReached(f"expected at most {self.most_events:,} events a user (--max-history, most_events)")

    def add(self, user: str, items: np.ndarray, timestamps: np.ndarray, actions: np.ndarray | None) -> int:
        """Add events of one user; an event earlier than the last one is inserted in time order, after ties.

        items: [E] int; timestamps: [E] int64; actions: [E] int, or None without actions.

        Returns the number of the user's first events that did not change.
        """
        items, actions = items.astype(np.int32), None if actions is None else actions.astype(np.int32)
        if not len(items):
            known = self.get(user)
            return known.count if known else 0
        old = self.get(user)
        if old is None:
            nothing = np.zeros(0, np.int32)
            old = History(0, 0, nothing, np.zeros(0, np.int64), nothing if self.has_actions else None, nothing)
        # An event earlier than the first stored one is not stored, only counted and added to the seen items.
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

    def add_many(
        self, users: Sequence[str], places: np.ndarray, items: np.ndarray, timestamps: np.ndarray,
        actions: np.ndarray | None,
    ) -> None:  # fmt: skip
        """Add events of many users like `add`, but sort them all at once.

        users: distinct, each with an event; places: [E] the index of each event's user in `users`; others: as in `add`.
        """
        if not users:
            return
        width = int(items.max()) + 1
        pairs = np.unique(places.astype(np.int64) * width + items)
        seen, seen_ends = (pairs % width).astype(np.int32), np.cumsum(np.bincount(pairs // width, minlength=len(users)))
        order = time_order(places, timestamps)
        items, timestamps = items[order].astype(np.int32), timestamps[order]
        actions = actions[order].astype(np.int32) if self.has_actions and actions is not None else None
        counts = np.bincount(places, minlength=len(users))
        ends, firsts = np.cumsum(counts), self.window.stored_from(counts)
        known = [place for place, user in enumerate(users) if user in self._users]
        for place in known:
            events = slice(ends[place] - counts[place], ends[place])
            self.add(users[place], items[events], timestamps[events], None if actions is None else actions[events])
        stored = np.arange(len(items)) >= np.repeat(ends - counts + firsts, counts)
        block = Packed(
            counts,
            firsts,
            np.cumsum(counts - firsts),
            seen_ends,
            items[stored],
            timestamps[stored],
            None if actions is None else actions[stored],
            seen,
        )
        begin = len(self._packed) << PLACE_BITS
        new: dict[str, History | int] = dict(zip(users, range(begin, begin + len(users))))
        for place in known:
            del new[users[place]]
        self._packed.append(block)
        self._users.update(new)

    def add_one(self, user: str, item: int, timestamp: int, action: int | None) -> int:
        """Add one event like `add`; the usual case, an event later than all others, needs no sorting."""
        old = self.get(user)
        if old is None or timestamp < old.last:
            actions = None if action is None else np.array([action])
            return self.add(user, np.array([item]), np.array([timestamp], np.int64), actions)
        before = old.count
        old.push(item, timestamp, action, max(0, self.window.begin(before + 1) - self.window.slide - old.first))
        return before
