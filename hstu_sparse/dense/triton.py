"""Dense HSTU attention: Triton kernels, launchers, and their registration with torch.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key head size, V value head size.
m: query rows of a tile, n: its key rows. x: a score with its bias. y = SiLU(x).

How the work is laid out. One program owns one tile of queries (forward, dq) or of keys (dk and dv) of one head, and
walks the other side in blocks. `schedule` lists the tiles, the longest sequences first and in a sequence the tile with
the most work first, so that the last tiles to start are short ones; the list is made on the device. Programs past its
end stop at once. Since SiLU needs no normaliser there is no running maximum, no rescaling of the accumulator, and
nothing but the inputs is kept for the backward pass, which computes the scores anew.

The scale 1/N, and in the backward pass alpha, are applied once to the accumulators. With h = x/2 and u = tanh(h),
    y = h + h u,    2 dy/dx = 1 + u + h (1 - u^2)
take one special-function instruction for both.

Bias. A position bias is read per pair from `position_bias[t - s]`. For the time bias, timestamps come as pairs of fp32
(high and low part), whose differences are exact up to 2^24 seconds, and a bucket is found by comparing with the exact
bucket edges. How many buckets a tile touches is known from the least and the greatest timestamp of its two sides. A
tile of at most three is called narrow, and needs no logarithm and no look-up per pair; with ascending timestamps all
tiles are, but the few next to the diagonal. The run of narrow tiles on the far side is found before the loops, and
walked by the loop that has no masks; all others go to the loop that has them.
"""

import functools
import math

import torch
import triton
import triton.language as tl

from hstu_sparse._triton import COMPILED, INTERPRET, cdiv, padded_head, require_runnable, tanh_approx
from hstu_sparse.dense.reference import BUCKET_WIDTH, bucket_edges

MAX_BUCKETS = 145
POSITION_MARGIN = 1024
# Buckets per natural logarithm, as a factor of log2.
_PER_LOG2 = tl.constexpr(0.6931471805599453 / BUCKET_WIDTH)


@triton.jit
def dense_attention_schedule_kernel(
    seq_offsets, tiles, num_seqs, num_slots, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Program b writes the tiles (b, 0), (b, 1), ... of sequence b at its place, longest sequences first."""
    b = tl.program_id(0)
    begin = tl.load(seq_offsets + b)
    count = (tl.load(seq_offsets + b + 1) - begin + BLOCK - 1).to(tl.int32) // BLOCK
    before = 0
    total = 0
    for first in range(0, num_seqs, CHUNK):
        other = first + tl.arange(0, CHUNK)
        inside = other < num_seqs
        length = tl.load(seq_offsets + other + 1, inside, 0) - tl.load(seq_offsets + other, inside, 0)
        blocks = (length + BLOCK - 1).to(tl.int32) // BLOCK
        ahead = (blocks > count) | ((blocks == count) & (other < b))
        before += tl.sum(tl.where(ahead, blocks, 0), 0)
        total += tl.sum(blocks, 0)
    for first in range(0, count, CHUNK):
        block = first + tl.arange(0, CHUNK)
        slot = tiles + 2 * (before + block)
        tl.store(slot, tl.zeros_like(block) + b, block < count)
        tl.store(slot + 1, block, block < count)
    if b == 0:
        for first in range(total, num_slots, CHUNK):
            slot = first + tl.arange(0, CHUNK)
            tl.store(tiles + 2 * slot, tl.full([CHUNK], -1, tl.int32), slot < num_slots)


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
def _silu(s, bias, half_alpha, HAS_BIAS: tl.constexpr, FAST: tl.constexpr):
    """SiLU of a tile of scores."""
    h = s * half_alpha
    if HAS_BIAS:
        h += 0.5 * bias
    if FAST and COMPILED:
        return h * tanh_approx(h) + h
    else:
        return 2.0 * h / (1.0 + tl.exp(-2.0 * h))


@triton.jit
def _silu_and_slope(s, bias, half_alpha, HAS_BIAS: tl.constexpr, FAST: tl.constexpr):
    """(SiLU, twice its derivative less 1) of a tile of scores."""
    h = s * half_alpha
    if HAS_BIAS:
        h += 0.5 * bias
    if FAST and COMPILED:
        u = tanh_approx(h)
    else:
        u = 2.0 / (1.0 + tl.exp(-2.0 * h)) - 1.0
    z = h * u
    return h + z, (h - z * u) + u


@triton.jit
def _load_rows(
    base, start, rows, columns, stride, limit, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):
    """Rows start + rows of a matrix at `base`; zeros past `limit` (only MASKED looks) and past SIZE columns."""
    pointers = base + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    if MASKED:
        inside = (start + rows < limit)[:, None]
        if SIZE != WIDTH:
            inside = inside & (columns < SIZE)[None, :]
        return tl.load(pointers, inside, 0.0)
    elif SIZE != WIDTH:
        return tl.load(pointers, (columns < SIZE)[None, :], 0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _visible(t, s, length, history, window_size, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Mask of the pairs (t, s), two tensors that broadcast against each other."""
    mask = (s <= t) & (t < length)
    if HAS_TARGETS:
        mask = mask & ((s < history) | (s == t))
    if HAS_WINDOW:
        mask = mask & (tl.minimum(t, history) - tl.minimum(s, history) < window_size)
    return mask


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
def _opaque(x):
    """x, without the compiler's knowing it: what is computed from it is computed anew, not kept in registers."""
    if COMPILED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=True, pack=1)
    else:
        return x


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


@triton.jit
def _attend(
    acc, q, first, last, t, length, history, k, v, k_stride, v_stride, half_alpha, window_size,
    position_bias, time_bias, edges, steps, q_high, q_low, q_offset, k_times, k_offset, lowest_bucket, total,
    D: tl.constexpr, V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, NUM_BUCKETS: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, V] + the keys first .. last (multiples of BLOCK_N; `last` may pass the end when MASKED)."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, PAD_D)
    e = tl.arange(0, PAD_V)
    last_position = tl.minimum(history, length - 1)
    upcoming = 0
    next1, next2, next3, next4, next5 = 0, 0, 0.0, 0.0, 0.0
    if HAS_TIME and not MASKED:
        # What a tile needs is read one block ahead, and what that needs two ahead, so that no load is waited for.
        lowest = tl.load(lowest_bucket + first // BLOCK_N).to(tl.int32)
        upcoming = tl.load(lowest_bucket + first // BLOCK_N + 1).to(tl.int32)
        next1, next2, next3, next4, next5 = _narrow_scalars(lowest, time_bias, steps, NUM_BUCKETS)
    for start in range(first, last, BLOCK_N):
        key = _load_rows(k, start, n, d, k_stride, length, D, PAD_D, MASKED)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        s = start + n
        bias = 0.0
        if HAS_TIME:
            k_high, k_low, k_near = 0.0, 0.0, 0
            edge1, edge2, bias1, bias2, bias3 = 0, 0, 0.0, 0.0, 0.0
            if MASKED:
                k_high = tl.load(k_times + s, s < length, 0.0)[None, :]
                k_low = tl.load(k_times + total + s, s < length, 0.0)[None, :]
            else:
                k_near = tl.load(k_offset + s)[None, :]
                edge1, edge2, bias1, bias2, bias3 = next1, next2, next3, next4, next5
                next1, next2, next3, next4, next5 = _narrow_scalars(upcoming, time_bias, steps, NUM_BUCKETS)
                upcoming = tl.load(lowest_bucket + start // BLOCK_N + 2).to(tl.int32)
            bias, _ = _time_bias(
                q_high, q_low, q_offset, k_high, k_low, k_near, edge1, edge2, bias1, bias2, bias3,
                time_bias, edges, NUM_BUCKETS, True, MASKED,
            )  # fmt: skip
        if HAS_POSITION:
            bias += _position_bias(t[:, None], s[None, :], last_position, position_bias, HAS_TARGETS)
        weights = _silu(scores, bias, half_alpha, HAS_POSITION or HAS_TIME, FAST)
        if MASKED:
            mask = _visible(t[:, None], s[None, :], length, history, window_size, HAS_TARGETS, HAS_WINDOW)
            weights = tl.where(mask, weights, 0.0)
        value = _load_rows(v, start, n, e, v_stride, length, V, PAD_V, MASKED)
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _key_ranges(
    first_row, length, history, window_size, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Multiples of BLOCK_N (begin, full, diagonal, end): only the keys in full .. diagonal need no mask."""
    end = tl.minimum(first_row + BLOCK_M, length)
    diagonal = first_row + 1
    if HAS_TARGETS:
        diagonal = tl.minimum(diagonal, history)
    diagonal = diagonal // BLOCK_N * BLOCK_N
    begin = 0
    full = 0
    if HAS_WINDOW:
        begin = tl.maximum(tl.minimum(first_row, history) - window_size + 1, 0) // BLOCK_N * BLOCK_N
        full = tl.maximum(tl.minimum(end - 1, history) - window_size + 1 + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
        diagonal = tl.maximum(diagonal, begin)
        full = tl.minimum(tl.maximum(full, begin), diagonal)
    return begin, full, diagonal, end


@triton.jit
def dense_attention_fwd_kernel(
    q, k, v, out, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, out_stride_t, out_stride_h,
    seq_offsets, tiles, num_targets, window_size, half_alpha, inverse_n,
    position_bias, time_bias, edges, steps, q_times, q_offset, k_times, k_offset, lowest_bucket, row, total,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr,
    HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, NUM_BUCKETS: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head."""
    tile = tl.program_id(0) // H
    head = tl.program_id(0) % H
    b = tl.load(tiles + 2 * tile)
    if b < 0:
        return
    begin = tl.load(seq_offsets + b).to(tl.int64)
    length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
    block = (length + BLOCK_M - 1) // BLOCK_M - 1 - tl.load(tiles + 2 * tile + 1)
    history = length
    if HAS_TARGETS:
        history = length - tl.load(num_targets + b).to(tl.int32)
    first_row = block * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    t = first_row + m
    q += begin * q_stride_t + head * q_stride_h
    k += begin * k_stride_t + head * k_stride_h
    v += begin * v_stride_t + head * v_stride_h
    query = _load_rows(q, first_row, m, tl.arange(0, PAD_D), q_stride_t, length, D, PAD_D, True)
    q_high, q_low, q_near = 0.0, 0.0, 0
    if HAS_TIME:
        q_high = tl.load(q_times + begin + t, t < length, 0.0)[:, None]
        q_low = tl.load(q_times + total + begin + t, t < length, 0.0)[:, None]
        q_near = tl.load(q_offset + begin + t, t < length, 0)[:, None]
        k_times += begin
        k_offset += begin
        lowest_bucket += (begin // BLOCK_M + b + block) * row

    first, full, diagonal, end = _key_ranges(
        first_row, length, history, window_size, HAS_TARGETS, HAS_WINDOW, BLOCK_M, BLOCK_N
    )
    if HAS_TIME:
        diagonal = _narrow(full, diagonal, lowest_bucket, BLOCK_N, True)
    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)
    if HAS_WINDOW:  # noqa: SIM102  one is known to the compiler
        if first < full:
            acc = _attend(
                acc, query, first, full, t, length, history, k, v, k_stride_t, v_stride_t, half_alpha, window_size,
                position_bias, time_bias, edges, steps, q_high, q_low, q_near, k_times, k_offset, lowest_bucket, total,
                D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME, NUM_BUCKETS, FAST, PRECISION, True, BLOCK_N,
                PAD_D, PAD_V,
            )  # fmt: skip
    if full < diagonal:
        acc = _attend(
            acc, query, full, diagonal, t, length, history, k, v, k_stride_t, v_stride_t, half_alpha, window_size,
            position_bias, time_bias, edges, steps, q_high, q_low, q_near, k_times, k_offset, lowest_bucket, total,
            D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME, NUM_BUCKETS, FAST, PRECISION, False, BLOCK_N, PAD_D,
            PAD_V,
        )  # fmt: skip
    if diagonal < end:
        acc = _attend(
            acc, query, diagonal, end, t, length, history, k, v, k_stride_t, v_stride_t, half_alpha, window_size,
            position_bias, time_bias, edges, steps, q_high, q_low, q_near, k_times, k_offset, lowest_bucket, total,
            D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME, NUM_BUCKETS, FAST, PRECISION, True, BLOCK_N, PAD_D,
            PAD_V,
        )  # fmt: skip
    e = tl.arange(0, PAD_V)
    out += (begin + first_row) * out_stride_t + head * out_stride_h
    inside = (t < length)[:, None] & (e < V_OUT)[None, :]
    tl.store(out + m[:, None] * out_stride_t + e[None, :], (acc * inverse_n).to(out.dtype.element_ty), inside)


@triton.jit
def _add_diagonals(grad, ds, first_row, start, length, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """grad[d] += the sum of ds [BLOCK_M, BLOCK_N] along its diagonal t - s = d.

    Row i is rotated by i, which turns the diagonals into columns; a column then holds pieces of neighbouring diagonals,
    BLOCK_N apart, one piece above and one below the place where the rotation wraps.
    """
    REPEATS: tl.constexpr = BLOCK_M // BLOCK_N if BLOCK_M > BLOCK_N else 1
    row = tl.arange(0, BLOCK_M)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    rotated = tl.gather(ds, (row - column) & (BLOCK_N - 1), 1)
    wraps = (row & (BLOCK_N - 1)) < column
    above = tl.sum(tl.reshape(tl.where(wraps, 0.0, rotated), [REPEATS, BLOCK_M // REPEATS, BLOCK_N]), 1)
    below = tl.sum(tl.reshape(tl.where(wraps, rotated, 0.0), [REPEATS, BLOCK_M // REPEATS, BLOCK_N]), 1)
    distance = first_row - start + column + BLOCK_N * tl.arange(0, REPEATS)[:, None]
    tl.atomic_add(grad + distance, above * scale, (distance >= 0) & (distance < length), sem="relaxed")
    distance -= BLOCK_N
    tl.atomic_add(grad + distance, below * scale, (distance >= 0) & (distance < length), sem="relaxed")


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _add_narrow_time_grad(grad, ds, far, farther, lowest, scale, NUM_BUCKETS: tl.constexpr):
    """grad[bucket] += the sum of ds over the pairs in that bucket, for a narrow tile."""
    sums = (ds, tl.where(far, ds, 0.0), tl.where(farther, ds, 0.0))
    everything, first, second = tl.reduce(tl.reduce(sums, 1, _add_three), 0, _add_three)
    tl.atomic_add(grad + lowest, (everything - first) * scale, sem="relaxed")
    tl.atomic_add(grad + tl.minimum(lowest + 1, NUM_BUCKETS), (first - second) * scale, sem="relaxed")
    tl.atomic_add(grad + tl.minimum(lowest + 2, NUM_BUCKETS), second * scale, sem="relaxed")


# A histogram in shared memory, which Triton has no words for: one table for each of the 32 lanes of a warp, so that the
# lanes neither meet in a bank nor at an address. The variable is declared inside the assembly, in the program's static
# shared memory. The dynamic part, which Triton lays out, comes after it and wants 1 KB alignment for its swizzled
# tiles: hence sizes in whole KB.


@triton.jit
def _histogram_open(token):
    """The shared-memory address of [146, 32] fp32, zeroed. Called once per program; `token` is any int32 scalar."""
    base = tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 hstu_histogram[19456]; mov.u32 $0, hstu_histogram; }", "=r,r", [token], tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    tl.inline_asm_elementwise(
        """{
            .reg .pred p;
            .reg .u32 a;
            setp.lt.u32 p, $2, 4672;
            mad.lo.u32 a, $2, 4, $1;
            @p st.shared.f32 [a], 0f00000000;
            mov.u32 $0, 0;
        }""",
        "=r,r,r", [base, tl.arange(0, 8192)], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.debug_barrier()
    return base


@triton.jit
def _histogram_add(base, bucket, value):
    """histogram[bucket] += value for a tile. Four neighbours that share a bucket, as most do, are added first."""
    tl.inline_asm_elementwise(
        """{
            .reg .u32 lane, a;
            .reg .f32 sum;
            .reg .pred same;
            mov.u32 lane, %tid.x;
            and.b32 lane, lane, 31;
            mad.lo.u32 lane, lane, 4, $1;
            setp.eq.u32 same, $5, $6;
            setp.eq.and.u32 same, $5, $7, same;
            setp.eq.and.u32 same, $5, $8, same;
            mad.lo.u32 a, $5, 128, lane;
            @!same bra APART;
            add.f32 sum, $9, $10;
            add.f32 sum, sum, $11;
            add.f32 sum, sum, $12;
            red.shared.add.f32 [a], sum;
            bra DONE;
            APART:
            red.shared.add.f32 [a], $9;
            mad.lo.u32 a, $6, 128, lane;
            red.shared.add.f32 [a], $10;
            mad.lo.u32 a, $7, 128, lane;
            red.shared.add.f32 [a], $11;
            mad.lo.u32 a, $8, 128, lane;
            red.shared.add.f32 [a], $12;
            DONE:
            mov.u32 $0, 0;
        }""",
        "=r,r,r,r,r,r,r,r,r,f,f,f,f", [base, bucket, value], tl.int8, is_pure=False, pack=4,
    )  # fmt: skip


@triton.jit
def _histogram_close(base, grad, scale, NUM_BUCKETS: tl.constexpr):
    """grad[bucket] += scale * histogram[bucket]."""
    tl.debug_barrier()
    copies = tl.inline_asm_elementwise(
        """{
            .reg .pred p;
            .reg .u32 a;
            setp.lt.u32 p, $2, 4672;
            mad.lo.u32 a, $2, 4, $1;
            mov.f32 $0, 0f00000000;
            @p ld.shared.f32 $0, [a];
        }""",
        "=&f,r,r", [base, tl.arange(0, 8192)], tl.float32, is_pure=False, pack=1,
    )  # fmt: skip
    bucket = tl.arange(0, 256)
    total = tl.sum(tl.reshape(copies, [256, 32]), 1) * scale
    tl.atomic_add(grad + bucket, total, (bucket <= NUM_BUCKETS) & (total != 0.0), sem="relaxed")


# The sums along the diagonals, in shared memory too. A tile of queries meets the diagonals in descending order, and of
# the BLOCK_M + BLOCK_N - 1 that a block of keys touches, BLOCK_N are touched for the last time: a ring of 256 cells
# holds those in progress. Cells are integers: shared memory adds those in one instruction, floats only in a loop of
# compare-and-swap; and integers add up to the same sum in any order. A term is rounded to 22 bits of its upper bound, a
# cell takes at most 128 terms. Four copies, one for each lane of a quad, 266 words apart, keep the lanes of a warp in
# different banks: lane l of the tensor cores' layout holds t - s = l // 4 - 2 (l % 4) + const.


@triton.jit
def _ring_open(token):
    """The shared-memory address of the ring, zeroed. Called once per program; `token` is any int32 scalar."""
    base = tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 hstu_ring[5120]; mov.u32 $0, hstu_ring; }", "=r,r", [token], tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
    tl.inline_asm_elementwise(
        """{
            .reg .pred p;
            .reg .u32 a;
            setp.lt.u32 p, $2, 1064;
            mad.lo.u32 a, $2, 4, $1;
            @p st.shared.u32 [a], 0;
            mov.u32 $0, 0;
        }""",
        "=r,r,r", [base, tl.arange(0, 2048)], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.debug_barrier()
    return base


@triton.jit
def _barrier(token):
    """A barrier of the program's threads. Triton's own keeps the loop around it from being pipelined."""
    tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r,r", [token], tl.int32, is_pure=False, pack=1)


@triton.jit
def _ring_add(base, distance, value, to_exact):
    """ring[distance] += value, rounded."""
    tl.inline_asm_elementwise(
        """{
            .reg .u32 a, copy;
            .reg .f32 f;
            .reg .b32 n;
            mov.u32 copy, %tid.x;
            and.b32 copy, copy, 3;
            mad.lo.u32 copy, copy, 1064, $1;
            and.b32 a, $2, 255;
            mad.lo.u32 a, a, 4, copy;
            fma.rn.f32 f, $3, $4, 0f4B400000;
            mov.b32 n, f;
            sub.u32 n, n, 0x4B400000;
            red.shared.add.u32 [a], n;
            mov.u32 $0, 0;
        }""",
        "=r,r,r,f,f", [base, distance, value, to_exact], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _ring_flush(base, grad, last, length, COUNT: tl.constexpr):
    """Moves the COUNT cells of the distances last - COUNT + 1 .. last to grad [N] int64."""
    cell = tl.arange(0, 4 * COUNT)
    distance = last - cell % COUNT
    value = tl.inline_asm_elementwise(
        """{
            .reg .u32 a;
            and.b32 a, $2, 255;
            mad.lo.u32 a, a, 4, $1;
            mad.lo.u32 a, $3, 1064, a;
            atom.shared.exch.b32 $0, [a], 0;
        }""",
        "=r,r,r,r", [base, distance, cell // COUNT], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    use = (distance >= 0) & (distance < length) & (value != 0)
    tl.atomic_add(grad + distance, value.to(tl.int64), use, sem="relaxed")


@triton.jit
def _attend_dq(
    acc, q, do, first, last, t, first_row, length, history, k, v, k_stride, v_stride, half_alpha, window_size, scale,
    position_bias, time_bias, position_grad, exact_grad, to_exact, ring, time_grad, histogram, edges, steps, q_high,
    q_low, q_offset, k_times, k_offset, lowest_bucket, total,
    D: tl.constexpr, V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, NUM_BUCKETS: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, D] + the keys first .. last, and the gradients of the bias tables."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, PAD_D)
    e = tl.arange(0, PAD_V)
    last_position = tl.minimum(history, length - 1)
    upcoming = 0
    next1, next2, next3, next4, next5 = 0, 0, 0.0, 0.0, 0.0
    if HAS_TIME and not MASKED:
        # What a tile needs is read one block ahead, and what that needs two ahead, so that no load is waited for.
        begin = tl.load(lowest_bucket + first // BLOCK_N).to(tl.int32)
        upcoming = tl.load(lowest_bucket + first // BLOCK_N + 1).to(tl.int32)
        next1, next2, next3, next4, next5 = _narrow_scalars(begin, time_bias, steps, NUM_BUCKETS)
    for start in range(first, last, BLOCK_N):
        key = _load_rows(k, start, n, d, k_stride, length, D, PAD_D, MASKED)
        value = _load_rows(v, start, n, e, v_stride, length, V, PAD_V, MASKED)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
        s = start + n
        bias = 0.0
        if HAS_TIME:
            k_high, k_low, k_near = 0.0, 0.0, 0
            lowest = 0
            edge1, edge2, bias1, bias2, bias3 = 0, 0, 0.0, 0.0, 0.0
            if MASKED:
                k_high = tl.load(k_times + s, s < length, 0.0)[None, :]
                k_low = tl.load(k_times + total + s, s < length, 0.0)[None, :]
            else:
                k_near = tl.load(k_offset + s)[None, :]
                # Not handed on from the iteration before: a value that is keeps the loop from being pipelined.
                lowest = tl.load(lowest_bucket + start // BLOCK_N).to(tl.int32)
                edge1, edge2, bias1, bias2, bias3 = next1, next2, next3, next4, next5
                next1, next2, next3, next4, next5 = _narrow_scalars(upcoming, time_bias, steps, NUM_BUCKETS)
                upcoming = tl.load(lowest_bucket + start // BLOCK_N + 2).to(tl.int32)
            bias, bucket = _time_bias(
                q_high, q_low, q_offset, k_high, k_low, k_near, edge1, edge2, bias1, bias2, bias3,
                time_bias, edges, NUM_BUCKETS, True, MASKED,
            )  # fmt: skip
        if HAS_POSITION:
            bias += _position_bias(t[:, None], s[None, :], last_position, position_bias, HAS_TARGETS)
        _, slope = _silu_and_slope(scores, bias, half_alpha, HAS_POSITION or HAS_TIME, FAST)
        ds = dp * slope + dp
        if MASKED:
            mask = _visible(t[:, None], s[None, :], length, history, window_size, HAS_TARGETS, HAS_WINDOW)
            ds = tl.where(mask, ds, 0.0)
        acc = tl.dot(ds.to(key.dtype), key, acc, input_precision=PRECISION)
        if HAS_POSITION:
            along = ds
            if HAS_TARGETS:
                # Candidates all stand at the position `history`: for them a diagonal is a column.
                candidate = (t >= history)[:, None]
                column = tl.sum(tl.where(candidate, ds, 0.0), 0) * scale
                seen = (s < length) & (column != 0.0)
                tl.atomic_add(position_grad + tl.maximum(history - s, 0), column, seen, sem="relaxed")
                along = tl.where(candidate, 0.0, ds)
            if FAST and COMPILED:
                _ring_add(ring, t[:, None] - s[None, :], along, to_exact)
                _barrier(length)
                # No barrier after it: these cells are next used two blocks on.
                _ring_flush(ring, exact_grad, first_row - start + BLOCK_M - 1, length, BLOCK_N)
            else:
                _add_diagonals(position_grad, along, first_row, start, length, scale, BLOCK_M, BLOCK_N)
        if HAS_TIME:
            if not MASKED:
                far, farther = _narrow_edges(_opaque(q_offset), k_near, edge1, edge2, True)
                _add_narrow_time_grad(time_grad, ds, far, farther, lowest, scale, NUM_BUCKETS)
            elif COMPILED:
                _histogram_add(histogram, bucket, ds)
            else:
                tl.atomic_add(time_grad + bucket, ds * scale)
    return acc


@triton.jit
def dense_attention_bwd_dq_kernel(
    q, k, v, do, dq, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, do_stride_t, do_stride_h,
    dq_stride_t, dq_stride_h, seq_offsets, tiles, num_targets, window_size, half_alpha, half_inverse_n, alpha,
    position_bias, time_bias, position_grad, exact_grad, exact_scale, time_grad, edges, steps, q_times, q_offset,
    k_times, k_offset, lowest_bucket, row, total,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr,
    HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, NUM_BUCKETS: tl.constexpr, COPIES: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    PAD_V: tl.constexpr,
):  # fmt: skip
    """One program: dq of BLOCK_M queries of one head, and their part of the bias tables' gradients."""
    tile = tl.program_id(0) // H
    head = tl.program_id(0) % H
    b = tl.load(tiles + 2 * tile)
    if b < 0:
        return
    begin = tl.load(seq_offsets + b).to(tl.int64)
    length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
    block = (length + BLOCK_M - 1) // BLOCK_M - 1 - tl.load(tiles + 2 * tile + 1)
    history = length
    if HAS_TARGETS:
        history = length - tl.load(num_targets + b).to(tl.int32)
    first_row = block * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PAD_D)
    t = first_row + m
    q += begin * q_stride_t + head * q_stride_h
    k += begin * k_stride_t + head * k_stride_h
    v += begin * v_stride_t + head * v_stride_h
    do += begin * do_stride_t + head * do_stride_h
    query = _load_rows(q, first_row, m, d, q_stride_t, length, D, PAD_D, True)
    dout = _load_rows(do, first_row, m, tl.arange(0, PAD_V), do_stride_t, length, V, PAD_V, True)
    histogram = 0
    ring = 0
    to_exact = 0.0
    if HAS_POSITION and FAST and COMPILED:
        ring = _ring_open(length)
        to_exact = tl.load(exact_scale)
    q_high, q_low, q_near = 0.0, 0.0, 0
    if HAS_TIME:
        q_high = tl.load(q_times + begin + t, t < length, 0.0)[:, None]
        q_low = tl.load(q_times + total + begin + t, t < length, 0.0)[:, None]
        q_near = tl.load(q_offset + begin + t, t < length, 0)[:, None]
        k_times += begin
        k_offset += begin
        lowest_bucket += (begin // BLOCK_M + b + block) * row
        # Several copies of the small table keep the programs' additions from queueing at one address.
        time_grad += (tl.program_id(0) % COPIES) * (NUM_BUCKETS + 1)
        if COMPILED:
            histogram = _histogram_open(length)

    first, full, diagonal, end = _key_ranges(
        first_row, length, history, window_size, HAS_TARGETS, HAS_WINDOW, BLOCK_M, BLOCK_N
    )
    if HAS_TIME:
        diagonal = _narrow(full, diagonal, lowest_bucket, BLOCK_N, True)
    acc = tl.zeros([BLOCK_M, PAD_D], tl.float32)
    if HAS_WINDOW:  # noqa: SIM102  one is known to the compiler
        if first < full:
            acc = _attend_dq(
                acc, query, dout, first, full, t, first_row, length, history, k, v, k_stride_t, v_stride_t, half_alpha,
                window_size, half_inverse_n, position_bias, time_bias, position_grad, exact_grad, to_exact, ring,
                time_grad, histogram, edges, steps, q_high, q_low, q_near, k_times, k_offset, lowest_bucket, total, D,
                V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME, NUM_BUCKETS, FAST, PRECISION, True, BLOCK_M,
                BLOCK_N, PAD_D, PAD_V,
            )  # fmt: skip
    if full < diagonal:
        acc = _attend_dq(
            acc, query, dout, full, diagonal, t, first_row, length, history, k, v, k_stride_t, v_stride_t, half_alpha,
            window_size, half_inverse_n, position_bias, time_bias, position_grad, exact_grad, to_exact, ring, time_grad,
            histogram, edges, steps, q_high, q_low, q_near, k_times, k_offset, lowest_bucket, total, D, V, HAS_TARGETS,
            HAS_WINDOW, HAS_POSITION, HAS_TIME, NUM_BUCKETS, FAST, PRECISION, False, BLOCK_M, BLOCK_N, PAD_D, PAD_V,
        )  # fmt: skip
    if diagonal < end:
        acc = _attend_dq(
            acc, query, dout, diagonal, end, t, first_row, length, history, k, v, k_stride_t, v_stride_t, half_alpha,
            window_size, half_inverse_n, position_bias, time_bias, position_grad, exact_grad, to_exact, ring, time_grad,
            histogram, edges, steps, q_high, q_low, q_near, k_times, k_offset, lowest_bucket, total, D, V, HAS_TARGETS,
            HAS_WINDOW, HAS_POSITION, HAS_TIME, NUM_BUCKETS, FAST, PRECISION, True, BLOCK_M, BLOCK_N, PAD_D, PAD_V,
        )  # fmt: skip
    if HAS_POSITION and FAST and COMPILED:
        tl.debug_barrier()
        _ring_flush(ring, exact_grad, first_row - (end - 1) // BLOCK_N * BLOCK_N + BLOCK_M - 1, length, 256)
    if HAS_TIME and COMPILED:
        _histogram_close(histogram, time_grad, half_inverse_n, NUM_BUCKETS)
    dq += (begin + first_row) * dq_stride_t + head * dq_stride_h
    inside = (t < length)[:, None] & (d < D_OUT)[None, :]
    result = acc * (alpha * half_inverse_n)
    tl.store(dq + m[:, None] * dq_stride_t + d[None, :], result.to(dq.dtype.element_ty), inside)


@triton.jit
def _attend_dkv(
    dk, dv, k, v, first, last, s, length, history, q, do, q_stride, do_stride, half_alpha, window_size,
    position_bias, time_bias, edges, steps, k_high, k_low, k_offset, q_times, q_offset, lowest_bucket, total,
    D: tl.constexpr, V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, NUM_BUCKETS: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr,
    PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """dk [BLOCK_N, D] and dv [BLOCK_N, V] + the queries first .. last; tiles are transposed, keys x queries."""
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PAD_D)
    e = tl.arange(0, PAD_V)
    last_position = tl.minimum(history, length - 1)
    upcoming = 0
    next1, next2, next3, next4, next5 = 0, 0, 0.0, 0.0, 0.0
    if HAS_TIME and not MASKED:
        lowest = tl.load(lowest_bucket + first // BLOCK_M).to(tl.int32)
        upcoming = tl.load(lowest_bucket + first // BLOCK_M + 1).to(tl.int32)
        next1, next2, next3, next4, next5 = _narrow_scalars(lowest, time_bias, steps, NUM_BUCKETS)
    for start in range(first, last, BLOCK_M):
        query = _load_rows(q, start, m, d, q_stride, length, D, PAD_D, MASKED)
        dout = _load_rows(do, start, m, e, do_stride, length, V, PAD_V, MASKED)
        scores = tl.dot(k, tl.trans(query), input_precision=PRECISION)
        t = start + m
        bias = 0.0
        if HAS_TIME:
            q_high, q_low, q_near = 0.0, 0.0, 0
            edge1, edge2, bias1, bias2, bias3 = 0, 0, 0.0, 0.0, 0.0
            if MASKED:
                q_high = tl.load(q_times + t, t < length, 0.0)[None, :]
                q_low = tl.load(q_times + total + t, t < length, 0.0)[None, :]
            else:
                q_near = tl.load(q_offset + t)[None, :]
                edge1, edge2, bias1, bias2, bias3 = next1, next2, next3, next4, next5
                next1, next2, next3, next4, next5 = _narrow_scalars(upcoming, time_bias, steps, NUM_BUCKETS)
                upcoming = tl.load(lowest_bucket + start // BLOCK_M + 2).to(tl.int32)
            bias, _ = _time_bias(
                q_high, q_low, q_near, k_high, k_low, k_offset, edge1, edge2, bias1, bias2, bias3,
                time_bias, edges, NUM_BUCKETS, False, MASKED,
            )  # fmt: skip
        if HAS_POSITION:
            bias += _position_bias(t[None, :], s[:, None], last_position, position_bias, HAS_TARGETS)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        weights, slope = _silu_and_slope(scores, bias, half_alpha, HAS_POSITION or HAS_TIME, FAST)
        if MASKED:
            mask = _visible(t[None, :], s[:, None], length, history, window_size, HAS_TARGETS, HAS_WINDOW)
            weights = tl.where(mask, weights, 0.0)
            slope = tl.where(mask, slope, -1.0)
        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
        ds = (dp * slope + dp).to(query.dtype)
        dk = tl.dot(ds, query, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def dense_attention_bwd_dkv_kernel(
    q, k, v, do, dk, dv, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, do_stride_t,
    do_stride_h, dk_stride_t, dk_stride_h, dv_stride_t, dv_stride_h, seq_offsets, tiles,
    num_targets, window_size, half_alpha, half_inverse_n, alpha, position_bias, time_bias, edges, steps, q_times,
    q_offset, k_times, k_offset, lowest_bucket, row, total,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr,
    HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, NUM_BUCKETS: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    PAD_V: tl.constexpr,
):  # fmt: skip
    """One program: dk and dv of BLOCK_N keys of one head."""
    tile = tl.program_id(0) // H
    head = tl.program_id(0) % H
    b = tl.load(tiles + 2 * tile)
    if b < 0:
        return
    begin = tl.load(seq_offsets + b).to(tl.int64)
    length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
    history = length
    if HAS_TARGETS:
        history = length - tl.load(num_targets + b).to(tl.int32)
    first_row = tl.load(tiles + 2 * tile + 1) * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, PAD_D)
    e = tl.arange(0, PAD_V)
    s = first_row + n
    q += begin * q_stride_t + head * q_stride_h
    k += begin * k_stride_t + head * k_stride_h
    v += begin * v_stride_t + head * v_stride_h
    do += begin * do_stride_t + head * do_stride_h
    key = _load_rows(k, first_row, n, d, k_stride_t, length, D, PAD_D, True)
    value = _load_rows(v, first_row, n, e, v_stride_t, length, V, PAD_V, True)
    k_high, k_low, k_near = 0.0, 0.0, 0
    if HAS_TIME:
        k_high = tl.load(k_times + begin + s, s < length, 0.0)[:, None]
        k_low = tl.load(k_times + total + begin + s, s < length, 0.0)[:, None]
        k_near = tl.load(k_offset + begin + s, s < length, 0)[:, None]
        q_times += begin
        q_offset += begin
        lowest_bucket += (begin // BLOCK_N + b + first_row // BLOCK_N) * row

    # Queries: masked up to `full`, free of masks up to `free`, masked up to `end`; multiples of BLOCK_M but the last.
    end = length
    last_key = first_row + BLOCK_N - 1
    full = (last_key + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    free = length // BLOCK_M * BLOCK_M
    if HAS_TARGETS:
        if first_row >= history:
            end = tl.minimum(first_row + BLOCK_N, length)
        if last_key >= history:
            free = 0
    if HAS_WINDOW:
        seen_last = tl.minimum(last_key, history - 1) + window_size
        if seen_last <= history:
            end = tl.minimum(end, tl.maximum(seen_last, tl.minimum(first_row + BLOCK_N, length)))
        if history - first_row >= window_size:
            free = tl.minimum(free, (first_row + window_size) // BLOCK_M * BLOCK_M)
    begin_row = first_row // BLOCK_M * BLOCK_M
    full = tl.minimum(full, (end + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    free = tl.maximum(tl.minimum(free, end), full)
    if HAS_TIME:
        full = _narrow(full, free, lowest_bucket, BLOCK_M, False)

    acc_k = tl.zeros([BLOCK_N, PAD_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, PAD_V], tl.float32)
    acc_k, acc_v = _attend_dkv(
        acc_k, acc_v, key, value, begin_row, tl.minimum(full, end), s, length, history, q, do, q_stride_t,
        do_stride_t, half_alpha, window_size, position_bias, time_bias, edges, steps, k_high, k_low,
        k_near, q_times, q_offset, lowest_bucket, total, D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME,
        NUM_BUCKETS, FAST, PRECISION, True, BLOCK_M, PAD_D, PAD_V,
    )  # fmt: skip
    acc_k, acc_v = _attend_dkv(
        acc_k, acc_v, key, value, full, free, s, length, history, q, do, q_stride_t,
        do_stride_t, half_alpha, window_size, position_bias, time_bias, edges, steps, k_high, k_low,
        k_near, q_times, q_offset, lowest_bucket, total, D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME,
        NUM_BUCKETS, FAST, PRECISION, False, BLOCK_M, PAD_D, PAD_V,
    )  # fmt: skip
    acc_k, acc_v = _attend_dkv(
        acc_k, acc_v, key, value, free, end, s, length, history, q, do, q_stride_t,
        do_stride_t, half_alpha, window_size, position_bias, time_bias, edges, steps, k_high, k_low,
        k_near, q_times, q_offset, lowest_bucket, total, D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME,
        NUM_BUCKETS, FAST, PRECISION, True, BLOCK_M, PAD_D, PAD_V,
    )  # fmt: skip
    inside = (s < length)[:, None]
    dk += (begin + first_row) * dk_stride_t + head * dk_stride_h
    result = (acc_k * (alpha * half_inverse_n)).to(dk.dtype.element_ty)
    tl.store(dk + n[:, None] * dk_stride_t + d[None, :], result, inside & (d < D_OUT)[None, :])
    dv += (begin + first_row) * dv_stride_t + head * dv_stride_h
    result = (acc_v * (2.0 * half_inverse_n)).to(dv.dtype.element_ty)
    tl.store(dv + n[:, None] * dv_stride_t + e[None, :], result, inside & (e < V_OUT)[None, :])


def schedule(seq_offsets: torch.Tensor, total: int, block: int) -> torch.Tensor:
    """[slots, 2] int32: (sequence, block) of every tile, longest sequences first, then (-1, *) up to the bound.

    The number of slots bounds the number of tiles without knowing the lengths: T // block + B.
    """
    num_seqs = seq_offsets.shape[0] - 1
    slots = total // block + num_seqs
    tiles = torch.empty(slots, 2, dtype=torch.int32, device=seq_offsets.device)
    chunk = min(1024, max(16, triton.next_power_of_2(num_seqs)))
    dense_attention_schedule_kernel[(num_seqs,)](seq_offsets, tiles, num_seqs, slots, BLOCK=block, CHUNK=chunk)
    return tiles


@functools.lru_cache(maxsize=64)
def _edges(num_buckets: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_buckets + 2] fp32 and int64: edge k is the least value in bucket k, the last is beyond every difference."""
    edges = bucket_edges(num_buckets)
    steps = [min(math.ceil(edge), 2**62) if edge < math.inf else 2**62 for edge in edges]
    return (
        torch.tensor([-math.inf, *edges, math.inf], dtype=torch.float32, device=device),
        torch.tensor([0, *steps, 2**62], dtype=torch.int64, device=device),
    )


def fwd_config(pad_d: int, pad_v: int, dtype: torch.dtype, biased: bool, arch: int) -> dict:
    """Tile sizes, warps and pipeline stages of the forward kernel: chosen, not tuned at run time, so that no batch pays
    for tuning. Measured on an H200 (docs/performance.md); for sm_80 only made to fit.
    """
    if dtype == torch.float32:
        return dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2)
    if max(pad_d, pad_v) > 128:
        return dict(BLOCK_M=64 if arch < 90 else 128, BLOCK_N=64, num_warps=8, num_stages=2 if arch >= 90 else 1)
    if arch < 90:
        return dict(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)
    if biased:
        return dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3)
    return dict(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=3)


def bwd_dq_config(pad_d: int, pad_v: int, dtype: torch.dtype, biased: bool, arch: int) -> dict:
    """The same for the kernel of dq and of the bias tables' gradients. Its ring asks for 4 * BLOCK_N >= threads."""
    both = pad_d + pad_v
    if dtype == torch.float32:
        if both <= 64:
            return dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1)
        return dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)
    if max(pad_d, pad_v) > 128 or both <= 64:
        return dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2 if arch >= 90 or both <= 64 else 1)
    if arch < 90:
        return dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2 if not biased else 1)
    return dict(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3)


def bwd_dkv_config(pad_d: int, pad_v: int, dtype: torch.dtype, timed: bool, arch: int) -> dict:
    """The same for the kernel of dk and dv; `timed`: with a time bias (a position bias alone changes nothing)."""
    if dtype == torch.float32:
        return dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)
    if max(pad_d, pad_v) > 128:
        return dict(BLOCK_M=32, BLOCK_N=64, num_warps=8, num_stages=1 if arch < 90 else 2)
    if arch < 90:
        return dict(BLOCK_M=32, BLOCK_N=64, num_warps=4, num_stages=2)
    if timed:
        return dict(BLOCK_M=32, BLOCK_N=128, num_warps=8, num_stages=3)
    return dict(BLOCK_M=64, BLOCK_N=128, num_warps=8, num_stages=3)


def _precision(dtype: torch.dtype) -> str:
    """fp32 products are exact unless the user allowed tf32 for torch's own."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x with rows that can be read 16 bytes at a time: a copy, heads padded with zeros, where they cannot.

    The copy costs less than reading a head of, say, 25 two bytes at a time, once for every block.
    """
    size = x.shape[2]
    if size % 16:
        return torch.nn.functional.pad(x, (0, 16 - size % 16))
    aligned = x.stride(0) % 16 == 0 and x.stride(1) % 16 == 0 and x.data_ptr() % 16 == 0
    return x if x.stride(2) == 1 and aligned else x.contiguous()


def _launch_with_static_memory(kernel, grid, *args, **kwargs):
    """kernel[grid](*args, **kwargs) for a kernel with static shared memory, which Triton does not know of.

    Triton asks the driver for more than 48 KB only if the dynamic part alone exceeds that. If the sum does, the first
    launch is refused; then it is asked for here, once per compiled kernel.
    """
    try:
        return kernel[grid](*args, **kwargs)
    except RuntimeError as error:
        if "invalid argument" not in str(error):
            raise
    import ctypes

    compiled = kernel.warmup(*args, grid=grid, **kwargs)
    compiled._init_handles()
    max_dynamic_shared_size = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    status = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
        ctypes.c_void_p(compiled.function), max_dynamic_shared_size, compiled.metadata.shared
    )
    if status:
        raise RuntimeError(f"cuFuncSetAttribute failed with CUDA error {status} for {kernel.__name__}")
    return kernel[grid](*args, **kwargs)


class _Launch:
    """What the forward and backward launches share: arguments of the operator in the kernels' terms."""

    def __init__(
        self, q, k, v, seq_offsets, max_seq_len, alpha, num_targets, window_size, position_bias, time_bias, timestamps,
        query_timestamps,
    ):  # fmt: skip
        require_runnable(q, "hstu_attention")
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(
                f"hstu_attention: the kernels take fp16, bf16 and fp32, got {q.dtype}; use backend='reference'"
            )
        for name, size in (("D", q.shape[2]), ("V", v.shape[2])):
            if not 1 <= size <= 256:
                raise ValueError(
                    f"hstu_attention: the kernels take head sizes up to 256, got {name}={size}; use backend='reference'"
                )
        self.d_out, self.v_out = q.shape[2], v.shape[2]
        self.q, self.k, self.v = _rows(q), _rows(k), _rows(v)
        self.seq_offsets, self.max_seq_len, self.alpha = seq_offsets.contiguous(), max_seq_len, alpha
        self.num_targets, self.window_size = num_targets, window_size
        self.table_dtypes = [None if table is None else table.dtype for table in (position_bias, time_bias)]
        self.time_bias = None if time_bias is None else time_bias.to(torch.float32).contiguous()
        self.position_bias = None
        if position_bias is not None:
            margin = (POSITION_MARGIN, 0)
            self.position_bias = torch.nn.functional.pad(position_bias.float(), margin)[POSITION_MARGIN:]
        self.timestamps, self.query_timestamps = timestamps, query_timestamps
        self.total, self.heads, self.d = self.q.shape
        self.v_size = self.v.shape[2]
        self.empty = self.total == 0 or seq_offsets.shape[0] == 1
        self.biased = position_bias is not None or time_bias is not None
        # Differences of int64 seconds never get past bucket 145, so a longer table has a tail that is never read.
        self.num_buckets = 0 if time_bias is None else min(time_bias.shape[0] - 1, MAX_BUCKETS)
        self.edges, self.steps = None, None
        self._times: dict = {}
        if time_bias is not None and not self.empty:
            self.edges, self.steps = _edges(self.num_buckets, q.device)

    def constants(self) -> dict:
        return dict(
            H=self.heads,
            D=self.d,
            V=self.v_size,
            D_OUT=self.d_out,
            V_OUT=self.v_out,
            HAS_TARGETS=self.num_targets is not None,
            HAS_WINDOW=self.window_size > 0,
            HAS_POSITION=self.position_bias is not None,
            HAS_TIME=self.time_bias is not None,
            NUM_BUCKETS=self.num_buckets,
            FAST=self.q.dtype != torch.float32,
            PRECISION=_precision(self.q.dtype),
            PAD_D=padded_head(self.d),
            PAD_V=padded_head(self.v_size),
        )

    def choose(self, config, biased: bool) -> dict:
        arch = 90 if not self.q.is_cuda else 10 * torch.cuda.get_device_capability(self.q.device)[0]
        return config(padded_head(self.d), padded_head(self.v_size), self.q.dtype, biased, arch)

    def times(self, which: torch.Tensor, block: int) -> tuple:
        """(fp32 pairs [2, T], int32 offsets [T], least and greatest of each block) of `which` timestamps."""
        key = which.data_ptr(), block
        if key not in self._times:
            num_seqs, device = self.seq_offsets.shape[0] - 1, which.device
            split = torch.empty(2, self.total, dtype=torch.float32, device=device)
            offset = torch.empty(self.total, dtype=torch.int32, device=device)
            bounds = torch.empty(2, self.total // block + num_seqs, dtype=torch.int64, device=device)
            chunk = max(block, min(1024, triton.next_power_of_2(self.max_seq_len)))
            grid = (num_seqs, cdiv(min(self.max_seq_len, self.total), chunk))
            dense_attention_times_kernel[grid](
                which.contiguous(), self.timestamps.contiguous(), self.seq_offsets, split, offset, bounds[0],
                bounds[1], self.total, BLOCK=block, CHUNK=chunk,
            )  # fmt: skip
            self._times[key] = split, offset, bounds[0], bounds[1]
        return self._times[key]

    def time_arguments(self, tiles: torch.Tensor, own: int, other: int, own_is_query: bool) -> tuple:
        """(edges, steps, q_times, q_offset, k_times, k_offset, lowest_bucket, row, T) for a kernel with these tiles."""
        if self.time_bias is None:
            return (*[None] * 7, 0, self.total)
        mine, theirs = self.query_timestamps, self.timestamps
        if not own_is_query:
            mine, theirs = theirs, mine
        mine, theirs = self.times(mine, own), self.times(theirs, other)
        # Two more than the blocks: the kernels read that far ahead.
        row = cdiv(min(self.max_seq_len, self.total), other) + 2
        lowest_bucket = torch.empty(tiles.shape[0], row, dtype=torch.int8, device=tiles.device)
        dense_attention_narrow_kernel[(tiles.shape[0], cdiv(row, 256))](
            tiles, self.seq_offsets, mine[2], mine[3], theirs[2], theirs[3], self.edges, lowest_bucket, row, OWN=own,
            OTHER=other, OWN_IS_QUERY=own_is_query, NUM_BUCKETS=self.num_buckets, CHUNK=256,
        )  # fmt: skip
        q, k = (mine, theirs) if own_is_query else (theirs, mine)
        return self.edges, self.steps, q[0], q[1], k[0], k[1], lowest_bucket, row, self.total

    def forward(self, config: dict | None = None) -> torch.Tensor:
        out = torch.empty(self.total, self.heads, self.v_out, dtype=self.q.dtype, device=self.q.device)
        if self.empty:
            return out.zero_()
        config = config or self.choose(fwd_config, self.biased)
        tiles = schedule(self.seq_offsets, self.total, config["BLOCK_M"])
        times = self.time_arguments(tiles, config["BLOCK_M"], config["BLOCK_N"], True)
        dense_attention_fwd_kernel[(tiles.shape[0] * self.heads,)](
            self.q, self.k, self.v, out, *self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2],
            *out.stride()[:2], self.seq_offsets, tiles, self.num_targets, self.window_size, 0.5 * self.alpha,
            1.0 / self.max_seq_len, self.position_bias, self.time_bias, *times, **self.constants(), **config,
        )  # fmt: skip
        return out

    def backward(self, do: torch.Tensor, dq_config: dict | None = None, dkv_config: dict | None = None) -> tuple:
        """(dq, dk, dv, position_bias's gradient or None, time_bias's or None)."""
        dq, dk, dv = (
            torch.empty(self.total, self.heads, size, dtype=self.q.dtype, device=self.q.device)
            for size in (self.d_out, self.d_out, self.v_out)
        )
        scratch = functools.partial(torch.zeros, dtype=torch.float32, device=self.q.device)
        position_grad = None if self.position_bias is None else scratch(self.max_seq_len)
        copies = 1 if INTERPRET else 64
        time_grad = None if self.time_bias is None else scratch(copies, self.num_buckets + 1)
        if not self.empty:
            do = _rows(do)
            self._backward_dkv(do, dk, dv, dkv_config or self.choose(bwd_dkv_config, self.time_bias is not None))
            self._backward_dq(
                do, dq, position_grad, time_grad, copies, dq_config or self.choose(bwd_dq_config, self.biased)
            )
        if position_grad is not None:
            position_grad = position_grad.to(self.table_dtypes[0])
        if time_grad is not None:
            unread = self.time_bias.shape[0] - 1 - self.num_buckets
            time_grad = torch.nn.functional.pad(time_grad.sum(0), (0, unread)).to(self.table_dtypes[1])
        return dq, dk, dv, position_grad, time_grad

    def _backward_dq(self, do, dq, position_grad, time_grad, copies, config):
        exact_grad, exact_scale = None, None
        if position_grad is not None and self.q.dtype != torch.float32:
            # |ds| <= |do| |v| times twice SiLU's greatest slope, 1.1 (2.3 with room for rounding).
            norms = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax() for x in (do, self.v)]
            exact_scale = (2.0**22 - 1) / (2.3 * norms[0] * norms[1]).clamp(min=1e-30)
            exact_grad = torch.zeros(self.max_seq_len, dtype=torch.int64, device=do.device)
        tiles = schedule(self.seq_offsets, self.total, config["BLOCK_M"])
        times = self.time_arguments(tiles, config["BLOCK_M"], config["BLOCK_N"], True)
        _launch_with_static_memory(
            dense_attention_bwd_dq_kernel, (tiles.shape[0] * self.heads,),
            self.q, self.k, self.v, do, dq, *self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2],
            *do.stride()[:2], *dq.stride()[:2], self.seq_offsets, tiles, self.num_targets, self.window_size,
            0.5 * self.alpha, 0.5 / self.max_seq_len, self.alpha, self.position_bias, self.time_bias, position_grad,
            exact_grad, exact_scale, time_grad, *times, **self.constants(), COPIES=copies, **config,
        )  # fmt: skip

        if exact_grad is not None:
            position_grad += (exact_grad.double() / exact_scale.double()).float() * (0.5 / self.max_seq_len)

    def _backward_dkv(self, do, dk, dv, config):
        tiles = schedule(self.seq_offsets, self.total, config["BLOCK_N"])
        times = self.time_arguments(tiles, config["BLOCK_N"], config["BLOCK_M"], False)
        dense_attention_bwd_dkv_kernel[(tiles.shape[0] * self.heads,)](
            self.q, self.k, self.v, do, dk, dv, *self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2],
            *do.stride()[:2], *dk.stride()[:2], *dv.stride()[:2], self.seq_offsets, tiles,
            self.num_targets, self.window_size, 0.5 * self.alpha, 0.5 / self.max_seq_len, self.alpha,
            self.position_bias, self.time_bias, *times, **self.constants(), **config,
        )  # fmt: skip


@torch.library.custom_op("hstu_sparse::dense_fwd", mutates_args=())
def dense_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    alpha: float,
    num_targets: torch.Tensor | None,
    window_size: int,
    position_bias: torch.Tensor | None,
    time_bias: torch.Tensor | None,
    timestamps: torch.Tensor | None,
    query_timestamps: torch.Tensor | None,
) -> torch.Tensor:
    """Forward of `hstu_attention` in Triton: [T, H, V]."""
    return _Launch(
        q, k, v, seq_offsets, max_seq_len, alpha, num_targets, window_size, position_bias, time_bias, timestamps,
        query_timestamps,
    ).forward()  # fmt: skip


@dense_fwd.register_fake
def _(q, k, v, seq_offsets, max_seq_len, *_):
    return q.new_empty(v.shape)


@torch.library.custom_op("hstu_sparse::dense_bwd", mutates_args=())
def dense_bwd(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    alpha: float,
    num_targets: torch.Tensor | None,
    window_size: int,
    position_bias: torch.Tensor | None,
    time_bias: torch.Tensor | None,
    timestamps: torch.Tensor | None,
    query_timestamps: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Backward of `hstu_attention` in Triton: dq, dk, dv and the tables' gradients (empty where there is no table)."""
    dq, dk, dv, position_grad, time_grad = _Launch(
        q, k, v, seq_offsets, max_seq_len, alpha, num_targets, window_size, position_bias, time_bias, timestamps,
        query_timestamps,
    ).backward(grad)  # fmt: skip
    position_grad = q.new_empty(0) if position_grad is None else position_grad
    return dq, dk, dv, position_grad, q.new_empty(0) if time_grad is None else time_grad


@dense_bwd.register_fake
def _(grad, q, k, v, seq_offsets, max_seq_len, alpha, num_targets, window_size, position_bias, time_bias, *_):
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        q.new_empty(0) if position_bias is None else position_bias.new_empty(position_bias.shape),
        q.new_empty(0) if time_bias is None else time_bias.new_empty(time_bias.shape),
    )


def _setup_context(ctx, inputs, output):
    q, k, v, seq_offsets, max_seq_len, alpha, num_targets, window_size, *rest = inputs
    ctx.save_for_backward(q, k, v, seq_offsets, num_targets, *rest)
    ctx.options = max_seq_len, alpha, window_size


def _backward(ctx, grad):
    q, k, v, seq_offsets, num_targets, position_bias, time_bias, timestamps, query_timestamps = ctx.saved_tensors
    max_seq_len, alpha, window_size = ctx.options
    dq, dk, dv, position_grad, time_grad = dense_bwd(
        grad, q, k, v, seq_offsets, max_seq_len, alpha, num_targets, window_size, position_bias, time_bias, timestamps,
        query_timestamps,
    )  # fmt: skip
    tables = (None if position_bias is None else position_grad, None if time_bias is None else time_grad)
    return dq, dk, dv, None, None, None, None, None, *tables, None, None


dense_fwd.register_autograd(_backward, setup_context=_setup_context)


def hstu_attention_triton(
    q, k, v, seq_offsets, max_seq_len, *, alpha, num_targets, window_size, position_bias, time_bias, timestamps,
    query_timestamps,
):  # fmt: skip
    """Arguments and result as `hstu_sparse.hstu_attention`, on CUDA or in Triton's interpreter."""
    return dense_fwd(
        q, k, v, seq_offsets, max_seq_len, alpha, num_targets, window_size, position_bias, time_bias, timestamps,
        query_timestamps,
    )  # fmt: skip
