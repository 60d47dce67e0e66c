"""Define the input of a served model's layers: new tokens of users and the pages that they attend to.

Letters: T new tokens, B users, P pages, H heads, S blocks that bsa chooses.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor

import hstu_sparse
from data.batch import Batch
from serving.block_sums import BlockSums


@dataclass(frozen=True)
class PagedGroup:
    """New tokens of B users, user by user, to which the same attention rule applies.

    tokens       the slice of the batch's tokens
    offsets      [B+1] int64, the first token of each user within the group
    pages        [B, P] int32, the users' pages
    lengths      [B] int64, the number of tokens in the pages before the new ones
    candidates   True: all new tokens of a user have position `lengths`, each attends to the pages and itself, and none
                 is written to the pages. False: each user has one or more tokens, which follow one another, are written
                 to the pages, and attend to all tokens before them
    times        [T] int64, times of the tokens in seconds; [B] for candidates
    query_times  [T] int64, the time of the event that each token predicts; [B] for candidates
    whole        whether the users' pages hold only the new tokens, so that these attend only to one another
    num_context  [B] int64, the number of feature tokens at the beginning of each sequence; None if there are none
    shared       results that all layers share, see `once`
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
        """Return the result of `compute`, which is called only for the first call with this key."""
        if key not in self.shared:
            self.shared[key] = compute()
        return self.shared[key]


@dataclass
class PagedPass:
    """One pass of new tokens through all layers.

    last     the last layer, if tokens are only written and its outputs are not used; None if they are used
    choices  for bsa, layer -> [B, H, S] int32: the blocks chosen for the selection group of each user's next token, -1
             if there are fewer or a new selection group begins. Each layer updates its choices in the pass.
    sums     the sums of blocks, for models with layers of kind bsa
    context  [T] int64, the index of a feature token among all feature tokens of the pass, -1 for events; None if all
             tokens are events
    """

    pool: hstu_sparse.PagePool
    groups: list[PagedGroup]
    last: int | None = None
    choices: dict[int, Tensor] = field(default_factory=dict)
    sums: BlockSums | None = None
    context: Tensor | None = None


@dataclass
class ServedBatch(Batch):
    """A batch of new tokens; `served` holds the cached pages they attend to."""

    served: PagedPass = None  # type: ignore[assignment]
