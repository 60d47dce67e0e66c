"""Requests to the model thread, in the terms of the recommender: users as texts, items and actions in original ids."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serving.contexts import as_columns
from serving.errors import RequestError
from serving.filters import Filter
from serving.new_items import Additions
from serving.recommender import Recommender

ACCEPTED, REPEATED, UNKNOWN_ITEM = "accepted", "repeated", "unknown item"
ADDED, KNOWN = "added", "known"


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
    features: dict[str, Any] = field(default_factory=dict)  # of the next event, what is known before the user acts


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


@dataclass
class AddUsers(Request):
    """A request to store the features of users. The answer: None.

    features: for each user by name
    """

    users: list[str]
    features: list[dict[str, Any]]

    def checked(self, recommender: Recommender) -> np.ndarray:
        """Return the rows of the features; InvalidRequest."""
        return recommender.contexts.check_users(len(self.users), as_columns(self.features))

    @property
    def records(self) -> list[dict]:
        return [{"user": user, "features": features} for user, features in zip(self.users, self.features)]


@dataclass
class AddItems(Request):
    """A request to add items. The answer says for each whether it was ADDED, or KNOWN before.

    features: by name a value for each item
    """

    items: list
    features: dict[str, list]

    def checked(self, recommender: Recommender) -> Additions:
        """Return the new ones; InvalidRequest."""
        return recommender.check_items(self.items, self.features)

    def record_of(self, new: Additions) -> dict:
        """Return the record of the new items for a log or a store."""
        places = new.places.tolist()
        features = {name: [column[place] for place in places] for name, column in self.features.items()}
        return {"new_items": [self.items[place] for place in places], "features": features}

    def states(self, new: Additions) -> list[str]:
        """Return what became of each item."""
        states = [KNOWN] * len(self.items)
        for place in new.places.tolist():
            states[place] = ADDED
        return states
