"""Store prepared data sets as folders with a .npy file for each column and meta.json.

Requires only numpy. `read_cache` returns a valid `Dataset` or raises CacheError, for any content of a folder.

Letters: E events, U users.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic import replace_folder, sweep
from data.features.features import ENTITIES, KINDS, VECTOR, Feature
from data.types import Dataset, shown

LAYOUT = 2  # the version of the files' layout; the version of their content is in prepare.py
COLUMNS = ("items", "timestamps", "actions", "user_offsets", "user_ids", "item_ids")
FEATURE: dict[str, type | None] = {"values": None, "codes": np.int32, "offsets": np.int64}  # the arrays of a feature
INTEGERS = {"items": np.int32, "timestamps": np.int64, "actions": np.int32, "user_offsets": np.int64}
META = {
    "layout": int,
    "name": str,
    "format": str,
    "options": dict,
    "fingerprint": str,
    "has_timestamps": bool,
    "num_users": int,
    "num_items": int,
    "num_events": int,
    "files": dict,
}


REMOVED_FROM = "removed_from"  # key in meta.json: the fingerprints that the data had before users were removed

CHUNK = 1 << 24  # events checked at a time


class CacheError(Exception):
    """A cache folder is incomplete or damaged."""


def write_cache(dataset: Dataset, folder: Path, meta: dict, stage: Callable[[str], None] = lambda _: None) -> None:
    """Write a data set to `folder`, whole or not at all. OSError if, for example, the disk is full.

    meta: more entries of meta.json; stage: called with a description of each step, may raise.
    """
    sweep(folder.parent, folder.name)
    with replace_folder(folder, keep=_is_good) as temporary:
        files = {}
        for column, array in _columns_of(dataset).items():
            file = temporary / f"{column}.npy"
            stage(f"writing the cache: {column}")
            save_array(file, array)
            files[column] = {"size": file.stat().st_size, "crc32": _file_crc32(file)}
        meta = {
            **meta,
            "layout": LAYOUT,
            "name": dataset.name,
            "fingerprint": dataset.fingerprint,
            "has_timestamps": dataset.has_timestamps,
            "num_users": dataset.num_users,
            "num_items": dataset.num_items,
            "num_events": dataset.num_events,
            "files": files,
            "action_names": None if dataset.action_names is None else list(dataset.action_names),
            "notes": list(dataset.notes),
        }
        if dataset.events_fingerprint is not None:
            meta["events_fingerprint"] = dataset.events_fingerprint
        if dataset.features:
            meta["stored_features"] = [[f.entity, f.name, f.kind] for f in dataset.features]
        text = json.dumps(meta | {"crc32": _meta_crc32(meta)}, indent=1)
        (temporary / "meta.json").write_text(text, encoding="utf-8")


def save_array(file: Path, array: np.ndarray) -> None:
    """Save an array as a .npy file; a memory map of such a file is linked instead of copied."""
    if isinstance(array, np.memmap) and array.filename is not None:
        with contextlib.suppress(OSError):  # another disk, or one without links
            os.link(str(array.filename), file)
            return
    np.save(file, array, allow_pickle=False)


def read_cache(folder: Path, fingerprint: str | None = None) -> tuple[Dataset, dict]:
    """Return (the data set with memory-mapped columns, the content of meta.json); CacheError if anything is wrong."""
    meta = _read_meta(folder)
    if fingerprint is not None and meta["fingerprint"] != fingerprint:
        raise CacheError("fingerprint differs")
    described = meta.get("stored_features", [])
    known = {*COLUMNS, *(f"feature-{n}-{part}" for n in range(len(described)) for part in FEATURE)}
    if unknown := meta["files"].keys() - known:
        raise CacheError(f"meta.json: unknown column {shown(min(unknown))}")
    arrays: dict[str, Any] = dict.fromkeys(known)
    vectors = {f"feature-{number}-values" for number, (*_, kind) in enumerate(described) if kind == VECTOR}
    for column, expected in meta["files"].items():
        arrays[column] = _read_column(folder, column, expected, column in vectors)
    if missing := [c for c in COLUMNS if arrays[c] is None and c != "actions"]:
        raise CacheError(f"no column {', '.join(missing)}")
    names = meta.get("action_names")
    dataset = Dataset(
        name=meta["name"],
        has_timestamps=meta["has_timestamps"],
        fingerprint=meta["fingerprint"],
        action_names=None if names is None else tuple(names),
        notes=tuple(meta.get("notes") or ()),
        features=_features(described, arrays),
        events_fingerprint=meta.get("events_fingerprint"),
        **{column: arrays[column] for column in COLUMNS},
    )
    for key in ("num_users", "num_items", "num_events"):
        if meta[key] != getattr(dataset, key):
            raise CacheError(f"meta.json: {key}={meta[key]}, but the columns have {getattr(dataset, key)}")
    _check(dataset)
    return dataset, meta


def _is_good(folder: Path) -> bool:
    try:
        read_cache(folder)
        return True
    except CacheError:
        return False


def _read_meta(folder: Path) -> dict:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CacheError(f"meta.json: {type(error).__name__}: {shown(error, 200)}") from error
    if not isinstance(meta, dict):
        raise CacheError(f"meta.json: expected an object, got {type(meta).__name__}")
    if meta.get("layout") != LAYOUT:
        raise CacheError(f"meta.json: layout {shown(meta.get('layout'))}, expected {LAYOUT}")
    for key, kind in META.items():
        if not isinstance(meta.get(key), kind):
            raise CacheError(f"meta.json: {key}: expected {kind.__name__}, got {shown(repr(meta.get(key)))}")
    for key in ("action_names", "notes"):  # earlier caches have none
        texts = meta.get(key)
        if texts is not None and not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
            raise CacheError(f"meta.json: {key}: expected a list of text, got {shown(repr(texts))}")
    if meta.pop("crc32", None) != _meta_crc32(meta):
        raise CacheError("meta.json: wrong checksum")
    if not isinstance(meta.get("events_fingerprint", ""), str):
        raise CacheError(f"meta.json: events_fingerprint: expected str, got {shown(repr(meta['events_fingerprint']))}")
    for item in _listed(meta.get("stored_features", [])):
        known = len(_listed(item)) == 3 and item[0] in ENTITIES and isinstance(item[1], str)
        if not known or item[2] not in (*KINDS, *([VECTOR] if item[0] == "items" else [])):
            raise CacheError(
                f"meta.json: stored_features: expected an entity, a name and a kind, got {shown(repr(item))}"
            )
    return meta


def _listed(value: object) -> list:
    if not isinstance(value, list):
        raise CacheError(f"meta.json: stored_features: expected a list, got {shown(repr(value))}")
    return value


def _read_column(folder: Path, column: str, expected: object, vectors: bool = False) -> np.ndarray:
    file = folder / f"{column}.npy"
    if not isinstance(expected, dict) or expected.keys() != {"size", "crc32"}:
        raise CacheError(f"meta.json: files.{column}: expected size and crc32")
    try:
        size = file.stat().st_size
        if size != expected["size"]:
            raise CacheError(f"{file.name}: expected {expected['size']} bytes, got {size}")
        if _file_crc32(file) != expected["crc32"]:
            raise CacheError(f"{file.name}: wrong checksum")
        # "c", copy-on-write: torch needs writable memory, and the file must not change.
        mapped = np.lib.format.open_memmap(file, mode="c")
    except (
        OSError,
        ValueError,
        TypeError,
        EOFError,
        SyntaxError,
    ) as error:  # EOFError, SyntaxError: the header is not valid
        raise CacheError(f"{file.name}: {type(error).__name__}: {shown(error, 200)}") from error
    if vectors:
        if mapped.ndim != 2 or mapped.dtype != np.float16:
            shape = list(mapped.shape)
            raise CacheError(f"{file.name}: expected vectors of float16, got shape {shape}, {mapped.dtype}")
        return mapped  # still a memory map, whose file a run's folder can share
    array = mapped.view(np.ndarray)
    if array.ndim != 1:
        raise CacheError(f"{file.name}: expected one dimension, got shape {list(array.shape)}")
    expected = INTEGERS.get(column) or FEATURE.get(column.rpartition("-")[2])
    if expected is not None:
        if array.dtype != expected:
            raise CacheError(f"{file.name}: expected {np.dtype(expected)}, got {array.dtype}")
    elif column.startswith("feature-"):
        if array.dtype != np.float64 and array.dtype.kind != "U":
            raise CacheError(f"{file.name}: expected float64 or text, got {array.dtype}")
    elif array.dtype != np.int64 and array.dtype.kind != "U":
        raise CacheError(f"{file.name}: expected int64 or text, got {array.dtype}")
    return array


def _columns_of(dataset: Dataset) -> dict[str, np.ndarray]:
    """Return the arrays of a data set by the names of their files."""
    columns = {column: getattr(dataset, column) for column in COLUMNS}
    for number, feature in enumerate(dataset.features):
        columns |= {f"feature-{number}-{part}": getattr(feature, part) for part in FEATURE}
    return {column: array for column, array in columns.items() if array is not None}


def _features(described: list, arrays: dict) -> tuple[Feature, ...]:
    """Build the features that meta.json describes from columns that were read; CacheError if a column is missing."""
    features = []
    for number, description in enumerate(described):
        parts = {part: arrays[f"feature-{number}-{part}"] for part in FEATURE}
        if missing := [part for part in FEATURE if parts[part] is None]:
            raise CacheError(f"no column feature-{number}-{missing[0]}")
        features.append(Feature(*description, **parts))
    return tuple(features)


def _check(dataset: Dataset) -> None:
    """Check the columns, so that a bad cache is an error here and not an index error during training."""
    events, offsets = dataset.num_events, dataset.user_offsets
    for column in ("timestamps", "actions"):
        array = getattr(dataset, column)
        if array is not None and len(array) != events:
            raise CacheError(f"{column}.npy: expected {events} values, one for each event, got {len(array)}")
        if array is not None and events and array.min() < 0:
            raise CacheError(f"{column}.npy: a negative value")
    if events and not 0 <= dataset.items.min() <= dataset.items.max() < dataset.num_items:
        raise CacheError(f"items.npy: expected 0..{dataset.num_items - 1}")
    if (
        len(offsets) != dataset.num_users + 1
        or offsets[0] != 0
        or offsets[-1] != events
        or (np.diff(offsets) < 0).any()
    ):
        raise CacheError(f"user_offsets.npy: expected {dataset.num_users + 1} ascending values from 0 to {events}")
    actions, names = dataset.actions, dataset.action_names
    if names is not None and (actions is None or (events and actions.max() >= len(names))):
        raise CacheError("meta.json: action_names: expected a name for each action")
    if not dataset.has_timestamps and dataset.timestamps.any():
        raise CacheError("meta.json: has_timestamps=false, but timestamps.npy is not all zeros")
    rows = {"items": dataset.num_items, "users": dataset.num_users, "events": events}
    for number, feature in enumerate(dataset.features):
        _check_feature(f"feature-{number}", feature, rows[feature.entity])
    for begin in range(1, events, CHUNK):
        times = dataset.timestamps[begin - 1 : begin - 1 + CHUNK + 1]
        falls = np.flatnonzero(times[1:] < times[:-1]) + begin
        if (offsets[np.searchsorted(offsets, falls)] != falls).any():
            raise CacheError("timestamps.npy: a user's events are out of order")


def _check_feature(file: str, feature: Feature, rows: int) -> None:
    values, codes, offsets = feature.values, feature.codes, feature.offsets
    lengths = np.diff(offsets)
    if len(offsets) != rows + 1 or offsets[0] != 0 or offsets[-1] != len(codes) or (lengths < 0).any():
        raise CacheError(f"{file}-offsets.npy: expected {rows + 1} ascending values from 0 to {len(codes)}")
    if feature.kind != "list" and (lengths > 1).any():
        raise CacheError(f"{file}-offsets.npy: more than one value in a row of kind {feature.kind}")
    if len(codes) and not 0 <= codes.min() <= codes.max() < len(values):
        raise CacheError(f"{file}-codes.npy: expected 0..{len(values) - 1}")
    if feature.kind == VECTOR:
        rows = max(1, CHUNK // max(1, values.shape[1]))
        if not all(np.isfinite(values[begin : begin + rows]).all() for begin in range(0, len(values), rows)):
            raise CacheError(f"{file}-values.npy: expected finite numbers")
        return
    number = feature.kind == "number"
    if number != (values.dtype == np.float64) or (number and not np.isfinite(values).all()):
        raise CacheError(f"{file}-values.npy: expected {'finite numbers' if number else 'text'}")
    if (values[1:] <= values[:-1]).any():
        raise CacheError(f"{file}-values.npy: expected ascending values")


def _file_crc32(file: Path) -> int:
    crc = 0
    with open(file, "rb") as f:
        while chunk := f.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc


def _meta_crc32(meta: dict) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())
