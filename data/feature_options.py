"""The options of features, the mapping `data.features` of a run: their files, columns and how values become rows."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from .options import Options

NAME = r"^[A-Za-z0-9_-]+$"  # of a feature: part of the names of modules and files
MOST_FEATURES = 100


def _by_kind(value: object) -> object:
    """`brand: category` is short for `brand: {kind: category}`."""
    return {"kind": value} if isinstance(value, str) else value


class FeatureOptions(Options):
    """One feature.

    kind: category (one value of text or an integer), list (any number of them) or number. column: its column in the
    file; absent, the feature's name. separator: of a list that stands in one text. min_count: values seen fewer times
    share the unknown row. quantiles: parts of equal size that the training data's numbers are cut into.
    """

    kind: Literal["category", "list", "number"]
    column: str | None = Field(None, min_length=1)
    separator: str = Field("|", min_length=1, max_length=10)
    min_count: int = Field(2, ge=1)
    quantiles: int = Field(10, ge=2, le=10_000)


class EventFeatureOptions(FeatureOptions):
    """A feature of events. known: whether it is known before the user acts (a device) or after (a time watched)."""

    known: Literal["before", "after"] = "after"


Named = Annotated[str, Field(pattern=NAME, max_length=60)]
Column = Annotated[FeatureOptions, BeforeValidator(_by_kind)]
EventColumn = Annotated[EventFeatureOptions, BeforeValidator(_by_kind)]
Columns = Annotated[dict[Named, Column], Field(min_length=1, max_length=MOST_FEATURES)]


class FeatureFile(Options):
    """A file of features, a row for each item or user.

    id: the column of the ids, by default item or user. columns: the features; of a format with fixed columns those that
    are used, by default all. unknown: what becomes of rows whose id no event has, an error or left out (drop); by
    default an error, but not in MovieLens' own files, which list more than was rated.
    """

    format: str
    path: str = Field(min_length=1)
    id: str | None = Field(None, min_length=1)
    separator: str | None = None
    columns: Columns | None = None
    unknown: Literal["error", "drop"] | None = None

    @model_validator(mode="after")
    def _own_columns(self) -> Self:
        own = self.format in ("csv", "parquet")
        if own and not self.columns:
            raise ValueError("columns: missing, name the file's columns and their kinds (brand: category)")
        if not own and (self.id or self.separator):
            raise ValueError("id, separator: only format csv or parquet has columns of your own")
        if self.format == "parquet" and self.separator:
            raise ValueError("separator: a Parquet file has none")
        return self


class ItemFile(FeatureFile):
    """Features of items. unknown: add makes items that no event has part of the catalogue."""

    format: Literal["csv", "parquet", "attributes", "u.item", "movies.dat"]
    unknown: Literal["error", "drop", "add"] | None = None


class UserFile(FeatureFile):
    """Features of users."""

    format: Literal["csv", "parquet", "u.user", "users.dat"]


class EventFeatures(Options):
    """Features of events: columns of the events' own file (format csv or parquet), and parts of their time in UTC."""

    columns: dict[Named, EventColumn] = Field({}, max_length=MOST_FEATURES)
    calendar: list[Literal["hour", "weekday"]] = Field([], max_length=2)

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.columns or self.calendar):
            raise ValueError("names neither columns nor calendar")
        if len(set(self.calendar)) < len(self.calendar):
            raise ValueError("calendar: a part of the time is named twice")
        return self


class Features(Options):
    """What is known of items, users and events beside their ids."""

    items: ItemFile | None = None
    users: UserFile | None = None
    events: EventFeatures | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.items or self.users or self.events):
            raise ValueError("names neither items nor users nor events")
        return self

    def files(self) -> dict[str, FeatureFile]:
        """entity -> its file, of those that have one."""
        return {name: file for name in ("items", "users") if (file := getattr(self, name)) is not None}

    def without_items(self) -> Features | None:
        """The same for data whose items a trained model knows already: no items, and no more users than there are."""
        users = self.users and self.users.model_copy(update={"unknown": "drop"})
        return self.model_copy(update={"items": None, "users": users}) if users or self.events else None

    def recipe(self) -> dict:
        """What decides, beside the files' content, what is read: part of the key of a cache."""
        recipe: dict = {}
        for entity, file in self.files().items():
            recipe[entity] = file.model_dump(exclude={"path", "columns"}) | {"columns": _read_as(file.columns)}
        if self.events and self.events.columns:
            recipe["events"] = {"columns": _read_as(self.events.columns)}
        return recipe


def _read_as(columns: dict | None) -> dict | None:
    """How columns are read; what becomes of their values later is no part of it."""
    if columns is None:
        return None
    keep = {"kind", "column", "separator"}
    return {name: column.model_dump(include=keep) for name, column in columns.items()}
