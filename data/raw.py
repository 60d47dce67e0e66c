"""Raw files -> a `Dataset`: parsed and checked, the ids numbered, the events sorted.

Takes polars, imported inside the functions that need it: whoever reads a prepared cache can do without.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .filtering import offsets_of
from .formats import RawFormat
from .parquet import read_parquet
from .text import read_text
from .types import DataError, Dataset

COMPRESSED = (b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"BZh")  # gzip, zip, zstd, bzip2


def read_raw(name: str, fmt: RawFormat, files: list[Path], fingerprint: str) -> Dataset:
    """Parse, validate, number the ids and sort. DataError with the bad line, column and value."""
    try:
        import polars as pl
    except ImportError as error:
        raise DataError(
            "preparing raw files needs polars (pip install polars); a prepared cache folder as data.path does not"
        ) from error
    for file in files:
        with open(file, "rb") as f:
            if f.read(4).startswith(COMPRESSED):
                raise DataError(f"{file}: the file is compressed; unpack it first")
    read = read_parquet if fmt.kind == "parquet" else read_text
    frame = pl.concat([read(file, fmt) for file in files])
    if frame.height == 0:
        raise DataError(f"{files[0]}: no events in the file")

    user_ids, users = _number(frame["user"], files[0], "user")
    item_ids, items = _number(frame["item"], files[0], "item")
    columns = {"user": users, "item": items}
    columns |= {role: frame[role] for role in ("timestamp", "action") if role in frame.columns}
    frame = pl.DataFrame(columns)
    del users, items, columns
    # Stable, so that equal timestamps keep the order of the file.
    frame = frame.sort(["user", "timestamp"] if fmt.has_timestamps else ["user"], maintain_order=True)
    if fmt.has_timestamps:
        # Only now: milliseconds may order what seconds do not.
        timestamps = frame["timestamp"].to_numpy() // (1000 if fmt.timestamp_unit == "ms" else 1)
    else:
        timestamps = np.zeros(frame.height, np.int64)
    return Dataset(
        name=files[0].stem if fmt.own_columns or name in ("lines", "amazon") else name,
        items=frame["item"].to_numpy(),
        timestamps=timestamps,
        actions=frame["action"].to_numpy() if "action" in frame.columns else None,
        user_offsets=offsets_of(np.bincount(frame["user"].to_numpy(), minlength=len(user_ids))),
        user_ids=user_ids,
        item_ids=item_ids,
        has_timestamps=fmt.has_timestamps,
        fingerprint=fingerprint,
    )


def _number(ids, file: Path, role: str):
    """Original ids (Series) -> (distinct ids ascending, numpy int64 or str; codes, Series of int32)."""
    import polars as pl

    distinct = ids.unique().sort()
    if len(distinct) >= 2**31:
        raise DataError(f"{file}: {len(distinct)} distinct {role} ids, at most 2147483647 are supported")
    if distinct.dtype == pl.String:
        as_int = distinct.cast(pl.Int64, strict=False)
        # "007" and "7" are different ids: numbers only if no id changes when written back.
        if as_int.null_count() or not (as_int.cast(pl.String) == distinct).all():
            codes = ids.cast(pl.Enum(distinct)).to_physical().cast(pl.Int32)
            return distinct.to_numpy().astype(np.str_), codes
        ids, distinct = ids.cast(pl.Int64), as_int.sort()
    values = distinct.to_numpy()
    codes = np.searchsorted(values, ids.to_numpy()).astype(np.int32)
    return values.astype(np.int64), pl.Series(codes)
