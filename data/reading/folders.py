"""List the files of a folder or of a pattern: all that their names promise, or an error for what cannot be read.

Hidden and private names (`.x`, `_x`) are skipped at every depth: Spark, Jupyter and others keep copies and marks there.
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
    """Return the files of a folder of parts, at every depth; DataError for one that cannot be read or followed.

    ending: of each file, in small or capital letters, before that of a compressed file.
    """
    return sorted(_walk(folder, folder, ending, {folder.resolve()}))


def _walk(folder: Path, root: Path, ending: str, read: set[Path]) -> Iterator[Path]:
    for name in os.listdir(folder):
        path = folder / name
        if name.startswith(PRIVATE):
            continue
        if stat.S_ISDIR(_mode(path)):
            if (real := path.resolve()) in read:
                raise DataError(f"{shown(path, 200)}: a link to a folder that is read already")
            read.add(real)
            yield from _walk(path, root, ending, read)
        else:
            check_ending(str(path), ending, glob.escape(str(root)))
            yield _regular(path, read)


def check_ending(name: str, ending: str, root: str) -> None:
    """Raise DataError for the name of a part that has another ending, compressed or not; root: of all parts."""
    if not _bare(name).endswith(ending):
        raise DataError(
            f"{shown(name, 200)}: neither {ending} nor {', '.join(ending + packed for packed in PACKED)}; to leave out "
            f"other files name those to read by a pattern: {shown(f'{root}/**/*{ending}', 300)}"
        )


def is_private(name: str) -> bool:
    """Return whether a path, below that of its source, has a hidden or private name in it."""
    return any(part.startswith(PRIVATE) for part in Path(name).parts)


def matching(folder: Path, pattern: str, all_files: bool) -> list[Path]:
    """Return the files of a folder that match the pattern of a format's file, compressed or not, sorted.

    all_files: the format reads all of them, so that DataError is raised for one that is compressed in another way.
    """
    place, name = folder / Path(pattern).parent, Path(pattern).name.lower()
    files: list[Path] = []
    if place != folder and not place.is_dir():
        return files
    read: set[Path] = set()
    for file in sorted(os.listdir(place)):
        if file.startswith(PRIVATE):
            continue
        if fnmatch.fnmatchcase(_bare(file), name):
            files.append(_regular(place / file, read))
        elif all_files and fnmatch.fnmatchcase(file.lower(), name + ".*"):
            raise DataError(f"{shown(place / file, 200)}: unpack it first ({', '.join(PACKED)} need not be)")
    return files


def parts_of_pattern(pattern: str) -> list[Path]:
    """Return the files that a pattern names, sorted; hidden and private ones only if it spells out their beginning.

    The library's glob is no choice: it takes a folder that it cannot read for an empty one.
    """
    path, read = Path(pattern), set[Path]()
    matched = dict.fromkeys(_expanded(Path(path.anchor), path.relative_to(path.anchor).parts))
    return sorted(_regular(file, read) for file in matched if not stat.S_ISDIR(_mode(file)))


def _expanded(folder: Path, pattern: tuple[str, ...]) -> Iterator[Path]:
    """Yield what a folder holds that the components of a pattern match."""
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
                    raise DataError(f"{shown(path, 200)}: a link to a folder that holds it")
                yield from _expanded(path, pattern)
        elif not rest:
            yield path
        elif stat.S_ISDIR(_mode(path)):
            yield from _expanded(path, rest)


def _bare(name: str) -> str:
    """Return the name of a file in small letters, without the ending of a compressed one."""
    name = name.lower()
    return next((name.removesuffix(end) for end in PACKED if name.endswith(end)), name)


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise DataError(
                f"{shown(path, 200)}: a link to {shown(os.readlink(path), 200)}, where nothing is"
            ) from None
        raise


def _regular(path: Path, read: set[Path]) -> Path:
    """Return the path of a file, noted in `read`; DataError if it is none, or a link to one that is read already."""
    if not stat.S_ISREG(_mode(path)):
        raise DataError(f"{shown(path, 200)}: neither a file nor a folder")
    if (real := path.resolve()) in read:
        raise DataError(f"{shown(path, 200)}: a link to a file that is read already")
    read.add(real)
    return path
