"""Define the errors of serving. Each message is one line; HTTP replies give the name of the class."""

from data.errors import UserError


class ServingError(UserError):
    """A run or an option that cannot be served.

    Examples:
        >>> from serving import ServingOptions
        >>> ServingOptions(cache_bytes=0)
        Traceback (most recent call last):
        serving.errors.ServingError: cache_bytes: expected at least 1, got 0
    """


class RequestError(ServingError):
    """A request that was refused and changed nothing.

    Examples:
        >>> try:
        ...     recommender.recommend(["nobody"], k=1)
        ... except RequestError as error:
        ...     print(type(error).__name__, error)
        NoHistory user nobody has no event
    """


class InvalidRequest(RequestError):
    """Arguments whose shapes, types or values are invalid.

    Examples:
        >>> recommender.recommend(["c3"], k=0)
        Traceback (most recent call last):
        serving.errors.InvalidRequest: k: expected a whole number of at least 1, got 0
    """


class UnknownItem(RequestError):
    """Items that are unknown to the run: it was not trained on them, and they were not added.

    Examples:
        >>> recommender.append(["c3"], ["s77"], [1_800_000_000])
        Traceback (most recent call last):
        serving.errors.UnknownItem: items: 1 of 1 items are not known to the run: s77
    """


class UnknownFilter(RequestError):
    """A filter with the name of a list that was not uploaded.

    Examples:
        >>> recommender.recommend(["c3"], k=1, filters=["stock"])
        Traceback (most recent call last):
        serving.errors.UnknownFilter: filters: there is no list named stock, upload it first
    """


class MissingActions(RequestError):
    """Events without actions for a model that reads them.

    Examples:
        >>> issubclass(MissingActions, RequestError)
        True
    """


class TooEarly(RequestError):
    """A request for a time before the user's last event.

    Examples:
        >>> recommender.recommend(["c3"], k=1, at=1_600_000_000)
        Traceback (most recent call last):
        serving.errors.TooEarly: ...
    """


class NoHistory(RequestError):
    """A request for a user who has no event.

    Examples:
        >>> recommender.history("nobody")
        Traceback (most recent call last):
        serving.errors.NoHistory: user nobody has no event
    """


class LimitReached(RequestError):
    """More users, or more events of a user, than the limits allow.

    Examples:
        >>> small = run.recommender(most_users=24, cache_bytes=2**20)
        >>> small.append(["new"], ["s1"], [1_800_000_000])
        Traceback (most recent call last):
        serving.errors.LimitReached: expected at most 24 users with events (--max-users, most_users)
    """


class CacheFull(RequestError):
    """No room for a user's pages, since the pages of pinned users fill the cache.

    Examples:
        >>> small = run.recommender(cache_bytes=4_000)  # enough for three users
        >>> small.pin([f"c{n}" for n in range(9)])
        >>> small.recommend([f"c{n}" for n in range(9)], k=1)
        Traceback (most recent call last):
        serving.errors.CacheFull: ...
    """


class StoreError(ServingError):
    """A saved store that cannot be written or read, or that belongs to another run.

    Examples:
        >>> recommender.restore("nowhere")
        Traceback (most recent call last):
        serving.errors.StoreError: ...
    """
