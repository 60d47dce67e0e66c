"""Define the new tokens of users, and the pages that they attend to, as the layers of a served model get them.

Letters: T new tokens, B users, P pages, H heads, S blocks that bsa chooses.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor

import hstu_sparse
from data.batch import Batch
from serving.block_sums import BlockSums


@dataclass(frozen=True)
class Part:
    """New tokens that attend alike: those of B users, end to end.

    tokens       which tokens of the batch they are
    offsets      [B+1] int64, which of the part's tokens are whose
    pages        [B, P] int32, the users' pages
    lengths      [B] int64, tokens in the pages before the new ones
    candidates   whether the new tokens of a user all stand at position `lengths` and see the pages and themselves; else
                 they are one or more of each user, follow one another, are written into the pages, and see those before
                 them
    times        [T] int64, seconds, of the tokens; of candidates [B]
    query_times  [T] int64, when what follows the tokens happens; of candidates [B]
    whole        whether the users' pages hold nothing but the new tokens, which are all that these see
    num_context  [B] int64, the tokens of features that the users' sequences begin with; None for none
    shared       what layers compute of the part's offsets and times, as `Batch.once` keeps it
    """

    tokens: slice
    offsets: Tensor
    pages: Tensor
    lengths: Tensor
    candidates: bool
    times: Tensor
    query_times: Tensor
    whole: bool = False
    num_context: Tensor | None = None
    shared: dict = field(default_factory=dict)

    def once(self, key: Hashable, compute: Callable[[], object]) -> object:
        """Return compute(), which only the first call with this key runs."""
        if key not in self.shared:
            self.shared[key] = compute()
        return self.shared[key]


@dataclass
class Pass:
    """One pass of new tokens through all layers.

    last     the layer whose outputs nobody reads, where tokens are written alone; None where they are read
    choices  layer -> [B, H, S] int32, for bsa: the blocks chosen by the group that the next token of each user is in,
             -1 where there are fewer or a new group begins. Layers leave there what holds behind the tokens they saw.
    sums     of the blocks of bsa, for models that have such layers
    context  [T] int64, of tokens of features their places among all features of the users, -1 of events; None where
             there are events alone
    """

    pool: hstu_sparse.PagePool
    parts: list[Part]
    last: int | None = None
    choices: dict[int, Tensor] = field(default_factory=dict)
    sums: BlockSums | None = None
    context: Tensor | None = None


@dataclass
class ServedBatch(Batch):
    """New tokens; `served` says on top of what they run."""

    served: Pass = None  # type: ignore[assignment]
