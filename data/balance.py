"""Divide the sequences of a batch among ranks with equal work. All ranks compute the same division.

Letters: B sequences of the batch, W ranks.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Deal:
    """The division of batches among `world` ranks, for rank `rank`.

    Work is counted in pairs of tokens that attention computes. A sequence of n tokens has the work n * (per_token + n),
    where `per_token` is the work of a token outside of attention. even: give the longest remaining sequence to the
    rank with the least work so far; otherwise sequences are divided round-robin.
    """

    rank: int
    world: int
    per_token: float
    even: bool = True

    def owners(self, lengths: np.ndarray) -> tuple[np.ndarray, float]:
        """Return (the rank of each sequence [B], the greatest work of a rank / the mean) for lengths [B]."""
        work = lengths * (self.per_token + lengths.astype(np.float64))
        if not self.even:
            owners = np.arange(len(lengths)) % self.world
        else:
            owners, ranks = np.empty(len(lengths), np.int64), [(0.0, rank) for rank in range(self.world)]
            for sequence in np.argsort(-work, kind="stable").tolist():
                load, rank = ranks[0]
                owners[sequence] = rank
                heapq.heapreplace(ranks, (load + work[sequence], rank))
        loads = np.bincount(owners, work, self.world)
        return owners, float(loads.max() / loads.mean()) if loads.sum() else 1.0

    def local(self, lengths: np.ndarray) -> tuple[np.ndarray, float]:
        """Return (the ascending indices of this rank's sequences, the imbalance as in `owners`) for lengths [B]."""
        owners, imbalance = self.owners(lengths)
        return np.flatnonzero(owners == self.rank), imbalance
