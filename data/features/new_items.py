"""Encode the features of new items, users and events with a trained model's feature vocabulary.

Requires only numpy and pydantic. Letters: M new items, W the size of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.features.features import VECTOR, Feature, feature_of
from data.features.vectors import normalized
from data.features.vocabulary import MOST_VALUES, FeatureVocabulary, table_rows
from data.reading.values import MAX_ID_LENGTH
from data.types import DataError, did_you_mean, shown

MOST = float(np.finfo(np.float64).max)


@dataclass(frozen=True)
class NewItems:
    """The encoded features of new items.

    count      M
    item_rows  (offsets [M+1], table rows [S] int64) of each feature with a table, in the order of the vocabulary
    vectors    [M, W] float16 of each feature that is a vector, of length one or zero
    features   the features with all of their values, for item filters
    """

    count: int
    item_rows: tuple[tuple[np.ndarray, np.ndarray], ...]
    vectors: tuple[np.ndarray, ...]
    features: tuple[Feature, ...]

    @property
    def described(self) -> np.ndarray:
        """Whether each item has a value of a feature, [M] bool."""
        has_value = np.zeros(self.count, bool)
        for offsets, _ in self.item_rows:
            has_value |= np.diff(offsets) > 0
        for vectors in self.vectors:
            has_value |= vectors.any(1)
        return has_value


def check_known_by_features(known: FeatureVocabulary | None) -> FeatureVocabulary:
    """Return the vocabulary; DataError if it has no features of items."""
    if known is None or known.trained is None:
        raise DataError("new items: the run has no features of items (data.features.items), which new items need")
    return known


def new_items(known: FeatureVocabulary, count: int, features: Sequence[Feature]) -> NewItems:
    """Encode the features of `count` items; a known feature that is not in `features` has no values."""
    by_name = {(feature.name, feature.kind): feature for feature in features}
    none = np.zeros(count + 1, np.int64)
    item_rows, vectors, values = [], [], []
    for one in known.of("items"):
        empty = np.empty(0, np.float64 if one.kind == "number" else "U1")
        feature = by_name.get((one.name, one.kind)) or Feature(
            "items", one.name, one.kind, empty, np.zeros(0, np.int32), none
        )
        item_rows.append((feature.offsets, one.rows_of(feature.values)[feature.codes]))
        values.append(feature)
    for vector in known.vectors:
        width = vector.values.shape[1]
        rows = np.zeros((count, width), np.float16)
        if (new_vectors := by_name.get((vector.name, VECTOR))) is not None and len(new_vectors.codes):
            if new_vectors.values.shape[1] != width:
                raise DataError(f"{shown(vector.name)}: expected vectors of {width}, got {new_vectors.values.shape[1]}")
            rows[new_vectors.rows] = new_vectors.values[new_vectors.codes]
        vectors.append(rows)
    return NewItems(count, tuple(item_rows), tuple(vectors), tuple(values))


def rows_of_columns(
    known: FeatureVocabulary, entity: str, count: int, columns: Mapping[str, Sequence[Any]], strict: bool = True
) -> np.ndarray:
    """Return the table rows [count, F, L] int32 of features of users or events; unknown values have the unknown row.

    columns, strict: as in `features_of_columns`.
    """
    if strict and columns and not known.of(entity):
        raise DataError(f"features: the run has no features of {entity}")
    features = features_of_columns(known, count, columns, strict, entity)
    return table_rows(known.of(entity), features, count)


def features_of_columns(
    known: FeatureVocabulary,
    count: int,
    columns: Mapping[str, Sequence[Any]],
    strict: bool = True,
    entity: str = "items",
) -> list[Feature]:
    """Build the features of `count` items, users or events from values by name.

    Args:
        columns: feature -> a value for each item: text, an integer or a boolean for a category; a list of these for a
            list; a number; a list of numbers for a vector; or None.
        strict: raise DataError for unknown features and wrong values; otherwise they are left out.
        entity: items, users or events.
    """
    kinds, widths = {one.name: one.kind for one in known.of(entity)}, {}
    if entity == "items":
        kinds |= {one.name: VECTOR for one in known.vectors}
        widths = {one.name: one.values.shape[1] for one in known.vectors}
    features = []
    for name, column in columns.items():
        if name not in kinds:
            if strict:
                raise DataError(
                    f"features: {shown(name)} is not a feature of {'the run' if entity == 'items' else entity}"
                    f"{did_you_mean(name, kinds)} (known: {', '.join(map(shown, kinds))})"
                )
            continue
        if len(column) != count:
            raise DataError(
                f"features: {shown(name)}: expected a value for each of {count} {entity}, got {len(column)}"
            )
        rows, values = [], []
        for row, value in enumerate(column):
            try:
                parts = _values(kinds[name], value, widths.get(name, 0))
                if entity != "items" and len(parts) > MOST_VALUES:
                    raise DataError(f"expected at most {MOST_VALUES} values, got {len(parts)}")
            except DataError as error:
                if strict:
                    raise DataError(f"features: {shown(name)} of {entity}.{row}: {error}") from None
                continue
            rows += [row] * len(parts)
            values += parts
        features.append(_feature(entity, name, kinds[name], count, rows, values))
    return features


def _feature(entity: str, name: str, kind: str, count: int, rows: list[int], values: list) -> Feature:
    row_numbers = np.array(rows, np.int64)
    if kind != VECTOR:
        empty = np.float64 if kind == "number" else "U1"
        return feature_of(entity, name, kind, count, row_numbers, np.array(values) if values else np.empty(0, empty))
    vectors = normalized(np.stack(values))[0] if values else np.zeros((0, 0), np.float16)
    offsets = np.append(0, np.cumsum(np.bincount(row_numbers, minlength=count))).astype(np.int64)
    return Feature(entity, name, VECTOR, vectors, np.arange(len(values), dtype=np.int32), offsets)


def _values(kind: str, value: Any, width: int) -> list:
    """Return the values of one item; DataError for a wrong value."""
    if value is None:
        return []
    if kind == VECTOR:
        return [_vector(value, width)]
    if kind == "number":
        if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not -MOST < value < MOST:
            raise DataError(f"expected a number, got {shown(repr(value))}")
        return [float(value)]
    if kind == "list":
        if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
            raise DataError(f"expected a list, got {shown(repr(value))}")
        return [text for one in value if (text := _text(one))]
    text = _text(value)
    return [text] if text else []


def _text(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return str(value).lower()  # as in a Parquet file
    if not isinstance(value, str | int | np.integer):
        raise DataError(f"expected text or an integer, got {shown(repr(value))}")
    text = str(value).strip()
    if len(text) > MAX_ID_LENGTH or "\0" in text:
        raise DataError(f"expected at most {MAX_ID_LENGTH} characters, none of them NUL, got {shown(repr(value))}")
    return text


def _vector(value: Any, width: int) -> np.ndarray:
    try:
        vector = np.asarray(value)
    except ValueError:
        vector = np.zeros(0)
    if vector.dtype.kind not in "fiu" or vector.shape != (width,) or not np.isfinite(vector).all():
        raise DataError(f"expected {width} numbers, got {shown(repr(value))}")
    return vector.astype(np.float64)
