"""Define device functions that the kernels of this folder share: the chosen tokens of a query, and the bias of pairs.

Letters: T tokens of the batch, N entries of the position table, K chosen tokens per query.

A kernel has the bias's arguments `position, time, cells, timestamps, query_timestamps, positions`: the tables (None if
absent), the cells that find buckets, the tokens' times and N.
"""

import triton
import triton.language as tl

from hstu_sparse.bias.buckets import bucket_of
from hstu_sparse.bias.gradients import add_pairs
from hstu_sparse.bias.scores import pair_bias
from hstu_sparse.tiles.assembly import look_up
from hstu_sparse.tiles.rows import COMPILED

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def chosen_tokens(indices, row, start, last, K, BLOCK: tl.constexpr):
    """Return (positions int32, visible) of BLOCK slots of a row from `start` on; 0 where masked.

    Indices below 0 or after `last` are masked, so that no index can point outside of its sequence.
    """
    slot = start + tl.arange(0, BLOCK)
    s = tl.load(indices + row * K + slot, mask=slot < K, other=-1)
    visible = (s >= 0) & (s <= last)
    return tl.where(visible, s, 0).to(tl.int32), visible


@triton.jit
def clamped_tokens(indices, row, start, last, K, BLOCK: tl.constexpr):
    """Return int32 positions of BLOCK slots of a row from `start` on: any position up to `last` >= 0 where masked.

    This serves gathers whose results are masked later: a mask would cost them more instructions than everything else.
    """
    slot = start + tl.arange(0, BLOCK)
    s = tl.load(indices + row * K + slot, mask=slot < K, other=0)
    if s.dtype == tl.int64:
        return tl.minimum(s.to(tl.uint64), last.to(tl.uint64)).to(tl.int32)
    else:
        return tl.minimum(s.to(tl.uint32), last.to(tl.uint32)).to(tl.int32)


@triton.jit
def gather_rows(base, rows, stride, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load rows like `load_rows`, if all rows exist."""
    columns = tl.arange(0, PADDED)
    pointers = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if SIZE == PADDED:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)


@triton.jit
def exp2(x):
    """Return 2^x in one instruction, 0 if that is below 2^-126; tl.exp2 takes three more for such numbers."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", constraints="=f,f", args=[x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def log2(x):
    """Return the logarithm in one instruction and a multiplication, accurate to 2^-22, of numbers from 2^-126 on."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", constraints="=f,f", args=[x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def chosen_bias(s, visible, token, begin, t, position, time, cells, timestamps, query_timestamps, positions):
    """Return `pair_bias` of the query `token`, at t of its sequence from `begin` on, and the tokens chosen for it."""
    query_time = 0
    key_times = 0
    if time is not None:
        query_time = tl.load(query_timestamps + token)
        key_times = tl.load(timestamps + begin + s, mask=visible, other=0)
    return pair_bias(t - s, visible, query_time, key_times, position, time, cells, positions)


@triton.jit
def split_bias(distance, seen, query_times, key_times, position, time, cells, positions, ASM: tl.constexpr):
    """Return the biases of `pair_bias`, bit by bit, of a tile of pairs; with ASM arbitrary for pairs that are not
    `seen`.

    query_times, key_times: the times of queries and keys, each as (high, low), see `load_split_times`. With ASM, for
    which the tables are fp32, look-ups stay in the tile's layout: ordinary loads of a tile of scores go through shared
    memory twice, addresses in one direction and values in the other.
    """
    bias = tl.zeros_like(distance.to(tl.float32))
    if position is not None:
        if ASM:
            place = tl.minimum(tl.maximum(distance, 0), positions - 1)
            bias += tl.where(distance < positions, look_up(position, place, ASM), 0.0)
        else:
            bias += tl.load(position + distance, mask=seen & (distance < positions), other=0.0).to(tl.float32)
    if time is not None:
        difference = tl.abs((query_times[0] - key_times[0]) + (query_times[1] - key_times[1]))
        bucket = bucket_of(difference, cells, ASM)
        if ASM:
            bias += look_up(time, bucket, ASM)
        else:
            bias += tl.load(time + tl.where(seen, bucket, 0)).to(tl.float32)
    return bias


@triton.jit
def add_table_gradients(
    position_grad, time_grad, unit, value, s, visible, bucket, token, t, positions, buckets,
    POSITION_COPIES: tl.constexpr, TIME_COPIES: tl.constexpr,
):  # fmt: skip
    """Add the pairs' gradients `value` [BLOCK] to a copy of each table's: fp32 cells, or int64 ones in 1 / `unit`."""
    if position_grad is not None:
        position_grad += (token % POSITION_COPIES) * positions
    if time_grad is not None:
        time_grad += (token % TIME_COPIES) * buckets
    add_pairs(position_grad, time_grad, unit, value, t - s, visible, bucket, positions)
