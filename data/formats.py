"""The known raw formats, and where a source's files are.

What is peculiar to one of them stands here, in its entry; the readers know no format by name.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from .options import Columns, parse_options
from .types import DataError, shown


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
    most_action: int = 999_999  # codes are rows of an embedding table: more is taken for a column read wrongly
    flags: tuple[str, ...] = ()  # 0/1 columns that make up the action code, bit by bit, lowest first
    all_files: bool = False  # read every file that matches (a source cut into parts), in the order of their names
    own_columns: bool = False  # the user may name the columns
    downloads: tuple[str, ...] = ()  # what data.download can fetch of it

    @property
    def has_timestamps(self) -> bool:
        return "timestamp" in self.columns


_MOVIELENS_CSV = {
    "files": ("ratings.csv",),
    "columns": {"user": "userId", "item": "movieId", "action": "rating", "timestamp": "timestamp"},
    "action_scale": 2,
    "most_action": 10,
}
_OWN_COLUMNS = {"user": "user", "item": "item", "timestamp": "timestamp"}

FORMATS: dict[str, RawFormat] = {
    "ml-100k": RawFormat(
        "MovieLens 100K, u.data: user, item, rating, timestamp between tabs",
        files=("u.data",),
        separator="\t",
        header=False,
        columns={"user": 0, "item": 1, "action": 2, "timestamp": 3},
        most_action=5,
        downloads=("ml-100k",),
    ),
    "ml-1m": RawFormat(
        "MovieLens 1M, ratings.dat: user::item::rating::timestamp",
        files=("ratings.dat",),
        separator="::",
        header=False,
        columns={"user": 0, "item": 1, "action": 2, "timestamp": 3},
        most_action=5,
        downloads=("ml-1m",),
    ),
    "ml-20m": RawFormat(
        "MovieLens 20M, ratings.csv: userId,movieId,rating,timestamp", downloads=("ml-20m",), **_MOVIELENS_CSV
    ),
    "ml-25m": RawFormat(
        "MovieLens 25M, ratings.csv: userId,movieId,rating,timestamp", downloads=("ml-25m",), **_MOVIELENS_CSV
    ),
    "ml-32m": RawFormat(
        "MovieLens 32M, ratings.csv: userId,movieId,rating,timestamp", downloads=("ml-32m",), **_MOVIELENS_CSV
    ),
    "amazon": RawFormat(
        "Amazon reviews 2014, ratings only: user,item,rating,timestamp without a header",
        files=("ratings*.csv", "*.csv"),
        header=False,
        columns={"user": 0, "item": 1, "action": 2, "timestamp": 3},
        most_action=5,
        integer_ids=False,
        downloads=("amazon-beauty", "amazon-books"),
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
        downloads=("kuairand-pure", "kuairand-1k", "kuairand-27k"),
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


def with_own_columns(name: str, fmt: RawFormat, columns: Columns | dict | None) -> RawFormat:
    """The format with the columns that the user named; DataError where they are fixed, or named wrongly."""
    if not columns:
        return fmt
    if not fmt.own_columns:
        raise DataError(f"data.columns: the columns of {name} are fixed; use format csv or parquet to name your own")
    chosen = parse_options(Columns, columns, "data.columns")
    return dataclasses.replace(fmt, columns=chosen.by_role(), timestamp_unit=chosen.timestamp_unit)


def local_path(path: str | Path, key: str) -> Path:
    """A path of the user's, `~` expanded; DataError for one that no file system can have."""
    if "\0" in str(path):
        raise DataError(f"{key}: a path cannot hold a NUL character, got {shown(path)}")
    try:
        expanded = Path(path).expanduser()
        str(expanded).encode("utf-8")
    except RuntimeError as error:
        raise DataError(f"{key}: {shown(path)}: {error}") from None
    except UnicodeEncodeError:
        raise DataError(f"{key}: {shown(path)} is not valid text") from None
    return expanded


def find_files(name: str, fmt: RawFormat, path: str | Path | None) -> list[Path]:
    """The raw files of a source. `path` is the file itself or the folder that holds it; DataError when missing."""
    if not path:
        raise DataError(f"data.path: format {name} needs the path of {fmt.files[0]} or of its folder{_fetch(fmt)}")
    path = local_path(path, "data.path")
    try:
        return _find_files(fmt, path)
    except OSError as error:
        raise DataError(f"{shown(error.filename or path, 200)}: cannot be read: {error.strerror or error}") from error


def _find_files(fmt: RawFormat, path: Path) -> list[Path]:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise DataError(f"{shown(path, 200)}: no such file or folder{_fetch(fmt)}") from None
    if stat.S_ISREG(mode):
        return [path]
    if not stat.S_ISDIR(mode):
        raise DataError(f"{path}: neither a file nor a folder")
    os.listdir(path)  # a closed folder would look like an empty one to glob
    for pattern in fmt.files:
        found = sorted(p for p in path.glob(pattern) if p.is_file())
        if len(found) > 1 and not fmt.all_files:
            names = ", ".join(p.name for p in found[:4])
            raise DataError(f"{path}: {len(found)} files match {pattern} ({names}); give the path of one")
        if found:
            return found
    raise DataError(f"{path}: no {fmt.files[0]} in this folder{_fetch(fmt)}")


def _fetch(fmt: RawFormat) -> str:
    """How to get the data, where `data.download` can fetch them."""
    if not fmt.downloads:
        return ""
    name = fmt.downloads[0] if len(fmt.downloads) == 1 else f"NAME (NAME is one of {', '.join(fmt.downloads)})"
    return f"; to fetch it: python -m data.download {name}"
