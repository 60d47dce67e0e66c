"""Find the prepared cache of a source, or prepare it from the raw files if it is missing or damaged."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from data.atomic import remove_temporaries, sweep, temporary_beside
from data.cache import REMOVED_FROM, CacheError, read_cache, write_cache
from data.features.files import FeatureSource, find_tables, read_tables, with_tables
from data.features.options import Features
from data.filtering import filter_dataset
from data.progress import Progress, interruptible
from data.reading.formats import RawFormat
from data.reading.partitions import read_in_partitions
from data.reading.raw import PLAIN, Handling, read_raw
from data.reading.remote import is_remote
from data.reading.sources import RawFile, check_source, copied, find_sources, literal, local_path
from data.types import DataError, Dataset, shown

log = logging.getLogger(__name__)

NO_FILTER = {"min_user_events": 1, "min_item_events": 1}
VERSION = 1  # part of every key: increase it when the same source is prepared differently
NAMED_VERSION = 2  # the same for csv and parquet


class OtherData(DataError):
    """A source has other data than expected."""


def load_or_prepare(
    name: str,
    fmt: RawFormat,
    path: str | Path | None,
    cache_dir: str | Path | None,
    options: dict | None,
    handling: Handling = PLAIN,
    report: Callable[[str], None] | None = None,
    features: Features | None = None,
    partitions: int | None = None,
    expected: str | None = None,
) -> Dataset:
    """Open the cache of a source with these options; prepare it first if it is missing or damaged.

    Ctrl-C ends a preparation within a second and leaves no incomplete cache.

    Args:
        name, fmt: the format.
        path: the raw files, or a cache folder.
        cache_dir: the folder of caches; None prepares the data in memory and writes nothing.
        options: options of `filter_dataset`; with None, a cache folder as `path` may have any options and features.
        handling: the handling of bad rows and duplicates.
        report: called from time to time with a line about the progress.
        features: options of the features of items, users and events.
        partitions: the number of ranges of users that are prepared one after another; None: 1, or more if memory is
            too small.
        expected: the expected fingerprint.

    Raises:
        DataError: the data or options are wrong.
        OtherData: the fingerprint differs from `expected`; raised before a preparation.
    """
    cache_dir = None if cache_dir is None else local_path(cache_dir, "data.cache_dir")
    requested = _recipe(name, fmt, options, handling, features)
    progress = Progress(report)
    if path and is_remote(path):
        path = interruptible(lambda: copied(str(path), fmt, cache_dir, progress), progress, lambda: None)
    elif path and (prepared := _given_cache(local_path(path, "data.path"), requested)) is not None:
        check_fingerprint(expected, prepared.fingerprint, shown(path, 200))
        return prepared
    sources, how = find_sources(name, fmt, path)
    recipe = requested | {"options": options or NO_FILTER}
    used = {*fmt.columns.values()}
    folder_columns = [[column for column in source.folder_columns if column[0] in used] for source in sources]
    if any(folder_columns):
        recipe["folder_columns"] = folder_columns
    tables = find_tables(features, cache_dir)
    place: list[Path] = []

    def work() -> Dataset:
        vectors = None if cache_dir is None else temporary_beside(cache_dir / "vectors")
        options = handling, progress, place, partitions, expected, vectors
        try:
            return _prepare(name, fmt, sources, tables, cache_dir, recipe, *options)
        finally:
            if vectors is not None:
                shutil.rmtree(vectors, ignore_errors=True)

    def clean() -> None:
        for folder in place:
            remove_temporaries(folder)

    dataset = interruptible(work, progress, clean)
    return dataclasses.replace(dataset, notes=(how, *dataset.notes)) if how else dataset


def find_prepared(name: str, cache_dir: str | Path, fingerprint: str) -> Dataset | None:
    """Return the data set of this format and fingerprint from the cache, or None; the source is not needed."""
    return _open(cache_folder(local_path(cache_dir, "data.cache_dir"), name, fingerprint), fingerprint)


def find_rest(path: str | Path | None, cache_dir: str | Path, fingerprint: str) -> Dataset | None:
    """Return the prepared data set at `path` or in `cache_dir` that had this fingerprint before users were removed from
    it (`forget.py`), or None.
    """
    places = [] if path is None or is_remote(path) else [local_path(path, "data.path") / "meta.json"]
    for file in (*places, *sorted(local_path(cache_dir, "data.cache_dir").glob("*/meta.json"))):
        try:
            if fingerprint not in file.read_text(encoding="utf-8"):
                continue
            dataset, meta = read_cache(file.parent)
        except (OSError, ValueError, CacheError):
            continue
        if fingerprint in meta.get(REMOVED_FROM, ()):
            return dataset
    return None


def cache_folder(cache_dir: Path, name: str, fingerprint: str) -> Path:
    """Return the folder in `cache_dir` of the prepared data set of format `name` with this fingerprint."""
    return cache_dir / f"{name}-{fingerprint[:16]}"


def _recipe(
    name: str, fmt: RawFormat, options: dict | None, handling: Handling, features: Features | None = None
) -> dict:
    """Return all that determines the content of a cache, except the content of the files."""
    # Event columns that are features are part of the features' recipe.
    columns = {role: column for role, column in fmt.columns.items() if role not in fmt.features}
    recipe = {"version": VERSION, "format": name, "options": options, "columns": columns}
    recipe["timestamp_unit"] = fmt.timestamp_unit
    # Keys that earlier versions did not have are left out if unused, so that earlier caches keep their fingerprints.
    if fmt.named_columns:
        recipe["version"] = NAMED_VERSION
        recipe |= {"timestamp_format": fmt.timestamp_format, "action_codes": fmt.action_codes}
    if fmt.kind == "sequences" or fmt.named_columns:
        recipe["separator"] = None if fmt.detect_separator else fmt.separator
    if fmt.encoding is not None:
        recipe["encoding"] = fmt.encoding
    if fmt.where is not None:
        recipe["where"] = fmt.where
    if fmt.decimal != ".":
        recipe["decimal"] = fmt.decimal
    if features is not None and (read := features.recipe()):
        recipe["features"] = read
    if (handling.on_bad_row, handling.duplicates) != (PLAIN.on_bad_row, PLAIN.duplicates):
        recipe |= {"on_bad_row": handling.on_bad_row, "duplicates": handling.duplicates}
    if handling.on_bad_row == "drop" or (features is not None and features.drops_bad_rows):
        recipe["bad_rows_limit"] = handling.bad_rows_limit
    return recipe


def _prepare(
    name: str,
    fmt: RawFormat,
    sources: list[RawFile],
    tables: list[FeatureSource],
    cache_dir: Path | None,
    recipe: dict,
    handling: Handling,
    progress: Progress,
    place: list[Path],
    partitions: int | None,
    expected: str | None,
    vectors: Path | None,
) -> Dataset:
    """Find or prepare the cache of existing files.

    place: gets the folders that may have temporary files next to them. vectors: a temporary folder for item vectors.
    """
    try:
        inputs = [*((s, fmt) for s in sources), *((file, table.fmt) for table in tables for file in table.sources)]
        checked = [check_source(source, fmt_) for source, fmt_ in inputs]
        sums = []
        for source, _ in inputs:
            progress.stage(f"checking {source.name}")
            sums.append(file_sha256(source.path))
        fingerprint = _fingerprint(recipe, sums)
        check_fingerprint(expected, fingerprint, sources[0].name)
        folder = None if cache_dir is None else cache_folder(cache_dir, name, fingerprint)
        if folder is not None and (cached := _open(folder, fingerprint)) is not None:
            return cached
        place += [(cache_dir or Path(tempfile.gettempdir())) / "unpacked", *([folder] if folder else [])]
        if cache_dir is not None:
            sweep(cache_dir, "vectors")
            place.append(cache_dir / "vectors")
        dataset, read = None, []
        parts = None if folder is None else folder.with_name(f"{folder.name}.partitions")
        if partitions != 1 and parts is not None and not tables and not fmt.features:
            arguments = name, fmt, sources, fingerprint, handling, recipe["options"], parts, partitions, progress
            try:
                dataset = read_in_partitions(*arguments)
            except DataError:
                shutil.rmtree(parts, ignore_errors=True)
                raise
        elif partitions not in (None, 1):
            raise DataError("data.partitions: needs data.cache_dir, and cannot be combined with data.features")
        if dataset is None:
            dataset = read_raw(name, fmt, sources, fingerprint, handling, cache_dir, progress)
            # Tables are read before the filter: items that the filter drops are known.
            read = read_tables(tables, dataset, handling.bad_rows_limit, cache_dir, progress.stage)
            progress.stage("filtering")
            dataset = filter_dataset(dataset, **recipe["options"])
        dataset = with_tables(dataset, read, vectors, progress.stage)
        if [check_source(source, fmt_) for source, fmt_ in inputs] != checked:
            raise DataError(f"{sources[0].name}: the source changed while it was being read; try again")
    except OSError as error:
        fault = "cannot be read" if error.filename else "cannot be read or unpacked"
        raise DataError(
            f"{shown(error.filename or sources[0].path, 200)}: {fault}: {error.strerror or error}"
        ) from error
    if "features" in recipe:
        plain = {key: value for key, value in recipe.items() if key != "features"}
        dataset = dataclasses.replace(dataset, events_fingerprint=_fingerprint(plain, sums[: len(sources)]))
    # Replace the fingerprint that the filter computed: this one includes the filter's options, too.
    dataset = dataclasses.replace(dataset, fingerprint=fingerprint)
    if folder is None:
        return dataset
    try:
        write_cache(dataset, folder, {**recipe, "sources": [str(s.path) for s in sources]}, progress.stage)
        if parts is not None:
            shutil.rmtree(parts, ignore_errors=True)
        return read_cache(folder, fingerprint)[0]
    except OSError as error:
        raise DataError(f"{shown(cache_dir, 200)}: cannot write the cache: {error.strerror or error}") from error
    except CacheError as error:
        raise DataError(f"{shown(folder, 200)}: cannot be read back after it was written: {error}") from error


def check_fingerprint(expected: str | None, fingerprint: str, source: str) -> None:
    """Raise OtherData if a fingerprint is expected and the data of `source` have another one."""
    if expected not in (None, fingerprint):
        raise OtherData(f"{source}: expected the data with fingerprint {expected}, got {fingerprint}")


def _open(folder: Path, fingerprint: str) -> Dataset | None:
    """Return the cache in this folder, or None if there is none or it is damaged."""
    if not folder.exists():
        return None
    try:
        return read_cache(folder, fingerprint)[0]
    except CacheError as error:
        log.warning("cache %s is damaged (%s): preparing it again", folder, error)
        return None


def _given_cache(folder: Path, requested: dict) -> Dataset | None:
    """Return the cache at data.path, or None if the folder is not a cache.

    DataError if the cache has another recipe than `requested`; if `requested` has no options, the cache may have any.
    """
    try:
        if not (folder / "meta.json").is_file():
            return None
    except OSError:  # find_sources reports the fault of the path
        return None
    try:
        dataset, meta = read_cache(folder)
    except CacheError as error:
        raise DataError(f"{shown(folder, 200)}: damaged cache: {error}; prepare it again from the raw file") from error
    for key in ("where", "decimal", "encoding"):  # these are in a recipe only if they are used
        if key in meta:
            requested = {key: None} | requested
    for key, value in requested.items():
        # If no unit is requested, the cache's unit was detected. Caches of earlier versions have fewer keys.
        accepted = key in ("version", "bad_rows_limit") or (key in ("options", "timestamp_unit") and value is None)
        accepted |= key == "features" and requested["options"] is None
        default = {"on_bad_row": "error", "duplicates": "keep"}.get(key)
        if not accepted and (stored := meta.get(key, default)) != value:
            raise DataError(
                f"{shown(folder, 200)}: expected a cache of {requested['format']} with {key}={_formatted(value)}, got "
                f"one of {meta['format']} with {key}={_formatted(stored)}"
            )
    return dataset


def _formatted(value: object) -> str:
    """Format an option for an error message."""
    return shown(json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value, 300)


def _fingerprint(recipe: dict, sums: list[str]) -> str:
    return hashlib.sha256(json.dumps([recipe, sums], sort_keys=True).encode()).hexdigest()


def file_sha256(file: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal text."""
    with literal(file) as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
