"""Load any data set with `load_dataset`."""

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
from data.vocabulary import Vocabulary, with_vocabulary

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
    report: Callable[[str], None] | None = None,
    features: Features | dict | None = None,
    partitions: int | None = None,
    fingerprint: str | None = None,
) -> Dataset:
    """Load a data set, and prepare its cache first if that is missing.

    Args:
        format: a key of FORMATS.
        path: the raw file, its folder, a folder of parts, a pattern of files (`logs/*.csv`; csv and parquet only), or a
            prepared cache folder (with a meta.json), which needs neither the raw file nor polars.
        cache_dir: the folder of prepared caches; None keeps the prepared data in memory and writes nothing.
        min_user_events, min_item_events: drop users and items with fewer events, until all others have enough.
        columns: csv and parquet only, see `options.Columns`.
        synthetic, recall: for the formats of these names only, see `options.SyntheticOptions`,
            `options.RecallOptions`.
        vocabulary: the vocabulary of a trained model. Known items keep their numbers; events with other items are left
            out and counted in `Dataset.left_out`, and so are users with fewer than min_user_events remaining events.
            min_item_events is not applied.
        separator: the character between fields of csv or sequences; by default detected from the first line.
        on_bad_row: whether rows that cannot be read are an error, or are dropped and counted.
        duplicates: whether to keep or drop events that equal an earlier one in every column.
        bad_rows_limit: the greatest share of a source's rows that on_bad_row may drop; ten rows are always allowed.
        encoding: the encoding of text files; by default detected.
        decimal: the decimal sign of numbers.
        where: an SQL condition on the file's columns; other rows are left out.
        report: called from time to time with a line about the progress of a long preparation.
        features: options of features, see `features.options.Features`; with a vocabulary, those of items are not read.
        partitions: the number of ranges of users that are prepared one after another to limit memory
            (`reading/partitions.py`); chosen by default.
        fingerprint: the expected fingerprint of the data set; not checked with a vocabulary.

    Raises:
        DataError: the data or options are wrong; one line, or one for each bad row, with the file, line, column and
            value if possible.
        OtherData: the data set has another fingerprint; raised before raw files are prepared.

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
            f"data.format: unknown format {format!r}{did_you_mean(format, FORMATS)} (known: {', '.join(FORMATS)})"
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
            raise DataError(f"data.{kind}: these options are for format {kind}, not {format}")
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
        return with_vocabulary(with_tables(dataset, read), vocabulary, min_user_events)
    if vocabulary is None:
        arguments = format, fmt, path, cache_dir, options, handling, report, features, partitions, fingerprint
        return load_or_prepare(*arguments)
    whole = load_or_prepare(format, fmt, path, cache_dir, None, handling, report, features, partitions)
    return with_vocabulary(whole, vocabulary, min_user_events)
