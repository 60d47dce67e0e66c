"""Write folders and files that appear whole or not at all, whenever the process is killed and whatever else fails.

Prepared caches, unpacked archives and checkpoints are all written through this module.
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

OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # the errors of a rename onto something that exists
ATTEMPTS = 10  # each needs another process that replaces the very same folder at the very same moment


@contextlib.contextmanager
def replace_folder(folder: Path, keep: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """Yield an empty folder beside `folder`; at the end of the block, sync its content and move it to `folder`.

    Whatever `folder` named before (a folder, a file, a link) is moved aside first and removed last: a crash in between
    leaves it where `find_folder` looks. After an error in the block `folder` is as before, and no temporary folder is
    left.

    keep: called if something exists at `folder` at the end; if it returns True, that stays and the new content is
    dropped (another process was faster, and its result is as good).

    Raises OSError when the disk is full or `folder` cannot be written.
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
    """Return `folder`, or the copy that was moved aside if a crash prevented its replacement from being moved in."""
    aside = _aside(folder)
    return aside if not os.path.lexists(folder) and aside.exists() else folder


def put_back(folder: Path) -> None:
    """Rename the copy that was moved aside before a crash back to `folder`, so that nobody needs `find_folder`."""
    if (current := find_folder(folder)) != folder:
        os.rename(current, folder)


def replace_file(file: Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Write a file with this content, whole or not at all; it is on the disk on return, and a link at its path is
    replaced.

    content: text (written in UTF-8; what UTF-8 cannot hold is escaped), bytes, or a function that is called with the
    path of the file to write.
    """
    temporary = temporary_beside(file)
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
        sync(temporary)
        os.replace(temporary, file)
        sync(file.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sweep(parent: Path, name: str | None = None, older_than: float = 6 * 3600) -> None:
    """Remove the temporary folders and files that killed processes left beside `name`, or beside any name.

    Those younger than `older_than` seconds stay: they may belong to a running process.
    """
    pattern = re.compile(rf"\.{'.*' if name is None else re.escape(_cut(name))}\.tmp-[0-9]+-[0-9a-f]{{8}}", re.DOTALL)
    for leftover in parent.glob(".*.tmp-*"):
        if not pattern.fullmatch(leftover.name):
            continue
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime >= older_than:
                _remove(leftover)


def remove_temporaries(path: Path) -> None:
    """Remove what this process began to write beside `path` and did not move into place."""
    for leftover in path.parent.glob(f".*.tmp-{os.getpid()}-*"):
        if leftover.name.startswith(f".{_cut(path.name)}.tmp-"):
            with contextlib.suppress(OSError):
                _remove(leftover)


def temporary_beside(path: Path) -> Path:
    """Return an unused name beside `path` that `sweep` recognises."""
    # The name is cut: with the suffix, a name of the greatest length would be too long.
    return path.with_name(f".{_cut(path.name)}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{_cut(folder.name)}.old")


def _cut(name: str) -> str:
    """Return as much of a name as fits in 200 bytes."""
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
        # A folder cannot be replaced in one move. An older copy that was moved aside before a crash is outdated by this
        # one.
        _remove(aside)
        with contextlib.suppress(FileNotFoundError):  # another process has moved it meanwhile
            os.rename(folder, aside)
    else:
        raise OSError(errno.EBUSY, "other processes keep replacing it", str(folder))
    sync(folder.parent)
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync_tree(folder: Path) -> None:
    """Sync every file and folder of a tree: without it, a power cut after the rename can leave files without
    content.
    """
    for root, _, files in os.walk(folder):
        for name in files:
            sync(Path(root, name))
        sync(Path(root))


def sync(path: Path) -> None:
    """Write what the system holds of a file or folder to the disk."""
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
