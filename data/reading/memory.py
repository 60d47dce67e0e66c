"""Check the available memory before reading, since libraries end the process when memory runs out."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

from data.types import DataError


def available_memory() -> int | None:
    """Return the bytes that this process can allocate; None if unknown.

    The limits are those of the machine, of its control group and of `ulimit -v`.
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
    """Raise DataError if this process cannot allocate `size` bytes; subject: the beginning of the message."""
    available = available_memory()
    if available is not None and size > available:
        raise DataError(f"{subject} need some {size / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are left")
