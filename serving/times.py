"""Check the times of events and of requests: whole seconds since 1970. Letters: E events, B users."""

from collections.abc import Callable, Sequence

import numpy as np

from data.types import shown
from serving.errors import InvalidRequest, TooEarly

LATEST = 2**62  # exclusive upper bound of all times


def event_times(timestamps, count: int, needed: bool) -> np.ndarray:
    """Return the times of `count` events, [E] int64; None: zeros, or InvalidRequest if times are `needed`."""
    if timestamps is None:
        if needed:
            raise InvalidRequest("timestamps: the run reads times, expected one for each event")
        return np.zeros(count, np.int64)
    times = np.asarray(timestamps)
    if times.shape != (count,):
        raise InvalidRequest(f"timestamps: expected {count}, one for each event, got shape {list(times.shape)}")
    if count and times.dtype.kind not in "iu":
        raise InvalidRequest(f"timestamps: expected whole seconds, got {shown(repr(times.tolist()[0]))}")
    if count and not (times.min() >= 0 and times.max() < LATEST):
        raise InvalidRequest("timestamps: expected seconds since 1970, from 0 on")
    return times.astype(np.int64)


def request_times(at, users: Sequence[str], last: np.ndarray, clock: Callable[[], float]) -> np.ndarray:
    """Return the time [B] of each user's request.

    at: one time for all users, one for each, or None for now; last: [B] the times of the users' last events; raise
    TooEarly if a request is before them.
    """
    if at is None:
        return np.maximum(last, int(clock()))
    times = np.asarray(at)
    if times.dtype.kind not in "iu" or times.shape not in ((), (len(users),)):
        raise InvalidRequest(f"at: expected whole seconds, one for all users or {len(users)}, one for each")
    times = np.broadcast_to(times, last.shape)
    if len(times) and (times.min() < 0 or times.max() >= LATEST):
        raise InvalidRequest("at: expected seconds since 1970, from 0 on")
    if (early := times < last).any():
        first = int(np.argmax(early))
        raise TooEarly(f"at: {times[first]} is before the last event of user {shown(users[first])}, at {last[first]}")
    return times
