"""Read files with a history on each line, `user item item ...`, as polars frames with the columns user and item."""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from data.reading.bad_rows import BadRows
from data.reading.formats import RawFormat
from data.reading.lines import SEARCH_BLOCK, blocks, first_line
from data.reading.sources import RawFile
from data.reading.times import SECONDS
from data.reading.values import MAX_ID_LENGTH, Readings, not_decoded
from data.types import shown

# The separator is the first of these in the first line, or a blank.
SEPARATORS = {"\t": "a tab", ",": "a comma", ";": "a semicolon", "|": "|"}
LIST = re.compile(rb"[\s,;|]\[[^\]]*[\s,][^\]]*\]\s*$")


def read_sequences(source: RawFile, fmt: RawFormat, bad: BadRows, readings: Readings | None = None):
    """Read one file; return (a polars frame with an event in each row, the readings, notes about the file).

    If a user has several lines, they are in time order. bad: gets the bad lines.
    """
    import polars as pl

    notes = []
    if fmt.detect_separator:
        line = first_line(source, fmt).decode("utf-8", "replace")
        separator = next((s for s in SEPARATORS if s in line), " ")
        fmt = dataclasses.replace(fmt, separator=separator)
        if separator != " ":
            notes.append(f"fields are separated by {SEPARATORS[separator]} (data.separator)")
    frames = []
    for number, data in blocks(source, fmt, SEARCH_BLOCK):
        lines = data.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").split(b"\n")[:-1]
        good: list[str] = []
        descriptions: list[str] = []
        count = 0
        for place, row in enumerate(lines):
            text = row.removesuffix(b"\r")
            if (message := _problem(text, fmt, source.encoding)) is None:
                good.append(text.decode())
            else:
                count += 1
                if len(descriptions) < bad.room:
                    descriptions.append(f"{source.name} line {number + place}: {message}")
        bad.rows += len(lines)
        bad.add(count, descriptions)
        fields = pl.Series(good, dtype=pl.String).str.split(fmt.separator)
        frame = pl.DataFrame({"user": fields.list.first(), "item": fields.list.slice(1)})
        frames.append(frame.explode("item"))
    bad.check(source.name)
    frame = pl.concat(frames) if frames else pl.DataFrame(schema={"user": pl.String, "item": pl.String})
    return frame, Readings(SECONDS), notes


def _problem(line: bytes, fmt: RawFormat, encoding: str) -> str | None:
    """Return the fault of a line, or None."""
    separator = fmt.separator.encode()
    if not line.strip():
        return "empty line"
    try:
        line.decode()
    except UnicodeDecodeError:
        return not_decoded(line.decode("utf-8", "surrogateescape"), fmt, encoding)
    if b"\0" in line:
        return "a NUL character"
    if LIST.search(line):
        return "a list in brackets, expected one item in each field"
    if separator not in line:
        return f"expected a user and items between {fmt.separator!r}, got {shown(line.decode())!r}"
    if separator * 2 in line or line.startswith(separator) or line.endswith(separator):
        return f"an empty field: {fmt.separator!r} at an end of the line, or twice in a row"
    if len(line) > MAX_ID_LENGTH:
        values = np.frombuffer(separator + line + separator, np.uint8)
        longest = np.diff(np.flatnonzero(values == separator[0])).max() - 1  # bytes
        if longest > MAX_ID_LENGTH and max(map(len, line.decode().split(fmt.separator))) > MAX_ID_LENGTH:
            return f"an id of more than {MAX_ID_LENGTH} characters"
    return None
