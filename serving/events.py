"""Define the part of `Recommender` that stores and deletes events, and encodes, pins, evicts and saves pages.

Letters: E events of a call.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from data.types import Dataset
from serving import snapshot
from serving.errors import CacheFull, InvalidRequest
from serving.histories import UserHistory, no_garbage_collection
from serving.ids import user_keys
from serving.served import ServedRun
from serving.times import event_times


class Events(ServedRun):
    """The events and the pages of users."""

    def append(self, users, items, timestamps=None, actions=None, *, features=None, encode: bool = True) -> None:
        """Add events.

        Args:
            users, items: [E] ids, integers or text. Users may be new; items must be known to the run.
            timestamps: [E] integers, seconds; optional if the run's data had none. An event earlier than the user's
                last one is inserted in time order, after events of the same second.
            actions: [E] if the model reads actions, in the units of the run's data: numbers (such as stars) or text.
            features: the run's features of events, name -> a value for each event, as in `add_users`; features that are
                left out have no value.
            encode: bring the pages of new users and of users who have pages up to date now; otherwise each user's next
                request does.

        Raises, with nothing changed: UnknownItem, MissingActions, InvalidRequest, LimitReached.

        Examples:
            >>> recommender.append(["new", "new"], ["s1", "s2"], [1_800_000_000, 1_800_000_060])
            >>> recommender.num_users, recommender.history("new").items.tolist()
            (25, ['s1', 's2'])
        """
        self.append_rows(*self.checked(users, items, timestamps, actions, features), encode=encode)

    def checked(
        self, users, items, timestamps=None, actions=None, features=None
    ) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray | None]:
        """Return the arguments of `append_rows` for events; raise the errors of `append` except LimitReached."""
        keys, rows = user_keys(users), self.items.rows("items", items)
        if len(keys) != len(rows):
            raise InvalidRequest(f"users and items: expected the same number of both, got {len(keys)} and {len(rows)}")
        times = event_times(timestamps, len(rows), self.has_timestamps)
        return keys, rows, times, self.contexts.codes(actions, len(rows), features)

    def check_room(self, users: Sequence[str]) -> None:
        """Raise LimitReached if there is no room for one more event of each of `users`, who may occur repeatedly."""
        counts = Counter(users)
        with self._lock:
            self._histories.check_room(list(counts), list(counts.values()))

    @property
    def num_users(self) -> int:
        """The number of users who have events.

        Examples:
            >>> recommender.num_users
            24
        """
        return len(self._histories)

    def knows(self, user: str) -> bool:
        """Return whether a user (id as text) has events.

        Examples:
            >>> recommender.knows("c3"), recommender.knows("new")
            (True, False)
        """
        return user in self._histories

    def users_with_pages(self) -> list[str]:
        """Return the users (ids as text) who have pages, the most recently used last."""
        with self._lock:
            return list(self._engine.caches.entries)

    def append_rows(
        self,
        users: Sequence[str],
        rows: np.ndarray,
        times: np.ndarray,
        codes: np.ndarray | None,
        *,
        encode: bool = True,
    ) -> list[str]:
        """Append events like `append`.

        users: [E] ids as text; rows: [E] rows of the item table; times: [E] seconds; codes: [E], see `Contexts`.

        Returns the users whose pages `encode` has to bring up to date; none if this call encoded them.
        """
        places: dict[str, list[int]] = {}
        for place, key in enumerate(users):
            places.setdefault(key, []).append(place)
        histories, engine = self._histories, self._engine
        with self._lock:
            histories.check_room(list(places), [len(positions) for positions in places.values()])
            stale = []
            items, seconds = rows.tolist(), times.tolist()
            actions = [None] * len(items) if codes is None else codes.tolist()
            for key, positions in places.items():
                if key not in histories or key in engine.caches:
                    stale.append(key)
                if len(positions) == 1:
                    (place,) = positions
                    unchanged = histories.add_one(key, items[place], seconds[place], actions[place])
                else:
                    user_codes = None if codes is None else codes[positions]
                    unchanged = histories.add(key, rows[positions], times[positions], user_codes)
                engine.changed(key, self._history(key), unchanged)
            self._popularity.add(rows, times)
            if not encode:
                return stale
            self.encode(stale)
            return []

    def encode(self, users: Sequence[str]) -> None:
        """Bring the pages of these users (ids as text) up to date; ignore users without events."""
        with self._lock:
            keys = [key for key in dict.fromkeys(users) if key in self._histories]
            # If pinned users fill the cache, the events are stored nevertheless, and later requests raise CacheFull.
            with suppress(CacheFull):
                self._engine.update(keys, [self._history(key) for key in keys])

    def encode_ahead(self, tokens: int | None = None) -> int:
        """Encode up to `tokens` tokens of users' next windows, to be called in idle time; return the number encoded."""
        with self._lock:
            return self._engine.encode_ahead(self._histories.get, tokens)

    def add_many(
        self, users: list[str], places: np.ndarray, rows: np.ndarray, times: np.ndarray, codes: np.ndarray | None
    ) -> None:
        """Add events of many users at once, without encoding them.

        users: distinct, each with an event; places: [E] the index of each event's user in `users`; the others: as in
        `append_rows`. Raises LimitReached, with nothing changed.
        """
        with self._lock, no_garbage_collection():
            self._histories.check_room(users, np.bincount(places, minlength=len(users)).tolist())
            self._histories.add_many(users, places, rows, times, codes)
            self._popularity.add(rows, times)
            for user in set(users).intersection(self._engine.caches.entries):
                self._engine.changed(user, self._history(user), 0)

    def add_dataset(self, dataset: Dataset) -> None:
        """Add the events and users' features of a data set with the run's items, without encoding them."""
        counts = np.diff(dataset.user_offsets)
        users = [str(user) for user in np.asarray(dataset.user_ids)[counts > 0].tolist()]
        places = np.repeat(np.arange(len(users)), counts[counts > 0])
        codes = self.contexts.joined(None if self.actions is None else dataset.actions, dataset.event_rows)
        self.add_many(users, places, dataset.items, dataset.timestamps, codes)
        self.contexts.put_data(users, None if dataset.user_rows is None else dataset.user_rows[counts > 0])

    def history(self, user) -> UserHistory:
        """Return the events of a user that the model sees; raise NoHistory if there are none.

        Examples:
            >>> seen = recommender.history("c3")
            >>> seen.items.tolist(), seen.count
            (['s3', 's4', 's5', 's6', 's7', 's8', 's0'], 7)
        """
        (key,) = user_keys([user])
        with self._lock:
            h = self._history(key)
            cut = self.window.begin(h.count) - h.first
            actions = None if h.actions is None else self.contexts.action_codes(h.actions[cut:])
            return UserHistory(self.items.original(h.items[cut:]), h.timestamps[cut:].copy(), actions, h.count)

    def forget(self, user) -> bool:
        """Delete the events, features, pages and pin of a user; return whether there were events or features.

        Examples:
            >>> recommender.forget("c3"), recommender.knows("c3"), recommender.forget("c3")
            (True, False, False)
        """
        (key,) = user_keys([user])
        with self._lock:
            self._engine.caches.pinned.discard(key)
            self._engine.caches.drop(key)
            if (history := self._histories.get(key)) is not None:
                self._popularity.add(history.items, history.timestamps, -1)
            described = self.contexts.forget(key)
            return self._histories.forget(key) or described

    def pin(self, users) -> None:
        """Protect the pages of these users from eviction; raise NoHistory for a user without events.

        Examples:
            >>> recommender.pin(["c3", "c4"])
            >>> recommender.statistics["users_pinned"]
            2
        """
        keys = user_keys(users)
        with self._lock:
            for key in keys:
                self._history(key)
            self._engine.caches.pinned.update(keys)

    def unpin(self, users) -> None:
        """Undo `pin` for these users.

        Examples:
            >>> recommender.pin(["c3", "c4"])
            >>> recommender.unpin(["c3"])
            >>> recommender.statistics["users_pinned"]
            1
        """
        with self._lock:
            self._engine.caches.pinned.difference_update(user_keys(users))

    def evict(self, users) -> int:
        """Free the pages of users, pinned or not, but keep their events; return how many of them had pages.

        Examples:
            >>> _ = recommender.recommend(["c3"], k=1)  # encodes the user's window
            >>> recommender.evict(["c3", "c4"]), recommender.knows("c3")
            (1, True)
        """
        with self._lock:
            return sum(self._engine.caches.drop(key) for key in user_keys(users))

    def save(self, folder: str | Path) -> None:
        """Write events and pages of all users into `folder`, whole or not at all; raise StoreError if this fails.

        Examples:
            >>> recommender.append(["new"], ["s1"], [1_800_000_000])
            >>> recommender.save("state")
        """
        with self._lock:
            weights = snapshot.weights_checksum(self.model)
            snapshot.save(Path(folder), self._facts, weights, self._histories, self._engine.caches, self.contexts)

    def restore(self, folder: str | Path) -> None:
        """Replace all users by those of a store that `save` wrote.

        Pages are loaded if they have the same format and were computed with the same weights; otherwise they are
        computed again when needed. Raises StoreError, with nothing changed, if the folder is damaged or belongs to
        another run.

        Examples:
            >>> recommender.save("state-of-24")
            >>> recommender.append(["new"], ["s1"], [1_800_000_000])
            >>> recommender.restore("state-of-24")
            >>> recommender.num_users
            24
            >>> recommender.restore("nowhere")
            Traceback (most recent call last):
            serving.errors.StoreError: nowhere...
        """
        with self._lock:
            weights, caches = snapshot.weights_checksum(self.model), self._engine.caches
            self._histories = snapshot.restore(
                Path(folder), self._facts, weights, self._histories, caches, self.contexts
            )
            self._engine.restored()
            self._popularity.clear()
            for _, history in self._histories:
                self._popularity.add(history.items, history.timestamps)
