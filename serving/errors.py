"""The errors of serving, each one line; the class's name is what an HTTP answer calls the error."""

from data.errors import UserError


class ServingError(UserError):
    """A run that cannot be served as it was asked for."""


class RequestError(ServingError):
    """A request that cannot be answered. Nothing was changed."""


class InvalidRequest(RequestError):
    """Arrays whose shapes, types or values do not fit what was asked for."""


class UnknownItem(RequestError):
    """Items that the run was not trained on."""


class UnknownFilter(RequestError):
    """A filter by the name of a list that nobody uploaded."""


class MissingActions(RequestError):
    """Events without actions for a model that reads them."""


class TooEarly(RequestError):
    """A request for a time before the user's last event."""


class NoHistory(RequestError):
    """A request for a user who has no event."""


class LimitReached(RequestError):
    """More users, or more events of a user, than the store may hold."""


class CacheFull(RequestError):
    """No room for a user's pages, since pinned users hold the cache."""


class StoreError(ServingError):
    """A saved store that cannot be written or read, or that belongs to another run."""
