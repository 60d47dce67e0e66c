"""Report the progress of a preparation, and end it when it is interrupted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
EVERY = 5.0  # seconds between two lines about one stage
PATIENCE = 0.3  # seconds that an interrupted stage gets to end


class Interrupted(BaseException):
    """Ends the work of an interrupted preparation."""


class Progress:
    """Report the stage of a preparation to a function every EVERY seconds. An interrupted preparation ends at its next
    call of `stage`.
    """

    def __init__(self, tell: Callable[[str], None] | None = None):
        self.tell = tell
        self.ended = False
        self._stage, self._since, self._told = "", time.monotonic(), time.monotonic()

    def stage(self, name: str) -> None:
        """Begin a stage (`reading x.csv`, `sorting 100 events`, `writing the cache`)."""
        if self.ended:
            raise Interrupted
        self._stage, self._since = name, time.monotonic()

    def wait(self) -> None:
        """Report the stage if it is time; called now and then by the waiting thread."""
        now = time.monotonic()
        if self.tell and now - self._told >= EVERY:
            self._told = now
            self.tell(f"{self._stage}, {now - self._since:.0f} s")


def interruptible(work: Callable[[], Result], progress: Progress, clean: Callable[[], None]) -> Result:
    """Run work() beside the main thread, so that Ctrl-C ends it within a second even inside a long library call.

    After an interrupt the work ends at its next stage; `clean` then removes its unfinished files. Outside the main
    thread, which alone receives interrupts, work() is called directly.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            finished.set()

    # The main thread waits for an event, because a join that Ctrl-C interrupts marks the thread as ended (Python 3.11).
    finished = threading.Event()
    thread = threading.Thread(target=run, name="preparation", daemon=True)
    try:
        thread.start()
        while not finished.wait(0.1):
            progress.wait()
    except BaseException:
        progress.ended = True
        finished.wait(PATIENCE)
        clean()
        raise
    if errors:
        raise errors[0]
    return results[0]
