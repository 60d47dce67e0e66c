"""Test posted items: they are recommended as if the run's catalogue had contained them."""

import csv
import json

import numpy as np
import pytest

import eval as evaluation
import train
from serving import InvalidRequest, Recommender
from serving.http.event_log import EventLog
from serving.http.redis_store import SharedUsers
from serving.http.replay import catch_up, replay
from serving.http.requests import AddItems, Events, Forget, PutList, Recommend
from serving.http.worker import Exchange, Worker
from tests.programs.test_vectors import GROUPS, WIDTH, write_events
from tests.serving.http.test_redis_store import Memory
from tests.serving.test_serve import serving
from tests.training.test_changes import refuses

pl = pytest.importorskip("polars")  # raw files cannot be read without polars

CONFIG = """
name: t
seed: 1
device: cpu
threads: 1
run_dir: PLACE/runs
data:
  format: csv
  path: PLACE/events.csv
  protocol: all
  cache_dir: PLACE/cache
  features:
    items:
      format: parquet
      path: PLACE/CATALOGUE.parquet
      columns: {brand: category, tags: {kind: list, min_count: 1}, price: number, title: vector}
      unknown: add
model: {block: hstu, max_seq_len: 12, embedding_dim: 16, num_layers: 1, attention: {kind: dense}, id_dropout: 0.3}
loss: {kind: cross_entropy}
train: {epochs: 6, batch_size: 16, lr: 1e-2, checkpoint_seconds: 1000}
"""
NEW = [100, 101, 102, 103]  # item 100 + g is similar to the items of group g
EVENTS = [(user, item, time) for user in range(4) for time, item in enumerate((user, 4 + user, 8 + user))]
K = 44  # all items of the larger catalogue


def frame_of(ids):
    rng = np.random.default_rng(0)
    noise = {item: rng.normal(size=WIDTH) * 0.1 for item in [*range(40), *NEW]}
    return pl.DataFrame(
        {
            "item": ids,
            "brand": [f"b{item % GROUPS}" if item not in (5, 101) else None for item in ids],
            "tags": [["all", f"t{item % GROUPS}"] if item % 3 else ["nowhere"] for item in ids],
            "price": [float(item % GROUPS * 10 + item % 3) for item in ids],
            "title": [(np.eye(WIDTH)[item % GROUPS] + noise[item]).tolist() for item in ids],
        }
    )


def posted(ids=NEW):
    return [{"item": row.pop("item"), "features": row} for row in frame_of(ids).to_dicts()]


def columns(ids=NEW):
    return frame_of(ids).drop("item").to_dict(as_series=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two runs of the same events: `small`, and `large`, whose catalogue has the new items, too, without an event."""
    place = tmp_path_factory.mktemp("new-items")
    write_events(place / "events.csv", range(48), 0)
    for name, ids in (("small", [*range(40)]), ("large", [*range(40), *NEW])):
        frame_of(ids).write_parquet(place / f"{name}.parquet")
        (place / f"{name}.yaml").write_text(CONFIG.replace("PLACE", str(place)).replace("CATALOGUE", name))
        assert train.main([str(place / f"{name}.yaml"), "--run", str(place / name)]) == 0
    frame_of(NEW).write_parquet(place / "new.parquet")
    return place


def loaded(place, name, events=EVENTS):
    recommender = Recommender.load(place / name, cache_bytes=2**22)
    recommender.append(*map(list, zip(*events)))
    return recommender


def same_lists(actual, expected):
    """Compare (items, scores) up to rounding, which may swap two items."""
    for items, scores, expected_items, expected_scores in zip(*actual, *expected):
        np.testing.assert_allclose(scores, expected_scores, atol=1e-6)
        of = dict(zip(expected_items.tolist(), expected_scores.tolist()))
        np.testing.assert_allclose(scores, [of[item] for item in items.tolist()], atol=1e-6)


def test_a_posted_item_is_recommended_like_others(place, tmp_path):
    """The item is in the next answer with the right score, also after the service was killed and restarted."""
    large = loaded(place, "large")
    expected = large.recommend([0, 1, 2, 3], K, 1000, exclude_seen=False)
    body = {"events": [dict(zip(("user", "item", "timestamp"), event)) for event in EVENTS]}

    def lists(client):
        query = {"k": K, "at": 1000, "exclude_seen": False}
        answers = [client.get(f"/users/{user}/recommendations", params=query).json()["items"] for user in range(4)]
        return [np.array([[row[key] for row in answer] for answer in answers]) for key in ("item", "score")]

    with serving(place / "small", log=tmp_path / "events.log") as (_, client):
        assert client.post("/events", json=body).json()["accepted"] == len(EVENTS)
        assert not set(NEW) & set(lists(client)[0].ravel().tolist())
        answer = client.post("/items", json={"items": posted()})
        assert answer.status_code == 200 and answer.json()["items"] == ["added"] * 4
        items, scores = lists(client)
        same_lists((items, scores), expected)
        for user in range(4):  # it is similar to the items of its group's users
            assert NEW[user] in items[user][:14].tolist()
        # Events may have the item, and change later answers like those of other items.
        event = {"user": 0, "item": 100, "timestamp": 900}
        assert client.post("/events", json={"events": [event]}).json()["events"] == ["accepted"]
        large.append([0], [100], [900])
        expected = large.recommend([0, 1, 2, 3], K, 1000, exclude_seen=False)
        same_lists(lists(client), expected)
        assert client.post("/items", json={"items": posted([100])}).json()["items"] == ["known"]
        document = client.get("/openapi.json").json()["paths"]["/items"]["post"]["requestBody"]["content"]
        item_schema = document["application/json"]["schema"]["properties"]["items"]["items"]["properties"]
        assert set(item_schema["features"]["properties"]) == {"brand", "tags", "price", "title"}
        assert item_schema["features"]["properties"]["title"]["maxItems"] == WIDTH
    with serving(place / "small", log=tmp_path / "events.log") as (_, client):  # the first was killed
        same_lists(lists(client), expected)
        recommended = client.post("/scores", json={"user": 2, "candidates": [102, 2], "at": 1000}).json()["scores"]
        np.testing.assert_allclose(recommended, large.score([2], [[102, 2]], 1000)[0], atol=1e-6)


def test_items_of_a_file(place, tmp_path, capsys):
    """The lists of `eval.py --recommend --items` are those of the run whose catalogue has the items."""
    rows = {}
    for name, more in (("small", ["--items", place / "new.parquet"]), ("large", [])):
        out = tmp_path / f"{name}.csv"
        options = [place / name, "--recommend", out, "--top-k", K, "--exclude-seen", "false", "--at", 10**6, *more]
        assert evaluation.main([str(option) for option in options]) == 0
        with out.open() as file:
            rows[name] = {(row["user"], row["item"]): float(row["score"]) for row in csv.DictReader(file)}
    assert rows["small"].keys() == rows["large"].keys()
    assert max(abs(score - rows["large"][key]) for key, score in rows["small"].items()) < 1e-6
    (tmp_path / "history.csv").write_text("user,item,timestamp\nann,100,1\nann,4,2\n")
    history = ["--history", tmp_path / "history.csv", "--items", place / "new.parquet", "--where", "brand=b2"]
    options = [place / "small", "--recommend", tmp_path / "next.csv", "--top-k", 12, *history]
    assert evaluation.main([str(option) for option in options]) == 0
    assert "102" in (tmp_path / "next.csv").read_text() and "ann" in (tmp_path / "next.csv").read_text()
    frame_of([1, 2]).write_parquet(tmp_path / "old.parquet")
    arguments = [place / "small", "--recommend", tmp_path / "no.csv", "--items", tmp_path / "old.parquet"]
    assert "expected new items, but the run knows all 2 of them" in refuses(
        tmp_path, capsys, evaluation.main, *arguments
    )


def test_filters_lists_and_popularity_have_new_items(place):
    recommender, large = loaded(place, "small"), loaded(place, "large")
    recommender.filters.put("stock", [0, 101, 999])
    assert recommender.filters.sizes == {"stock": 1}
    assert recommender.add_items(NEW, columns()) == 4 and recommender.add_items(NEW, columns()) == 0
    large.filters.put("stock", [0, 101, 999])
    assert recommender.filters.sizes == {"stock": 2}
    for options in ({"where": {"brand": ["b2"]}}, {"at_most": {"brand": 1}}, {"filters": ["stock"]}, {"allow": NEW}):
        lists = [one.recommend([0, 3], 9, 1000, **options) for one in (recommender, large)]
        items, scores = lists[0]
        assert items.tolist() == lists[1][0].tolist()
        np.testing.assert_allclose(scores[np.isfinite(scores)], lists[1][1][np.isfinite(scores)], atol=1e-6)
    recommender.append([9, 9], [103, 103], [5, 6])
    assert recommender.popular(1)[0].tolist() == [103]
    assert recommender.recommend(["nobody"], 1, cold="popular")[0].tolist() == [[103]]
    recommender.save(place / "store")
    again = loaded(place, "small", EVENTS[:1])
    with pytest.raises(Exception, match="another"):
        again.restore(place / "store")
    again.add_items(NEW, columns())
    again.restore(place / "store")
    assert again.history(9).items.tolist() == [103, 103]


BAD = {
    "no such feature": ([1000], {"colour": ["red"]}, "colour is not a feature of the run .known: brand, tags, p"),
    "a short column": ([1000, 1001], {"brand": ["a"]}, "brand: expected a value for each of 2 items, got 1"),
    "text for a number": ([1000], {"price": ["9"]}, "price of items.0: expected a number, got '9'"),
    "not finite": ([1000], {"price": [float("nan")]}, "price of items.0: expected a number, got nan"),
    "a number for text": ([1000], {"brand": [1.5]}, "brand of items.0: expected text or an integer, got 1.5"),
    "text for a list": ([1000], {"tags": ["all"]}, "tags of items.0: expected a list, got 'all'"),
    "a vector of another size": ([1000], {"title": [[1.0, 2.0]]}, f"title of items.0: expected {WIDTH} numbers"),
    "a vector that is not finite": ([1000], {"title": [[np.inf] * WIDTH]}, f"expected {WIDTH} numbers"),
    "nothing": ([1000], {"brand": [None]}, "1000 has no feature of the run, expected at least one of brand, tags, p"),
    "zeros": ([1000], {"title": [[0.0] * WIDTH]}, "1000 has no feature of the run"),
    "an id of another type": (["x"], {"brand": ["b1"]}, "items: expected whole numbers like the run's ids, got"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_changes_nothing(place, refusing, name):
    items, features, message = BAD[name]
    with pytest.raises(InvalidRequest, match=message):
        refusing.add_items(items, features)
    assert len(refusing.items) == 40 and refusing.model.embedding.added is None


@pytest.fixture(scope="module")
def refusing(place):
    return Recommender.load(place / "small", cache_bytes=2**22)


def answered(worker, *requests):
    worker.answer(list(requests))
    return [request.done.result(0) for request in requests]


def test_another_model_gets_the_posted_items(place, tmp_path):
    """A model without these items reads them from the log; a model with them keeps its own; later records follow."""
    log = EventLog(tmp_path / "events.log")
    worker = Worker(loaded(place, "small", EVENTS[:1]), log)
    adding = AddItems([100, 101], {name: values[:2] for name, values in columns().items()})
    assert answered(worker, adding) == [["added", "added"]]
    assert answered(worker, AddItems([101, 102], {name: values[1:3] for name, values in columns().items()})) == [
        ["known", "added"]
    ]
    answered(worker, Events(["ann"], [100], [5], None), PutList("stock", [101]))
    for name in ("small", "large"):
        new, reader = Recommender.load(place / name, cache_bytes=2**22), log.reader()
        taken = 1 if name == "small" else 2
        assert replay(new, reader) == {"taken": taken, "left_out": 0, "repeated": 0}
        assert new.history("ann").items.tolist() == [100, 103][:taken] and new.filters.sizes == {"stock": 1}
        if name == "small":
            answered(worker, AddItems([103], {key: values[3:] for key, values in columns().items()}))
            answered(worker, Events(["ann"], [103], [6], None))
        request = Recommend(["ann"], 3, filter=filter_of([103]), exclude_seen=False)
        worker.answer([Exchange(new, reader), request])
        (answer,) = request.done.result().users
        assert answer.items == [103] and len(new.items) == 44
    # After another start: a rewritten file keeps the items.
    answered(worker, Forget("ann"))
    size = log.size
    log.close()
    log = EventLog(tmp_path / "events.log")
    replay(Recommender.load(place / "small", cache_bytes=2**22), log)
    log.compact()
    assert log.size < size
    log.roll()  # the new file has the items, too
    again = Recommender.load(place / "small", cache_bytes=2**22)
    with log.reader() as reader:
        replay(again, reader)
        assert again.items.ids.tolist() == [*range(40), *NEW]
        catch_up(again, reader, log.size)
    log.close()


def test_services_on_one_store_share_new_items(place):
    client = Memory()

    def service():
        recommender = Recommender.load(place / "small", cache_bytes=2**22)
        return Worker(recommender, None, store=SharedUsers(client, recommender))

    first, second = service(), service()
    adding = AddItems(NEW[:3], {name: values[:3] for name, values in columns().items()})
    assert answered(first, adding) == [["added"] * 3]
    assert answered(second, Events(["ann"], [100], [5], None)) == [
        ["accepted"]
    ]  # an item that this service has not read yet
    assert answered(second, AddItems(NEW[1:], {name: values[1:] for name, values in columns().items()})) == [
        ["known", "known", "added"]
    ]
    (lists,) = answered(first, Recommend(["ann"], K, exclude_seen=False))
    assert set(NEW) <= set(lists.users[0].items)
    (begun,) = answered(service(), Recommend(["ann"], K, exclude_seen=False))
    assert begun.users[0].items == lists.users[0].items
    with pytest.raises(InvalidRequest, match="colour is not a feature"):
        answered(first, AddItems([500], {"colour": ["red"]}))
    assert len(client.values["hstu:items"]) == 2


def filter_of(allow):
    from serving.filters import Filter

    return Filter(allow=allow)


def test_a_run_without_features_of_items(tmp_path, capsys):
    write_events(tmp_path / "events.csv", range(8), 0)
    text = CONFIG.replace("PLACE", str(tmp_path)).replace(", id_dropout: 0.3", "").replace("epochs: 6", "epochs: 1")
    start, end = text.index("  features:"), text.index("model:")
    (tmp_path / "run.yaml").write_text(text[:start] + text[end:])
    assert train.main([str(tmp_path / "run.yaml"), "--run", str(tmp_path / "run")]) == 0
    recommender = Recommender.load(tmp_path / "run", cache_bytes=2**22)
    with pytest.raises(InvalidRequest, match="new items: the run has no features of items"):
        recommender.add_items([1000], {})
    log = EventLog(tmp_path / "events.log")
    log.append([{"new_items": [1000], "features": {"brand": ["b"]}}])
    with log.reader() as reader:  # another run's
        replay(recommender, reader)
    assert len(recommender.items) == len(recommender.model.item_table)
    log.close()
    (tmp_path / "new.csv").write_text(json.dumps([1]))
    arguments = [tmp_path / "run", "--recommend", tmp_path / "o.csv", "--items", tmp_path / "new.csv"]
    assert "new items: the run has no features" in refuses(tmp_path, capsys, evaluation.main, *arguments)
