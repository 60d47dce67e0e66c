"""SIGINT and SIGTERM: they end what goes on at once, or are noted where it must come to a good end first."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 1.0  # seconds that a call into a library may go on after a signal


class Stopped(BaseException):
    """A signal came. Not an Exception: what mends errors lets it through."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupts:
    """Within `with Interrupts() as interrupts`, a signal raises Stopped in the main thread.

    A library that does not come back to Python within a second after it is left where it is and the process ends:
    files are written whole or not at all, so that nothing is lost. Within `noted()` a signal only sets `signal`. A
    second signal ends the process at once, always.

    stage: what is going on, and what became of it, for the line that tells of the stop: `Stopped while {stage}`.
    """

    def __init__(self):
        self.signal, self.stage = 0, "starting"
        self._noting = False

    def __enter__(self) -> "Interrupts":
        self._out, self._in = os.pipe()
        os.set_blocking(self._in, False)
        self._done, self._heard = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._done.set()
        os.write(self._in, b"\0")  # ends the thread's read
        self._thread.join()
        for handle in (self._in, self._out):
            os.close(handle)

    @contextmanager
    def noted(self) -> Iterator[None]:
        self._noting = True
        try:
            yield
        finally:
            self._noting = False
        self.check()

    def check(self) -> None:
        """Raises Stopped when a signal was noted."""
        if self.signal:
            raise Stopped(self.signal)

    def _hear(self, number: int, frame) -> None:
        """In the main thread, between two steps of Python."""
        self._heard.set()
        self.signal = number
        if not self._noting:
            raise Stopped(number)

    def _watch(self) -> None:
        """In a thread: sees a signal even while the main thread is in a library."""
        first = True
        while True:
            number = os.read(self._out, 1)[0]
            if self._done.is_set():
                return
            if number not in SIGNALS:
                continue
            if not first:
                os._exit(128 + number)
            first = False
            if not self._noting and not self._heard.wait(PATIENCE) and not self._done.is_set():
                with suppress(OSError):
                    print(f"\nStopped while {self.stage}", file=sys.stderr, flush=True)
                os._exit(128 + number)
