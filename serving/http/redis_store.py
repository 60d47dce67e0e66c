"""Store users' events in Redis, which any number of services share.

For each user, behind the prefix `hstu:`

    events:USER      a stream, an entry an event: JSON of its item, time and action in original ids
    ids:USER         a set, the ids that clients gave to events
    features:USER    the features of the user, JSON
    deleted:USER     how often the user was deleted; the events of the run's data count only while it is 0

and for all of them `lists`, a hash of named lists (JSON), and `lists:version`, which each change increases, and
`items`, a list of items that were added (JSON, as in the log of `log_reader.py`), in their order.

A service reads the users of a round from the version that it has of them, in one transaction, before it answers. It
applies its own events from there only, so that a user's events have one order everywhere, and a service that dies loses
nothing: Redis has an event before it is acknowledged.
"""

import json
from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from data.types import shown
from serving.errors import RequestError, ServingError
from serving.http.appending import Plan, planned
from serving.http.event_ids import EventIds
from serving.http.replay import add_items, describe, in_data, known_rows, user_numbers
from serving.http.requests import REPEATED, AddItems, AddUsers, DropList, Events, Forget, PutList
from serving.recommender import Recommender

PREFIX = "hstu:"
SECONDS = 5.0  # that Redis may take to answer
# Append the events whose ids are new: ARGV has the id, or nothing, and the content of each; returns 1 for these.
APPEND = """
local states = {}
for i = 1, #ARGV, 2 do
  if ARGV[i] == '' or redis.call('SADD', KEYS[2], ARGV[i]) == 1 then
    redis.call('XADD', KEYS[1], '*', 'event', ARGV[i + 1])
    states[#states + 1] = 1
  else
    states[#states + 1] = 0
  end
end
return states
"""


class StoreUnavailable(RequestError):
    """Redis does not answer, or refuses to write."""


def connect(url: str, durable: bool) -> Any:
    """Return a client; ServingError if there is no such Redis, or if it may lose what it acknowledged.

    durable: require that Redis writes each event to its disk before it answers.
    """
    try:
        import redis
    except ImportError:
        raise ServingError('--store: the package redis is not installed: pip install "redis>=5"') from None
    try:
        client = redis.Redis.from_url(url, socket_timeout=SECONDS, socket_connect_timeout=SECONDS)
        client.ping()
    except (redis.RedisError, ValueError) as error:
        raise ServingError(f"--store: {shown(error, 200)}") from None
    try:
        settings = client.config_get("append*") if durable else {}
    except redis.RedisError:  # a service in a cloud may not tell
        settings = {}
    if settings and (settings.get("appendonly"), settings.get("appendfsync")) != ("yes", "always"):
        raise ServingError(
            "--store: a power cut would lose events: set appendonly yes and appendfsync always in "
            "Redis, or give --fsync never"
        )
    return client


class SharedUsers:
    """The users in Redis, and the version that a recommender has of each. Not safe for threads, but for `check`."""

    def __init__(self, client: Any, recommender: Recommender):
        self.client, self.recommender = client, recommender
        self._append_new = client.register_script(APPEND)
        self._versions: dict[str, tuple[int, bytes]] = {}  # user -> (deletions, the last event of the stream)
        self._lists_version: bytes | None = None
        self._item_records = 0  # that were read
        self._features: dict[str, bytes | None] = {}  # of users, as they were read last
        self._data_users = {} if recommender.dataset is None else user_numbers(recommender.dataset)

    def beside(self, recommender: Recommender) -> Self:
        """Return the same users for another recommender, which has none of them yet."""
        return type(self)(self.client, recommender)

    def check(self) -> None:
        """Raise StoreUnavailable if Redis does not answer."""
        self._answer(self.client.ping)

    def _answer(self, command: Any) -> Any:
        try:
            return command()
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "redis" and not isinstance(error, OSError):
                raise
            raise StoreUnavailable(f"the store of users does not answer: {shown(error, 200)}") from None

    def refresh(self, users: Iterable[str]) -> list[str]:
        """Bring the recommender up to date with these users and the named lists; return the users who changed."""
        distinct = list(dict.fromkeys(users))
        pipeline = self.client.pipeline(transaction=True)
        pipeline.lrange(PREFIX + "items", self._item_records, -1)
        pipeline.get(PREFIX + "lists:version")
        for user in distinct:
            _, last = self._versions.get(user, (0, b""))
            pipeline.get(_key("deleted", user))
            pipeline.xrange(_key("events", user), min=b"(" + last if last else b"-")
            pipeline.get(_key("features", user))
        records, version, *answers = self._answer(pipeline.execute)
        self._add_items(records)
        deletions = {user: int(count or 0) for user, count in zip(distinct, answers[::3])}
        entries, features = (dict(zip(distinct, answers[place::3])) for place in (1, 2))
        deleted = [user for user in distinct if deletions[user] != self._versions.get(user, (0, b""))[0]]
        if deleted:
            pipeline = self.client.pipeline(transaction=True)
            for user in deleted:
                pipeline.get(_key("deleted", user))
                pipeline.xrange(_key("events", user))
            answers = self._answer(pipeline.execute)
            deletions |= {user: int(count) for user, count in zip(deleted, answers[::2])}
            entries |= dict(zip(deleted, answers[1::2]))
        if version != self._lists_version:
            self._read_lists()
            self._lists_version = version
        for user in deleted:
            self.recommender.forget(user)
            self._features.pop(user, None)
            self._versions[user] = deletions[user], b""
        described = {user: text for user, text in features.items() if text != self._features.get(user)}
        describe(self.recommender, {user: json.loads(text or b"{}") for user, text in described.items()})
        self._features |= described
        self._apply(entries, [user for user in entries if user not in self._versions])
        for user, new in entries.items():
            if new:
                self._versions[user] = deletions[user], new[-1][0]
        return [user for user, new in entries.items() if new]

    def _apply(self, entries: dict[str, list], new_users: list[str]) -> None:
        """Append the entries of streams to the recommender, without those of items or actions that it does not know.

        new_users: those of whom the recommender has the events of the run's data alone; what these have counts once.
        """
        users = [user for user, new in entries.items() for _ in new]
        events = [json.loads(fields[b"event"]) for new in entries.values() for _, fields in new]
        if not events:
            return
        items, times, actions = map(list, zip(*events))
        rows, codes, known = known_rows(self.recommender, items, actions)
        dataset = self.recommender.dataset
        if dataset is not None and new_users:
            numbers = [self._data_users.get(user, -1) for user in new_users]
            places = {user: place for place, user in enumerate(new_users)}
            some_new = known & np.array([user in places for user in users])
            owners = np.array([places[user] for user, new in zip(users, some_new) if new], np.int64)
            known[some_new] = ~in_data(dataset, numbers, owners, rows[some_new], np.array(times, np.int64)[some_new])
        if known.any():
            some = [user for user, knows in zip(users, known) if knows]
            codes = None if codes is None else codes[known]
            self.recommender.append_rows(some, rows[known], np.array(times, np.int64)[known], codes, encode=False)

    def _read_lists(self) -> None:
        lists = {name.decode(): json.loads(items) for name, items in self._answer(self._all_lists).items()}
        filters = self.recommender.filters
        for name in filters.sizes.keys() - lists.keys():
            filters.drop(name)
        for name, items in lists.items():
            filters.put(name, items)

    def _add_items(self, records: list[bytes]) -> None:
        """Add the items of records of the store to the recommender."""
        self._item_records += len(records)
        add_items(self.recommender, map(json.loads, records))

    def _all_lists(self) -> dict[bytes, bytes]:
        return self.client.hgetall(PREFIX + "lists")

    def append(self, requests: list[Events]) -> None:
        """Write the events of requests and acknowledge them; `refresh` brings the recommender up to date with them."""
        lookup = self.recommender.items.lookup
        try:
            if not all(lookup(np.array(request.items))[1].all() for request in requests):
                # Another service may have added it.
                self._add_items(self._answer(lambda: self.client.lrange(PREFIX + "items", self._item_records, -1)))
        except RequestError as error:
            for request in requests:
                request.done.set_exception(error)
            return
        plans = planned(self.recommender, EventIds(), requests)  # Redis knows the ids
        if not plans:
            return
        try:
            pipeline = self.client.pipeline(transaction=True)
            places = [self._queue(pipeline, plan) for plan in plans]
            answers = iter(self._answer(pipeline.execute))
        except RequestError as error:
            for plan in plans:
                plan.request.done.set_exception(error)
            return
        for plan, of_users in zip(plans, places):
            for of_user in of_users:
                for place, new in zip(of_user, next(answers)):
                    if not new:
                        plan.states[place] = REPEATED
            plan.request.done.set_result(plan.states)

    def _queue(self, pipeline: Any, plan: Plan) -> list[list[int]]:
        """Add the events of a request to a transaction; return the places of each user's events in the request."""
        request = plan.request
        places: dict[str, list[int]] = {}
        for place, user in enumerate(request.users):
            places.setdefault(user, []).append(place)
        for user, of_user in places.items():
            arguments: list[str] = []
            for place in of_user:
                name = None if request.ids is None else request.ids[place]
                action = None if request.actions is None else request.actions[place]
                arguments += [name or "", json.dumps([request.items[place], request.timestamps[place], action])]
            self._append_new(keys=[_key("events", user), _key("ids", user)], args=arguments, client=pipeline)
        return list(places.values())

    def change(self, request: Forget | PutList | DropList | AddItems | AddUsers) -> Any:
        """Delete a user, store users' features, store or delete a named list, or add items; return what the request
        asks for.
        """
        pipeline = self.client.pipeline(transaction=True)
        if isinstance(request, AddItems):
            self.refresh([])
            new = request.checked(self.recommender)
            if len(new.ids):
                pipeline.rpush(PREFIX + "items", json.dumps(request.record_of(new)))
                self._answer(pipeline.execute)
                self.refresh([])
            return request.states(new)
        if isinstance(request, AddUsers):
            request.checked(self.recommender)
            for user, features in zip(request.users, request.features):
                pipeline.set(_key("features", user), json.dumps(features))
            self._answer(pipeline.execute)
            self.refresh(request.users)
            return None
        if isinstance(request, Forget):
            pipeline.delete(*(_key(kind, request.user) for kind in ("events", "ids", "features")))
            pipeline.incr(_key("deleted", request.user))
            existed, _ = self._answer(pipeline.execute)
            had_data = self.recommender.knows(request.user)
            self.refresh([request.user])
            return bool(existed) or had_data
        if isinstance(request, PutList):
            pipeline.hset(PREFIX + "lists", request.name, json.dumps(request.items))
        else:
            pipeline.hdel(PREFIX + "lists", request.name)
        pipeline.incr(PREFIX + "lists:version")
        changed, _ = self._answer(pipeline.execute)
        self.refresh([])
        if isinstance(request, DropList):
            return bool(changed)
        _, unknown = self.recommender.filters.rows("items", request.items)
        return self.recommender.filters.sizes[request.name], len(unknown)


def _key(kind: str, user: str) -> bytes:
    return f"{PREFIX}{kind}:{user}".encode("utf-8", "surrogatepass")
