"""Define a case, its process, and the verdict on its end."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import shutil
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# How a case must end: with a one-line error, by working, or either way.
ERROR, WORKS, EITHER = "error", "works", "either"
# The verdicts, the worst first.
VERDICTS = ("lost", "traceback", "hang", "accepted", "refused", "passed")
MEMORY = 4 << 30  # bytes that a case may use in addition to the memory of the parent
SLOW = 10  # a case hangs after this many times its seconds
LONGEST = 1500  # characters of the line of an error
NOBODY = 65534
# A forked child has all slow imports.
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Case:
    """One input.

    run: called with an empty folder; returns an exit status, None for 0. check: called with the folder and the output;
    returns the fault or None. short: whether it is in the short campaign. seconds: the longest time on an idle machine.
    nobody: whether to run without root's rights. disk: the greatest size of a file in bytes, as on a full disk.
    """

    area: str
    name: str
    run: Callable[[Path], int | None]
    expect: str = ERROR
    check: Callable[[Path, str], str | None] | None = None
    short: bool = True
    seconds: float = 60
    nobody: bool = False
    disk: int | None = None


@dataclass(frozen=True)
class Ended:
    """The end of a process: its exit status or uncaught exception, and its output."""

    status: int | None = None
    exception: str = ""
    hang: bool = False
    output: str = ""


class Process:
    """A forked child that runs a function, with limits of memory and time (seconds on an idle machine)."""

    def __init__(self, run: Callable[[], int | None], *, seconds: float, nobody: bool = False, disk: int | None = None):
        self.end = time.monotonic() + SLOW * seconds
        self.out, inner = os.pipe()
        self.answer, answer = FORK.Pipe(duplex=False)
        self.child = FORK.Process(target=_child, args=(run, inner, answer, nobody, disk))
        self.child.start()
        os.close(inner)
        answer.close()
        os.set_blocking(self.out, False)
        self.output = b""

    def poll(self) -> Ended | None:
        """Return the end of the process, or None if it is running."""
        self._read()
        hang = self.child.exitcode is None
        if hang:
            if time.monotonic() < self.end:
                return None
            self.child.kill()
            self.child.join()
        self._read()
        os.close(self.out)
        output = self.output.decode("utf-8", "replace")
        if hang:
            return Ended(hang=True, output=output)
        try:
            return Ended(**self.answer.recv(), output=output)
        except EOFError:  # it was killed
            return Ended(status=self.child.exitcode, output=output)

    def wait(self) -> Ended:
        while (ended := self.poll()) is None:
            time.sleep(0.005)
        return ended

    def _read(self) -> None:
        try:
            while part := os.read(self.out, 1 << 16):
                self.output += part
        except BlockingIOError:
            pass


def _child(run: Callable[[], int | None], out: int, answer, nobody: bool, disk: int | None) -> None:
    outcome: dict = {}
    try:
        for target in (1, 2):
            os.dup2(out, target)
        # New files, since the parent's may be buffered, or pytest's.
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, encoding="utf-8", closefd=False) for n in (1, 2))
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if disk is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (disk, disk))
        if nobody and os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        outcome["status"] = run() or 0
    except SystemExit as error:
        outcome["status"] = error.code
    except BaseException as error:
        traceback.print_exc()
        outcome["exception"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    answer.send(outcome)


def signalled(run: Callable[[], int | None], number: int, module, name: str, call: int) -> Ended:
    """Run a function in a process that gets signal `number` in the `call`-th call of module.name; return its end."""

    def go() -> int | None:
        whole, calls = getattr(module, name), itertools.count(1)

        def counted(*arguments, **more):
            if next(calls) == call:
                os.kill(os.getpid(), number)
            return whole(*arguments, **more)

        setattr(module, name, counted)
        return run()

    return Process(go, seconds=60).wait()


def judge(ended: Ended, expect: str) -> tuple[str, str]:
    """Return (the verdict, the line that explains it)."""
    lines = [line.strip() for line in ended.output.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if ended.hang:
        return "hang", last
    if ended.exception or "Traceback" in ended.output:
        return "traceback", ended.exception or last
    if ended.status == 0:
        return ("accepted" if expect == ERROR else "passed"), last
    errors = [line for line in lines if "error:" in line]
    if not errors:
        return "traceback", f"ended with {ended.status} and no error: {last}"
    if any(len(line) > LONGEST for line in lines):
        return "traceback", f"a line of {max(map(len, lines))} characters: {errors[0]}"
    return ("refused" if expect == WORKS else "passed"), errors[0]


def run_case(case: Case, folder: Path) -> Process:
    folder.mkdir()
    if case.nobody and os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    return Process(lambda: case.run(folder), seconds=case.seconds, nobody=case.nobody, disk=case.disk)


def run_all(cases: Iterable[Case], base: Path, jobs: int) -> Iterator[tuple[Case, str, str]]:
    """Run the cases, `jobs` at a time, in separate folders below `base`; yield (case, verdict, line) of each."""
    waiting, running = deque(enumerate(cases)), []
    while waiting or running:
        while waiting and len(running) < jobs:
            number, case = waiting.popleft()
            folder = base / f"{number:05d}"
            running.append((case, folder, run_case(case, folder)))
        for entry in list(running):
            case, folder, process = entry
            if (ended := process.poll()) is None:
                continue
            running.remove(entry)
            verdict, line = judge(ended, case.expect)
            if case.check and verdict in ("passed", "accepted") and (lost := case.check(folder, ended.output)):
                verdict, line = "lost", lost
            yield case, verdict, line
            for root, folders, _ in os.walk(folder):
                for name in folders:
                    path = Path(root, name)
                    if not path.is_symlink():
                        path.chmod(0o755)
            shutil.rmtree(folder)
        time.sleep(0.003)
