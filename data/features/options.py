"""Define the options of features, `data.features` of a run: files, columns, and how values become table rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from data.options import Options

NAME = r"^[A-Za-z0-9_-]+$"  # names of features are part of the names of modules and files
MOST_FEATURES = 100
LATER = ("on_bad_row", "encoding", "decimal")  # options that caches of version 0.2.0 do not have


def _by_kind(value: object) -> object:
    """Expand the short form `brand: category` into `brand: {kind: category}`."""
    return {"kind": value} if isinstance(value, str) else value


class FeatureOptions(Options):
    """One feature. `brand: category` is short for `brand: {kind: category}`."""

    kind: Literal["category", "list", "number"]
    """`category`: one value, text or an integer; `list`: any number of them; `number`: a number, cut into quantiles."""
    column: str | None = Field(None, min_length=1)
    """The feature's column in the file; if absent, the column has the feature's name."""
    separator: str = Field("|", min_length=1, max_length=10)
    """The text between the values of a `list`, if lists are text."""
    min_count: int = Field(2, ge=1)
    """Values that occur fewer times in the training data share the row of unknown values."""
    quantiles: int = Field(10, ge=2, le=10_000)
    """The number of quantiles of the training data into which a `number` is cut."""


class ItemFeatureOptions(FeatureOptions):
    """One feature of items."""

    kind: Literal["category", "list", "number", "vector"]  # type: ignore[assignment]
    """`category`: one value, text or an integer; `list`: any number of them; `number`: a number, cut into quantiles;
    `vector`: a list of numbers, of the same length for all items."""
    path: str | None = Field(None, min_length=1)
    """The .npy file with the vectors, one in each row; if absent, they are in the file of items: in a column of a
    Parquet file, or the whole .npy file."""
    ids: str | None = Field(None, min_length=1)
    """The file with the items' ids in the order of the vectors, .npy or text, one id per line; if absent,
    `NAME.ids.npy` or `NAME.ids.txt` next to `NAME.npy`."""

    @model_validator(mode="after")
    def _files_of_vectors(self) -> Self:
        if self.kind != "vector" and (self.path or self.ids):
            raise ValueError(f"path, ids: expected kind vector, got {self.kind}")
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
    """The format of the file."""
    path: str = Field(min_length=1)
    """The file."""
    id: str | None = Field(None, min_length=1)
    """The column with the ids; if absent, `item` for items and `user` for users."""
    separator: str | None = None
    """The character between the fields of a csv file; if absent, it is detected from the header."""
    encoding: str | None = Field(None, min_length=1)
    """The encoding of a text file, as Python names it; if absent, it is detected."""
    decimal: Literal[".", ","] = "."
    """The decimal sign of numbers that are text."""
    columns: Columns | None = None
    """The features by name; if absent, all features of a format with fixed columns."""
    unknown: Literal["error", "drop", "add"] | None = None
    """The handling of rows whose id is in no event; if absent, `drop` for MovieLens' files, otherwise `error`."""
    on_bad_row: Literal["error", "drop"] = "error"
    """Whether a row that cannot be read is an error, or is dropped and reported."""

    def with_paths(self, changed: Callable[[str], str]) -> Self:
        """Return the options with changed paths."""
        return self.model_copy(update={"path": changed(self.path)})

    @model_validator(mode="after")
    def _columns_of_format(self) -> Self:
        has_columns = self.format in ("csv", "parquet")
        if (has_columns or self.format == "npy") and not self.columns:
            raise ValueError("columns: missing, name the file's columns and their kinds (brand: category)")
        if not has_columns and (self.id or self.separator):
            raise ValueError(f"id, separator: expected format csv or parquet, got {self.format}")
        if self.format == "parquet" and self.separator:
            raise ValueError("separator: expected format csv, got parquet")
        return self


class ItemFile(FeatureFile):
    """Features of items."""

    format: Literal["csv", "parquet", "npy", "attributes", "u.item", "movies.dat"]
    """The format of the file: csv, parquet, npy (vectors only), S3-Rec's JSON (`attributes`) or a MovieLens file."""
    columns: ItemColumns | None = None  # type: ignore[assignment]
    """The features by name; if absent, all features of a format with fixed columns."""
    unknown: Literal["error", "drop", "add"] | None = None
    """The handling of rows whose id is in no event; `add` makes them items of the catalogue; if absent, `drop` for
    MovieLens' files, otherwise `error`."""

    def with_paths(self, changed: Callable[[str], str]) -> Self:
        """Return the options with changed paths, including those of vectors."""
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
        """The features that are not vectors."""
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

    model_config = ConfigDict(serialize_by_alias=True)  # `as` is a keyword of Python

    format: Literal["csv", "parquet", "u.user", "users.dat"]
    """The format of the file: csv, parquet or a MovieLens file."""
    unknown: Literal["error", "drop"] | None = None
    """The handling of rows whose id is in no event; if absent, `drop` for MovieLens' files, otherwise `error`."""
    enters: Literal["sum", "tokens"] = Field("sum", alias="as")
    """The use of features in a sequence: `sum` adds them to each token; `tokens` adds a token for each feature before
    the events, to which all tokens attend, whatever the attention window."""


class EventFeatures(Options):
    """Features of events."""

    columns: dict[Named, EventColumn] = Field({}, max_length=MOST_FEATURES)
    """Features in columns of the events' csv or parquet file, by name."""
    calendar: list[Literal["hour", "weekday"]] = Field([], max_length=2)
    """Parts of an event's time that are features, in `data.time_zone` or in UTC."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.columns or self.calendar):
            raise ValueError("expected columns or calendar")
        if len(set(self.calendar)) < len(self.calendar):
            raise ValueError("calendar: expected each part of the time once")
        return self


class Features(Options):
    """Features of items, users and events, in addition to their ids."""

    items: ItemFile | None = None
    """Features of items."""
    users: UserFile | None = None
    """Features of users."""
    events: EventFeatures | None = None
    """Features of events."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.items or self.users or self.events):
            raise ValueError("expected items, users or events")
        return self

    def files(self) -> dict[str, FeatureFile]:
        """Map each entity that has a file of features to that file."""
        return {name: file for name in ("items", "users") if (file := getattr(self, name)) is not None}

    @property
    def user_tokens(self) -> bool:
        """Whether features of users are tokens before the events."""
        return self.users is not None and self.users.enters == "tokens"

    def without_items(self) -> Features | None:
        """Return the options without features of items, or None if there are no others."""
        users = self.users and self.users.model_copy(update={"unknown": "drop"})
        return self.model_copy(update={"items": None, "users": users}) if users or self.events else None

    @property
    def drops_bad_rows(self) -> bool:
        """Whether bad rows of a file are dropped."""
        return any(file.on_bad_row == "drop" for file in self.files().values())

    def recipe(self) -> dict:
        """Return all that determines the result of reading, except the files' content: a part of a cache's key."""
        recipe: dict = {}
        for entity, file in self.files().items():
            # Options that earlier versions did not have are left out if unused, so that their caches stay valid.
            unused = {key for key in LATER if getattr(file, key) == type(file).model_fields[key].default}
            options = file.model_dump(exclude={"path", "columns", "enters"} | unused)
            recipe[entity] = options | {"columns": _read_as(file.columns)}
        if self.events and self.events.columns:
            recipe["events"] = {"columns": _read_as(self.events.columns)}
        return recipe


def _read_as(columns: dict | None) -> dict | None:
    """Return the options of columns that affect reading, without those for their table rows."""
    if columns is None:
        return None
    keep = {"kind", "column", "separator"}
    return {name: column.model_dump(include=keep) for name, column in columns.items()}
