"""Test the service over HTTP in this process: routes, errors, limits, the token, hostile input, the event log."""

import dataclasses
import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

import numpy as np
import pytest
from fastapi.testclient import TestClient

from serving.errors import NoHistory, RequestError, TooEarly, UnknownFilter, UnknownItem
from serving.filters import Filter
from serving.http.app import Limits, create_app
from serving.http.event_log import EventLog, LogError, NotStored
from serving.http.replay import replay
from serving.http.requests import Events, Recommend, Score
from serving.http.worker import Worker
from tests.serving.plain import NUM_ITEMS, item_ids, make_config, make_model, serve

NOW = 1_000_000


@pytest.fixture(scope="module")
def small():
    config = make_config()
    return config, make_model(config)


@pytest.fixture
def recommender(small):
    return serve(*small, lambda: NOW, cache_bytes=2**22, most_users=50)


@pytest.fixture
def client(recommender, tmp_path):
    log = EventLog(tmp_path / "events.log")
    limits = Limits(body=2000, filter_body=3000, events=20, candidates=50, users=4, list=30)
    with TestClient(create_app(recommender, log, limits=limits, clock=lambda: NOW)) as client:
        yield client
    log.close()


def events(*rows):
    return {"events": [dict(zip(("user", "item", "timestamp", "action"), row)) for row in rows]}


def test_a_day_of_a_user(client, recommender):
    assert client.get("/users/ann/recommendations", params={"cold": "error"}).status_code == 404
    posted = client.post("/events", json=events(("ann", 100, 5), ("bob", "103", 6), (7, 100))).json()
    assert posted == {"model": "small", "accepted": 3, "repeated": 0, "unknown": 0, "events": ["accepted"] * 3}
    response = client.get("/users/ann/recommendations", params={"k": 5, "at": 9}).json()["items"]
    items, scores = recommender.recommend(["ann"], 5, 9)
    assert [row["item"] for row in response] == items[0].tolist()
    assert [row["score"] for row in response] == pytest.approx(scores[0].tolist())
    # Fewer items are left than requested; the default time is now.
    assert len(client.get("/users/7/recommendations", params={"k": 30}).json()["items"]) == 30
    everything = client.get("/users/ann/recommendations", params={"exclude_seen": False, "k": 30}).json()
    assert len(everything["items"]) == 30
    response = client.post("/scores", json={"user": "bob", "candidates": [106, 100, "103"], "at": 9}).json()["scores"]
    assert response == pytest.approx(recommender.score(["bob"], [[106, 100, 103]], 9)[0].tolist())
    assert client.get("/users/7").json() == {"items": [100], "timestamps": [NOW], "actions": None, "count": 1}
    assert client.delete("/users/ann").json() == {"forgotten": True}
    assert client.delete("/users/ann").json() == {"forgotten": False}
    assert client.get("/users/ann").status_code == 404
    assert client.get("/health").json() == {"model": "small", "status": "ok", "users": 2}
    assert client.get("/ready").json() == {"model": "small", "status": "ready"}
    assert client.get("/nothing").headers["x-model"] == client.get("/docs").headers["x-model"] == "small"
    text = client.get("/metrics").text
    assert 'hstu_sparse_requests_total{model="small",route="/events",status="200"} 1.0' in text
    assert 'hstu_sparse_events_total{model="small",state="accepted"} 3.0' in text
    assert 'hstu_sparse_lists_total{model="small",user="error"} 1.0' in text
    assert "hstu_sparse_store_users 2.0" in text and "hstu_sparse_request_seconds_bucket" in text
    schema = client.get("/openapi.json").json()
    assert {"/events", "/scores", "/users/{user}/recommendations", "/health", "/metrics"} <= schema["paths"].keys()
    page = client.get("/docs").text  # no other host is named
    assert "openapi.json" in page and "://" not in page


HOSTILE = [
    ("POST", "/events", b"{", 422, "the body is not JSON"),
    ("POST", "/events", b"", 422, "the body is not JSON"),
    ("POST", "/events", b"[]", 422, "expected a JSON object"),
    ("POST", "/events", b'{"events": []}', 422, "events"),
    ("POST", "/events", b'{"events": [1]}', 422, "events.0"),
    ("POST", "/events", b'{"events": [{"user": 1}]}', 422, "events.0.item"),
    ("POST", "/events", b'{"events": [{"user": 1, "item": 100, "more": 1}]}', 422, "events.0.more"),
    ("POST", "/events", b'{"events": [{"user": null, "item": 100}]}', 422, "events.0.user"),
    ("POST", "/events", b'{"events": [{"user": 1.5, "item": 100}]}', 422, "events.0.user"),
    ("POST", "/events", b'{"events": [{"user": true, "item": 100}]}', 422, "events.0.user"),
    ("POST", "/events", b'{"events": [{"user": "", "item": 100}]}', 422, "events.0.user"),
    ("POST", "/events", b'{"events": [{"user": "\\ud800", "item": 100}]}', 422, ""),
    ("POST", "/events", b'{"events": [{"user": 1, "item": 100, "id": ""}]}', 422, "events.0.id"),
    ("POST", "/events?user=1", b'{"events": [{"user": 1, "item": 100}]}', 422, "unknown query parameter user"),
    ("POST", "/recommendations", b'{"users": []}', 422, "users"),
    ("POST", "/recommendations", b'{"users": [1], "k": 31}', 422, "k: expected at most 30 in a request"),
    ("POST", "/recommendations", b'{"users": [1, 2, 3, 4, 5]}', 422, "users: expected at most 4 in a request"),
    ("POST", "/recommendations", b'{"users": [1], "where": {"genre": [1]}}', 422, "genre is not a feature of"),
    ("POST", "/recommendations", b'{"users": [1], "at_most": {"genre": -1}}', 422, "at_most.genre"),
    ("POST", "/recommendations", b'{"users": [1], "filters": ["stock"]}', 404, "there is no list named stock"),
    ("POST", "/recommendations", b'{"users": [1], "cold": "warm"}', 422, "cold"),
    (
        "GET",
        "/users/1/recommendations?n=5",
        None,
        422,
        "unknown query parameter n: expected allow, at, at_most",
    ),
    ("GET", "/users/1/recommendations?where=genre", None, 422, "where: expected feature:value"),
    ("GET", "/users/1/recommendations?at_most=genre:x", None, 422, "at_most: expected feature:number"),
    ("GET", "/users/1?k=5", None, 422, "the route has no parameters"),
    ("GET", "/users/nobody/recommendations?cold=error", None, 404, "user nobody has no event"),
    ("PUT", "/filters/stock", b'{"items": [1.5]}', 422, "items.0"),
    ("PUT", "/filters/stock", b'{"items": 5, "name": 1}', 422, ""),
    ("PUT", "/filters/stock", b" " * 3001, 413, "3,000 bytes"),
    ("POST", "/events", b'{"events": [{"user": 1, "item": 1' + b"0" * 1500 + b"}]}", 422, "events.0.item"),
    ("POST", "/events", b'{"events": [{"user": 1, "item": 100, "timestamp": -1}]}', 422, "timestamp"),
    ("POST", "/events", b'{"events": [{"user": 1, "item": 100, "timestamp": 1.5}]}', 422, "timestamp"),
    ("POST", "/events", b'{"events": [{"user": 1, "item": 100, "timestamp": "5"}]}', 422, "timestamp"),
    ("POST", "/events", b'{"events": [{"user": 1, "item": 100, "timestamp": 1700000000000}]}', 422, "milliseconds?"),
    (
        "POST",
        "/scores",
        b'{"user": 1, "candidates": [100], "at": 1700000000000}',
        422,
        "at: expected seconds since 1970",
    ),
    ("GET", "/users/1/recommendations?at=1700000000000", None, 422, "got 1700000000000 (milliseconds?)"),
    ("GET", "/users/1/recommendations/", None, 404, "Not Found"),
    ("POST", "/events", b'{"events": [{"user": 1, "item": 100, "action": NaN}]}', 422, "actions"),
    ("POST", "/events", b'{"events": [{"user": 1, "item": 100, "action": 1}]}', 422, "the run does not read actions"),
    ("POST", "/events", b"[" * 1900, 422, "the body is not JSON"),
    ("POST", "/events", b"\xff\xfe", 422, "not JSON"),
    ("POST", "/events", json.dumps(events(*[(1, 100)] * 21)).encode(), 422, "at most 20 in a request, got 21"),
    ("POST", "/events", b" " * 2001, 413, "2,000 bytes"),
    ("POST", "/scores", b'{"user": 1, "candidates": []}', 422, "candidates"),
    ("POST", "/scores", b'{"user": 1, "candidates": [[100]]}', 422, "candidates"),
    ("POST", "/scores", b'{"user": "nobody", "candidates": [100]}', 404, "user nobody has no event"),
    ("POST", "/scores", b'{"user": 1, "candidates": [100, 101]}', 404, "1 of 2 items are not known"),
    ("POST", "/scores", b'{"user": 1, "candidates": [100], "at": 4}', 409, "before the last event"),
    ("POST", "/scores", b'{"user": 1, "candidates": [' + b"100," * 50 + b"100]}", 422, "at most 50"),
    ("GET", "/users/1/recommendations?k=0", None, 422, "k"),
    ("GET", "/users/1/recommendations?k=31", None, 422, "k"),
    ("GET", "/users/1/recommendations?k=x", None, 422, "k"),
    ("GET", "/users/1/recommendations?at=4", None, 409, "before the last event"),
    ("GET", "/users/1/recommendations?at=9" + "9" * 40, None, 422, "at"),
    ("GET", "/users/" + "u" * 257, None, 422, "user"),
    ("GET", "/users/%00%fe", None, 422, "user"),
    ("GET", "/users/%00%c3%bf", None, 404, "has no event"),
    ("GET", "/users/../../etc/passwd", None, 404, ""),
    ("GET", "/users/..%2f..%2fetc%2fpasswd", None, 404, ""),
    ("GET", "/nothing", None, 404, "Not Found"),
    ("DELETE", "/events", None, 405, ""),
]


def test_hostile_requests(client):
    """Check that a bad request gets a 4xx status and a message in one line, and that the service still answers."""
    assert client.post("/events", json=events((1, 100, 5))).status_code == 200
    for method, path, body, status, message in HOSTILE:
        headers = {"content-type": "application/json"} if body is not None else {}
        answer = client.request(method, path, content=body, headers=headers)
        assert answer.status_code == status, (method, path, body, answer.text)
        error = answer.json()["error"]
        assert set(error) == {"name", "message"} and message in error["message"], (body, error)
        assert "\n" not in error["message"] and len(error["message"]) < 400
    assert client.get("/users/1").json()["count"] == 1
    for kind in ({}, {"content-type": "text/plain"}):  # a browser may send these from another site's page
        answer = client.post("/events", content=json.dumps(events((1, 100, 5))).encode(), headers=kind)
        assert answer.status_code == 415 and answer.json()["error"]["name"] == "UnsupportedMediaType"


def test_a_wrong_method_gets_the_allowed_ones(client):
    for path, methods in (("/events", "POST"), ("/users/1", "DELETE, GET"), ("/recommendations", "GET, POST")):
        answer = client.put(path)
        assert answer.status_code == 405 and answer.headers["allow"] == methods
        assert answer.json()["error"]["name"] == "MethodNotAllowed"


def test_the_openapi_document_matches_the_service(recommender):
    with TestClient(create_app(recommender, None, limits=Limits(events=20, candidates=50))) as client:
        paths = client.get("/openapi.json").json()["paths"]
    assert "security" not in paths["/events"]["post"]
    assert {"400", "404", "408", "409", "413", "415", "422", "503", "507"} <= paths["/events"]["post"][
        "responses"
    ].keys()
    schema = paths["/events"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]["events"]
    assert schema["maxItems"] == 20 and "action" not in schema["items"]["properties"]
    assert schema["items"]["properties"]["timestamp"]["anyOf"][0] == {
        "type": "integer", "minimum": 0, "exclusiveMaximum": 10**11
    }  # fmt: skip
    parameters = {one["name"]: one["schema"] for one in paths["/users/{user}/recommendations"]["get"]["parameters"]}
    assert parameters["at"]["exclusiveMaximum"] == 10**11 and parameters["k"]["maximum"] == 1000
    with TestClient(create_app(recommender, None, token="a-secret-of-sixteen")) as client:
        document = client.get("/openapi.json").json()
    (scheme,) = document["components"]["securitySchemes"].values()
    assert scheme == {"type": "http", "scheme": "bearer"}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            open_route = path in ("/health", "/ready")
            assert ("security" in operation) == ("401" in operation["responses"]) == (not open_route), path


def test_whole_numbers_may_be_written_as_7_0(client):
    """JSON Schema counts them as integers."""
    client.post("/events", json=events(("ann", 1, 100)))
    lists = client.post("/recommendations", json={"users": ["ann"], "k": 2.0})
    assert lists.status_code == 200 and len(lists.json()["lists"][0]["items"]) == 2
    assert client.put("/filters/few", json={"items": [3.0, 4]}).status_code == 200
    assert client.post("/recommendations", json={"users": ["ann"], "k": 2.5}).status_code == 422


def test_an_event_too_many_changes_nothing(client):
    rows = [(f"u{i}", 100, 5) for i in range(20)]
    for begin in (0, 20):
        more = [(f"{user}-{begin}", *rest) for user, *rest in rows]
        assert client.post("/events", json=events(*more)).status_code == 200
    answer = client.post("/events", json=events(*rows))
    assert answer.status_code == 409 and answer.json()["error"]["name"] == "LimitReached"
    assert client.get("/health").json()["users"] == 40


def test_the_token(recommender):
    with TestClient(create_app(recommender, None, token="a-secret-of-sixteen")) as client:
        for path in ("/health", "/docs", "/openapi.json"):  # a browser opens the API page without a token
            assert client.get(path).status_code == 200
        assert client.get("/metrics").headers["www-authenticate"] == "Bearer"
        for headers in ({}, {"Authorization": "Bearer a-secret"}, {"Authorization": "Basic a-secret-of-sixteen"}):
            for path in ("/metrics", "/redoc", "/users/1", "/nothing"):
                answer = client.get(path, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["name"] == "Unauthorized"
        assert client.get("/metrics", headers={"Authorization": "Bearer a-secret-of-sixteen"}).status_code == 200


def test_concurrent_requests_get_the_answers_of_single_ones(client, recommender):
    """Send requests from several clients at once, some of them invalid."""
    assert client.post("/events", json=events(*[(user, 100 + 3 * user, 5) for user in range(8)])).status_code == 200
    alone = [recommender.recommend([user], 4, 50)[0][0].tolist() for user in range(8)]

    def send(i):
        user = i % 10  # two of ten are unknown
        if i % 3 == 0:
            answer = client.post("/scores", json={"user": user, "candidates": [100, 103 + i % 2], "at": 50})
            return answer.status_code == (404 if user > 7 or i % 2 else 200)
        answer = client.get(f"/users/{user}/recommendations", params={"k": 4, "at": 50})
        if user > 7:
            return answer.json()["cold"]
        return [row["item"] for row in answer.json()["items"]] == alone[user]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(send, range(60)))


def test_a_round_with_errors_is_answered_in_one_pass(recommender, monkeypatch):
    """Answer requests with different lengths, times and errors in one pass; each gets the same answer as alone."""
    recommender.append(range(6), [100 + 3 * user for user in range(6)], [5] * 6)
    requests = [
        *(Recommend([str(user)], 2 + 5 * user, (None, 50)[user % 2], user % 3 > 0) for user in range(4)),
        Recommend(["4", "nobody", "5"], 7, 50, filter=Filter(deny=[100, 130])),
        Recommend(["nobody", "3"], 3, 4, cold="error"),
        Recommend(["1"], 3, filter=Filter(filters=["stock"])),
        *(Score(str(user), [103, 100 + 3 * user], (50, None)[user % 2]) for user in range(6)),
        Score("1", [101], None),
        Score("nobody", [100], None),
    ]
    passes, answer = [], recommender._engine.answer
    monkeypatch.setattr(
        recommender._engine, "answer", lambda checked, others=(): passes.append(len(checked)) or answer(checked, others)
    )
    worker = Worker(recommender, None)
    worker.answer(requests)
    assert passes == [12]
    for request in requests:
        alone = dataclasses.replace(request, done=Future())
        worker.answer([alone])
        if request.done.exception() is not None:
            assert str(request.done.exception()) == str(alone.done.exception())
            assert type(request.done.exception()) in (NoHistory, UnknownFilter, UnknownItem)
        elif isinstance(request, Score):
            np.testing.assert_allclose(request.done.result(), alone.done.result(), atol=1e-6)
        else:
            for each, expected in zip(request.done.result().users, alone.done.result().users, strict=True):
                if isinstance(expected, RequestError):
                    assert type(each) is type(expected) and type(each) in (NoHistory, TooEarly)
                else:
                    assert len(each.items) == request.k and each.items == expected.items and each.cold == expected.cold
    assert sum(request.done.exception() is not None for request in requests) == 3


def test_events_of_a_round_are_encoded_in_one_pass(recommender, monkeypatch):
    """The pass has the events of users with requests and of other users with pages."""
    users = [str(user) for user in range(4)]
    recommender.append(users, [100, 103, 106, 109], [5] * 4)
    kinds, run = [], recommender._engine._run
    monkeypatch.setattr(
        recommender._engine, "_run", lambda work: kinds.append((work.kind, len(work.entries))) or run(work)
    )
    events_of_all = Events(users, [112] * 4, [9] * 4, None)
    requests = [Recommend(["0", "1"], 3, 50), Score("1", [103], 50)]
    Worker(recommender, None).answer([events_of_all, *requests])
    assert kinds == [("write", 4), ("query", 3)] and events_of_all.done.result() == ["accepted"] * 4
    later = [dataclasses.replace(request, done=Future()) for request in requests]
    Worker(recommender, None).answer(later)
    lists, again = requests[0].done.result().users, later[0].done.result().users
    assert [one.items for one in lists] == [one.items for one in again]
    np.testing.assert_allclose(requests[1].done.result(), later[1].done.result(), atol=1e-6)


def test_events_are_acknowledged_before_they_are_encoded(recommender, monkeypatch):
    """Clients need not wait for the model."""
    request = Events(["new"], [103], [50], None)
    encode, acknowledged = recommender.encode, []

    def checked_encode(users):
        acknowledged.append(request.done.result(timeout=0))
        encode(users)

    monkeypatch.setattr(recommender, "encode", checked_encode)
    Worker(recommender, None).answer([request])
    assert acknowledged == [["accepted"]] and recommender.statistics["users_with_pages"] == 1


def test_health_answers_while_a_large_body_is_parsed(recommender):
    """Make the parsing of a large body wait until /health has answered."""
    parsing, answered = threading.Event(), threading.Event()

    def clock():
        parsing.set()
        assert answered.wait(600)
        return NOW

    with TestClient(create_app(recommender, None, clock=clock)) as client, ThreadPoolExecutor(1) as pool:
        large = pool.submit(client.post, "/events", json=events(*[(1, 100)] * 1000))
        assert parsing.wait(600) and client.get("/health").status_code == 200
        answered.set()
        assert large.result().json()["accepted"] == 1000


def test_requests_beyond_the_limit_are_refused_except_health(recommender):
    recommender.append([1], [100], [5])
    with TestClient(create_app(recommender, None, limits=Limits(waiting=2))) as client, ThreadPoolExecutor(3) as pool:
        with recommender._lock:  # the model is busy
            waiting = [pool.submit(client.get, "/users/1") for _ in range(3)]
            refused = next(as_completed(waiting)).result()
            assert refused.status_code == 503 and refused.json()["error"]["name"] == "Busy"
            assert refused.headers["retry-after"] == "1" and client.get("/health").status_code == 200
        assert sorted(one.result().status_code for one in waiting) == [200, 200, 503]


def test_a_full_or_stopping_service_refuses_requests(recommender):
    """Accepted requests are answered before the thread ends."""
    recommender.append([1], [100], [5])
    worker = Worker(recommender, None, most_waiting=3)
    worker.put(Recommend(["1"], 3, 9, True)).cancel()  # its client disconnected
    accepted = [worker.put(Recommend(["1"], 3, 9, True)) for _ in range(2)]
    for refused in (worker.check_room, lambda: worker.put(Recommend(["1"], 3, 9, True))):
        with pytest.raises(Exception, match="too many requests are waiting"):
            refused()
    worker.start()
    worker.stop()
    assert all(len(future.result(0).users[0].items) == 3 for future in accepted)
    for refused in (worker.check_room, lambda: worker.put(Recommend(["1"], 3, 9, True))):
        with pytest.raises(Exception, match="the service is stopping"):
            refused()


def test_the_log_is_replayed(recommender, small, tmp_path):
    path = tmp_path / "events.log"
    log = EventLog(path)
    with TestClient(create_app(recommender, log, clock=lambda: NOW)) as client:
        for i in range(6):
            assert client.post("/events", json=events((i % 3, 100 + 3 * i, 50 + i))).status_code == 200
        client.delete("/users/1")
        assert client.post("/events", json=events((1, 130, 60))).status_code == 200
    with pytest.raises(LogError, match="another process is using this log"):
        EventLog(path)
    log.close()
    with path.open("ab") as file:  # an incomplete line, as a killed process leaves it
        file.write(b'0123abcd {"users": ["0"], "it')
    for _ in range(2):
        other, log = serve(*small, lambda: NOW, cache_bytes=2**22), EventLog(path)
        assert replay(other, log) == {"taken": 5, "left_out": 0, "repeated": 0}
        assert log.stale == (2 if _ == 0 else 0)
        log.compact()
        log.close()
        for user in range(3):
            assert other.history(user).items.tolist() == recommender.history(user).items.tolist()
        actual, expected = (one.score(range(3), [item_ids()] * 3, 99) for one in (other, recommender))
        np.testing.assert_allclose(actual, expected, atol=1e-6)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1].replace(b'"users"', b'"Users"'), *lines[2:]]))
    log = EventLog(path)
    with pytest.raises(LogError, match="line 2 is damaged"):
        list(log.events())
    log.close()


def test_events_of_another_catalogue_are_counted(recommender, tmp_path):
    log = EventLog(tmp_path / "events.log")
    log.append([{"users": ["1", "1"], "items": [100, 101], "timestamps": [5, 6], "actions": None}])
    assert replay(recommender, log) == {"taken": 1, "left_out": 1, "repeated": 0}
    log.close()


def test_a_disk_that_is_full(recommender, tmp_path, monkeypatch):
    """Events that cannot be written to the log are not accepted."""
    import os

    log = EventLog(tmp_path / "events.log")
    with TestClient(create_app(recommender, log, clock=lambda: NOW)) as client:
        assert client.post("/events", json=events((1, 100, 5))).status_code == 200
        whole, write = (tmp_path / "events.log").read_bytes(), os.write

        def full(file, content):
            if len(content) < 20:
                raise OSError(28, "No space left on device")
            return write(file, content[:20])

        with monkeypatch.context() as patch:
            patch.setattr("serving.http.event_log.os.write", full)
            patch.setattr("serving.http.event_log.os.fsync", lambda file: full(file, b""))
            answer = client.post("/events", json=events((1, 103, 6)))
        assert answer.status_code == 507 and answer.json()["error"]["name"] == NotStored.__name__
        assert (tmp_path / "events.log").read_bytes() == whole and client.get("/users/1").json()["count"] == 1
        assert client.post("/events", json=events((1, 103, 6))).status_code == 200
    log.close()


def test_the_model_thread_ends_with_the_application(recommender):
    """Stop the service as SIGTERM does."""
    app, before = create_app(recommender, None, clock=lambda: NOW), set(threading.enumerate())
    with TestClient(app) as client:
        client.post("/events", json=events((1, 100, 5)))
        (model,) = [thread for thread in threading.enumerate() if thread.name == "model" and thread not in before]
        assert NUM_ITEMS > len(client.get("/users/1/recommendations").json()["items"]) == 10
    assert not model.is_alive()
