"""List the data files in a folder or matching a pattern; a file or folder that cannot be read is an error.

Names that begin with `.` or `_` are skipped at every depth: Spark, Jupyter and others use them for copies and markers.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from data.types import DataError, shown

PACKED = (".gz", ".zst", ".bz2", ".xz")
PRIVATE = (".", "_")


def parts(folder: Path, ending: str) -> list[Path]:
    """Return the files of a folder, at every depth; DataError for one that cannot be read, and for broken links.

    ending: the required ending of the files (in any case), before an ending of compression.
    """
    return sorted(_walk(folder, folder, ending, {folder.resolve()}))


def _walk(folder: Path, root: Path, ending: str, read: set[Path]) -> Iterator[Path]:
    for name in os.listdir(folder):
        path = folder / name
        if name.startswith(PRIVATE):
            continue
        if stat.S_ISDIR(_mode(path)):
            if (real := path.resolve()) in read:
                raise DataError(f"{shown(path, 200)}: a folder that is already read by another name, through a link")
            read.add(real)
            yield from _walk(path, root, ending, read)
        else:
            check_ending(str(path), ending, glob.escape(str(root)))
            yield _regular(path, read)


def check_ending(name: str, ending: str, root: str) -> None:
    """Raise DataError for the name of a part with another ending, compressed or not; root: the folder of all parts."""
    if not unpacked_name(name).lower().endswith(ending):
        raise DataError(
            f"{shown(name, 200)}: expected {ending} or {', '.join(ending + packed for packed in PACKED)}; to leave out "
            f"other files, set the path to a pattern: {shown(f'{root}/**/*{ending}', 300)}"
        )


def is_private(name: str) -> bool:
    """Return whether a path relative to its source has a component that begins with `.` or `_`."""
    return any(part.startswith(PRIVATE) for part in Path(name).parts)


def matching(folder: Path, pattern: str, all_files: bool) -> list[Path]:
    """Return the sorted files of a folder that match a format's pattern, compressed or not.

    all_files: the format reads all of them, so that an unknown kind of compression is a DataError.
    """
    place, name = folder / Path(pattern).parent, Path(pattern).name.lower()
    files: list[Path] = []
    if place != folder and not place.is_dir():
        return files
    read: set[Path] = set()
    for file in sorted(os.listdir(place)):
        if file.startswith(PRIVATE):
            continue
        if fnmatch.fnmatchcase(unpacked_name(file).lower(), name):
            files.append(_regular(place / file, read))
        elif all_files and fnmatch.fnmatchcase(file.lower(), name + ".*"):
            endings = ", ".join(PACKED)
            raise DataError(f"{shown(place / file, 200)}: unpack it first (only {endings} are read as they are)")
    return files


def parts_of_pattern(pattern: str) -> list[Path]:
    """Return the sorted files that match a pattern; names that begin with `.` or `_` only if the pattern does.

    Python's glob is not used because it treats a folder that it cannot read as empty.
    """
    path, read = Path(pattern), set[Path]()
    matched = dict.fromkeys(_expanded(Path(path.anchor), path.relative_to(path.anchor).parts))
    return sorted(_regular(file, read) for file in matched if not stat.S_ISDIR(_mode(file)))


def _expanded(folder: Path, pattern: tuple[str, ...]) -> Iterator[Path]:
    """Yield the paths in a folder that match the components of a pattern."""
    first, rest = pattern[0], pattern[1:]
    if not glob.has_magic(first):
        names = [first] if os.path.lexists(folder / first) else []
    else:
        names = [name for name in os.listdir(folder) if not name.startswith(PRIVATE) or name[0] == first[0]]
        if first == "**":
            yield from _expanded(folder, rest or ("*",))
        else:
            names = [name for name in names if fnmatch.fnmatchcase(name, first)]
    for path in (folder / name for name in names):
        if first == "**":
            if stat.S_ISDIR(_mode(path)):
                if path.is_symlink() and folder.resolve().is_relative_to(path.resolve()):
                    raise DataError(f"{shown(path, 200)}: a link to a folder that contains it")
                yield from _expanded(path, pattern)
        elif not rest:
            yield path
        elif stat.S_ISDIR(_mode(path)):
            yield from _expanded(path, rest)


def unpacked_name(name: str) -> str:
    """Return the name of a file without an ending of compression, in capital or small letters."""
    return next((name[: -len(end)] for end in PACKED if name.lower().endswith(end)), name)


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise DataError(
                f"{shown(path, 200)}: a link to {shown(os.readlink(path), 200)}, which does not exist"
            ) from None
        raise


def _regular(path: Path, read: set[Path]) -> Path:
    """Add a file to `read` and return its path; DataError if it is not a file, or links to one that is already read."""
    if not stat.S_ISREG(_mode(path)):
        raise DataError(f"{shown(path, 200)}: not a regular file")
    if (real := path.resolve()) in read:
        raise DataError(f"{shown(path, 200)}: a file that is already read by another name, through a link")
    read.add(real)
    return path
