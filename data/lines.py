"""The rows of a text file before anybody parses them: each has as many fields as there are columns, or is named.

A parser may fill a short row and cut a long one in silence. Works on bytes, block by block; numpy alone. A row is a
line, except that in a format with quoting a quoted field may hold line ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from .formats import RawFormat
from .types import DataError

BLOCK = 1 << 22  # bytes looked at in one go
SEARCH_BLOCK = 1 << 24  # bytes parsed in one go in the search for a bad row
MAX_ROW = 1 << 20  # bytes; a longer one is no row of events, and an unclosed quote would swallow the file
NEWLINE, RETURN, QUOTE = b'\n\r"'  # as numbers


def read_header(file: Path, fmt: RawFormat) -> list[str]:
    """The names of the columns. DataError for a line that cannot be a header."""
    line = first_line(file).decode("utf-8-sig", "replace").rstrip("\r\n")
    if not fmt.quoting:
        return line.split(fmt.separator)
    if line.count('"') % 2:
        raise DataError(f"{file.name} line 1: a quote that is never closed")
    return split_row(line, fmt)


def split_row(text: str, fmt: RawFormat) -> list[str]:
    """The fields of a row without its line end. (The csv module has a limit of its own, for all of the process.)"""
    if not fmt.quoting or '"' not in text:
        return text.split(fmt.separator)
    fields = re.findall(rf'(?:^|{re.escape(fmt.separator)})("(?:[^"]|"")*"|[^{re.escape(fmt.separator)}]*)', text)
    return [field[1:-1].replace('""', '"') if field.startswith('"') else field for field in fields]


def first_line(file: Path) -> bytes:
    with open(file, "rb") as f:
        line = f.readline(MAX_ROW + 1)
    if len(line) > MAX_ROW:
        raise DataError(f"{file.name} line 1: longer than {MAX_ROW:,} bytes")
    return line


def blocks(file: Path, fmt: RawFormat, size: int) -> Iterator[tuple[int, bytes]]:
    """(number of its first line, whole rows), some `size` bytes at a time, the header left out.

    DataError for a row that is longer than MAX_ROW.
    """
    with open(file, "rb") as f:
        line = 1
        if fmt.header:
            f.readline()
            line = 2
        rest = b""
        while True:
            more = f.read(size)
            data = rest + more
            if not more:
                break
            ends = row_ends(data, fmt)
            cut = int(ends[-1]) + 1 if len(ends) else 0
            data, rest = data[:cut], data[cut:]
            if data:
                yield line, data
                line += data.count(b"\n")
            if len(rest) > MAX_ROW:
                raise DataError(_too_long(file, line, rest, fmt))
        if data:
            yield line, data if data.endswith(b"\n") else data + b"\n"


def row_ends(data: bytes, fmt: RawFormat) -> np.ndarray:
    """[rows] int64: where the rows of `data` end, which starts with a row."""
    return np.flatnonzero(_outside_quotes(data, fmt, np.frombuffer(data, np.uint8) == NEWLINE))


def _outside_quotes(data: bytes, fmt: RawFormat, marks: np.ndarray) -> np.ndarray:
    if fmt.quoting and b'"' in data:
        # Odd from an opening quote to its closing one; a sum modulo 256 keeps that.
        marks = marks & (np.cumsum(np.frombuffer(data, np.uint8) == QUOTE, dtype=np.uint8) & 1 == 0)
    return marks


def check_rows(file: Path, fmt: RawFormat, columns: int) -> None:
    """DataError names the first row that has not `columns` fields, is too long or is quoted wrongly."""
    for line, data in blocks(file, fmt, BLOCK):
        if found := _first_wrong(data, fmt, columns):
            start, what = min(found)
            raise DataError(f"{file.name} line {line + data[:start].count(NEWLINE)}: {what}")


def _first_wrong(data: bytes, fmt: RawFormat, columns: int) -> list[tuple[int, str]]:
    """For each kind of fault that is found: (where the first row with it starts, what is wrong)."""
    values = np.frombuffer(data, np.uint8)
    ends = row_ends(data, fmt)
    starts = np.append(0, ends + 1)  # [rows + 1]: the last one is the end, unless a quote is never closed
    separators = np.flatnonzero(_outside_quotes(data, fmt, values == ord(fmt.separator[0])))
    width = len(fmt.separator)
    fields = np.diff(np.searchsorted(separators, ends), prepend=0) / width + 1
    found = []
    if len(wrong := np.flatnonzero(fields != columns)):
        row = wrong[0]
        text = data[starts[row] : ends[row]]
        got = int(fields[row]) if width == 1 else text.count(fmt.separator.encode()) + 1
        found.append((starts[row], f"expected {columns} columns, got {got}" if text.strip() else "empty line"))
    elif width == 2 and len(apart := np.flatnonzero(np.diff(separators.reshape(-1, 2))[:, 0] != 1)):
        # Rows have the right even number of colons here, so that these pair up within rows.
        row = np.searchsorted(ends, separators[2 * apart[0]])
        found.append((starts[row], f"expected {columns} columns between {fmt.separator!r}"))
    if len(long := np.flatnonzero(ends - starts[:-1] > MAX_ROW)):
        found.append((starts[long[0]], f"longer than {MAX_ROW:,} bytes"))
    if fmt.quoting and b'"' in data:
        if (position := _misquoted(values, ord(fmt.separator))) is not None:
            found.append((starts[np.searchsorted(ends, position)], "a quote in a field that does not start with one"))
        if starts[-1] != len(data):
            found.append((starts[-1], "a quote that is never closed"))
    return found


def _misquoted(values: np.ndarray, separator: int) -> int | None:
    """Position of the first quote that neither opens nor closes a field nor stands, doubled, inside a quoted one."""
    quotes = np.flatnonzero(values == QUOTE)
    opening, closing = quotes[::2], quotes[1::2]
    around = np.concatenate([[NEWLINE], values, [NEWLINE]])  # around[i] stands before values[i], around[i + 2] after
    wrong_open = opening[~np.isin(around[opening], (NEWLINE, separator, QUOTE))]
    wrong_close = closing[~np.isin(around[closing + 2], (NEWLINE, RETURN, separator, QUOTE))]
    wrong = np.concatenate([wrong_open[:1], wrong_close[:1]])
    return int(wrong.min()) if len(wrong) else None


def _too_long(file: Path, line: int, rest: bytes, fmt: RawFormat) -> str:
    hint = ", is a quote never closed?" if fmt.quoting and rest.count(b'"') % 2 else ""
    return f"{file.name} line {line}: longer than {MAX_ROW:,} bytes{hint}"


def find_bad_row(file: Path, fmt: RawFormat, good: Callable[[bytes], bool]) -> tuple[int, bytes] | None:
    """(number of its first line, the row) of the first row that `good` rejects, by halving; None when it takes all.

    good: whole rows -> whether all of them are right.
    """
    for line, data in blocks(file, fmt, SEARCH_BLOCK):
        if good(data):
            continue
        while len(ends := row_ends(data, fmt)) > 1:
            half = int(ends[len(ends) // 2 - 1]) + 1
            if good(data[:half]):
                line, data = line + data.count(b"\n", 0, half), data[half:]
            else:
                data = data[:half]
        return line, data
    return None
