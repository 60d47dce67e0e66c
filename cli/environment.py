"""Look at what a process was started with, before libraries are imported: its standard files, and its environment."""

import os
from collections.abc import Callable
from typing import NoReturn

# Numbers of threads that polars or OpenMP would refuse with a panic, a message of their own or silently.
THREADS = ("POLARS_MAX_THREADS", "OMP_NUM_THREADS")
MOST_THREADS = 1024


def open_standard_files() -> None:
    """Open /dev/null where standard input, output or errors are closed: a file of the run would get their number, and
    what libraries print would be written into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free


def check_environment(leave: Callable[[int, str], NoReturn]) -> None:
    """Exit with one line of error if the environment has a value with which a library cannot start.

    leave: prints a message and exits with a status.
    """
    for name in THREADS:
        value = os.environ.get(name, "").strip() or "1"
        if not all(part.strip().isdecimal() and 1 <= int(part) <= MOST_THREADS for part in value.split(",")):
            leave(2, f"error: {name} in the environment: expected 1 to {MOST_THREADS:,}, got {value!r}\n")
    try:
        import torch  # noqa: F401
    except ImportError:
        leave(1, "error: torch is not installed in this Python; run `make setup`, then `source .venv/bin/activate`\n")
    except ValueError as error:  # an environment variable such as TORCH_LOGS
        leave(2, f"error: torch cannot be imported: {' '.join(str(error).split())[:200]}\n")
