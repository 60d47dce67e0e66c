"""Test segments of the log: deletions, kills, damage."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from serving.http import event_log
from serving.http.event_log import EventLog
from serving.http.log_reader import LogError, line_of
from serving.http.replay import replay
from tests.serving.http import log_under_kills
from tests.serving.http.test_event_log import count, events, files_of_at_most, mode, record, service
from tests.serving.http.test_user_ids import USERS
from tests.serving.plain import make_config, make_model, serve
from tests.support.forked import Forked

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def small():
    config = make_config()
    return config, make_model(config)


@pytest.fixture
def full(monkeypatch):
    """Make logs continue in a new file after a few records."""
    monkeypatch.setattr(event_log, "FULL", 400)


def filled(path, turns=60):
    """Return a closed log of events with ids, a list that is replaced, and users who were deleted."""
    log = EventLog(path)
    for turn in range(turns):
        users = [f"u{turn % 7}", f"u{turn % 3}"]
        log.append([record(users, [100 + 3 * (turn % 40), "103"], [turn, turn]) | {"ids": [f"a{turn}", None]}])
        if turn % 20 == 10:
            log.append([{"list": "stock", "items": [100 + 3 * turn]}, {"forget": f"u{turn // 20}"}])
    log.close()


def files_of(path):
    return {file.name: file.read_bytes() for file in sorted(path.with_name(f"{path.name}.segments").iterdir())}


def histories(recommender):
    return {
        user: [history.count, *(column.tolist() for column in (history.items, history.timestamps, history.seen))]
        for user, history in recommender._histories
    }


def test_segments_equal_the_lines(small, tmp_path, monkeypatch):
    """One file and many segments give the same users, ids and lists; the file becomes a segment once it is large."""
    filled(tmp_path / "one.log")
    monkeypatch.setattr(event_log, "FULL", 400)
    filled(tmp_path / "many.log")
    assert not (tmp_path / "one.log.segments").exists() and (tmp_path / "many.log").stat().st_size < 1000
    results = []
    for name in ("one.log", "many.log", "one.log", "many.log"):
        log, recommender = EventLog(tmp_path / name), serve(*small, cache_bytes=2**22)
        log.prepare()
        counts = replay(recommender, log)
        log.compact()
        has = [log.ids.has("u0", f"a{turn}") for turn in range(60)]
        results.append((counts, histories(recommender), has, recommender.filters.sizes, set(log.forgotten)))
        log.close()
    assert results[1:] == [results[0]] * 3 and sum(results[0][2]) > 3
    assert len(files_of(tmp_path / "one.log")) == 2 and (tmp_path / "one.log").stat().st_size < 100


def test_a_deletion_reaches_every_file(small, tmp_path, full):
    path = tmp_path / "events.log"
    with service(small, path) as (client, *_):
        for turn in range(20):
            for user in ("gone", "stays"):
                event = {"user": user, "item": 100 + 3 * turn, "timestamp": turn, "id": f"{user}-{turn}"}
                assert client.post("/events", json={"events": [event]}).json()["accepted"] == 1
    with service(small, path) as (client, *_):
        assert client.delete("/users/gone").json() == {"forgotten": True}
        assert sum(b"gone-" in content for content in files_of(path).values()) > 0
    for _ in range(2):
        with service(small, path) as (client, _, counts):
            assert (count(client, "gone"), count(client, "stays")) == (0, 20) and counts["taken"] == 20
            assert not any(b"gone" in content for content in files_of(path).values())
            assert path.read_bytes().count(b"gone") == 1  # the mark
    with service(small, path) as (client, *_):  # the mark becomes part of a segment; events after it remain
        for turn in range(20):
            assert client.post("/events", json=events(("gone", 100, turn), ("new", 103, turn))).status_code == 200
        repeated = {"user": "stays", "item": 100, "timestamp": 99, "id": "stays-3"}
        assert client.post("/events", json={"events": [repeated]}).json()["events"] == ["repeated"]
    with service(small, path, history=True) as (client, recommender, _):
        assert (count(client, "gone"), count(client, "new"), count(client, "stays")) == (20, 20, 20)
        assert b"gone" not in path.read_bytes() and recommender.history("eve").count == 2


def test_a_model_that_is_loaded_meanwhile_reads_one_file(small, tmp_path, full):
    """While a reader is open, the log stays in its file, so that the reader can read later records, too."""
    filled(tmp_path / "events.log")
    log, recommender = EventLog(tmp_path / "events.log"), serve(*small, cache_bytes=2**22)
    with log.reader() as reader:
        before = log.number
        for turn in range(20):
            log.append([record(["late"], [100], [turn])])
        replay(recommender, reader)
        assert log.number == before and len(reader.further(log.size)) == 20
    log.append([record(["late"], [100], [20])])
    assert log.number == before + 1
    log.close()


@pytest.mark.parametrize("permissions", [0o600, 0o640])
def test_modes(tmp_path, full, permissions):
    path = tmp_path / "events.log"
    EventLog(path).close()
    path.chmod(permissions)
    filled(path)
    folder = tmp_path / "events.log.segments"
    assert mode(folder) == permissions | 0o700 | (permissions & 0o044) >> 2
    assert {mode(file) for file in (path, *folder.iterdir())} == {permissions}


def test_files_that_do_not_belong_together(tmp_path, full):
    """If a file is missing, damaged, or older than the others, the error names it."""
    path = tmp_path / "events.log"
    filled(path)
    folder = path.with_name("events.log.segments")
    (some,) = sorted(folder.glob("*.npz"))[:1]

    def refused(change, match):
        copied = tmp_path / "copy"
        shutil.rmtree(copied, ignore_errors=True)
        copied.mkdir()
        shutil.copytree(folder, copied / folder.name)
        shutil.copy(path, copied)
        change(copied)
        with pytest.raises(LogError, match=match) as error:
            log = EventLog(copied / path.name)
            try:
                log.prepare()
                list(log.parts())
            finally:
                log.close()
        assert "\n" not in str(error.value)

    manifest = (folder / "manifest").read_bytes()
    refused(lambda copied: shutil.rmtree(copied / folder.name), "expected part 1 of the log")
    refused(lambda copied: (copied / folder.name / "manifest").unlink(), "manifest: missing")
    for damaged in (manifest[:-9], manifest.replace(b'"next":', b'"mext":'), b""):
        refused(lambda copied, damaged=damaged: (copied / folder.name / "manifest").write_bytes(damaged), "damaged")
    refused(lambda copied: (copied / folder.name / some.name).unlink(), f"{some.name}: missing")
    refused(lambda copied: (copied / folder.name / some.name).write_bytes(some.read_bytes()[:-1]), "checksum differs")
    lines = path.read_bytes()
    number = json.loads(lines.splitlines()[0][9:])["segment"]
    refused(lambda copied: (copied / path.name).write_bytes(lines.split(b"\n", 1)[1]), f"part {number} .* part 1")
    refused(lambda copied: (copied / path.name).write_bytes(b"0" + lines[1:]), "line 1 is damaged")
    refused(lambda copied: (copied / folder.name / f"{number + 1:06d}.log").write_bytes(lines), "log: missing")

    def cut(copied):
        (copied / folder.name / f"{number:06d}.log").write_bytes(lines[:-3])
        (copied / path.name).write_bytes(line_of({"segment": number + 1}))

    refused(cut, f"{number:06d}.log: damaged")


def test_a_full_disk_and_segments(tmp_path, full):
    """Records are accepted even while no segment can be written; segments are written later."""
    path = tmp_path / "events.log"
    filled(path)
    log = EventLog(path)
    before = files_of(path)
    with files_of_at_most(2000):
        for turn in range(8):
            log.append([record(["new"], [100], [turn])])
        log.close()  # waits for the thread that writes segments
        assert files_of(path).keys() - before.keys() <= {f"{number:06d}.log" for number in range(100)}
    log = EventLog(path)
    log.prepare()
    assert sum(part.num_events for part in log.parts() if "new" in part.users) >= 8
    log.close()
    assert not list((tmp_path / "events.log.segments").glob("*.log"))


def test_kills_at_every_moment(tmp_path):
    """Whenever a process is killed, no acknowledged event is lost or repeated, and deleted users stay deleted."""
    process = Forked(log_under_kills.main, tmp_path)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    kills, *_ = output.split()
    assert int(kills) > 20 and "tmp" not in output


def test_columns_keep_ids_items_and_actions(tmp_path, full):
    """Ids of any text, items as numbers or text, and actions of all kinds are unchanged."""
    users = [*USERS, "\ud800", "a\udfff"]
    items, actions = [100, "100", "x\n", -7, "\ud800"], [None, 4.5, 5, "good", "\n"]
    log = EventLog(tmp_path / "events.log")
    written = [(user, items[n % 5], n, actions[n % 5], f"{n}\n") for n, user in enumerate(users)]
    for user, item, time, action, name in written:
        log.append([record([user], [item], [time], [action]) | {"ids": [name]}])
    log.close()
    log = EventLog(tmp_path / "events.log")
    log.prepare()
    rows = set()
    for part in log.parts():
        owners = np.repeat(np.arange(len(part.users)), part.counts).tolist()
        for user, item, time, action in zip(owners, part.item, part.timestamps.tolist(), part.action):
            rows.add((part.users[user], repr(part.items[item]), time, repr(part.actions[action])))
    assert rows == {(user, repr(item), time, repr(action)) for user, item, time, action, _ in written}
    assert all(log.ids.has(user, name) and not log.ids.has(user, "other") for user, *_, name in written)
    log.close()
    assert len(files_of(tmp_path / "events.log")) >= 2
