"""Define `Recommender`, which takes events and returns recommendations and scores of a trained run.

Letters: B users, M candidates of a user, A kinds of action, k length of a list.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from data.features.vocabulary import with_rows
from data.types import shown
from evaluation.item_filters import ALL_ITEMS, ItemFilter
from models.heads import normalized
from serving.catalogue import Catalogue
from serving.engine import UserRequest
from serving.errors import InvalidRequest
from serving.events import Events
from serving.filters import Filter
from serving.ids import user_keys
from serving.inspection import Inspection, check_length, list_frame
from serving.options import ServingOptions
from serving.search import candidate_scores, windows_of
from serving.user_features import UserFeatures
from training.folder import read_manifest
from training.run import find_data, open_weights, trained_model

COLD = ("popular", "error")  # answers for users without events


class Recommender(Events, Catalogue, UserFeatures, Inspection):
    """A served run: takes events and returns recommendations and scores, in the ids of the run's data.

    The keys and values of each user's window are cached in pages, so that a request computes one token, and one more
    for each new event. User ids may be new; 7 and "7" are the same user. Every call takes many users. Calls from
    several threads are safe and run one at a time.

    Examples:
        >>> recommender.append(["new"], ["s1"], [1_800_000_000])
        >>> items, scores = recommender.recommend(["c3", "new"], k=3)
        >>> items.shape, scores.shape, recommender.model.training
        ((2, 3), (2, 3), False)
    """

    @classmethod
    def load(cls, run: str | Path, *, history: bool = False, device: str | None = None, **options) -> Self:
        """Serve the run in the folder `run`.

        Args:
            history: start with the events of the run's data.
            device: "cpu" or "cuda"; by default the one of the run's configuration.
            options: see `ServingOptions`.

        Raises ServingError for a run that cannot be served, and the errors of eval.py for one that cannot be read.

        Examples:
            >>> served = Recommender.load(run.folder, history=True, device="cpu", cache="4bit", cache_bytes=2**20)
            >>> served.num_users
            24
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
            features = known.vocabulary.features
            served.add_dataset(dataset if features is None else with_rows(dataset, features))
            served.dataset = dataset
        return served

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
            k: at least 1. If fewer items are left, the rest is filled with -1 or the empty text, scored -inf.
            at: the time of the request in seconds, one for all users or [B]; by default now, or the time of the user's
                last event if that is later.
            exclude_seen: leave out all items of the user's events; by default, do so unless the run's
                `eval.filter_seen` is `none`.
            cold: for users without events, `error` raises NoHistory, and `popular` returns the items of `popular`.
            as_frame: return a polars frame (user, rank, item, score) in place of arrays.
            filters: the arguments of `Filter`: allow, deny, where, at_most, filters.

        Raises NoHistory, TooEarly, UnknownFilter, CacheFull; InvalidRequest, also for a run that ranks given
        candidates.

        Examples:
            >>> items, scores = recommender.recommend(["c3"], k=2)
            >>> bool(scores[0, 0] >= scores[0, 1]), sorted(items[0].tolist())  # the user has events of all other items
            (True, ['s1', 's2'])
            >>> recommender.recommend(["c3"], k=5, exclude_seen=False, where={"brand": ["a"]}, as_frame=True).shape
            (3, 4)
            >>> recommender.recommend(["nobody"], k=1)
            Traceback (most recent call last):
            serving.errors.NoHistory: user nobody has no event
            >>> recommender.recommend(["nobody"], k=1, cold="popular")[0].shape
            (1, 1)
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
                requests = self.check_requests([key for key, is_warm in zip(keys, warm) if is_warm], times)
                items[warm], scores[warm] = self.recommend_checked(
                    requests, k, [exclude_seen] * len(requests), [passing] * len(requests)
                )
        return list_frame("user", "item", users, items, scores) if as_frame else (items, scores)

    def check_k(self, k: int) -> None:
        """Raise InvalidRequest unless lists of `k` items can be recommended."""
        if self.ranking:
            raise InvalidRequest("the run ranks given candidates: use score, not recommend")
        check_length(k)

    def recommend_checked(
        self,
        requests: list[UserRequest],
        k: int,
        exclude_seen: Sequence[bool | None],
        filters: Sequence[ItemFilter] = (),
        out: Tensor | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the result of `recommend` for requests that `check_requests` returned.

        exclude_seen: one for each request; filters: one for each request, built by `self.filters`, or none at all; out:
        the `checked_outputs` of the requests if they are already computed.
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
        """Return the k items with the most events among those that pass: (items [k], weighted counts [k]).

        Recent events have more weight: an event counts half as much as one `ServingOptions.popular_days` later. Items
        with equal counts are in the order of the run's items.

        Examples:
            >>> items, counts = recommender.popular(k=3)
            >>> items.shape, bool(counts[0] >= counts[2] > 0)
            ((3,), True)
        """
        with self._lock:
            items, scores = self._listed(*self._popularity.lists(k, passing), k)
        return items[0], scores[0]

    def _listed(self, values: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (original ids [B, k], scores [B, k]); lists shorter than k are padded."""
        if values.shape[1] < k:
            more = ((0, 0), (0, k - values.shape[1]))
            values, rows = np.pad(values, more, constant_values=-np.inf), np.pad(rows, more, constant_values=-1)
        return self.items.original(np.where(values == -np.inf, -1, rows)), values

    def score(self, users, candidates, at=None, *, features=None) -> np.ndarray:
        """Return the scores of candidates: [B, M] float32; for a ranking run with A > 1 kinds of action, [B, M, A].

        A score is the cosine or the head's value for retrieval, and the probability of an action for ranking.
        Candidates do not attend to one another, so a score does not depend on the other candidates or their order.

        Args:
            users: [B] ids.
            candidates: [B, M] ids of items.
            at: as in `recommend`.
            features: for ranking, the features of the next event that are known before the user acts: name -> one value
                for each user.

        Raises UnknownItem, NoHistory, TooEarly, InvalidRequest, CacheFull.

        Examples:
            >>> recommender.score(["c3", "c4"], [["s1", "s2", "s3"], ["s1", "s1", "s2"]], at=1_800_000_000).shape
            (2, 3)
            >>> recommender.score(["c3"], [["s1", "s77"]])
            Traceback (most recent call last):
            serving.errors.UnknownItem: candidates: 1 of 2 items are not known to the run: s77
        """
        keys, rows = user_keys(users), self.items.rows("candidates", candidates, 2)
        if len(rows) != len(keys) and (len(keys) or rows.size):
            raise InvalidRequest(f"candidates: expected a row for each of {len(keys)} users, got {len(rows)}")
        with self._lock:
            scores = self.score_checked(self.check_requests(keys, at, features), list(rows))
        return np.stack(scores) if scores else np.zeros(rows.shape, np.float32)

    def score_checked(
        self, requests: list[UserRequest], candidates: Sequence[np.ndarray], out: Tensor | None = None
    ) -> list[np.ndarray]:
        """Return the scores of candidates, rows of the item table, for each request of `check_requests`."""
        with self._lock:
            return candidate_scores(self._engine, self._task, requests, candidates, out)

    def checked_outputs(self, requests: list[UserRequest], users: Sequence[str] = ()) -> Tensor:
        """Return the model's outputs for checked requests, not normalised: [B, E].

        users: more users whose pages may be brought up to date in the same pass.
        """
        with self._lock:
            known = ((user, self._histories.get(user)) for user in dict.fromkeys(users))
            return self._engine.answer(requests, [(user, history) for user, history in known if history is not None])

    def outputs(self, users: Sequence[str], at=None) -> Tensor:
        """Return the model's outputs for users (ids as text) at the time `at`: [B, E], each of Euclidean length one."""
        with self._lock:
            return normalized(self._engine.answer(self.check_requests(users, at)))

    def candidate_outputs(
        self, users: Sequence[str], candidates: Sequence[np.ndarray], at=None, codes: np.ndarray | None = None
    ) -> Tensor:
        """Return the outputs of a ranking run at all candidates, user by user, not normalised: [sum of M, E].

        candidates: rows of the item table for each user; codes: [B] the codes of the next events, see `Contexts`.
        """
        with self._lock:
            event_codes = [0] * len(users) if codes is None else codes.tolist()
            requests = zip(self.check_requests(users, at), candidates, event_codes)
            return self._engine.answer([one._replace(candidates=rows, code=code) for one, rows, code in requests])
