"""Report the progress of a preparation, and end it on an interrupt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
EVERY = 5.0  # seconds between two lines about one stage
PATIENCE = 0.3  # seconds to wait for the end of an interrupted stage


class Interrupted(BaseException):
    """Raised to end an interrupted preparation."""


class Progress:
    """Call `report` with the stage of a preparation every EVERY seconds.

    An interrupted preparation ends at its next call of `stage`.
    """

    def __init__(self, report: Callable[[str], None] | None = None):
        self.report = report
        self.ended = False
        self._stage, self._since, self._reported = "", time.monotonic(), time.monotonic()

    def stage(self, name: str) -> None:
        """Begin a stage, such as `reading x.csv` or `sorting 100 events`; Interrupted if the preparation must end."""
        if self.ended:
            raise Interrupted
        self._stage, self._since = name, time.monotonic()

    def wait(self) -> None:
        """Report the stage if it is time; the waiting thread calls this."""
        now = time.monotonic()
        if self.report and now - self._reported >= EVERY:
            self._reported = now
            self.report(f"{self._stage}, {now - self._since:.0f} s")


def interruptible(work: Callable[[], Result], progress: Progress, clean: Callable[[], None]) -> Result:
    """Run work() in another thread, so that Ctrl-C ends it within a second even inside a long library call.

    After an interrupt, the work ends at its next stage, and `clean` removes its unfinished files. If this is not called
    in the main thread, the only one that gets interrupts, work() is called directly.
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

    # The main thread waits for an event: in Python 3.11, a join interrupted by Ctrl-C marks the thread as ended.
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
