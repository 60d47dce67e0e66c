"""Store the older part of a log in segments: files of columns, which are read many times faster than lines.

The folder NAME.segments next to the log NAME contains:

NUMBER.log    a full file of lines that has not been converted to a segment yet
NUMBER.npz    a segment: `event_columns.EventColumns`, without events of users who were deleted later
manifest      a line in the log's format: the segments, the oldest first, with their checksums, and the number of the
              first file of lines that has not been converted

The manifest is replaced atomically, and files are removed only after the manifest no longer lists them. So whenever the
process is killed, each event is in exactly one valid file. The next start removes the other files.
"""

import hashlib
import itertools
import os
import re
import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from data.atomic import replace_file, replace_folder, sweep
from data.types import shown
from serving.http.event_columns import EventColumns, merged
from serving.http.log_reader import LogError, LogReader, content_of, line_of

MANIFEST = "manifest"
MOST_TOGETHER = 2**25  # most events in a merged segment, since merging holds them in memory


class Segment(NamedTuple):
    """A segment in the manifest: the number of its file, the SHA-256, and the number of events and deleted users."""

    number: int
    sha256: str
    size: int


class Segments:
    """The segments of the log in the file `path`. One thread may change them while others open them.

    next: the number of the first file of lines that has not been converted.
    """

    def __init__(self, path: Path):
        self.path, self.folder = path, path.with_name(f"{path.name}.segments")
        self.lock = threading.Lock()  # protects the valid files
        self.segments: list[Segment] = []
        self.next, self._files = 1, 0  # `_files`: the number of the last segment's file
        sweep(path.parent, self.folder.name, older_than=0)
        if self.folder.is_symlink() or self.folder.exists():
            self._read()
            self._sweep()
        if not path.exists() and self.number > self.next:  # killed before the log continued in a new file
            os.rename(self.lines(self.number - 1), path)
        self._status = path.stat() if path.exists() else None  # all files get its mode and owner

    def _read(self) -> None:
        file = self.folder / MANIFEST
        if not file.exists():
            raise LogError(f"{shown(file, 200)}: missing, expected the list of the log's segments")
        manifest = content_of(file.read_bytes())
        try:
            self.segments = [Segment(*segment) for segment in manifest["segments"]]
            self.next, self._files = manifest["next"], manifest["files"]
        except (KeyError, TypeError):
            raise LogError(f"{shown(file, 200)}: damaged") from None

    def _sweep(self) -> None:
        """Remove files left by killed processes; raise LogError if files are missing."""
        sweep(self.folder, older_than=0)
        numbers = {segment.number for segment in self.segments}
        for file in list(self.folder.iterdir()):
            if match := re.fullmatch(r"(\d{6,})\.(log|npz)", file.name):
                number = int(match[1])
                if number < self.next if match[2] == "log" else number not in numbers:
                    file.unlink()
                elif match[2] == "log" and number >= self.number:
                    raise LogError(f"{shown(self.lines(self.number), 200)}: missing, the log has later lines")
        for segment in self.segments:
            if not self._file(segment.number).is_file():
                raise LogError(f"{shown(self._file(segment.number), 200)}: missing, the log has later events")

    @property
    def number(self) -> int:
        """The expected number of the log's current file of lines."""
        return next(number for number in itertools.count(self.next) if not self.lines(number).exists())

    def lines(self, number: int) -> Path:
        """Return the path of a full file of lines."""
        return self.folder / f"{number:06d}.log"

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06d}.npz"

    def create(self) -> None:
        """Create the folder if it does not exist."""
        if not self.folder.exists():
            with replace_folder(self.folder) as temporary:
                self._status = self.path.stat()
                mode = self._status.st_mode & 0o777
                match(temporary, self._status, mode | 0o700 | (mode & 0o444) >> 2)
                self._write(temporary / MANIFEST, lambda file: file.write(self._manifest(self.segments, self.next)))

    def opened(self) -> tuple[list[Callable[[], EventColumns]], ExitStack]:
        """Open all files; return functions that load them, the oldest first, and a stack that closes them."""
        with self.lock, ExitStack() as files:
            loads: list[Callable[[], EventColumns]] = []
            for segment in self.segments:
                path = self._file(segment.number)
                loads.append(partial(_load, path, files.enter_context(path.open("rb")), segment.sha256))
            for number in range(self.next, self.number):
                path = self.lines(number)
                loads.append(partial(_load_lines, path, files.enter_context(path.open("rb"))))
            return loads, files.pop_all()

    def seal(self, together: int | None = None) -> None:
        """Convert full files of lines to segments; raise OSError or LogError if this fails.

        together: bytes of lines to parse at a time, which blocks other threads.
        """
        while (path := self.lines(self.next)).exists():
            with path.open("rb") as file:
                new = _load_lines(path, file, together)
            segments = [*self.segments, self._save(new)] if new.users or new.deleted else self.segments
            self._commit(segments, self.next + 1)
            if new.deleted:
                self.purge(frozenset())
            self._merge()

    def purge(self, deleted: AbstractSet[str]) -> None:
        """Remove events of users deleted later or in `deleted`; raise OSError or LogError if this fails."""
        segments: list[Segment] = []
        for segment in reversed(self.segments):
            part = self._load(segment)
            remaining = part.without(deleted)
            deleted = deleted | part.deleted
            if len(remaining.users) < len(part.users):
                segment = self._save(remaining)
            if remaining.users or remaining.deleted:
                segments.insert(0, segment)
        if segments != self.segments:
            self._commit(segments, self.next)

    def _merge(self) -> None:
        """Merge neighbouring segments, newest first, until each is at most half as large as the one before.

        Segments with more than MOST_TOGETHER events together are not merged.
        """
        while True:
            places = [
                place
                for place, (older, newer) in enumerate(itertools.pairwise(self.segments))
                if older.size < 2 * newer.size and older.size + newer.size <= MOST_TOGETHER
            ]
            if not places:
                return
            begin, end = places[-1], places[-1] + 2
            segment = self._save(merged([self._load(one) for one in self.segments[begin:end]]))
            self._commit([*self.segments[:begin], segment, *self.segments[end:]], self.next)

    def _load(self, segment: Segment) -> EventColumns:
        path = self._file(segment.number)
        with path.open("rb") as file:
            return _load(path, file, segment.sha256)

    def _save(self, columns: EventColumns) -> Segment:
        self._files += 1
        path = self._file(self._files)
        self._write(path, columns.save)
        with path.open("rb") as file:
            return Segment(self._files, _digest(file), columns.num_events + len(columns.deleted))

    def _commit(self, segments: list[Segment], next_lines: int) -> None:
        """Write the manifest of these segments, then remove files that it does not list."""
        with self.lock:
            self._write(self.folder / MANIFEST, lambda file: file.write(self._manifest(segments, next_lines)))
            outdated = [self._file(one.number) for one in self.segments if one not in segments]
            outdated += [self.lines(number) for number in range(self.next, next_lines)]
            self.segments, self.next = segments, next_lines
            for path in outdated:
                path.unlink(missing_ok=True)

    def _manifest(self, segments: list[Segment], next_lines: int) -> bytes:
        return line_of({"segments": segments, "next": next_lines, "files": self._files})

    def _write(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        """Write a file atomically, with the log's mode and owner."""

        def create(temporary: Path) -> None:
            with open(new_file(temporary), "wb") as file:
                write(file)
            if self._status is not None:
                match(temporary, self._status)

        replace_file(path, create)


def new_file(path: Path, flags: int = 0) -> int:
    """Create a file that only its owner can read."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)


def match(path: Path, status: os.stat_result, mode: int | None = None) -> None:
    """Set the owner of a path to that of `status`, and its mode to `mode` (None: that of `status`)."""
    current = path.stat()
    if (current.st_uid, current.st_gid) != (status.st_uid, status.st_gid):
        os.chown(path, status.st_uid, status.st_gid)
    path.chmod(status.st_mode & 0o7777 if mode is None else mode)


def _digest(file: BinaryIO) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _load(path: Path, file: BinaryIO, sha256: str) -> EventColumns:
    file.seek(0)
    if _digest(file) != sha256:
        raise LogError(f"{shown(path, 200)}: damaged, its checksum differs from the one it was saved with")
    file.seek(0)
    return EventColumns.load(file)


def _load_lines(path: Path, file: BinaryIO, together: int | None = None) -> EventColumns:
    handle = os.dup(file.fileno())
    with LogReader(path, handle, os.fstat(handle).st_size, together=together) as reader:
        if reader.number != int(path.stem) or reader.size != os.fstat(handle).st_size:
            raise LogError(f"{shown(path, 200)}: damaged, it has the wrong number or an incomplete line")
        return reader.lines()
