"""Handle SIGINT and SIGTERM: stop at once, or first finish what must not be interrupted."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 1.0  # seconds that a library call may take to return after a signal


class Stopped(BaseException):
    """Raised on a signal. It derives from BaseException, so that handlers of Exception do not catch it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def leave(number: int, frame) -> None:
    """Handle a signal before `Interrupts` is entered: print one line and end the process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun ends the other ranks when one fails, and reports it
        os.write(2, b"Stopped while starting\n")
    os._exit(128 + number)


class Interrupts:
    """Raise Stopped in the main thread on a signal within `with Interrupts() as interrupts`.

    If a library call does not return to Python within a second, the process ends; no file is lost, since files are
    written whole or not at all. Within `deferred()` a signal only sets `signal`, and Stopped is raised at the end. A
    second signal always ends the process at once.

    stage: the current work and its state, for the line that reports the stop: `Stopped while {stage}`.
    """

    def __init__(self):
        self.signal, self.stage = 0, "starting"
        self._deferring, self._done, self._handled = False, threading.Event(), threading.Event()

    def __enter__(self) -> "Interrupts":
        self._out, self._in = os.pipe()
        os.set_blocking(self._in, False)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            # Nothing is left to save: a signal now ends the process without a message.
            signal.signal(number, signal.SIG_DFL if handler is leave else handler)
        signal.set_wakeup_fd(self._wakeup)
        self._done.set()
        os.write(self._in, b"\0")  # ends the thread's read
        self._thread.join()
        for handle in (self._in, self._out):
            os.close(handle)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only note a signal within the `with` block, and raise Stopped at its end."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        self.check()

    def check(self) -> None:
        """Raise Stopped if a signal has arrived."""
        if self.signal:
            raise Stopped(self.signal)

    def _handle(self, number: int, frame) -> None:
        """Handle a signal in the main thread, between two bytecodes of Python."""
        self._handled.set()
        self.signal = number
        if not self._deferring:
            raise Stopped(number)

    def _watch(self) -> None:
        """Watch for signals in a thread, even while the main thread is inside a library."""
        first = True
        while True:
            number = os.read(self._out, 1)[0]
            if self._done.is_set():
                return
            if number not in SIGNALS:
                continue
            if not first:
                os._exit(128 + number)
            if not self._deferring and not self._handled.wait(PATIENCE) and not self._done.is_set():
                with suppress(OSError):
                    print(f"\nStopped while {self.stage}", file=sys.stderr, flush=True)
                os._exit(128 + number)
            first = False


@contextmanager
def keyboard_interrupts() -> Iterator[Interrupts]:
    """Yield Interrupts for a function that a notebook or another program calls.

    Ctrl-C raises KeyboardInterrupt, whose text is the stage that was interrupted; it never ends the process.
    """
    interrupts, before = Interrupts(), None
    if threading.current_thread() is threading.main_thread():  # only the main thread can handle signals
        before = signal.signal(signal.SIGINT, interrupts._handle)
    try:
        yield interrupts
    except Stopped:
        raise KeyboardInterrupt(f"Stopped while {interrupts.stage}") from None
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
