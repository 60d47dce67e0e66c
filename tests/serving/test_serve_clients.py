"""Test serve.py with signals at every stage, while clients send requests."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from models.serving.http.server import listening
from tests.serving.test_serve import SMALL, ended, known_items, serving, trained  # noqa: F401

SIGNALS = [signal.SIGTERM, signal.SIGINT]
# serve.py that gets a signal when it calls a function.
SIGNALLED = """
import os, sys
import serve
owner, name, number = sys.argv[1:4]
owner = getattr(serve, owner, serve)
original = getattr(owner, name)
def call(*arguments, **options):
    os.kill(os.getpid(), int(number))
    return original(*arguments, **options)
setattr(owner, name, call)
sys.exit(serve.main(sys.argv[4:]))
"""


def address(client):
    return client.base_url.host, client.base_url.port


def connected(client, content=b""):
    connection = socket.create_connection(address(client), timeout=600)
    connection.sendall(content)
    return connection


def everything(connection):
    """Return what comes until the other side closes."""
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
    """Return a connection whose request's head was read, and half of its body sent."""
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


@pytest.mark.parametrize("number", SIGNALS)
def test_a_request_that_comes_in_when_a_signal_does_is_answered(trained, tmp_path, quick_python, number):  # noqa: F811
    body = b'{"events": [{"user": "ann", "item": %d}]}' % known_items(trained)[0]
    with serving(trained, log=tmp_path / "log", python=quick_python.executable) as (process, client):
        connection = half_sent(client, body)
        process.send_signal(number)
        wait_until_closed(client)
        time.sleep(1.5)  # longer than a library may go on after a signal
        connection.sendall(body[len(body) // 2 :])
        assert b'{"accepted":1}' in everything(connection)
        assert ended(process) == (0, "")
    assert (tmp_path / "log").read_bytes().count(b'"users"') == 1


def test_a_second_signal_ends_the_service_at_once(trained, tmp_path, quick_python):  # noqa: F811
    with serving(trained, log=tmp_path / "log", python=quick_python.executable) as (process, client):
        connection = half_sent(client, b"{" * 100)
        process.send_signal(signal.SIGTERM)
        wait_until_closed(client)
        process.send_signal(signal.SIGINT)
        assert ended(process) == (130, "") and everything(connection) == b""


@pytest.mark.parametrize(
    ("owner", "name", "status", "says"),
    [
        ("Recommender", "load", 143, "Stopped while loading the run"),
        ("serve", "EventLog", 143, "Stopped while replaying"),
        ("serve", "replay", 143, "Stopped while replaying"),
        ("serve", "create_app", 143, "Stopped while replaying"),
        ("Server", "startup", 0, "all accepted events are in the log"),
        ("Server", "run", 0, "all accepted events are in the log"),
    ],
)
def test_a_signal_at_every_stage(trained, tmp_path, quick_python, owner, name, status, says):  # noqa: F811
    number = str(int(signal.SIGTERM))
    command = [quick_python.executable, "-c", SIGNALLED, owner, name, number, trained, "--port", "0", *SMALL]
    done = subprocess.run(
        [*map(str, command), "--device", "cpu", "--log", str(tmp_path / "log")],
        capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (status, "") and says in done.stdout.splitlines()[-1], done


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
    assert all(b'{"accepted":10000}' in answer for answer in answers)
    assert (tmp_path / "log").read_bytes().count(b'"users"') == 40


# Connections.


def test_answers_are_sent_at_once():
    """A kept connection whose socket waits for more to send makes the client wait for 40 ms."""

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
