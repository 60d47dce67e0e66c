"""Check the available memory before reading: a library that runs out of memory ends the process."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

from data.types import DataError


def available_memory() -> int | None:
    """Return the bytes that this process can still allocate under the limits of the machine, its control group and
    `ulimit -v`; None if none of them is known.
    """
    limits = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10)
    with suppress(OSError, ValueError):
        most = int(Path("/sys/fs/cgroup/memory.max").read_text())
        limits.append(most - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    with suppress(OSError, ValueError):
        if limit != resource.RLIM_INFINITY:
            limits.append(limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize())
    return max(0, min(limits)) if limits else None


def require_memory(size: int, subject: str) -> None:
    """Raise DataError if `size` bytes are more than this process can allocate; `subject` begins the sentence."""
    available = available_memory()
    if available is not None and size > available:
        raise DataError(f"{subject} need some {size / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are left")
