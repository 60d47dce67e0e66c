"""The options that a user may give a source: columns of an own file, sizes of the generated data.

They are part of the run's configuration (`data.columns`, `data.synthetic`, `data.recall`): an unknown one, a wrong type
or value is answered like any other key.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .types import DataError, did_you_mean, shown

MOST_EVENTS = 2 * 10**9  # generated ones; their arrays would take some 24 GB
MOST_ITEMS = 10**7
MOST_ACTION = 999_999  # codes are rows of an embedding table: more is taken for a column read wrongly


def checked_separator(value: object) -> str:
    """What separates the fields of a text file, "tab" being another word for a tab; DataError."""
    text = "\t" if value == "tab" else value
    if not isinstance(text, str) or len(text) != 1 or not text.isascii() or text.isalnum() or text in '"\r\n\0.+-':
        raise DataError(
            f"data.separator: expected one character that no number holds, or tab, got {shown(repr(value))}"
        )
    return text


class Options(BaseModel):
    """No unknown keys, no conversions between types, no infinities, no changes after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Columns(Options):
    """The columns of a csv or parquet file by their names in it.

    timestamp: "" says that it has no times and is in time order already. timestamp_unit: of times that are numbers, s,
    ms, us or ns; absent, it is told from the values. timestamp_format: of times that are text, as of
    `datetime.strptime` ("%d/%m/%Y %H:%M"); absent, ISO 8601 is read; times without a zone are UTC. action_codes: text
    of an action -> its code, an integer >= 0; absent, text gets codes in order of frequency.
    """

    user: str = Field("user", min_length=1)
    item: str = Field("item", min_length=1)
    timestamp: str = "timestamp"
    action: str | None = Field(None, min_length=1)
    timestamp_unit: Literal["s", "ms", "us", "ns"] | None = None
    timestamp_format: str | None = Field(None, min_length=1, max_length=100)
    action_codes: dict[str, Annotated[int, Field(ge=0, le=MOST_ACTION)]] | None = Field(None, min_length=1)

    def by_role(self) -> dict[str, str]:
        """role -> column, in a fixed order and without what the source has none of."""
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
            raise ValueError("action_codes: name the column of the actions too (action)")
        return self


class SyntheticOptions(Options):
    """num_users, num_items, num_clusters; mean_length and min_length of a history (events, capped at max_length);
    num_successors of an item; num_homes: home clusters of a user; session_length: mean events of a session;
    noise: share of events drawn by popularity alone; zipf: exponent of the popularity skew; actions: whether each
    event is liked (1) or not (0)."""

    num_users: int = Field(2000, ge=1, le=10**9)
    num_items: int = Field(1000, ge=2, le=MOST_ITEMS)
    num_clusters: int = Field(50, ge=1)
    mean_length: float = Field(40.0, ge=1)
    min_length: int = Field(5, ge=1)
    max_length: int = Field(400, ge=1)
    num_successors: int = Field(4, ge=1, le=1000)
    num_homes: int = Field(3, ge=1, le=1000)
    session_length: float = Field(8.0, ge=1)
    noise: float = Field(0.1, ge=0, le=1)
    zipf: float = Field(0.9, ge=0, le=10)
    seed: int = Field(0, ge=0, lt=2**63)
    actions: bool = False

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


class RecallOptions(Options):
    """num_sequences of `length` events; distances: the greatest, in events, of each group of distances at which items
    return; pairs of a sequence in each group; num_keys items that return, num_values that follow them, num_fillers
    others (data/recall.py)."""

    num_sequences: int = Field(2000, ge=3, le=10**7)
    length: int = Field(1024, ge=8, le=10**6)
    distances: list[Annotated[int, Field(ge=2)]] = Field([16, 32, 64, 128, 256, 512], min_length=1, max_length=64)
    pairs: int = Field(8, ge=1)
    num_keys: int = Field(512, ge=1, le=MOST_ITEMS)
    num_values: int = Field(256, ge=2, le=MOST_ITEMS)
    num_fillers: int = Field(256, ge=1, le=MOST_ITEMS)
    seed: int = Field(0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.distances)) < len(self.distances):
            raise ValueError(f"distances: {self.distances} has one twice")
        if max(self.distances) > self.length - 2:
            raise ValueError(f"distances: {max(self.distances)} needs a length of {max(self.distances) + 2} at least")
        if (total := self.pairs * len(self.distances)) > self.num_keys:
            raise ValueError(f"num_keys={self.num_keys} is less than the {total} pairs of a sequence")
        if self.num_sequences * self.length > MOST_EVENTS:
            raise ValueError(
                f"num_sequences={self.num_sequences} of length={self.length} are more than {MOST_EVENTS:,} events"
            )
        return self


Kind = TypeVar("Kind", bound=Options)


def parse_options(kind: type[Kind], values: dict | Kind | None, where: str) -> Kind:
    """`values` checked; DataError, in one line, names everything that is wrong with them below the key `where`."""
    if isinstance(values, kind):
        return values
    try:
        return kind.model_validate(values or {})
    except ValidationError as error:
        raise DataError("; ".join(_explain(item, kind, where) for item in error.errors())) from None


def _explain(item: dict, kind: type[Options], where: str) -> str:
    key = ".".join([where, *map(str, item["loc"])])
    if item["type"] == "extra_forbidden":
        known = kind.model_fields
        return f"{key}: unknown key{did_you_mean(item['loc'][-1], known) or ', known here: ' + ', '.join(known)}"
    if item["type"] == "value_error":
        return f"{key}: {item['ctx']['error']}"
    return f"{key}: {item['msg'][0].lower()}{item['msg'][1:]}, got {shown(repr(item['input']))}"
