"""Read the records of an event log.

Each record is a line: the CRC-32 of its text in hex, a space, and the text, which is JSON:

    {"users": [...], "items": [...], "timestamps": [...], "actions": [...] or null}     events, in original ids
        "ids": [...] in addition, if clients gave ids to some of them: text or null
    {"forget": user}                                                                    the mark of a deleted user
    {"list": name, "items": [...] or null}                          a list of items for filters, or its deletion
    {"segment": number}                       the first line of each file after the log's first: its number, from 1
    {"new_items": [...], "features": {name: [...]}}                 added items, with a value for each feature
    {"user": user, "features": {name: value}}                       the features of a user, in place of earlier ones

The action of an event with features is `serving.contexts.packed` of its action and features. A mark deletes all earlier
events and features of the user, including events of the run's data; later ones remain.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from data.types import shown
from serving.errors import ServingError
from serving.http.event_columns import Builder, EventColumns
from serving.http.event_ids import EventIds

COLUMNS = {"users", "items", "timestamps", "actions"}
MARKS = b'{"forget":', b'{"list":', b'{"segment":', b'{"new_items":', b'{"user":'
TOGETHER = 2**24  # bytes of lines that are parsed together


class LogError(ServingError):
    """A log that cannot be opened or is damaged."""


class LogReader:
    """The records of a log: the first `size` bytes of the open file `file`, whose lines follow the older segments.

    older: functions that load the segments, the oldest first, see `Segments.opened`; files: resources to close with the
    reader. Not thread-safe.

    number      the number of the file of lines
    forgotten   deleted user -> number of the line of the user's last mark, 0 if the mark is in a segment
    listed      name of a list -> number of the line of its last record
    lists       name of a list -> items; set by `events`
    new_items   number of a line -> record of added items
    described   user -> (number of the line of the last features, these features)
    ids         the ids of events; set by `parts`
    stale       the number of events of users who were deleted later; set by `parts`
    replaced    the number of records of lists and features that later records replace or delete
    left_out    users who have events that the run does not know; set by `replay`
    """

    def __init__(
        self,
        path: Path,
        file: int,
        size: int,
        older: Sequence[Callable[[], EventColumns]] = (),
        files: ExitStack | None = None,
        together: int | None = None,
    ):
        self.path, self._file, self.size, self._older = path, file, size, older
        self._files, self._together = files or ExitStack(), together
        self.left_out: set[str] = set()
        self.lists: dict[str, list] = {}
        self.ids = EventIds()
        self._stale_lines = self._stale_older = 0
        self._scan()

    @property
    def stale(self) -> int:
        return self._stale_lines + self._stale_older

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._file)
        self._files.close()

    def _scan(self) -> None:
        """Count the complete lines and their bytes, and read all records except events."""
        self.forgotten: dict[str, int] = {}
        self.listed: dict[str, int] = {}
        self.new_items: dict[int, dict] = {}
        self.described: dict[str, tuple[int, dict]] = {}
        self._lines = self.replaced = size = 0
        self.number = 1
        for lines in self._read():
            for number, line in enumerate(lines, self._lines + 1):
                if line.startswith(MARKS, 9) and (records := _parsed([line])):
                    self._note(records[0], number)
            complete = len(lines) - (not lines[-1].endswith(b"\n"))
            self._lines += complete
            size += sum(map(len, lines[:complete]))
        self.size = size

    def _note(self, record: dict, number: int) -> None:
        """Update the attributes for a record that has no events."""
        if "forget" in record:
            self.forgotten[record["forget"]] = number
            self.replaced += self.described.pop(record["forget"], None) is not None
        elif "user" in record:
            self.replaced += record["user"] in self.described
            self.described[record["user"]] = number, record["features"]
        elif "list" in record:
            self.replaced += record["list"] in self.listed
            self.listed[record["list"]] = number
        elif "segment" in record:
            self.number = record["segment"]
        elif "new_items" in record:
            self.new_items[number] = record

    def _read(self) -> Iterator[list[bytes]]:
        """Yield the lines of the first `size` bytes, many at a time."""
        together = self._together or TOGETHER
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            left = self.size
            while left > 0 and (lines := file.readlines(max(1, min(together, left) - 1))):
                left -= sum(map(len, lines))
                yield lines

    def _records(self) -> Iterator[tuple[int, list[bytes], list[dict]]]:
        """Yield (the number of the first line, lines, their records), many at a time; raise LogError if damaged."""
        first = 1
        for lines in self._read():
            records = _parsed(lines)
            if records is None:
                wrong = next(number for number, line in enumerate(lines, first) if _parsed([line]) is None)
                raise LogError(f"{shown(self.path, 200)}: line {wrong} is damaged")
            yield first, lines, records
            first += len(lines)

    def _remaining(self, number: int, record: dict) -> dict:
        """Return what a compacted log contains of the record of line `number`; {} if nothing remains."""
        if "forget" in record:
            return record if self.forgotten[record["forget"]] == number else {}
        if "list" in record:
            return record if self.listed[record["list"]] == number else {}
        if "user" in record:
            return record if self.described.get(record["user"], (0,))[0] == number else {}
        if "users" not in record:
            return record
        users = record["users"]
        stay = [place for place, user in enumerate(users) if self.forgotten.get(user, 0) < number]
        if len(stay) == len(users):
            return record
        return {name: x and [x[place] for place in stay] for name, x in record.items()} if stay else {}

    def parts(self) -> Iterator[EventColumns]:
        """Yield all events, the oldest first, except those of users who were deleted later.

        Raises LogError for a damaged segment or line.
        """
        deleted, parts = self.forgotten_in_lines, []
        self._stale_older = 0
        for load in reversed(self._older):
            part = load()
            remaining = part.without(deleted)
            self._stale_older += part.num_events - remaining.num_events
            deleted |= part.deleted
            parts.append(remaining)
        self.forgotten = dict.fromkeys(deleted, 0) | self.forgotten
        while parts:
            self.ids.add_stored(parts[-1])
            yield parts.pop()
        yield self.lines()

    @property
    def forgotten_in_lines(self) -> set[str]:
        """The deleted users whose last mark is in the lines, so that it deletes their events in segments."""
        return {user for user, number in self.forgotten.items() if number}

    def lines(self) -> EventColumns:
        """Return the events of the lines, without those of segments."""
        builder = Builder()
        for records in self.events():
            builder.add_records(records)
        return builder.build(frozenset(self.forgotten))

    def events(self) -> Iterator[list[dict]]:
        """Yield the records of events in the lines, many at a time, except events of users who were deleted later.

        Raises LogError for a damaged line.
        """
        self._stale_lines, self.lists = 0, {}
        for first, _, records in self._records():
            if self.forgotten or self.listed or self.described:
                remaining = [self._remaining(number, record) for number, record in enumerate(records, first)]
                self._stale_lines += _count(records) - _count(remaining)
                records = remaining
            for record in records:
                if "ids" in record:
                    self.ids.add(record["users"], record["ids"])
                if "list" in record and record["items"] is not None:
                    self.lists[record["list"]] = record["items"]
            yield [record for record in records if "users" in record]

    def further(self, size: int) -> list[dict]:
        """Return the records after those read so far, in order, up to `size` bytes."""
        content = os.pread(self._file, size - self.size, self.size)
        lines = content.splitlines(keepends=True)
        records = _parsed(lines)
        if records is None or len(content) < size - self.size:
            raise LogError(f"{shown(self.path, 200)}: damaged after line {self._lines}")
        self._noted(records)
        self.size = size
        return records

    def _noted(self, records: list[dict]) -> None:
        """Count the lines of new records, and update the attributes."""
        for number, record in enumerate(records, self._lines + 1):
            self._note(record, number)
        self._lines += len(records)


def _count(records: list[dict]) -> int:
    """Return the number of events in records."""
    return sum(len(record["users"]) for record in records if "users" in record)


def line_of(record: dict) -> bytes:
    """Return the line of a record."""
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def content_of(line: bytes) -> dict:
    """Return the object in a line of the log's format, {} if the line is damaged."""
    text = line[9:-1]
    with suppress(ValueError, RecursionError):
        content = json.loads(text) if line == b"%08x %s\n" % (zlib.crc32(text), text) else None
        if isinstance(content, dict):
            return content
    return {}


def _parsed(lines: list[bytes]) -> list[dict] | None:
    """Parse lines; return None if one is damaged."""
    texts = [line[9:-1] for line in lines]
    if any(line[:9] != b"%08x " % zlib.crc32(text) for line, text in zip(lines, texts)):
        return None
    try:
        records = json.loads(b"[%s]" % b",".join(texts))  # faster than parsing each line
        return records if len(records) == len(lines) and all(map(_valid, records)) else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _valid(record: dict) -> bool:
    """Return whether a record has one of the forms of this module, with columns of the same length."""
    if record.keys() == {"new_items", "features"}:
        return all(len(column) == len(record["new_items"]) for column in record["features"].values())
    if record.keys() == {"user", "features"}:
        return isinstance(record["features"], dict)
    if record.keys() - {"ids"} != COLUMNS:
        return record.keys() in ({"forget"}, {"list", "items"}, {"segment"})
    count, actions = len(record["users"]), record["actions"]
    columns = [record["items"], record["timestamps"], *([] if actions is None else [actions])]
    return all(len(column) == count for column in (*columns, *([record["ids"]] if "ids" in record else [])))
