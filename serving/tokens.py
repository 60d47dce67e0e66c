"""Compute the tokens of a window as the model's inputs, with numpy.

An event has one token, or two in ranking's interleaved layout: the item token, then the action token. The query time of
a token is the time of the event that it predicts: the next event, or the same event for an item token of that layout.
The last token's query time is the time of the request, since the next event is not known yet.

Letters: n events of a user, T tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

from data.batch import Batch
from serving.histories import History


@dataclass
class TokenColumns:
    """T tokens as columns of int64: `items`, `actions`, `times`, `query_times`, and `positions` in their windows.

    The C feature tokens of a user come before the events; they have positions -C to -1 and the other columns of the
    window's first event.
    """

    items: np.ndarray
    actions: np.ndarray
    times: np.ndarray
    query_times: np.ndarray
    positions: np.ndarray

    @classmethod
    def joined(cls, parts: "list[TokenColumns]") -> "TokenColumns":
        """Concatenate the columns of `parts`."""
        return cls(*(np.concatenate(columns) for columns in zip(*(vars(part).values() for part in parts))))


def window_tokens(history: History, begin: int, start: int, stop: int, per_event: int, at: int = 0) -> TokenColumns:
    """Return tokens start .. stop-1 of the window that begins at event `begin`; negative ones are feature tokens.

    per_event: number of tokens for an event, 1 or 2; at: the query time of the window's last token, in seconds.
    """
    positions = np.arange(start, stop)
    events = positions.clip(min=0) // per_event + (begin - history.first)
    times = history.timestamps
    following = np.append(times, at)[events + 1]
    event_times = times[events]
    # The item token of a ranking event predicts the action of the same event.
    same_event = (positions < 0) | ((positions % 2 == 0) & (per_event == 2))
    query_times = np.where(same_event, event_times, following)
    actions = (
        np.zeros(len(positions), np.int64) if history.actions is None else history.actions[events].astype(np.int64)
    )
    return TokenColumns(history.items[events].astype(np.int64), actions, event_times, query_times, positions)


def single_tokens(
    histories: list[History], events: list[int], positions: np.ndarray, per_event: int, at: list[int] | None = None
) -> TokenColumns:
    """Return one token of each of B users like `window_tokens`, ten times as fast for many users.

    events: [B] indices of the tokens' events in the stored histories; positions: [B] of the tokens in their windows;
    at: [B] query times if the tokens are the last ones of their windows.
    """
    items = [h.items.item(event) for h, event in zip(histories, events)]
    times = [h.timestamps.item(event) for h, event in zip(histories, events)]
    if at is None:
        # The query time is the next event's time, except for an item token of ranking: its event's time.
        later = [per_event == 1 or place % 2 == 1 for place in positions.tolist()]
        at = [h.timestamps.item(event + more) for h, event, more in zip(histories, events, later)]
    actions = [h.actions.item(event) for h, event in zip(histories, events) if h.actions is not None]
    return TokenColumns(*(np.array(x, np.int64) for x in (items, actions or [0] * len(items), times, at, positions)))


def latest_events(histories: list[History], at: list[int], most: int) -> Batch:
    """Return up to `most` latest events of each of B users as a retrieval batch.

    at: [B] the time of each user's next event.
    """
    begins = [max(0, history.count - most) for history in histories]
    lengths = np.array([history.count - begin for history, begin in zip(histories, begins)], np.int64)
    windows = zip(histories, begins, lengths.tolist(), at)
    columns = TokenColumns.joined([window_tokens(h, begin, 0, length, 1, time) for h, begin, length, time in windows])
    items, times, query_times = map(torch.from_numpy, (columns.items, columns.times, columns.query_times))
    offsets, users = torch.from_numpy(np.append(0, np.cumsum(lengths))), torch.arange(len(histories))
    return Batch(items, times, torch.full_like(items, -1), query_times, offsets, users)
