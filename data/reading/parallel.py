"""Run functions of polars and NumPy, which release the GIL, on several cores by threads.

The threads are daemons: an interrupted preparation does not wait for them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
CORES = min(4, len(os.sched_getaffinity(0)))  # more cores need more memory and are hardly faster


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item], threads: int = CORES) -> list[Result]:
    """Return work(item) for each item, `threads` at a time; the first error ends all threads and is raised."""
    numbered, lock = iter(enumerate(items)), threading.Lock()
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run() -> None:
        while not errors:
            try:
                with lock:
                    number, item = next(numbered)
            except StopIteration:
                return
            except BaseException as error:  # raised by the iterator of items
                errors.append(error)
                return
            try:
                results[number] = work(item)
            except BaseException as error:
                errors.append(error)

    workers = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(results))]


class Overlapped:
    """Run one function at a time in a thread, while the caller prepares the next function's arguments."""

    def __init__(self) -> None:
        self._worker: threading.Thread | None = None
        self._errors: list[BaseException] = []

    def __enter__(self) -> Overlapped:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Wait for the running function; raise its error unless another error is being raised."""
        if kind is None:
            self.finish()
        elif self._worker is not None:
            self._worker.join()

    def start(self, work: Callable[[], object]) -> None:
        """Wait for the running function, raise its error if it has one, and start `work`."""
        self.finish()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._errors.append(error)

        self._worker = threading.Thread(target=run, daemon=True)
        self._worker.start()

    def finish(self) -> None:
        """Wait for the running function; raise its error if it has one."""
        if self._worker is not None:
            self._worker.join()
            self._worker = None
        if self._errors:
            raise self._errors.pop()
