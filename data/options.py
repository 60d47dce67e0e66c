"""Define the options of a source: `data.columns`, `data.synthetic` and `data.recall` of a run's configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from data.explain import explain
from data.types import DataError, shown

MOST = 10**9  # for all sizes and counts: tensors of a greater size fit nowhere
MOST_EVENTS = 2 * 10**9  # events of generated data: their arrays take some 24 GB
MOST_ITEMS = 10**7
MOST_ACTION = 999_999  # codes are rows of an embedding table; greater ones come from a wrong column


def auto_or(least: int) -> Callable:
    """Return a validator for an option that is `auto` or an integer of at least `least`."""

    def check(value):
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
            return value
        raise ValueError(f"expected auto or an integer of at least {least}, got {value!r}")

    return check


def chosen(value: int | Literal["auto"]) -> int:
    """Return the value of an option that may be `auto`; ValueError if `auto` is not yet replaced by a number."""
    if value == "auto":
        raise ValueError("expected a number, got auto: load_config, open_data or Config.for_model replace it")
    return value


def checked_separator(value: object, key: str = "data.separator") -> str:
    """Return the character between the fields of a text file; "tab" gives a tab. Else DataError, which names `key`."""
    text = "\t" if value == "tab" else value
    if not isinstance(text, str) or len(text) != 1 or not text.isascii() or text.isalnum() or text in '"\r\n\0.+-':
        raise DataError(
            f"{key}: expected tab or one ASCII character, no letter, digit, quote, ., + or -, got {shown(repr(value))}"
        )
    return text


class Options(BaseModel):
    """Base of options: immutable; rejects unknown keys, infinities and too large numbers; converts no types."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _not_absurd(cls, value, info):
        if isinstance(value, int) and value > MOST and info.field_name != "seed":
            raise ValueError(f"expected at most {MOST:,}, got {value}")
        return value

    def check_run(self, run: Any) -> None:
        """Raise ValueError if other options of the run (a loaded `RunConfig`) do not work with these."""


class Columns(Options):
    """The names of the columns of a csv or parquet file."""

    user: str = Field("user", min_length=1)
    """The column with the user's id."""
    item: str = Field("item", min_length=1)
    """The column with the item's id."""
    timestamp: str = "timestamp"
    """The column with the event's time; `""` if there is none, with each user's rows in time order."""
    action: str | None = Field(None, min_length=1)
    """The column with the action (a rating, the kind of a click); if absent, events have no action."""
    timestamp_unit: Literal["s", "ms", "us", "ns"] | None = None
    """The unit of numeric times; if absent, it is detected from their size."""
    timestamp_format: str | None = Field(None, min_length=1, max_length=100)
    """The format of times that are text, as for Python's `datetime.strptime`; if absent, ISO 8601."""
    action_codes: dict[str, Annotated[int, Field(ge=0, le=MOST_ACTION)]] | None = Field(None, min_length=1)
    """The code of each action that is text; if absent, codes are numbered by frequency, the most frequent first."""

    def by_role(self) -> dict[str, str]:
        """Map each role that the source has to its column, in a fixed order."""
        roles = {"user": self.user, "item": self.item, "timestamp": self.timestamp, "action": self.action}
        return {role: column for role, column in roles.items() if column}

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        names = list(self.by_role().values())
        if doubled := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"column {doubled[0]!r} is named twice")
        if self.timestamp_format and self.timestamp_unit:
            raise ValueError("timestamp_unit is for numbers, timestamp_format for text: give one")
        if self.action_codes and not self.action:
            raise ValueError("action_codes: name the column of the actions, too (action)")
        return self


class SyntheticOptions(Options):
    """The generated data set of `data.format: synthetic`: users move through clusters of items."""

    num_users: int = Field(2000, ge=1, le=10**9)
    """The number of users."""
    num_items: int = Field(1000, ge=2, le=MOST_ITEMS)
    """The number of items."""
    num_clusters: int = Field(50, ge=1)
    """The number of clusters of items."""
    mean_length: float = Field(40.0, ge=1)
    """The mean number of events of a user."""
    min_length: int = Field(5, ge=1)
    """The least number of events of a user."""
    max_length: int = Field(400, ge=1)
    """The greatest number of events of a user."""
    num_successors: int = Field(4, ge=1, le=1000)
    """The number of items that may follow an item within its cluster."""
    num_homes: int = Field(3, ge=1, le=1000)
    """The number of clusters of a user, who visits one in each session."""
    session_length: float = Field(8.0, ge=1)
    """The mean number of events of a session."""
    noise: float = Field(0.1, ge=0, le=1)
    """The share of events whose items are drawn by popularity only."""
    zipf: float = Field(0.9, ge=0, le=10)
    """The exponent of the items' popularity: 0 makes all items equally popular."""
    seed: int = Field(0, ge=0, lt=2**63)
    """The seed of the generator."""
    actions: bool = False
    """Whether events have an action: liked (1) or not (0)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_clusters > self.num_items:
            raise ValueError(f"num_clusters={self.num_clusters} is more than num_items={self.num_items}")
        if not self.min_length <= self.mean_length <= self.max_length:
            raise ValueError(
                f"mean_length={self.mean_length:g} must lie between min_length={self.min_length} and "
                f"max_length={self.max_length}"
            )
        if self.num_users * self.mean_length > MOST_EVENTS:
            raise ValueError(
                f"num_users={self.num_users} of mean_length={self.mean_length:g} are more than {MOST_EVENTS:,} events"
            )
        return self


class ShortSequences(Options):
    """Short sequences of the generated memory task, for training in addition to the long ones."""

    num_sequences: int = Field(ge=3, le=10**7)
    """The number of short sequences."""
    length: int = Field(256, ge=8, le=10**6)
    """The number of events of a short sequence."""
    pairs: int = Field(8, ge=1)
    """The number of pairs of each sequence in each group of distances; groups above half of `length` are left out."""


class RecallOptions(Options):
    """The generated memory task of `data.format: recall`: an item returns, and the item after it must be recalled."""

    num_sequences: int = Field(2000, ge=3, le=10**7)
    """The number of sequences."""
    length: int = Field(1024, ge=8, le=10**6)
    """The number of events of a sequence."""
    distances: list[Annotated[int, Field(ge=2)]] = Field([16, 32, 64, 128, 256, 512], min_length=1, max_length=64)
    """The greatest distance of each group, in events: in group `d`, items return after d/2 + 1 to d events."""
    pairs: int = Field(8, ge=1)
    """The number of pairs of each sequence in each group of distances."""
    num_keys: int = Field(512, ge=1, le=MOST_ITEMS)
    """The number of items that return (keys)."""
    num_values: int = Field(256, ge=2, le=MOST_ITEMS)
    """The number of items that follow a key (values); a guess is right with probability 1 / `num_values`."""
    num_fillers: int = Field(256, ge=1, le=MOST_ITEMS)
    """The number of items between the pairs (fillers)."""
    short: ShortSequences | None = None
    """Short sequences for training in addition to the long ones; none by default."""
    seed: int = Field(0, ge=0, lt=2**63)
    """The seed of the generator."""

    def short_options(self) -> Self:
        """Return the options of a task with only the short sequences; ValueError if they are inconsistent."""
        assert self.short is not None
        distances = [distance for distance in self.distances if distance <= self.short.length // 2]
        return type(self)(**self.model_dump() | self.short.model_dump() | {"distances": distances, "short": None})

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.short:
            if self.distances != sorted(self.distances):
                raise ValueError(f"distances: with short sequences, expected ascending numbers, got {self.distances}")
            if self.distances[0] > self.short.length // 2:
                raise ValueError(
                    f"distances: expected one of at most half of short.length={self.short.length}, got {self.distances}"
                )
            self.short_options()
        if len(set(self.distances)) < len(self.distances):
            raise ValueError(f"distances: expected distinct numbers, got {self.distances}")
        if max(self.distances) > self.length - 2:
            raise ValueError(f"distances: {max(self.distances)} needs a length of at least {max(self.distances) + 2}")
        if (total := self.pairs * len(self.distances)) > self.num_keys:
            raise ValueError(f"num_keys={self.num_keys} is less than the {total} pairs of a sequence")
        if self.num_sequences * self.length > MOST_EVENTS:
            raise ValueError(
                f"num_sequences={self.num_sequences} of length={self.length} are more than {MOST_EVENTS:,} events"
            )
        return self


Kind = TypeVar("Kind", bound=Options)


def parse_options(kind: type[Kind], values: dict | Kind | None, where: str) -> Kind:
    """Return the checked options; DataError has all errors in one line. where: the key of the options."""
    if isinstance(values, kind):
        return values
    try:
        return kind.model_validate(values or {})
    except ValidationError as error:
        lines = (explain(item, lambda _: kind.model_fields, [where, *item["loc"]]) for item in error.errors())
        raise DataError("; ".join(lines)) from None
