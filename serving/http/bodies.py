"""Define the bodies of requests and replies, and parse request bodies into requests to the model thread.

For an invalid body, the functions raise pydantic's ValidationError or InvalidRequest.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    WithJsonSchema,
)  # fmt: skip

from data.explain import custom
from data.types import shown
from serving.contexts import packed
from serving.errors import InvalidRequest
from serving.filters import Filter
from serving.http.requests import AddItems, AddUsers, Events, PutList, Recommend, Score, UserList

LONGEST_ID = 256
LATEST = 10**11  # seconds, the year 5138; current times in milliseconds are greater, and refused


def _whole(value: Any, what: str) -> int:
    """Return a whole number, which may be written as 7.0 in JSON."""
    if type(value) not in (int, float) or not abs(value) < math.inf or value != int(value):
        raise custom(f"expected {what}, got {shown(repr(value), 200)}")
    return int(value)


def _id(value: Any) -> int:
    number = _whole(value, "a whole number or a text")
    if abs(number) >= 10**LONGEST_ID:
        raise custom(f"expected at most {LONGEST_ID} digits")
    return number


def _seconds(value: Any) -> int:
    number = _whole(value, "whole seconds")
    if not 0 <= number < LATEST:
        hint = " (milliseconds?)" if number > 0 else ""
        raise custom(f"expected seconds since 1970, from 0 to below {LATEST:,}, got {number}{hint}")
    return number


SECONDS = WithJsonSchema({"type": "integer", "minimum": 0, "exclusiveMaximum": LATEST})
Text = Annotated[StrictStr, Field(min_length=1, max_length=LONGEST_ID, pattern=r"^[^\x00]*$")]
WholeId = Annotated[int, BeforeValidator(_id), WithJsonSchema({"type": "integer"})]
Id = WholeId | Text
Whole = Annotated[int, BeforeValidator(lambda value: _whole(value, "a whole number"))]
Seconds = Annotated[int, BeforeValidator(_seconds), SECONDS]
QuerySeconds = Annotated[int, AfterValidator(_seconds), SECONDS]
UserPath = Annotated[str, Path(min_length=1, max_length=LONGEST_ID, description="the user's id, percent-encoded")]
UserQuery = Annotated[str, Query(alias="user", min_length=1, max_length=LONGEST_ID, description="the user's id")]


@dataclass(frozen=True)
class Limits:
    """The limits of one request.

    body         bytes of a body
    filter_body  bytes of a body with a named list or with new items
    events       events of a request
    items        new items of a request
    candidates   candidates of a request
    users        users of a request
    list         items of a list of recommendations
    waiting      requests processed at the same time
    """

    body: int = 2**20
    events: int = 10_000
    filter_body: int = 2**26
    items: int = 1_000
    candidates: int = 10_000
    users: int = 1_000
    list: int = 1_000
    waiting: int = 1_024


class Strict(BaseModel):
    """A body that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")


class EventIn(Strict):
    """A user-item event with time and, if the model uses it, action."""

    user: Id
    item: Id
    timestamp: Seconds | None = Field(None, description="seconds since 1970; by default now")
    action: StrictInt | StrictFloat | Text | None = None
    id: Id | None = Field(None, description="the event's id; the user's second event with the same id changes nothing")
    features: dict[str, Any] = Field({}, description="the values of the event's features")


class EventsIn(Strict):
    """Events to append."""

    events: list[EventIn] = Field(min_length=1)


class Reply(BaseModel):
    """A reply that names the model."""

    model: str = Field(description="the name of the model that answered")


class Accepted(Reply):
    """The numbers of events by state, and the state of each event.

    Accepted events are stored. Events of unknown items are stored, too, for a later model that knows the items.
    """

    accepted: int
    repeated: int = Field(description="events with the id of an earlier event of the user; they change nothing")
    unknown: int = Field(description="events of items that the model does not know")
    events: list[Literal["accepted", "repeated", "unknown item"]]


class UserIn(Strict):
    """A user with features."""

    user: Id
    features: dict[str, Any]


class UsersIn(Strict):
    """Users whose features to store."""

    users: list[UserIn] = Field(min_length=1)


class UsersStored(Reply):
    """The number of users whose features were stored."""

    users: int


class ItemIn(Strict):
    """An item with features."""

    item: Id
    features: dict[str, Any]


class ItemsIn(Strict):
    """Items to add."""

    items: list[ItemIn] = Field(min_length=1)


class ItemsAdded(Reply):
    """The numbers of items by state, and the state of each item."""

    added: int
    known: int = Field(description="items that exist already; they are not changed")
    items: list[Literal["added", "known"]]


class Recommended(BaseModel):
    """A recommended item and its score."""

    item: int | str
    score: float


Cold = Literal["popular", "error"]
WHERE = "feature:value, recommend only items with this value; several values of a feature are alternatives"
AT_MOST = "feature:number, recommend at most this many items with the same value"
COLD = "for users without events: the currently popular items, marked as cold, or an error"
SEEN = "leave out items of the user's events; by default true unless the run's eval.filter_seen is none"


class Recommendations(Reply):
    """The recommended items of a user, best first."""

    items: list[Recommended]
    cold: bool = Field(description="true if the user has no events and the items are popular items")
    unknown: dict[str, int] = Field(
        description="the numbers of unknown ids in allow and deny and unknown values in where"
    )


class FilterIn(Strict):
    """A filter of the items that may be recommended."""

    allow: list[Id] | None = Field(None, description="only these items")
    deny: list[Id] | None = Field(None, description="none of these items")
    where: dict[str, list[Id]] | None = Field(None, description="feature -> values: an item must have one of them")
    at_most: dict[str, Annotated[Whole, Field(ge=0)]] | None = Field(
        None, description="feature -> the most items with the same value in a list"
    )
    filters: list[Text] = Field([], description="names of uploaded lists; an item must be in all of them")

    def filter(self) -> Filter:
        allow, deny = (None if ids is None else _ids(ids) for ids in (self.allow, self.deny))
        return Filter(allow, deny, self.where, self.at_most, self.filters)


class ListsIn(FilterIn):
    """Users to recommend items for."""

    users: list[Id] = Field(min_length=1)
    k: Whole = Field(10, ge=1)
    at: Seconds | None = Field(None, description="seconds since 1970; by default now")
    exclude_seen: StrictBool | None = Field(None, description=SEEN)
    cold: Cold = Field("popular", description=COLD)


class ErrorBody(BaseModel):
    """The name of an error and its message in one line."""

    name: str
    message: str


class ListOut(BaseModel):
    """The recommended items of one user, or an error."""

    user: int | str
    items: list[Recommended] | None = None
    cold: bool = False
    error: ErrorBody | None = None


class ListsOut(Reply):
    """The recommended items of users, in their order."""

    lists: list[ListOut]
    unknown: dict[str, int]


class NamedListIn(Strict):
    """The items of a named list."""

    items: list[StrictInt | Text | WholeId]  # pydantic checks most of a long list without calling Python functions


class NamedListOut(BaseModel):
    """The number of items in an uploaded list, and of ids that the model does not know."""

    items: int
    unknown: int


class NamedLists(BaseModel):
    """The names of the uploaded lists and the number of items in each."""

    filters: dict[str, int]


class Dropped(BaseModel):
    """Whether the deleted list existed."""

    dropped: bool


class ScoresIn(Strict):
    """Candidates to score for a user."""

    user: Id
    candidates: list[Id] = Field(min_length=1)
    at: Seconds | None = Field(None, description="seconds since 1970; by default now")
    features: dict[str, Any] = Field({}, description="features of the next event that are known before the user acts")


class Scores(Reply):
    """Scores in the order of the candidates; one for each kind of action if a ranking run has several kinds."""

    scores: list[float] | list[list[float]]


class HistoryOut(BaseModel):
    """The events of a user that the model sees, and the number of all events."""

    items: list[int | str]
    timestamps: list[int]
    actions: list[int] | None
    count: int


class Forgotten(BaseModel):
    """Whether the deleted user had events or features."""

    forgotten: bool


class ModelIn(Strict):
    """The name of a run in the folder of runs."""

    run: Text


class Exchanged(Reply):
    """The new model and the previous one."""

    previous: str = Field(description="the name of the previous model")


class ModelOut(Reply):
    """The current model, the finished runs (newest first), and the reasons why runs were refused, by name."""

    runs: list[str]
    refused: dict[str, str]


class Health(Reply):
    """The state of the service."""

    status: str
    users: int


class Ready(Reply):
    """The state of a service that can take requests."""

    status: str


class Error(BaseModel):
    """The body of an error reply."""

    error: ErrorBody


def parse_events(content: bytes, limits: Limits, now: int) -> Events:
    """Parse the body of POST /events; now: the time of events without a time."""
    body = EventsIn.model_validate_json(content)
    _check("events", len(body.events), limits.events)
    actions = [event.action for event in body.events]
    if any(action is None for action in actions) and any(action is not None for action in actions):
        raise InvalidRequest("actions: expected one for each event, or for none")
    contexts = [packed(event.action, event.features) for event in body.events]
    names = [None if event.id is None else str(event.id) for event in body.events]
    return Events(
        [str(event.user) for event in body.events],
        _ids([event.item for event in body.events]),
        [now if event.timestamp is None else event.timestamp for event in body.events],
        None if all(context is None for context in contexts) else contexts,
        None if all(name is None for name in names) else names,
    )


def parse_users(content: bytes, limits: Limits) -> AddUsers:
    """Parse the body of POST /users."""
    body = UsersIn.model_validate_json(content)
    _check("users", len(body.users), limits.users)
    return AddUsers([str(each.user) for each in body.users], [each.features for each in body.users])


def parse_items(content: bytes, limits: Limits) -> AddItems:
    """Parse the body of POST /items."""
    body = ItemsIn.model_validate_json(content)
    _check("items", len(body.items), limits.items)
    names = dict.fromkeys(name for each in body.items for name in each.features)
    features = {name: [each.features.get(name) for each in body.items] for name in names}
    return AddItems(_ids([each.item for each in body.items]), features)


def parse_scores(content: bytes, limits: Limits) -> Score:
    """Parse the body of POST /scores."""
    body = ScoresIn.model_validate_json(content)
    _check("candidates", len(body.candidates), limits.candidates)
    return Score(str(body.user), _ids(body.candidates), body.at, body.features)


def parse_lists(content: bytes, limits: Limits) -> tuple[Recommend, list[int | str]]:
    """Parse the body of POST /recommendations; return the request and the users in their original form."""
    body = ListsIn.model_validate_json(content)
    _check("users", len(body.users), limits.users)
    _check("k", body.k, limits.list)
    users = [str(user) for user in body.users]
    return Recommend(users, body.k, body.at, body.exclude_seen, body.filter(), body.cold), body.users


def parse_model(content: bytes) -> str:
    """Parse the body of POST /model."""
    return ModelIn.model_validate_json(content).run


def parse_named_list(name: str, content: bytes) -> PutList:
    """Parse the body of PUT /filters/{name}."""
    return PutList(name, _ids(NamedListIn.model_validate_json(content).items))


def query_filter(allow: list[str], deny: list[str], where: list[str], at_most: list[str], filters: list[str]) -> Filter:
    """Build the filter of a query; where: texts `feature:value`; at_most: texts `feature:number`."""
    values: dict[str, list[str]] = {}
    for feature, value in _pairs("where", where):
        values.setdefault(feature, []).append(value)
    numbers = dict(_pairs("at_most", at_most))
    for text in numbers.values():
        if not text.isdecimal() or len(text) > 9:
            raise InvalidRequest(f"at_most: expected feature:number, got {shown(repr(text))}")
    return Filter(allow or None, deny, values, {feature: int(number) for feature, number in numbers.items()}, filters)


def _pairs(name: str, pairs: list[str]) -> list[tuple[str, str]]:
    split = [pair.partition(":") for pair in pairs]
    for pair, (_, colon, _) in zip(pairs, split):
        if not colon:
            raise InvalidRequest(f"{name}: expected feature:value, got {shown(repr(pair))}")
    return [(feature, value) for feature, _, value in split]


def user_list(listed: UserList) -> list[Recommended]:
    """Convert a list to the form of a reply."""
    return [Recommended(item=item, score=score) for item, score in zip(listed.items, listed.scores)]


def _check(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{name}: expected at most {most:,} in a request, got {count:,}")


def _ids(ids: list) -> list:
    """Convert ids to one type: all to text unless all are 64-bit integers."""
    return ids if all(isinstance(one, int) and -(2**63) <= one < 2**63 for one in ids) else [str(one) for one in ids]
