"""Map values of features to table rows; the mapping is fitted to training data and applied to any data.

Every feature except vectors has a table. Row 0 is the unknown row, for values that are rare or absent in training. The
other rows are values in ascending order, or quantiles of numbers.

Requires only numpy and pydantic. Letters: I items, U users, E events, L the greatest number of values of a row, F
features of an entity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from data.features.features import VECTOR, Feature
from data.features.options import FeatureOptions, Features
from data.splits import train_events
from data.types import DataError, Dataset, shown

MOST_VALUES = 64  # values of a feature of one user or event: a batch has a column for each value
CALENDAR = {"hour": 24, "weekday": 7}


@dataclass(frozen=True, eq=False)
class KnownFeature:
    """The known values of one feature of a trained model.

    entity  items, users or events
    values  [n] ascending: the text of rows 1 .. n; for numbers, the least value of rows 2 .. n + 1
    known   for features of events: before or after, whether the value is known before the user acts or only after
    """

    entity: str
    name: str
    kind: str
    values: np.ndarray
    known: str = "after"

    @property
    def num_rows(self) -> int:
        """The number of rows of the table, including the unknown one."""
        return len(self.values) + (2 if self.kind == "number" else 1)

    def rows_of(self, values: np.ndarray) -> np.ndarray:
        """Return the table row of each value: [n] -> [n] int64."""
        if self.kind == "number":
            return 1 + np.searchsorted(self.values, values, side="right")
        if not len(self.values):
            return np.zeros(len(values), np.int64)
        place = np.minimum(np.searchsorted(self.values, values), len(self.values) - 1)
        return np.where(self.values[place] == values, 1 + place, 0)


@dataclass(frozen=True, eq=False)
class FeatureVocabulary:
    """The features of a trained model.

    features   the features with a table, in the order of the data set: those of events, items, users
    calendar   the parts of an event's time that are features: hour, weekday
    item_rows  (offsets [I+1], table rows [S] int64) of each feature of items
    trained    [I] bool, True for items with a training event; None without features of items
    time_zone  the time zone of the calendar; None is UTC
    items      the features of items with all values, including those in the unknown row, for item filters; empty if the
               run has not stored them
    vectors    the features of items that are vectors
    """

    features: tuple[KnownFeature, ...]
    calendar: tuple[str, ...] = ()
    item_rows: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    trained: np.ndarray | None = None
    time_zone: str | None = None
    items: tuple[Feature, ...] = ()
    vectors: tuple[Feature, ...] = ()

    def of(self, entity: str) -> list[KnownFeature]:
        """Return the features of an entity: items, users or events."""
        return [feature for feature in self.features if feature.entity == entity]


def fit_features(
    dataset: Dataset, train_end: np.ndarray, options: Features, time_zone: str | None = None
) -> FeatureVocabulary:
    """Fit the vocabulary to the items, users and events of training; each of them counts once.

    train_end: [U] int64, training uses events user_offsets[u] .. train_end[u]-1 of user u. time_zone: the time zone of
    the calendar.
    """
    in_training = train_events(dataset, train_end)
    items = np.zeros(dataset.num_items, bool)
    items[dataset.items[in_training]] = True
    rows = {"items": items, "users": train_end > dataset.user_offsets[:-1], "events": in_training}
    known = []
    vectors = tuple(feature for feature in dataset.features if feature.kind == VECTOR)
    in_tables = [feature for feature in dataset.features if feature.kind != VECTOR]
    for feature in in_tables:
        chosen = _options_of(options, feature)
        part = feature.take(np.flatnonzero(rows[feature.entity]))
        if feature.kind == "number":
            values = _edges(part, chosen.quantiles)
        else:
            values = feature.values[np.bincount(part.codes, minlength=len(feature.values)) >= chosen.min_count]
        known.append(
            KnownFeature(feature.entity, feature.name, feature.kind, values, getattr(chosen, "known", "after"))
        )
    calendar = tuple(options.events.calendar) if options.events else ()
    if calendar and not dataset.has_timestamps:
        raise DataError(f"data.features.events.calendar: {dataset.name} has no timestamps")
    item_rows = [
        (feature.offsets, known_feature.rows_of(feature.values)[feature.codes])
        for feature, known_feature in zip(in_tables, known)
        if feature.entity == "items"
    ]
    trained = items if item_rows or vectors else None
    item_features = tuple(feature for feature in in_tables if feature.entity == "items")
    return FeatureVocabulary(tuple(known), calendar, tuple(item_rows), trained, time_zone, item_features, vectors)


def grown(fitted: FeatureVocabulary, known: FeatureVocabulary, place: np.ndarray) -> FeatureVocabulary:
    """Extend the vocabulary `known` of a model for further training on data whose vocabulary is `fitted`.

    It has the known and the new values; numbers keep the known quantiles. place: [I] int64, the index in `known` of
    each item of `fitted`, or -1. DataError if the features differ.
    """
    forms = [_forms(these) for these in (known, fitted)]
    if forms[0] != forms[1]:
        only = [one for one in forms[1] if one not in forms[0]]
        entity, name, kind = (only or [one for one in forms[0] if one not in forms[1]])[0][:3]
        where = "the data, not in the run" if only else "the run, not in the data"
        raise DataError(f"data.features: {shown(name)} of {entity} ({kind}) is in {where}")
    features = []
    for old, one in zip(known.features, fitted.features):
        values = old.values if one.kind == "number" else np.union1d(old.values, one.values)
        features.append(dataclasses.replace(one, values=values))
    item_features = [one for one in features if one.entity == "items"]
    item_rows = tuple((whole.offsets, one.rows_of(whole.values)[whole.codes])
                      for one, whole in zip(item_features, fitted.items))  # fmt: skip
    trained = fitted.trained
    if trained is not None and known.trained is not None:
        trained = trained | ((place >= 0) & known.trained[place])
    return dataclasses.replace(fitted, features=tuple(features), item_rows=item_rows, trained=trained)


def _forms(known: FeatureVocabulary) -> list[tuple[str, str, str]]:
    """Return (entity, name, kind) of each feature."""
    vectors = [(one.entity, one.name, f"vector of {one.values.shape[1]}") for one in known.vectors]
    return [*((one.entity, one.name, one.kind) for one in known.features), *vectors]


def _options_of(options: Features, feature: Feature) -> FeatureOptions:
    columns = getattr(options, feature.entity).columns or {}
    return columns.get(feature.name) or FeatureOptions(kind=cast(Any, feature.kind))


def _edges(feature: Feature, quantiles: int) -> np.ndarray:
    """Return the float64 edges between quantiles of the numbers, at most quantiles - 1."""
    if not len(feature.codes):
        return np.empty(0)
    numbers = feature.values[feature.codes]
    edges = np.quantile(numbers, np.arange(1, quantiles) / quantiles, method="higher")
    return np.unique(edges[edges > numbers.min()])


def with_rows(dataset: Dataset, vocabulary: FeatureVocabulary) -> Dataset:
    """Return the data set with the table rows of features of users and events, `user_rows` and `event_rows`.

    DataError if the data set does not have a feature of the vocabulary.
    """
    return dataclasses.replace(
        dataset,
        user_rows=_rows(dataset, vocabulary.of("users"), dataset.num_users),
        event_rows=_rows(dataset, vocabulary.of("events"), dataset.num_events),
    )


def _rows(dataset: Dataset, known: Sequence[KnownFeature], count: int) -> np.ndarray | None:
    """Return table rows as in `table_rows`; None without features."""
    if not known:
        return None
    for entry in known:
        if not any((entry.entity, entry.name, entry.kind) == (f.entity, f.name, f.kind) for f in dataset.features):
            raise DataError(f"{dataset.name}: no feature {entry.name} of {entry.entity}, which the trained model has")
    return table_rows(known, dataset.features, count)


def table_rows(known: Sequence[KnownFeature], features: Sequence[Feature], count: int) -> np.ndarray:
    """Return the table rows [count, F, L] int32 of `count` users or events, padded with -1.

    A known feature that is not in `features` has no values. DataError for a list with too many values.
    """
    by_name = {(feature.entity, feature.name, feature.kind): feature for feature in features}
    by_entry = [by_name.get((entry.entity, entry.name, entry.kind)) for entry in known]
    longest = 1
    for entry, feature in zip(known, by_entry):
        most = 0 if feature is None else int(np.diff(feature.offsets).max(initial=0))
        if most > MOST_VALUES:
            raise DataError(
                f"data.features.{entry.entity}.columns.{entry.name}: {most} values in one list, at most "
                f"{MOST_VALUES} are supported for {shown(entry.entity)}"
            )
        longest = max(longest, most)
    rows = np.full((count, len(known), longest), -1, np.int32)
    for place, (entry, feature) in enumerate(zip(known, by_entry)):
        if feature is not None:
            owner = feature.rows
            rows[owner, place, np.arange(len(owner)) - feature.offsets[owner]] = entry.rows_of(feature.values)[
                feature.codes
            ]
    return rows
