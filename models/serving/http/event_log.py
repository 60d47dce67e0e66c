"""Store accepted events in an append-only log, which outlives the process.

A line a record: the CRC-32 of its text in hex, a space, and the text, which is JSON:

    {"users": [...], "items": [...], "timestamps": [...], "actions": [...] or null}     events, in original ids
    {"forget": user}                                                                    a user who was forgotten

A record is in the file before its request is answered, so that a kill of the process loses none; with fsync it is on
the disk, so that a fall of the machine loses none either. What a kill left half written at the end is cut off.
"""

import fcntl
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from data.atomic import replace_file
from data.types import shown
from models.serving.errors import RequestError, ServingError


class LogError(ServingError):
    """A log that cannot be opened, or is damaged."""


class NotStored(RequestError):
    """Events that could not be written into the log, and were not accepted."""


class EventLog:
    """The log in the file `path`, open for this process alone. Not safe for threads."""

    def __init__(self, path: Path, fsync: bool = True):
        self.path, self.fsync = path, fsync
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise LogError(f"{shown(path, 200)}: cannot be opened: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise LogError(f"{shown(path, 200)}: another process is serving from it") from None
        self.size = os.fstat(self._file).st_size

    def replay(self) -> Iterator[dict]:
        """Yield all records; a torn one at the end is cut off. LogError for a damaged one before it."""
        good = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                record = _parsed(line)
                if record is None:
                    # Only the last write can be torn; a whole line that is wrong was damaged later.
                    if line.endswith(b"\n"):
                        raise LogError(f"{shown(self.path, 200)}: line {number} is damaged")
                    break
                good += len(line)
                yield record
        if good < self.size:
            os.ftruncate(self._file, good)
            self.size = good

    def append(self, records: list[dict]) -> None:
        """Write records, all of them or none; NotStored if they cannot be written."""
        if not records:
            return
        content = b"".join(map(_line, records))
        try:
            done = 0
            while done < len(content):
                done += os.write(self._file, content[done:])
            if self.fsync:
                os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self.size)
            raise NotStored(f"the events could not be written: {error.strerror}") from None
        self.size += len(content)

    def close(self) -> None:
        os.close(self._file)


def without_forgotten(path: Path) -> int:
    """Remove the events of forgotten users from a log that no process uses; return the number removed."""
    log = EventLog(path)
    try:
        last = {record["forget"]: i for i, record in enumerate(log.replay()) if "forget" in record}
        if not last:
            return 0
        lines, gone = [], 0
        for i, record in enumerate(log.replay()):
            if "forget" in record:
                continue
            stay = [place for place, user in enumerate(record["users"]) if last.get(str(user), -1) < i]
            gone += len(record["users"]) - len(stay)
            if stay:
                parts = {name: None if x is None else [x[place] for place in stay] for name, x in record.items()}
                lines.append(_line(parts))
        replace_file(path, b"".join(lines))
        return gone
    finally:
        log.close()


def _line(record: dict) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parsed(line: bytes) -> dict | None:
    """Return the record of a line, None for one that is damaged or torn."""
    code, _, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or code != b"%08x" % zlib.crc32(text):
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
