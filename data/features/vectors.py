"""Read vectors of items: a Parquet column of lists of one length, or a .npy file with the items' ids next to it.

Vectors are normalised to length one and stored as float16, which is more exact than bfloat16 for numbers up to one.
They are read, checked and written in parts, so that they need not fit into memory.

Letters: R rows of a file, I items, n items with a row, W the size of a vector.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.features.features import VECTOR, Feature
from data.reading.encodings import decoded
from data.reading.sources import RawFile, literal
from data.reading.values import MAX_ID_LENGTH
from data.types import DataError, shown

AT_ONCE = 2**22  # numbers read at a time
MOST_NAMED = 5  # bad vectors listed in an error
IDS = (".ids.npy", ".ids.txt")  # endings of files of ids, in place of .npy


@dataclass(frozen=True)
class VectorFile:
    """The vectors in a file, one in each row.

    source   the file
    feature  the name of the feature
    column   the column of a Parquet file; None for a .npy file
    rows     the number of rows
    width    the size of a vector
    """

    source: RawFile
    feature: str
    column: str | None
    rows: int
    width: int

    def parts(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (the first row, the mask [m] of rows with a vector, these vectors), m rows at a time."""
        size = max(1, AT_ONCE // self.width)
        if self.column is None:
            values = _opened(self.source)
            for first in range(0, self.rows, size):
                part = values[first : first + size]
                yield first, np.ones(len(part), bool), part
            return
        first = 0
        for frame in _scan(self.source, self.column).collect_batches(chunk_size=size, maintain_order=True):
            column = frame.to_series()
            present = column.is_not_null().to_numpy()
            numbers = column.drop_nulls().explode().to_numpy()
            if len(numbers) != self.width * present.sum():
                raise DataError(f"{self.source.name}, column {shown(self.column)}: vectors of different lengths")
            yield first, present, numbers.reshape(-1, self.width)
            first += len(present)


def open_npy(source: RawFile, feature: str) -> VectorFile:
    """Open a .npy file [R, W]; DataError for any other content."""
    values = _opened(source)
    if values.ndim != 2 or not values.size or values.dtype.kind != "f" or values.dtype.itemsize > 8:
        raise DataError(
            f"{source.name}: expected an array [items, size] of floating-point numbers, got "
            f"{list(values.shape)} of {values.dtype}"
        )
    return VectorFile(source, feature, None, *values.shape)


def open_parquet(source: RawFile, feature: str, column: str, option: str) -> VectorFile:
    """Open a column of lists of numbers; DataError for other columns and lists of different lengths.

    option: the configuration key of the column.
    """
    import polars as pl

    try:
        with literal(source.path) as file:
            schema = pl.read_parquet_schema(file)
        if column not in schema:
            raise DataError(f"{source.name}: no column {column!r} ({option})")
        kind = schema[column]
        inner = getattr(kind, "inner", None)
        if not isinstance(kind, pl.List | pl.Array) or inner not in (pl.Float32, pl.Float64, pl.Float16):
            raise DataError(
                f"{source.name}, column {shown(column)}: expected lists of floating-point numbers, got {kind}"
            )
        if isinstance(kind, pl.Array):
            rows, width = _scan(source, column).select(pl.len()).collect().item(), kind.size
            return VectorFile(source, feature, column, rows, width)
        lengths = _scan(source, column).select(pl.nth(0).list.len()).collect(engine="streaming").to_series()
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = shown((str(error).strip() or type(error).__name__).splitlines()[0], 200)
        raise DataError(f"{source.name}: not a readable Parquet file: {reason}") from error
    width = lengths.drop_nulls().mode().sort()
    if not len(width) or width[0] == 0:
        raise DataError(f"{source.name}, column {shown(column)}: no vectors, or most are empty (write null for none)")
    if len(wrong := (lengths != width[0]).arg_true()):
        raise DataError(
            f"{source.name} row {wrong[0] + 1}, column {shown(column)}: expected {width[0]} numbers, as in the other "
            f"rows, got {lengths[wrong[0]]}"
        )
    return VectorFile(source, feature, column, len(lengths), int(width[0]))


def _scan(source: RawFile, column: str):
    """Return the column of a Parquet file as a lazy frame."""
    import polars as pl

    with literal(source.path) as file:
        place = list(pl.read_parquet_schema(file)).index(column)
    # By its index: polars treats a user's column name as a pattern if it looks like one.
    return pl.scan_parquet(source.path.absolute(), hive_partitioning=False, glob=False).select(pl.nth(place))


def _opened(source: RawFile) -> np.ndarray:
    try:
        return np.load(source.path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, SyntaxError) as error:
        raise DataError(f"{source.name}: not a readable .npy file: {shown(error, 200)}") from None


def ids_next_to(path: Path, ids: str | None, option: str) -> Path:
    """Return the path of the ids of the vectors in `path`; DataError if there is none. ids: the user's path."""
    if ids is not None:
        file = Path(ids).expanduser()
        if not file.is_file():
            raise DataError(f"{option}.ids: {shown(file, 200)}: no such file")
        return file
    for ending in IDS:
        if (file := path.with_name(path.name.removesuffix(".npy") + ending)).is_file():
            return file
    names = " or ".join(path.name.removesuffix(".npy") + ending for ending in IDS)
    raise DataError(f"{option}.ids: expected the ids of the vectors in {shown(names)}, next to {shown(path.name)}")


def read_ids(source: RawFile, rows: int, vectors: str) -> np.ndarray:
    """Read the ids of vectors as text: [rows], distinct; DataError for other content. vectors: the vectors' file."""
    if source.path.suffix == ".npy":
        ids = _opened(source)
        if ids.ndim != 1 or ids.dtype.kind not in "iuU":
            raise DataError(f"{source.name}: expected ids [items], text or integers, got {ids.ndim}-d {ids.dtype}")
        ids = np.asarray(ids).astype(np.str_)
    else:
        text = decoded(source.path.read_bytes(), source.name)
        ids = np.array([line.strip() for line in text.splitlines()], np.str_)
    if len(ids) != rows:
        raise DataError(f"{source.name}: {len(ids):,} ids, {vectors} has {rows:,} vectors")
    lengths = np.char.str_len(ids)
    if len(wrong := np.flatnonzero((lengths == 0) | (lengths > MAX_ID_LENGTH))):
        raise DataError(f"{source.name} row {wrong[0] + 1}: expected an id of 1 to {MAX_ID_LENGTH} characters")
    order = np.argsort(ids, kind="stable")
    if len(twice := np.flatnonzero(ids[order][1:] == ids[order][:-1])):
        first, second = order[twice[0]], order[twice[0] + 1]
        which = shown(repr(str(ids[first])))
        raise DataError(f"{source.name}: two rows for item {which}, rows {first + 1} and {second + 1}")
    return ids


def packed(vectors: VectorFile, place: np.ndarray, folder: Path | None) -> tuple[Feature, int]:
    """Return (the feature of vectors of items, the number of items without a vector or with zeros only).

    place: [I], the row of each item's vector, -1 for none. folder: the folder for the array, which is then
    memory-mapped; None keeps it in memory. DataError for a vector that is not finite, or if no item has a row.
    """
    with_row = np.flatnonzero(place >= 0)
    if not len(with_row):
        raise DataError(f"{vectors.source.name}: none of its {vectors.rows:,} vectors belongs to an item")
    target = np.full(vectors.rows, -1, np.int64)
    target[place[with_row]] = np.arange(len(with_row))
    shape, num_described, bad = (len(with_row), vectors.width), 0, []
    if folder is None:
        values = np.zeros(shape, np.float16)
    else:
        values = _on_disk(folder / f"{vectors.feature}.npy", shape)
    for first, present, part in vectors.parts():
        rows = first + np.flatnonzero(present)
        needed = target[rows] >= 0
        part, finite = normalized(part[needed])
        bad += (rows[needed][~finite] + 1).tolist()
        values[target[rows[needed]]] = part
        num_described += int(part.any(1).sum())
    if bad:
        more = f" and {len(bad) - MOST_NAMED:,} more" if len(bad) > MOST_NAMED else ""
        rows_named = ", ".join(map(str, bad[:MOST_NAMED]))
        column = "" if vectors.column is None else f", column {shown(vectors.column)}"
        raise DataError(
            f"{vectors.source.name}{column}: expected finite numbers, got NaN or infinity in row {rows_named}{more}"
        )
    offsets = np.append(0, np.cumsum(place >= 0)).astype(np.int64)
    codes = np.arange(len(with_row), dtype=np.int32)
    return Feature("items", vectors.feature, VECTOR, values, codes, offsets), len(place) - num_described


def _on_disk(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """Create a memory-mapped array of float16; DataError if the disk is full."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        values = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape)
        with path.open("r+b") as file:  # reserve the space: a full disk would later end the process
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return values
    except OSError as error:
        place, reason = shown(path.parent.parent, 200), error.strerror or error
        raise DataError(f"{place}: cannot write the cache: {reason}") from None


def normalized(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (the vectors [R, W] divided by their lengths, as float16; the mask of finite ones [R])."""
    vectors = vectors if vectors.dtype == np.float64 else vectors.astype(np.float32)
    finite = np.isfinite(vectors).all(1)
    # Divide by the greatest number first, so that no square overflows.
    greatest = np.abs(vectors).max(1, keepdims=True, initial=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        vectors = np.where((greatest > 0) & finite[:, None], vectors / greatest, 0)
        lengths = np.sqrt(np.square(vectors).sum(1, keepdims=True))
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float16), finite
