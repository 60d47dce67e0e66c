"""Raw files -> a prepared cache: which cache belongs to a source, and its preparation when it is missing or damaged."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from pathlib import Path

from .cache import CacheError, read_cache, write_cache
from .filtering import filter_dataset
from .formats import RawFormat, find_files, local_path
from .raw import read_raw
from .types import DataError, Dataset, shown

log = logging.getLogger(__name__)

VERSION = 1  # part of every key: raise it when the same source would be prepared differently


def load_or_prepare(name: str, fmt: RawFormat, path, cache_dir: str | Path | None, options: dict) -> Dataset:
    """Open the cache of this source and these options; make it first if it is missing or damaged.

    Without a `cache_dir` the source is prepared in memory and nothing is written.
    """
    cache_dir = None if cache_dir is None else local_path(cache_dir, "data.cache_dir")
    if path and (given := _given_cache(local_path(path, "data.path"), name, options)) is not None:
        return given
    files = find_files(name, fmt, path)
    recipe = {"version": VERSION, "format": name, "options": options, "columns": fmt.columns}
    recipe["timestamp_unit"] = fmt.timestamp_unit
    try:
        before = [_stat(f) for f in files]
        for file, (size, _) in zip(files, before):
            if size == 0:
                raise DataError(f"{file}: the file is empty")
        key = [recipe, [_file_sha256(f) for f in files]]
        fingerprint = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        folder = None if cache_dir is None else cache_dir / f"{name}-{fingerprint[:16]}"
        if folder is not None and (cached := _open(folder, fingerprint)) is not None:
            return cached
        dataset = filter_dataset(read_raw(name, fmt, files, fingerprint), **options)
        if [_stat(f) for f in files] != before:
            raise DataError(f"{files[0]}: the source changed while it was being read; try again")
    except OSError as error:
        raise DataError(
            f"{shown(error.filename or files[0], 200)}: cannot be read: {error.strerror or error}"
        ) from error
    # The filter derives a fingerprint of its own; here the options are part of the key already.
    dataset = dataclasses.replace(dataset, fingerprint=fingerprint)
    if folder is None:
        return dataset
    try:
        write_cache(dataset, folder, {**recipe, "sources": [str(f) for f in files]})
        return read_cache(folder, fingerprint)[0]
    except OSError as error:
        raise DataError(f"{shown(cache_dir, 200)}: cannot write the cache: {error.strerror or error}") from error
    except CacheError as error:
        raise DataError(f"{folder}: cannot be read back after it was written: {error}") from error


def _open(folder: Path, fingerprint: str) -> Dataset | None:
    """The cache in its place, or None when there is none or none that can be used."""
    if not folder.exists():
        return None
    try:
        return read_cache(folder, fingerprint)[0]
    except CacheError as error:
        log.warning("cache %s is damaged (%s): preparing it again", folder, error)
        return None


def _given_cache(folder: Path, name: str, options: dict) -> Dataset | None:
    """The cache that was given as data.path, or None when that is no cache folder."""
    try:
        if not (folder / "meta.json").is_file():
            return None
    except OSError:  # find_files says what is wrong with the path
        return None
    try:
        dataset, meta = read_cache(folder)
    except CacheError as error:
        raise DataError(f"{folder}: damaged cache: {error}; prepare it again from the raw file") from error
    if (meta["format"], meta["options"]) != (name, options):
        raise DataError(
            f"{folder}: this cache holds {meta['format']} prepared with {meta['options']}; "
            f"asked for was {name} with {options}"
        )
    return dataset


def _stat(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def _file_sha256(file: Path) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
