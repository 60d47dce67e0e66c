"""Compute the tokens of a window as the model's inputs, with numpy.

An event has one token, or two in ranking's interleaved layout, the item's and then the action's. The query time of a
token is when what it predicts happens: the next event's time, or, of an item token in that layout, its own. For the
last token that is the request's time, since the next event has not come yet.

Letters: n events of a user, T tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

from data.batch import Batch
from serving.histories import History


@dataclass
class Columns:
    """T tokens as columns of int64: `items`, `actions`, `times`, `query_times`, and `positions` in their windows.

    Those of C features of a user, which come before the events, have positions from -C to -1, and of their first event
    all other columns.
    """

    items: np.ndarray
    actions: np.ndarray
    times: np.ndarray
    query_times: np.ndarray
    positions: np.ndarray

    @classmethod
    def joined(cls, parts: "list[Columns]") -> "Columns":
        return cls(*(np.concatenate(columns) for columns in zip(*(vars(part).values() for part in parts))))


def window_tokens(history: History, begin: int, start: int, stop: int, per_event: int, at: int = 0) -> Columns:
    """Return the tokens start .. stop-1 of the window that begins at event `begin`; below 0 they are features'.

    per_event: tokens of an event, 1 or 2. at: the query time of the window's last token, seconds.
    """
    positions = np.arange(start, stop)
    events = positions.clip(min=0) // per_event + (begin - history.first)
    times = history.timestamps
    following = np.append(times, at)[events + 1]
    event_times = times[events]
    # The item token of a ranking event predicts the action at the event's own time.
    own_time = (positions < 0) | ((positions % 2 == 0) & (per_event == 2))
    query_times = np.where(own_time, event_times, following)
    actions = (
        np.zeros(len(positions), np.int64) if history.actions is None else history.actions[events].astype(np.int64)
    )
    return Columns(history.items[events].astype(np.int64), actions, event_times, query_times, positions)


def single_tokens(
    histories: list[History], events: list[int], positions: np.ndarray, per_event: int, at: list[int] | None = None
) -> Columns:
    """Return one token of each of B users, as `window_tokens` does, in a tenth of its time for many users.

    events: [B] which of a history's kept events the tokens belong to. positions: [B] of the tokens in their windows.
    at: [B] query times, where the tokens are the last ones of their windows.
    """
    items = [h.items.item(event) for h, event in zip(histories, events)]
    times = [h.timestamps.item(event) for h, event in zip(histories, events)]
    if at is None:
        # An item token of ranking has its own event's time as query time; all others that of the next event.
        later = [per_event == 1 or place % 2 == 1 for place in positions.tolist()]
        at = [h.timestamps.item(event + more) for h, event, more in zip(histories, events, later)]
    actions = [h.actions.item(event) for h, event in zip(histories, events) if h.actions is not None]
    return Columns(*(np.array(x, np.int64) for x in (items, actions or [0] * len(items), times, at, positions)))


def latest_events(histories: list[History], at: list[int], most: int) -> Batch:
    """Return up to `most` latest events of each of B users as a batch of retrieval.

    at: [B] when the next event of each happens.
    """
    begins = [max(0, history.count - most) for history in histories]
    lengths = np.array([history.count - begin for history, begin in zip(histories, begins)], np.int64)
    windows = zip(histories, begins, lengths.tolist(), at)
    columns = Columns.joined([window_tokens(h, begin, 0, length, 1, time) for h, begin, length, time in windows])
    items, times, query_times = map(torch.from_numpy, (columns.items, columns.times, columns.query_times))
    offsets, users = torch.from_numpy(np.append(0, np.cumsum(lengths))), torch.arange(len(histories))
    return Batch(items, times, torch.full_like(items, -1), query_times, offsets, users)
