"""Define the arguments that attention to pages, its launches and its references share.

Letters: Tq new tokens, B sequences, H heads, D query/key and V value head size, N max_seq_len.
"""

from typing import NamedTuple

from torch import Tensor

from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.core.validation import check_bool, check_normalizer, check_number, check_scale


class Queries(NamedTuple):
    """New tokens: q [Tq, H, D], their own keys and values or None, and their sequences.

    q_offsets   [B+1] the new tokens of each sequence
    lengths     [B] the cached tokens of each sequence
    candidates  whether all tokens of a sequence have the position after its last cached one
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    q_offsets: Tensor
    lengths: Tensor
    candidates: bool


class Scoring(NamedTuple):
    """From products to weights: the activation, its factors, the bias and the base of RoPE.

    return_lse: whether the log-sum-exp of the scores is computed, too.
    """

    softmax: bool
    scale: float
    normalizer: float
    bias: RelativeBias
    rope_base: float | None = None
    return_lse: bool = False


def check_scoring(
    activation: str,
    scale: float | None,
    normalizer: float | None,
    bias: RelativeBias,
    max_seq_len: int,
    head_size: int,
    rope_base: float | None = None,
    return_lse: bool = False,
) -> Scoring:
    """Check and complete the options of an attention call, of which `bias` is checked already."""
    if activation not in ("silu", "softmax"):
        raise ValueError(f"activation must be silu or softmax, got {activation!r}")
    check_bool("return_lse", return_lse)
    if return_lse and activation != "softmax":
        raise ValueError("return_lse needs activation='softmax': SiLU's parts add up without it")
    if normalizer is not None and activation != "silu":
        raise ValueError(f"normalizer is for activation='silu', softmax has none, got {normalizer!r}")
    if rope_base is not None:
        rope_base = check_number("rope_base", rope_base, above=0)
        if head_size % 2:
            raise ValueError(f"rope_base needs an even head size, got D={head_size}")
    scale, normalizer = check_scale(scale, head_size), check_normalizer(normalizer, max_seq_len)
    return Scoring(activation == "softmax", scale, normalizer, bias, rope_base, return_lse)
