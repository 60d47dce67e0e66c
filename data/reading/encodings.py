"""Detect the encoding of a text file by its byte order mark and content, and convert files to UTF-8."""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import BinaryIO

from data.types import DataError, did_you_mean, shown

BLOCK = 1 << 20
MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # the mark of UTF-32 begins with that of UTF-16, so it comes first
MOST_RUNS = 100_000  # runs of non-ASCII bytes from which an encoding is chosen
RUN = re.compile(rb"[\x80-\xff]+")
# Bytes that are undefined in cp1252, and its symbols that never occur between two letters in western languages.
NOT_CP1252 = re.compile(
    rb"[\x81\x8d\x8f\x90\x9d]|[A-Za-z][\xa1-\xa9\xab-\xb1\xb3\xb5\xb6\xb8\xb9\xbb-\xbf\xd7\xf7][a-z]"
)
UTF_8 = ("utf-8", "utf-8-sig")

# Bytes that cannot be decoded are replaced by an invalid byte of UTF-8, so that their row is a bad row.
codecs.register_error("hstu_sparse.bad_byte", lambda error: ("\udcff", getattr(error, "end", 0)))


def checked_encoding(name: str, key: str) -> str:
    """Return the standard name of an encoding; DataError if Python has no text encoding of this name."""
    try:
        "a".encode(name)
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        near = did_you_mean(name, ("utf-8", "utf-16", "cp1252", "cp1250", "cp1251", "latin-1", "shift_jis", "gb18030"))
        raise DataError(f"{key}: expected a text encoding that Python has, got {shown(repr(name))}{near}") from None


def detected_encoding(content: BinaryIO) -> str:
    """Return the encoding of a text file that is open at its beginning.

    Without a byte order mark, the encoding is UTF-16 if every other byte at the beginning is 0; UTF-8 if the content is
    valid UTF-8; cp1252 if all non-ASCII bytes are single western letters and symbols; otherwise UTF-8 with bad rows.
    """
    start = content.read(4096)
    for mark, name in MARKS.items():
        if start.startswith(mark):
            return name
    for name, zeros, others in (("utf-16-le", start[1::2], start[::2]), ("utf-16-be", start[::2], start[1::2])):
        if len(start) > 3 and zeros.count(0) == len(zeros) and 0 not in others:
            return name
    decoder = codecs.getincrementaldecoder("utf-8")()
    block = start
    try:
        while block:
            if not block.isascii() or decoder.getstate()[0]:
                decoder.decode(block)
            block = content.read(BLOCK)
        decoder.decode(b"", True)
        return "utf-8"
    except UnicodeDecodeError:
        content.seek(0)
        return "cp1252" if _is_cp1252(content) else "utf-8"


def _is_cp1252(content: BinaryIO) -> bool:
    count = size = 0
    while (block := content.read(BLOCK)) and count < MOST_RUNS:
        block += content.readline(BLOCK)  # so that no run is cut
        if NOT_CP1252.search(block):
            return False
        for run in RUN.findall(block):
            count, size = count + 1, size + len(run)
            if len(run) > 1 and _is_utf_8(run):
                return False  # a damaged UTF-8 file
    return size < 1.5 * count  # in other alphabets, runs are as long as words


def _is_utf_8(run: bytes) -> bool:
    try:
        run.decode()
        return True
    except UnicodeDecodeError:
        return False


def convert(source: BinaryIO, encoding: str, target: Path) -> None:
    """Write the text of `source` to `target` in UTF-8."""
    decoder = codecs.getincrementaldecoder(encoding)("hstu_sparse.bad_byte")
    with open(target, "wb") as out:
        while block := source.read(BLOCK):
            out.write(decoder.decode(block).encode("utf-8", "surrogateescape"))
        out.write(decoder.decode(b"", True).encode("utf-8", "surrogateescape"))


def decoded(content: bytes, place: str) -> str:
    """Return the text of a small file in its detected encoding; DataError if it is not valid."""
    import io

    try:
        encoding = detected_encoding(io.BytesIO(content))
        return content.decode("utf-8-sig" if encoding == "utf-8" else encoding)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not valid {error.encoding} ({error.reason} at byte {error.start})") from None
