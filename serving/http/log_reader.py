"""Read the records of a log of events.

A line a record: the CRC-32 of its text in hex, a space, and the text, which is JSON:

    {"users": [...], "items": [...], "timestamps": [...], "actions": [...] or null}     events, in original ids
        "ids": [...] in addition, if clients named some of them: text or null
    {"forget": user}                                                                    the mark of a deleted user
    {"list": name, "items": [...] or null}                          a list of items for filters, or its deletion

A mark deletes all events of the user before it, those of the run's data included; later events count.
"""

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from data.types import shown
from serving.errors import ServingError
from serving.http.event_ids import EventIds

COLUMNS = {"users", "items", "timestamps", "actions"}
MARKS = b'{"forget":', b'{"list":'
TOGETHER = 2**24  # bytes of lines that are parsed together


class LogError(ServingError):
    """A log that cannot be opened, or is damaged."""


class LogReader:
    """The records of a log, up to `size` bytes, in the open file `file`. Not safe for threads.

    forgotten   each deleted user, and the number of the line of the user's last mark
    listed      each named list, and the number of the line of its last record
    lists       the items of each named list, as `events` read them
    ids         the ids of events, as `events` read them
    stale       events in the file of users who were deleted later, as `events` counted them
    replaced    records of lists in the file that later ones replace
    left_out    users some of whose events the run does not know; set by `replay`
    """

    def __init__(self, path: Path, file: int, size: int):
        self.path, self._file, self.size = path, file, size
        self.left_out: set[str] = set()
        self.lists: dict[str, list] = {}
        self.ids = EventIds()
        self.stale = 0
        self._scan()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._file)

    def _scan(self) -> None:
        """Count the complete lines and their bytes, and read the marks."""
        self.forgotten: dict[str, int] = {}
        self.listed: dict[str, int] = {}
        self._lines = self.replaced = size = 0
        for lines in self._read():
            for number, line in enumerate(lines, self._lines + 1):
                if line.startswith(MARKS, 9) and (records := _parsed([line])):
                    self._note(records[0], number)
            complete = len(lines) - (not lines[-1].endswith(b"\n"))
            self._lines += complete
            size += sum(map(len, lines[:complete]))
        self.size = size

    def _note(self, record: dict, number: int) -> None:
        """Note the line of a mark or a list."""
        if "forget" in record:
            self.forgotten[record["forget"]] = number
        elif "list" in record:
            self.replaced += record["list"] in self.listed
            self.listed[record["list"]] = number

    def _read(self) -> Iterator[list[bytes]]:
        """Yield the lines of the first `size` bytes, many at a time."""
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            left = self.size
            while left > 0 and (lines := file.readlines(max(1, min(TOGETHER, left) - 1))):
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
        users = record["users"]
        stay = [place for place, user in enumerate(users) if self.forgotten.get(user, 0) < number]
        if len(stay) == len(users):
            return record
        return {name: x and [x[place] for place in stay] for name, x in record.items()} if stay else {}

    def events(self) -> Iterator[list[dict]]:
        """Yield the records of events, many at a time, without events of users who were deleted later.

        LogError for a damaged line.
        """
        self.stale, self.lists = 0, {}
        for first, _, records in self._records():
            if self.forgotten or self.listed:
                remaining = [self._remaining(number, record) for number, record in enumerate(records, first)]
                self.stale += _count(records) - _count(remaining)
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
    """Return whether a record is a mark, a list, or has columns of one length."""
    if record.keys() - {"ids"} != COLUMNS:
        return record.keys() in ({"forget"}, {"list", "items"})
    count, actions = len(record["users"]), record["actions"]
    columns = [record["items"], record["timestamps"], *([] if actions is None else [actions])]
    return all(len(column) == count for column in (*columns, *([record["ids"]] if "ids" in record else [])))
