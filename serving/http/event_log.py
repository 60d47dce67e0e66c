"""Store accepted events in an append-only log, which outlives the process.

`compact` removes events of deleted users from the file, and all but the last list of each name. The last mark of each
user stays in it, since the run's data still hold the user's events.

A record is in the file before its request is answered, so that a kill of the process loses none; with fsync it is on
the disk, so that a power cut loses none either. An incomplete last line, left by a kill, is cut off.

Two locks protect the log: one on the file, one on `.NAME.lock` in its folder, which stays if the file is renamed.
"""

import fcntl
import logging
import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

from data.atomic import replace_file, sweep, sync
from data.types import shown
from serving.errors import RequestError
from serving.http.log_reader import LogError, LogReader, line_of


class NotStored(RequestError):
    """Events that could not be written into the log, and were not accepted."""


class EventLog(LogReader):
    """The log in the file `path`, open for this process alone. Not safe for threads, but for `reader` and `size`."""

    def __init__(self, path: Path, fsync: bool = True):
        self.path, self.fsync = path, fsync
        self._reported = ""  # the last fault in the service's own log
        with ExitStack() as files:
            try:
                if path.is_symlink() or (path.exists() and not path.is_file()):
                    raise LogError(f"{shown(path, 200)}: a link or no regular file")
                # First the lock that stays: if another process has it, no new log is created in place of a renamed one.
                files.callback(os.close, self._open(path.with_name(f".{path.name}.lock")))
                self._file = self._open(path)
                files.callback(lambda: os.close(self._file))
                sweep(path.parent, path.name, older_than=0)
                sync(path.parent)
                super().__init__(path, self._file, os.fstat(self._file).st_size)
                if os.fstat(self._file).st_size > self.size:
                    os.ftruncate(self._file, self.size)  # an incomplete last line
            except OSError as error:
                name = error.filename or path
                raise LogError(f"{shown(name, 200)}: cannot be opened: {error.strerror}") from None
            self._files = files.pop_all()

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
        """Open what the log has now for reading, in any thread."""
        return LogReader(self.path, os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC), self.size)

    def append(self, records: list[dict]) -> None:
        """Write records, all of them or none; NotStored if they cannot be written."""
        if not records:
            return
        try:
            self._write(b"".join(map(line_of, records)))
        except NotStored as fault:
            if str(fault) != self._reported:
                logging.getLogger("hstu_sparse.serve").error("%s: %s", shown(self.path, 200), fault)
            self._reported = str(fault)
            raise
        self._reported = ""
        self._noted(records)

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

    def compact(self) -> None:
        """Remove the stale events, which `events` met, and replaced lists from the file, with its mode and owner.

        NotStored, with the file as it was, if it cannot be rewritten; LogError for a damaged line.
        """
        file = -1

        def write(temporary: Path) -> None:
            nonlocal file
            file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(file, "wb", closefd=False) as out:
                for first, lines, records in self._records():
                    for number, (line, record) in enumerate(zip(lines, records), first):
                        remaining = self._remaining(number, record)
                        if remaining:
                            out.write(line if remaining is record else line_of(remaining))
            old, new = os.fstat(self._file), os.fstat(file)
            if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
                os.fchown(file, old.st_uid, old.st_gid)
            shutil.copystat(self.path, temporary)

        try:
            self._check(self.size)
            replace_file(self.path, write)
        except BaseException as error:
            if file >= 0:
                os.close(file)
            if isinstance(error, OSError):
                raise NotStored(f"the event log cannot be rewritten: {error.strerror}") from None
            raise
        os.close(self._file)
        self._file, self.stale, self.size = file, 0, os.fstat(file).st_size
        self._scan()

    def close(self) -> None:
        self._files.close()
