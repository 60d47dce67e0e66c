"""Folders and files that appear whole or not at all, whenever the process is killed and whatever goes wrong on the way.

The one writer of folders: for prepared caches, unpacked archives and checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # what a rename onto something that exists answers
ATTEMPTS = 10  # each needs another process that replaces the very same folder at the very same moment


@contextlib.contextmanager
def replace_folder(folder: Path, keep: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """Yields an empty folder beside `folder`; at the end of the block its content is synced and takes that place.

    What stood there (a folder, a file, a link) steps aside first and is removed at last: a crash in between leaves it
    where `find_folder` looks. After an error in the block `folder` is as before, and no temporary folder is left.

    keep: asked when something stands there at the end; true leaves it and drops what was written (another process was
    faster, and its result is as good).

    Raises OSError when the disk is full or the place cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(folder)
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        _place(temporary, folder, keep)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def find_folder(folder: Path) -> Path:
    """`folder`, or what stepped aside for one that was never put in place: there was a crash between the two moves."""
    aside = _aside(folder)
    return aside if not os.path.lexists(folder) and aside.exists() else folder


def put_back(folder: Path) -> None:
    """Gives what stepped aside before a crash its name again, so that nobody needs `find_folder`."""
    if (found := find_folder(folder)) != folder:
        os.rename(found, folder)


def replace_file(file: Path, content: str | bytes | Callable[[Path], object]) -> None:
    """The file with this content, whole or not at all, and on the disk when this returns; a link there goes.

    content: text (written in UTF-8; what UTF-8 cannot hold is escaped), bytes, or a function that writes the file whose
    path it gets.
    """
    temporary = temporary_beside(file)
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
        _sync(temporary)
        os.replace(temporary, file)
        _sync(file.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sweep(parent: Path, name: str | None = None, older_than: float = 6 * 3600) -> None:
    """Removes the temporary folders and files that killed processes left beside `name`, or beside any name; a younger
    one may belong to a process at work."""
    mine = re.compile(rf"\.{'.*' if name is None else re.escape(_cut(name))}\.tmp-[0-9]+-[0-9a-f]{{8}}", re.DOTALL)
    for leftover in parent.glob(".*.tmp-*"):
        if not mine.fullmatch(leftover.name):
            continue
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime >= older_than:
                _remove(leftover)


def remove_temporaries(path: Path) -> None:
    """Removes what this process began to write beside `path` and did not put in its place."""
    for leftover in path.parent.glob(f".*.tmp-{os.getpid()}-*"):
        if leftover.name.startswith(f".{_cut(path.name)}.tmp-"):
            with contextlib.suppress(OSError):
                _remove(leftover)


def temporary_beside(path: Path) -> Path:
    """A name beside `path` that nothing has and that `sweep` knows."""
    # Cut: with what is added, a name of the greatest length would be too long.
    return path.with_name(f".{_cut(path.name)}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{_cut(folder.name)}.old")


def _cut(name: str) -> str:
    """As much of a name as 200 bytes hold."""
    return os.fsdecode(os.fsencode(name)[:200])


def _place(temporary: Path, folder: Path, keep: Callable[[Path], bool] | None) -> None:
    aside = _aside(folder)
    for _ in range(ATTEMPTS):
        try:
            os.rename(temporary, folder)
            break
        except OSError as error:
            if error.errno not in OCCUPIED:
                raise
        if keep is not None and keep(folder):
            return
        # A folder cannot be replaced in one move. What stands aside from an earlier crash is older than this one.
        _remove(aside)
        with contextlib.suppress(FileNotFoundError):  # another process has moved it meanwhile
            os.rename(folder, aside)
    else:
        raise OSError(errno.EBUSY, "other processes keep replacing it", str(folder))
    _sync(folder.parent)
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync_tree(folder: Path) -> None:
    """Without it a power cut after the rename can leave files of the right name and no content."""
    for root, _, files in os.walk(folder):
        for name in files:
            _sync(Path(root, name))
        _sync(Path(root))


def _sync(path: Path) -> None:
    if path.is_symlink():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot sync folders
            raise
    finally:
        os.close(handle)
