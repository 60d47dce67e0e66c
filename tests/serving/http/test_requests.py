"""Test filters, requests for many users, repeated events and unknown items over HTTP, also after a restart."""

import json

import pytest
from fastapi.testclient import TestClient

from serving.errors import NoHistory
from serving.http.app import create_app
from serving.http.event_log import EventLog
from serving.http.replay import replay
from serving.http.requests import ACCEPTED, REPEATED, UNKNOWN_ITEM, Events
from serving.http.worker import Worker
from tests.serving.plain import item_ids, make_config, make_model, serve
from tests.serving.test_filters import AT, PlainFilter, recommender


@pytest.fixture(scope="module")
def small():
    config = make_config()
    return config, make_model(config)


def event(user, item, timestamp=5, **more):
    return {"user": user, "item": item, "timestamp": timestamp, **more}


def test_filters_over_http(tmp_path):
    """Compare filters in query and body with a plain filter; a named list is replaced as a whole."""
    served, log = recommender(), EventLog(tmp_path / "log")
    plain = PlainFilter(served)
    query = [("k", "5"), *[("where", f"brand:{brand}") for brand in "abcd"], ("where", "tags:red")]
    query += [("where", "tags:new"), ("deny", "100"), ("deny", "1"), ("at_most", "brand:2"), ("filters", "stock")]
    body = {"k": 5, "where": {"brand": list("abcd"), "tags": ["red", "new"]}, "deny": [100, 1], "at_most": {"brand": 2}}
    body |= {"filters": ["stock"], "users": [5, "0", "nobody", 3]}
    with TestClient(create_app(served, log, clock=lambda: AT)) as client:
        assert client.get("/users/5/recommendations", params=query).json()["error"]["name"] == "UnknownFilter"
        for stock in (item_ids()[::2].tolist(), item_ids()[5:].tolist()):
            assert client.put("/filters/stock", json={"items": [*stock, 1]}).json() == {
                "items": len(stock), "unknown": 1
            }  # fmt: skip
            plain.named["stock"] = set(stock)
            request = {key: body[key] for key in ("deny", "where", "at_most", "filters")}
            answer = client.get("/users/5/recommendations", params=query).json()
            expected = [item for item, _ in plain.top(5, 5, **request)]
            assert [one["item"] for one in answer["items"]] == expected and len(expected) in (3, 5)
            assert answer["unknown"] == {"deny": 1, "where": 0} and not answer["cold"]
            lists = client.post("/recommendations", json=body).json()["lists"]
            assert [each["user"] for each in lists] == [5, "0", "nobody", 3]
            assert [each["cold"] for each in lists] == [False, False, True, False]
            assert [one["item"] for one in lists[0]["items"]] == expected
            assert {one["item"] for one in lists[2]["items"]} <= set(stock)
        errors = client.post("/recommendations", json={"users": ["nobody", 1], "cold": "error"}).json()["lists"]
        assert errors[0] == {
            "user": "nobody", "items": None, "cold": False,
            "error": {"name": NoHistory.__name__, "message": "user nobody has no event"},
        }  # fmt: skip
        assert len(errors[1]["items"]) == 10
        client.put("/filters/gone", json={"items": []})
        assert client.delete("/filters/gone").json() == {"dropped": True}
    log.close()
    for _ in range(2):
        log, later = EventLog(tmp_path / "log"), recommender()
        replay(later, log)
        assert later.filters.sizes == {"stock": len(stock)}
        log.compact()
        assert log.replaced == 0
        log.close()
    assert sum(line[9:].startswith(b'{"list":') for line in (tmp_path / "log").read_bytes().splitlines()) == 2


def test_an_event_that_is_sent_again_changes_nothing(small, tmp_path):
    """Ids are known within a request, in later ones and after a restart, but not after the user was deleted."""
    path = tmp_path / "log"
    for start in range(2):
        served, log = serve(*small, lambda: AT, cache_bytes=2**22), EventLog(path)
        replay(served, log)
        with TestClient(create_app(served, log)) as client:
            batch = {"events": [event("ann", 100, id="a"), event("ann", 103, id=7), event("bob", 103, id="a")]}
            batch["events"] += [event("ann", 106), event("ann", 109, id="7")]
            expected = [REPEATED] * 3 + [ACCEPTED, REPEATED] if start else [ACCEPTED] * 4 + [REPEATED]
            answer = client.post("/events", json=batch).json()
            assert answer["events"] == expected and answer["repeated"] == (4 if start else 1)
            assert client.get("/users/ann").json()["count"] == 3
            assert client.post("/events", json=batch).json()["events"] == [REPEATED] * 3 + [ACCEPTED, REPEATED]
            client.delete("/users/bob")
            assert client.post("/events", json=batch).json()["events"][:3] == [REPEATED, REPEATED, ACCEPTED]
            client.delete("/users/ann")
            assert client.post("/events", json={"events": [event("ann", 100, id="b")]}).json()["accepted"] == 1
            assert client.post("/events", json={"events": [event("ann", 100, id="a")]}).json()["accepted"] == 1
            client.delete("/users/ann")
            client.post("/events", json={"events": [event("ann", 100, id="a"), event("ann", 103, id="7")]})
        log.close()


def test_events_of_a_round_with_the_same_id(small):
    """The first of two requests in a round adds the event, unless there is no room for it."""
    served = serve(*small, lambda: AT, cache_bytes=2**22, most_users=1)
    first, second = Events(["a"], [100], [5], None, ["x"]), Events(["a"], [100], [5], None, ["x"])
    full = Events(["b", "a"], [100, 103], [5, 5], None, ["y", "y"])
    third = Events(["a"], [103], [5], None, ["y"])
    worker = Worker(served, None)
    worker.answer([first, second, full, third])
    assert first.done.result() == third.done.result() == [ACCEPTED] and second.done.result() == [REPEATED]
    assert full.done.exception() is not None and served.history("a").count == 2


def test_events_of_unknown_items_are_stored_for_later_models(small, tmp_path):
    """The other events of the request are accepted; a run that knows the items adds all events."""
    served, log = serve(*small, lambda: AT, cache_bytes=2**22), EventLog(tmp_path / "log")
    batch = {"events": [event("ann", 100), event("ann", 1), event("new", "x"), event("bob", 103)]}
    with TestClient(create_app(served, log)) as client:
        answer = client.post("/events", json=batch).json()
        assert answer["events"] == [ACCEPTED, UNKNOWN_ITEM, UNKNOWN_ITEM, ACCEPTED] and answer["unknown"] == 2
        assert client.get("/users/new").status_code == 404 and client.get("/users/ann").json()["count"] == 1
        assert 'hstu_sparse_events_total{model="small",state="unknown item"} 2.0' in client.get("/metrics").text
        alone = {"events": [event("eve", 1, id="only")]}
        assert [client.post("/events", json=alone).json()["events"] for _ in range(2)] == [[UNKNOWN_ITEM], [REPEATED]]
        assert client.delete("/users/eve").json() == {"forgotten": True}
    log.close()
    records = [json.loads(line[9:]) for line in (tmp_path / "log").read_bytes().splitlines()]
    assert [record.get("items") for record in records] == [["100", "1", "x", "103"], [1], None]
    log = EventLog(tmp_path / "log")
    assert replay(serve(*small, cache_bytes=2**22), log) == {"taken": 2, "left_out": 2, "repeated": 0}
    log.close()
