"""Prepare a process's standard files and environment variables before libraries are imported."""

import os
from collections.abc import Callable
from typing import NoReturn

# Variables with numbers of threads. polars panics on a bad value, OpenMP may ignore it.
THREADS = ("POLARS_MAX_THREADS", "OMP_NUM_THREADS")
MOST_THREADS = 1024


def open_standard_files() -> None:
    """Open /dev/null in place of a closed standard input, output or error.

    Otherwise a file of the run would get its descriptor, and the output of libraries would be written into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free


def wait_asleep() -> None:
    """Let threads of GNU OpenMP that wait for one another sleep after microseconds, unless the environment sets this.

    By default they spin for milliseconds. On two cores, one of which another program keeps busy, training then takes
    ten times as long; on idle cores there is no difference (`train.py configs/synthetic-hstu.yaml train.epochs=3`).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def check_environment(leave: Callable[[int, str], NoReturn]) -> None:
    """Exit with a one-line error if a library cannot be imported with the values of the environment.

    leave: called with (status, message); prints the message and exits.
    """
    for name in THREADS:
        value = os.environ.get(name, "").strip() or "1"
        if not all(part.strip().isdecimal() and 1 <= int(part) <= MOST_THREADS for part in value.split(",")):
            leave(2, f"error: {name} in the environment: expected 1 to {MOST_THREADS:,}, got {value!r}\n")
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        leave(1, "error: torch is not installed in this Python; run `make setup`, then `source .venv/bin/activate`\n")
    except (ImportError, ValueError) as error:  # a missing library, or an environment variable such as TORCH_LOGS
        leave(2, f"error: torch cannot be imported: {' '.join(str(error).split())[:200]}\n")
