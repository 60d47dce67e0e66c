"""The known datasets and their raw formats, and the one function that loads any of them.

Letters: E events, U users. An event is "user u met item i at time t"; its action (a rating, a click) is optional.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)


class DataError(ValueError):
    """Something is wrong with the user's data or data options. `str(error)` is one line that says what and where."""


@dataclass(frozen=True, eq=False)  # eq=False: identity hash, so that device copies can be kept per dataset
class Dataset:
    """All events, flat: users one after another, each user's events in time order (ties in file order).

    items         [E] int32, 0 .. num_items-1
    timestamps    [E] int64, seconds; zeros when the source has none (`has_timestamps` is False)
    actions       [E] int32 codes >= 0, or None
    user_offsets  [U+1] int64: the events of user u are user_offsets[u] .. user_offsets[u+1]-1
    user_ids      [U] original ids, int64 or str, ascending
    item_ids      [num_items] original ids, int64 or str, ascending
    fingerprint   hex; changes with the source's content and with the options

    The arrays are copy-on-write memory maps of the cache (writing into one never reaches the file) or, for
    `synthetic`, live in memory.
    """

    name: str
    items: np.ndarray
    timestamps: np.ndarray
    actions: np.ndarray | None
    user_offsets: np.ndarray
    user_ids: np.ndarray
    item_ids: np.ndarray
    has_timestamps: bool
    fingerprint: str

    @property
    def num_users(self) -> int:
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        return len(self.item_ids)

    @property
    def num_events(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class RawFormat:
    """How a raw source is read. `columns` maps roles to column names, or to positions where there is no header."""

    description: str
    kind: str = "text"  # "text", "parquet" or "generated"
    files: tuple[str, ...] = ()  # patterns that find the file when `path` is a folder, first match wins
    separator: str = ","
    header: bool = True
    columns: dict[str, str | int] = field(default_factory=dict)
    integer_ids: bool = True
    quoting: bool = False  # fields may be wrapped in "..."; elsewhere a quote is an ordinary character
    timestamp_unit: str = "s"
    action_scale: int = 1  # action code = action_scale * value: 2 turns half stars into integers
    flags: tuple[str, ...] = ()  # 0/1 columns that make up the action code, bit by bit, lowest first
    all_files: bool = False  # read every file that matches (a source cut into parts), in the order of their names
    own_columns: bool = False  # the user may name the columns

    @property
    def has_timestamps(self) -> bool:
        return "timestamp" in self.columns


_MOVIELENS_CSV = {
    "files": ("ratings.csv",),
    "columns": {"user": "userId", "item": "movieId", "action": "rating", "timestamp": "timestamp"},
    "action_scale": 2,
}
_OWN_COLUMNS = {"user": "user", "item": "item", "timestamp": "timestamp"}

FORMATS: dict[str, RawFormat] = {
    "ml-100k": RawFormat(
        "MovieLens 100K, u.data: user, item, rating, timestamp between tabs",
        files=("u.data",),
        separator="\t",
        header=False,
        columns={"user": 0, "item": 1, "action": 2, "timestamp": 3},
    ),
    "ml-1m": RawFormat(
        "MovieLens 1M, ratings.dat: user::item::rating::timestamp",
        files=("ratings.dat",),
        separator="::",
        header=False,
        columns={"user": 0, "item": 1, "action": 2, "timestamp": 3},
    ),
    "ml-20m": RawFormat("MovieLens 20M, ratings.csv: userId,movieId,rating,timestamp", **_MOVIELENS_CSV),
    "ml-25m": RawFormat("MovieLens 25M, ratings.csv: userId,movieId,rating,timestamp", **_MOVIELENS_CSV),
    "ml-32m": RawFormat("MovieLens 32M, ratings.csv: userId,movieId,rating,timestamp", **_MOVIELENS_CSV),
    "amazon": RawFormat(
        "Amazon reviews 2014, ratings only: user,item,rating,timestamp without a header",
        files=("ratings*.csv", "*.csv"),
        header=False,
        columns={"user": 0, "item": 1, "action": 2, "timestamp": 3},
        integer_ids=False,
    ),
    "kuairand": RawFormat(
        "KuaiRand, log_standard_*.csv: user_id, video_id, time_ms and 0/1 feedback columns",
        files=("log_standard_*.csv", "data/log_standard_*.csv"),
        columns={"user": "user_id", "item": "video_id", "timestamp": "time_ms"},
        timestamp_unit="ms",
        flags=(
            "is_click",
            "is_like",
            "is_follow",
            "is_comment",
            "is_forward",
            "is_hate",
            "long_view",
            "is_profile_enter",
        ),
        all_files=True,
    ),
    "lines": RawFormat(
        "one 'user item' pair of integers a line, each user's lines in time order; no timestamps",
        files=("*.txt",),
        separator=" ",
        header=False,
        columns={"user": 0, "item": 1},
    ),
    "csv": RawFormat(
        "any CSV with a header; data.columns names the user, item, timestamp and action columns",
        files=("*.csv",),
        columns=_OWN_COLUMNS,
        integer_ids=False,
        quoting=True,
        own_columns=True,
    ),
    "parquet": RawFormat(
        "any Parquet file; data.columns names the user, item, timestamp and action columns",
        kind="parquet",
        files=("*.parquet",),
        columns=_OWN_COLUMNS,
        integer_ids=False,
        own_columns=True,
    ),
    "synthetic": RawFormat("generated, see data/synthetic.py", kind="generated"),
}


def did_you_mean(name: str, known) -> str:
    """`, did you mean x?` for a misspelt name, else the empty string."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f", did you mean {close[0]}?" if close else ""


def _with_own_columns(name: str, fmt: RawFormat, columns: dict[str, str] | None) -> RawFormat:
    columns = {k: v for k, v in (columns or {}).items() if v is not None}
    if not columns:
        return fmt
    if not fmt.own_columns:
        raise DataError(f"data.columns: the columns of {name} are fixed; use format csv or parquet to name your own")
    unit = columns.pop("timestamp_unit", "s")
    if unit not in ("s", "ms"):
        raise DataError(f"data.columns.timestamp_unit: expected s or ms, got {unit!r}")
    roles = ("user", "item", "timestamp", "action")
    for role in columns:
        if role not in roles:
            hint = did_you_mean(role, roles)
            raise DataError(f"data.columns.{role}: expected one of {', '.join(roles)}, timestamp_unit{hint}")
    merged = {**fmt.columns, **columns}
    if "timestamp" in columns and not columns["timestamp"]:
        del merged["timestamp"]  # `timestamp: ""` says that the source has none and is in time order already
    return dataclasses.replace(fmt, columns=merged, timestamp_unit=unit)


def find_files(name: str, fmt: RawFormat, path: str | Path | None) -> list[Path]:
    """The raw files of a source. `path` is the file itself or the folder that holds it; DataError when missing."""
    if not path:
        raise DataError(f"data.path: format {name} needs the path of {fmt.files[0]} or of its folder")
    path = Path(path).expanduser()
    if path.is_file():
        return [path]
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    for pattern in fmt.files:
        found = sorted(p for p in path.glob(pattern) if p.is_file())
        if len(found) > 1 and not fmt.all_files:
            names = ", ".join(p.name for p in found[:4])
            raise DataError(f"{path}: {len(found)} files match {pattern} ({names}); give the path of one")
        if found:
            return found
    raise DataError(f"{path}: no {fmt.files[0]} in this folder")


def load_dataset(
    format: str,
    path: str | Path | None,
    *,
    cache_dir: str | Path,
    min_user_events: int = 1,
    min_item_events: int = 1,
    columns: dict[str, str] | None = None,
    synthetic: dict | None = None,
) -> Dataset:
    """Load a dataset, preparing its cache first if need be.

    format: a key of FORMATS. path: the raw file, the folder that holds it, or a prepared cache folder (one with a
    meta.json; then neither the raw file nor polars is needed). cache_dir: where prepared caches live.
    min_user_events, min_item_events: repeatedly drop users and items with fewer events, until none is left.
    columns: csv and parquet only, role (user, item, timestamp, action) -> column name; `timestamp: ""` for a source
    without timestamps that is in time order already; `timestamp_unit: ms` for milliseconds.
    synthetic: options of the generator.

    Raises DataError, one line, that names the file, line, column and value where it can.
    """
    from . import prepare  # which needs this module's types

    if format not in FORMATS:
        raise DataError(
            f"data.format: {format!r} is not known{did_you_mean(format, FORMATS)} (there are {', '.join(FORMATS)})"
        )
    for key, value in (("min_user_events", min_user_events), ("min_item_events", min_item_events)):
        if not isinstance(value, int) or value < 1:
            raise DataError(f"data.{key}: expected an integer >= 1, got {value!r}")
    options = {"min_user_events": min_user_events, "min_item_events": min_item_events}
    if format != "synthetic" and synthetic:
        raise DataError(f"data.synthetic: these options belong to format synthetic, not to {format}")
    fmt = _with_own_columns(format, FORMATS[format], columns)
    if format == "synthetic":
        if path:
            raise DataError("data.path: format synthetic is generated and takes no path")
        from .synthetic import generate

        return prepare.filter_dataset(generate(**(synthetic or {})), **options)
    return prepare.load_or_prepare(format, fmt, path, Path(cache_dir).expanduser(), options)
