"""Store arrays that were computed from a prepared data set in a file next to it, for later runs."""

import contextlib
import hashlib
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data.atomic import replace_file
from data.config import DataConfig
from data.prepare import cache_folder
from data.types import Dataset

Arrays = dict[str, np.ndarray]


def cached_arrays(
    config: DataConfig, dataset: Dataset, name: str, inputs: list[np.ndarray], compute: Callable[[], Arrays]
) -> Arrays:
    """Return the arrays of `compute()`, or those that an earlier call with the same data, name and inputs stored.

    Nothing is stored for data outside the cache (generated data, or a prepared copy as `data.path`), or if the disk is
    full or read-only.
    """
    prepared = cache_folder(Path(config.cache_dir).expanduser(), config.format, dataset.fingerprint)
    if not prepared.is_dir():
        return compute()
    key = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in inputs)).hexdigest()
    file = prepared.with_name(f"{prepared.name}-{name}-{key[:16]}.npz")
    # A damaged file is replaced: every member of the archive has a checksum.
    unreadable = OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error
    with contextlib.suppress(*unreadable), np.load(file, allow_pickle=False) as stored:
        return dict(stored)
    arrays = compute()
    with contextlib.suppress(OSError):
        replace_file(file, lambda path: _save(path, arrays))
    return arrays


def _save(path: Path, arrays: Arrays) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # mypy: a name could be an option of savez
