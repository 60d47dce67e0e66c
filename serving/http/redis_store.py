"""Store users' events in Redis, which any number of services share.

All keys have the prefix `hstu:`. For each user:

    events:USER      stream with an entry for each event: JSON of its item, time and action, in original ids
    ids:USER         set of the ids that clients gave to events
    features:USER    JSON of the user's features
    deleted:USER     how often the user was deleted; the events of the run's data are used only while it is 0

For all users:

    lists            hash of named lists, JSON
    lists:version    increased by each change of a list
    items            list of added items in order, JSON as in the log (see `log_reader.py`)

Before a service answers a round of requests, it reads the new entries of the round's users in one transaction. It adds
events to its recommender only when it reads them from Redis, also events that it received itself, so that all services
have a user's events in the same order. Events are acknowledged once Redis has them, so a killed service loses none.
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
SECONDS = 5.0  # most time for Redis to answer
# Append events whose ids are new. ARGV: id (or '') and content of each event; returns 1 for an appended event, else 0.
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
    """Redis does not answer or cannot write."""


def connect(url: str, durable: bool) -> Any:
    """Return a Redis client; raise ServingError if Redis does not answer or its settings may lose acknowledged events.

    durable: require that Redis writes each event to disk before it answers.
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
    except redis.RedisError:  # cloud services may forbid reading settings
        settings = {}
    if settings and (settings.get("appendonly"), settings.get("appendfsync")) != ("yes", "always"):
        raise ServingError(
            "--store: a power cut could lose events: set appendonly yes and appendfsync always in Redis, "
            "or use --fsync never"
        )
    return client


class SharedUsers:
    """The users in Redis, and the version of each user in a recommender. Not thread-safe except for `check`."""

    def __init__(self, client: Any, recommender: Recommender):
        self.client, self.recommender = client, recommender
        self._append_new = client.register_script(APPEND)
        self._versions: dict[str, tuple[int, bytes]] = {}  # user -> (number of deletions, id of the last entry)
        self._lists_version: bytes | None = None
        self._item_records = 0  # the number of records read so far
        self._features: dict[str, bytes | None] = {}  # user -> features as last read
        self._data_users = {} if recommender.dataset is None else user_numbers(recommender.dataset)

    def for_recommender(self, recommender: Recommender) -> Self:
        """Return the same store for another recommender, which has none of its users yet."""
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
            raise StoreUnavailable(f"Redis cannot be used: {shown(error, 200)}") from None

    def refresh(self, users: Iterable[str]) -> list[str]:
        """Read new events of these users, and new lists and items; return the users who have new events."""
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
        """Add the entries of streams to the recommender, except those of items or actions that it does not know.

        new_users: users read for the first time, whose entries are left out if the run's data have the same event.
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
            user_ids = [user for user, knows in zip(users, known) if knows]
            codes = None if codes is None else codes[known]
            self.recommender.append_rows(user_ids, rows[known], np.array(times, np.int64)[known], codes, encode=False)

    def _read_lists(self) -> None:
        lists = {name.decode(): json.loads(items) for name, items in self._answer(self._all_lists).items()}
        filters = self.recommender.filters
        for name in filters.sizes.keys() - lists.keys():
            filters.drop(name)
        for name, items in lists.items():
            filters.put(name, items)

    def _add_items(self, records: list[bytes]) -> None:
        """Add the items of new records to the recommender."""
        self._item_records += len(records)
        add_items(self.recommender, map(json.loads, records))

    def _all_lists(self) -> dict[bytes, bytes]:
        return self.client.hgetall(PREFIX + "lists")

    def append(self, requests: list[Events]) -> None:
        """Write the events of requests to Redis and acknowledge them; `refresh` adds them to the recommender."""
        lookup = self.recommender.items.lookup
        try:
            if not all(lookup(np.array(request.items))[1].all() for request in requests):
                # Another service may have added the items.
                self._add_items(self._answer(lambda: self.client.lrange(PREFIX + "items", self._item_records, -1)))
        except RequestError as error:
            for request in requests:
                request.done.set_exception(error)
            return
        plans = planned(self.recommender, EventIds(), requests)  # ids are checked by Redis
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
        for plan, request_places in zip(plans, places):
            for user_places in request_places:
                for place, new in zip(user_places, next(answers)):
                    if not new:
                        plan.states[place] = REPEATED
            plan.request.done.set_result(plan.states)

    def _queue(self, pipeline: Any, plan: Plan) -> list[list[int]]:
        """Add the events of a request to a transaction; return the positions of each user's events in the request."""
        request = plan.request
        places: dict[str, list[int]] = {}
        for place, user in enumerate(request.users):
            places.setdefault(user, []).append(place)
        for user, user_places in places.items():
            arguments: list[str] = []
            for place in user_places:
                name = None if request.ids is None else request.ids[place]
                action = None if request.actions is None else request.actions[place]
                arguments += [name or "", json.dumps([request.items[place], request.timestamps[place], action])]
            self._append_new(keys=[_key("events", user), _key("ids", user)], args=arguments, client=pipeline)
        return list(places.values())

    def change(self, request: Forget | PutList | DropList | AddItems | AddUsers) -> Any:
        """Delete a user, store users' features, store or delete a named list, or add items; return the result."""
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
