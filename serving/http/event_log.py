"""Store accepted events in an append-only log file.

Each record is a line, see `log_reader.py`. When the file is full, the log continues in a new file, and a thread
converts the full one to a segment (`segments.py`). A new file begins with its number, the added items, the latest
list of each name and the latest features of each user.

`compact` removes the events and features of deleted users from all files, and lists and features that later records
replace. The last mark of each deleted user remains, since the run's data may still contain the user's events.

A record is in the file before its request is answered, so killing the process loses none; with fsync it is on the disk,
so a power cut loses none either. An incomplete last line, left by a killed process, is removed.

Two locks protect the log from other processes: one on the file, and one on `.NAME.lock` in the same folder, which
remains if the file is renamed.
"""

import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from data.atomic import sweep, sync, temporary_beside
from data.types import shown
from serving.errors import RequestError
from serving.histories import no_garbage_collection
from serving.http.event_columns import EventColumns
from serving.http.log_reader import LogError, LogReader, line_of
from serving.http.segments import Segments, new_file

FULL = 2**23  # bytes of lines after which the log continues in a new file
# Records that are not copied to a new file: segments store events and deletions, and of the records of a list or of a
# user's features only the latest is copied.
NOT_CARRIED = b'{"users":', b'{"forget":', b'{"segment":', b'{"list":', b'{"user":'
PARSED_TOGETHER = 2**16  # bytes of lines parsed at a time while requests are answered; it delays them by a millisecond
logger = logging.getLogger("hstu_sparse.serve")


class NotStored(RequestError):
    """Records that could not be written to the log; nothing was accepted."""


class EventLog(LogReader):
    """The log in the file `path`, locked by this process. Not thread-safe except for `reader` and `size`."""

    def __init__(self, path: Path, fsync: bool = True):
        self.path, self.fsync = path, fsync
        self._reported = ""  # the last error that was logged
        self._lock = threading.Lock()  # protects `_readers`: the log keeps its file while it has readers
        self._readers = self._carried = 0  # number of open readers; bytes copied when the file was created
        self._sealing: threading.Thread | None = None
        with ExitStack() as files:
            try:
                if path.is_symlink() or (path.exists() and not path.is_file()):
                    raise LogError(f"{shown(path, 200)}: expected a regular file")
                # Lock `.NAME.lock` first: it prevents a second log if another process still writes to a renamed file.
                files.callback(os.close, self._open(path.with_name(f".{path.name}.lock")))
                self.segments = Segments(path)
                self._file = self._open(path)
                files.callback(lambda: os.close(self._file))
                sweep(path.parent, path.name, older_than=0)
                sync(path.parent)
                super().__init__(path, self._file, os.fstat(self._file).st_size)
                if os.fstat(self._file).st_size > self.size:
                    os.ftruncate(self._file, self.size)  # an incomplete last line
                self._check_number()
            except OSError as error:
                name = error.filename or path
                raise LogError(f"{shown(name, 200)}: cannot be opened: {error.strerror}") from None
            self._files = files.pop_all()

    def _check_number(self) -> None:
        """Write the number into an empty file; raise LogError if the file does not continue the segments."""
        expected = self.segments.number
        if not self._lines and expected > 1:
            self._write(line_of({"segment": expected}))
            self._scan()
        if self.number != expected:
            next(self._records())  # a damaged first line is an error
            raise LogError(
                f"{shown(self.path, 200)}: expected part {expected} of the log after the segments in "
                f"{shown(self.segments.folder, 200)}, got part {self.number}: restore files that belong together"
            )

    def _open(self, path: Path) -> int:
        """Open and lock a regular file; create it if it does not exist."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if not isinstance(error, BlockingIOError):
                raise
            raise LogError(f"{shown(self.path, 200)}: another process is using this log") from None
        return file

    def reader(self) -> LogReader:
        """Open the current content for reading, in any thread; the log stays in its file until the reader is closed."""
        with self._lock:
            file = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)
            older, files = self.segments.opened()
            files.callback(self._reader_closed)
            self._readers += 1
            return LogReader(self.path, file, self.size, older, files)

    def _reader_closed(self) -> None:
        with self._lock:
            self._readers -= 1

    def parts(self) -> Iterator[EventColumns]:
        self._older, files = self.segments.opened()
        with files:
            yield from super().parts()

    def append(self, records: list[dict]) -> None:
        """Write records, all of them or none; NotStored if they cannot be written."""
        if not records:
            return
        try:
            self._write(b"".join(map(line_of, records)))
        except NotStored as fault:
            self._report(fault)
            raise
        self._reported = ""
        self._noted(records)
        if self._is_full:
            self._go_on()

    def _report(self, fault: Exception) -> None:
        if str(fault) != self._reported:
            logger.error("%s: %s", shown(self.path, 200), fault)
        self._reported = str(fault)

    def _write(self, content: bytes) -> None:
        self._check(self.size)
        try:
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
            if self.fsync:
                os.fsync(self._file)
            self._check(self.size + len(content))
        except (OSError, NotStored) as error:
            with suppress(OSError):  # if this fails, `_check` refuses all records until a restart
                os.ftruncate(self._file, self.size)
            if isinstance(error, NotStored):
                raise
            raise NotStored(f"the event log cannot be written: {error.strerror}") from None
        self.size += len(content)

    def _check(self, size: int) -> None:
        """Raise NotStored unless the path still refers to this file, with `size` bytes."""
        status = os.fstat(self._file)
        try:
            named = os.stat(self.path, follow_symlinks=False)
        except OSError:
            named = None
        if named is None or not os.path.samestat(named, status):
            raise NotStored("the event log was moved or deleted: restore it or restart the service")
        if status.st_size != size:
            raise NotStored("the event log was changed by another program: restart the service")

    @property
    def _is_full(self) -> bool:
        return self.size - self._carried >= max(FULL, self._carried)

    @no_garbage_collection()
    def prepare(self) -> None:
        """Convert lines to segments, which are faster to read at the next start; raise NotStored if this fails."""
        try:
            if self._is_full:
                self.roll()
            self.segments.seal()
        except OSError as error:
            raise NotStored(f"the segments of the event log cannot be written: {error.strerror}") from None

    def _go_on(self) -> None:
        """Continue in a new file; convert the full one to a segment in a thread."""
        try:
            self.roll()
        except NotStored as fault:
            self._report(fault)
            self._carried = self.size  # try again later
            return
        if self._sealing is None or not self._sealing.is_alive():
            self._sealing = threading.Thread(target=self._seal, name="segments", daemon=True)
            self._sealing.start()

    def _seal(self) -> None:
        try:
            self.segments.seal(PARSED_TOGETHER)
        except (OSError, LogError) as error:
            logger.error("%s: no segment could be written: %s", shown(self.path, 200), error)

    def roll(self) -> None:
        """Continue in a new file, unless a reader is open; raise NotStored, with the log unchanged, if this fails."""

        def write(out: BinaryIO) -> None:
            out.write(line_of({"segment": self.number + 1}))
            carried, first = {*self.listed.values(), *(number for number, _ in self.described.values())}, 1
            for lines in self._read():
                out.writelines(
                    line
                    for number, line in enumerate(lines, first)
                    if number in carried or not line.startswith(NOT_CARRIED, 9)
                )
                first += len(lines)

        def place(temporary: Path) -> None:
            self.segments.create()
            full = self.segments.lines(self.number)
            with self.segments.lock:  # the full file must not be converted before the log continues
                os.rename(self.path, full)
                try:
                    sync(full.parent)
                    sync(self.path.parent)
                    os.rename(temporary, self.path)
                except OSError:
                    os.rename(full, self.path)
                    raise

        with self._lock:
            if self._readers:
                return
            self._replace(write, place)
            self._carried = self.size

    def compact(self) -> None:
        """Remove the stale events that `parts` counted, and replaced lists and features, from all files.

        Files keep their mode and owner. Raises NotStored if a file cannot be rewritten, which then stays unchanged, and
        LogError for a damaged line.
        """

        def write(out: BinaryIO) -> None:
            for first, lines, records in self._records():
                for number, (line, record) in enumerate(zip(lines, records), first):
                    remaining = self._remaining(number, record)
                    if remaining:
                        out.write(line if remaining is record else line_of(remaining))

        if self._stale_lines or self.replaced:
            forgotten = self.forgotten
            self._replace(write, lambda temporary: os.replace(temporary, self.path))
            self._stale_lines = 0
            self.forgotten = dict.fromkeys(forgotten, 0) | self.forgotten
        if self._stale_older:
            try:
                self.segments.purge(self.forgotten_in_lines)
            except OSError as error:
                raise NotStored(f"the event log cannot be rewritten: {error.strerror}") from None
            self._stale_older = 0

    def _replace(self, write: Callable[[BinaryIO], None], place: Callable[[Path], None]) -> None:
        """Write a file with the log's mode and owner, put it in the place of the log, and continue in it."""
        temporary, file = temporary_beside(self.path), -1
        try:
            self._check(self.size)
            file = new_file(temporary, os.O_APPEND)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(file, "wb", closefd=False) as out:
                write(out)
            old, new = os.fstat(self._file), os.fstat(file)
            if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
                os.fchown(file, old.st_uid, old.st_gid)
            shutil.copystat(self.path, temporary)
            os.fsync(file)
            place(temporary)
            sync(self.path.parent)
        except BaseException as error:
            if file >= 0:
                os.close(file)
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise NotStored(f"the event log cannot be rewritten: {error.strerror}") from None
            raise
        os.close(self._file)
        self._file, self.size = file, os.fstat(file).st_size
        self._scan()

    def close(self) -> None:
        if self._sealing is not None:
            self._sealing.join()
        self._files.close()
