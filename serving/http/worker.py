"""Run the model in one thread, which answers all waiting requests together in rounds."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from evaluation.item_filters import ItemFilter
from serving.contexts import as_columns
from serving.engine import UserRequest
from serving.errors import CacheFull, NoHistory, RequestError
from serving.http.appending import planned
from serving.http.event_ids import EventIds
from serving.http.event_log import EventLog
from serving.http.log_reader import LogReader
from serving.http.redis_store import SharedUsers
from serving.http.replay import catch_up
from serving.http.requests import (
    AddItems,
    AddUsers,
    DropList,
    Events,
    Forget,
    Lists,
    PutList,
    Read,
    Recommend,
    Request,
    Score,
    UserList,
)
from serving.recommender import Recommender
from serving.token_batch import rounded_up

MOST_TOGETHER = 256  # most requests of one round
MOST_LISTS = 1024  # lists from which on a round takes no more requests; those of its first request do not count
logger = logging.getLogger("hstu_sparse.serve")


class Busy(RequestError):
    """The service has too many waiting requests."""


class Stopping(RequestError):
    """The service is stopping and takes no more requests."""


@dataclass
class Exchange(Request):
    """A request to replace the model. Its result is None.

    recommender: the new model, with everything that `source` has read so far; the rest is added before the exchange.
    """

    recommender: Recommender
    source: LogReader | SharedUsers


class Worker(threading.Thread):
    """A thread that answers requests in rounds by setting their `done`: first writes in order of arrival, then reads.

    A read's answer does not depend on the other reads of its round. At most `most_waiting` requests wait.
    """

    def __init__(
        self,
        recommender: Recommender,
        log: EventLog | None,
        most_waiting: int = 1024,
        observe: Callable[[int], object] = lambda count: None,
        store: SharedUsers | None = None,
    ):
        super().__init__(name="model", daemon=True)
        self.recommender, self.log, self.observe, self.store = recommender, log, observe, store
        self.ids = EventIds() if log is None else log.ids
        self._queue: queue.Queue = queue.Queue(most_waiting)
        self._stopping = False
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def check_room(self) -> None:
        """Raise Busy or Stopping if a request would be refused now."""
        if self._stopping:
            raise Stopping("the service is stopping")
        if self._queue.full():
            raise Busy("too many requests are waiting, try again later")

    def put(self, request: Request) -> Future:
        """Queue a request and return the future of its answer; raise Busy or Stopping if it is refused."""
        with self._lock:
            if self._stopping:
                raise Stopping("the service is stopping")
            try:
                self._queue.put_nowait(request)
            except queue.Full:
                raise Busy("too many requests are waiting, try again later") from None
        return request.done

    def stop(self) -> None:
        """Answer accepted requests, then end the thread."""
        with self._lock:
            self._stopping = True
        self._queue.put(None)
        self.join()

    def run(self) -> None:
        while True:
            requests = [self._next()]
            lists = 0
            while len(requests) < MOST_TOGETHER and requests[-1] is not None and lists < MOST_LISTS:
                try:
                    requests.append(self._queue.get_nowait())
                except queue.Empty:
                    break
                lists += len(requests[-1].users) if isinstance(requests[-1], Recommend) else 0
            last = requests[-1] is None
            # From here on requests cannot be cancelled, for example by a client that disconnects.
            requests = [one for one in requests if one is not None and one.done.set_running_or_notify_cancel()]
            try:
                self.answer(requests)
            except BaseException as error:  # a bug: the other requests must still get an answer
                if all(request.done.done() for request in requests):
                    logger.exception("internal error after all requests were answered")
                for request in requests:
                    if not request.done.done():
                        request.done.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            if last:
                return

    def _next(self) -> Any:
        """Wait for a request; meanwhile encode the next windows of users, a few tokens at a time."""
        while True:
            try:
                return self._queue.get_nowait()
            except queue.Empty:
                if not self._encode_ahead():
                    return self._queue.get()

    def _encode_ahead(self) -> int:
        try:
            return self.recommender.encode_ahead()
        except Exception:  # requests do not depend on it
            logger.exception("internal error while windows were encoded in advance")
            return 0

    def answer(self, requests: list) -> None:
        """Set the answer of every request, or its error."""
        self.observe(len(requests))
        pending: list[Events] = []
        stale: list[str] = []
        for request in requests:
            request.model = self.recommender.label  # before the answer is set, since another thread reads both
            if isinstance(request, Events):
                pending.append(request)
            elif isinstance(request, Forget | PutList | DropList | AddItems | AddUsers | Exchange):
                stale += self._append(pending)
                pending = []
                self._one(request, self._exchange if isinstance(request, Exchange) else self._change)
        stale += self._append(pending)
        if self.store is not None:
            try:
                stale += self.store.refresh(user for request in requests for user in _users(request))
            except RequestError as error:
                for request in requests:
                    if not request.done.done():
                        request.done.set_exception(error)
                return
        lists: list[tuple[Recommend, ItemFilter, list[UserRequest | RequestError | None]]] = []
        scores: list[tuple[Score, UserRequest, np.ndarray]] = []
        for request in requests:
            if request.done.done():
                continue
            request.model = self.recommender.label
            try:
                if isinstance(request, Recommend):
                    self.recommender.check_k(request.k)
                    passing = self.recommender.filters.build(request.filter)
                    lists.append((request, passing, [self._checked(request, user) for user in request.users]))
                elif isinstance(request, Score):
                    rows = self.recommender.items.rows("candidates", request.candidates)
                    features = as_columns([request.features])
                    (checked,) = self.recommender.check_requests([request.user], request.at, features)
                    scores.append((request, checked, rows))
            except RequestError as error:
                request.done.set_exception(error)
            if isinstance(request, Read):
                self._one(request, lambda r: self.recommender.history(r.user))
        list_outputs, score_outputs = self._outputs(lists, scores, stale)
        self._together(self._recommend, lists, list_outputs)
        self._together(self._score, scores, score_outputs)
        self.recommender.encode(stale)  # the remaining users, before the next requests arrive

    def _checked(self, request: Recommend, user: str) -> UserRequest | RequestError | None:
        """Return the checked request of one user, its error, or None if the user gets the popular items."""
        try:
            (checked,) = self.recommender.check_requests([user], request.at)
            return checked
        except NoHistory as error:
            return None if request.cold == "popular" else error
        except RequestError as error:
            return error

    def _outputs(
        self,
        lists: list[tuple[Recommend, ItemFilter, list[UserRequest | RequestError | None]]],
        scores: list[tuple[Score, UserRequest, np.ndarray]],
        stale: list[str],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the model's outputs for lists and for scores, computed in one pass.

        The pass also brings the pages of `stale` users up to date. (None, None) if nothing is computed
        here: for a ranking run, without checked requests, or if the pages of all users do not fit.
        """
        list_requests = [part for *_, parts in lists for part in parts if isinstance(part, UserRequest)]
        checked = [*list_requests, *(one for _, one, _ in scores)]
        if self.recommender.ranking or not checked:
            return None, None
        try:
            out = self.recommender.checked_outputs(checked, stale)
        except CacheFull:
            return None, None
        return out[: len(list_requests)], out[len(list_requests) :]

    def _together(
        self, answer: Callable[[list, Tensor | None], None], checked: list[tuple], out: Tensor | None
    ) -> None:
        """Answer checked requests together, or one by one if the pages of all do not fit.

        out: their outputs if they are already computed.
        """
        if not checked:
            return
        try:
            answer(checked, out)
        except Exception as error:
            if len(checked) > 1 and isinstance(error, CacheFull):
                for one in checked:
                    self._together(answer, [one], None)
                return
            for request, *_ in checked:
                if not request.done.done():
                    request.done.set_exception(error)

    def _one(self, request, answer: Callable) -> None:
        try:
            result = answer(request)
        except Exception as error:
            request.done.set_exception(error)
        else:
            if not request.done.done():
                request.done.set_result(result)

    def _append(self, requests: list[Events]) -> list[str]:
        """Check, log, append and acknowledge events; refuse invalid requests before anything is logged.

        Returns the users whose pages are out of date.
        """
        if self.store is not None:
            self.store.append(requests)
            return []
        plans = planned(self.recommender, self.ids, requests)
        stale: list[str] = []
        try:
            if self.log is not None:
                self.log.append([record for plan in plans if (record := plan.record) is not None])
            if checked := [plan.columns for plan in plans if plan.columns is not None]:
                users = [user for keys, *_ in checked for user in keys]
                columns: list[Any] = [None if x[0] is None else np.concatenate(x) for x in list(zip(*checked))[1:]]
                stale = self.recommender.append_rows(users, *columns, encode=False)
        except RequestError as error:
            for plan in plans:
                plan.request.done.set_exception(error)
            return []
        for plan in plans:
            if self.log is not None:
                self.log.left_out.update(plan.users_of_unknown)
            self.ids.add(plan.request.users, plan.request.ids or ())
            plan.request.done.set_result(plan.states)
        return stale

    def _change(self, request: Forget | PutList | DropList | AddItems | AddUsers) -> Any:
        """Write a change into the log, then apply it to the recommender; return the result of the request."""
        if self.store is not None:
            return self.store.change(request)
        if isinstance(request, AddItems):
            new = request.checked(self.recommender)
            if self.log is not None and len(new.ids):
                self.log.append([request.record_of(new)])
            self.recommender.add_checked(new)
            return request.states(new)
        if isinstance(request, AddUsers):
            rows = request.checked(self.recommender)
            if self.log is not None:
                self.log.append(request.records)
            self.recommender.put_users(request.users, rows)
            return None
        if self.log is not None:
            self.log.append([request.record])
        filters = self.recommender.filters
        if isinstance(request, PutList):
            return filters.put(request.name, request.items)
        if isinstance(request, DropList):
            return filters.drop(request.name)
        # The events of a user may be only in the run's data, or belong to another run that shares the log.
        self.ids.forget(request.user)
        left_out = self.log is not None and request.user in self.log.left_out
        if self.log is not None:
            self.log.left_out.discard(request.user)
        return self.recommender.forget(request.user) or left_out

    def _exchange(self, request: Exchange) -> None:
        """Bring the new model up to date, then use it for all later requests."""
        if isinstance(request.source, SharedUsers):
            self.store = request.source
        elif self.log is not None:
            catch_up(request.recommender, request.source, self.log.size)
            self.log.left_out = request.source.left_out
        self.recommender = request.recommender

    def _recommend(
        self, checked: list[tuple[Recommend, ItemFilter, list[UserRequest | RequestError | None]]], out: Tensor | None
    ) -> None:
        warm = [
            (part, request, passing)
            for request, passing, parts in checked
            for part in parts
            if isinstance(part, UserRequest)
        ]
        # Shorter lists are prefixes of longer ones. Lengths are rounded up, since each may be captured as a graph.
        longest = rounded_up(max(request.k for request, *_ in checked), 4)
        rows: Iterator[tuple[np.ndarray, np.ndarray]] = iter(())
        if warm:
            filtered = any(passing.mask is not None or passing.limits for *_, passing in warm)
            items, scores = self.recommender.recommend_checked(
                [part for part, *_ in warm],
                longest,
                [request.exclude_seen for _, request, _ in warm],
                [passing for *_, passing in warm] if filtered else (),
                out,
            )
            rows = zip(items, scores)
        for request, passing, parts in checked:
            lists: list[UserList | RequestError] = []
            popular: tuple[np.ndarray, np.ndarray] | None = None
            for part in parts:
                if isinstance(part, UserRequest):
                    lists.append(_user_list(*next(rows), request.k))
                elif part is not None:
                    lists.append(part)
                else:
                    if popular is None:
                        popular = self.recommender.popular(request.k, passing)
                    lists.append(_user_list(*popular, request.k, cold=True))
            request.done.set_result(Lists(lists, dict(passing.unknown)))

    def _score(self, checked: list[tuple[Score, UserRequest, np.ndarray]], out: Tensor | None) -> None:
        requests, checked_requests, rows = zip(*checked)
        for request, values in zip(requests, self.recommender.score_checked(list(checked_requests), rows, out)):
            request.done.set_result(values.tolist())


def _users(request: Request) -> list[str]:
    """Return the users whose events a request reads or adds."""
    if isinstance(request, Events | Recommend):
        return request.users
    return [request.user] if isinstance(request, Score | Read) else []


def _user_list(items: np.ndarray, scores: np.ndarray, k: int, cold: bool = False) -> UserList:
    finite = np.isfinite(scores[:k])
    return UserList(items[:k][finite].tolist(), scores[:k][finite].tolist(), cold)
