"""Merging the attention to two sets of keys, by their log-sum-exps.

Letters: T tokens of queries, H heads, V value head size.
"""

import torch
import triton
import triton.language as tl

from hstu_sparse.launch import cdiv, padded_head, run
from hstu_sparse.tiles import load_rows

TOKENS = 16  # of a program


@triton.jit(do_not_specialize=["total"])
def flash_attention_merge_kernel(
    one, lse, more, more_lse, out, one_stride_t, one_stride_h, more_stride_t, more_stride_h, out_stride_t, out_stride_h,
    total,
    H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK queries of one head. Rows whose log-sum-exp is -inf may hold anything."""
    head = tl.program_id(0) % H
    token = (tl.program_id(0) // H).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.arange(0, PAD_V)
    inside = token < total
    lse += head.to(tl.int64) * total + token
    first = tl.load(lse, inside, float("-inf"))
    second = tl.load(more_lse + head.to(tl.int64) * total + token, inside, float("-inf"))
    peak = tl.maximum(first, second)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    first, second = tl.exp(first - peak), tl.exp(second - peak)
    sums = first + second
    seen = sums != 0.0  # true for NaN
    tl.store(lse, tl.where(seen, peak + tl.log(sums), float("-inf")), inside)
    sums = tl.where(seen, sums, 1.0)
    result = load_rows(one + head * one_stride_h, token, one_stride_t, inside & (first != 0.0), V, PAD_V).to(tl.float32)
    added = load_rows(more + head * more_stride_h, token, more_stride_t, inside & (second != 0.0), V, PAD_V)
    result = (result * first[:, None] + added.to(tl.float32) * second[:, None]) / sums[:, None]
    out += head * out_stride_h + token[:, None] * out_stride_t + v[None, :]
    tl.store(out, result.to(out.dtype.element_ty), inside[:, None] & (v < V)[None, :])


def merge(one: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor, out: torch.Tensor) -> None:
    """Write to out [T, H, V] what one and more [T, H, V] make together, and their log-sum-exp to lse.

    Args:
        one, more, out: rows of last stride 1; out may be one.
        lse: [H, T] fp32, contiguous: of one, afterwards of out.
        more_lse: the same of more. Rows of -inf saw no key.
    """
    total, heads, size = one.shape
    if not total:
        return
    strides = [stride for x in (one, more, out) for stride in x.stride()[:2]]
    run(
        flash_attention_merge_kernel, (cdiv(total, TOKENS) * heads,), one, lse, more, more_lse, out, *strides, total,
        H=heads, V=size, BLOCK=TOKENS, PAD_V=padded_head(size),
    )  # fmt: skip
