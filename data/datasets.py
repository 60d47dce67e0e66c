"""The one function that loads any data set, and the names that its users need beside it."""

from __future__ import annotations

from pathlib import Path

from .filtering import filter_dataset
from .formats import FORMATS, with_own_columns
from .options import Columns, SyntheticOptions
from .prepare import load_or_prepare
from .synthetic import generate
from .types import DataError, Dataset, did_you_mean
from .vocabulary import Vocabulary, in_terms_of

__all__ = ["FORMATS", "DataError", "Dataset", "Vocabulary", "load_dataset"]


def load_dataset(
    format: str,
    path: str | Path | None,
    *,
    cache_dir: str | Path | None,
    min_user_events: int = 1,
    min_item_events: int = 1,
    columns: Columns | dict | None = None,
    synthetic: SyntheticOptions | dict | None = None,
    vocabulary: Vocabulary | None = None,
) -> Dataset:
    """Load a dataset, preparing its cache first if need be.

    format: a key of FORMATS. path: the raw file, the folder that holds it, or a prepared cache folder (one with a
    meta.json; then neither the raw file nor polars is needed). cache_dir: where prepared caches live; None keeps the
    prepared data in memory and writes nothing.
    min_user_events, min_item_events: repeatedly drop users and items with fewer events, until none is left.
    columns: csv and parquet only, see `options.Columns`. synthetic: format synthetic only, see
    `options.SyntheticOptions`. vocabulary: what a trained model knows (`vocabulary.vocabulary_of` its data set);
    known items keep their numbers, events with others are left out and counted in `Dataset.left_out`, users with fewer
    than min_user_events events left go too, and min_item_events is not applied.

    Raises DataError, one line, that names the file, line, column and value where it can.
    """
    if format not in FORMATS:
        raise DataError(
            f"data.format: {format!r} is not known{did_you_mean(format, FORMATS)} (there are {', '.join(FORMATS)})"
        )
    for key, value in (("min_user_events", min_user_events), ("min_item_events", min_item_events)):
        if not isinstance(value, int) or not 1 <= value < 2**63:
            raise DataError(f"data.{key}: expected an integer >= 1, got {value!r}")
    if vocabulary is not None:
        whole = load_dataset(format, path, cache_dir=cache_dir, columns=columns, synthetic=synthetic)
        return in_terms_of(whole, vocabulary, min_user_events)
    options = {"min_user_events": min_user_events, "min_item_events": min_item_events}
    fmt = with_own_columns(format, FORMATS[format], columns)
    if format == "synthetic":
        if path:
            raise DataError("data.path: format synthetic is generated and takes no path")
        given = synthetic.model_dump() if isinstance(synthetic, SyntheticOptions) else synthetic
        return filter_dataset(generate(**(given or {})), **options)
    if synthetic:
        raise DataError(f"data.synthetic: these options belong to format synthetic, not to {format}")
    return load_or_prepare(format, fmt, path, cache_dir, options)
