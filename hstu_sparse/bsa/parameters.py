"""Define groups of arguments of the block-sparse kernels; those of the bias are in bias.py.

Letters: T tokens of the batch, H heads, S blocks chosen per group, NG group slots.
"""

from typing import NamedTuple


class Chosen(NamedTuple):
    """The blocks that each group chose, ascending, its own block last: [NG, H, S] each.

    indices  int32, padded with -1
    entries  int16, with a time bias: the entry of the group's tile and the block, see `BlockPlan`
    """

    indices: object
    entries: object = None


class Gates(NamedTuple):
    """The gates, [T, H] each, see the public function; without a window `swa` is a copy of `slc` that is not read."""

    cmp: object
    slc: object
    swa: object


class Strides(NamedTuple):
    """Strides of q, k, v and, in the backward pass, do, between tokens and between heads."""

    q_t: object
    q_h: object
    k_t: object
    k_h: object
    v_t: object
    v_h: object
    do_t: object = None
    do_h: object = None

    @classmethod
    def of(cls, *tensors) -> "Strides":
        """Collect the strides of tensors: q, k, v and optionally do."""
        return cls(*(stride for x in tensors for stride in x.stride()[:2]))


class ListPointers(NamedTuple):
    """The pointers of `Lists` (lists.py) that kernels read."""

    tokens: object
    start: object
    chunk_start: object
    chunk_list: object
    entries: object
