"""Store data frames as Parquet files of the cache, from where they are read and checked like any file."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

from data.atomic import replace_file
from data.reading.sources import local_path
from data.types import DataError, shown


def as_polars(frame: Any, name: str):
    """Return a frame of polars, pandas, Arrow, or another library with Arrow's PyCapsule interface, as polars' own.

    name: what errors call it. An index of pandas is left out. DataError for something else, or for columns that Arrow
    has no type for.

    Examples:
        >>> frame = as_polars({"user": ["ann", "bob"], "item": ["tea", "cup"]}, "events")
        >>> frame.shape
        (2, 2)
        >>> as_polars(7, "events")
        Traceback (most recent call last):
        data.types.DataError: events: expected a data frame, got int: ...
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
        raise DataError(f"{name}: expected a data frame, got {type(frame).__name__}: {reason}") from None


def store(frame: Any, name: str, cache_dir: str | Path) -> Path:
    """Write a frame of polars as NAME.parquet into a folder of the cache that its content names, and return the path.

    DataError for a frame without rows, a column of Python objects, and a folder that cannot be written.

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
        raise DataError(f"{name}, column {shown(objects[0])}: Python objects, expected numbers, text or times")
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
    """Return the kind of feature that a column of a polars type is, of which only items have vectors; None for other
    types.

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
