"""Test two services on one Redis: they answer like one, and run as described in docs/production.md."""

import contextlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from serving import Recommender
from serving.http.app import create_app
from tests.serving.http.test_redis_store import Server
from tests.serving.test_serve import ROOT, SMALL, ended, known_items, serving, trained  # noqa: F401
from tests.support.ports import reserved_ports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server"),
]
OPERATIONS = 10_000
WAIT = 500  # seconds, enough for a busy machine
NOW = 3 * 10**9  # after all events of the data


def random_request(rng, turn, users, items):
    """Return (method, path, body or query) of a request; `turn` is the time of its events."""
    some = [users[place] for place in rng.integers(0, len(users), rng.integers(1, 4))]
    kind = rng.choice(
        ["events", "lists", "list", "scores", "history", "delete", "put"], p=[0.4, 0.1, 0.2, 0.1, 0.1, 0.05, 0.05]
    )
    if kind == "events":
        late = 50 * int(turn % 7 == 0)
        events = [
            {"user": user, "item": int(rng.choice(items)), "timestamp": NOW - 10**6 + turn - late} for user in some
        ]
        for event in events:
            if rng.random() < 0.5:
                event["id"] = f"{rng.integers(0, 200)}"
        return "POST", "/events", {"events": events}
    if kind == "lists":
        return "POST", "/recommendations", {"users": some, "k": 5, "at": NOW, "cold": "error"}
    if kind == "list":
        query = {"k": 5, "at": NOW, "cold": "error", "filters": "stock"}
        return "GET", f"/users/{some[0]}/recommendations", query
    if kind == "scores":
        return "POST", "/scores", {"user": some[0], "candidates": rng.choice(items, 3).tolist(), "at": NOW}
    if kind == "put":
        return "PUT", "/filters/stock", {"items": rng.choice(items, len(items) // 2, replace=False).tolist()}
    return ("GET" if kind == "history" else "DELETE"), f"/users/{some[0]}", {}


def outcome(client, request):
    """Return the status and the JSON of an answer."""
    method, path, content = request
    content = {"params" if method == "GET" else "json": content} if content else {}
    answer = client.request(method, path, **content)
    return answer.status_code, answer.json()


def compare(actual, expected, path=""):
    """Compare answers: numbers to 1e-6, and items whose scores differ by no more in any order."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for name, value in expected.items():
            if name == "items" and isinstance(value, list) and value and isinstance(value[0], dict):
                scores = [[one["score"] for one in items] for items in (actual[name], value)]
                np.testing.assert_allclose(*scores, rtol=0, atol=1e-6, err_msg=path)
                last = value[-1]["score"] + 2e-6
                clear = [{one["item"] for one in items if one["score"] > last} for items in (actual[name], value)]
                assert clear[0] <= {one["item"] for one in value} and clear[1] <= {x["item"] for x in actual[name]}
            elif name not in ("model", "message"):
                compare(actual[name], value, f"{path}.{name}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), path
        for place, (one, other) in enumerate(zip(actual, expected)):
            compare(one, other, f"{path}[{place}]")
    elif isinstance(expected, float):
        assert abs(actual - expected) <= 1e-6, path
    else:
        assert actual == expected, path


def test_two_replicas_answer_as_one_process(trained, tmp_path):  # noqa: F811
    """Send random requests to both; one of them is killed and restarted twice."""
    pytest.importorskip("redis")
    rng, items = np.random.default_rng(0), known_items(trained)
    users = [*np.load(trained / "vocabulary" / "user_ids.npy")[:20].tolist(), *(f"new{n}" for n in range(10))]
    redis = Server(tmp_path)
    options = ["--history", "--store", redis.url]
    recommender = Recommender.load(trained, history=True, device="cpu", cache_bytes=2**24)
    statuses = set()
    with contextlib.ExitStack() as stack:
        stack.callback(redis.stop)
        alone = stack.enter_context(TestClient(create_app(recommender, None)))
        _, steady = stack.enter_context(serving(trained, *options))
        for part in range(3):
            with serving(trained, *options) as (process, other):
                for turn in range(part * OPERATIONS // 3, (part + 1) * OPERATIONS // 3):
                    request = random_request(rng, turn, users, items)
                    status, answer = outcome(steady if rng.random() < 0.5 else other, request)
                    expected_status, expected = outcome(alone, request)
                    assert status == expected_status, (turn, request, answer, expected)
                    if request[0] != "DELETE":  # a service that has not read the user cannot know whether it existed
                        compare(answer, expected, f"{turn} {request}")
                    statuses.add(status)
                process.kill()
    assert statuses == {200, 404}, statuses


@contextlib.contextmanager
def running(command, folder, until=None):
    """Yield a process of a command in a folder, once it has printed `until`."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        if until is not None:
            output = ""
            for line in process.stdout:
                output += line
                if until in line:
                    break
            else:
                raise AssertionError(output)
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=WAIT)


def answered(client, method, path, **content):
    """Send a request until the proxy and the services answer; return the answer."""
    ends = time.monotonic() + WAIT
    while True:
        with contextlib.suppress(httpx.TransportError):
            answer = client.request(method, path, **content)
            if answer.status_code not in (502, 503):
                return answer
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.fixture
def ports():
    """Return free ports by the ports in docs/production.md."""
    with reserved_ports(4) as free:
        yield dict(zip(("8000", "8001", "8002", "6379"), free))


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_the_services_of_the_docs(trained, tmp_path, ports):  # noqa: F811
    """Run Redis, two services and nginx as docs/production.md prints them, on other ports."""
    pytest.importorskip("redis")
    text = (ROOT / "docs" / "production.md").read_text()
    commands = re.search(r"```sh\n(pip install \"redis.*?)```", text, re.S)[1].strip().splitlines()
    configuration = re.search(r"```nginx\n(.*?)```", text, re.S)[1]

    def moved(text):
        return re.sub(r"\b(8000|8001|8002|6379)\b", lambda match: ports[match[1]], text)

    (tmp_path / "nginx.conf").write_text(moved(configuration))
    shutil.copytree(trained, tmp_path / "runs" / "day-1")
    _, redis, *services, proxy = [shlex.split(moved(command.removesuffix(" &"))) for command in commands]
    assert redis[0] == "redis-server" and len(services) == 2 and proxy[:2] == ["nginx", "-c"]
    python = [sys.executable, str(ROOT / "serve.py")]
    assert all(service[:2] == ["python", "serve.py"] for service in services)
    services = [[*python, *service[2:], *SMALL, "--device", "cpu"] for service in services]
    # In the foreground, with its pid file in the test's folder.
    proxy = ["nginx", "-c", str(tmp_path / "nginx.conf"), "-g", f"daemon off; pid {tmp_path}/pid;"]
    item = known_items(trained)[0]

    def order(client, number):
        events = [{"user": "ann", "item": item, "timestamp": number, "id": f"order-{number}"}]
        return answered(client, "POST", "/events", json={"events": events}).json()["events"]

    with contextlib.ExitStack() as stack:
        store = stack.enter_context(running(redis, tmp_path, "Ready to accept connections"))
        first = stack.enter_context(running(services[0], tmp_path, "Serving on"))
        stack.enter_context(running(services[1], tmp_path, "Serving on"))
        stack.enter_context(running(proxy, tmp_path))
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{ports['8000']}", timeout=WAIT))
        replicas = [httpx.Client(base_url=f"http://127.0.0.1:{ports[port]}", timeout=WAIT) for port in ("8001", "8002")]
        assert all(order(client, number) == ["accepted"] for number in range(10))
        assert order(client, 3) == ["repeated"]
        assert [replica.get("/users/ann").json()["count"] for replica in replicas] == [10, 10]
        first.kill()
        for number in range(10, 30):  # the remaining service answers
            event = {"user": "ann", "item": item, "timestamp": number, "id": f"order-{number}"}
            answer = client.post("/events", json={"events": [event]})
            assert answer.status_code == 200 and answer.json()["events"] in (["accepted"], ["repeated"])
            assert client.get("/users/ann/recommendations").status_code == 200
        stack.enter_context(running(services[0], tmp_path, "Serving on"))
        assert replicas[0].get("/users/ann").json()["count"] == 30
        store.send_signal(signal.SIGKILL)
        store.wait()
        answer = client.get("/users/ann")
        assert answer.status_code == 503 and answer.json()["error"]["name"] == "StoreUnavailable"
        stack.enter_context(running(redis, tmp_path, "Ready to accept connections"))
        assert answered(client, "GET", "/users/ann").json()["count"] == 30
        assert order(client, 30) == ["accepted"] and order(client, 30) == ["repeated"]
        assert [answered(replica, "GET", "/users/ann").json()["count"] for replica in replicas] == [31, 31]
