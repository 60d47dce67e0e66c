"""Test the event log: starts, deletions, locks, modes, full disks."""

import contextlib
import errno
import os
import resource
from urllib.parse import quote

import numpy as np
import pytest
from fastapi.testclient import TestClient

from data.types import Dataset
from serving.errors import LimitReached
from serving.http import log_reader
from serving.http.app import create_app
from serving.http.event_log import EventLog, LogError, NotStored
from serving.http.replay import replay
from tests.serving.http.test_user_ids import USERS
from tests.serving.plain import NUM_ITEMS, item_ids, make_config, make_model, serve

NOW = 1_000_000


@pytest.fixture(scope="module")
def small():
    config = make_config()
    return config, make_model(config)


def events(*rows):
    return {"events": [dict(zip(("user", "item", "timestamp"), row)) for row in rows]}


def record(users, items, times, actions=None):
    return {"users": users, "items": items, "timestamps": times, "actions": actions}


def run_data():
    """Return the data of a run: three users with two events each."""
    return Dataset(
        name="small",
        items=np.array([0, 1, 2, 3, 4, 5], np.int32),
        timestamps=np.array([1, 2, 1, 2, 1, 2]),
        actions=None,
        user_offsets=np.array([0, 2, 4, 6]),
        user_ids=np.array(["ann", "a/b", "eve"]),
        item_ids=item_ids(),
        has_timestamps=True,
        fingerprint="x",
    )


@contextlib.contextmanager
def service(small, path, history=False, **options):
    """Yield (a client, the recommender, the counts of `replay`) of a service that starts like serve.py."""
    recommender = serve(*small, lambda: NOW, cache_bytes=2**22, **options)
    if history:
        recommender.add_dataset(run_data())
    log = EventLog(path)
    try:
        log.prepare()
        counts = replay(recommender, log)
        if log.stale:
            log.compact()
        with TestClient(create_app(recommender, log, clock=lambda: NOW)) as client:
            yield client, recommender, counts
    finally:
        log.close()


def count(client, user):
    """Return the number of a user's events, 0 for an unknown one."""
    answer = client.get(f"/users/{quote(user, safe='')}")
    return answer.json()["count"] if answer.status_code == 200 else 0


def test_deletions_hold_at_every_start(small, tmp_path):
    """Users of the run's data and others, several deletions, events afterwards, starts with and without the data."""
    path = tmp_path / "events.log"
    with service(small, path, history=True) as (client, *_):
        assert client.post("/events", json=events(("ann", 118, 5), ("new", 121, 5), ("bob", 121, 5))).status_code == 200
        assert client.delete("/users/ann").json() == {"forgotten": True}
        assert client.delete("/users/ann").json() == {"forgotten": False}
        assert client.delete("/users/a%2Fb").json() == client.delete("/users/new").json() == {"forgotten": True}
        assert client.post("/events", json=events(("new", 124, 6))).status_code == 200
        assert client.delete("/users/new").json() == {"forgotten": True}
        assert client.post("/events", json=events(("new", 127, 7), ("a/b", 130, 8))).status_code == 200
    expected = {"ann": 0, "a/b": 1, "new": 1, "bob": 1, "eve": 2}
    for start in range(4):
        with service(small, path, history=start != 1) as (client, recommender, counts):
            assert {user: count(client, user) for user in expected} == expected | ({"eve": 0} if start == 1 else {})
            assert recommender.history("a/b").items.tolist() == [130]
            assert counts == {"taken": 3 + (start > 2), "left_out": 0, "repeated": 0}
            assert (path.read_bytes().count(b"12"), path.read_bytes().count(b"118")) == (2 + (start > 2), 0)
            if start == 2:  # later starts must keep the last mark of a user
                assert client.delete("/users/eve").json() == {"forgotten": True}
                assert client.post("/events", json=events(("eve", 124, 9))).status_code == 200
                expected["eve"] = 1
    with service(small, path) as (client, *_):  # delete a user of the run's data without loading these data
        assert client.delete("/users?user=eve").json() == {"forgotten": True}
    with service(small, path, history=True) as (client, *_):
        assert count(client, "eve") == 0


def test_deletion_reaches_events_of_another_run(small, tmp_path):
    """Delete users whose events only another run knows, which shares the log."""
    path = tmp_path / "events.log"
    log = EventLog(path)
    log.append([record(["both", "other", "stays"], [100, 101, 101], [5, 6, 7]), record(["both"], [101], [8])])
    log.close()
    with service(small, path) as (client, _, counts):
        assert counts == {"taken": 1, "left_out": 3, "repeated": 0}
        assert client.get("/users/other").status_code == 404
        assert client.delete("/users/other").json() == client.delete("/users/both").json() == {"forgotten": True}
        assert client.delete("/users/other").json() == {"forgotten": False}
    with service(small, path) as (client, _, counts):
        assert counts == {"taken": 0, "left_out": 1, "repeated": 0}
    assert path.read_bytes().count(b'"users"') == 1 and b'"stays"' in path.read_bytes()


def test_a_replay_equals_the_appends(small, tmp_path, monkeypatch):
    """Replay events in random order, with deletions and unknown items: the state is that of single appends."""
    monkeypatch.setattr(log_reader, "TOGETHER", 5000)  # bytes: some ten batches
    rng, path = np.random.default_rng(0), tmp_path / "events.log"
    expected = serve(*small, lambda: NOW, cache_bytes=2**22)
    log = EventLog(path)
    left_out = 0
    for now in range(600):
        users = [f"u{user}" for user in rng.integers(0, 30, rng.integers(1, 4))]
        items = rng.integers(0, NUM_ITEMS, len(users)) * 3 + 100
        times = [max(0, int(now - late)) for late in rng.integers(0, 3, len(users)) * rng.integers(0, 60, len(users))]
        if now % 50 == 49:
            log.append([{"forget": users[0]}])
            expected.forget(users[0])
        unknown = now % 7 == 0
        log.append([record(users, [str(x) if now % 3 else int(x) for x in items + unknown], times)])
        left_out += unknown * len(users)
        for one in zip(users, items, times) if not unknown else ():
            expected.append(*([x] for x in one), encode=False)
    log.close()
    for _ in range(2):
        with service(small, path) as (_, recommender, counts):
            assert counts["left_out"] <= left_out and recommender.num_users == expected.num_users
            for user, history in expected._histories:
                actual = recommender._histories.get(user)
                assert (actual.count, actual.last) == (history.count, history.last)
                assert actual.seen.tolist() == history.seen.tolist()
                for column, other in zip(recommender.history(user), expected.history(user)):
                    np.testing.assert_array_equal(column, other)
            users = [user for user, _ in expected._histories]
            np.testing.assert_array_equal(recommender.recommend(users, 5)[0], expected.recommend(users, 5)[0])


def test_actions_of_a_log(tmp_path):
    """A ranking run leaves out single events without an action or with an unknown one."""
    config = make_config(task="ranking")
    small = config, make_model(config)
    log = EventLog(tmp_path / "events.log")
    log.append([record(["a"] * 3, [100, 103, 106], [1, 2, 3], [5, 4.5, 3.0]), record(["a"], [100], [4])])
    log.append([record(["a"], [100], [5], ["good"]), record(["b"], [100], [6], [9]), record(["b"], [109], [7], [1])])
    log.close()
    with service(small, tmp_path / "events.log") as (_, recommender, counts):
        assert counts == {"taken": 3, "left_out": 4, "repeated": 0}
        assert recommender.history("a").actions.tolist() == [5, 3] and recommender.history("b").count == 1


def test_limits_at_the_start(small, tmp_path):
    """Events beyond the limits are an error; they do not count as unknown."""
    with service(small, tmp_path / "events.log") as (client, *_):
        assert client.post("/events", json=events(*[(user, 100, 5) for user in "abc"])).status_code == 200
    recommender, log = serve(*small, cache_bytes=2**22, most_users=2), EventLog(tmp_path / "events.log")
    with pytest.raises(LimitReached, match="expected at most 2 users with events"):
        replay(recommender, log)
    log.close()


def mode(path):
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("permissions", [0o600, 0o640])
def test_a_rewritten_log_keeps_its_mode(small, tmp_path, permissions):
    """A rewritten log keeps its mode and owner; files left by a killed start are removed."""
    path = tmp_path / "events.log"
    with service(small, path) as (client, *_):
        assert mode(path) == mode(tmp_path / ".events.log.lock") == 0o600
        assert client.post("/events", json=events(("ann", 100, 5), ("bob", 100, 5))).status_code == 200
        client.delete("/users/ann")
    path.chmod(permissions)
    if os.geteuid() == 0:
        os.chown(path, 12, 34)
    leftover = tmp_path / ".events.log.tmp-123-0123abcd"
    leftover.write_bytes(path.read_bytes())
    before = path.stat()
    with service(small, path):
        assert b'"ann"],' not in path.read_bytes() and path.stat().st_ino != before.st_ino
        assert mode(path) == permissions
        assert (path.stat().st_uid, path.stat().st_gid) == (before.st_uid, before.st_gid)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".events.log.lock", "events.log"]


def test_a_log_that_is_moved_or_changed(small, tmp_path, caplog):
    """If the log is gone, the service refuses events with an error, and no second service can start on it."""
    path, aside = tmp_path / "events.log", tmp_path / "aside.log"
    with service(small, path) as (client, *_):
        assert client.post("/events", json=events(("ann", 100, 5))).status_code == 200
        path.rename(aside)
        for log in (path, aside):
            with pytest.raises(LogError, match=f"{log}: another process is using this log"):
                EventLog(log)
        assert not path.exists()
        for _ in range(3):
            answer = client.post("/events", json=events(("ann", 103, 6)))
            assert (
                answer.status_code == 507 and "the event log was moved or deleted" in answer.json()["error"]["message"]
            )
        assert client.delete("/users/ann").status_code == 507
        assert client.get("/users/ann").json()["count"] == 1
        assert [line.getMessage() for line in caplog.records] == [
            f"{path}: the event log was moved or deleted: restore it or restart the service"
        ]
        path.write_bytes(b"")  # a new file at its place
        assert client.post("/events", json=events(("ann", 103, 6))).status_code == 507
        aside.rename(path)
        assert client.post("/events", json=events(("ann", 106, 6))).status_code == 200
        with path.open("r+b") as file:  # copied and truncated, like tools that rotate logs
            file.truncate(0)
        answer = client.post("/events", json=events(("ann", 109, 6)))
        assert answer.status_code == 507 and "changed by another program" in answer.json()["error"]["message"]
        assert path.read_bytes() == b""
        path.unlink()
        assert client.post("/events", json=events(("ann", 109, 6))).status_code == 507


def test_files_that_are_not_a_log(tmp_path):
    """Links, folders, pipes, and locks that are links are refused in one line, and nothing is written."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "nowhere").symlink_to("nothing")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / ".locked.lock").symlink_to("file")
    for name in ("link", "nowhere", "folder", "pipe", "locked", "x" * 256):
        with pytest.raises(LogError) as error:
            EventLog(tmp_path / name)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "nothing").exists() and not (tmp_path / "locked").exists()


@pytest.mark.parametrize("tail", [b"0123abcd {", b"0", b"\0" * 4096, b'0123abcd {"users":["ann"]}'])
def test_a_torn_line(small, tmp_path, tail):
    path = tmp_path / "events.log"
    with service(small, path) as (client, *_):
        assert client.post("/events", json=events(("ann", 100, 5))).status_code == 200
        client.delete("/users/ann")
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    EventLog(path).close()
    assert path.read_bytes() == whole
    with service(small, path) as (client, _, counts):
        assert counts == {"taken": 0, "left_out": 0, "repeated": 0}
        assert client.post("/events", json=events(("ann", 100, 5))).status_code == 200
    with service(small, path) as (_, _, counts):
        assert counts == {"taken": 1, "left_out": 0, "repeated": 0}


@contextlib.contextmanager
def files_of_at_most(size):
    """Limit files to `size` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(small, tmp_path):
    """If a log cannot be rewritten, it is unchanged, its stale events are ignored, and a later start removes them."""
    path = tmp_path / "events.log"
    with service(small, path) as (client, *_):
        for user in ("ann", "bob", "cy"):
            assert client.post("/events", json=events((user, 100, 5))).status_code == 200
        client.delete("/users/ann")
        whole = path.read_bytes()
        with files_of_at_most(len(whole) + 20):
            assert client.post("/events", json=events(("ann", 103, 6))).status_code == 507
            assert client.delete("/users/bob").status_code == 507
        assert path.read_bytes() == whole
    log, recommender = EventLog(path), serve(*small, lambda: NOW, cache_bytes=2**22)
    assert replay(recommender, log) == {"taken": 2, "left_out": 0, "repeated": 0} and log.stale == 1
    with files_of_at_most(100), pytest.raises(NotStored, match=f"cannot be rewritten: {os.strerror(errno.EFBIG)}"):
        log.compact()
    assert path.read_bytes() == whole and len(list(tmp_path.iterdir())) == 2
    log.append([record(["dan"], [100], [7])])
    log.compact()
    assert path.read_bytes().count(b'"users"') == 3 and b'"ann"],' not in path.read_bytes()
    log.append([record(["ann"], [100], [8])])
    log.close()
    with service(small, path) as (client, _, counts):
        assert counts == {"taken": 4, "left_out": 0, "repeated": 0} and count(client, "ann") == 1


def test_a_log_stores_every_id(small, tmp_path):
    """Users with any id exist after a start, and no longer after their deletion and another start."""
    path = tmp_path / "events.log"
    with service(small, path) as (client, *_):
        for user in USERS:
            assert client.post("/events", json=events((user, 100, 5))).status_code == 200
    with service(small, path) as (client, recommender, _):
        assert {user for user, _ in recommender._histories} == set(USERS)
        for user in USERS:
            assert client.delete("/users", params={"user": user}).json() == {"forgotten": True}
    with service(small, path) as (_, _, counts):
        assert counts == {"taken": 0, "left_out": 0, "repeated": 0} and b'"users"' not in path.read_bytes()
