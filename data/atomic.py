"""Write folders and files atomically: they appear whole or not at all, even if the process is killed.

Prepared caches, unpacked archives and checkpoints are all written by this module.
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

OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # errors of a rename to a path that exists
ATTEMPTS = 10  # after the first, a rename fails only if another process replaces the same folder at that moment


@contextlib.contextmanager
def replace_folder(folder: Path, keep: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """Yield an empty folder next to `folder`; at the end of the block, sync its content and move it to `folder`.

    A folder, file or link that exists at `folder` is first renamed and at last removed; after a crash in between,
    `find_folder` finds it. After an error in the block, `folder` is unchanged and no temporary folder is left.

    keep: called with `folder` if that exists at the end. If it returns True, the existing folder is kept and the new
    content dropped (another process was faster, with an equivalent result).

    Raises OSError if the disk is full or `folder` cannot be written.
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
    """Return `folder`, or the renamed earlier one if a crash interrupted its replacement."""
    aside = _aside(folder)
    return aside if not os.path.lexists(folder) and aside.exists() else folder


def put_back(folder: Path) -> None:
    """Rename the folder that `find_folder` returns back to `folder`."""
    if (current := find_folder(folder)) != folder:
        os.rename(current, folder)


def replace_file(file: Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Write a file whole or not at all, and sync it. A link at its path is replaced.

    content: text (written in UTF-8, with escapes for lone surrogates), bytes, or a function that is called with the
    path to write to.
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
    """Remove temporary folders and files in `parent` that killed processes have left.

    name: only those for the path `parent / name`. Those younger than `older_than` seconds are kept, since they may
    belong to a running process.
    """
    pattern = re.compile(rf"\.{'.*' if name is None else re.escape(_cut(name))}\.tmp-[0-9]+-[0-9a-f]{{8}}", re.DOTALL)
    for leftover in parent.glob(".*.tmp-*"):
        if not pattern.fullmatch(leftover.name):
            continue
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime >= older_than:
                _remove(leftover)


def remove_temporaries(path: Path) -> None:
    """Remove the temporary folders and files of this process for `path`."""
    for leftover in path.parent.glob(f".*.tmp-{os.getpid()}-*"):
        if leftover.name.startswith(f".{_cut(path.name)}.tmp-"):
            with contextlib.suppress(OSError):
                _remove(leftover)


def temporary_beside(path: Path) -> Path:
    """Return an unused path next to `path`, with a name that `sweep` recognises."""
    # The name is cut so that it is not too long with the suffix.
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
        # A folder cannot be replaced by one rename. A copy that an earlier crash has left is no longer needed.
        _remove(aside)
        with contextlib.suppress(FileNotFoundError):  # another process has moved it
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
    """Sync every file and folder of a tree; otherwise files may be empty after a power cut."""
    for root, _, files in os.walk(folder):
        for name in files:
            sync(Path(root, name))
        sync(Path(root))


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
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
