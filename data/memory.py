"""Whether there is memory for what is about to be read: a library that gets none ends the process."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

from .types import DataError


def available_memory() -> int | None:
    """Bytes that this process can still take: what the machine, its control group and `ulimit -v` leave; None where
    nothing says so."""
    left = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        left.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10)
    with suppress(OSError, ValueError):
        most = int(Path("/sys/fs/cgroup/memory.max").read_text())
        left.append(most - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    with suppress(OSError, ValueError):
        if limit != resource.RLIM_INFINITY:
            left.append(limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize())
    return max(0, min(left)) if left else None


def require_memory(size: int, what: str) -> None:
    """DataError where `size` bytes are more than this process can take; `what` begins the sentence."""
    available = available_memory()
    if available is not None and size > available:
        raise DataError(f"{what} need some {size / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are left")
