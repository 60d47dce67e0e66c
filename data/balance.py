"""Divide the sequences of a batch among ranks: even work for all, and the same division computed on every rank.

Letters: B sequences of the batch, W ranks.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Deal:
    """Decide which part of every batch rank `rank` of `world` gets.

    A sequence of n tokens is n * (per_token + n) work. The unit is one pair of tokens that attend to each other, and
    `per_token` is the work of a token beside its pairs. even: the longest remaining sequence goes to the rank with the
    least work so far; otherwise sequences are dealt round-robin.
    """

    rank: int
    world: int
    per_token: float
    even: bool = True

    def owners(self, lengths: np.ndarray) -> tuple[np.ndarray, float]:
        """Return ([B] the rank of each sequence, the greatest work of a rank over the ranks' mean) for lengths [B]."""
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

    def mine(self, lengths: np.ndarray) -> tuple[np.ndarray, float]:
        """Return (the indices of this rank's sequences, ascending, and the imbalance of the batch) for lengths [B]."""
        owners, imbalance = self.owners(lengths)
        return np.flatnonzero(owners == self.rank), imbalance
