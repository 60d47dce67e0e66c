"""Measure time and peak memory of preparing a generated ratings.csv the size of MovieLens 20M.

    python benchmarks/prepare.py [--rows 20000000] [--folder /tmp/prepare_bench]
    python benchmarks/prepare.py --rows 100000000 --users 10000000 --items 10000000 --partitions 8

With --users the file is a log, its rows in the order of time. The program prints one JSON line. The preparation runs in
a separate process, so that nothing else counts in its peak memory; polars has two threads there, and with --partitions
the preparation has up to four of its own. `peak_rss_gib` includes the
pages of mapped files, which the system takes back when it needs them; `peak_anonymous_gib` does not. `disk_gib` is the
largest size of the folder, without the ratings file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cli.command import Parser, run_main

USERS, ITEMS = 138_493, 26_744  # as in MovieLens 20M
PART = 2_000_000  # rows that are generated at a time


def generate_log(file: Path, rows: int, users: int, items: int) -> None:
    """Write rows in the order of time, each of any user: no part of the file has all events of any user."""
    import numpy as np
    import polars as pl

    rng, begin, end = np.random.default_rng(0), 789_652_009, 1_427_784_002
    with open(file, "wb") as out:
        out.write(b"userId,movieId,rating,timestamp\n")
        for first in range(0, rows, PART):
            n = min(PART, rows - first)
            times = begin + (end - begin) * (first + np.sort(rng.random(n)) * n) / rows
            frame = {
                "userId": (users * rng.random(n) ** 1.5).astype(np.int64) + 1,
                "movieId": (items * rng.random(n) ** 2.5).astype(np.int64) + 1,
                "rating": rng.integers(1, 11, n) / 2,
                "timestamp": times.astype(np.int64),
            }
            pl.DataFrame(frame).write_csv(out, include_header=False)


def generate(file: Path, rows: int) -> None:
    """Write users one after another as in the original, but each user's events not in the order of time."""
    import numpy as np
    import polars as pl

    rng = np.random.default_rng(0)
    with open(file, "wb") as out:
        out.write(b"userId,movieId,rating,timestamp\n")
        users = np.sort((USERS * rng.random(rows) ** 1.5).astype(np.int64)) + 1
        for part in np.array_split(users, max(1, rows // PART)):
            n = len(part)
            frame = {
                "userId": part,
                "movieId": (ITEMS * rng.random(n) ** 2.5).astype(np.int64) + 1,
                "rating": rng.integers(1, 11, n) / 2,
                "timestamp": rng.integers(789_652_009, 1_427_784_002, n),
            }
            pl.DataFrame(frame).write_csv(out, include_header=False)


class Watch(threading.Thread):
    """Sample this process's memory without mapped files, and the size of a folder; `peaks` in bytes."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self.folder, self.peaks, self.ended = folder, [0, 0], threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.2):
            lines = Path("/proc/self/status").read_text().splitlines()
            anonymous = int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10
            size = int(subprocess.run(["du", "-sk", self.folder], capture_output=True, text=True).stdout.split()[0])
            self.peaks = [max(self.peaks[0], anonymous), max(self.peaks[1], size << 10)]


def prepare(file: Path, cache: Path, partitions: int | None, tell: bool) -> None:
    """Prepare in a child process, then check the result."""
    from data.datasets import load_dataset

    cache.mkdir(parents=True, exist_ok=True)
    options = dict(min_user_events=5, min_item_events=5, partitions=partitions)
    watch = Watch(cache)
    watch.start()
    start = time.perf_counter()
    say = (lambda text: print(text, file=sys.stderr)) if tell else None
    dataset = load_dataset("ml-20m", str(file), cache_dir=str(cache), report=say, **options)
    prepared = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    watch.ended.set()
    start = time.perf_counter()
    load_dataset("ml-20m", str(file), cache_dir=str(cache), **options)
    reopened = time.perf_counter() - start

    import numpy as np

    gaps = np.diff(dataset.timestamps)
    gaps[dataset.user_offsets[1:-1] - 1] = 0
    assert (gaps >= 0).all(), "events out of order"
    assert np.diff(dataset.user_offsets).min() >= 5 and np.bincount(dataset.items).min() >= 5, "the filter missed some"
    result = {
        "events": dataset.num_events,
        "users": dataset.num_users,
        "items": dataset.num_items,
        "prepare_s": round(prepared, 1),
        "peak_rss_gib": round(peak, 2),
        "peak_anonymous_gib": round(watch.peaks[0] / 2**30, 2),
        "disk_gib": round(watch.peaks[1] / 2**30, 2),
        "reopen_s": round(reopened, 2),
    }
    print(json.dumps(result))


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/prepare_bench"))
    parser.add_argument("--users", type=int, help="write a log in the order of time, with so many users")
    parser.add_argument("--items", type=int, default=ITEMS, help="with --users: the number of items")
    parser.add_argument("--partitions", type=int, help="the value of data.partitions")
    parser.add_argument("--tell", action="store_true", help="print the progress")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kind = "" if options.users is None else f"-{options.users}-{options.items}"
    file, cache = options.folder / f"ratings-{options.rows}{kind}.csv", options.folder / "cache"
    if options.child:
        return prepare(file, cache, options.partitions, options.tell)
    options.folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        if options.users is None:
            generate(file, options.rows)
        else:
            generate_log(file, options.rows, options.users, options.items)
    shutil.rmtree(cache, ignore_errors=True)
    command = [sys.executable, __file__, "--child", *sys.argv[1:]]
    environment = {**os.environ, "POLARS_MAX_THREADS": "2"}
    child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result = {"rows": options.rows, "csv_gib": round(file.stat().st_size / 2**30, 2), **json.loads(child.stdout)}
    print(json.dumps(result))


if __name__ == "__main__":
    run_main(main)
