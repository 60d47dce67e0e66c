"""A run's folder: made, claimed by one process at a time, its files written whole.

config.yaml   metrics.jsonl   tensorboard/   checkpoints/   best/   result.json   report.md   loss.png   eval-*.json
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data.atomic import put_back, replace_file, sweep
from data.types import shown

LOCK = ".lock"


class FolderError(ValueError):
    """A run's folder that cannot be made, claimed, read or written, in one line."""


@contextmanager
def access(path: Path, what: str) -> Iterator[None]:
    """Inside, an error of the file system is told as `PATH: cannot be WHAT: No space left on device`."""
    try:
        yield
    except OSError as error:
        raise FolderError(f"{shown(path, 200)}: cannot be {what}: {error.strerror or error}") from error


def check_run(folder: Path) -> None:
    """FolderError unless `folder` is a run's."""
    with access(folder, "read"):
        if "\0" in str(folder) or not (folder / "config.yaml").exists():
            raise FolderError(f"{shown(folder, 200)}: not a run folder (no config.yaml)")


@contextmanager
def claimed(folder: Path, new: bool) -> Iterator[None]:
    """Holds the folder for this process alone; FolderError when another one is training in it.

    What a killed process left half done is put right first. A new folder is made, and goes again when nothing was put
    into it. The claim ends with the process, however that ends.
    """
    if "\0" in str(folder):
        raise FolderError(f"{shown(folder)}: a path cannot hold a NUL character")
    with access(folder, "written"):
        made = [path for path in (folder, *folder.parents) if not path.exists()] if new else []
        folder.mkdir(parents=True, exist_ok=True)
        handle = _lock(folder)
    try:
        with access(folder, "written"):
            if new and any(not path.name.startswith(".") for path in folder.iterdir()):
                raise FolderError(f"{folder}: already holds a run; --resume it or choose another folder")
            sweep(folder, older_than=0)
            sweep(folder / "checkpoints", older_than=0)
            put_back(folder / "best")
        yield
    finally:
        if made and [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            for path in made:
                with suppress(OSError):  # another process has put something there
                    path.rmdir()
        os.close(handle)


def _lock(folder: Path) -> int:
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 200).decode("utf-8", "replace").strip()
        os.close(handle)
        raise FolderError(f"{folder}: another process is training in it ({shown(holder)})") from None
    os.truncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return handle


def write_text(path: Path, text: str) -> None:
    """The file, whole or not at all; FolderError when the disk is full, say."""
    with access(path, "written"):
        replace_file(path, text)
