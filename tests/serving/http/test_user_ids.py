"""Test every user id that a data file can contain, over real connections."""

import contextlib
import json
import shutil
import socket
import subprocess
import threading
from urllib.parse import quote

import httpx
import pytest
import uvicorn

from serving.http.app import create_app
from tests.serving.plain import make_config, make_model, serve

NOW = 1_000_000


@pytest.fixture(scope="module")
def small():
    config = make_config()
    return config, make_model(config)


def events(*rows):
    return {"events": [dict(zip(("user", "item", "timestamp"), row)) for row in rows]}


USERS = [
    "a/b", "/", "//", "a/", "/a", ".", "..", "../x", "a/../b", "./", "recommendations", "a/recommendations",
    "/recommendations", "%2F", "%", "100%", "%252e", "%00", "a b", " ", "  a  ", "?", "a?user=b", "#", "a#b", "+",
    "a+b", "&", "a&user=b", "=", ";", ":", "@", "\\", '"', "'", "<script>", "{user}", "[1]", "-7", "007", "null", "é",
    "e\u0301", "日本語", "😀", "\ufffd", "\u202e", "\n", "\r\n", "\t", "\x01", "\x7f", "\x85", "favicon.ico", "x" * 256,
    "😀" * 256, "/" * 256,
]  # fmt: skip


@contextlib.contextmanager
def listening(app):
    """Yield the address of an application that answers real connections."""
    # With the protocol TCP: otherwise asyncio does not set TCP_NODELAY, and each reply takes 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # connections made before the server's thread runs wait
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def encoded(user):
    return quote(user, safe="").replace(".", "%2E")


def test_every_id_is_reached(small):
    """Post, read, recommend to and delete each user by path and by query; other users do not change."""
    recommender = serve(*small, lambda: NOW, cache_bytes=2**22)
    with (
        listening(create_app(recommender, None, clock=lambda: NOW)) as address,
        httpx.Client(base_url=address) as client,
    ):
        for number, user in enumerate(USERS):
            assert client.post("/events", json=events((user, 100, number))).status_code == 200, user
        assert recommender.num_users == len(USERS)
        for number, user in enumerate(USERS):
            assert recommender.history(user).count == 1, user
            for path, parameters in ((f"/users/{encoded(user)}", {}), ("/users", {"user": user})):
                assert client.get(path, params=parameters).json()["timestamps"] == [number], (path, user)
            for path, parameters in (
                (f"/users/{encoded(user)}/recommendations", {}),
                ("/recommendations", {"user": user}),
            ):
                answer = client.get(path, params=parameters | {"k": 3, "at": 10**4})
                assert len(answer.json()["items"]) == 3, (path, user, answer.text)
            response = client.post("/scores", json={"user": user, "candidates": [100]})
            assert response.status_code == 200, user
        for number, user in enumerate(USERS):
            if number % 2:
                answer = client.delete("/users", params={"user": user})
            else:
                answer = client.delete(f"/users/{encoded(user)}")
            assert answer.json() == {"forgotten": True}, user
            assert recommender.num_users == len(USERS) - 1 - number, user
        for user in ("a\0", "\0", "", "\ud800"):
            content = json.dumps(events((user, 100, 5))).encode()
            assert (
                client.post("/events", content=content, headers={"content-type": "application/json"}).status_code == 422
            )
        for path in ("/users/%ff", "/users/a%ff/recommendations", "/users?user=%ff", "/recommendations?user=a%ff"):
            assert client.get(path).status_code == 422, path
        assert client.delete("/users/%ff").status_code == client.delete("/users?user=%ff").status_code == 422
        for path in ("/users/", "/users//recommendations", "/users/a/b", "/users/a/b/recommendations"):
            assert client.get(path).status_code == 404, path


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_reaches_every_id(small):
    """Clients that change dots in paths can use the query for every id."""
    recommender = serve(*small, lambda: NOW, cache_bytes=2**22)
    recommender.append(USERS, [100] * len(USERS), list(range(len(USERS))))
    with listening(create_app(recommender, None, clock=lambda: NOW)) as address:
        command = ["curl", "-sS"]
        for user in USERS:
            command += ["--next", "-X", "DELETE", f"{address}/users?user={quote(user, safe='')}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout == '{"forgotten":true}' * len(USERS) and recommender.num_users == 0, done
