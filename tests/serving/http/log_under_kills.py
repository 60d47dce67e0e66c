"""Kill processes that write a log at every moment at which a file is opened, renamed or removed.

python -m tests.serving.http.log_under_kills FOLDER       prints the number of kills

Each process is a fork that opens the log, compacts it like a starting service, appends a few records and closes it; the
next process continues with the files that the killed one left. After each kill, a copy of the files is read: it must
contain every acknowledged record once, and may contain the record that was being written.
"""

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np

from serving.http import event_log
from serving.http.event_log import EventLog

MOMENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod"}
RECORDS = 2  # records that a process appends


class Expected:
    """The events and ids of each user, the deleted users and the lists that a log must have after some records."""

    def __init__(self):
        self.events, self.ids, self.deleted, self.lists = {}, {}, set(), {}

    def apply(self, record: dict) -> None:
        if "forget" in record:
            self.deleted.add(record["forget"])
            self.events.pop(record["forget"], None)
            self.ids.pop(record["forget"], None)
        elif "list" in record:
            self.lists[record["list"]] = record["items"]
        else:
            for user, *event, name in zip(*(record[x] for x in ("users", "items", "timestamps", "actions", "ids"))):
                self.events.setdefault(user, []).append(tuple(event))
                self.ids.setdefault(user, set()).add(name)

    @property
    def state(self) -> tuple:
        return self.events, self.ids, self.deleted, self.lists


def read(log: EventLog) -> tuple:
    """Return the content of a log in the form of `Expected.state`."""
    events: dict[str, list] = {}
    for part in log.parts():
        rows = zip(part.item.tolist(), part.timestamps.tolist(), part.action.tolist())
        for user, count in zip(part.users, part.counts.tolist()):
            for item, time, action in itertools.islice(rows, count):
                events.setdefault(user, []).append((part.items[item], time, part.actions[action]))
    ids = {user: log.ids._ids(user) for user in events}
    return events, ids, set(log.forgotten), log.lists


def random_record(rng, turn: int) -> dict:
    kind = rng.random()
    users = [f"u{number}" for number in rng.choice(12, 3, replace=False)]
    if kind < 0.15:
        return {"forget": users[0]}
    if kind < 0.3:
        return {"list": ("stock", "new")[int(rng.integers(0, 2))], "items": [turn]}
    items, actions = rng.integers(0, 9, 3).tolist(), [None, "buy", 4.5]
    ids = [f"{turn}-{user}" for user in users]
    return {"users": users, "items": items, "timestamps": [turn] * 3, "actions": actions, "ids": ids}


def work(path: Path, moment: int, notes: int) -> None:
    """Write records, note each before and after writing, and kill this process at the given moment."""
    left = [moment]

    def count(event: str, arguments: tuple) -> None:
        if event in MOMENTS:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    rng = np.random.default_rng(moment)
    sys.addaudithook(count)
    log = EventLog(path)
    log.prepare()
    list(log.parts())
    log.compact()
    for turn in range(RECORDS):
        record = random_record(rng, moment * RECORDS + turn)
        os.write(notes, json.dumps(record).encode() + b"\n")
        log.append([record])
        os.write(notes, b"done\n")
    log.close()


def check(folder: Path, copied: Path, expected: Expected, pending: dict | None) -> None:
    """Compare a copy of the log with the expected content; if it has the pending record, expect it from now on."""
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(folder, copied)
    log = EventLog(copied / "events.log")
    actual = read(log)
    log.close()
    if pending is not None and actual != expected.state:
        expected.apply(pending)
    assert actual == expected.state, (actual, expected.state)


def main(folder: Path) -> None:
    event_log.FULL = 200
    files, expected, moment = folder / "log", Expected(), 0
    files.mkdir()
    while True:
        notes = os.open(folder / "notes", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        if (child := os.fork()) == 0:
            try:
                work(files / "events.log", moment, notes)
            finally:
                os._exit(0 if sys.exc_info()[0] is None else 1)
        _, status = os.waitpid(child, 0)
        os.close(notes)
        *lines, _ = (folder / "notes").read_text().split("\n")
        for line, after in zip(lines, [*lines[1:], ""]):
            if line != "done" and after == "done":
                expected.apply(json.loads(line))
        pending = json.loads(lines[-1]) if lines and lines[-1] != "done" else None
        check(files, folder / "copy", expected, pending)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        if not os.WIFSIGNALED(status):
            break
        moment += 1
    print(f"{moment} kills, {sum(map(len, expected.events.values()))} events, {sorted(os.listdir(files))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
