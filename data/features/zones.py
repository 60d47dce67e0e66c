"""Compute the offsets of a time zone from UTC, and the calendar's features."""

from __future__ import annotations

import functools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

import numpy as np
from torch import Tensor

from data.types import DataError, did_you_mean, shown

DAY, HOUR, THURSDAY = 86_400, 3_600, 3  # seconds; the weekday of 1970-01-01, Monday being 0
LAST = 9_214_646_400  # seconds since 1970: the year 2262, the last possible year of an event
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def checked_zone(name: str) -> str:
    """Return `name`; DataError if it is not a time zone."""
    try:
        ZoneInfo(name)
        return name
    except (ZoneInfoNotFoundError, ValueError, OSError):
        near = did_you_mean(name, available_timezones())
        raise DataError(
            f"data.time_zone: expected a time zone like Europe/Berlin, got {shown(repr(name))}{near}"
        ) from None


@functools.lru_cache(maxsize=8)
def offsets_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (starts [n], offsets [n]) in seconds, int64: from starts[i] on, clocks are offsets[i] ahead of UTC."""
    zone = ZoneInfo(checked_zone(name))

    def offset(second: int) -> int:
        difference = (EPOCH + timedelta(seconds=second)).astimezone(zone).utcoffset()
        return 0 if difference is None else round(difference.total_seconds())

    starts, offsets = [0], [offset(0)]
    for day in range(DAY, LAST, DAY):
        if offset(day) == offsets[-1]:
            continue
        before, after = day - DAY, day
        while after - before > 1:
            middle = (before + after) // 2
            before, after = (middle, after) if offset(middle) == offsets[-1] else (before, middle)
        starts.append(after)
        offsets.append(offset(after))
    return np.array(starts, np.int64), np.array(offsets, np.int64)


def calendar_rows(name: str, timestamps: Tensor) -> Tensor:
    """Return the hour (0 to 23) or the weekday (0 to 6, Monday 0) of times in seconds on a clock: [T] int64."""
    return timestamps // HOUR % 24 if name == "hour" else (timestamps // DAY + THURSDAY) % 7
