"""Vary training sequences from epoch to epoch: earlier windows, events left out, neighbours changing places.

Letters: M samples, S events of an epoch.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from data.options import Options


class Augment(Options):
    """Options of the variation of every training sequence in every epoch.

    Validation and test sequences are never varied.
    """

    window: float = Field(0.0, ge=0, le=1)
    """The probability that a user with more events than the model's window trains on an earlier window, drawn
    uniformly, in place of the latest one."""
    drop: float = Field(0.0, ge=0, lt=1)
    """The probability with which each event is left out, the last two of a sequence excepted."""
    shuffle: float = Field(0.0, ge=0, le=10_000)
    """How far events move: uniform numbers up to this are added to the places of a sequence's events, and the
    sums sorted. Neighbours change places with a probability of 0 at 1, 12% at 2 and 40% at 10. Times stay in order."""


def augmented(
    options: Augment, rng: np.random.Generator, first: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (the events [S] in their new order, the events whose times they take [S], the offsets [M+1]).

    first, begin, end: [M] int64, the user's first event, and the range begin .. end-1 of the sample's events, at least
    two.
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
