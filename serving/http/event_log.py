"""Store accepted events in an append-only log, which outlives the process.

New records are lines of the file. Once it is full, it becomes a segment (`segments.py`), in a thread, and the log goes
on in a new file, which begins with its number, the last list of each name, the last features of each user, and whatever
else is no event and no mark.

`compact` removes events and features of deleted users from all files, and all but the last list of each name and the
last features of each user. The last mark of each user stays in them, since the run's data still hold the user's events.

A record is in the file before its request is answered, so that a kill of the process loses none; with fsync it is on
the disk, so that a power cut loses none either. An incomplete last line, left by a kill, is cut off.

Two locks protect the log: one on the file, one on `.NAME.lock` in its folder, which stays if the file is renamed.
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
from serving.http.event_columns import Columns
from serving.http.log_reader import LogError, LogReader, line_of
from serving.http.segments import Segments, new_file

FULL = 2**23  # bytes of lines, after which a log goes on in a new file
# What a new file does not begin with: what becomes a segment, and lists and features, whose last ones are carried on.
NOT_CARRIED = b'{"users":', b'{"forget":', b'{"segment":', b'{"list":', b'{"user":'
PARSED_TOGETHER = 2**16  # bytes of lines that are parsed while a service answers; it waits for a millisecond
logger = logging.getLogger("hstu_sparse.serve")


class NotStored(RequestError):
    """Events that could not be written into the log, and were not accepted."""


class EventLog(LogReader):
    """The log in the file `path`, open for this process alone. Not safe for threads, but for `reader` and `size`."""

    def __init__(self, path: Path, fsync: bool = True):
        self.path, self.fsync = path, fsync
        self._reported = ""  # the last fault in the service's own log
        self._lock = threading.Lock()  # of the readers, whose file stays the log's
        self._readers = self._carried = 0  # number of open readers; bytes with which the file began
        self._sealing: threading.Thread | None = None
        with ExitStack() as files:
            try:
                if path.is_symlink() or (path.exists() and not path.is_file()):
                    raise LogError(f"{shown(path, 200)}: a link or no regular file")
                # First the lock that stays: if another process has it, no new log is created in place of a renamed one.
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
        """Write the number of an empty file; raise LogError for a file that does not continue the segments."""
        expected = self.segments.number
        if not self._lines and expected > 1:
            self._write(line_of({"segment": expected}))
            self._scan()
        if self.number != expected:
            next(self._records())  # a damaged first line is an error
            raise LogError(
                f"{shown(self.path, 200)}: part {self.number} of a log, but {shown(self.segments.folder, 200)} "
                f"expects part {expected}: put back the files that belong together"
            )

    def _open(self, path: Path) -> int:
        """Open and lock a regular file, which is created if there is none."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise LogError(f"{shown(self.path, 200)}: another process is serving from it") from None
        return file

    def reader(self) -> LogReader:
        """Open what the log has now for reading, in any thread; until it is closed, the log goes on in its file."""
        with self._lock:
            file = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)
            older, files = self.segments.opened()
            files.callback(self._reader_closed)
            self._readers += 1
            return LogReader(self.path, file, self.size, older, files)

    def _reader_closed(self) -> None:
        with self._lock:
            self._readers -= 1

    def parts(self) -> Iterator[Columns]:
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
            with suppress(OSError):  # then `_check` refuses whatever follows, until a start
                os.ftruncate(self._file, self.size)
            if isinstance(error, NotStored):
                raise
            raise NotStored(f"the events could not be written: {error.strerror}") from None
        self.size += len(content)

    def _check(self, size: int) -> None:
        """Raise NotStored unless the path still names this file, with `size` bytes."""
        status = os.fstat(self._file)
        try:
            named = os.stat(self.path, follow_symlinks=False)
        except OSError:
            named = None
        if named is None or not os.path.samestat(named, status):
            raise NotStored("the event log was moved or deleted: put it back, or restart the service")
        if status.st_size != size:
            raise NotStored("the event log was changed by another program: restart the service")

    @property
    def _is_full(self) -> bool:
        return self.size - self._carried >= max(FULL, self._carried)

    @no_garbage_collection()
    def prepare(self) -> None:
        """Turn many lines into segments, which later starts read faster. NotStored if there is no room."""
        try:
            if self._is_full:
                self.roll()
            self.segments.seal()
        except OSError as error:
            raise NotStored(f"the segments of the event log cannot be written: {error.strerror}") from None

    def _go_on(self) -> None:
        """Go on in a new file, and turn the full one into a segment, in a thread."""
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
        """Go on in a new file, unless a reader is open; NotStored, with the log as it was, if that cannot be."""

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
            with self.segments.lock:  # so that it becomes no segment before the log goes on
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
        """Remove the stale events, which `parts` counted, and replaced lists from all files, with their mode and owner.

        NotStored, with the file as it was, if one cannot be rewritten; LogError for a damaged line.
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
        """Write a file with the log's mode and owner, put it into the log's place, and go on in it."""
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
