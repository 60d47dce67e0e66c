"""A run's folder: create it, claim it for one process at a time, and write its files atomically.

run.json      the manifest: the run's id, which is also stored with its weights, and how the run was started
vocabulary/   the original ids of its items and users
config.yaml   metrics.jsonl   tensorboard/   checkpoints/   best/   result.json   report.html   report.md
loss.svg      metric.svg   ranking-*.png   eval-*.json
lineage.jsonl only of an updated run: a line for each generation, see training/update.py
judged.npz    the model's results for each user or event of the test split

A symbolic link in place of one of the folders is an error; one in place of a file is replaced, not its target.
"""

import fcntl
import io
import json
import math
import os
import secrets
import socket
import stat
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic import put_back, replace_file, sweep
from data.errors import UserError
from data.types import shown
from hstu_sparse_checkout import commit

LOCK, MANIFEST, JUDGED, LINEAGE = ".lock", "run.json", "judged.npz", "lineage.jsonl"
FOLDERS = ("checkpoints", "best", "tensorboard", "vocabulary")
MOST_FACTS = 2**28  # bytes; larger JSON files are refused
MOST_JUDGED = 2**36


class FolderError(UserError):
    """A run's folder cannot be created, claimed, read or written; the message is one line."""


@contextmanager
def access(path: Path, what: str) -> Iterator[None]:
    """Raise an OSError in the block as FolderError, as in `PATH: cannot be WHAT: No space left on device`."""
    try:
        yield
    except OSError as error:
        raise FolderError(f"{shown(path, 200)}: cannot be {what}: {error.strerror or error}") from error


def check_path(path: Path) -> None:
    """Raise FolderError for a path that some libraries cannot use."""
    if "\0" in str(path):
        raise FolderError(f"{shown(path)}: a path cannot contain a NUL character")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise FolderError(f"{shown(path, 200)}: the path is not valid UTF-8, choose another") from None


def check_run(folder: Path) -> None:
    """Raise FolderError unless `folder` is a run's folder."""
    check_path(folder)
    with access(folder, "read"):
        if not folder.exists():
            raise FolderError(f"{shown(folder, 200)}: no such folder")
        if not (folder / "config.yaml").exists():
            raise FolderError(f"{shown(folder, 200)}: not a run folder (no config.yaml)")


def read_regular(path: Path, most: int = MOST_FACTS) -> bytes:
    """Read a regular file of at most `most` bytes; OSError, before reading, for other files."""
    check_regular(path, most)
    return path.read_bytes()


def check_regular(path: Path, most: int | None = None) -> None:
    """Raise OSError unless `path` is a regular file, or a link to one, of at most `most` bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(None, f"not a regular file ({path.name})")
    if most is not None and status.st_size > most:
        raise OSError(None, f"{status.st_size:,} bytes, expected at most {most:,}")


def new_manifest() -> dict:
    """Create the manifest of a new run: its id, time, command and commit."""
    return {
        "run": secrets.token_hex(8),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [shown(part, 500) for part in sys.argv],
        "commit": commit(),
    }


def read_manifest(folder: Path) -> dict:
    """Read the run's manifest; FolderError if it is missing or damaged."""
    path = folder / MANIFEST
    with access(path, "read"):
        text = read_regular(path)
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("run"), str):
        raise FolderError(f"{shown(path, 200)}: damaged, expected an object with the run's id")
    return manifest


@contextmanager
def claimed(folder: Path, new: bool, another: bool = False) -> Iterator[Path]:
    """Claim the folder for this process and yield it; FolderError if another process uses it.

    Temporary files of a killed process are removed first. A new folder is created; it is removed at the end if it is
    still empty. The claim ends with the process, even if it is killed. another: if the folder exists, create
    `FOLDER-2`, `FOLDER-3` and so on instead.
    """
    check_path(folder)
    with access(folder, "written"):
        created = [path for path in (folder, *folder.parents) if not path.exists()] if new else []
        if another:
            folder = _make_another(folder)
            created = [folder, *(path for path in created if path in folder.parents)]
        else:
            folder.mkdir(parents=True, exist_ok=True)
        handle = _lock(folder)
    try:
        with access(folder, "written"):
            if new and any(not path.name.startswith(".") for path in folder.iterdir()):
                fault = "already has a run; --resume it or" if (folder / "config.yaml").exists() else "is not empty;"
                raise FolderError(f"{shown(folder, 200)}: {fault} choose another folder")
            for name in FOLDERS:
                if (folder / name).is_symlink():
                    raise FolderError(f"{shown(folder / name, 200)}: a symbolic link, expected a folder")
            sweep(folder, older_than=0)
            sweep(folder / "checkpoints", older_than=0)
            for name in ("best", "vocabulary"):
                put_back(folder / name)
        yield folder
    finally:
        if created and [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            for path in created:
                with suppress(OSError):  # not empty: another process uses it
                    path.rmdir()
        os.close(handle)


def _make_another(folder: Path) -> Path:
    """Create and return `folder`, or the first of `FOLDER-2`, `FOLDER-3`, ... that does not exist."""
    count, path = 1, folder
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            count += 1
            path = folder.with_name(f"{folder.name}-{count}")


def wait_until_free(folder: Path) -> None:
    """Wait until no process has the folder claimed: a run whose parent was killed may still be saving a checkpoint."""
    path = folder / LOCK
    if path.is_symlink() or not path.is_file():
        return
    with access(path, "read"), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def _lock(folder: Path) -> int:
    path = folder / LOCK
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise FolderError(f"{shown(path, 200)}: a symbolic link or special file, expected a regular file")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 200).decode("utf-8", "replace").strip()
        os.close(handle)
        raise FolderError(f"{shown(folder, 200)}: another process is using it ({shown(holder)})") from None
    os.truncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return handle


def write_file(path: Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Write a file of the run atomically (see `replace_file`); FolderError if it cannot be written."""
    with access(path, "written"):
        replace_file(path, content)


def with_nulls(value: Any) -> Any:
    """Replace each number of a JSON value that is not finite, which JSON cannot express, by None."""
    if isinstance(value, dict):
        return {key: with_nulls(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_nulls(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(value: Any) -> str:
    """Format a value as indented JSON, with null for a number that is not finite."""
    return json.dumps(with_nulls(value), indent=1, allow_nan=False)


def write_judged(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a run's results for each user or event, `judged` of `Task.judge`, to judged.npz in the run's folder."""
    content = io.BytesIO()
    columns: dict[str, Any] = dict(arrays)
    np.savez_compressed(content, **columns)
    write_file(folder / JUDGED, content.getvalue())


def read_judged(folder: Path) -> dict[str, np.ndarray]:
    """Read the file of `write_judged`; FolderError if it is missing or damaged."""
    path = folder / JUDGED
    with access(path, "read"):
        content = read_regular(path, MOST_JUDGED)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return dict(arrays)
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise FolderError(f"{shown(path, 200)}: damaged ({shown(error)})") from None
