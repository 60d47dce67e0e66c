"""Define the bodies of requests and replies, and parse the former into requests of the model thread.

Errors in a body are pydantic's ValidationError or InvalidRequest.
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
LATEST = 10**11  # seconds: in the year 5138; milliseconds are beyond it from March 1973 on


def _whole(value: Any, what: str) -> int:
    """Return a whole number, which JSON may write as 7.0."""
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
        hint = ": milliseconds?" if number > 0 else ""
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

    body        bytes of a body
    filter_body  bytes of the body of a named list of items, and of new items
    events      events of a request
    items       new items of a request
    candidates  candidates of a request
    users       users of a request for recommendations
    list        items of a list of recommendations
    waiting     requests under way
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
    """One event: what a user met, when, and what the user did, where the run reads actions."""

    user: Id
    item: Id
    timestamp: Seconds | None = Field(None, description="seconds since 1970; by default now")
    action: StrictInt | StrictFloat | Text | None = None
    id: Id | None = Field(None, description="a second event of the user with this id changes nothing")
    features: dict[str, Any] = Field({}, description="the features of the event, those of the run")


class EventsIn(Strict):
    """Events to append."""

    events: list[EventIn] = Field(min_length=1)


class Reply(BaseModel):
    """A reply that names the model."""

    model: str = Field(description="the name of the model that answered")


class Accepted(Reply):
    """The answer to appended events: how many of each kind, and what became of each in their order.

    Accepted events are in the log. So are those of items that the model does not know, for a model that does.
    """

    accepted: int
    repeated: int = Field(description="events whose id the user already has; nothing was changed")
    unknown: int = Field(description="events of items that the model does not know")
    events: list[Literal["accepted", "repeated", "unknown item"]]


class UserIn(Strict):
    """One user, with the values of the features."""

    user: Id
    features: dict[str, Any]


class UsersIn(Strict):
    """Users whose features to store."""

    users: list[UserIn] = Field(min_length=1)


class UsersStored(Reply):
    """The answer to stored features of users: how many users had some in the request."""

    users: int


class ItemIn(Strict):
    """One item, with the values of its features."""

    item: Id
    features: dict[str, Any]


class ItemsIn(Strict):
    """Items to add."""

    items: list[ItemIn] = Field(min_length=1)


class ItemsAdded(Reply):
    """The answer to added items: how many of each kind, and what became of each in their order."""

    added: int
    known: int = Field(description="items that there are already; nothing was changed")
    items: list[Literal["added", "known"]]


class Recommended(BaseModel):
    """A recommended item and its score."""

    item: int | str
    score: float


Cold = Literal["popular", "error"]
WHERE = "feature:value, a value that an item must have"
AT_MOST = "feature:number, items of one value in a list"
COLD = "whether users without events get the popular items of the time, marked as cold, or an error"
SEEN = "leave out items that the user met; by default unless the run's eval.filter_seen is none"


class Recommendations(Reply):
    """The recommended items of a user, best first."""

    items: list[Recommended]
    cold: bool = Field(description="the user has no events, and the items are the popular ones")
    unknown: dict[str, int] = Field(description="for allow, deny and where the number of ids or values without an item")


class FilterIn(Strict):
    """A choice of the items that may be in a list."""

    allow: list[Id] | None = Field(None, description="only these items")
    deny: list[Id] | None = Field(None, description="none of these items")
    where: dict[str, list[Id]] | None = Field(None, description="feature -> values, one of which an item must have")
    at_most: dict[str, Annotated[Whole, Field(ge=0)]] | None = Field(
        None, description="feature -> how many items of one value a list may have"
    )
    filters: list[Text] = Field([], description="names of uploaded lists, all of which must have the item")

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
    """The recommended items of one of several users, or an error."""

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

    items: list[StrictInt | Text | WholeId]  # a long list: only 7.0 is looked at in Python


class NamedListOut(BaseModel):
    """The answer to an uploaded list: the numbers of its items and of ids that the model does not know."""

    items: int
    unknown: int


class NamedLists(BaseModel):
    """The uploaded lists with the numbers of their items."""

    filters: dict[str, int]


class Dropped(BaseModel):
    """The answer to the deletion of a list: whether there was one."""

    dropped: bool


class ScoresIn(Strict):
    """Candidates to score for a user."""

    user: Id
    candidates: list[Id] = Field(min_length=1)
    at: Seconds | None = Field(None, description="seconds since 1970; by default now")
    features: dict[str, Any] = Field({}, description="of the next event, those that are known before the user acts")


class Scores(Reply):
    """Scores in the order of the candidates; of a ranking run with several kinds of action, one for each kind."""

    scores: list[float] | list[list[float]]


class HistoryOut(BaseModel):
    """The events that the model sees of a user, of all that the user had."""

    items: list[int | str]
    timestamps: list[int]
    actions: list[int] | None
    count: int


class Forgotten(BaseModel):
    """The answer to a request to delete a user: whether the service had events of the user."""

    forgotten: bool


class ModelIn(Strict):
    """The name of a run in the folder of runs."""

    run: Text


class Exchanged(Reply):
    """The answer to a run that serves now."""

    previous: str = Field(description="the name of the model before")


class ModelOut(Reply):
    """The model that serves, finished runs (the newest first), and why runs were refused, by their names."""

    runs: list[str]
    refused: dict[str, str]


class Health(Reply):
    """The state of the service."""

    status: str
    users: int


class Ready(Reply):
    """The answer of a service that takes requests."""

    status: str


class Error(BaseModel):
    """The body of an answer that is an error."""

    error: ErrorBody


def parse_events(content: bytes, limits: Limits, now: int) -> Events:
    """Parse the body of POST /events; now: the time of events without one."""
    body = EventsIn.model_validate_json(content)
    _check("events", len(body.events), limits.events)
    actions = [event.action for event in body.events]
    if any(action is None for action in actions) and any(action is not None for action in actions):
        raise InvalidRequest("actions: expected one for each event, or none at all")
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
    """Parse the body of POST /recommendations; return the request and the users as they were written."""
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
    """Build the filter of a query: where as `feature:value` and at_most as `feature:number`, each many times."""
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
    """Return a list in the form of a reply."""
    return [Recommended(item=item, score=score) for item, score in zip(listed.items, listed.scores)]


def _check(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{name}: at most {most:,} in a request, got {count:,}")


def _ids(ids: list) -> list:
    """Return ids of one type: all as texts unless all are integers of 64 bits."""
    return ids if all(isinstance(one, int) and -(2**63) <= one < 2**63 for one in ids) else [str(one) for one in ids]
