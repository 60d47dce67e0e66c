"""Read files of features of items and users.

CSV and Parquet files are read by the readers of events, with the same checks. Other formats are MovieLens' files,
S3-Rec's JSON files and .npy files of vectors.

Letters: R rows of a file.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from data.features.features import Feature, feature_of, numbered
from data.features.options import FeatureFile, FeatureOptions, Features, ItemFile, UserFile
from data.features.vectors import VectorFile, ids_next_to, open_npy, open_parquet, packed, read_ids
from data.options import checked_separator
from data.progress import Progress
from data.reading.bad_rows import LIMIT, BadRows
from data.reading.formats import FORMATS, RawFormat, with_features, with_writing
from data.reading.lists import BETWEEN, mostly_lists
from data.reading.parquet import read_parquet
from data.reading.remote import is_remote
from data.reading.sources import RawFile, copied, find_sources, unpacked
from data.reading.text import read_text
from data.reading.values import MAX_ID_LENGTH
from data.types import DataError, Dataset, shown
from data.vocabulary import index_of

ID = {"items": "item", "users": "user"}  # the default column of ids, and the word for an id in messages
GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
_FIXED: dict[str, Any] = {"header": False, "integer_ids": False, "other_text": True}
FILES: dict[str, RawFormat] = {
    "csv": dataclasses.replace(FORMATS["csv"], columns={}, all_files=False),
    "parquet": dataclasses.replace(FORMATS["parquet"], columns={}, all_files=False),
    "npy": RawFormat("vectors, with the items' ids next to them", kind="npy", files=("*.npy",)),
    "attributes": RawFormat("{item: [attribute, ...]} in JSON, as of the S3-Rec data", kind="json", files=("*.json",)),
    # Each genre is a column of flags; the year is in the release date.
    "u.item": RawFormat(
        "MovieLens 100K, u.item: item|title|release|...|19 genres as flags",
        files=("u.item",),
        separator="|",
        columns={"item": 0, "category:release": 2, **{genre: 5 + place for place, genre in enumerate(GENRES)}},
        width=24,
        **_FIXED,
    ),
    "u.user": RawFormat(
        "MovieLens 100K, u.user: user|age|gender|occupation|zip code",
        files=("u.user",),
        separator="|",
        columns={"user": 0, "number:age": 1, "category:gender": 2, "category:occupation": 3},
        width=5,
        **_FIXED,
    ),
    # The year is in brackets after the title.
    "movies.dat": RawFormat(
        "MovieLens 1M, movies.dat: item::title (year)::genre|genre",
        files=("movies.dat",),
        separator="::",
        columns={"item": 0, "list:title": 1, "list:genres": 2},
        width=3,
        list_separators={"list:genres": "|"},
        **_FIXED,
    ),
    "users.dat": RawFormat(
        "MovieLens 1M, users.dat: user::gender::age group::occupation::zip code",
        files=("users.dat",),
        separator="::",
        columns={"user": 0, "category:gender": 1, "category:age": 2, "category:occupation": 3},
        width=5,
        **_FIXED,
    ),
}
YEARS = {"u.item": ("category:release", r"(\d{4})$"), "movies.dat": ("list:title", r"\((\d{4})\) *$")}


class FeatureSource(NamedTuple):
    """An existing file of features of an entity (items or users), with its options and format.

    vector, ids: for a .npy file, the name of its feature and the file of the ids
    """

    entity: str
    file: FeatureFile
    fmt: RawFormat
    source: RawFile
    vector: str = ""
    ids: RawFile | None = None

    @property
    def sources(self) -> list[RawFile]:
        """The files to read."""
        return [self.source] if self.ids is None else [self.source, self.ids]


@dataclass(frozen=True)
class Table:
    """The content of a file of features.

    ids       [R] text, distinct: the id of each row
    features  the features of the rows, without vectors
    added     [R] bool, True for rows whose id is in no event and is added to the catalogue
    notes     sentences about how the file was read
    vectors   the features that are vectors
    """

    entity: str
    name: str
    ids: np.ndarray
    features: tuple[Feature, ...]
    added: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    vectors: tuple[VectorFile, ...] = ()


def format_of(entity: str, file: FeatureFile) -> RawFormat:
    """Return the format of a file of features; DataError if its options do not fit."""
    fmt, key = FILES[file.format], f"data.features.{entity}"
    fmt = dataclasses.replace(fmt, option=f"{key}.columns", path_option=f"{key}.path")
    fmt = with_writing(file.format, fmt, file.encoding, file.decimal)
    if not fmt.named_columns:
        return fmt
    if file.separator is not None:
        fmt = dataclasses.replace(
            fmt, separator=checked_separator(file.separator, f"{fmt.section}.separator"), detect_separator=False
        )
    fmt = dataclasses.replace(fmt, columns={ID[entity]: file.id or ID[entity]})
    columns = file.others if isinstance(file, ItemFile) else file.columns or {}
    return with_features(file.format, fmt, columns, f"{key}.columns")


def find_tables(features: Features | None, cache_dir: Path | None = None) -> list[FeatureSource]:
    """Return the files of features; remote files are copied into the cache. DataError if a file does not exist."""
    existing = []
    for entity, file in (features.files() if features else {}).items():
        fmt = format_of(entity, file)
        path: str | Path = file.path
        if is_remote(path):
            path = copied(str(path), fmt, cache_dir, Progress())
        sources, _ = find_sources(file.format, fmt, path)
        if len(sources) > 1:
            raise DataError(f"{fmt.path_option}: {len(sources)} files match; give the path of one")
        if file.format != "npy":
            existing.append(FeatureSource(entity, file, fmt, sources[0]))
        if isinstance(file, ItemFile):
            existing += _vector_sources(entity, file, sources[0])
    return existing


def _vector_sources(entity: str, file: ItemFile, main: RawFile) -> list[FeatureSource]:
    """Return the .npy files of vectors of items; `main`, the file of the features, may be one."""
    sources = []
    for name, options in file.vectors.items():
        key = f"data.features.{entity}.columns.{name}"
        if options.path is None and file.format != "npy":
            continue
        fmt = dataclasses.replace(FILES["npy"], option=f"{key}.columns", path_option=f"{key}.path")
        source = main
        if options.path is not None:
            if is_remote(options.path):
                raise DataError(f"{key}.path: {shown(options.path)}: a .npy file cannot be remote, copy it first")
            (source, *_), _ = find_sources("npy", fmt, options.path)
        ids = ids_next_to(source.path, options.ids, key)
        sources.append(FeatureSource(entity, file, fmt, source, name, RawFile(ids, shown(ids.name, 200))))
    return sources


def read_tables(
    tables: Sequence[FeatureSource],
    dataset: Dataset,
    bad_rows_limit: float = LIMIT,
    scratch: Path | None = None,
    stage: Callable[[str], None] = lambda _: None,
) -> list[Table]:
    """Read the files of features. An id is unknown if no event of `dataset` has it.

    DataError for bad rows, unless the file's options drop them and they are at most `bad_rows_limit` of all rows, and
    for unknown ids, unless the options allow them. scratch: the folder for unpacked files. stage: called with a
    description of each step, may raise.
    """
    read = []
    for one in tables:
        table = _read(one, bad_rows_limit, scratch, stage)
        unknown = _unknown_rows(table, one.file, dataset)
        read.append(dataclasses.replace(table, added=unknown if one.file.unknown == "add" else None))
    return read


def read_new_items(file: ItemFile, known_ids: np.ndarray) -> tuple[np.ndarray, list[Feature]]:
    """Read a file of features; return (the ids [M] that are not in `known_ids`, as text; their features).

    DataError as in `read_tables`, and if no item is new.
    """
    tables = [_read(one, LIMIT, None, lambda _: None) for one in find_tables(Features(items=file))]
    ids = np.unique(np.concatenate([table.ids for table in tables]))
    ids = ids[index_of(ids, known_ids) < 0]
    if not len(ids):
        raise DataError(f"{tables[0].name}: expected new items, but the run knows all {len(tables[0].ids):,} of them")
    features = []
    for table in tables:
        place = index_of(ids, table.ids)
        features += [feature.take(place) for feature in table.features]
        features += [packed(vectors, place, None)[0] for vectors in table.vectors if (place >= 0).any()]
    return ids, features


def read_users(file: UserFile) -> tuple[list[str], list[Feature]]:
    """Read a file of features of users; return (their ids, their features). DataError as in `read_tables`."""
    (table,) = (_read(one, LIMIT, None, lambda _: None) for one in find_tables(Features(users=file)))
    return table.ids.tolist(), list(table.features)


def _read(one: FeatureSource, bad_rows_limit: float, scratch: Path | None, stage: Callable[[str], None]) -> Table:
    """Read one file of features."""
    entity, file, fmt, source, vector, ids = one
    stage(f"reading {source.name}")
    if ids is not None:
        vectors = open_npy(source, vector)
        return Table(entity, source.name, read_ids(ids, vectors.rows, source.name), (), vectors=(vectors,))
    bad, notes = BadRows(file.on_bad_row == "drop", bad_rows_limit, f"data.features.{entity}"), []
    with unpacked([source], scratch, fmt) as (plain,):
        if fmt.kind == "json":
            table = _read_json(entity, plain)
        else:
            frame, _, notes = (read_parquet if fmt.kind == "parquet" else read_text)(plain, fmt, bad)
            bad.check_limit(source.name)
            table = _as_table(entity, file.format, source, frame)
        notes = [*notes, *plain.notes(fmt), *([bad.note()] if bad.count else [])]
    columns = _parquet_vectors(source, file, fmt) if isinstance(file, ItemFile) and fmt.kind == "parquet" else ()
    return _chosen(dataclasses.replace(table, notes=tuple(notes), vectors=columns), file)


def _parquet_vectors(source: RawFile, file: ItemFile, fmt: RawFormat) -> tuple[VectorFile, ...]:
    """Open the columns of a Parquet file that are vectors."""
    return tuple(
        open_parquet(source, name, one.column or name, f"{fmt.option}.{name}")
        for name, one in file.vectors.items()
        if one.path is None
    )


def _as_table(entity: str, format: str, source: RawFile, frame) -> Table:
    """Build a table from a polars frame whose columns are the roles of the format."""
    import polars as pl

    if format in YEARS:
        role, pattern = YEARS[format]
        year = pl.col(role).str.strip_chars().str.extract(pattern).cast(pl.Float64)
        frame = frame.with_columns(year.alias("number:year")).drop(role)
    if format == "u.item":
        flags = [pl.when(pl.col(genre) == 1).then(pl.lit(genre)) for genre in GENRES]
        genres = pl.concat_str(flags, separator=BETWEEN, ignore_nulls=True)
        frame = frame.with_columns(genres.alias("list:genres")).drop(GENRES)
    ids = frame[ID[entity]].cast(pl.String)
    order = ids.arg_sort()
    twice = (ids[order][1:] == ids[order][:-1]).arg_true()
    if len(twice):
        first, second = sorted((order[twice[0]], order[twice[0] + 1]))
        raise DataError(
            f"{source.name}: two rows for {ID[entity]} {shown(repr(ids[first]))}, rows {first + 1} and {second + 1}"
        )
    features = [
        features_of(entity, name, kind, frame[role], source.name)
        for role in frame.columns
        for kind, colon, name in [role.partition(":")]
        if colon
    ]
    return Table(entity, source.name, ids.to_numpy().astype(np.str_), tuple(features))


def features_of(entity: str, name: str, kind: str, column, source: str) -> Feature:
    """Build a feature from a polars column with a row for each item, user or event; DataError for bad values."""
    import polars as pl

    frame = pl.DataFrame({"row": np.arange(len(column)), "value": column}).drop_nulls()
    if kind == "number":
        return feature_of(entity, name, kind, len(column), frame["row"].to_numpy(), frame["value"].to_numpy())
    if kind == "list":
        frame = frame.with_columns(pl.col("value").str.split(BETWEEN)).explode("value").drop_nulls()
    frame = frame.with_columns(pl.col("value").str.strip_chars()).filter(pl.col("value") != "")
    distinct = frame["value"].unique().sort()
    if (longest := cast(int, distinct.str.len_chars().max() or 0)) > MAX_ID_LENGTH:
        raise DataError(f"{source}: {name}: expected values of at most {MAX_ID_LENGTH} characters, got {longest}")
    if kind == "category" and (example := mostly_lists(distinct)) is not None:
        raise DataError(f"{source}: {name}: its values are lists, like {shown(repr(example))}: set its kind to list")
    codes = frame["value"].cast(pl.Enum(distinct)).to_physical().to_numpy()
    return numbered(entity, name, kind, len(column), frame["row"].to_numpy(), codes, distinct.to_numpy())


def _read_json(entity: str, source: RawFile) -> Table:
    """Read a table from a JSON object that maps items to lists of attributes."""

    def once(pairs: list[tuple[str, object]]) -> dict:
        unique: dict = {}
        for key, value in pairs:
            if key in unique:
                raise DataError(f"{source.name}: two rows for {ID[entity]} {shown(repr(key))}")
            unique[key] = value
        return unique

    try:
        content = json.loads(source.path.read_text(encoding="utf-8-sig"), object_pairs_hook=once)
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source.name}: not valid JSON: {shown(error, 200)}") from None
    if not isinstance(content, dict) or not content:
        raise DataError(f"{source.name}: expected an object {{item: [attribute, ...]}}, got {shown(repr(content))}")
    rows, values = [], []
    for row, (item, attributes) in enumerate(content.items()):
        if not isinstance(attributes, list):
            raise DataError(
                f"{source.name}, item {shown(item)}: expected a list of attributes, got {shown(repr(attributes))}"
            )
        for attribute in attributes:
            text = str(attribute)
            if isinstance(attribute, bool) or not isinstance(attribute, str | int) or "\0" in text:
                raise DataError(
                    f"{source.name}, item {shown(item)}: expected attributes that are text or integers, got "
                    f"{shown(repr(attribute))}"
                )
            if len(text) > MAX_ID_LENGTH:
                raise DataError(
                    f"{source.name}, item {shown(item)}: an attribute of more than {MAX_ID_LENGTH} characters: "
                    f"{shown(repr(text))}"
                )
            if text.strip():
                rows.append(row)
                values.append(text.strip())
    feature = feature_of(entity, "attributes", "list", len(content), np.array(rows, np.int64), np.array(values, str))
    return Table(entity, source.name, np.array(list(content), np.str_), (feature,))


def _chosen(table: Table, file: FeatureFile) -> Table:
    """Select the features in `columns` of the options, for a format with fixed columns."""
    if not file.columns or FILES[file.format].named_columns:
        return table
    key, features = f"data.features.{table.entity}.columns", []
    known = {feature.name: feature for feature in table.features}
    for name, column in (file.others if isinstance(file, ItemFile) else file.columns).items():
        column_options: FeatureOptions = column
        feature = known.get(column_options.column or name)
        if feature is None:
            raise DataError(
                f"{key}.{name}: {file.format} has {', '.join(known)}, not {shown(column_options.column or name)}"
            )
        if feature.kind != column_options.kind:
            raise DataError(f"{key}.{name}: expected kind {feature.kind}, got {column_options.kind}")
        features.append(dataclasses.replace(feature, name=name))
    return dataclasses.replace(table, features=tuple(features))


def _unknown_rows(table: Table, file: FeatureFile, dataset: Dataset) -> np.ndarray:
    """Return the mask [R] of rows whose id is in no event of `dataset`; DataError if the options do not allow them."""
    known_ids = dataset.item_ids if table.entity == "items" else dataset.user_ids
    unknown = index_of(table.ids, known_ids) < 0
    # MovieLens' files have items and users without ratings.
    handling = file.unknown or ("error" if file.format in ("csv", "parquet", "npy", "attributes") else "drop")
    if unknown.all() and handling != "add":
        got = shown(repr(str(table.ids[0]))) if len(unknown) else "none"
        hint = f" (data.features.{table.entity}.id names the column)" if FILES[file.format].named_columns else ""
        raise DataError(
            f"{table.name}: none of its {len(unknown):,} {table.entity} is in an event: expected ids like "
            f"{shown(repr(str(known_ids[0])))}, got {got}{hint}"
        )
    if handling == "error" and unknown.any():
        examples = ", ".join(shown(repr(str(id_))) for id_ in table.ids[unknown][:5])
        hint = ", add makes them part of the catalogue" if table.entity == "items" else ""
        raise DataError(
            f"{table.name}: {unknown.sum():,} of {len(unknown):,} {table.entity} are in no event: {examples}; "
            f"data.features.{table.entity}.unknown=drop leaves them out{hint}"
        )
    return unknown


def with_tables(
    dataset: Dataset,
    tables: Sequence[Table],
    folder: Path | None = None,
    stage: Callable[[str], None] = lambda _: None,
) -> Dataset:
    """Return the data set with the features of these tables, and the items that they add.

    Items and users without a row have no values. folder: the folder for vectors, which are then memory-mapped; None
    keeps them in memory. stage: called with a description of each step, may raise.
    """
    for table in tables:  # add items first: every table's features have a row for each item
        if table.added is not None and table.added.any():
            dataset = _with_items(dataset, table.ids[table.added])
    for table in tables:
        ids = dataset.item_ids if table.entity == "items" else dataset.user_ids
        place = index_of(np.asarray(ids).astype(np.str_), table.ids)
        features = [feature.take(place) for feature in table.features]
        vectors, without = [], []
        for file in table.vectors:
            stage(f"writing the vectors of {file.source.name}")
            feature, missing = packed(file, place, folder)
            vectors.append(feature)
            if missing:
                without.append(f"; {missing:,} of {len(place):,} items have no vector {feature.name} and get zeros")
        features += vectors
        note = f"{table.name}: {', '.join(feature.name for feature in features)} of {table.entity}"
        if (missing := int((place < 0).sum())) and not without:
            note += f"; {missing:,} of {len(place):,} {table.entity} have no row in it"
        notes = (*dataset.notes, *table.notes, note + "".join(without))
        dataset = dataclasses.replace(dataset, features=(*dataset.features, *features), notes=notes)
    return dataset


def _with_items(dataset: Dataset, ids: np.ndarray) -> Dataset:
    """Return the data set with more items, which have no events; ids: [n] text."""
    known_ids = np.asarray(dataset.item_ids)
    if known_ids.dtype.kind != "U" and all(re.fullmatch(r"0|-?[1-9]\d{0,17}", one) for one in ids.tolist()):
        ids = ids.astype(np.int64)
    else:
        known_ids = known_ids.astype(np.str_)
    item_ids = np.union1d(known_ids, ids)
    if len(item_ids) == len(known_ids):  # another file has already added them
        return dataset
    return dataclasses.replace(
        dataset,
        items=np.searchsorted(item_ids, known_ids)[dataset.items].astype(np.int32),
        item_ids=item_ids,
        notes=(*dataset.notes, f"{len(item_ids) - len(known_ids):,} items without events are part of the catalogue"),
    )
