"""Merge the attention to two sets of keys, by their log-sum-exps.

Letters: T tokens of queries, H heads, V value head size.
"""

import torch
import triton
import triton.language as tl

from hstu_sparse.core.launch import cdiv, padded_head, run
from hstu_sparse.tiles.rows import load_rows

TOKENS = 16  # tokens of a program


@triton.jit(do_not_specialize=["total"])
def flash_attention_merge_kernel(
    first_out, lse, second_out, second_lse, out, first_stride_t, first_stride_h, second_stride_t, second_stride_h,
    out_stride_t, out_stride_h, total,
    H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK queries of one head in one program. Rows whose log-sum-exp is -inf may hold anything."""
    head = tl.program_id(0) % H
    token = (tl.program_id(0) // H).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.arange(0, PAD_V)
    inside = token < total
    lse += head.to(tl.int64) * total + token
    first = tl.load(lse, inside, float("-inf"))
    second = tl.load(second_lse + head.to(tl.int64) * total + token, inside, float("-inf"))
    tl.debug_barrier()  # several threads may read the same rows of lse: all must do so before one writes
    peak = tl.maximum(first, second)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    first, second = tl.exp(first - peak), tl.exp(second - peak)
    sums = first + second
    sees_keys = sums != 0.0  # true for NaN
    tl.store(lse, tl.where(sees_keys, peak + tl.log(sums), float("-inf")), inside)
    sums = tl.where(sees_keys, sums, 1.0)
    result = load_rows(first_out + head * first_stride_h, token, first_stride_t, inside & (first != 0.0), V, PAD_V).to(
        tl.float32
    )
    added = load_rows(second_out + head * second_stride_h, token, second_stride_t, inside & (second != 0.0), V, PAD_V)
    result = (result * first[:, None] + added.to(tl.float32) * second[:, None]) / sums[:, None]
    out += head * out_stride_h + token[:, None] * out_stride_t + v[None, :]
    tl.store(out, result.to(out.dtype.element_ty), inside[:, None] & (v < V)[None, :])


def merge(
    first_out: torch.Tensor, lse: torch.Tensor, second_out: torch.Tensor, second_lse: torch.Tensor, out: torch.Tensor
) -> None:
    """Merge first_out and second_out [T, H, V] into out [T, H, V], and their log-sum-exps into lse.

    Args:
        first_out, second_out, out: rows of last stride 1; out may be first_out.
        lse: [H, T] fp32, contiguous: initially the log-sum-exp of first_out, finally that of out.
        second_lse: the log-sum-exp of second_out; -inf for rows that saw no key.
    """
    total, heads, size = first_out.shape
    if not total:
        return
    strides = [stride for x in (first_out, second_out, out) for stride in x.stride()[:2]]
    run(
        flash_attention_merge_kernel, (cdiv(total, TOKENS) * heads,), first_out, lse, second_out, second_lse, out,
        *strides, total, H=heads, V=size, BLOCK=TOKENS, PAD_V=padded_head(size),
    )  # fmt: skip
