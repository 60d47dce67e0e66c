"""Sort events by user and time."""

from __future__ import annotations

import numpy as np


def by_user_and_time(frame, has_timestamps: bool):
    """Sort a polars frame of events by user, and by time if there are times; ties keep the order of the file.

    If user and time fit into one integer, this is the key, which sorts several times faster than two columns.
    """
    import polars as pl

    if not has_timestamps or not frame.height:
        return frame.sort("user", maintain_order=True)
    users, times = frame["user"], frame["timestamp"]
    if times.dtype == pl.Int64:
        first = int(times.min())
        bits = (int(times.max()) - first).bit_length()
        if bits + int(users.max()).bit_length() <= 62:
            key = users.to_numpy().astype(np.int64) << bits
            key += times.to_numpy() - first
            return frame.with_columns(pl.Series("key", key)).sort("key", maintain_order=True).drop("key")
    return frame.sort(["user", "timestamp"], maintain_order=True)
