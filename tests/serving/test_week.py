"""Test the week of a shop (docs/week.md): clients send orders while models change and the service is killed."""

import contextlib
import json
import shutil
import signal
import threading
import time

import httpx
import pytest
from fastapi.testclient import TestClient

import serve
import train
from serving import Recommender
from serving.http import event_log
from serving.http.app import create_app
from serving.http.event_log import EventLog
from serving.http.replay import replay
from serving.http.swap import Models, Requirements
from tests.serving.test_serve import ended, exchanged, serving
from tests.support.ports import reserved_ports

CONFIG = """
name: shop
device: cpu
threads: 1
data: {format: csv, path: PLACE/day-1.csv, cache_dir: PLACE/cache, protocol: all}
model: {block: hstu, max_seq_len: 8, embedding_dim: 8, num_layers: 1, attention: {kind: dense}}
loss: {kind: cross_entropy}
train: {epochs: 1, batch_size: 16, update: {epochs: 1}}
"""
ITEMS = [f"i{number:02}" for number in range(20)]
STOCK = ITEMS[::3]
OLD = [(f"u{user:02}", ITEMS[(user + 3 * n) % 20], n) for user in range(20) for n in range(10)]
VISITORS = [f"u{number:02}" for number in range(5)]
DELETED = "u19"
WAIT = 500  # seconds, enough for a busy machine


def with_small_files(arguments):
    """Run serve.py with a log that continues in a new file after some hundred events."""
    event_log.FULL = 20_000
    return serve.main(arguments)


class Shop:
    """Visitors who order something and look at their recommendations, and the orders that were acknowledged.

    client: the HTTP client of all visitors. If the service is gone, a visitor repeats the order with the same id.
    """

    def __init__(self, client):
        self.client = client
        self.orders = {user: [] for user in VISITORS}  # user -> (item, time) of each acknowledged event
        self.models, self.faults, self.repeated = set(), [], 0
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=self.visit, args=(user,)) for user in VISITORS]

    def visit(self, user):
        try:
            began, count = time.monotonic(), 0
            while not self.stopping.is_set():
                self.order(user)
                count += 1
                time.sleep(max(0, began + count / 5 - time.monotonic()))  # ten requests a second of each visitor
        except Exception as error:
            if not (self.stopping.is_set() and isinstance(error, httpx.TransportError)):
                self.faults.append(error)

    def sent(self, send):
        """Send a request until the service answers; return (the answer, whether it was sent again)."""
        ends, again = time.monotonic() + WAIT, False
        while True:
            try:
                return send(self.client), again
            except httpx.TransportError:
                if self.stopping.is_set() or time.monotonic() > ends:
                    raise
                again = True
                time.sleep(0.05)

    def order(self, user):
        orders = self.orders[user]
        item, timestamp = ITEMS[len(orders) % 20], 100 + len(orders)
        event = {"user": user, "item": item, "timestamp": timestamp, "id": f"order-{len(orders)}"}
        answer, again = self.sent(lambda client: client.post("/events", json={"events": [event]}))
        assert answer.status_code == 200, answer.text
        (state,) = answer.json()["events"]
        assert state == "accepted" or (state == "repeated" and again), (state, again)
        self.repeated += state == "repeated"
        orders.append((item, timestamp))
        query = {"filters": "stock", "deny": STOCK[0], "exclude_seen": "false", "k": 5}
        answer, _ = self.sent(lambda client: client.get(f"/users/{user}/recommendations", params=query))
        assert answer.status_code == 200, answer.text
        shown = [one["item"] for one in answer.json()["items"]]
        assert len(shown) == 5 and set(shown) <= {*STOCK[1:]}, shown
        self.models.add(answer.json()["model"])

    @property
    def requests(self):
        """The number of requests that were answered: an order and a list each time."""
        return 2 * sum(map(len, self.orders.values()))

    def wait(self, condition):
        ends = time.monotonic() + WAIT
        while not condition():
            assert not self.faults and time.monotonic() < ends, self.faults
            time.sleep(0.02)

    def wait_for_orders(self, more):
        least = {user: len(orders) + more for user, orders in self.orders.items()}
        self.wait(lambda: all(len(self.orders[user]) >= count for user, count in least.items()))

    def check(self, client, extra):
        """Compare the service's events of each user with the data and the acknowledged orders."""
        for user in [*VISITORS, "u07"]:
            expected = [(item, n) for owner, item, n in OLD if owner == user]
            expected += self.orders.get(user, []) + [(item, n) for owner, item, n in extra if owner == user]
            answer = client.get(f"/users/{user}").json()
            assert answer["count"] == len(expected), user
            assert list(zip(answer["items"], answer["timestamps"])) == expected[-len(answer["items"]) :]
        assert client.get(f"/users/{DELETED}").status_code == 404

    @contextlib.contextmanager
    def open(self):
        for thread in self.threads:
            thread.start()
        try:
            yield
        finally:
            self.stopping.set()
            for thread in self.threads:
                thread.join()
        assert not self.faults


def write_data(path, rows):
    path.write_text("\n".join(["user,item,timestamp", *(",".join(map(str, row)) for row in rows), ""]))


def first_run(place):
    write_data(place / "day-1.csv", OLD)
    (place / "shop.yaml").write_text(CONFIG.replace("PLACE", str(place)))
    (place / "runs").mkdir()
    assert train.main([str(place / "shop.yaml"), "--run", str(place / "runs" / "day-1")]) == 0


def update(place, shop, extra):
    """Train day-8 on all events so far, without the deleted user, and on the events `extra` of a new article."""
    rows = [row for row in OLD if row[0] != DELETED]
    rows += [(user, *order) for user, orders in shop.orders.items() for order in list(orders)]
    write_data(place / "day-8.csv", rows + extra)
    runs = place / "runs"
    options = [f"data.path={place / 'day-8.csv'}", "train.update.epochs=2", "--run", str(runs / "day-8")]
    assert train.main(["--update", str(runs / "day-1"), *options]) == 0


def add_bad_run(place):
    """Put a newer run into the folder whose weights are damaged."""
    shutil.copytree(place / "runs" / "day-8", place / "bad")
    last = max((place / "bad" / "checkpoints").iterdir())
    weights = max(last.iterdir(), key=lambda file: file.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-8] + b"damaged!")
    manifest = json.loads((place / "bad" / "run.json").read_text())
    (place / "bad" / "run.json").write_text(json.dumps(manifest | {"created": "9999-01-01"}))
    (place / "bad").rename(place / "runs" / "bad")


NEW_ARTICLE = {"user": "u07", "item": "new", "timestamp": 100, "id": "first-of-its-kind"}
EXTRA = [("u07", "new", 100)]


def day_1(shop, client):
    assert client.put("/filters/stock", json={"items": STOCK}).json() == {"items": len(STOCK), "unknown": 0}
    assert client.delete(f"/users/{DELETED}").json() == {"forgotten": True}
    assert client.post("/events", json={"events": [NEW_ARTICLE]}).json()["events"] == ["unknown item"]


def day_8(shop, client, place):
    """Update and replace the model, refuse a damaged run, and go back and forth, while visitors send requests."""
    shop.wait_for_orders(1)
    update(place, shop, EXTRA)
    began, before = time.monotonic(), shop.requests
    shop.wait(lambda: "day-8" in shop.models)
    assert client.post("/events", json={"events": [NEW_ARTICLE]}).json()["events"] == ["repeated"]
    add_bad_run(place)
    shop.wait(lambda: "bad" in client.get("/model").json()["refused"])
    assert exchanged(client, "day-1") == {"model": "day-1", "previous": "day-8"}
    shop.wait_for_orders(2)
    assert exchanged(client, "day-8") == {"model": "day-8", "previous": "day-1"}
    shop.wait_for_orders(2)
    rate = (shop.requests - before) / (time.monotonic() - began)
    print(f"{rate:.1f} requests a second were answered while models were exchanged")
    assert shop.models == {"day-1", "day-8"}


def test_a_week_in_one_process(tmp_path, monkeypatch):
    """Run the short form: the service is stopped and started within this process."""
    monkeypatch.setattr(event_log, "FULL", 4000)
    first_run(tmp_path)

    @contextlib.contextmanager
    def service():
        load = lambda path: Recommender.load(path, history=True, device="cpu", cache_bytes=2**22)
        models = Models(tmp_path / "runs", load, Requirements(missing=0.1))
        recommender, log = models.first(), EventLog(tmp_path / "events.log")
        replay(recommender, log)
        log.compact()
        with TestClient(create_app(recommender, log, models=models, watch=0.05)) as client:
            yield client
        log.close()

    with service() as client:
        shop = Shop(client)
        day_1(shop, client)
        with shop.open():
            day_8(shop, client, tmp_path)
        shop.check(client, EXTRA)
    with service() as client:
        assert client.get("/health").json()["model"] == "day-8"
        shop.check(client, EXTRA)
    assert len(list((tmp_path / "events.log.segments").glob("*.npz"))) > 0


@pytest.fixture
def port():
    with reserved_ports() as (number,):
        yield number


@pytest.mark.slow
def test_a_week_of_processes_and_kills(tmp_path, port):
    """Kill the service twice under 50 requests a second: no acknowledged order is lost or repeated."""
    first_run(tmp_path)
    options = ["--history", "--watch", "--watch-seconds", "0.2", "--missing-items", "0.1", "--port", port]
    start = lambda: serving(tmp_path / "runs", *options, log=tmp_path / "log", main=with_small_files)
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT) as visitor_client,
        contextlib.ExitStack() as visitors,
    ):
        shop = Shop(visitor_client)
        with start() as (process, client):
            day_1(shop, client)
            visitors.enter_context(shop.open())
            shop.wait_for_orders(20)
            process.kill()
        with start() as (process, client):
            shop.wait_for_orders(5)
            day_8(shop, client, tmp_path)
            shop.wait_for_orders(20)
            process.kill()
        with start() as (process, client):
            shop.wait_for_orders(5)
            visitors.close()
            assert client.get("/health").json()["model"] == "day-8"
            shop.check(client, EXTRA)
            process.send_signal(signal.SIGTERM)
            status, errors = ended(process)
            assert status == 0 and "Traceback" not in errors, errors
    orders = sum(map(len, shop.orders.values()))
    print(f"{orders} orders, {shop.repeated} of them sent twice")
    assert len(list((tmp_path / "log.segments").glob("*.npz"))) > 0
