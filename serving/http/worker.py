"""Run the model in one thread: it takes all waiting requests and answers them together."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np

from serving.engine import Ask
from serving.errors import CacheFull, LimitReached, RequestError
from serving.histories import no_garbage_collection
from serving.http.event_log import EventLog
from serving.recommender import Recommender
from serving.token_batch import rounded_up

MOST_TOGETHER = 256  # requests of one round
logger = logging.getLogger("hstu_sparse.serve")


class Busy(RequestError):
    """More requests wait than the service takes."""


class Stopping(RequestError):
    """The service takes no more requests."""


@dataclass
class Events:
    """Events of one request: users as texts, items and actions in original ids, timestamps in seconds."""

    users: list[str]
    items: list
    timestamps: list[int]
    actions: list | None
    done: Future = field(default_factory=Future)


@dataclass
class Forget:
    """A request to forget a user."""

    user: str
    done: Future = field(default_factory=Future)


@dataclass
class Recommend:
    """A request for the k best items for a user."""

    user: str
    k: int
    at: int | None
    exclude_seen: bool | None
    done: Future = field(default_factory=Future)


@dataclass
class Score:
    """A request for the scores of candidates for a user."""

    user: str
    candidates: list
    at: int | None
    done: Future = field(default_factory=Future)


@dataclass
class Read:
    """A request for the part of a user's history that the model sees."""

    user: str
    done: Future = field(default_factory=Future)


class Worker(threading.Thread):
    """A thread that answers requests by setting their `done`, in rounds: events in order of arrival, then questions.

    A request gets the same answer with others as alone. At most `most_waiting` requests wait.
    """

    def __init__(
        self,
        recommender: Recommender,
        log: EventLog | None,
        most_waiting: int = 1024,
        observe: Callable[[int], object] = lambda count: None,
    ):
        super().__init__(name="model", daemon=True)
        self.recommender, self.log, self.observe = recommender, log, observe
        self._queue: queue.Queue = queue.Queue(most_waiting)
        self._stopping = False
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def put(self, request) -> Future:
        """Return the future of a request's answer; Busy or Stopping if the request is refused."""
        with self._lock:
            if self._stopping:
                raise Stopping("the service is stopping")
            try:
                self._queue.put_nowait(request)
            except queue.Full:
                raise Busy("more requests wait than the service takes, try again later") from None
        return request.done

    def stop(self) -> None:
        """Answer accepted requests, then end the thread."""
        with self._lock:
            self._stopping = True
        self._queue.put(None)
        self.join()

    def run(self) -> None:
        while True:
            requests = [self._queue.get()]
            while len(requests) < MOST_TOGETHER and requests[-1] is not None:
                try:
                    requests.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            last = requests[-1] is None
            # From here on none can be cancelled, by a client that leaves, say.
            requests = [one for one in requests if one is not None and one.done.set_running_or_notify_cancel()]
            try:
                self.answer(requests)
            except BaseException as error:  # a fault of ours: nobody may wait for ever
                if all(request.done.done() for request in requests):
                    logger.exception("internal error after all requests were answered")
                for request in requests:
                    if not request.done.done():
                        request.done.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            if last:
                return

    def answer(self, requests: list) -> None:
        """Set the answer of every request, or its error."""
        self.observe(len(requests))
        pending: list[Events] = []
        stale: list[str] = []
        for request in requests:
            if isinstance(request, Events):
                pending.append(request)
            elif isinstance(request, Forget):
                stale += self._append(pending)
                pending = []
                self._one(request, self._forget)
        stale += self._append(pending)
        lists: list[tuple[Recommend, Ask]] = []
        scores: list[tuple[Score, Ask, np.ndarray]] = []
        for request in requests:
            try:
                if isinstance(request, Recommend):
                    self.recommender.check_k(request.k)
                    lists.append((request, self._check(request)))
                elif isinstance(request, Score):
                    rows = self.recommender.items.rows("candidates", request.candidates)
                    scores.append((request, self._check(request), rows))
            except RequestError as error:
                request.done.set_exception(error)
            if isinstance(request, Read):
                self._one(request, lambda r: self.recommender.history(r.user))
        self._together(self._recommend, lists)
        self._together(self._score, scores)
        self.recommender.encode(stale)  # what the lists and scores did not encode, before the next requests come

    def _check(self, request: Recommend | Score) -> Ask:
        (checked,) = self.recommender.check_requests([request.user], request.at)
        return checked

    def _together(self, answer: Callable[[list], None], checked: list[tuple]) -> None:
        """Answer requests that were checked; if the pages of all do not fit, each by itself."""
        if not checked:
            return
        try:
            answer(checked)
        except Exception as error:
            if len(checked) > 1 and isinstance(error, CacheFull):
                for one in checked:
                    self._together(answer, [one])
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
        """Check, log, append and acknowledge events; invalid ones are refused before they are logged.

        Returns the users whose pages are out of date.
        """
        good: list[Events] = []
        checked: list[Any] = []
        for request in requests:
            try:
                new_events = self.recommender.checked(request.users, request.items, request.timestamps, request.actions)
            except RequestError as error:
                request.done.set_exception(error)
            else:
                good.append(request)
                checked.append(new_events)
        good, checked = self._with_room(good, checked)
        if not good:
            return []
        try:
            if self.log is not None:
                self.log.append([_record(request) for request in good])
            users = [user for keys, *_ in checked for user in keys]
            columns: list[Any] = [None if x[0] is None else np.concatenate(x) for x in list(zip(*checked))[1:]]
            stale = self.recommender.append_rows(users, *columns, encode=False)
        except RequestError as error:
            for request in good:
                request.done.set_exception(error)
            return []
        for request in good:
            request.done.set_result(len(request.users))
        return stale

    def _with_room(self, requests: list[Events], checked: list[Any]) -> tuple[list[Events], list[Any]]:
        """Return the requests, and their events, that there is room for; the others are refused."""
        with suppress(LimitReached):
            self.recommender.check_room([user for users, *_ in checked for user in users])
            return requests, checked
        good: list[Events] = []
        fitting: list[Any] = []
        accepted: list[str] = []
        for request, new_events in zip(requests, checked):
            try:
                self.recommender.check_room(accepted + new_events[0])
            except LimitReached as error:
                request.done.set_exception(error)
            else:
                good.append(request)
                fitting.append(new_events)
                accepted += new_events[0]
        return good, fitting

    def _forget(self, request: Forget) -> bool:
        """Forget a user, also one whose events only the run's data have, or another run that shares the log."""
        if self.log is None:
            return self.recommender.forget(request.user)
        self.log.append([{"forget": request.user}])
        left_out = request.user in self.log.left_out
        self.log.left_out.discard(request.user)
        return self.recommender.forget(request.user) or left_out

    def _recommend(self, checked: list[tuple[Recommend, Ask]]) -> None:
        requests, checked_requests = zip(*checked)
        # A shorter list is the beginning of a longer one. Few lengths, since each may be captured as a graph.
        longest = rounded_up(max(request.k for request in requests), 4)
        items, scores = self.recommender.recommend_checked(
            list(checked_requests), longest, [request.exclude_seen for request in requests]
        )
        for request, row, values in zip(requests, items, scores):
            row, values = row[: request.k], values[: request.k]
            some = np.isfinite(values)
            request.done.set_result((row[some].tolist(), values[some].tolist()))

    def _score(self, checked: list[tuple[Score, Ask, np.ndarray]]) -> None:
        requests, checked_requests, rows = zip(*checked)
        for request, values in zip(requests, self.recommender.score_checked(list(checked_requests), rows)):
            request.done.set_result(values.tolist())


def _record(events: Events) -> dict:
    return {
        "users": events.users, "items": events.items, "timestamps": events.timestamps, "actions": events.actions
    }  # fmt: skip


@no_garbage_collection()
def replay(recommender: Recommender, log: EventLog) -> dict[str, int]:
    """Add the events of a log to a recommender, without encoding them; return the numbers taken and left out.

    Users whom the log forgets lose what the recommender has of them, such as the events of the run's data. Events are
    left out whose items or actions the run does not know: the log may be older than the run, or shared by two runs.
    LimitReached if there are more users or events than the recommender may hold, LogError for a damaged log.
    """
    places: dict[str, int] = {}
    parts: list[tuple] = []
    counts = {"taken": 0, "left_out": 0}
    for records in log.events():
        users: list[str] = []
        items: list = []
        times: list[int] = []
        actions: list = []
        for record in records:
            users += record["users"]
            items += record["items"]
            times += record["timestamps"]
            actions += record["actions"] or [None] * len(record["users"])
        if not users:
            continue
        rows, codes, known = recommender.lookup(items, actions)
        log.left_out.update(compress(users, ~known))
        taken = [places.setdefault(user, len(places)) for user in compress(users, known)]
        times_taken = np.array(times, np.int64)[known]
        parts.append((np.array(taken, np.int64), rows[known], times_taken, None if codes is None else codes[known]))
        counts["taken"] += len(taken)
        counts["left_out"] += len(users) - len(taken)
    for user in log.forgotten:
        recommender.forget(user)
    if counts["taken"]:
        columns: list[Any] = [None if x[0] is None else np.concatenate(x) for x in zip(*parts)]
        recommender.add_many(list(places), *columns)
    return counts
