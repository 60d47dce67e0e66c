"""Count the events of items, weighted by age, to recommend items to users without events."""

from collections.abc import Callable

import numpy as np
import torch

from evaluation.item_filters import ItemFilter, filtered_lists

LEAST = 1e-9  # smaller counts are rounding errors of removed events
FARTHEST = 64  # most half-lives between the latest event and the reference time of the weights


class Popularity:
    """The number of events of each item, in which an event counts half as much as one that is `half_life` later.

    half_life: in seconds, None for equal weights. clock: returns the time in seconds; later events count as of now.
    """

    def __init__(self, num_items: int, half_life: float | None, clock: Callable[[], float]):
        self.half_life, self.clock = half_life, clock
        self._counts = np.zeros(num_items)  # weighted at the reference time `_time`
        self._time = self._latest = 0

    def extend(self, num_items: int) -> None:
        """Increase the number of items to `num_items`."""
        self._counts = np.append(self._counts, np.zeros(num_items - len(self._counts)))

    def clear(self) -> None:
        """Remove all events."""
        self._counts[:] = 0

    def add(self, items: np.ndarray, timestamps: np.ndarray, times: int = 1) -> None:
        """Add events. items: [E] rows; timestamps: [E] seconds; times: 1, or -1 to remove them."""
        if not len(items):
            return
        weights = np.full(len(items), float(times))
        if self.half_life is not None:
            timestamps = np.minimum(timestamps, int(self.clock()))
            self._latest = max(self._latest, int(timestamps.max()))
            if (self._latest - self._time) / self.half_life > FARTHEST:
                self._counts *= np.exp2((self._time - self._latest) / self.half_life)
                self._time = self._latest
            weights *= np.exp2((timestamps - self._time) / self.half_life)
        if len(items) < 64:
            np.add.at(self._counts, items, weights)
        else:
            self._counts += np.bincount(items, weights, len(self._counts))
        if times < 0:
            self._counts[self._counts < LEAST] = 0

    @property
    def counts(self) -> np.ndarray:
        """The counts [I] float32, weighted at the time of the latest event."""
        if self.half_life is None:
            return self._counts.astype(np.float32)
        return (self._counts * np.exp2((self._time - self._latest) / self.half_life)).astype(np.float32)

    def lists(self, k: int, passing: ItemFilter) -> tuple[np.ndarray, np.ndarray]:
        """Return (counts, items) [1, up to k] of the items that pass, greatest count first, ties by item."""
        return filtered_lists(torch.from_numpy(self.counts)[None], k, None, passing)
