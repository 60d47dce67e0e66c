"""Print the programs' lines, tables, progress and errors, on a terminal or into a pipe or file.

All output goes through `terminal`. It escapes control characters and undecodable bytes, prints the user's names
without reading them as markup, and tolerates a closed pipe or a full disk.
"""

import errno
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import IO, cast

from rich import progress as rich
from rich.console import Console
from rich.table import Table

from data.types import shown

LONGEST = 100_000  # characters of a line
EVERY = 5.0  # seconds between two lines of progress without a terminal
# Loggers whose lines are shown.
NAMESPACES = ("experiments", "serving", "training", "models", "evaluation", "data", "hstu_sparse")


class Output:
    """Standard output as a file that escapes characters outside its encoding, and drops output after a write error.

    error: the write error, or None.
    """

    def __init__(self):
        self.error: OSError | None = None

    @property
    def encoding(self) -> str:
        """Standard output's encoding, or UTF-8."""
        return getattr(sys.stdout, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if sys.stdout is None:  # closed before the program began
            self.error = OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self.error is None:
            try:
                sys.stdout.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except OSError as error:
                self._end(error)
        return len(text)

    def flush(self) -> None:
        if self.error is None and sys.stdout is not None:
            try:
                sys.stdout.flush()
            except OSError as error:
                self._end(error)

    def isatty(self) -> bool:
        return sys.stdout is not None and sys.stdout.isatty()

    def fileno(self) -> int:
        return sys.stdout.fileno()

    def _end(self, error: OSError) -> None:
        self.error = error
        with suppress(OSError, ValueError):  # Python flushes its buffer when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Terminal:
    """The output to a terminal. quiet: print nothing but errors."""

    def __init__(self, quiet: bool = False):
        self.quiet, self.output = quiet, Output()
        self.live: rich.Progress | None = None
        self.console = Console(file=cast(IO[str], self.output), markup=False, emoji=False, highlight=False)

    def begin(self, quiet: bool = False) -> None:
        """Start the output of a program, and show the project's log lines from now on."""
        Terminal.__init__(self, quiet)
        for name in NAMESPACES:
            logger = logging.getLogger(name)
            logger.setLevel(logging.INFO)
            logger.propagate = False
            logger.handlers = [_Lines()]

    def say(self, text: object) -> None:
        """Print one line, never wrapped."""
        if not self.quiet:
            self.console.print(shown(text, LONGEST), soft_wrap=True)

    def table(self, table: Table) -> None:
        if not self.quiet:
            self.console.print(table)

    def fail(self, error: object) -> None:
        """Print `error: ...` on standard error, on as many lines as the error has."""
        lines = [shown(line, LONGEST) for line in str(error).split("\n")]
        with suppress(OSError):
            print("error: " + "\n".join(lines), file=sys.stderr, flush=True)

    def end(self, status: int) -> int:
        """Return the program's exit status: `status`, or 2 in place of 0 if standard output could not be written.

        A closed pipe (`| head -1`) is not an error.
        """
        self.output.flush()
        error = self.output.error
        if status or error is None or error.errno == errno.EPIPE:
            return status
        self.fail(f"standard output cannot be written: {error.strerror or error}; all files are complete")
        return 2

    @property
    def draws(self) -> bool:
        """Whether a bar can be drawn: on a terminal, and in a notebook where ipywidgets is installed."""
        return self.console.is_terminal or (self.console.is_jupyter and find_spec("ipywidgets") is not None)

    @contextmanager
    def bar(self, total: int, done: int = 0, *, unit: str = "batches") -> Iterator["Bar"]:
        """Show a bar on a terminal or in a notebook, else print a line each EVERY seconds."""
        bar = Bar(self, total, done, unit)
        first = self.live is None and self.draws and not self.quiet
        if first:
            text = rich.TextColumn("{task.description}"), rich.TextColumn("{task.fields[more]}")
            columns = text[0], rich.BarColumn(), text[1], rich.TimeRemainingColumn()
            # With redirect_stdout, sys.stdout would print to this console, which itself writes to sys.stdout.
            self.live = rich.Progress(
                *columns, console=self.console, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self.live.start()
        try:
            bar.begin()
            yield bar
        finally:
            bar.end()
            if first and self.live is not None:
                self.live.stop()
                self.live = None

    def track(self, batches: Iterable, total: int, what: str) -> Iterator:
        """Yield the batches, and show how many of `total` are done; what: the current work."""
        with self.bar(total) as bar:
            for done, batch in enumerate(batches):
                bar.show(done, what)
                yield batch


class _Lines(logging.Handler):
    """Print log records as lines of the terminal, errors on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            terminal.fail(record.getMessage())
            return
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        terminal.say(prefix + record.getMessage())


class Bar:
    """A progress bar. `show` may be called for each batch: it draws at most twice a second."""

    def __init__(self, terminal: Terminal, total: int, done: int, unit: str):
        self.terminal, self.total, self.first, self.unit = terminal, total, done, unit
        self.started = self.drawn = time.monotonic()
        self.live: rich.Progress | None = None

    def begin(self) -> None:
        self.live = self.terminal.live
        if self.live:
            self.task = self.live.add_task("", total=self.total, completed=self.first, more="")

    def end(self) -> None:
        if self.live:
            self.live.remove_task(self.task)

    def due(self) -> bool:
        """Return whether `show` would draw now: call this first if the arguments of `show` are costly."""
        return time.monotonic() - self.drawn >= (0.5 if self.live else EVERY)

    def show(self, done: int, what: str, more: str = "") -> None:
        """Show progress; done: a count; what: the current work; more: a text after the count."""
        if not self.due():
            return
        self.drawn = now = time.monotonic()
        if self.live:
            self.live.update(self.task, description=what, completed=done, more=more, refresh=True)
            return
        share = done / max(1, self.total)
        seconds_left = (now - self.started) * (self.total - done) / max(1, done - self.first)
        estimate = f", about {duration(seconds_left)} left" if done > self.first else ""
        line = f"{what}: {done:,} of {self.total:,} {self.unit} ({share:.0%}){estimate}"
        self.terminal.say(f"{line}  {more}" if more else line)


def duration(seconds: float) -> str:
    """Format seconds as `8.2 s`, `3:05 min` or `2:10:00 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes}:{remainder:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{remainder:02d} h"


terminal = Terminal()
