"""Requests to the model thread, in the terms of the recommender: users as texts, items and actions in original ids."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from serving.errors import RequestError
from serving.filters import Filter

ACCEPTED, REPEATED, UNKNOWN_ITEM = "accepted", "repeated", "unknown item"


@dataclass(kw_only=True)
class Request:
    """Base of the requests. done: set to the answer or an error; model: the model that answered."""

    done: Future = field(default_factory=Future)
    model: str = ""


@dataclass
class Events(Request):
    """Events to append. The answer says for each what became of it: ACCEPTED, REPEATED or UNKNOWN_ITEM.

    timestamps  in seconds
    ids         an event's name for repeated requests, or None; an event is REPEATED if its user has one of its name
    """

    users: list[str]
    items: list
    timestamps: list[int]
    actions: list | None
    ids: list[str | None] | None = None

    def columns(self, chosen: list[bool]) -> tuple[list, list, list, list | None, list | None]:
        """Return users, items, timestamps, actions and ids of the chosen events."""
        if all(chosen):
            return self.users, self.items, self.timestamps, self.actions, self.ids
        some: Any = [
            column and [value for value, choice in zip(column, chosen) if choice]
            for column in (self.users, self.items, self.timestamps, self.actions, self.ids)
        ]
        return tuple(some)


@dataclass
class Forget(Request):
    """A request to forget a user. The answer: whether something was known of the user."""

    user: str

    @property
    def record(self) -> dict:
        return {"forget": self.user}


@dataclass
class UserList:
    """The best items of a user; cold: the user has no events, and the items are the popular ones."""

    items: list
    scores: list[float]
    cold: bool = False


@dataclass
class Lists:
    """The answer to `Recommend`: a list or an error for each user, and the unknown ids of the filter."""

    users: list[UserList | RequestError]
    unknown: dict[str, int]


@dataclass
class Recommend(Request):
    """A request for the k best items for users. cold: `popular` or `error`, see `Recommender.recommend`."""

    users: list[str]
    k: int
    at: int | None = None
    exclude_seen: bool | None = None
    filter: Filter = field(default_factory=Filter)
    cold: str = "popular"


@dataclass
class Score(Request):
    """A request for the scores of candidates for a user."""

    user: str
    candidates: list
    at: int | None


@dataclass
class Read(Request):
    """A request for the part of a user's history that the model sees."""

    user: str


@dataclass
class PutList(Request):
    """A request to store a list of items for filters. The answer: the numbers of (its items, unknown ids)."""

    name: str
    items: list

    @property
    def record(self) -> dict:
        return {"list": self.name, "items": self.items}


@dataclass
class DropList(Request):
    """A request to delete a list. The answer: whether there was one."""

    name: str

    @property
    def record(self) -> dict:
        return {"list": self.name, "items": None}
