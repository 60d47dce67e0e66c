"""Define the options of features, `data.features` of a run: files, columns, and how values become table rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from data.options import Options

NAME = r"^[A-Za-z0-9_-]+$"  # for names of features, which become part of the names of modules and files
MOST_FEATURES = 100
LATER = ("on_bad_row", "encoding", "decimal")  # options of files that caches of 0.2.0 do not have


def _by_kind(value: object) -> object:
    """Expand the short form `brand: category` into `brand: {kind: category}`."""
    return {"kind": value} if isinstance(value, str) else value


class FeatureOptions(Options):
    """One feature. `brand: category` is short for `brand: {kind: category}`."""

    kind: Literal["category", "list", "number"]
    """`category` is one value, text or an integer; `list` any number of them; `number` is cut into quantiles."""
    column: str | None = Field(None, min_length=1)
    """The feature's column in the file; absent, the column has the feature's name."""
    separator: str = Field("|", min_length=1, max_length=10)
    """The text between the values of a `list` that stands in one text."""
    min_count: int = Field(2, ge=1)
    """Values that occur fewer times in the training data share the row of unknown values."""
    quantiles: int = Field(10, ge=2, le=10_000)
    """The number of parts of equal size that the training data's numbers are cut into."""


class ItemFeatureOptions(FeatureOptions):
    """One feature of items."""

    kind: Literal["category", "list", "number", "vector"]  # type: ignore[assignment]
    """`category` is one value, text or an integer; `list` any number of them; `number` is cut into quantiles; `vector`
    is a list of numbers, as many for each item."""
    path: str | None = Field(None, min_length=1)
    """The .npy file with the vectors, one in a row; absent, they are in a column of the Parquet file."""
    ids: str | None = Field(None, min_length=1)
    """The file with the items' ids in the order of the vectors, .npy or text with one a line; absent, `NAME.ids.npy` or
    `NAME.ids.txt` next to `NAME.npy`."""

    @model_validator(mode="after")
    def _of_a_vector(self) -> Self:
        if self.kind != "vector" and (self.path or self.ids):
            raise ValueError(f"path, ids: only a vector has a file of its own, got kind {self.kind}")
        return self


class EventFeatureOptions(FeatureOptions):
    """One feature of events."""

    known: Literal["before", "after"] = "after"
    """Whether the value is known before the user acts (a device) or only after (a time watched)."""


Named = Annotated[str, Field(pattern=NAME, max_length=60)]
Column = Annotated[FeatureOptions, BeforeValidator(_by_kind)]
ItemColumn = Annotated[ItemFeatureOptions, BeforeValidator(_by_kind)]
EventColumn = Annotated[EventFeatureOptions, BeforeValidator(_by_kind)]
Columns = Annotated[dict[Named, Column], Field(min_length=1, max_length=MOST_FEATURES)]
ItemColumns = Annotated[dict[Named, ItemColumn], Field(min_length=1, max_length=MOST_FEATURES)]


class FeatureFile(Options):
    """A file of features with a row for each item or user."""

    format: str
    """The form of the file."""
    path: str = Field(min_length=1)
    """The file."""
    id: str | None = Field(None, min_length=1)
    """The column with the ids; absent, `item` or `user`."""
    separator: str | None = None
    """The character between the fields of a csv file; absent, it is detected from the header."""
    encoding: str | None = Field(None, min_length=1)
    """The encoding of a text file, as Python names it; absent, it is detected."""
    decimal: Literal[".", ","] = "."
    """The sign before the fraction of a number that is text."""
    columns: Columns | None = None
    """The features by name; absent, all that a format with fixed columns has."""
    unknown: Literal["error", "drop", "add"] | None = None
    """What happens to a row whose id is in no event; absent, `error`, but `drop` in MovieLens' own files."""
    on_bad_row: Literal["error", "drop"] = "error"
    """Whether a row that cannot be read stops the preparation or is left out and reported."""

    def with_paths(self, changed: Callable[[str], str]) -> Self:
        """Return the options with changed paths."""
        return self.model_copy(update={"path": changed(self.path)})

    @model_validator(mode="after")
    def _own_columns(self) -> Self:
        has_columns = self.format in ("csv", "parquet")
        if (has_columns or self.format == "npy") and not self.columns:
            raise ValueError("columns: missing, name the file's columns and their kinds (brand: category)")
        if not has_columns and (self.id or self.separator):
            raise ValueError("id, separator: only format csv or parquet has columns of your own")
        if self.format == "parquet" and self.separator:
            raise ValueError("separator: a Parquet file has none")
        return self


class ItemFile(FeatureFile):
    """Features of items."""

    format: Literal["csv", "parquet", "npy", "attributes", "u.item", "movies.dat"]
    """The form of the file: csv, parquet, npy (vectors alone), S3-Rec's JSON (`attributes`) or MovieLens' own."""
    columns: ItemColumns | None = None  # type: ignore[assignment]
    """The features by name; absent, all that a format with fixed columns has."""
    unknown: Literal["error", "drop", "add"] | None = None
    """What happens to a row whose id is in no event: `add` makes it an item of the catalogue; absent, `error`, but
    `drop` in MovieLens' own files."""

    def with_paths(self, changed: Callable[[str], str]) -> Self:
        """Return the options with changed paths, those of vectors, too."""
        columns = self.columns
        for name, one in self.vectors.items():
            paths = {key: changed(path) for key in ("path", "ids") if (path := getattr(one, key)) is not None}
            columns = {**(columns or {}), name: one.model_copy(update=paths)}
        return super().with_paths(changed).model_copy(update={"columns": columns})

    @property
    def vectors(self) -> dict[str, ItemFeatureOptions]:
        """The features that are vectors, ascending by name."""
        return {name: one for name, one in sorted((self.columns or {}).items()) if one.kind == "vector"}

    @property
    def others(self) -> dict[str, ItemFeatureOptions]:
        """The features that are no vectors."""
        return {name: one for name, one in (self.columns or {}).items() if one.kind != "vector"}

    @model_validator(mode="after")
    def _places_of_vectors(self) -> Self:
        if self.format == "npy" and (len(self.columns or {}) != 1 or not self.vectors):
            raise ValueError("columns: a .npy file is one feature, expected NAME: vector")
        for name, one in self.vectors.items():
            if one.path is None and self.format not in ("parquet", "npy"):
                raise ValueError(f"columns.{name}.path: missing, a {self.format} file has no vectors: name a .npy file")
            if self.format == "npy" and one.path is not None:
                raise ValueError(f"columns.{name}.path: the vectors are in the file of data.features.items.path")
            if one.path is not None and one.column is not None:
                raise ValueError(f"columns.{name}.column: a .npy file has no columns")
            if one.path is None and self.format == "parquet" and one.ids is not None:
                raise ValueError(f"columns.{name}.ids: the ids of a Parquet file are in the column of `id`")
            if one.path is None and self.on_bad_row == "drop":
                raise ValueError(f"on_bad_row: drop is not for files with vectors ({name}): a bad vector is an error")
        return self


class UserFile(FeatureFile):
    """Features of users."""

    model_config = ConfigDict(serialize_by_alias=True)  # `as` is no name in Python

    format: Literal["csv", "parquet", "u.user", "users.dat"]
    """The form of the file: csv, parquet or MovieLens' own."""
    unknown: Literal["error", "drop"] | None = None
    """What happens to a row whose id is in no event; absent, `error`, but `drop` in MovieLens' own files."""
    enters: Literal["sum", "tokens"] = Field("sum", alias="as")
    """How features enter a sequence: `sum` adds them to each of its tokens; `tokens` puts a token for each feature in
    front of it, which every later token sees and no window hides."""


class EventFeatures(Options):
    """Features of events."""

    columns: dict[Named, EventColumn] = Field({}, max_length=MOST_FEATURES)
    """Features in columns of the events' own csv or parquet file, by name."""
    calendar: list[Literal["hour", "weekday"]] = Field([], max_length=2)
    """Parts of an event's time that are features: by the clock of `data.time_zone`, or else in UTC."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.columns or self.calendar):
            raise ValueError("names neither columns nor calendar")
        if len(set(self.calendar)) < len(self.calendar):
            raise ValueError("calendar: a part of the time is named twice")
        return self


class Features(Options):
    """Features of items, users and events beside their ids."""

    items: ItemFile | None = None
    """Features of items."""
    users: UserFile | None = None
    """Features of users."""
    events: EventFeatures | None = None
    """Features of events."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.items or self.users or self.events):
            raise ValueError("names neither items nor users nor events")
        return self

    def files(self) -> dict[str, FeatureFile]:
        """Map each entity that has a file of features to that file."""
        return {name: file for name in ("items", "users") if (file := getattr(self, name)) is not None}

    @property
    def user_tokens(self) -> bool:
        """Whether features of users are tokens in front of a sequence."""
        return self.users is not None and self.users.enters == "tokens"

    def without_items(self) -> Features | None:
        """Return the options without items, for data whose items a trained model knows already."""
        users = self.users and self.users.model_copy(update={"unknown": "drop"})
        return self.model_copy(update={"items": None, "users": users}) if users or self.events else None

    @property
    def drops_bad_rows(self) -> bool:
        """Whether bad rows of a file are left out."""
        return any(file.on_bad_row == "drop" for file in self.files().values())

    def recipe(self) -> dict:
        """Return whatever, beside the files' content, determines the result of reading; it is part of a cache's key."""
        recipe: dict = {}
        for entity, file in self.files().items():
            # Keys added later are left out when unused, so that earlier caches keep their fingerprints.
            unused = {key for key in LATER if getattr(file, key) == type(file).model_fields[key].default}
            options = file.model_dump(exclude={"path", "columns", "enters"} | unused)
            recipe[entity] = options | {"columns": _read_as(file.columns)}
        if self.events and self.events.columns:
            recipe["events"] = {"columns": _read_as(self.events.columns)}
        return recipe


def _read_as(columns: dict | None) -> dict | None:
    """Return how columns are read, without the options that only affect what their values become later."""
    if columns is None:
        return None
    keep = {"kind", "column", "separator"}
    return {name: column.model_dump(include=keep) for name, column in columns.items()}
