"""Store accepted events in an append-only log, which outlives the process.

A line a record: the CRC-32 of its text in hex, a space, and the text, which is JSON:

    {"users": [...], "items": [...], "timestamps": [...], "actions": [...] or null}     events, in original ids
    {"forget": user}                                                                    the mark of a deleted user

A mark deletes all events of the user before it, those of the run's data included; later events count. `compact` removes
such events from the file. The last mark of each user stays in it, since the run's data still hold the user's events.

A record is in the file before its request is answered, so that a kill of the process loses none; with fsync it is on
the disk, so that a power cut loses none either. An incomplete last line, left by a kill, is cut off.

Two locks protect the log: one on the file, one on `.NAME.lock` in its folder, which stays if the file is renamed.
"""

import fcntl
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from data.atomic import replace_file, sweep, sync
from data.types import shown
from serving.errors import RequestError, ServingError

COLUMNS = {"users", "items", "timestamps", "actions"}
MARK = b'{"forget":'
TOGETHER = 2**24  # bytes of lines that are parsed together


class LogError(ServingError):
    """A log that cannot be opened, or is damaged."""


class NotStored(RequestError):
    """Events that could not be written into the log, and were not accepted."""


class EventLog:
    """The log in the file `path`, open for this process alone. Not safe for threads.

    forgotten   each deleted user, and the number of the line of the user's last mark
    stale       events in the file of users who were deleted later, as `events` counted them
    left_out    users some of whose events the run does not know; set by `replay`
    """

    def __init__(self, path: Path, fsync: bool = True):
        self.path, self.fsync = path, fsync
        self.left_out: set[str] = set()
        self.stale = 0
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
                self._scan()
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

    def _scan(self) -> None:
        """Cut off an incomplete last line, count the lines, and read the marks."""
        self.forgotten: dict[str, int] = {}
        self.size = self._lines = 0
        for lines in self._read():
            for number, line in enumerate(lines, self._lines + 1):
                if line.startswith(MARK, 9) and (records := _parsed([line])):
                    self.forgotten[records[0]["forget"]] = number
            complete = len(lines) - (not lines[-1].endswith(b"\n"))
            self._lines += complete
            self.size += sum(map(len, lines[:complete]))
        if os.fstat(self._file).st_size > self.size:
            os.ftruncate(self._file, self.size)

    def _read(self) -> Iterator[list[bytes]]:
        """Yield all lines, many at a time."""
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            while lines := file.readlines(TOGETHER):
                yield lines

    def _records(self) -> Iterator[tuple[int, list[bytes], list[dict]]]:
        """Yield (the number of the first line, lines, their records), many lines at a time; LogError if damaged."""
        first = 1
        for lines in self._read():
            records = _parsed(lines)
            if records is None:
                wrong = next(number for number, line in enumerate(lines, first) if _parsed([line]) is None)
                raise LogError(f"{shown(self.path, 200)}: line {wrong} is damaged")
            yield first, lines, records
            first += len(lines)

    def _remaining(self, number: int, record: dict) -> dict:
        """Return the record of line `number` without the events of users who were deleted later."""
        if "forget" in record:
            return record if self.forgotten[record["forget"]] == number else {}
        users = record["users"]
        stay = [place for place, user in enumerate(users) if self.forgotten.get(user, 0) < number]
        if len(stay) == len(users):
            return record
        return {name: x and [x[place] for place in stay] for name, x in record.items()} if stay else {}

    def events(self) -> Iterator[list[dict]]:
        """Yield the records of events, many at a time, without events of users who were deleted later.

        LogError for a damaged line.
        """
        self.stale = 0
        for first, _, records in self._records():
            if self.forgotten:
                remaining = [self._remaining(number, record) for number, record in enumerate(records, first)]
                self.stale += _count(records) - _count(remaining)
                records = remaining
            yield [record for record in records if "users" in record]

    def append(self, records: list[dict]) -> None:
        """Write records, all of them or none; NotStored if they cannot be written."""
        if not records:
            return
        try:
            self._write(b"".join(map(_line, records)))
        except NotStored as fault:
            if str(fault) != self._reported:
                logging.getLogger("hstu_sparse.serve").error("%s: %s", shown(self.path, 200), fault)
            self._reported = str(fault)
            raise
        self._reported = ""
        for number, record in enumerate(records, self._lines + 1):
            if "forget" in record:
                self.forgotten[record["forget"]] = number
        self._lines += len(records)

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
        """Remove the stale events, which `events` met, from the file, with its mode and owner as they are.

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
                            out.write(line if remaining is record else _line(remaining))
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
        self._file, self.stale = file, 0
        self._scan()

    def close(self) -> None:
        self._files.close()


def _count(records: list[dict]) -> int:
    """Return the number of events in records."""
    return sum(len(record["users"]) for record in records if "users" in record)


def _line(record: dict) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parsed(lines: list[bytes]) -> list[dict] | None:
    """Return the records of lines; None if one is damaged."""
    texts = [line[9:-1] for line in lines]
    if any(line[:9] != b"%08x " % zlib.crc32(text) for line, text in zip(lines, texts)):
        return None
    try:
        records = json.loads(b"[%s]" % b",".join(texts))  # faster than one by one
        return records if len(records) == len(lines) and all(map(_valid, records)) else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _valid(record: dict) -> bool:
    """Return whether a record is a mark, or has columns of one length."""
    if record.keys() != COLUMNS:
        return record.keys() == {"forget"}
    count, actions = len(record["users"]), record["actions"]
    return len(record["items"]) == len(record["timestamps"]) == count and (actions is None or len(actions) == count)
