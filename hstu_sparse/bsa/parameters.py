"""Define groups of arguments of the block-sparse kernels; those of the bias are in bias.py.

Letters: T tokens of the batch, H heads, D query/key and V value head size, BS block size, S blocks chosen per group, NG
group slots, NB block slots.
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
    """The gates or their gradients, see the public function: [T, H], or by head [H, at least T and a tile] fp32.

    Without a window `swa` is another one that is not read.
    """

    cmp: object
    slc: object
    swa: object


class Call(NamedTuple):
    """The numbers of a call.

    inv_n   1 / normalizer
    H, S    heads, and blocks chosen per group
    window  the window's size, or 0
    """

    scale: object
    inv_n: object
    H: object
    S: object
    window: object


class KeyGradients(NamedTuple):
    """Gradients of mean keys and values [NB, H, ..], of keys and values [T, H, ..], parts [.., BS, D + V] fp32."""

    dkbar: object
    dvbar: object
    dk: object
    dv: object
    parts: object


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
    """The pointers of `Lists` (lists.py) that kernels read, and the number of entries of a chunk."""

    tokens: object
    start: object
    chunk_start: object
    chunk_list: object
    entries: object
    part_start: object
    chunk: object
