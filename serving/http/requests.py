"""Define the requests to the model thread: users as text, items and actions in original ids."""

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
    """Base class of requests. done: receives the result or an error; model: the name of the model that answered."""

    done: Future = field(default_factory=Future)
    model: str = ""


@dataclass
class Events(Request):
    """Events to append. The result is the state of each: ACCEPTED, REPEATED or UNKNOWN_ITEM.

    timestamps  in seconds
    ids         ids given by the client, or None; an event is REPEATED if its user has an event with the same id
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
        columns: Any = [
            column and [value for value, choice in zip(column, chosen) if choice]
            for column in (self.users, self.items, self.timestamps, self.actions, self.ids)
        ]
        return tuple(columns)


@dataclass
class Forget(Request):
    """A request to delete a user. The result: whether the user had events or features."""

    user: str

    @property
    def record(self) -> dict:
        return {"forget": self.user}


@dataclass
class UserList:
    """The best items of a user; cold: the user has no events, and the items are popular items."""

    items: list
    scores: list[float]
    cold: bool = False


@dataclass
class Lists:
    """The result of `Recommend`: a list or an error for each user, and the numbers of unknown ids in the filter."""

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
    features: dict[str, Any] = field(default_factory=dict)  # features of the next event known before the user acts


@dataclass
class Read(Request):
    """A request for the events of a user that the model sees."""

    user: str


@dataclass
class PutList(Request):
    """A request to store a named list of items. The result: (the number of its items, the number of unknown ids)."""

    name: str
    items: list

    @property
    def record(self) -> dict:
        return {"list": self.name, "items": self.items}


@dataclass
class DropList(Request):
    """A request to delete a named list. The result: whether it existed."""

    name: str

    @property
    def record(self) -> dict:
        return {"list": self.name, "items": None}


@dataclass
class AddUsers(Request):
    """A request to store the features of users. The result: None.

    features: name -> value, for each user
    """

    users: list[str]
    features: list[dict[str, Any]]

    def checked(self, recommender: Recommender) -> np.ndarray:
        """Return the rows of the features; raise InvalidRequest if they are invalid."""
        return recommender.contexts.check_users(len(self.users), as_columns(self.features))

    @property
    def records(self) -> list[dict]:
        return [{"user": user, "features": features} for user, features in zip(self.users, self.features)]


@dataclass
class AddItems(Request):
    """A request to add items. The result is the state of each: ADDED, or KNOWN if it exists already.

    features: name -> a value for each item
    """

    items: list
    features: dict[str, list]

    def checked(self, recommender: Recommender) -> Additions:
        """Return the new items; raise InvalidRequest if items are invalid."""
        return recommender.check_items(self.items, self.features)

    def record_of(self, new: Additions) -> dict:
        """Return the record of the new items for a log or a store."""
        places = new.places.tolist()
        features = {name: [column[place] for place in places] for name, column in self.features.items()}
        return {"new_items": [self.items[place] for place in places], "features": features}

    def states(self, new: Additions) -> list[str]:
        """Return the state of each item."""
        states = [KNOWN] * len(self.items)
        for place in new.places.tolist():
            states[place] = ADDED
        return states
