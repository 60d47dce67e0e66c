"""Define `Recommender`: a trained run that takes events and answers with recommendations, from Python.

Letters: E events of a call, B users, M candidates of a user, A kinds of action, k length of a list.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from data.types import Dataset, shown
from data.vocabulary import Vocabulary, with_items
from evaluation.item_filters import ALL_ITEMS, ItemFilter
from models.heads import normalized
from models.hstu import SequenceModel
from models.tasks.build import build_task
from serving import snapshot
from serving.actions import ActionCodes
from serving.engine import Ask, Engine
from serving.errors import CacheFull, InvalidRequest, NoHistory
from serving.filters import Filter, FilterLists
from serving.histories import Histories, History, UserHistory, no_garbage_collection
from serving.ids import ItemIds, user_keys
from serving.inspection import Inspection, check_length, list_frame
from serving.new_items import Additions, checked_items
from serving.options import ServingOptions, served_form, window_of
from serving.popularity import Popularity
from serving.search import Search, candidate_scores, windows_of
from serving.times import event_times, request_times
from training.config import RunConfig
from training.folder import read_manifest
from training.run import find_data, open_weights, trained_model

COLD = ("popular", "error")  # answers for users without events


class Recommender(Inspection):
    """A served run: takes events and returns recommendations and scores, in the ids of the run's data.

    The keys and values of each user's window are cached in pages, so that a request computes one token and an event one
    more. User ids may be new; 7 and "7" are the same user. Every call takes many users. Any number of threads may call;
    one at a time is served.
    """

    def __init__(
        self,
        model: SequenceModel,
        config: RunConfig,
        vocabulary: Vocabulary,
        *,
        has_timestamps: bool = True,
        name: str = "",
        label: str = "",
        options: ServingOptions | None = None,
        clock: Callable[[], float] = time.time,
    ):
        """Serve a model.

        Args:
            model, config: a `SequenceModel` with its weights on its device, and the configuration it was built from.
            vocabulary: what the rows of its tables stand for.
            has_timestamps: whether the data had times; without, times order events and tell the model nothing.
            name: the run's id, which a saved store must come from.
            label: what replies call the model; by default the configuration's name.
            options: see `ServingOptions`.
            clock: the time, in seconds, that requests without a time of their own have.

        Raises ServingError for what cannot be served.
        """
        options = options or ServingOptions()
        self.config, self.options, self.name, self.clock = config, options, name, clock
        self.label = label or config.name
        self.dataset: Dataset | None = None  # of `history`, until a log was replayed
        self.has_timestamps = has_timestamps
        self.ranking, self._task = served_form(config).candidates > 0, build_task(config)
        self.items, self.vocabulary = ItemIds(vocabulary.item_ids), vocabulary
        self.actions = ActionCodes(config, vocabulary) if config.embeds_actions else None
        self.window = window_of(config, options.slide)
        self._histories = Histories(self.window, config.embeds_actions, options.most_users, options.most_events)
        self._engine = Engine(model, config, self.window, options)
        self._search = None if self.ranking else Search(self._engine, len(self.items))
        self.filters = FilterLists(self.items, vocabulary)
        half_life = options.popular_days * 86_400 if has_timestamps else None
        self._popularity = Popularity(len(self.items), half_life, clock)
        window, reads = self.window, self.actions is not None
        self._facts = {  # what a saved store must agree with
            "run": name, "items": len(self.items), "actions": reads, "capacity": window.capacity, "slide": window.slide
        }  # fmt: skip
        self._lock = threading.RLock()

    @classmethod
    def load(cls, run: str | Path, *, history: bool = False, device: str | None = None, **options) -> Self:
        """Serve the run in the folder `run`.

        Args:
            history: start with the events of the run's data.
            device: "cpu" or "cuda"; by default what the run's configuration says.
            options: see `ServingOptions`.

        Raises ServingError for a run that cannot be served, and the errors of eval.py for one that cannot be read.
        """
        run = Path(run)
        config, known, weights, source, _ = open_weights(run, [f"device={device}"] if device else [])
        dataset = find_data(config, known) if history else None
        model = trained_model(config, known, weights, source)
        served = cls(
            model,
            config,
            known.vocabulary,
            has_timestamps=known.has_timestamps,
            name=read_manifest(run)["run"],
            label=run.resolve().name,
            options=ServingOptions(**options),
        )
        if dataset is not None:
            served.add_dataset(dataset)
            served.dataset = dataset
        return served

    @property
    def model(self) -> SequenceModel:
        return self._engine.model

    def append(self, users, items, timestamps=None, actions=None, *, encode: bool = True) -> None:
        """Add events.

        Args:
            users, items: [E] ids, integers or text. A user may be new; an item must be one that the run knows.
            timestamps: [E] integers, seconds; may be left out where the run's data had none. An event before the
                user's last one takes its place in time, behind events of the same second.
            actions: [E] where the model reads them, in the units of the run's data: numbers (stars, say) or text.
            encode: bring the pages of new users and of those who have some up to date now; else the next request does.

        Raises, with nothing changed: UnknownItem, MissingActions, InvalidRequest, LimitReached.
        """
        self.append_rows(*self.checked(users, items, timestamps, actions), encode=encode)

    def checked(
        self, users, items, timestamps=None, actions=None
    ) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray | None]:
        """Return events in the form of `append_rows`; raises the errors of `append` except LimitReached."""
        keys, rows = user_keys(users), self.items.rows("items", items)
        if len(keys) != len(rows):
            raise InvalidRequest(f"users and items: expected as many of each, got {len(keys)} and {len(rows)}")
        times = event_times(timestamps, len(rows), self.has_timestamps)
        if self.actions is None and actions is not None:
            raise InvalidRequest("actions: the run reads none, leave them out")
        return keys, rows, times, None if self.actions is None else self.actions.codes(actions, len(rows))

    def check_room(self, users: Sequence[str]) -> None:
        """Raise LimitReached if one more event of each of `users` (as often as they occur) would be too many."""
        counts = Counter(users)
        with self._lock:
            self._histories.check_room(list(counts), list(counts.values()))

    @property
    def num_users(self) -> int:
        """Users who have events."""
        return len(self._histories)

    def knows(self, user: str) -> bool:
        """Return whether a user, an id as text, has events."""
        return user in self._histories

    def users_with_pages(self) -> list[str]:
        """Return the ids, as texts, of the users who have pages, the last one served last."""
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
        """Append events as `append` does; users are texts, items rows of the item table, actions codes: [E] each.

        Returns the users whose pages are to be brought up to date by `encode`: none if this did so.
        """
        places: dict[str, list[int]] = {}
        for place, key in enumerate(users):
            places.setdefault(key, []).append(place)
        histories, engine = self._histories, self._engine
        with self._lock:
            histories.check_room(list(places), [len(mine) for mine in places.values()])
            stale = []
            items, seconds = rows.tolist(), times.tolist()
            actions = [None] * len(items) if codes is None else codes.tolist()
            for key, mine in places.items():
                if key not in histories or key in engine.caches:
                    stale.append(key)
                if len(mine) == 1:
                    (place,) = mine
                    unchanged = histories.add_one(key, items[place], seconds[place], actions[place])
                else:
                    unchanged = histories.add(key, rows[mine], times[mine], None if codes is None else codes[mine])
                engine.changed(key, self._history(key), unchanged)
            self._popularity.add(rows, times)
            if not encode:
                return stale
            self.encode(stale)
            return []

    def encode(self, users: Sequence[str]) -> None:
        """Bring the pages of these users, ids as texts, up to date; users without events are left out."""
        with self._lock:
            keys = [key for key in dict.fromkeys(users) if key in self._histories]
            # If pinned users fill the cache, the events are stored all the same, and a request raises CacheFull.
            with suppress(CacheFull):
                self._engine.update(keys, [self._history(key) for key in keys])

    def encode_ahead(self, tokens: int | None = None) -> int:
        """Encode tokens of windows to which users' windows will slide soon, in idle time; return how many, or 0."""
        with self._lock:
            return self._engine.encode_ahead(self._histories.get, tokens)

    def add_many(
        self, users: list[str], places: np.ndarray, rows: np.ndarray, times: np.ndarray, codes: np.ndarray | None
    ) -> None:
        """Add events of many users at once, without encoding them.

        users: distinct, each with an event; places: [E] the place of each event's user in `users`; the rest as in
        `append_rows`. Raises LimitReached, with nothing changed.
        """
        with self._lock, no_garbage_collection():
            self._histories.check_room(users, np.bincount(places, minlength=len(users)).tolist())
            self._histories.add_many(users, places, rows, times, codes)
            self._popularity.add(rows, times)
            for user in set(users).intersection(self._engine.caches.entries):
                self._engine.changed(user, self._history(user), 0)

    def add_dataset(self, dataset: Dataset) -> None:
        """Add the events of a data set whose items are the run's, without encoding them."""
        counts = np.diff(dataset.user_offsets)
        users = [str(user) for user in np.asarray(dataset.user_ids)[counts > 0].tolist()]
        places = np.repeat(np.arange(len(users)), counts[counts > 0])
        actions = None if self.actions is None else dataset.actions
        self.add_many(users, places, dataset.items, dataset.timestamps, actions)

    def add_items(self, items, features: Mapping[str, Sequence]) -> int:
        """Add items that the run was not trained on, known by their features; return how many are new.

        They are candidates at once, and events may have them. An item that there is already stays as it is.

        Args:
            items: [n] ids.
            features: the run's features of items by name, each with a value for every item: text, an integer or a
                boolean for a category, a list of these, a number, the numbers of a vector, or None.

        Raises InvalidRequest, with nothing changed, for a run without features of items among others.
        """
        with self._lock:
            return self.add_checked(self.check_items(items, features))

    def check_items(self, items, features: Mapping[str, Sequence], strict: bool = True) -> Additions:
        """Return the new ones of `add_items`. strict: otherwise what the run cannot know is left out."""
        return checked_items(self.items, self.vocabulary, items, features, strict)

    def add_checked(self, added: Additions) -> int:
        """Add what `check_items` returned; return the number of items."""
        if not len(added.ids):
            return 0
        with self._lock:
            self.vocabulary = with_items(self.vocabulary, added.ids, added.items)
            self.model.embedding.add_items(added.items)
            self.items = self.items.with_more(added.ids)
            self.filters = self.filters.with_items(self.items, self.vocabulary)
            self._facts["items"] = len(self.items)
            self._popularity.extend(len(self.items))
            self._engine.catalogue_changed()
            self._search = None if self.ranking else Search(self._engine, len(self.items))
        return len(added.ids)

    def recommend(
        self,
        users,
        k: int = 10,
        at=None,
        exclude_seen: bool | None = None,
        *,
        cold: str = "error",
        as_frame: bool = False,
        **filters,
    ) -> tuple[np.ndarray, np.ndarray] | Any:
        """Return the k best items for each user: (items [B, k] original ids, scores [B, k] float32), best first.

        Args:
            users: [B] ids.
            k: at least 1. Where fewer items are left, -1 or the empty text follows, with scores of -inf.
            at: seconds, one for all or [B]; by default now, or the user's last event where that is later.
            exclude_seen: leave out every item that the user ever met; by default unless the run's
                `eval.filter_seen` is `none`.
            cold: for users without events; `error` raises NoHistory, `popular` gives them the list of `popular`.
            as_frame: return a polars frame (user, rank, item, score) in place of arrays.
            filters: the arguments of `Filter`: allow, deny, where, at_most, filters.

        Raises NoHistory, TooEarly, InvalidRequest, UnknownFilter, CacheFull; ServingError for a run that ranks given
        candidates.
        """
        self.check_k(k)
        if cold not in COLD:
            raise InvalidRequest(f"cold: expected one of {', '.join(COLD)}, got {shown(repr(cold))}")
        keys = user_keys(users)
        items, scores = self.items.original(np.full((len(keys), k), -1)), np.full((len(keys), k), -np.inf, np.float32)
        with self._lock:
            passing = self.filters.build(Filter(**filters))
            warm = np.array([cold == "error" or key in self._histories for key in keys], bool)
            if not warm.all():
                items[~warm], scores[~warm] = self.popular(k, passing)
            if warm.any():
                times = np.asarray(at)[warm] if at is not None and np.shape(at) == warm.shape else at
                requests = self.check_requests([key for key, some in zip(keys, warm) if some], times)
                items[warm], scores[warm] = self.recommend_checked(
                    requests, k, [exclude_seen] * len(requests), [passing] * len(requests)
                )
        return list_frame("user", "item", users, items, scores) if as_frame else (items, scores)

    def check_k(self, k: int) -> None:
        """Raise InvalidRequest unless lists of `k` items can be recommended."""
        if self.ranking:
            raise InvalidRequest("the run ranks the candidates that it is given: ask for score, not recommend")
        check_length(k)

    def recommend_checked(
        self,
        requests: list[Ask],
        k: int,
        exclude_seen: Sequence[bool | None],
        filters: Sequence[ItemFilter] = (),
        out: Tensor | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what `recommend` does for requests that `check_requests` returned.

        exclude_seen: for each request; filters: that `self.filters` built, for each request, or nothing; out: the
        `checked_outputs` of the requests, if they are there.
        """
        nothing = np.zeros(0, np.int32)
        assert self._search is not None
        with self._lock:
            out = self._engine.answer(requests) if out is None else out
            by_default = self.config.eval.filter_seen != "none"
            leave_out = [by_default if without is None else without for without in exclude_seen]
            seen = [request.history.seen if without else nothing for request, without in zip(requests, leave_out)]
            seen = seen if any(leave_out) else []
            return self._listed(*self._search.lists(out, k, seen, filters, windows_of(self._engine, requests)), k)

    def popular(self, k: int, passing: ItemFilter = ALL_ITEMS) -> tuple[np.ndarray, np.ndarray]:
        """Return the k items that pass with the most events, of which recent ones count more: (items [k], counts [k]).

        An event counts half as much as one that is `ServingOptions.popular_days` later. Equal items are in the order of
        the run's items.
        """
        with self._lock:
            items, scores = self._listed(*self._popularity.lists(k, passing), k)
        return items[0], scores[0]

    def _listed(self, values: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (original ids [B, k], scores [B, k]) of lists that may be shorter."""
        if values.shape[1] < k:
            more = ((0, 0), (0, k - values.shape[1]))
            values, rows = np.pad(values, more, constant_values=-np.inf), np.pad(rows, more, constant_values=-1)
        return self.items.original(np.where(values == -np.inf, -1, rows)), values

    def score(self, users, candidates, at=None) -> np.ndarray:
        """Return the scores of candidates: [B, M] float32; of a ranking run with A > 1 kinds of action, [B, M, A].

        A score is the cosine or the head's value for retrieval, the probability of an action for ranking. Candidates
        do not see one another: their order and their company change nothing.

        Args:
            users: [B] ids; candidates: [B, M] ids of items.
            at: as in `recommend`.

        Raises UnknownItem, NoHistory, TooEarly, InvalidRequest, CacheFull.
        """
        keys, rows = user_keys(users), self.items.rows("candidates", candidates, 2)
        if len(rows) != len(keys) and (len(keys) or rows.size):
            raise InvalidRequest(f"candidates: expected a row for each of {len(keys)} users, got {len(rows)}")
        with self._lock:
            scores = self.score_checked(self.check_requests(keys, at), list(rows))
        return np.stack(scores) if scores else np.zeros(rows.shape, np.float32)

    def score_checked(
        self, requests: list[Ask], candidates: Sequence[np.ndarray], out: Tensor | None = None
    ) -> list[np.ndarray]:
        """Return the scores of candidates, rows of the item table, for each request of `check_requests`."""
        with self._lock:
            return candidate_scores(self._engine, self._task, requests, candidates, out)

    def checked_outputs(self, requests: list[Ask], users: Sequence[str] = ()) -> Tensor:
        """Return the model's outputs for checked requests, not normalised: [B, E]. users: as in `Engine.answer`."""
        with self._lock:
            known = ((user, self._histories.get(user)) for user in dict.fromkeys(users))
            return self._engine.answer(requests, [(user, history) for user, history in known if history is not None])

    def outputs(self, users: Sequence[str], at=None) -> Tensor:
        """Return the model's outputs for users (their ids as texts) at the time `at`: [B, E] of length one."""
        with self._lock:
            return normalized(self._engine.answer(self.check_requests(users, at)))

    def candidate_outputs(self, users: Sequence[str], candidates: Sequence[np.ndarray], at=None) -> Tensor:
        """Return outputs at a ranking run's candidates, rows of the item table, end to end: [sum of M, E], not
        normalised.
        """
        with self._lock:
            requests = zip(self.check_requests(users, at), candidates)
            return self._engine.answer([request._replace(candidates=mine) for request, mine in requests])

    def _history(self, user: str) -> History:
        """Return the history of a user; NoHistory if there is none."""
        history = self._histories.get(user)
        if history is None:
            raise NoHistory(f"user {shown(user)} has no event")
        return history

    def check_requests(self, users: Sequence[str], at) -> list[Ask]:
        """Return checked requests of users (their ids as texts), valid until events are added. at: see `recommend`."""
        histories = [self._history(user) for user in users]
        last = np.array([history.last for history in histories], np.int64)
        if not self.has_timestamps:
            return [Ask(*each) for each in zip(users, histories, last.tolist())]
        times = request_times(at, users, last, self.clock)
        return [Ask(*each) for each in zip(users, histories, times.tolist())]

    def history(self, user) -> UserHistory:
        """Return what the model sees of a user; NoHistory for one without events."""
        (key,) = user_keys([user])
        with self._lock:
            h = self._history(key)
            cut = self.window.begin(h.count) - h.first
            actions = None if h.actions is None else h.actions[cut:].copy()
            return UserHistory(self.items.original(h.items[cut:]), h.timestamps[cut:].copy(), actions, h.count)

    def forget(self, user) -> bool:
        """Drop all that is known of a user, pages and pin included; returns whether there was something."""
        (key,) = user_keys([user])
        with self._lock:
            self._engine.caches.pinned.discard(key)
            self._engine.caches.drop(key)
            if (history := self._histories.get(key)) is not None:
                self._popularity.add(history.items, history.timestamps, -1)
            return self._histories.forget(key)

    def pin(self, users) -> None:
        """Protect the pages of these users from eviction; NoHistory for a user without events."""
        keys = user_keys(users)
        with self._lock:
            for key in keys:
                self._history(key)
            self._engine.caches.pinned.update(keys)

    def unpin(self, users) -> None:
        """Take a pin back."""
        with self._lock:
            self._engine.caches.pinned.difference_update(user_keys(users))

    def evict(self, users) -> int:
        """Drop the pages of users, pinned or not; their events stay. Returns how many had pages."""
        with self._lock:
            return sum(self._engine.caches.drop(key) for key in user_keys(users))

    @property
    def statistics(self) -> dict[str, int]:
        """Count users, those with pages, pinned ones, pages in use, bytes of pages and of events, and so on."""
        with self._lock:
            return {"users": len(self._histories)} | self._engine.statistics

    @property
    def description(self) -> dict:
        """The pages' format, the bytes of a full window in it and in bf16, the events of a window, and the slide."""
        return self._engine.description | {"events_of_a_window": self.window.capacity, "slide": self.window.slide}

    def save(self, folder: str | Path) -> None:
        """Write events and pages of all users into `folder`, whole or not at all; StoreError where that cannot be."""
        with self._lock:
            weights = snapshot.weights_checksum(self.model)
            snapshot.save(Path(folder), self._facts, weights, self._histories, self._engine.caches)

    def restore(self, folder: str | Path) -> None:
        """Load a store that `save` wrote, in place of all current events.

        Pages are loaded if they have the same format and were computed with the same weights, else encoded when they
        are needed. StoreError for a folder that is damaged or of another run; nothing is changed then.
        """
        with self._lock:
            weights, caches = snapshot.weights_checksum(self.model), self._engine.caches
            self._histories = snapshot.restore(Path(folder), self._facts, weights, self._histories, caches)
            self._engine.restored()
            self._popularity.clear()
            for _, history in self._histories:
                self._popularity.add(history.items, history.timestamps)
