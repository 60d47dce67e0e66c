"""Test serve.py with clients that are slow, idle, many or leave, and with signals at every stage."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import serve
import train
from serving.http import limits, server
from serving.http.event_log import EventLog
from serving.http.server import listening
from tests.serving.test_serve import SMALL, ended, known_items, serving, trained  # noqa: F401
from tests.support.forked import Forked

TOKEN = "a-secret-of-sixteen"
SIGNALS = [signal.SIGTERM, signal.SIGINT]
STAGES = {
    "Recommender.load": (143, "Stopped while loading the run"),
    "serve.EventLog": (143, "Stopped while replaying"),
    "serve.replay": (143, "Stopped while replaying"),
    "serve.create_app": (143, "Stopped while replaying"),
    "Server.startup": (0, "all accepted events are in the log"),
    "Server.run": (0, "all accepted events are in the log"),
}


def impatient(arguments):
    """Run serve.py with shorter times for clients."""
    server.CLIENT_SECONDS, limits.BODY_SECONDS = 1.0, 1.0
    return serve.main(arguments)


def signalled(stage, arguments):
    """Run serve.py, which gets SIGTERM when it calls the function OWNER.NAME."""
    owner, name = stage.split(".")
    owner = getattr(serve, owner, serve)
    original = getattr(owner, name)

    def call(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    setattr(owner, name, call)
    return serve.main(arguments)


def address(client):
    return client.base_url.host, client.base_url.port


def connected(client, content=b""):
    connection = socket.create_connection(address(client), timeout=600)
    connection.sendall(content)
    return connection


def everything(connection):
    """Return the bytes received until the other side closes."""
    content = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            content += part
    return content


def head(method, path, *lines):
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def posted(body, *lines):
    return head("POST", "/events", "Content-Type: application/json", f"Content-Length: {len(body)}", *lines)


def half_sent(client, body):
    """Return a connection after the head and half of the body of a request were sent."""
    connection = connected(client, posted(body, "Expect: 100-continue"))
    assert connection.recv(2**16).startswith(b"HTTP/1.1 100")
    connection.sendall(body[: len(body) // 2])
    return connection


def wait_until_closed(client):
    """Wait until the service takes no more connections."""
    with contextlib.suppress(OSError):
        while True:
            socket.create_connection(address(client), timeout=600).close()
            time.sleep(0.01)


# Signals.


@pytest.mark.parametrize("number", [SIGNALS[0], *(pytest.param(s, marks=pytest.mark.slow) for s in SIGNALS[1:])])
def test_a_request_that_arrives_with_a_signal_is_answered(trained, tmp_path, number):  # noqa: F811
    body = b'{"events": [{"user": "ann", "item": %d}]}' % known_items(trained)[0]
    with serving(trained, log=tmp_path / "log") as (process, client):
        connection = half_sent(client, body)
        process.send_signal(number)
        wait_until_closed(client)
        time.sleep(1.5)  # longer than a library may continue after a signal
        connection.sendall(body[len(body) // 2 :])
        assert b'"accepted":1,' in everything(connection)
        assert ended(process) == (0, "")
    assert (tmp_path / "log").read_bytes().count(b'"users"') == 1


def test_a_second_signal_ends_the_service_at_once(trained, tmp_path):  # noqa: F811
    with serving(trained, log=tmp_path / "log") as (process, client):
        connection = half_sent(client, b"{" * 100)
        process.send_signal(signal.SIGTERM)
        wait_until_closed(client)
        process.send_signal(signal.SIGINT)
        assert ended(process) == (130, "") and everything(connection) == b""


def test_a_signal_at_every_stage(trained, tmp_path):  # noqa: F811
    for stage, (status, says) in STAGES.items():
        options = ["--port", "0", *SMALL, "--device", "cpu", "--log", str(tmp_path / stage)]
        process = Forked(signalled, stage, [str(trained), *options], cwd=tmp_path)
        out, err = process.communicate()
        assert (process.returncode, err) == (status, ""), (stage, out)
        assert says in out.splitlines()[-1], (stage, out)


@pytest.mark.slow
def test_forty_large_requests_are_answered_after_a_signal(trained, tmp_path):  # noqa: F811
    item = known_items(trained)[0]
    users = [f'{{"user": "u{number % 500}", "item": {item}, "timestamp": {number}}}' for number in range(10_000)]
    body = ('{"events": [' + ", ".join(users) + "]}").encode()
    with serving(trained, log=tmp_path / "log") as (process, client):
        connections = [half_sent(client, body) for _ in range(40)]
        for connection in connections:
            connection.sendall(body[len(body) // 2 :])
        process.send_signal(signal.SIGTERM)
        answers = [everything(connection) for connection in connections]
        assert ended(process) == (0, "")
    assert all(b'"accepted":10000,' in answer for answer in answers)
    log = EventLog(tmp_path / "log")  # most of it is in segments
    assert sum(part.num_events for part in log.parts()) == 400_000
    log.close()


# Connections.


def test_answers_are_sent_at_once():
    """Without TCP_NODELAY, the client of a kept-alive connection would wait for 40 ms."""

    async def option():
        answer = asyncio.get_running_loop().create_future()
        with listening("127.0.0.1", 0) as listener:
            accepted = lambda reader, writer: answer.set_result(
                writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            )
            async with await asyncio.start_server(accepted, sock=listener):
                with socket.create_connection(listener.getsockname()):
                    return await answer

    assert asyncio.run(option())


def open_sockets(process):
    folder = Path(f"/proc/{process.pid}/fd")
    return sum(os.readlink(file).startswith("socket:") for file in folder.iterdir())


def trickle(client, whole, content):
    """Send `whole`, then a byte at a time until the other side closes."""
    connection = connected(client, whole)
    with contextlib.suppress(OSError):
        for place in range(len(content)):
            connection.sendall(content[place : place + 1])
            time.sleep(0.02)
        raise AssertionError("all was taken")


def test_slow_and_idle_clients_are_disconnected(trained, tmp_path):  # noqa: F811
    with serving(trained, log=tmp_path / "log", main=impatient) as (process, client):
        before, health = open_sockets(process), head("GET", "/health")
        sent = (b"", health[:-2], health, health + health[:-2])
        connections = [connected(client, part) for part in sent]
        trickles = (
            (b"", health[:-2] + b"x: " + b"y" * 1000),
            (posted(b"y" * 1000), b"y" * 999),
            (posted(b"y" * 10**7), b"y" * 1000),  # it is refused at once
        )
        with ThreadPoolExecutor(len(trickles)) as pool:
            list(pool.map(lambda parts: trickle(client, *parts), trickles))
        assert [everything(connection).count(b"200 OK") for connection in connections] == [0, 0, 1, 1]
        counts = client.get("/metrics").text
        assert 'status="408"} 1.0' in counts and 'status="413"} 1.0' in counts
        unread = connected(client)
        unread.settimeout(0.3)
        with contextlib.suppress(OSError):
            while True:
                unread.sendall(head("GET", "/openapi.json") * 1000)  # until the service reads no more
        while open_sockets(process) > before:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (0, "")


def crowd(client, count):
    """Open connections that alternately send nothing, half of a head, half of a body, or stay idle after a request."""
    whole, health = posted(b"y" * 100), head("GET", "/health")
    contents = [b"", health[:-2], whole + b"y" * 50, health]
    return [connected(client, contents[number % 4]) for number in range(count)]


@pytest.mark.slow
def test_more_clients_than_descriptors_do_not_stop_health(trained, tmp_path):  # noqa: F811
    few_files = ((resource.RLIMIT_NOFILE, 200),)
    with serving(trained, log=tmp_path / "log", limits=few_files) as (process, client):
        clients = crowd(client, 500)
        for _ in range(5):
            assert httpx.get(f"{client.base_url}/health", timeout=60).status_code == 200
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < 200
        process.send_signal(signal.SIGTERM)
        for connection in clients:
            connection.close()
        assert ended(process) == (0, "")


@pytest.mark.slow
def test_ten_thousand_clients_do_not_stop_health(trained, tmp_path):  # noqa: F811
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 11_000:
        pytest.skip(f"needs 11,000 descriptors, the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (11_000, hard))
    try:
        with serving(trained, log=tmp_path / "log") as (process, client):
            clients, answers = crowd(client, 10_000), []
            for _ in range(100):
                began = time.monotonic()
                answers.append(httpx.get(f"{client.base_url}/health", timeout=60).status_code)
                print(f"/health: {1000 * (time.monotonic() - began):.1f} ms")
            assert answers == [200] * 100
            process.send_signal(signal.SIGTERM)
            for connection in clients:
                connection.close()
            assert ended(process) == (0, "")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Requests.


@pytest.fixture(scope="module")
def service(trained, tmp_path_factory):  # noqa: F811
    """Start a service with a token; yield (the process, a client with the token); check that no error is printed."""
    folder = tmp_path_factory.mktemp("service")
    (folder / "token").write_text(TOKEN)
    options = ("--history", "--token-file", folder / "token")
    with serving(trained, *options, log=folder / "log") as (process, client):
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        yield process, client
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (0, "")


def test_a_client_that_disconnects_causes_no_error(service):
    _, client = service
    for _ in range(3):
        connected(client, posted(b"y" * 100, f"Authorization: Bearer {TOKEN}") + b"y" * 50).close()
    while 'route="other",status="499"} 3.0' not in (text := client.get("/metrics").text):
        time.sleep(0.05)
    assert 'status="500"' not in text


def test_invalid_http_is_refused_in_one_answer(service):
    _, client = service
    chunked, token = "Transfer-Encoding: chunked", f"Authorization: Bearer {TOKEN}"
    for content in (b"\x16\x03\x01\r\n\r\n", head("POST", "/events", chunked, token) + b"no number\r\n"):
        answer = everything(connected(client, content))
        assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1 and b'{"error": {' in answer
    connection = connected(client, head("POST", "/events", chunked))
    assert connection.recv(2**16).startswith(b"HTTP/1.1 401")
    connection.sendall(b"no number\r\n")
    assert b"HTTP/1.1" not in everything(connection)


def test_a_refused_body_is_read_so_that_its_client_gets_the_answer(service):
    _, client = service
    for lines, status in (((), b"401"), ((f"Authorization: Bearer {TOKEN}",), b"413")):
        connection = connected(client, posted(b"y" * 2**23, *lines) + b"y" * 2**23)
        connection.sendall(head("GET", "/health", "Connection: close"))
        answers = everything(connection).split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [status, b"200"]


def test_no_redirect_to_a_host_that_the_client_names(service):
    _, client = service
    answer = client.get("/users/1/", headers={"Host": "evil.example"})
    assert answer.status_code == 404 and "evil.example" not in str(answer.headers)


def schemathesis(client, count, *options):
    return subprocess.run(
        [Path(sys.executable).with_name("schemathesis"), "run", f"{client.base_url}/openapi.json", "--checks", "all",
         "--seed", "1", "--max-examples", str(count), *options],
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip


def test_the_service_matches_its_openapi_document(service, tmp_path, monkeypatch):
    """Send random requests, alone and in sequences; the slow form below also sends 800 boundary values."""
    monkeypatch.chdir(tmp_path)
    done = schemathesis(service[1], 2, "--phases", "fuzzing,stateful", "--header", f"Authorization: Bearer {TOKEN}")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("token", [False, True])
def test_a_thousand_requests_by_schemathesis(trained, service, tmp_path, monkeypatch, token):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as stack:
        if token:
            client, options = service[1], ("--header", f"Authorization: Bearer {TOKEN}")
        else:
            running = serving(trained, "--history", log=tmp_path / "log")
            client, options = stack.enter_context(running)[1], ()
        done = schemathesis(client, 100, *options)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_features_by_schemathesis(tmp_path, monkeypatch):
    """Test a ranking run with features of users and events by requests generated from its OpenAPI document."""
    rows = [f"{n % 7},{n % 11},{n},{n % 2},d{n % 3}" for n in range(300)]
    (tmp_path / "events.csv").write_text("user,item,timestamp,action,device\n" + "\n".join(rows) + "\n")
    (tmp_path / "users.csv").write_text("user,tags\n" + "\n".join(f"{n},t{n % 2}|t{n % 3}" for n in range(7)) + "\n")
    features = {
        "users": {"format": "csv", "path": str(tmp_path / "users.csv"), "columns": {"tags": "list"}},
        "events": {"columns": {"device": {"kind": "category", "known": "before"}}},
    }
    data = {"format": "csv", "path": str(tmp_path / "events.csv"), "protocol": "last_tenth", "features": features}
    data |= {"columns": {"action": "action"}, "cache_dir": str(tmp_path / "cache")}
    tree = {
        "name": "t", "device": "cpu", "threads": 1, "data": data,
        "task": {"kind": "ranking", "actions": [{"name": "liked", "at_least": 1}]},
        "model": {
            "block": "hstu", "max_seq_len": 20, "embedding_dim": 8, "num_layers": 1, "attention": {"kind": "dense"},
        },
        "train": {"epochs": 1},
    }  # fmt: skip
    (tmp_path / "t.yaml").write_text(json.dumps(tree))
    assert train.main([str(tmp_path / "t.yaml"), "--run", str(tmp_path / "run")]) == 0
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "run", "--history", log=tmp_path / "log") as running:
        done = schemathesis(running[1], 30)
        assert done.returncode == 0, done.stdout
