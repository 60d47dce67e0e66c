"""Read the records of a log of events.

A line a record: the CRC-32 of its text in hex, a space, and the text, which is JSON:

    {"users": [...], "items": [...], "timestamps": [...], "actions": [...] or null}     events, in original ids
        "ids": [...] in addition, if clients named some of them: text or null
    {"forget": user}                                                                    the mark of a deleted user
    {"list": name, "items": [...] or null}                          a list of items for filters, or its deletion
    {"segment": number}                       the first line of a file that is not the log's first: its number, from 1
    {"new_items": [...], "features": {name: [...]}}                 items that were added, with a value for each
    {"user": user, "features": {name: value}}                       the features of a user, in place of earlier ones

An event with features has `serving.contexts.packed` of its action and features as its action. A mark deletes all events
and features of the user before it, those of the run's data included; later ones count.
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
from serving.http.event_columns import Builder, Columns
from serving.http.event_ids import EventIds

COLUMNS = {"users", "items", "timestamps", "actions"}
MARKS = b'{"forget":', b'{"list":', b'{"segment":', b'{"new_items":', b'{"user":'
TOGETHER = 2**24  # bytes of lines that are parsed together


class LogError(ServingError):
    """A log that cannot be opened, or is damaged."""


class LogReader:
    """The records of a log: the lines of the open file `file`, up to `size` bytes, and the older ones in segments.

    older: functions that return the segments, the oldest first, as `Segments.opened` does; files: what is closed with
    the reader. Not safe for threads.

    number      of the file of lines
    forgotten   each deleted user, and the number of the line of the user's last mark, 0 for a mark in a segment
    listed      each named list, and the number of the line of its last record
    lists       the items of each named list, as `events` read them
    new_items   the records of items that were added, by the numbers of their lines
    described   the users with features: the number of the line of the last ones, and these
    ids         the ids of events, as `parts` read them
    stale       events in the files of users who were deleted later, as `parts` counted them
    replaced    records of lists and features in the file that later ones replace or delete
    left_out    users some of whose events the run does not know; set by `replay`
    """

    def __init__(
        self,
        path: Path,
        file: int,
        size: int,
        older: Sequence[Callable[[], Columns]] = (),
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
        """Count the complete lines and their bytes, and read the marks."""
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
        """Note the line of a mark or a list, and items that were added."""
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
        """Return the record of line `number` without the events of users who were deleted later, without a list that
        was replaced.
        """
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

    def parts(self) -> Iterator[Columns]:
        """Yield all events, the oldest first, without those of users who were deleted later.

        LogError for a damaged segment or line.
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
        """The deleted users whose mark is in the lines: of these the segments' events do not count."""
        return {user for user, number in self.forgotten.items() if number}

    def lines(self) -> Columns:
        """Return the events of the lines alone."""
        builder = Builder()
        for records in self.events():
            builder.add_records(records)
        return builder.build(frozenset(self.forgotten))

    def events(self) -> Iterator[list[dict]]:
        """Yield the records of events in the lines, many at a time, without events of users who were deleted later.

        LogError for a damaged line.
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
        """Return the records behind those that were read, in their order, up to `size` bytes."""
        content = os.pread(self._file, size - self.size, self.size)
        lines = content.splitlines(keepends=True)
        records = _parsed(lines)
        if records is None or len(content) < size - self.size:
            raise LogError(f"{shown(self.path, 200)}: damaged behind line {self._lines}")
        self._noted(records)
        self.size = size
        return records

    def _noted(self, records: list[dict]) -> None:
        """Count the lines of new records, and note marks and lists."""
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
    """Return the object in a line of the log's form, an empty one if the line is damaged."""
    text = line[9:-1]
    with suppress(ValueError, RecursionError):
        content = json.loads(text) if line == b"%08x %s\n" % (zlib.crc32(text), text) else None
        if isinstance(content, dict):
            return content
    return {}


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
    """Return whether a record is a mark, a list, a number, or has columns of one length."""
    if record.keys() == {"new_items", "features"}:
        return all(len(column) == len(record["new_items"]) for column in record["features"].values())
    if record.keys() == {"user", "features"}:
        return isinstance(record["features"], dict)
    if record.keys() - {"ids"} != COLUMNS:
        return record.keys() in ({"forget"}, {"list", "items"}, {"segment"})
    count, actions = len(record["users"]), record["actions"]
    columns = [record["items"], record["timestamps"], *([] if actions is None else [actions])]
    return all(len(column) == count for column in (*columns, *([record["ids"]] if "ids" in record else [])))
