"""The time and the position bias of a tile of scores, and the kernels that prepare the timestamps.

Letters: T tokens of the batch, N max_seq_len; t and s: the positions of queries and keys in their sequence.

A position bias is read per pair from `position_bias[t - s]`, a table of N. Time differences fall into buckets of
logarithmic width. How many bucket edges a tile reaches over is known from the least and the greatest timestamp of its
two sides. A tile of at most MOST_EDGES is called narrow: timestamps, as offsets from the sequence's first, are compared
with its edges, and a flat tile (no edge) needs only one number. With ascending timestamps all tiles are narrow but the
few next to the diagonal. The run of narrow tiles on the far side is found before the loops, and walked by the loop that
has no masks; all others go to the loop that has them. There timestamps come as pairs of fp32 (high and low part), whose
differences are exact up to 2^24 seconds, and a bucket is read from a table of fp32's leading bits.
"""

import math

import torch
import triton
import triton.language as tl

from hstu_sparse._triton import COMPILED
from hstu_sparse.dense.reference import bucket_edges

MAX_BUCKETS = 145
POSITION_MARGIN = 1024
MOST_EDGES = tl.constexpr(4)
# Cells of an octave in the table that finds buckets: 2 ** CELL_BITS, each narrower than a bucket.
CELL_BITS = 3
_SHIFT, _BASE = tl.constexpr(23 - CELL_BITS), tl.constexpr(127 << CELL_BITS)


def bucket_cells(num_buckets: int) -> torch.Tensor:
    """[512, 2] int32 on the CPU: for each cell of fp32 numbers >= 1, the bits of the next bucket edge (or infinity) and
    the bucket below it. No cell has two edges.

    A cell's index is the number's exponent and the first bits of its mantissa: no logarithm, and exact.
    """
    edges = torch.tensor([*bucket_edges(num_buckets), math.inf], dtype=torch.float32)
    per_octave = 2**CELL_BITS
    starts = torch.tensor(
        [2.0 ** (i // per_octave) * (1 + i % per_octave / per_octave) for i in range(64 * per_octave)]
    )
    bucket = torch.bucketize(starts, edges[:-1], right=True)
    return torch.stack([edges[bucket].view(torch.int32), bucket.int()], 1)


@triton.jit(do_not_specialize_on_alignment=["position", "time"])
def dense_attention_tables_kernel(
    position, time, half_position, half_time, N: tl.constexpr, TIMES: tl.constexpr, MARGIN: tl.constexpr,
    MORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Halves of the bias tables in fp32, position [N] with MARGIN zeros on both sides, time [TIMES] with MORE behind.

    Halves, since the attention kernels want half the scores; either table may be None.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if position is not None:
        value = tl.load(position + i - MARGIN, (i >= MARGIN) & (i < MARGIN + N), 0.0).to(tl.float32)
        tl.store(half_position + i, 0.5 * value, i < N + 2 * MARGIN)
    if time is not None:
        value = tl.load(time + i, i < TIMES, 0.0).to(tl.float32)
        tl.store(half_time + i, 0.5 * value, i < TIMES + MORE)


@triton.jit(
    do_not_specialize=["total"],
    do_not_specialize_on_alignment=["times", "origins", "seq_offsets", "least", "greatest"],
)
def dense_attention_times_kernel(
    times, origins, seq_offsets, split, offset, least, greatest, total, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Timestamps as fp32 pairs `split [2, T]` and as `offset [T]` int32 from the sequence's first in `origins`, and the
    least and greatest of each BLOCK tokens of a sequence.

    Block i of sequence b is at seq_offsets[b] // BLOCK + b + i, which leaves room for every block without a prefix sum.
    Where an offset does not fit, the block's extremes are infinite, so that no tile with it passes for narrow.
    """
    b = tl.program_id(0)
    begin = tl.load(seq_offsets + b).to(tl.int64)
    length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
    first = tl.program_id(1) * CHUNK
    if first >= length:
        return
    block = tl.arange(0, CHUNK // BLOCK)
    token = first + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = token < length
    value = tl.load(times + begin + token, inside, 0)
    high = value.to(tl.float32)
    low = (value - high.to(tl.int64)).to(tl.float32)
    tl.store(split + begin + token, high, inside)
    tl.store(split + total + begin + token, low, inside)
    relative = value - tl.load(origins + begin)
    fits = (relative > -2147483648) & (relative < 2147483647)
    tl.store(offset + begin + token, relative.to(tl.int32), inside)
    slot = begin // BLOCK + b + first // BLOCK + block
    used = first + block * BLOCK < length
    limit = 4611686018427387904
    smallest = tl.min(tl.where(inside, tl.where(fits, value, -limit), limit), 1)
    largest = tl.max(tl.where(inside, tl.where(fits, value, limit), -limit), 1)
    tl.store(least + slot, smallest, used)
    tl.store(greatest + slot, largest, used)


@triton.jit(
    do_not_specialize=["stride"],
    do_not_specialize_on_alignment=["seq_offsets", "own_least", "own_greatest", "least", "greatest"],
)
def dense_attention_narrow_kernel(
    tiles, seq_offsets, own_least, own_greatest, least, greatest, cells, tile_buckets, stride,
    OWN: tl.constexpr, OTHER: tl.constexpr, OWN_IS_QUERY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """tile_buckets[tile, block] int16: of a narrow pair of an own and another block, 8 times its lowest bucket plus the
    number of bucket edges in it; -1 for the rest.

    Narrow: no key is younger than a query, and the differences reach over MOST_EDGES edges at most.
    """
    b = tl.load(tiles + 2 * tl.program_id(0))
    if b < 0:
        return
    begin = tl.load(seq_offsets + b).to(tl.int64)
    length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
    block = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if tl.program_id(1) * CHUNK * OTHER >= length:
        return
    own = begin // OWN + b + tl.load(tiles + 2 * tl.program_id(0) + 1)
    inside = block * OTHER < length
    other = begin // OTHER + b + block
    own_first = tl.load(own_least + own)
    own_last = tl.load(own_greatest + own)
    other_first = tl.load(least + other, inside, 0)
    other_last = tl.load(greatest + other, inside, 0)
    if OWN_IS_QUERY:
        nearest = own_first - other_last
        farthest = own_last - other_first
    else:
        nearest = other_first - own_last
        farthest = other_last - own_first
    lowest = _bucket(tl.maximum(nearest, 0).to(tl.float32), cells)
    highest = _bucket(tl.maximum(farthest, 0).to(tl.float32), cells)
    narrow = (nearest >= 0) & (highest - lowest <= MOST_EDGES)
    value = tl.where(narrow, 8 * lowest + highest - lowest, -1)
    tl.store(tile_buckets + own * stride + block, value.to(tl.int16), inside)


@triton.jit
def _look_up(table, index):
    """table[index] (fp32 or int32) for a tile of indices, left in the layout that the tile has.

    An ordinary load is given a layout of its own, and moving a tile from there to the tensor cores' layout costs more
    than the load. An elementwise operation keeps its operand's layout.
    """
    if COMPILED:
        pointers = (table + index).to(tl.int64)
        if table.dtype.element_ty == tl.int32:
            return tl.inline_asm_elementwise(
                "ld.global.nc.b32 $0, [$1];", "=r,l", [pointers], tl.int32, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers], tl.float32, is_pure=True, pack=1
            )
    else:
        return tl.load(table + index)


@triton.jit
def _bucket(x, cells):
    """Bucket of |x| (given as fp32 >= 0), exact. cells: see `bucket_cells`."""
    index = (tl.maximum(x, 1.0).to(tl.int32, bitcast=True) >> _SHIFT) - _BASE
    if COMPILED:
        edge, bucket = tl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=f,=r,l", [(cells + 2 * index.to(tl.int64)).to(tl.int64)],
            (tl.float32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        edge = tl.load(cells + 2 * index).to(tl.float32, bitcast=True)
        bucket = tl.load(cells + 2 * index + 1)
    return bucket + (x >= edge).to(tl.int32)


@triton.jit
def _narrow_run(first, last, tile_buckets, BLOCK: tl.constexpr, FROM_FIRST: tl.constexpr):
    """Where the run of narrow blocks among the rows first .. last ends (all multiples of BLOCK).

    FROM_FIRST: the first row of the first block that is not narrow. Else: the row after the last such block.
    """
    CHUNK: tl.constexpr = 256
    wide_first = last // BLOCK
    wide_end = first // BLOCK
    for start in range(first // BLOCK, last // BLOCK, CHUNK):
        block = start + tl.arange(0, CHUNK)
        wide = tl.load(tile_buckets + block, block < last // BLOCK, 0) < 0
        wide_first = tl.minimum(wide_first, tl.min(tl.where(wide, block, wide_first), 0))
        wide_end = tl.maximum(wide_end, tl.max(tl.where(wide, block + 1, wide_end), 0))
    if FROM_FIRST:
        return tl.maximum(wide_first * BLOCK, first)
    else:
        return wide_end * BLOCK


@triton.jit
def _reached(own, other, edge, BY_QUERY: tl.constexpr):
    """Mask of a narrow tile: at or past this edge; `own` and `other`: the offsets of its two sides.

    One comparison per pair: the edge is added to the own side, which has fewer elements per thread (BY_QUERY: queries).
    """
    if BY_QUERY:
        return tl.maximum(own.to(tl.int64) - edge, -2147483648).to(tl.int32) >= other
    else:
        return other >= tl.minimum(own.to(tl.int64) + edge, 2147483647).to(tl.int32)


@triton.jit
def _add_narrow(half, entry, table, steps, own, offsets, index, BY_QUERY: tl.constexpr):
    """half + the time bias of a narrow tile, with its entry in tile_buckets.

    own: the offsets of its own side; offsets + index: where the other side's are.
    """
    lowest = entry >> 3
    table += lowest
    steps += lowest
    bias = tl.load(table)
    if entry & 7 == 0:
        half += bias
    else:
        other = _look_up(offsets, index)
        tile = tl.where(_reached(own, other, tl.load(steps + 1), BY_QUERY), tl.load(table + 1), bias)
        if entry & 7 > 1:
            tile = tl.where(_reached(own, other, tl.load(steps + 2), BY_QUERY), tl.load(table + 2), tile)
        if entry & 7 > 2:
            tile = tl.where(_reached(own, other, tl.load(steps + 3), BY_QUERY), tl.load(table + 3), tile)
            tile = tl.where(_reached(own, other, tl.load(steps + 4), BY_QUERY), tl.load(table + 4), tile)
        half += tile
    return half


@triton.jit
def _add_wide(half, q_high, q_low, k_high, k_low, table, cells):
    """(half + the time bias of any tile, its buckets)."""
    bucket = _bucket(tl.abs((q_high - k_high) + (q_low - k_low)), cells)
    return half + _look_up(table, bucket.to(tl.int64)), bucket


@triton.jit
def _bias_position(t, history, HAS_TARGETS: tl.constexpr):
    """Where a token stands in the position bias (int64): candidates all at the first of them.

    The 64 bits let the compiler see that neighbouring pairs read neighbouring addresses.
    """
    if HAS_TARGETS:
        t = tl.minimum(t, history)
    return t.to(tl.int64)


@triton.jit
def _half_with_bias(
    scores, start, row, history, length, half_alpha, position_bias, time_bias, cells, steps, q_high, q_low, q_offset,
    k_times, k_offset, tile_buckets, total,
    HAS_TARGETS: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Half the scores, with their biases, of a tile of queries by the keys from `start` on.

    Returns them, the tile's entry in tile_buckets (0 if MASKED) and, if MASKED, its buckets. row: `_bias_position` of
    the queries, [BLOCK_M, 1].
    """
    s = start + tl.arange(0, BLOCK_N)
    entry = 0
    bucket = 0
    half = scores * half_alpha
    if HAS_POSITION:
        column = s.to(tl.int64)
        if MASKED:
            column = _bias_position(s, history, HAS_TARGETS)
        half += _look_up(position_bias, row - column[None, :])
    if HAS_TIME and MASKED:
        k_high = tl.load(k_times + s, s < length, 0.0)[None, :]
        k_low = tl.load(k_times + total + s, s < length, 0.0)[None, :]
        half, bucket = _add_wide(half, q_high, q_low, k_high, k_low, time_bias, cells)
    elif HAS_TIME:
        entry = tl.load(tile_buckets + start // BLOCK_N).to(tl.int32)
        half = _add_narrow(half, entry, time_bias, steps, q_offset, k_offset, s.to(tl.int64)[None, :], True)
    return half, entry, bucket
