"""Define `Dataset`, `DataError`, and functions for messages.

Letters: E events, U users. An event is a user, an item, a time and, optionally, an action (a rating, a click).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from data.errors import UserError
from data.features.features import Feature

ACTION_CODES = "codes of the actions: "  # the beginning of the note with the code of each action that is text


class DataError(UserError):
    """The user's data or data options are wrong; `str(error)` has a line for each bad row, else one line."""


@dataclass(frozen=True, eq=False)  # eq=False: hash by identity, since copies on a device are stored by data set
class Dataset:
    """All events, by user and, for each user, by time (ties in file order).

    items         [E] int32, 0 .. num_items-1
    timestamps    [E] int64, seconds; zeros if the source has none (`has_timestamps` is False)
    actions       [E] int32 codes >= 0, or None
    user_offsets  [U+1] int64: the events of user u are user_offsets[u] .. user_offsets[u+1]-1
    user_ids      [U] original ids, int64 or str, ascending
    item_ids      [num_items] original ids, int64 or str, ascending
    fingerprint   hexadecimal; depends on the source's content and the options
    events_fingerprint  the fingerprint without features if the data set has features, else None
    action_names  the text of each action code if actions are text, else None
    notes         sentences about how the source was read, for logs and reports
    left_out      with a vocabulary: the numbers of items, events and users that were left out; else None
    features      the features of items, users and events, as they were read
    user_rows     [U, F, L] int32 or None: the table rows of each feature of users, padded with -1
    event_rows    [E, F, L] int32 or None: the same for events (features.vocabulary.with_rows fills both)

    `user_ids` and `item_ids` map an index to its original id; `vocabulary.index_of` maps ids to indices. The arrays are
    copy-on-write memory maps of the cache, or in memory, as for generated data.

    Examples:
        >>> dataset.num_users, dataset.num_items, dataset.num_events == len(dataset.timestamps)
        (20, 10, True)
        >>> begin, end = dataset.user_offsets[3:5]  # of the events of user 3
        >>> bool((dataset.timestamps[begin : end - 1] <= dataset.timestamps[begin + 1 : end]).all())
        True
    """

    name: str
    items: np.ndarray
    timestamps: np.ndarray
    actions: np.ndarray | None
    user_offsets: np.ndarray
    user_ids: np.ndarray
    item_ids: np.ndarray
    has_timestamps: bool
    fingerprint: str
    action_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    left_out: dict[str, int] | None = None
    features: tuple[Feature, ...] = ()
    user_rows: np.ndarray | None = None
    event_rows: np.ndarray | None = None
    events_fingerprint: str | None = None

    @property
    def num_users(self) -> int:
        """U, the number of users."""
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        """The number of items, with and without events."""
        return len(self.item_ids)

    @property
    def num_events(self) -> int:
        """E, the number of events."""
        return len(self.items)

    def users_of(self, events: np.ndarray) -> np.ndarray:
        """Return the user of each of `events`, indices of any shape.

        Examples:
            >>> dataset.users_of(dataset.user_offsets[:3])  # the first events of three users
            array([0, 1, 2])
        """
        return np.searchsorted(self.user_offsets, events, side="right") - 1


def did_you_mean(name: object, known: Iterable) -> str:
    """Return `, did you mean x?` for the known name closest to `name`, in any case, or the empty string."""
    names = {str(k).casefold(): str(k) for k in known}
    close = difflib.get_close_matches(str(name).casefold(), names, n=1)
    return f", did you mean {shown(names[close[0]])}?" if close else ""


def shown(value: object, most: int = 60) -> str:
    """Format a user's name or value for a one-line message: printable, at most `most` characters."""
    text = str(value)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= most else text[: most - 3] + "..."
