"""Load any data set with one function, and re-export the names that its callers need."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from data.features.files import find_tables, read_tables, with_tables
from data.features.options import Features
from data.filtering import filter_dataset
from data.options import Columns, Options, RecallOptions, SyntheticOptions, parse_options
from data.prepare import OtherData, check_fingerprint, file_sha256, load_or_prepare
from data.reading.bad_rows import LIMIT
from data.reading.conditions import checked_condition
from data.reading.formats import FORMATS, with_features, with_options, with_writing
from data.reading.partitions import MOST
from data.reading.raw import Handling
from data.reading.sources import local_path
from data.recall import generate_recall
from data.synthetic import generate
from data.types import DataError, Dataset, did_you_mean
from data.vocabulary import Vocabulary, in_terms_of

__all__ = ["FORMATS", "DataError", "Dataset", "OtherData", "Vocabulary", "load_dataset"]


def load_dataset(
    format: str,
    path: str | Path | None,
    *,
    cache_dir: str | Path | None,
    min_user_events: int = 1,
    min_item_events: int = 1,
    columns: Columns | dict | None = None,
    synthetic: SyntheticOptions | dict | None = None,
    recall: RecallOptions | dict | None = None,
    vocabulary: Vocabulary | None = None,
    separator: str | None = None,
    on_bad_row: Literal["error", "drop"] = "error",
    duplicates: Literal["keep", "drop"] = "keep",
    bad_rows_limit: float = LIMIT,
    encoding: str | None = None,
    decimal: Literal[".", ","] = ".",
    where: str | None = None,
    tell: Callable[[str], None] | None = None,
    features: Features | dict | None = None,
    partitions: int | None = None,
    fingerprint: str | None = None,
) -> Dataset:
    """Load a dataset, preparing its cache first if need be.

    format: a key of FORMATS. path: the raw file, the folder that holds it or its parts, a pattern of
    files (`logs/*.csv`; csv and parquet only), or a prepared cache folder (one with a meta.json; then neither the raw
    file nor polars is needed). cache_dir: where prepared caches live; None keeps the
    prepared data in memory and writes nothing.
    min_user_events, min_item_events: repeatedly drop users and items with fewer events, until none is left.
    columns: csv and parquet only, see `options.Columns`. synthetic, recall: of the formats of these names only, see
    `options.SyntheticOptions` and `options.RecallOptions`. vocabulary: what a trained model knows
    (`vocabulary.vocabulary_of` its data set); known items keep their numbers, events with other items are left out and
    counted in `Dataset.left_out`, users with fewer than min_user_events events left go too, and min_item_events is not
    applied. separator: of a csv file or of sequences; by default detected from the first line. on_bad_row: whether rows
    that cannot be read end the preparation or are left out and counted. duplicates: whether events that equal an
    earlier one in every column stay. bad_rows_limit: the greatest share of a source's rows, beyond ten, that on_bad_row
    may leave out. encoding: of text files; by default detected. decimal: the sign before a fraction. where: a condition
    of SQL on the file's columns; other rows are left out. tell: called
    now and then with a line about the progress of a long preparation.
    The notes about how the source was read are in `Dataset.notes`. features: options of the features of items, users
    and events, see `feature_options.Features`; with a vocabulary those of items are not read. partitions: the number of
    ranges of users that are prepared one after another to limit memory (`partitions.py`); chosen automatically by
    default. fingerprint: what the data set's must be; OtherData, before any data are prepared, if it is another.

    Raises DataError, one line, that names the file, line, column and value if possible.

    Examples:
        >>> with open("orders.csv", "w") as file:
        ...     _ = file.write("customer,sku,at\\nann,tea,60\\nann,cup,120\\nbob,tea,x\\n")
        >>> columns = {"user": "customer", "item": "sku", "timestamp": "at"}
        >>> load_dataset("csv", "orders.csv", cache_dir=None, columns=columns)
        Traceback (most recent call last):
        data.types.DataError: orders.csv line 4, column at: ...
        >>> load_dataset("csv", "orders.csv", cache_dir=None, columns=columns, on_bad_row="drop").num_events
        2
    """
    if format not in FORMATS:
        raise DataError(
            f"data.format: {format!r} is not known{did_you_mean(format, FORMATS)} (there are {', '.join(FORMATS)})"
        )
    for key, value in (("min_user_events", min_user_events), ("min_item_events", min_item_events)):
        if not isinstance(value, int) or not 1 <= value < 2**63:
            raise DataError(f"data.{key}: expected an integer >= 1, got {value!r}")
    for key, choice, known in (
        ("on_bad_row", on_bad_row, ("error", "drop")),
        ("duplicates", duplicates, ("keep", "drop")),
    ):
        if choice not in known:
            raise DataError(f"data.{key}: expected {' or '.join(known)}, got {choice!r}")
    if not 0 <= bad_rows_limit <= 1:
        raise DataError(f"data.bad_rows_limit: expected 0 to 1, got {bad_rows_limit!r}")
    if partitions is not None and not 1 <= partitions <= MOST:
        raise DataError(f"data.partitions: expected 1 to {MOST}, got {partitions}")
    options = {"min_user_events": min_user_events, "min_item_events": min_item_events}
    fmt = with_writing(format, with_options(format, FORMATS[format], columns, separator), encoding, decimal)
    if where is not None:
        if fmt.kind not in ("text", "parquet") or not fmt.header:
            raise DataError(f"data.where: the columns of format {format} have no names")
        fmt = dataclasses.replace(fmt, where=where, where_columns=checked_condition(where))
    if features is not None:
        features = parse_options(Features, features, "data.features")
        features = features if vocabulary is None else features.without_items()
    if features is not None and features.events:
        fmt = with_features(format, fmt, features.events.columns, "data.features.events.columns")
    handling = Handling(on_bad_row, duplicates, bad_rows_limit)
    for kind, sizes in (("synthetic", synthetic), ("recall", recall)):
        if sizes and format != kind:
            raise DataError(f"data.{kind}: these options belong to format {kind}, not to {format}")
    if fmt.kind == "generated":
        if path:
            raise DataError(f"data.path: format {format} generates its data and takes no path")
        if (on_bad_row, duplicates) != ("error", "keep"):
            raise DataError(f"data.on_bad_row, data.duplicates: format {format} has neither bad rows nor duplicates")
        generator_options = synthetic if format == "synthetic" else recall
        generator: Callable[..., Dataset] = generate if format == "synthetic" else generate_recall
        dataset = generator(
            **(generator_options.model_dump() if isinstance(generator_options, Options) else generator_options or {})
        )
        tables = find_tables(features, None if cache_dir is None else local_path(cache_dir, "data.cache_dir"))
        read = read_tables(tables, dataset, bad_rows_limit)
        if features is not None:
            sums = [file_sha256(one.path) for table in tables for one in table.sources]
            key = f"{dataset.fingerprint}/{features.recipe()}/{sums}"
            digest = hashlib.sha256(key.encode()).hexdigest()
            dataset = dataclasses.replace(dataset, fingerprint=digest, events_fingerprint=dataset.fingerprint)
        if vocabulary is None:
            dataset = with_tables(filter_dataset(dataset, **options), read)
            check_fingerprint(fingerprint, dataset.fingerprint, dataset.name)
            return dataset
        return in_terms_of(with_tables(dataset, read), vocabulary, min_user_events)
    if vocabulary is None:
        arguments = format, fmt, path, cache_dir, options, handling, tell, features, partitions, fingerprint
        return load_or_prepare(*arguments)
    whole = load_or_prepare(format, fmt, path, cache_dir, None, handling, tell, features, partitions)
    return in_terms_of(whole, vocabulary, min_user_events)
