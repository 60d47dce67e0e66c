"""Define the raw formats. All that is specific to a format is in its entry: readers do not compare names of formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data.features.options import FeatureOptions
from data.options import MOST_ACTION, Columns, checked_separator, parse_options
from data.reading.encodings import checked_encoding
from data.types import DataError, shown


@dataclass(frozen=True)
class RawFormat:
    """A raw format, with the user's options for a source."""

    description: str
    kind: str = "text"  # "text", "sequences", "parquet", "json", "npy" or "generated"
    # If `path` is a folder: patterns of the file; the first that a file matches is used. Files may be compressed.
    files: tuple[str, ...] = ()
    separator: str = ","
    header: bool = True
    columns: dict[str, str | int] = field(default_factory=dict)  # role -> name, or index without a header
    integer_ids: bool = True
    quoting: bool = False  # fields may be quoted by "..."; otherwise a quote is an ordinary character
    timestamp_unit: str | None = "s"  # None: detected from the values
    timestamp_format: str | None = None
    action_scale: int = 1  # action code = action_scale * value; 2 for ratings of half stars
    most_action: int = MOST_ACTION
    flags: tuple[str, ...] = ()  # 0/1 columns that are the bits of the action code, lowest first
    all_files: bool = False  # read all matching files (a source in parts), in the order of their names
    named_columns: bool = False  # the user may name the columns
    detect_separator: bool = False  # the user may set the separator; by default it is detected from the first line
    action_codes: dict[str, int] | None = None  # the user's code of each action that is text
    # The greatest length of a row in bytes. A longer one is not an event, but the rest of a file after an open quote.
    longest_row: int = 1 << 20
    downloads: tuple[str, ...] = ()  # the data sets of this format that data.download fetches
    width: int | None = None  # the number of columns of a file without a header, if not all are read
    other_text: bool = False  # columns that are not read may have bytes that are not UTF-8
    list_separators: dict[str, str] = field(default_factory=dict)  # role of a list -> the separator of its values
    encoding: str | None = None  # the encoding of text; by default detected
    decimal: str = "."  # the decimal sign of numbers in text: "." or ","
    where: str | None = None  # the user's condition on rows
    where_columns: tuple[str, ...] = ()  # the columns in the condition
    option: str = "data.columns"  # the configuration key of the columns
    path_option: str = "data.path"  # the configuration key of the file

    @property
    def section(self) -> str:
        """The configuration key of the source's options."""
        return self.option.removesuffix(".columns")

    @property
    def has_timestamps(self) -> bool:
        """Whether there is a column of times."""
        return "timestamp" in self.columns

    @property
    def features(self) -> dict[str, tuple[str, str]]:
        """Map each role of a feature, `kind:name`, to (kind, name)."""
        parts = {role: role.partition(":") for role in self.columns}
        return {role: (kind, name) for role, (kind, colon, name) in parts.items() if colon}


_MOVIELENS_CSV: dict[str, Any] = {
    "files": ("ratings.csv",),
    "columns": {"user": "userId", "item": "movieId", "action": "rating", "timestamp": "timestamp"},
    "action_scale": 2,
    "most_action": 10,
}
_DEFAULT_COLUMNS: dict[str, str | int] = {"user": "user", "item": "item", "timestamp": "timestamp"}

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
    "lastfm-1k": RawFormat(
        "Last.fm 1K: user, time, artist id, artist, track id and track between tabs, no header; the item is the artist",
        files=("userid-timestamp-artid-artname-traid-traname.tsv",),
        separator="\t",
        header=False,
        # The item is the artist's name, since many artists have no id.
        columns={"user": 0, "timestamp": 1, "item": 3},
        width=6,
        integer_ids=False,
        timestamp_unit=None,
        timestamp_format="%Y-%m-%dT%H:%M:%SZ",
    ),
    "lines": RawFormat(
        "one 'user item' pair of integers a line, each user's lines in time order; no timestamps",
        files=("*.txt",),
        separator=" ",
        header=False,
        columns={"user": 0, "item": 1},
    ),
    "sequences": RawFormat(
        "one 'user item item ...' line for each user, in time order; no timestamps",
        kind="sequences",
        files=("*.txt",),
        separator=" ",
        header=False,
        columns={"user": 0, "item": 1},
        integer_ids=False,
        detect_separator=True,
        longest_row=1 << 26,
    ),
    "csv": RawFormat(
        "any CSV with a header; data.columns names the user, item, timestamp and action columns",
        files=("**/*.csv",),
        columns=_DEFAULT_COLUMNS,
        integer_ids=False,
        quoting=True,
        timestamp_unit=None,
        all_files=True,
        named_columns=True,
        detect_separator=True,
    ),
    "parquet": RawFormat(
        "any Parquet file; data.columns names the user, item, timestamp and action columns",
        kind="parquet",
        files=("**/*.parquet",),
        columns=_DEFAULT_COLUMNS,
        integer_ids=False,
        timestamp_unit=None,
        all_files=True,
        named_columns=True,
    ),
    "synthetic": RawFormat("generated, see data/synthetic.py", kind="generated"),
    "recall": RawFormat("generated, see data/recall.py", kind="generated"),
}


def with_features(name: str, fmt: RawFormat, features: Mapping[str, FeatureOptions], option: str) -> RawFormat:
    """Return the format with feature columns added; DataError if its columns are fixed.

    option: the configuration key of these columns.
    """
    if not features:
        return fmt
    if not fmt.named_columns:
        raise DataError(f"{option}: the columns of {name} are fixed; use format csv or parquet to set columns")
    named = {
        f"{column_options.kind}:{feature}": column_options.column or feature
        for feature, column_options in features.items()
    }
    columns: dict[str, str | int] = {**fmt.columns, **named}
    for column in named.values():
        if list(columns.values()).count(column) > 1:
            raise DataError(f"{option}: column {shown(column)} is named twice")
    separators = {
        f"{column_options.kind}:{feature}": column_options.separator
        for feature, column_options in features.items()
        if column_options.kind == "list"
    }
    return dataclasses.replace(fmt, columns=columns, list_separators=separators)


def with_writing(name: str, fmt: RawFormat, encoding: str | None, decimal: str = ".") -> RawFormat:
    """Return the format with the user's encoding and decimal sign; DataError if these are fixed or wrong."""
    if decimal not in (".", ","):
        raise DataError(f"{fmt.section}.decimal: expected '.' or ',', got {shown(repr(decimal))}")
    if decimal == "," and not fmt.named_columns:
        raise DataError(
            f"{fmt.section}.decimal: the decimal sign of {name} is fixed; use format csv or parquet to set it"
        )
    fmt = dataclasses.replace(fmt, decimal=decimal)
    if encoding is None:
        return fmt
    if fmt.kind not in ("text", "sequences", "json"):
        raise DataError(f"{fmt.section}.encoding: files of format {name} are not text")
    return dataclasses.replace(fmt, encoding=checked_encoding(encoding, f"{fmt.section}.encoding"))


def with_options(name: str, fmt: RawFormat, columns: Columns | dict | None, separator: str | None) -> RawFormat:
    """Return the format with the user's columns and separator; DataError if these are fixed or wrong."""
    if separator is not None:
        if not fmt.detect_separator:
            if fmt.kind != "text":
                raise DataError(f"data.separator: files of format {name} have no separator")
            raise DataError(f"data.separator: the separator of {name} is fixed; use format csv to set it")
        fmt = dataclasses.replace(fmt, separator=checked_separator(separator), detect_separator=False)
    if not columns:
        return fmt
    if not fmt.named_columns:
        raise DataError(f"data.columns: the columns of {name} are fixed; use format csv or parquet to set columns")
    chosen = parse_options(Columns, columns, "data.columns")
    return dataclasses.replace(
        fmt,
        columns=dict(chosen.by_role()),
        timestamp_unit=chosen.timestamp_unit,
        timestamp_format=chosen.timestamp_format,
        action_codes=chosen.action_codes,
    )
