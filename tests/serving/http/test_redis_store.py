"""Test services that share their users: two workers on one store answer like one worker without a store.

The store is Redis if the package redis and redis-server are installed, otherwise a stand-in with the same commands.
"""

import shutil
import subprocess
import time

import numpy as np
import pytest
from fastapi.testclient import TestClient

from serving import ServingError
from serving.http.app import create_app
from serving.http.redis_store import SharedUsers, connect
from serving.http.requests import DropList, Events, Forget, PutList, Read, Recommend, Score
from serving.http.worker import Exchange, Worker
from tests.serving.http.test_event_log import run_data
from tests.serving.plain import item_ids, make_config, make_model, serve

NOW = 10**6
REAL = pytest.param(
    "redis", marks=pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
)


class Memory:
    """The commands of a Redis client that `SharedUsers` uses, in memory. down: whether the client raises errors."""

    def __init__(self):
        self.values, self.down = {}, False

    def ping(self):
        if self.down:
            raise ConnectionError("refused")
        return True

    def pipeline(self, transaction):
        assert transaction
        return Transaction(self)

    def register_script(self, text):
        assert "SADD" in text and "XADD" in text

        def script(keys, args, client):
            client.commands.append(lambda: self.append(keys, args))

        return script

    def append(self, keys, arguments):
        states = []
        for name, content in zip(arguments[::2], arguments[1::2]):
            ids = self.values.setdefault(keys[1], set())
            states.append(int(not name or name not in ids))
            if states[-1]:
                ids.update([name] if name else [])
                stream = self.values.setdefault(keys[0], [])
                stream.append((b"%d-0" % (len(stream) + 1), {b"event": content.encode()}))
        return states

    def get(self, key):
        value = self.values.get(key)
        return None if value is None else str(value).encode()

    def set(self, key, value):
        self.values[key] = value
        return True

    def incr(self, key):
        self.values[key] = self.values.get(key, 0) + 1
        return self.values[key]

    def delete(self, *keys):
        return sum(self.values.pop(key, None) is not None for key in keys)

    def xrange(self, key, min=b"-"):
        stream = self.values.get(key, [])
        return stream[int(min[1:].split(b"-")[0]) if min != b"-" else 0 :]

    def lrange(self, key, start, stop):
        assert stop == -1
        self.ping()
        return self.values.get(key, [])[start:]

    def rpush(self, key, value):
        self.values.setdefault(key, []).append(value.encode())
        return len(self.values[key])

    def hset(self, key, name, value):
        self.values.setdefault(key, {})[name.encode()] = value.encode()
        return 1

    def hdel(self, key, name):
        return int(self.values.get(key, {}).pop(name.encode(), None) is not None)

    def hgetall(self, key):
        self.ping()
        return dict(self.values.get(key, {}))


class Transaction:
    """Commands that are executed in one transaction."""

    def __init__(self, memory):
        self.memory, self.commands = memory, []

    def __getattr__(self, name):
        return lambda *arguments, **named: self.commands.append(lambda: getattr(self.memory, name)(*arguments, **named))

    def execute(self):
        self.memory.ping()
        commands, self.commands = self.commands, []
        return [command() for command in commands]


class Server:
    """A redis-server on a socket in a folder; each event is on the disk before it is acknowledged."""

    def __init__(self, folder):
        self.folder, self.url = folder, f"unix://{folder}/socket"
        self.start()

    def start(self):
        options = ["--port", "0", "--unixsocket", "socket", "--appendonly", "yes", "--appendfsync", "always"]
        self.process = subprocess.Popen(["redis-server", *options], cwd=self.folder, stdout=subprocess.DEVNULL)
        ends = time.monotonic() + 600
        while True:
            try:
                return connect(self.url, True)
            except ServingError:
                assert time.monotonic() < ends
                time.sleep(0.05)

    def stop(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(params=["memory", REAL])
def store(request, tmp_path):
    """Yield (a client, a function that stops Redis, a function that starts it again)."""
    if request.param == "memory":
        memory = Memory()
        yield memory, lambda: setattr(memory, "down", True), lambda: setattr(memory, "down", False)
        return
    pytest.importorskip("redis")
    server = Server(tmp_path)
    yield connect(server.url, True), server.stop, server.start
    server.stop()


@pytest.fixture(scope="module")
def small():
    config = make_config()
    return config, make_model(config)


def new_service(small, client, history=False):
    recommender = serve(*small, lambda: NOW, cache_bytes=2**22)
    if history:
        recommender.dataset = run_data()
        recommender.add_dataset(recommender.dataset)
    return Worker(recommender, None, store=None if client is None else SharedUsers(client, recommender))


def answer(worker, request):
    worker.answer([request])
    return request.done.result(0)


def random_request(rng, turn):
    users = [["ann", "a/b", "eve", "new", "7"][i] for i in rng.integers(0, 5, rng.integers(1, 4))]
    kind = rng.choice(
        ["events", "lists", "scores", "read", "forget", "put", "drop"], p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05]
    )
    if kind == "events":
        items = rng.choice(np.append(item_ids(), 1), len(users)).tolist()
        ids = [None if rng.random() < 0.5 else str(rng.integers(0, 30)) for _ in users]
        return lambda: Events(list(users), items, [turn - int(turn % 7 == 0) * 5 + 10] * len(users), None, ids)
    if kind == "lists":
        return lambda: Recommend(list(users), 5, NOW, cold="error")
    if kind == "scores":
        return lambda: Score(users[0], [100, 103], NOW)
    if kind == "read":
        return lambda: Read(users[0])
    if kind == "forget":
        return lambda: Forget(users[0])
    names = rng.choice(item_ids(), 5, replace=False).tolist()
    return (lambda: PutList(users[0], names)) if kind == "put" else (lambda: DropList(users[0]))


def outcome(worker, request):
    """Return an answer in a form that can be compared."""
    worker.answer([request])
    if (error := request.done.exception(0)) is not None:
        return type(error).__name__
    result = request.done.result()
    if isinstance(request, Recommend):
        return [each.items if hasattr(each, "items") else type(each).__name__ for each in result.users]
    if isinstance(request, Read):
        return result.items.tolist(), result.timestamps.tolist(), result.count
    return pytest.approx(result, abs=1e-5) if isinstance(request, Score) else result


def test_two_services_answer_as_one(small, store):
    """Send random requests to both services, and restart one of them now and then."""
    client, _, _ = store
    rng, both = np.random.default_rng(4), [new_service(small, client, True) for _ in range(2)]
    alone = new_service(small, None, True)
    outcomes = set()
    for turn in range(60):
        if turn % 20 == 19:
            both[turn // 20 % 2] = new_service(small, client, True)
        request = random_request(rng, turn)
        shared, expected = outcome(both[int(rng.integers(0, 2))], request()), outcome(alone, request())
        if isinstance(request(), Forget):
            continue  # a restarted service may not know yet whether the user had events
        shared = shared.expected if isinstance(request(), Score) and not isinstance(shared, str) else shared
        assert shared == expected, (turn, request())
        outcomes.add(str(expected)[:9])
    for worker in both:
        worker.store.refresh([])
        assert worker.recommender.filters.sizes == alone.recommender.filters.sizes
    assert len(outcomes) > 10


def test_the_store_stops_and_comes_back(small, store):
    """Requests fail with an error in one line, nothing is lost, and the service recovers by itself."""
    client, stop, start = store
    recommender = serve(*small, lambda: NOW, cache_bytes=2**22)
    shared = SharedUsers(client, recommender)
    event = {"events": [{"user": "ann", "item": 100, "timestamp": 5, "id": "one"}]}
    with TestClient(create_app(recommender, None, store=shared)) as browser:
        assert browser.post("/events", json=event).json()["events"] == ["accepted"]
        assert browser.get("/ready").status_code == 200
        stop()
        for failed in (browser.post("/events", json=event), browser.get("/users/ann"), browser.get("/ready")):
            error = failed.json()["error"]
            assert failed.status_code == 503 and error["name"] == "StoreUnavailable" and "\n" not in error["message"]
        assert browser.get("/health").status_code == 200
        start()
        assert browser.post("/events", json=event).json()["events"] == ["repeated"]
        assert browser.get("/users/ann").json()["count"] == 1 and browser.get("/ready").status_code == 200


def test_another_model_on_the_same_store(small, store):
    client, _, _ = store
    worker, other = new_service(small, client), new_service(small, client)
    answer(worker, Events(["ann", "bob"], [100, 103], [5, 6], None))
    answer(worker, PutList("stock", [100, 103]))
    new = serve(small[0], make_model(small[0], 1), lambda: NOW, cache_bytes=2**22)
    source = worker.store.for_recommender(new)
    source.refresh(["ann"])
    answer(other, Events(["ann"], [106], [7], None))
    worker.answer([Exchange(new, source), read := Read("ann")])
    assert worker.recommender is new and read.done.result().items.tolist() == [100, 106]
    assert answer(worker, Read("bob")).count == 1 and new.filters.sizes == {"stock": 2}


def test_an_invalid_store():
    with pytest.raises(ServingError, match="--store"):
        connect("redis://127.0.0.1:1/0", True)
