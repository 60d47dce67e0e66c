"""Check before parsing that each row of a text file has the right number of fields.

Parsers may silently fill short rows and cut long ones. The check works on blocks of bytes with numpy. A row is a line,
but in formats with quoting, a quoted field may have line ends.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import numpy as np

from data.reading.formats import RawFormat
from data.reading.sources import RawFile
from data.types import DataError

BLOCK = 1 << 22  # bytes checked at a time
SEARCH_BLOCK = 1 << 24  # bytes parsed at a time if rows may be bad
NEWLINE, RETURN, QUOTE = b'\n\r"'


def read_header(source: RawFile, fmt: RawFormat) -> list[str]:
    """Return the names of the columns. DataError for a line that cannot be a header."""
    line = first_line(source, fmt).decode("utf-8-sig", "replace").rstrip("\r\n")
    if not fmt.quoting:
        return line.split(fmt.separator)
    if line.count('"') % 2:
        raise DataError(f"{source.name} line 1: a quote that this line does not close")
    return split_row(line, fmt)


def split_row(text: str, fmt: RawFormat) -> list[str]:
    """Return the fields of a row without its line end.

    The csv module is not used, since its limit of a field's size holds for the whole process.
    """
    if not fmt.quoting or '"' not in text:
        return text.split(fmt.separator)
    fields = re.findall(rf'(?:^|{re.escape(fmt.separator)})("(?:[^"]|"")*"|[^{re.escape(fmt.separator)}]*)', text)
    return [field[1:-1].replace('""', '"') if field.startswith('"') else field for field in fields]


def first_line(source: RawFile, fmt: RawFormat) -> bytes:
    """Return the first line of a file with its line end; DataError for a line that is too long."""
    with open(source.path, "rb") as f:
        line = f.readline(fmt.longest_row + 1)
        if line.startswith(b"PAR1"):
            f.seek(-4, os.SEEK_END)
            if f.read() == b"PAR1":  # the magic bytes at both ends
                raise DataError(f"{source.name}: this is a Parquet file; set {fmt.section}.format to parquet")
    if len(line) > fmt.longest_row:
        raise DataError(f"{source.name} line 1: longer than {fmt.longest_row:,} bytes")
    return line


def blocks(
    source: RawFile, fmt: RawFormat, size: int, begin: tuple[int, int] | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield (number of the first line, whole rows) in blocks of about `size` bytes, without the header.

    begin: (byte, number) of the line to begin with instead of the first row. DataError for a row that is longer than
    the format allows.
    """
    with open(source.path, "rb") as f:
        line = 1
        if begin is not None:
            f.seek(begin[0])
            line = begin[1]
        elif fmt.header:
            f.readline()
            line = 2
        remainder = b""
        while True:
            more = f.read(size)
            data = remainder + more
            if not more:
                break
            ends = row_ends(data, fmt)
            cut = int(ends[-1]) + 1 if len(ends) else 0
            data, remainder = data[:cut], data[cut:]
            if data:
                yield line, data
                line += data.count(b"\n")
            if len(remainder) > fmt.longest_row:
                raise DataError(_too_long(source, line, remainder, fmt))
        if data:
            yield line, data if data.endswith(b"\n") else data + b"\n"


def row_ends(data: bytes, fmt: RawFormat) -> np.ndarray:
    """Return the positions of the rows' ends in `data`, which starts with a row: [rows] int64."""
    return np.flatnonzero(_outside_quotes(data, fmt, np.frombuffer(data, np.uint8) == NEWLINE))


def _outside_quotes(data: bytes, fmt: RawFormat, marks: np.ndarray) -> np.ndarray:
    if fmt.quoting and b'"' in data:
        # The number of quotes is odd inside a quoted field; a sum modulo 256 preserves that.
        marks = marks & (np.cumsum(np.frombuffer(data, np.uint8) == QUOTE, dtype=np.uint8) & 1 == 0)
    return marks


class Shape:
    """The rows of `data` (whole rows of a text file) that do not have `columns` fields.

    ends       [rows] int64: the position of each row's end
    wrong      [<= rows] int64, ascending: the indices of wrong rows
    misquoted  (row, message) of the first misplaced quote, after which row ends are unknown; or None
    """

    def __init__(self, data: bytes, fmt: RawFormat, columns: int):
        values = np.frombuffer(data, np.uint8)
        self._data, self._fmt, self._columns = data, fmt, columns
        self.ends = row_ends(data, fmt)
        self._starts = np.append(0, self.ends + 1)  # [rows + 1]: the last one is the end of data, if quotes are closed
        separators = np.flatnonzero(_outside_quotes(data, fmt, values == ord(fmt.separator[0])))
        fields = np.diff(np.searchsorted(separators, self.ends), prepend=0) / len(fmt.separator) + 1
        wrong = (fields != columns) | (self.ends - self._starts[:-1] > fmt.longest_row)
        if len(fmt.separator) == 2 and not wrong.any():
            # All rows have the right, even number of colons here, so that pairs of colons are within rows.
            split_pairs = np.flatnonzero(np.diff(separators.reshape(-1, 2))[:, 0] != 1)
            wrong[np.searchsorted(self.ends, separators[2 * split_pairs])] = True
        elif len(fmt.separator) == 2:
            rows = np.flatnonzero(~wrong).tolist()
            wrong[[row for row in rows if self.row(row).count(fmt.separator.encode()) != columns - 1]] = True
        self.wrong = np.flatnonzero(wrong)
        self.misquoted = None
        if fmt.quoting and b'"' in data:
            if (position := _misquoted(values, ord(fmt.separator))) is not None:
                row = int(np.searchsorted(self.ends, position))
                self.misquoted = row, "a quote in a field that does not start with one"
            elif self._starts[-1] != len(data):
                self.misquoted = len(self.ends), "a quote that is never closed"

    def row(self, row: int) -> bytes:
        """Return the bytes of a row without its line end."""
        return self._data[self._starts[row] : self.ends[row]]

    def lines_before(self, row: int) -> int:
        """Return the number of lines before a row."""
        return self._data.count(b"\n", 0, int(self._starts[row]))

    def without(self, rows: np.ndarray) -> bytes:
        """Return the data without these rows (ascending)."""
        cuts = [0, *np.stack([self._starts[rows], self.ends[rows] + 1], 1).ravel().tolist(), len(self._data)]
        return b"".join(self._data[start:end] for start, end in zip(cuts[::2], cuts[1::2]))

    def problem(self, row: int) -> str:
        """Return the fault of a row in `wrong`."""
        text, separator = self.row(row), self._fmt.separator
        if len(text) > self._fmt.longest_row:
            return f"longer than {self._fmt.longest_row:,} bytes"
        if not text.strip():
            return "empty line"
        got = len(split_row(text.decode("utf-8", "replace"), self._fmt))
        if got == self._columns:
            return f"expected {self._columns} columns between {separator!r}"
        return f"expected {self._columns} columns, got {got}"


def are_whole(source: RawFile, fmt: RawFormat, columns: int) -> bool:
    """Return whether all rows have `columns` fields, are short enough and are quoted correctly."""
    shapes = (Shape(data, fmt, columns) for _, data in blocks(source, fmt, BLOCK))
    return not any(len(shape.wrong) or shape.misquoted for shape in shapes)


def _misquoted(values: np.ndarray, separator: int) -> int | None:
    """Return the position of the first misplaced quote: it neither begins nor ends a field, nor is it a doubled quote
    inside a quoted field.
    """
    quotes = np.flatnonzero(values == QUOTE)
    opening, closing = quotes[::2], quotes[1::2]
    around = np.concatenate([[NEWLINE], values, [NEWLINE]])  # around[i] is before values[i], around[i + 2] after it
    wrong_open = opening[~np.isin(around[opening], (NEWLINE, separator, QUOTE))]
    wrong_close = closing[~np.isin(around[closing + 2], (NEWLINE, RETURN, separator, QUOTE))]
    wrong = np.concatenate([wrong_open[:1], wrong_close[:1]])
    return int(wrong.min()) if len(wrong) else None


def _too_long(source: RawFile, line: int, row: bytes, fmt: RawFormat) -> str:
    hint = ", is a quote never closed?" if fmt.quoting and row.count(b'"') % 2 else ""
    return f"{source.name} line {line}: longer than {fmt.longest_row:,} bytes{hint}"
