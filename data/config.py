"""Define the options of a run's data, the section `data` of its configuration."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from data.features.options import Features
from data.features.zones import checked_zone
from data.options import Columns, Options, RecallOptions, SyntheticOptions, checked_separator
from data.reading.bad_rows import LIMIT
from data.reading.encodings import checked_encoding
from data.types import DataError


def _possible_path(value: str) -> str:
    if "\0" in value:
        raise ValueError("a path cannot contain a NUL character")
    return value


def _possible_separator(value: str) -> str:
    try:
        checked_separator(value)
    except DataError as error:
        raise ValueError(str(error).removeprefix("data.separator: ")) from None
    return value


def _possible_encoding(value: str) -> str:
    try:
        return checked_encoding(value, "")
    except DataError as error:
        raise ValueError(str(error).removeprefix(": ")) from None


def _possible_zone(value: str) -> str:
    try:
        return checked_zone(value)
    except DataError as error:
        raise ValueError(str(error).removeprefix("data.time_zone: ")) from None


PathText = Annotated[str, AfterValidator(_possible_path)]


class DataConfig(Options):
    """The events and their split."""

    format: str
    """The format of the raw data: `csv`, `parquet` or another one of docs/data.md."""
    path: PathText | None = None
    """The raw file, its folder, a pattern (csv and parquet), or a prepared cache; not for generated data."""
    protocol: Literal["leave_one_out", "published", "temporal", "all", "last_tenth", "held_out_users"]
    """The split into training, validation and test events (docs/data.md)."""
    cache_dir: PathText = ".cache"
    """The folder of prepared data."""
    min_user_events: int = Field(1, ge=1)
    """Users with fewer events are left out."""
    min_item_events: int = Field(1, ge=1)
    """Items with fewer events are left out."""
    separator: Annotated[str, AfterValidator(_possible_separator)] | None = None
    """The character between the fields of a csv file, or `tab`; if absent, it is detected from the header."""
    encoding: Annotated[str, AfterValidator(_possible_encoding)] | None = None
    """The encoding of text files, as Python names it (`cp1252`, `shift_jis`); if absent, it is detected."""
    decimal: Literal[".", ","] = "."
    """The decimal sign of numbers that are text."""
    where: str | None = Field(None, min_length=1, max_length=1000)
    """The rows to read: an SQL condition on the columns of the file, like `quantity > 0`; if absent, all rows."""
    on_bad_row: Literal["error", "drop"] = "error"
    """Whether a row that cannot be read is an error, or is dropped and reported."""
    bad_rows_limit: float = Field(LIMIT, ge=0, le=1)
    """The greatest share of a source's rows that `on_bad_row: drop` may drop; up to ten rows are always allowed."""
    duplicates: Literal["keep", "drop"] = "keep"
    """Whether to keep or drop events that equal an earlier one in user, item, time, action and features."""
    partitions: int | None = Field(None, ge=1, le=4096)
    """The number of ranges of users that are prepared one after another, to need less memory; if absent, 1 if
    all events fit into memory, otherwise more. The result is the same."""
    columns: Columns | None = None
    """The columns of a csv or parquet file."""
    synthetic: SyntheticOptions | None = None
    """The sizes of the generated data set."""
    recall: RecallOptions | None = None
    """The sizes of the generated memory task."""
    features: Features | None = None
    """Features of items, users and events in addition to their ids (docs/features.md)."""
    time_zone: Annotated[str, AfterValidator(_possible_zone)] | None = None
    """The time zone of `data.features.events.calendar`, like `Europe/Berlin`; if absent, UTC."""
    valid_fraction: float = Field(0.1, ge=0, lt=1)
    """The share of validation events with `protocol: temporal` (0: none), of validation users with `held_out_users`."""
    test_fraction: float = Field(0.1, gt=0, lt=1)
    """The share of test events with `protocol: temporal`, of test users with `held_out_users`."""
    targets: Literal["first", "all"] = "first"
    """With `protocol: temporal`, the targets in a window: each user's first event, or all events, each with all earlier
    events of its user as history."""
    train_on_valid: bool = False
    """With `protocol: last_tenth`, whether to train on validation events, too: only for a final result."""

    def check_run(self, run: Any) -> None:
        """Raise ValueError if options of the run do not work with these."""
        if self.targets == "all" and self.protocol != "temporal":
            raise ValueError("data.targets: all requires data.protocol=temporal")

    @model_validator(mode="after")
    def _zone_of_a_calendar(self) -> Self:
        if self.time_zone and not (self.features and self.features.events and self.features.events.calendar):
            raise ValueError("time_zone: requires features.events.calendar")
        return self
