"""Remember the ids that clients gave to events, so that a request can be repeated without harm."""

from collections.abc import Iterable

from serving.http.event_columns import Columns


class EventIds:
    """The ids of the events of each user. An id belongs to its user: two users may have events of one id.

    Those of stored events are read from their columns when one of the user's is needed.
    """

    def __init__(self) -> None:
        self._users: dict[str, set[str]] = {}
        self._stored: list[tuple[dict[str, int], Columns]] = []

    def add_stored(self, columns: Columns) -> None:
        """Remember the ids of stored events; all of these come before any other ids of their users."""
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
        """Remember the ids of events; None for an event without one."""
        for user, event in zip(users, events):
            if event is not None:
                self._ids(user).add(event)

    def forget(self, user: str) -> None:
        self._users[user] = set()
