"""Test the replacement of the model of a running service: all events, checks, and no failed request."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from data.vocabulary import Vocabulary
from serving import Recommender, ServingError, ServingOptions
from serving.http.app import create_app
from serving.http.event_log import EventLog
from serving.http.replay import replay
from serving.http.requests import Events, Forget, PutList, Read
from serving.http.swap import ModelRefused, Models, Requirements
from serving.http.worker import Exchange, Worker
from tests.serving.plain import item_ids, make_config, make_model, serve

NOW = 1_000_000
NO_RUN = "expected the name of a run in"


def other_model(seed, ids=None, label="other", **changes):
    """Return a recommender with other weights and, if `ids` are given, with other items in another order."""
    config = make_config(**changes)
    ids = item_ids() if ids is None else np.asarray(ids)
    vocabulary = Vocabulary(ids, 6 if config.embeds_actions else None)
    options = ServingOptions(cache_bytes=2**22)
    torch.manual_seed(seed)
    model = make_model(config, seed)
    return Recommender(model, config, vocabulary, options=options, label=label, clock=lambda: NOW)


@pytest.fixture
def log(tmp_path):
    log = EventLog(tmp_path / "events.log")
    yield log
    log.close()


def write_run(folder, name, created, **result):
    """Write the files of a run's folder that are read before it is loaded."""
    (folder / name).mkdir(parents=True)
    (folder / name / "config.yaml").write_text("")
    (folder / name / "run.json").write_text(json.dumps({"run": name, "created": created}))
    (folder / name / "result.json").write_text(json.dumps({"finished": True} | result))


def served_runs(folder, loaded, **requirements):
    """Return the runs of a folder; `loaded` maps a run's name to the function that loads it."""

    def load(path):
        recommender = loaded[path.name]()
        recommender.label = path.name
        return recommender

    return Models(folder, load, Requirements(**requirements))


def answered(worker, *requests):
    worker.answer(list(requests))
    return [request.done.result(0) for request in requests]


def test_requests_that_arrive_while_a_model_is_loaded(log):
    """The new model gets the events, deletions and lists that arrive after the replay, in order."""
    old, new = other_model(0, label="old"), other_model(1, [106, 103, 1, *item_ids()[3:-1], 100], label="new")
    worker = Worker(old, log)
    answered(worker, Events(["ann", "bob", "eve"], [100, 103, 1], [1, 2, 3], None), PutList("stock", [100, 103]))
    reader = log.reader()
    assert replay(new, reader)["taken"] == 3
    answered(worker, Events(["ann", "bob"], ["109", "1"], [5, 6], None, ["id", None]), Forget("bob"))
    answered(worker, Events(["bob", "ann"], [106, 7], [7, 8], None), PutList("stock", [106]), PutList("more", [100]))
    worker.answer([Events(["ann"], [112], [9], None), Exchange(new, reader), read := Read("ann"), late := Read("bob")])
    assert worker.recommender is new and read.model == late.model == "new"
    assert read.done.result().items.tolist() == [100, 109, 112] and late.done.result().items.tolist() == [106]
    assert new.history("eve").items.tolist() == [1] and new.filters.sizes == {"stock": 1, "more": 1}
    assert answered(worker, Events(["ann"], [109], [5], None, ["id"])) == [["repeated"]]
    fresh, again = other_model(1, new.items.ids), EventLog.reader(log)
    with again:
        replay(fresh, again)
    users = ["ann", "bob", "eve"]
    scores = [one.score(users, [new.items.ids] * 3, NOW) for one in (new, fresh)]
    np.testing.assert_allclose(*scores, atol=2e-6)
    reader.close()


def not_finite():
    recommender = other_model(1)
    with torch.no_grad():
        recommender.model.layers[0].uvqk.fill_(float("nan"))
    return recommender


def fails():
    raise ServingError("best/model.safetensors: damaged")


def test_a_run_that_fails_a_check_is_refused(log, tmp_path):
    runs = tmp_path / "runs"
    loaded = {
        "day1": lambda: other_model(0),
        "damaged": fails,
        "fewer-items": lambda: other_model(1, [*item_ids()[:-1], 1]),
        "actions": lambda: other_model(1, action_embedding=True),
        "not-finite": not_finite,
        "worse": lambda: other_model(1),
        "day8": lambda: other_model(2),
    }
    for day, name in enumerate(loaded):
        value = {"worse": 0.1, "damaged": 0.9}.get(name, 0.2)
        write_run(runs, name, f"2026-01-0{day + 1}", filter_seen="none", model={"none": {"NDCG@10": value}})
    models = served_runs(runs, loaded, floor={"NDCG@10": 0.15})
    with TestClient(create_app(other_model(0, label="small"), log, models=models, clock=lambda: NOW)) as client:
        events = [{"user": user, "item": 100, "timestamp": 5} for user in range(5)]
        assert client.post("/events", json={"events": events}).status_code == 200
        before = client.get("/users/1/recommendations").json()
        for name, says in (
            ("nothing", NO_RUN), ("../runs/day8", NO_RUN), ("", ""), ("day8/", NO_RUN), ("..", NO_RUN),
            ("damaged", "best/model.safetensors: damaged"),
            ("fewer-items", "does not know 1 of the 40 items of small: 217"),
            ("actions", "actions: cannot replace small: actions reads actions, small does not"),
            ("not-finite", "scores for stored users are not finite"),
            ("worse", "worse: NDCG@10 is 0.1, expected at least 0.15"),
        ):  # fmt: skip
            answer = client.post("/model", json={"run": name})
            assert answer.status_code == (409 if name else 422) and says in answer.json()["error"]["message"], name
            assert client.get("/users/1/recommendations").json() == before
        assert client.post("/model", json={"run": "day8"}).json() == {"model": "day8", "previous": "small"}
        state = client.get("/model").json()
        assert state["model"] == client.get("/health").json()["model"] == client.get("/x").headers["x-model"] == "day8"
        assert state["runs"][:2] == ["day8", "worse"] and set(state["refused"]) >= {"damaged", "worse", "not-finite"}
        after = client.get("/users/1/recommendations").json()
        assert after["model"] == "day8" and after["items"] != before["items"]
        assert 'hstu_sparse_lists_total{model="day8",user="known"} 1.0' in client.get("/metrics").text
        assert client.post("/model", json={"run": "day1"}).json() == {"model": "day1", "previous": "day8"}
        assert client.get("/users/1/recommendations").json()["items"] == before["items"]
    models = served_runs(runs, loaded | {"day8": fails}, floor={"NDCG@10": 0.15})
    assert models.first().label == "not-finite"  # without stored users this is not detected
    with pytest.raises(ServingError, match="no finished run in it can be served; "):
        served_runs(runs, loaded, floor={"NDCG@10": 1.0}).first()
    with pytest.raises(ModelRefused, match=NO_RUN):
        models.path("a\0")


def test_a_service_without_a_log_refuses_another_model(tmp_path):
    """The other model could not get the users' events, so the current one stays."""
    write_run(tmp_path, "day8", "2026-01-08")
    models = served_runs(tmp_path, {"day8": lambda: other_model(2)})
    with TestClient(create_app(other_model(0, label="small"), None, models=models)) as client:
        answer = client.post("/model", json={"run": "day8"})
        assert answer.status_code == 409 and "neither a log nor a store" in answer.json()["error"]["message"]
        assert client.get("/health").json()["model"] == "small"


def test_no_request_fails_while_models_change(log, tmp_path, caplog):
    """Clients post and read while --watch replaces the model several times; the last model has all events."""
    loaded = {f"day{day}": lambda day=day: other_model(day) for day in range(3)}
    write_run(tmp_path / "runs", "day0", "2026-01-01")
    models = served_runs(tmp_path / "runs", loaded)
    app = create_app(models.first(), log, models=models, watch=0.01, clock=lambda: NOW)
    stop, counts, seen = threading.Event(), [0] * 3, set()
    caplog.set_level("INFO", "hstu_sparse.serve")
    with TestClient(app) as client, ThreadPoolExecutor(3) as pool:

        def write(user):
            while not stop.is_set():
                event = {"user": user, "item": 100, "timestamp": counts[user], "id": counts[user]}
                assert client.post("/events", json={"events": [event]}).json()["events"] == ["accepted"]
                counts[user] += 1
                answer = client.get(f"/users/{user}/recommendations")
                assert answer.status_code == 200 and answer.headers["x-model"] == answer.json()["model"]
                seen.add(answer.json()["model"])

        writers = [pool.submit(write, user) for user in range(3)]
        for day in range(3):
            if day > 0:
                write_run(tmp_path / "runs", f"day{day}", f"2026-01-0{day + 1}")
            ends = time.monotonic() + 300
            done = lambda day=day: f"day{day}" in seen and min(counts) > day
            while not done() and time.monotonic() < ends and not any(one.done() for one in writers):
                time.sleep(0.02)
        stop.set()
        for writer in writers:
            writer.result()
        assert seen == {"day0", "day1", "day2"} and min(counts) > 2
        assert [client.get(f"/users/{user}").json()["count"] for user in range(3)] == counts
    assert ("INFO", "the model day2 replaced day1") in [(line.levelname, line.getMessage()) for line in caplog.records]


def test_events_in_log_and_data_count_once(log):
    """A log was exported to the data of a later run: an event in both is added once."""
    from tests.serving.http.test_event_log import run_data

    records = [("ann", 100, 1), ("ann", 103, 2), ("ann", 103, 3), ("new", 100, 1), ("eve", 112, 1), ("a/b", 106, 1)]
    users, items, times = map(list, zip(*records))
    log.append([{"users": users, "items": items, "timestamps": times, "actions": None}, {"forget": "eve"}])
    log.append([{"users": ["eve"], "items": [112], "timestamps": [1], "actions": None}])
    served = serve(make_config(), make_model(make_config()), lambda: NOW, cache_bytes=2**22)
    served.dataset = run_data()
    served.add_dataset(served.dataset)
    assert replay(served, log) == {"taken": 3, "left_out": 0, "repeated": 3}
    assert [served.history(user).count for user in ("ann", "a/b", "new", "eve")] == [3, 2, 1, 1]
