"""Which rank trains on which sequences of a batch: even work for all, the same dealing on every rank.

Letters: B sequences of the batch, W ranks.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Deal:
    """The part of every batch that rank `rank` of `world` has.

    A sequence of n tokens is n * (per_token + n) work, in units of one pair of tokens that attend to each other: what
    each token costs beside its pairs, and these. even: the longest sequence left goes to the rank with the least work
    so far; else sequences go round in their order.
    """

    rank: int
    world: int
    per_token: float
    even: bool = True

    def owners(self, lengths: np.ndarray) -> tuple[np.ndarray, float]:
        """([B] the rank of each sequence, the work of the rank with most over the ranks' mean), of lengths [B]."""
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
        """(the places of this rank's sequences, ascending; the imbalance of the batch), of lengths [B]."""
        owners, imbalance = self.owners(lengths)
        return np.flatnonzero(owners == self.rank), imbalance
