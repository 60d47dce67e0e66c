"""Time and peak memory of preparing a generated ratings.csv the size of MovieLens 20M.

    python benchmarks/prepare.py [--rows 20000000] [--folder /tmp/prepare_bench]

Prints one JSON line. The preparation runs in a process of its own, on at most two threads, so that the peak is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
USERS, ITEMS = 138_493, 26_744  # as in MovieLens 20M


def generate(file: Path, rows: int) -> None:
    """Users one after another as in the original, but each user's events in no order of time."""
    import numpy as np
    import polars as pl

    rng = np.random.default_rng(0)
    with open(file, "wb") as out:
        out.write(b"userId,movieId,rating,timestamp\n")
        users = np.sort((USERS * rng.random(rows) ** 1.5).astype(np.int64)) + 1
        for part in np.array_split(users, max(1, rows // 2_000_000)):
            n = len(part)
            frame = {
                "userId": part,
                "movieId": (ITEMS * rng.random(n) ** 2.5).astype(np.int64) + 1,
                "rating": rng.integers(1, 11, n) / 2,
                "timestamp": rng.integers(789_652_009, 1_427_784_002, n),
            }
            pl.DataFrame(frame).write_csv(out, include_header=False)


def prepare(file: Path, cache: Path) -> None:
    """Runs in the child: prepare, then check what came out."""
    sys.path.insert(0, str(REPOSITORY))
    from data.datasets import load_dataset

    start = time.perf_counter()
    dataset = load_dataset("ml-20m", str(file), cache_dir=str(cache), min_user_events=5, min_item_events=5)
    prepared = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    start = time.perf_counter()
    load_dataset("ml-20m", str(file), cache_dir=str(cache), min_user_events=5, min_item_events=5)
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
        "reopen_s": round(reopened, 2),
    }
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/prepare_bench"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    file, cache = options.folder / f"ratings-{options.rows}.csv", options.folder / "cache"
    if options.child:
        return prepare(file, cache)
    options.folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        generate(file, options.rows)
    shutil.rmtree(cache, ignore_errors=True)
    command = [sys.executable, __file__, "--child", "--rows", str(options.rows), "--folder", str(options.folder)]
    environment = {**os.environ, "POLARS_MAX_THREADS": "2"}
    child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result = {"rows": options.rows, "csv_gib": round(file.stat().st_size / 2**30, 2), **json.loads(child.stdout)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
