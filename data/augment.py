"""Augment training sequences in every epoch: take earlier windows, drop events, shuffle neighbours.

Letters: M samples, S events of an epoch.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from data.options import Options


class Augment(Options):
    """Options of the augmentation of training sequences. Validation and test sequences are not augmented."""

    window: float = Field(0.0, ge=0, le=1)
    """The probability that a user with more events than the model's window trains on a random window (uniform over all
    windows) in place of the latest one."""
    drop: float = Field(0.0, ge=0, lt=1)
    """The probability of dropping an event, except the last two of a sequence."""
    shuffle: float = Field(0.0, ge=0, le=10_000)
    """The strength of shuffling: events are sorted by their position plus a uniform number from 0 to this value.
    Neighbours change places with a probability of 0 for strength 1, 12% for 2, 40% for 10. Times stay in order."""


def augmented(
    options: Augment, rng: np.random.Generator, first: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (the events [S] in their new order, the event [S] from which each takes its time, the offsets [M+1]).

    first: [M] int64, the first event of each sample's user; begin, end: [M] int64, the sample's events begin .. end-1,
    at least two.
    """
    earlier = begin - first
    back = np.where(rng.random(len(begin)) < options.window, np.floor(rng.random(len(begin)) * (earlier + 1)), 0)
    begin, end = begin - back.astype(np.int64), end - back.astype(np.int64)
    offsets = np.append(0, np.cumsum(end - begin))
    sample = np.repeat(np.arange(len(begin)), end - begin)
    events = np.arange(offsets[-1]) + (begin - offsets[:-1])[sample]
    if options.drop:
        stays = (rng.random(len(events)) >= options.drop) | (events >= end[sample] - 2)
        events, sample = events[stays], sample[stays]
        offsets = np.append(0, np.cumsum(np.bincount(sample, minlength=len(begin))))
    if not options.shuffle:
        return events, events, offsets
    places = np.arange(len(events)) + options.shuffle * rng.random(len(events))
    return events[np.lexsort((places, sample))], events, offsets
