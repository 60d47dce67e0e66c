"""What a preparation is doing, for those who wait for it, and its end when they no longer do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
EVERY = 5.0  # seconds between two lines about one stage
PATIENCE = 0.3  # seconds that an interrupted stage gets to end by itself


class Interrupted(BaseException):
    """Ends the work of a preparation that nobody waits for any more."""


class Progress:
    """Tells a function, if there is one, what stage a preparation is in, each EVERY seconds; `stage` also is where a
    preparation that was interrupted ends."""

    def __init__(self, tell: Callable[[str], None] | None = None):
        self.tell = tell
        self.ended = False
        self._stage, self._since, self._told = "", time.monotonic(), time.monotonic()

    def stage(self, what: str) -> None:
        """A stage begins (`reading x.csv`, `sorting 100 events`, `writing the cache`)."""
        if self.ended:
            raise Interrupted
        self._stage, self._since = what, time.monotonic()

    def wait(self) -> None:
        """Called now and then by whoever waits: tells the stage when it is time."""
        now = time.monotonic()
        if self.tell and now - self._told >= EVERY:
            self._told = now
            self.tell(f"{self._stage}, {now - self._since:.0f} s")


def interruptible(work: Callable[[], Result], progress: Progress, clean: Callable[[], None]) -> Result:
    """work(), beside the main thread, so that Ctrl-C ends it within a second though a library computes for longer.

    After an interrupt the work ends at its next stage; `clean` then removes what it may have left. Called from another
    thread, which gets no interrupts, it is work().
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
            done.set()

    # Waited for by an event: a join that Ctrl-C interrupts takes the thread for ended (Python 3.11).
    done = threading.Event()
    thread = threading.Thread(target=run, name="preparation", daemon=True)
    try:
        thread.start()
        while not done.wait(0.1):
            progress.wait()
    except BaseException:
        progress.ended = True
        done.wait(PATIENCE)
        clean()
        raise
    if errors:
        raise errors[0]
    return results[0]
