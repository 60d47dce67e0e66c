"""Find the query of each row of a choice, its chosen tokens, and their bias.

Letters: T tokens of the batch, B sequences, K chosen tokens per row, R tokens that share a choice (selection_group), G
rows of a choice: T if R is 1, else T // R + B.

`rows` is [3, G] int64: the first token of the row's sequence, the row's query (with R > 1 the first token of its group,
-1 for a row without a group), and the number of tokens that share the row (0 for a row without a group).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hstu_sparse.bias.gradients import Sums, TableSums
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.bias.scores import KernelBias, load_times, table_bias
from hstu_sparse.core.launch import INTERPRET, cdiv, run
from hstu_sparse.core.registration import register_preparation
from hstu_sparse.indexer.reference import num_rows
from hstu_sparse.tiles.rows import COMPILED

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Copies of a table's gradient that atomic additions are spread over. Most pairs fall into few time buckets.
POSITION_COPIES, TIME_COPIES = tl.constexpr(4), tl.constexpr(64)
_BLOCK = 128


@triton.jit(do_not_specialize=["B", "G", "steps"])
def choice_rows_kernel(offsets, rows, B, G, steps, R: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK entries of `rows`, by a binary search of `steps` steps for each.

    With torch.searchsorted this would take fourteen launches in each of a layer's three calls.
    """
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
    t = row - begin if R == 1 else (row - begin // R - low) * R
    size = tl.minimum(tl.maximum(tl.load(offsets + low + 1).to(tl.int64) - begin - t, 0), R)
    tl.store(rows + row, begin, mask=row < G)
    tl.store(rows + G + row, tl.where(size > 0, begin + t, -1), mask=row < G)
    tl.store(rows + 2 * G + row, size, mask=row < G)


def _fake_rows(seq_offsets: Tensor, total: int, group: int) -> list[Tensor]:
    return [seq_offsets.new_empty(3, num_rows(total, seq_offsets, group), dtype=torch.int64)]


def _compute_rows(seq_offsets: Tensor, total: int, group: int) -> list[Tensor]:
    (rows,) = _fake_rows(seq_offsets, total, group)
    B, G = seq_offsets.shape[0] - 1, rows.shape[1]
    if total:
        arguments = (seq_offsets, rows, B, G, B.bit_length())
        run(choice_rows_kernel, cdiv(G, _BLOCK), *arguments, R=group, BLOCK=_BLOCK, num_warps=4)
    return [rows]


_SCHEMA = "Tensor seq_offsets, SymInt total, SymInt group"
_rows_operator = register_preparation("choice_rows", _SCHEMA, _compute_rows, _fake_rows)


def choice_rows(seq_offsets: Tensor, total: int, group: int) -> Tensor:
    """Return `rows` of a batch of `total` tokens."""
    return _rows_operator(seq_offsets, total, group)[0]


class Query(NamedTuple):
    """A row's query.

    row    its row of the choice
    token  its index in the batch, -1 if there is none
    begin  the first token of its sequence
    t      its position
    last   the last position that it may choose, negative if there is none
    """

    row: tl.tensor
    token: tl.tensor
    begin: tl.tensor
    t: tl.tensor
    last: tl.tensor


@triton.jit
def find_query(rows, row, G, R: tl.constexpr):
    """Return the `Query` of a row."""
    begin, token = tl.load(rows + row), tl.load(rows + G + row)
    t = (token - begin).to(tl.int32)
    return Query(row, token, begin, t, t if R == 1 else t - 1)


@triton.jit
def chosen_tokens(indices, query, start, K, BLOCK: tl.constexpr):
    """Return (positions int32, visible) of BLOCK slots of a query's choice from `start` on; 0 where masked.

    Indices below 0 or after the last position are masked, so that no index can point outside of its sequence.
    """
    slot = start + tl.arange(0, BLOCK)
    s = tl.load(indices + query.row * K + slot, mask=slot < K, other=-1)
    visible = (s >= 0) & (s <= query.last)
    return tl.where(visible, s, 0).to(tl.int32), visible


@triton.jit
def clamped_tokens(indices, query, start, K, BLOCK: tl.constexpr):
    """Return BLOCK positions int32 of a query's choice from slot `start` on; arbitrary visible ones where masked.

    For gathers whose results are masked later: masked loads would need more instructions than all the rest.
    """
    slot = start + tl.arange(0, BLOCK)
    s = tl.load(indices + query.row * K + slot, mask=slot < K, other=0)
    if s.dtype == tl.int64:
        return tl.minimum(s.to(tl.uint64), query.last.to(tl.uint64)).to(tl.int32)
    else:
        return tl.minimum(s.to(tl.uint32), query.last.to(tl.uint32)).to(tl.int32)


@triton.jit
def chosen_bias(bias, query, s, visible):
    """Return `table_bias` of a query and the tokens chosen for it."""
    query_time = load_times(bias.query_times, query.token, query.token >= 0)
    key_times = load_times(bias.key_times, query.begin + s, visible)
    return table_bias(bias, query.t - s, visible, query_time, key_times)


@triton.jit
def exp2(x):
    """Return 2^x in one instruction, with 0 for results below 2^-126, for which tl.exp2 needs three more."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", constraints="=f,f", args=[x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def log2(x):
    """Return log2(x) for x >= 2^-126 in one instruction, accurate to 2^-22."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", constraints="=f,f", args=[x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


def kernel_bias(bias: RelativeBias) -> KernelBias:
    """Return the bias for the kernels, with tables in fp32."""
    position, time = (None if table is None else table.float() for table in bias[:2])
    return KernelBias.from_bias(bias._replace(position=position, time=time))


def table_sums(bias: RelativeBias, rows: int, bound: Callable[[], Tensor]) -> TableSums:
    """Allocate the tables' gradients. bound: returns a bound of the sum of a row's contributions to all entries."""
    deterministic, copies = torch.are_deterministic_algorithms_enabled(), (POSITION_COPIES.value, TIME_COPIES.value)
    return TableSums(bias[:2], copies, deterministic, lambda: (rows + 1.0) * bound().double())


def key_sums(x: Tensor, rows: int, bound: Callable[[], Tensor]) -> Sums:
    """Allocate the gradient of keys. bound: returns a bound of the sum of a row's contributions to one channel."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return Sums.zeros(x, (rows + 1.0) * bound().double() if deterministic else None)


def key_block(dtype: torch.dtype, width: int) -> int:
    """Return the number of chosen keys per step: a few tiles of this width must fit into shared memory."""
    if INTERPRET:
        return 32
    bytes_of_row = dtype.itemsize * width
    return 64 if bytes_of_row <= 512 else 32 if bytes_of_row <= 1024 else 16


def by_heads(x: Tensor) -> Tensor:
    """Return keys or values as [T, Hkv, size]; [T, size] is one head."""
    return x[:, None] if x.dim() == 2 else x
