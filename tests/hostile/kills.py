"""Define cases of SIGKILL at random moments of preparing, training, saving and evaluating.

After `--resume`, or after the same command if there is no run to resume, the run must end as an undisturbed one.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import train
from tests.hostile.harness import WORKS, Case, Process
from tests.hostile.raw import RAW
from tests.hostile.runs import differs, facts

MOMENTS, IN_CI = 60, 5
CHAINS = 2  # runs that are killed many times
USERS, EVENTS = 300, 12


def raw_file(place: Path) -> Path:
    numbers = random.Random(0)
    lines = [
        f"{user}\t{numbers.randrange(40)}\t{numbers.randrange(1, 6)}\t{10**9 + event * 1000}\n"
        for event in range(EVENTS)
        for user in range(USERS)
    ]
    (place / "u.data").write_text("".join(lines))
    return place / "u.data"


def begin(folder: Path, source: Path) -> int:
    text = RAW.replace("format: F", "format: ml-100k").replace("path: P", f"path: {source}")
    (folder / "run.yaml").write_text(text.replace("protocol:", f"cache_dir: {folder}/cache, protocol:"))
    return train.main([str(folder / "run.yaml"), "train.epochs=5", "--run", str(folder / "run")])


def go_on(folder: Path, source: Path) -> int:
    if (folder / "run" / "config.yaml").exists():
        return train.main(["--resume", str(folder / "run")])
    return begin(folder, source)


def cases(place: Path) -> list[Case]:
    source, whole = raw_file(place), place / "whole"
    whole.mkdir()
    before = time.monotonic()
    ended = Process(lambda: begin(whole, source), seconds=300).wait()
    took = time.monotonic() - before
    assert ended.status == 0, ended.output
    expected = facts(whole / "run")
    numbers = random.Random(time.time_ns())

    def killed(folder: Path, moments: list[float]) -> int:
        """Kill a run after each of these times in seconds and resume it; then resume it to its end."""
        step = begin
        for moment in moments:
            process = Process(lambda step=step: step(folder, source), seconds=120)
            time.sleep(moment)
            if (ended := process.poll()) is None:
                process.child.kill()
                process.wait()
            else:
                assert ended.status == 0, ended.output
            step = go_on
        return go_on(folder, source)

    def case(name: str, moments: list[float], short: bool) -> Case:
        return Case(
            "kill",
            f"kill {name} ({', '.join(f'{moment:.2f}' for moment in moments)} of {took:.2f} s)",
            lambda folder: killed(folder, moments),
            WORKS,
            check=lambda folder, output: differs(folder / "run", expected),
            short=short,
            seconds=300,
        )

    listed = [case(f"{i}", [numbers.uniform(0, took)], i < IN_CI) for i in range(MOMENTS)]
    for i in range(CHAINS):
        listed.append(case(f"chain {i}", [numbers.uniform(0, took / 2) for _ in range(8)], False))
    return listed
