"""Store data frames as Parquet files in the cache, which are then read and checked like any other file."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

from data.atomic import replace_file
from data.reading.sources import local_path
from data.types import DataError, shown


def as_polars(frame: Any, name: str):
    """Convert a frame of polars, pandas, Arrow or another library with Arrow's PyCapsule interface to polars.

    name: the frame's name in errors. The index of a pandas frame is dropped. DataError for another object, or for
    columns without an Arrow type.

    Examples:
        >>> frame = as_polars({"user": ["ann", "bob"], "item": ["tea", "cup"]}, "events")
        >>> frame.shape
        (2, 2)
        >>> as_polars(7, "events")
        Traceback (most recent call last):
        data.types.DataError: events: no data frame can be made of this int: ...
    """
    import polars as pl

    if isinstance(frame, pl.LazyFrame):
        frame = frame.collect()
    try:
        return pl.DataFrame(frame)
    except ImportError:
        raise DataError(f"{name}: a frame of pandas with text or times needs pyarrow: pip install pyarrow") from None
    except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
        reason = shown(str(error).strip().splitlines()[0], 200)
        raise DataError(f"{name}: no data frame can be made of this {type(frame).__name__}: {reason}") from None


def store(frame: Any, name: str, cache_dir: str | Path) -> Path:
    """Write a polars frame as NAME.parquet into the cache, in a folder named by a hash of its content; return the path.

    DataError for a frame without rows, a column of Python objects, or a folder that cannot be written.

    Examples:
        >>> frame = as_polars({"user": ["ann", "bob"], "item": ["tea", "cup"]}, "events")
        >>> store(frame, "events", "cache").name
        'events.parquet'
        >>> store(frame.clear(), "events", "cache")
        Traceback (most recent call last):
        data.types.DataError: events: the frame has no rows
    """
    import polars as pl

    if not frame.height:
        raise DataError(f"{name}: the frame has no rows")
    if objects := [column for column, kind in frame.schema.items() if kind == pl.Object]:
        raise DataError(f"{name}, column {shown(objects[0])}: expected numbers, text or times, got Python objects")
    content = io.BytesIO()
    frame.write_parquet(content)
    digest = hashlib.sha256(content.getbuffer()).hexdigest()
    path = (local_path(cache_dir, "data.cache_dir") / "frames" / digest[:16] / f"{name}.parquet").absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content.getvalue())
    except OSError as error:
        raise DataError(f"{shown(path, 200)}: cannot be written: {error.strerror or error}") from None
    return path


def feature_kind(dtype: Any) -> str | None:
    """Return the kind of feature for a column's polars type: category, number, list, vector (items only) or None.

    Examples:
        >>> import polars as pl
        >>> feature_kind(pl.String), feature_kind(pl.Int32), feature_kind(pl.List(pl.Float32)), feature_kind(pl.Date)
        ('category', 'number', 'vector', None)
    """
    import polars as pl

    if dtype in (pl.String, pl.Categorical, pl.Boolean) or isinstance(dtype, pl.Enum):
        return "category"
    if isinstance(dtype, pl.List | pl.Array) and dtype.inner in (pl.Float32, pl.Float64):
        return "vector"
    return "number" if dtype.is_numeric() else "list" if isinstance(dtype, pl.List) else None
