"""Remember the ids that clients gave to events, so that a request can be repeated without harm."""

from collections.abc import Iterable


class EventIds:
    """The ids of the events of each user. An id belongs to its user: two users may have events of one id."""

    def __init__(self) -> None:
        self._users: dict[str, set[str]] = {}

    def has(self, user: str, event: str) -> bool:
        return event in self._users.get(user, ())

    def add(self, users: Iterable[str], events: Iterable[str | None]) -> None:
        """Remember the ids of events; None for an event without one."""
        for user, event in zip(users, events):
            if event is not None:
                self._users.setdefault(user, set()).add(event)

    def forget(self, user: str) -> None:
        self._users.pop(user, None)
