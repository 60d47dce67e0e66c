"""Test features of users and events over HTTP: answers, the log, restarts, deletion, errors, OpenAPI, Redis."""

import json
from urllib.parse import quote

import numpy as np
import pytest
from fastapi.testclient import TestClient

from serving.contexts import packed
from serving.http.app import create_app
from serving.http.event_log import EventLog
from serving.http.redis_store import SharedUsers
from serving.http.replay import replay
from serving.http.requests import AddUsers, Events, Score
from serving.http.worker import Exchange, Worker
from tests.serving.http.test_redis_store import Memory
from tests.serving.test_contexts import AT, CANDIDATES, EVENTS, Reference, served

ROWS = [[1, -1], [1, 3]]  # of {"country": "de", "tags": ["a", "c"]}


def body(user, events):
    return {
        "events": [
            {
                "user": user, "item": item, "timestamp": time, "action": action, "id": f"{time}",
                "features": {name: value for name, value in (("device", device), ("watched", watched)) if value},
            }
            for item, time, action, device, watched in events
        ]
    }  # fmt: skip


def scores(client, user, **more):
    answer = client.post("/scores", json={"user": user, "candidates": CANDIDATES.tolist(), "at": AT, **more})
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["scores"])


def store(client, *users):
    answer = client.post("/users", json={"users": [{"user": user, "features": features} for user, features in users]})
    assert answer.status_code == 200 and answer.json() == {"model": "small", "users": len(users)}


@pytest.mark.parametrize("tokens", [False, True])
def test_a_service_and_its_restarts(tokens, tmp_path):
    path = tmp_path / "events.log"

    def check(client, reference, rows, device=None):
        more = {} if device is None else {"features": {"device": device}}
        expected = reference.scores(EVENTS, rows, CANDIDATES, AT, device)
        np.testing.assert_allclose(scores(client, "u", **more), expected, atol=1e-6)

    for start in range(3):
        recommender, _ = served("ranking", tokens=tokens)
        reference = Reference(recommender.config, recommender.model)
        log = EventLog(path)
        if start == 2:
            log.roll()  # the new file has the features, too
        replay(recommender, log)
        if log.replaced:
            log.compact()
        with TestClient(create_app(recommender, log, clock=lambda: AT)) as client:
            if start == 0:
                store(client, ("u", {"country": "fr"}), ("w", {"country": "de"}))
                assert client.post("/events", json=body("u", EVENTS)).json()["accepted"] == 4
                check(client, reference, [[2], [-1]])
                store(client, ("u", {"country": "de", "tags": ["a", "c"]}))
            check(client, reference, ROWS)
            check(client, reference, ROWS, "tv")
            assert client.get("/users/u").json()["actions"] == [action for _, _, action, *_ in EVENTS]
            if start == 2:
                assert client.delete("/users/u").json() == client.delete("/users/w").json() == {"forgotten": True}
                assert client.post("/events", json=body("u", EVENTS)).json()["accepted"] == 4
                check(client, reference, [[-1], [-1]])
        log.close()
    recommender, _ = served("ranking", tokens=tokens)
    log = EventLog(path)
    replay(recommender, log)
    assert log.replaced
    log.compact()
    log.close()
    assert recommender.contexts.user_number("u") == 0 and "country" not in path.read_text()
    with TestClient(create_app(recommender, None, clock=lambda: AT)) as client:
        check(client, reference, [[-1], [-1]])


def test_another_model_has_the_features(tmp_path):
    """A new model gets users' features that are tokens, also those that arrive while it is loaded."""
    old, reference = served("retrieval", tokens=True)
    new, new_reference = served("retrieval", tokens=True, seed=1)
    log = EventLog(tmp_path / "events.log")
    worker = Worker(old, log)
    events = [packed(None, {"device": device, "watched": watched}) for *_, device, watched in EVENTS]
    items, times, *_ = zip(*EVENTS)

    def check(reference, rows):
        score = Score("u", CANDIDATES, AT)
        worker.answer([score])
        np.testing.assert_allclose(score.done.result(0), reference.scores(EVENTS, rows, CANDIDATES, AT), atol=1e-6)

    worker.answer([Events(["u"] * 4, [*items], [*times], events), AddUsers(["u"], [{"country": "fr"}])])
    check(reference, [[2], [-1]])
    reader = log.reader()
    replay(new, reader)
    new.encode(["u"])
    worker.answer([AddUsers(["u"], [{"country": "de", "tags": ["a", "c"]}])])
    worker.answer([Exchange(new, reader)])
    assert worker.recommender is new
    check(new_reference, ROWS)
    log.close()


@pytest.mark.parametrize(
    ("route", "sent", "message"),
    [
        (
            "/users",
            {"users": [{"user": "u", "features": {"contry": "de"}}]},
            "features: contry is not a feature of users",
        ),
        ("/users", {"users": [{"user": "u", "features": {"tags": "a"}}]}, "features: tags of users.0: expected a list"),
        ("/users", {"users": [{"user": "u"}]}, "users.0.features: missing"),
        ("/users", {"users": []}, "users"),
        (
            "/scores",
            {"user": "u", "candidates": [100], "features": {"watched": 3}},
            "features: watched is not a feature of events with known=before",
        ),
        ("/scores", {"user": "u", "candidates": [100], "features": {"device": 1.5}}, "features: device of events.0"),
        ("/events", body("u", [(100, 5, 4, None, "x")]), "features: watched of events.0: expected a number, got 'x'"),
        (
            "/events",
            body("u", [(100, 5, None, "tv", 3)]),
            "actions: the run reads actions, expected one for each event",
        ),
    ],
)
def test_errors_name_the_field(route, sent, message, service):
    answer = service.post(route, json=sent)
    assert answer.status_code == 422 and message in answer.json()["error"]["message"], answer.text


@pytest.fixture(scope="module")
def service():
    recommender, _ = served("ranking")
    with TestClient(create_app(recommender, None, clock=lambda: AT)) as client:
        assert client.post("/events", json=body("u", EVENTS)).status_code == 200
        yield client


def test_the_document_has_the_features(service):
    paths = service.get("/openapi.json").json()["paths"]

    def schema(route):
        return paths[route]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]

    user_features = schema("/users")["users"]["items"]["properties"]["features"]
    assert list(user_features["properties"]) == ["country", "tags"] and not user_features["additionalProperties"]
    assert list(schema("/events")["events"]["items"]["properties"]["features"]["properties"]) == ["device", "watched"]
    assert list(schema("/scores")["features"]["properties"]) == ["device"]


def test_services_share_features_in_redis():
    memory = Memory()
    clients = []
    for _ in range(2):
        recommender, _ = served("targets")
        shared = SharedUsers(memory, recommender)
        clients.append(TestClient(create_app(recommender, None, store=shared, clock=lambda: AT)).__enter__())
    one, other = clients
    reference = Reference(recommender.config, recommender.model)
    assert one.post("/events", json=body("u", EVENTS)).json()["accepted"] == 4
    store(one, ("u", {"country": "de", "tags": ["a", "c"]}))
    np.testing.assert_allclose(scores(other, "u"), reference.scores(EVENTS, ROWS, CANDIDATES, AT), atol=1e-6)
    store(other, ("u", {"country": "fr"}))
    np.testing.assert_allclose(scores(one, "u"), reference.scores(EVENTS, [[2], [-1]], CANDIDATES, AT), atol=1e-6)
    assert other.delete(f"/users/{quote('u')}").json() == {"forgotten": True}
    assert not any(b"fr" in json.dumps(str(value)).encode() for value in memory.values.values())
    assert one.post("/events", json=body("u", EVENTS)).json()["accepted"] == 4
    np.testing.assert_allclose(scores(one, "u"), reference.scores(EVENTS, [[-1], [-1]], CANDIDATES, AT), atol=1e-6)
    for client in clients:
        client.__exit__(None, None, None)


def test_features_of_unknown_items_are_checked_too(service):
    sent = body("u", [EVENTS[0], (99, 5, 4, None, "x")])
    answer = service.post("/events", json=sent)
    assert "features: watched of events.1: expected a number, got 'x'" in answer.json()["error"]["message"]
