"""Find and unpack the files of a source. A path is a pattern only if no file or folder has this name."""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import lzma
import os
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from data.atomic import sweep, temporary_beside
from data.progress import Progress
from data.reading.encodings import UTF_8, convert, detected_encoding
from data.reading.folders import PACKED, matching, parts, parts_of_pattern
from data.reading.formats import RawFormat
from data.reading.remote import local_copy, public
from data.types import DataError, shown

GZIP, ZSTD, BZIP2, XZ, ZIP = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ\x00", b"PK\x03\x04"
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # in the name of a folder: its rows have no value of the column
MOST_HOLE = 1 << 26  # largest accepted hole in a binary file, in bytes: a copy may omit runs of zeros


@dataclass(frozen=True)
class RawFile:
    """A file to read.

    name: the name in messages; folder_columns: (column, value) pairs in the names of its folders (`dt=2026-01-01`);
    encoding: the encoding of a text file before it was converted to UTF-8.
    """

    path: Path
    name: str
    folder_columns: tuple[tuple[str, str], ...] = ()
    encoding: str = "utf-8"

    def notes(self, fmt: RawFormat) -> list[str]:
        """Return a sentence about the detected encoding if it is not UTF-8."""
        if self.encoding in UTF_8 or fmt.encoding:
            return []
        return [f"{self.name}: not UTF-8, read as {self.encoding} ({fmt.section}.encoding)"]


def literal(path: Path) -> io.BufferedReader:
    """Open a file. Libraries get the open file, since they may read a user's path as a pattern or a URL."""
    return open(path, "rb")


def local_path(path: str | Path, key: str) -> Path:
    """Expand `~` in a user's path; DataError for an impossible path."""
    if "\0" in str(path):
        raise DataError(f"{key}: a path cannot contain a NUL character, got {shown(path)}")
    try:
        expanded = Path(path).expanduser()
        str(expanded).encode("utf-8")
        os.fsencode(expanded)
    except RuntimeError as error:
        raise DataError(f"{key}: {shown(path)}: {error}") from None
    except UnicodeEncodeError:
        raise DataError(f"{key}: {shown(path)} cannot be encoded in {sys.getfilesystemencoding()}") from None
    return expanded


def find_sources(name: str, fmt: RawFormat, path: str | Path | None) -> tuple[list[RawFile], str | None]:
    """Return (the raw files of a source, a sentence about several files or None).

    path: the file, its folder, or, for csv and parquet, a folder of files or a pattern. DataError if nothing matches.
    """
    if not path:
        file = fmt.files[0].removeprefix("**/")
        raise DataError(f"{fmt.path_option}: format {name} needs the path of {file} or of its folder{_fetch(fmt)}")
    path = local_path(path, fmt.path_option)
    try:
        return _find(fmt, path)
    except OSError as error:
        raise DataError(f"{shown(error.filename or path, 200)}: cannot be read: {error.strerror or error}") from error


def copied(address: str, fmt: RawFormat, cache_dir: Path | None, progress: Progress) -> Path:
    """Copy the files of an address (`remote.is_remote`) into the cache; return their path there."""
    if not fmt.named_columns:
        raise DataError(f"{fmt.path_option}: {public(address)}: only files of format csv and parquet can be remote")
    ending = fmt.files[0].removeprefix("**/*")
    return local_copy(address, fmt.path_option, ending if fmt.all_files else None, cache_dir, progress.stage)


def _find(fmt: RawFormat, path: Path) -> tuple[list[RawFile], str | None]:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if fmt.named_columns and not os.path.lexists(path) and glob.has_magic(str(path)):
            if files := parts_of_pattern(str(path)):
                root = Path(os.path.commonpath([file.parent for file in files]))
                fixed = next(n for n, part in enumerate(path.parts) if glob.has_magic(part))
                match = f"{fmt.path_option} is a pattern that {len(files)} files match"
                return [_named(file, root, Path(*file.parts[fixed:])) for file in files], match
            raise DataError(f"{shown(path, 200)}: no such file, and no file matches it as a pattern") from None
        raise DataError(f"{shown(path, 200)}: no such file or folder{_fetch(fmt)}") from None
    if stat.S_ISREG(mode):
        return [RawFile(path, shown(path.name, 200))], None
    if not stat.S_ISDIR(mode):
        raise DataError(f"{shown(path, 200)}: neither a file nor a folder")
    for pattern in fmt.files:
        if pattern.startswith("**/*"):
            files = parts(path, pattern.removeprefix("**/*"))
        else:
            files = matching(path, pattern, fmt.all_files)
        if len(files) > 1 and not fmt.all_files:
            names = ", ".join(shown(file.name) for file in files[:4])
            raise DataError(f"{path}: {len(files)} files match {pattern} ({names}); give the path of one")
        if files:
            how = f"{fmt.path_option} is a folder of {len(files)} files" if len(files) > 1 else None
            return [_named(file, path, file.relative_to(path)) for file in files], how
    raise DataError(f"{shown(path, 200)}: no {fmt.files[0].removeprefix('**/')} in this folder{_fetch(fmt)}")


def _named(file: Path, root: Path, place: Path) -> RawFile:
    """Return a file, named by its path from `root`; place: a path whose folders may be columns (`dt=2026-01-01`)."""
    columns = [part.partition("=") for part in place.parent.parts]
    values = {unquote(key): "" if value == NO_VALUE else unquote(value) for key, equals, value in columns if equals}
    return RawFile(file, shown(file.relative_to(root), 200), tuple(values.items()))


def _fetch(fmt: RawFormat) -> str:
    """Return the hint to `data.download`, if that can fetch the data, or the empty string."""
    if not fmt.downloads:
        return ""
    name = fmt.downloads[0] if len(fmt.downloads) == 1 else f"NAME (NAME is one of {', '.join(fmt.downloads)})"
    return f"; to fetch it: python -m data.download {name}"


def check_source(source: RawFile, fmt: RawFormat) -> tuple[int, int]:
    """Return (size in bytes, time of modification) of a file; DataError if it is empty or has a hole.

    A hole may be so large that reading takes hours.
    """
    status = source.path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{source.name}: not a regular file")
    if status.st_size == 0:
        raise DataError(f"{source.name}: the file is empty")
    with literal(source.path) as f:
        hole = os.lseek(f.fileno(), 0, os.SEEK_HOLE)
        if hole < status.st_size:
            try:
                end = os.lseek(f.fileno(), hole, os.SEEK_DATA)
            except OSError:  # no data after the hole
                end = status.st_size
            if end - hole > (MOST_HOLE if fmt.kind in ("parquet", "npy") else 0):
                raise DataError(f"{source.name}: incomplete, {end - hole:,} bytes from {hole:,} on were never written")
    return status.st_size, status.st_mtime_ns


@contextmanager
def unpacked(sources: list[RawFile], scratch: Path | None, fmt: RawFormat) -> Iterator[list[RawFile]]:
    """Yield the sources, with compressed files unpacked and text converted to UTF-8 in a temporary folder.

    scratch: the parent of this folder, by default the system's folder for temporary files. DataError for a damaged file
    and unknown kinds of compression.
    """
    packed, encodings = {}, {}
    for number, source in enumerate(sources):
        with literal(source.path) as f:
            magic = f.read(6)
        if magic.startswith(ZIP):
            endings = ", ".join(PACKED)
            raise DataError(f"{source.name}: a zip archive; unpack it first (only {endings} are read as they are)")
        if magic.startswith((GZIP, ZSTD, BZIP2, XZ)):
            packed[number] = magic
        else:
            encodings[number] = _encoding(source.path, fmt)
    if not packed and all(encoding in UTF_8 for encoding in encodings.values()):
        yield sources
        return
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.gettempdir()) if scratch is None else scratch
    sweep(scratch, "unpacked")
    folder = temporary_beside(scratch / "unpacked")
    folder.mkdir()
    try:
        result = list(sources)
        for number, magic in packed.items():
            result[number] = replace(sources[number], path=folder / str(number))
            _unpack(sources[number], magic, result[number].path)
            encodings[number] = _encoding(result[number].path, fmt)
        for number, encoding in encodings.items():
            if encoding not in UTF_8:
                with literal(result[number].path) as content:
                    convert(content, encoding, folder / f"{number}.utf-8")
                result[number] = replace(sources[number], path=folder / f"{number}.utf-8", encoding=encoding)
                if number in packed:
                    (folder / str(number)).unlink()
        yield result
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _encoding(path: Path, fmt: RawFormat) -> str:
    if fmt.encoding is not None:
        return fmt.encoding
    if fmt.kind == "parquet" or fmt.other_text:
        return "utf-8"
    with literal(path) as content:
        return detected_encoding(content)


def _unpack(source: RawFile, magic: bytes, target: Path) -> None:
    errors: tuple[type[Exception], ...] = (EOFError, OSError, zlib.error, lzma.LZMAError)
    with literal(source.path) as packed, open(target, "wb") as out:
        if not magic.startswith(ZSTD):
            kind = gzip if magic.startswith(GZIP) else bz2 if magic.startswith(BZIP2) else lzma
            content = iter(partial(kind.open(packed).read, 1 << 20), b"")
        else:
            try:
                import zstandard
            except ImportError:
                raise DataError(f"{source.name}: reading .zst needs zstandard (pip install zstandard)") from None
            errors += (zstandard.ZstdError,)
            content = _zstd_parts(packed, zstandard.ZstdDecompressor())
        while True:
            try:
                part = next(content, b"")
            except errors as error:
                raise DataError(f"{source.name}: damaged, cannot be unpacked: {shown(error)}") from None
            if not part:
                break
            out.write(part)
    if target.stat().st_size == 0:
        raise DataError(f"{source.name}: the file is empty")


def _zstd_parts(packed: BinaryIO, decompressor) -> Iterator[bytes]:
    """Yield the content of all frames; EOFError for an incomplete last frame, which the library's reader ignores."""
    frame = None
    while part := packed.read(1 << 13):  # small, since the output may be thousands of times larger
        while part:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(part)
            part, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("it ends in the middle of a frame")
