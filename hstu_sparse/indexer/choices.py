"""Compute the query that each row of a choice belongs to.

Letters: T tokens of the batch, B sequences, R tokens that share a choice (selection_group), G rows of a choice: T if
R is 1, else T // R + B.

With R = 1 row and token are the same, and `rows` holds the first token of each token's sequence, [T] int64. With R > 1
it is [3, G] int64: the first token of the sequence, the group's first token (-1 for a row without a group), and the
group's number of tokens (0 without a group).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hstu_sparse.core.launch import cdiv, run

_BLOCK = 128


@triton.jit(do_not_specialize=["B", "G", "steps"])
def choice_rows_kernel(offsets, rows, B, G, steps, R: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK entries of `rows`, by a binary search of `steps` steps for each."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + B - 1
    for _ in range(steps):
        middle = (low + high + 1) // 2
        start = tl.load(offsets + middle).to(tl.int64)
        if R > 1:
            start = start // R + middle
        right = start <= row
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle - 1)
    begin = tl.load(offsets + low).to(tl.int64)
    tl.store(rows + row, begin, mask=row < G)
    if R > 1:
        t = (row - begin // R - low) * R
        size = tl.minimum(tl.maximum(tl.load(offsets + low + 1).to(tl.int64) - begin - t, 0), R)
        tl.store(rows + G + row, tl.where(size > 0, begin + t, -1), mask=row < G)
        tl.store(rows + 2 * G + row, size, mask=row < G)


@triton.jit
def query_of(rows, row, G, R: tl.constexpr):
    """Return (token, first token of its sequence, its position, the last position that it may choose) of a row.

    token: -1 for a row without a group.
    """
    begin = tl.load(rows + row)
    token = row
    if R > 1:
        token = tl.load(rows + G + row)
    t = (token - begin).to(tl.int32)
    return token, begin, t, t if R == 1 else t - 1


def rows_shape(total: int, seq_offsets: Tensor, group: int) -> tuple[int, ...]:
    """Return the shape of `rows`."""
    return (total,) if group == 1 else (3, num_rows(total, seq_offsets, group))


def num_rows(total: int, seq_offsets: Tensor, group: int) -> int:
    """Return G."""
    return total if group == 1 else total // group + seq_offsets.shape[0] - 1


def choice_rows(seq_offsets: Tensor, total: int, group: int) -> Tensor:
    """Return `rows` of a batch of `total` tokens."""
    rows = torch.empty(rows_shape(total, seq_offsets, group), dtype=torch.int64, device=seq_offsets.device)
    B, G = seq_offsets.shape[0] - 1, rows.shape[-1]
    if total:
        arguments = (seq_offsets, rows, B, G, B.bit_length())
        run(choice_rows_kernel, cdiv(G, _BLOCK), *arguments, R=group, BLOCK=_BLOCK, num_warps=4)
    return rows
