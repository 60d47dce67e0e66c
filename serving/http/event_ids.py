"""Store the ids that clients gave to events, so that a request can be sent again without adding its events twice."""

from collections.abc import Iterable

from serving.http.event_columns import EventColumns


class EventIds:
    """The ids of the events of each user; events of different users may have the same id.

    The ids of stored events are read from their columns when they are first needed.
    """

    def __init__(self) -> None:
        self._users: dict[str, set[str]] = {}
        self._stored: list[tuple[dict[str, int], EventColumns]] = []

    def add_stored(self, columns: EventColumns) -> None:
        """Add the ids of stored events; to be called before other ids of the same users are added."""
        if columns.ids:
            self._stored.append((dict(zip(columns.users, range(len(columns.users)))), columns))

    def _ids(self, user: str) -> set[str]:
        ids = self._users.get(user)
        if ids is None:
            ids = self._users[user] = set()
            for places, columns in self._stored:
                if (place := places.get(user)) is not None:
                    ids.update(columns.ids_of(place))
        return ids

    def has(self, user: str, event: str) -> bool:
        return event in self._ids(user)

    def add(self, users: Iterable[str], events: Iterable[str | None]) -> None:
        """Add the ids of events; None for an event without an id."""
        for user, event in zip(users, events):
            if event is not None:
                self._ids(user).add(event)

    def forget(self, user: str) -> None:
        self._users[user] = set()
