"""The time and the position bias of a tile of scores, and the kernels that prepare the timestamps.

Letters: T tokens of the batch, N max_seq_len; t and s: the positions of queries and keys in their sequence.

A position bias is read per pair from `position_bias[t - s]`, a table of N. For the time bias, timestamps come as pairs
of fp32 (high and low part), whose differences are exact up to 2^24 seconds, and a bucket is found by comparing with the
exact bucket edges. How many buckets a tile touches is known from the least and the greatest timestamp of its two sides.
A tile of at most three is called narrow, and needs no logarithm and no look-up per pair; with ascending timestamps all
tiles are, but the few next to the diagonal. The run of narrow tiles on the far side is found before the loops, and
walked by the loop that has no masks; all others go to the loop that has them.
"""

import triton
import triton.language as tl

from hstu_sparse._triton import COMPILED
from hstu_sparse.dense.reference import BUCKET_WIDTH

MAX_BUCKETS = 145
POSITION_MARGIN = 1024
# Buckets per natural logarithm, as a factor of log2.
_PER_LOG2 = tl.constexpr(0.6931471805599453 / BUCKET_WIDTH)


@triton.jit
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


@triton.jit
def dense_attention_narrow_kernel(
    tiles, seq_offsets, own_least, own_greatest, least, greatest, edges, lowest_bucket, stride,
    OWN: tl.constexpr, OTHER: tl.constexpr, OWN_IS_QUERY: tl.constexpr, NUM_BUCKETS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """lowest_bucket[tile, block] int8: the lowest bucket of a narrow pair of an own and another block, -1 for the rest.

    Narrow: no key is younger than a query, and the differences touch three buckets at most.
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
    lowest = _bucket(tl.maximum(nearest, 0).to(tl.float32), edges, NUM_BUCKETS)
    highest = _bucket(tl.maximum(farthest, 0).to(tl.float32), edges, NUM_BUCKETS)
    narrow = (nearest >= 0) & (highest - lowest <= 2) & (lowest < 127)
    tl.store(lowest_bucket + own * stride + block, tl.where(narrow, lowest, -1).to(tl.int8), inside)


@triton.jit
def _look_up(table, index):
    """table[index] (fp32) for a tile of indices, left in the layout that the tile has.

    An ordinary load is given a layout of its own, and moving a tile from there to the tensor cores' layout costs more
    than the load. An elementwise operation keeps its operand's layout.
    """
    if COMPILED:
        pointers = (table + index).to(tl.int64)
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers], tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.load(table + index)


@triton.jit
def _floor_bucket(x):
    """floor(ln(x) / width - 1e-5), x >= 1: the bucket or, for less than 1e-5 of the buckets' width, the one below it.

    Adding 1.5 * 2^23 with rounding down leaves the floor in the low mantissa bits; the conversion instruction would
    share the special-function unit with the logarithm and tanh.
    """
    if COMPILED:
        bits = tl.inline_asm_elementwise(
            """{
                .reg .f32 e;
                lg2.approx.f32 e, $1;
                sub.f32 e, e, 0f368637BD;
                fma.rm.f32 e, e, 0f40136150, 0f4B400000;
                mov.b32 $0, e;
            }""",
            "=r,f", [x], tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        return bits - 0x4B400000
    else:
        return tl.floor(tl.log2(x) * _PER_LOG2 - 1e-5).to(tl.int32)


@triton.jit
def _bucket(x, edges, NUM_BUCKETS: tl.constexpr):
    """Bucket of |x| (given as fp32 >= 0): an estimate that may be one too low, corrected by the exact edge.

    `edges [NUM_BUCKETS + 2]`: edge k is the least value in bucket k; the one past the last bucket is infinite.
    """
    estimate = tl.minimum(tl.maximum(_floor_bucket(tl.maximum(x, 1.0)), 0), NUM_BUCKETS)
    return estimate + (x >= _look_up(edges, estimate + 1)).to(tl.int32)


@triton.jit
def _narrow(first, last, lowest_bucket, BLOCK: tl.constexpr, FROM_FIRST: tl.constexpr):
    """Where the run of narrow blocks among the rows first .. last ends (all multiples of BLOCK).

    FROM_FIRST: the first row of the first block that is not narrow. Else: the row after the last such block.
    """
    CHUNK: tl.constexpr = 256
    wide_first = last // BLOCK
    wide_end = first // BLOCK
    for start in range(first // BLOCK, last // BLOCK, CHUNK):
        block = start + tl.arange(0, CHUNK)
        wide = tl.load(lowest_bucket + block, block < last // BLOCK, 0) < 0
        wide_first = tl.minimum(wide_first, tl.min(tl.where(wide, block, wide_first), 0))
        wide_end = tl.maximum(wide_end, tl.max(tl.where(wide, block + 1, wide_end), 0))
    if FROM_FIRST:
        return tl.maximum(wide_first * BLOCK, first)
    else:
        return wide_end * BLOCK


@triton.jit
def _narrow_scalars(lowest, table, steps, NUM_BUCKETS: tl.constexpr):
    """Of a narrow tile: its two edges, and the three values of time_bias."""
    # Past the last block anything may stand.
    lowest = tl.minimum(tl.maximum(lowest, 0), NUM_BUCKETS)
    second = tl.minimum(lowest + 1, NUM_BUCKETS)
    third = tl.minimum(lowest + 2, NUM_BUCKETS)
    first_edge = tl.load(steps + lowest + 1)
    second_edge = tl.load(steps + tl.minimum(lowest + 2, NUM_BUCKETS + 1))
    return first_edge, second_edge, tl.load(table + lowest), tl.load(table + second), tl.load(table + third)


@triton.jit
def _narrow_edges(q_offset, k_offset, first, second, BY_QUERY: tl.constexpr):
    """Masks of a narrow tile: at or past its first edge, its second.

    One comparison per pair: the edge is added to the side that has fewer elements per thread (BY_QUERY: the queries).
    """
    if BY_QUERY:
        far = tl.maximum(q_offset.to(tl.int64) - first, -2147483648).to(tl.int32)
        farther = tl.maximum(q_offset.to(tl.int64) - second, -2147483648).to(tl.int32)
        return far >= k_offset, farther >= k_offset
    else:
        far = tl.minimum(k_offset.to(tl.int64) + first, 2147483647).to(tl.int32)
        farther = tl.minimum(k_offset.to(tl.int64) + second, 2147483647).to(tl.int32)
        return q_offset >= far, q_offset >= farther


@triton.jit
def _position_bias(t, s, last_position, table, HAS_TARGETS: tl.constexpr):
    """position_bias[t - s] of a tile.

    There are always rows past the sequence's end or keys past the query, and the compiler may look up for a block that
    is not attended to at all, since it takes the look-up for arithmetic: `last_position` bounds the distances above,
    and the table has POSITION_MARGIN entries in front.
    """
    if HAS_TARGETS:
        return _look_up(table, tl.minimum(t, last_position) - tl.minimum(s, last_position))
    else:
        return _look_up(table, tl.minimum(t, last_position) - s)


@triton.jit
def _time_bias(
    q_high, q_low, q_offset, k_high, k_low, k_offset, first_edge, second_edge, first, second, third, table, edges,
    NUM_BUCKETS: tl.constexpr, BY_QUERY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(time_bias of a tile, its buckets if WIDE)."""
    if WIDE:
        bucket = _bucket(tl.abs((q_high - k_high) + (q_low - k_low)), edges, NUM_BUCKETS)
        return _look_up(table, bucket), bucket
    else:
        far, farther = _narrow_edges(q_offset, k_offset, first_edge, second_edge, BY_QUERY)
        return tl.where(farther, third, tl.where(far, second, first)), 0
