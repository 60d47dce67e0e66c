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

MAX_BUCKETS = 255
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
    times, seq_offsets, split, least, greatest, total, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Timestamps as fp32 pairs `split [2, T]`, and the least and greatest of each BLOCK tokens of a sequence.

    Block i of sequence b is at seq_offsets[b] // BLOCK + b + i, which leaves room for every block without a prefix sum.
    """
    b = tl.program_id(0)
    begin = tl.load(seq_offsets + b).to(tl.int64)
    length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
    first = tl.program_id(1) * CHUNK
    if first >= length:
        return
    block = tl.arange(0, CHUNK // BLOCK)
    offset = first + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offset < length
    value = tl.load(times + begin + offset, inside, 0)
    high = value.to(tl.float32)
    low = (value - high.to(tl.int64)).to(tl.float32)
    tl.store(split + begin + offset, high, inside)
    tl.store(split + total + begin + offset, low, inside)
    slot = begin // BLOCK + b + first // BLOCK + block
    used = first + block * BLOCK < length
    limit = 4611686018427387904
    tl.store(least + slot, tl.min(tl.where(inside, value, limit), 1), used)
    tl.store(greatest + slot, tl.max(tl.where(inside, value, -limit), 1), used)


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
def _floor_bucket(log2):
    """floor(log2 * _PER_LOG2 - 1e-5), a bucket number or the one below it, without a float-to-integer conversion.

    Adding 1.5 * 2^23 with rounding down leaves the floor in the low mantissa bits; the conversion instruction would
    share the special-function unit with log2 and tanh.
    """
    if COMPILED:
        bits = tl.inline_asm_elementwise(
            "fma.rm.f32 $0, $1, 0f40136150, 0f4B400000;", "=r,f", [log2 - 4e-6], tl.int32, is_pure=True, pack=1
        )
        return bits - 0x4B400000
    else:
        return tl.floor(log2 * _PER_LOG2 - 1e-5).to(tl.int32)


@triton.jit
def _bucket(x, edges, NUM_BUCKETS: tl.constexpr):
    """Bucket of |x| (given as fp32 >= 0): an estimate that may be one too low, corrected by the exact edge.

    `edges [NUM_BUCKETS + 2]`: edge k is the least value in bucket k; the one past the last bucket is infinite.
    """
    estimate = tl.minimum(tl.maximum(_floor_bucket(tl.log2(tl.maximum(x, 1.0))), 0), NUM_BUCKETS)
    return estimate + (x >= _look_up(edges, estimate + 1)).to(tl.int32)


@triton.jit
def _bucket_range(q_least, q_greatest, k_least, k_greatest, edges, NUM_BUCKETS: tl.constexpr):
    """(lowest, highest) bucket of the differences between two sides with these extreme timestamps."""
    nearest = tl.maximum(tl.maximum(q_least - k_greatest, k_least - q_greatest), 0)
    farthest = tl.maximum(q_greatest - k_least, k_greatest - q_least)
    return _bucket(nearest.to(tl.float32), edges, NUM_BUCKETS), _bucket(farthest.to(tl.float32), edges, NUM_BUCKETS)


@triton.jit
def _narrow(
    first, last, own_least, own_greatest, least, greatest, edges, NUM_BUCKETS: tl.constexpr, BLOCK: tl.constexpr,
    FROM_FIRST: tl.constexpr,
):  # fmt: skip
    """Where the narrow blocks (three buckets at most) of the other side's rows first .. last end.

    FROM_FIRST: the first row of the first block that is not narrow. Else: the row after the last such block. `first`
    and `last` are multiples of BLOCK, and so is the result.
    """
    CHUNK: tl.constexpr = 64
    wide_first = last // BLOCK
    wide_end = first // BLOCK
    for start in range(first // BLOCK, last // BLOCK, CHUNK):
        block = start + tl.arange(0, CHUNK)
        inside = block < last // BLOCK
        lowest, highest = _bucket_range(
            own_least, own_greatest, tl.load(least + block, inside, 0), tl.load(greatest + block, inside, 0), edges,
            NUM_BUCKETS,
        )  # fmt: skip
        wide = inside & (highest - lowest > 2)
        wide_first = tl.minimum(wide_first, tl.min(tl.where(wide, block, wide_first), 0))
        wide_end = tl.maximum(wide_end, tl.max(tl.where(wide, block + 1, wide_end), 0))
    if FROM_FIRST:
        return tl.maximum(wide_first * BLOCK, first)
    else:
        return wide_end * BLOCK


@triton.jit
def _narrow_bias(x, lowest, table, edges, NUM_BUCKETS: tl.constexpr):
    """table[bucket(x)] for a tile x of absolute differences whose buckets lie in lowest .. lowest + 2."""
    first = tl.load(table + lowest)
    second = tl.load(table + tl.minimum(lowest + 1, NUM_BUCKETS))
    third = tl.load(table + tl.minimum(lowest + 2, NUM_BUCKETS))
    bias = tl.where(x >= tl.load(edges + lowest + 1), second, first)
    return tl.where(x >= tl.load(edges + tl.minimum(lowest + 2, NUM_BUCKETS + 1)), third, bias)


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
def _silu_and_twice_grad(s, bias, half_alpha, HAS_BIAS: tl.constexpr, FAST: tl.constexpr):
    """(SiLU, twice its derivative) of a tile of scores."""
    h = s * half_alpha
    if HAS_BIAS:
        h += 0.5 * bias
    if FAST and COMPILED:
        u = tanh_approx(h)
    else:
        u = 2.0 / (1.0 + tl.exp(-2.0 * h)) - 1.0
    z = h * u
    return h + z, (h - z * u) + u + 1.0


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
def _pair_bias(
    t, s, last_position, q_high, q_low, k_high, k_low, lowest, position_bias, time_bias, edges,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, NUM_BUCKETS: tl.constexpr, HAS_TARGETS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """(b(t, s), |time difference| or its bucket) of a tile, from vectors that broadcast against each other.

    Tiles without a mask are narrow: their buckets are lowest .. lowest + 2. Of the others the bucket is returned.
    """
    bias = 0.0
    where = 0.0
    if HAS_TIME:
        where = tl.abs((q_high - k_high) + (q_low - k_low))
        if MASKED:
            where = _bucket(where, edges, NUM_BUCKETS)
            bias = _look_up(time_bias, where)
        else:
            bias = _narrow_bias(where, lowest, time_bias, edges, NUM_BUCKETS)
    if HAS_POSITION:
        # The last position bounds the rows past the end too: they look up whatever is there, inside the table.
        if HAS_TARGETS:
            distance = tl.minimum(t, last_position) - tl.minimum(s, last_position)
        else:
            distance = tl.minimum(t, last_position) - s
        if MASKED:
            distance = tl.maximum(distance, 0)
        bias += _look_up(position_bias, distance)
    return bias, where


@triton.jit
def _attend(
    acc, q, first, last, t, length, history, k, v, k_stride, v_stride, half_alpha, window_size,
    position_bias, time_bias, edges, q_high, q_low, q_least, q_greatest, k_times, k_least, k_greatest, total,
    D: tl.constexpr, V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, NUM_BUCKETS: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, V] + the keys first .. last (multiples of BLOCK_N; `last` may pass the end when MASKED)."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, PAD_D)
    e = tl.arange(0, PAD_V)
    last_position = tl.minimum(history, length - 1)
    for start in range(first, last, BLOCK_N):
        key = _load_rows(k, start, n, d, k_stride, length, D, PAD_D, MASKED)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        s = start + n
        k_high, k_low = 0.0, 0.0
        lowest = 0
        if HAS_TIME:
            inside = s < length
            k_high = tl.load(k_times + s, inside, 0.0)[None, :]
            k_low = tl.load(k_times + total + s, inside, 0.0)[None, :]
            if not MASKED:
                block = start // BLOCK_N
                lowest, _ = _bucket_range(
                    q_least, q_greatest, tl.load(k_least + block), tl.load(k_greatest + block), edges, NUM_BUCKETS
                )
        bias, _ = _pair_bias(
            t[:, None], s[None, :], last_position, q_high, q_low, k_high, k_low, lowest, position_bias,
            time_bias, edges, HAS_POSITION, HAS_TIME, NUM_BUCKETS, HAS_TARGETS, MASKED,
        )  # fmt: skip
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
    position_bias, time_bias, edges, q_times, k_times, k_least, k_greatest, total,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
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
    q_high, q_low = 0.0, 0.0
    q_least, q_greatest = 0, 0
    if HAS_TIME:
        q_high, q_low, q_least, q_greatest = _tile_times(q_times + begin, t, length, total)
        q_high = q_high[:, None]
        q_low = q_low[:, None]
        k_times += begin
        k_least += begin // BLOCK_N + b
        k_greatest += begin // BLOCK_N + b

    first, full, diagonal, end = _key_ranges(
        first_row, length, history, window_size, HAS_TARGETS, HAS_WINDOW, BLOCK_M, BLOCK_N
    )
    if HAS_TIME:
        diagonal = _narrow(
            full, diagonal, q_least, q_greatest, k_least, k_greatest, edges, NUM_BUCKETS, BLOCK_N, True
        )  # fmt: skip
    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)
    if HAS_WINDOW:
        acc = _attend(
            acc, query, first, full, t, length, history, k, v, k_stride_t, v_stride_t, half_alpha, window_size,
            position_bias, time_bias, edges, q_high, q_low, q_least, q_greatest, k_times, k_least, k_greatest, total,
            D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME, NUM_BUCKETS, FAST, PRECISION, True, BLOCK_N, PAD_D,
            PAD_V,
        )  # fmt: skip
    acc = _attend(
        acc, query, full, diagonal, t, length, history, k, v, k_stride_t, v_stride_t, half_alpha, window_size,
        position_bias, time_bias, edges, q_high, q_low, q_least, q_greatest, k_times, k_least, k_greatest, total,
        D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME, NUM_BUCKETS, FAST, PRECISION, False, BLOCK_N, PAD_D,
        PAD_V,
    )  # fmt: skip
    acc = _attend(
        acc, query, diagonal, end, t, length, history, k, v, k_stride_t, v_stride_t, half_alpha, window_size,
        position_bias, time_bias, edges, q_high, q_low, q_least, q_greatest, k_times, k_least, k_greatest, total,
        D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME, NUM_BUCKETS, FAST, PRECISION, True, BLOCK_N, PAD_D,
        PAD_V,
    )  # fmt: skip
    e = tl.arange(0, PAD_V)
    out += (begin + first_row) * out_stride_t + head * out_stride_h
    inside = (t < length)[:, None] & (e < V)[None, :]
    tl.store(out + m[:, None] * out_stride_t + e[None, :], (acc * inverse_n).to(out.dtype.element_ty), inside)


@triton.jit
def _tile_times(times, t, length, total):
    """(high, low, least, greatest) of the timestamps of a tile's own tokens: two vectors and two int64 scalars."""
    inside = t < length
    high = tl.load(times + t, inside, 0.0)
    low = tl.load(times + total + t, inside, 0.0)
    value = high.to(tl.int64) + low.to(tl.int64)
    limit = 4611686018427387904
    least = tl.min(tl.where(inside, value, limit), 0)
    greatest = tl.max(tl.where(inside, value, -limit), 0)
    return high, low, least, greatest


@triton.jit
def _add_position_grad(
    grad, ds, t, s, first_row, start, length, history, scale, HAS_TARGETS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """grad[d] += the sum of ds [BLOCK_M, BLOCK_N] along its diagonal t - s = d.

    Row i is rotated by i, which turns the diagonals into columns; a column then holds pieces of neighbouring diagonals,
    BLOCK_N apart, one piece above and one below the place where the rotation wraps.
    """
    REPEATS: tl.constexpr = BLOCK_M // BLOCK_N if BLOCK_M > BLOCK_N else 1
    if HAS_TARGETS:
        # Candidates all stand at the position `history`: for them a diagonal is a column.
        candidate = (t >= history)[:, None]
        column = tl.sum(tl.where(candidate, ds, 0.0), 0)
        tl.atomic_add(grad + tl.maximum(history - s, 0), column * scale, (s < length) & (column != 0.0), sem="relaxed")
        ds = tl.where(candidate, 0.0, ds)
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
def _add_narrow_time_grad(grad, ds, difference, lowest, edges, scale, NUM_BUCKETS: tl.constexpr):
    """grad[bucket] += the sum of ds over the pairs in that bucket, for a tile of the buckets lowest .. lowest + 2."""
    beyond_first = tl.where(difference >= tl.load(edges + lowest + 1), ds, 0.0)
    beyond_second = tl.where(difference >= tl.load(edges + tl.minimum(lowest + 2, NUM_BUCKETS + 1)), ds, 0.0)
    rows = tl.reduce((ds, beyond_first, beyond_second), 1, _add_three)
    everything, first, second = tl.reduce(rows, 0, _add_three)
    tl.atomic_add(grad + lowest, (everything - first) * scale, sem="relaxed")
    tl.atomic_add(grad + tl.minimum(lowest + 1, NUM_BUCKETS), (first - second) * scale, sem="relaxed")
    tl.atomic_add(grad + tl.minimum(lowest + 2, NUM_BUCKETS), second * scale, sem="relaxed")


# A histogram in shared memory, which Triton has no words for: one table for each of the 32 lanes of a warp, so that the
# lanes neither meet in a bank nor at an address. The variable is declared inside the assembly, in the program's static
# shared memory, beside the dynamic part that Triton lays out.


@triton.jit
def _histogram_open(token):
    """The shared-memory address of [256, 32] fp32, zeroed. Called once per program; `token` is any int32 scalar."""
    base = tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 hstu_histogram[32768]; mov.u32 $0, hstu_histogram; }", "=r,r", [token], tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    tl.inline_asm_elementwise(
        "{ .reg .u32 a; mad.lo.u32 a, $2, 4, $1; st.shared.f32 [a], 0f00000000; mov.u32 $0, 0; }", "=r,r,r",
        [base, tl.arange(0, 8192)], tl.int32, is_pure=False, pack=1,
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
        "{ .reg .u32 a; mad.lo.u32 a, $2, 4, $1; ld.shared.f32 $0, [a]; }", "=f,r,r", [base, tl.arange(0, 8192)],
        tl.float32, is_pure=False, pack=1,
    )  # fmt: skip
    bucket = tl.arange(0, 256)
    total = tl.sum(tl.reshape(copies, [256, 32]), 1) * scale
    tl.atomic_add(grad + bucket, total, (bucket <= NUM_BUCKETS) & (total != 0.0), sem="relaxed")


@triton.jit
def _attend_dq(
    acc, q, do, first, last, t, first_row, length, history, k, v, k_stride, v_stride, half_alpha, window_size, scale,
    position_bias, time_bias, position_grad, time_grad, histogram, edges, q_high, q_low, q_least, q_greatest, k_times,
    k_least, k_greatest, total,
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
    for start in range(first, last, BLOCK_N):
        key = _load_rows(k, start, n, d, k_stride, length, D, PAD_D, MASKED)
        value = _load_rows(v, start, n, e, v_stride, length, V, PAD_V, MASKED)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
        s = start + n
        k_high, k_low = 0.0, 0.0
        lowest = 0
        if HAS_TIME:
            inside = s < length
            k_high = tl.load(k_times + s, inside, 0.0)[None, :]
            k_low = tl.load(k_times + total + s, inside, 0.0)[None, :]
            if not MASKED:
                block = start // BLOCK_N
                lowest, _ = _bucket_range(
                    q_least, q_greatest, tl.load(k_least + block), tl.load(k_greatest + block), edges, NUM_BUCKETS
                )
        bias, where = _pair_bias(
            t[:, None], s[None, :], last_position, q_high, q_low, k_high, k_low, lowest, position_bias,
            time_bias, edges, HAS_POSITION, HAS_TIME, NUM_BUCKETS, HAS_TARGETS, MASKED,
        )  # fmt: skip
        _, slope = _silu_and_twice_grad(scores, bias, half_alpha, HAS_POSITION or HAS_TIME, FAST)
        ds = dp * slope
        if MASKED:
            mask = _visible(t[:, None], s[None, :], length, history, window_size, HAS_TARGETS, HAS_WINDOW)
            ds = tl.where(mask, ds, 0.0)
        acc = tl.dot(ds.to(key.dtype), key, acc, input_precision=PRECISION)
        if HAS_POSITION:
            _add_position_grad(
                position_grad, ds, t, s, first_row, start, length, history, scale, HAS_TARGETS, BLOCK_M, BLOCK_N
            )
        if HAS_TIME:
            if not MASKED:
                _add_narrow_time_grad(time_grad, ds, where, lowest, edges, scale, NUM_BUCKETS)
            elif COMPILED:
                _histogram_add(histogram, where, ds)
            else:
                tl.atomic_add(time_grad + where, ds * scale)
    return acc


@triton.jit
def dense_attention_bwd_dq_kernel(
    q, k, v, do, dq, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, do_stride_t, do_stride_h,
    dq_stride_t, dq_stride_h, seq_offsets, tiles, num_targets, window_size, half_alpha, half_inverse_n, alpha,
    position_bias, time_bias, position_grad, time_grad, edges, q_times, k_times, k_least, k_greatest, total,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
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
    q_high, q_low = 0.0, 0.0
    q_least, q_greatest = 0, 0
    if HAS_TIME:
        q_high, q_low, q_least, q_greatest = _tile_times(q_times + begin, t, length, total)
        q_high = q_high[:, None]
        q_low = q_low[:, None]
        k_times += begin
        k_least += begin // BLOCK_N + b
        k_greatest += begin // BLOCK_N + b
        # Several copies of the small table keep the programs' additions from queueing at one address.
        time_grad += (tl.program_id(0) % COPIES) * (NUM_BUCKETS + 1)
        if COMPILED:
            histogram = _histogram_open(length)

    first, full, diagonal, end = _key_ranges(
        first_row, length, history, window_size, HAS_TARGETS, HAS_WINDOW, BLOCK_M, BLOCK_N
    )
    if HAS_TIME:
        diagonal = _narrow(
            full, diagonal, q_least, q_greatest, k_least, k_greatest, edges, NUM_BUCKETS, BLOCK_N, True
        )  # fmt: skip
    acc = tl.zeros([BLOCK_M, PAD_D], tl.float32)
    if HAS_WINDOW:
        acc = _attend_dq(
            acc, query, dout, first, full, t, first_row, length, history, k, v, k_stride_t, v_stride_t, half_alpha,
            window_size, half_inverse_n, position_bias, time_bias, position_grad, time_grad, histogram, edges, q_high,
            q_low, q_least, q_greatest, k_times, k_least, k_greatest, total, D, V, HAS_TARGETS, HAS_WINDOW,
            HAS_POSITION, HAS_TIME, NUM_BUCKETS, FAST, PRECISION, True, BLOCK_M, BLOCK_N, PAD_D, PAD_V,
        )  # fmt: skip
    acc = _attend_dq(
        acc, query, dout, full, diagonal, t, first_row, length, history, k, v, k_stride_t, v_stride_t, half_alpha,
        window_size, half_inverse_n, position_bias, time_bias, position_grad, time_grad, histogram, edges, q_high,
        q_low, q_least, q_greatest, k_times, k_least, k_greatest, total, D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION,
        HAS_TIME, NUM_BUCKETS, FAST, PRECISION, False, BLOCK_M, BLOCK_N, PAD_D, PAD_V,
    )  # fmt: skip
    acc = _attend_dq(
        acc, query, dout, diagonal, end, t, first_row, length, history, k, v, k_stride_t, v_stride_t, half_alpha,
        window_size, half_inverse_n, position_bias, time_bias, position_grad, time_grad, histogram, edges, q_high,
        q_low, q_least, q_greatest, k_times, k_least, k_greatest, total, D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION,
        HAS_TIME, NUM_BUCKETS, FAST, PRECISION, True, BLOCK_M, BLOCK_N, PAD_D, PAD_V,
    )  # fmt: skip
    if HAS_TIME and COMPILED:
        _histogram_close(histogram, time_grad, half_inverse_n, NUM_BUCKETS)
    dq += (begin + first_row) * dq_stride_t + head * dq_stride_h
    inside = (t < length)[:, None] & (d < D)[None, :]
    result = acc * (alpha * half_inverse_n)
    tl.store(dq + m[:, None] * dq_stride_t + d[None, :], result.to(dq.dtype.element_ty), inside)


@triton.jit
def _attend_dkv(
    dk, dv, k, v, first, last, s, length, history, q, do, dq, q_stride, do_stride, dq_stride, half_alpha, window_size,
    position_bias, time_bias, edges, k_high, k_low, k_least, k_greatest, q_times, q_least, q_greatest, total,
    D: tl.constexpr, V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, NUM_BUCKETS: tl.constexpr, WITH_DQ: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr,
    PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """dk [BLOCK_N, D] and dv [BLOCK_N, V] + the queries first .. last; tiles are transposed, keys x queries."""
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PAD_D)
    e = tl.arange(0, PAD_V)
    last_position = tl.minimum(history, length - 1)
    for start in range(first, last, BLOCK_M):
        query = _load_rows(q, start, m, d, q_stride, length, D, PAD_D, MASKED)
        dout = _load_rows(do, start, m, e, do_stride, length, V, PAD_V, MASKED)
        scores = tl.dot(k, tl.trans(query), input_precision=PRECISION)
        t = start + m
        q_high, q_low = 0.0, 0.0
        lowest = 0
        if HAS_TIME:
            inside = t < length
            q_high = tl.load(q_times + t, inside, 0.0)[None, :]
            q_low = tl.load(q_times + total + t, inside, 0.0)[None, :]
            if not MASKED:
                block = start // BLOCK_M
                lowest, _ = _bucket_range(
                    tl.load(q_least + block), tl.load(q_greatest + block), k_least, k_greatest, edges, NUM_BUCKETS
                )
        bias, _ = _pair_bias(
            t[None, :], s[:, None], last_position, q_high, q_low, k_high, k_low, lowest, position_bias,
            time_bias, edges, HAS_POSITION, HAS_TIME, NUM_BUCKETS, HAS_TARGETS, MASKED,
        )  # fmt: skip
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        weights, slope = _silu_and_twice_grad(scores, bias, half_alpha, HAS_POSITION or HAS_TIME, FAST)
        if MASKED:
            mask = _visible(t[None, :], s[:, None], length, history, window_size, HAS_TARGETS, HAS_WINDOW)
            weights = tl.where(mask, weights, 0.0)
            slope = tl.where(mask, slope, 0.0)
        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
        ds = (dp * slope).to(query.dtype)
        dk = tl.dot(ds, query, dk, input_precision=PRECISION)
        if WITH_DQ:
            part = tl.dot(tl.trans(ds), k, input_precision=PRECISION)
            pointers = dq + tl.cast(start, tl.int64) * dq_stride + (m[:, None] * dq_stride + d[None, :])
            if MASKED or D != PAD_D:
                tl.atomic_add(pointers, part, (t < length)[:, None] & (d < D)[None, :], sem="relaxed")
            else:
                tl.atomic_add(pointers, part, sem="relaxed")
    return dk, dv


@triton.jit
def dense_attention_bwd_dkv_kernel(
    q, k, v, do, dk, dv, dq, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, do_stride_t,
    do_stride_h, dk_stride_t, dk_stride_h, dv_stride_t, dv_stride_h, dq_stride_t, dq_stride_h, seq_offsets, tiles,
    num_targets, window_size, half_alpha, half_inverse_n, alpha, position_bias, time_bias, edges, q_times, k_times,
    q_least, q_greatest, total,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, NUM_BUCKETS: tl.constexpr, WITH_DQ: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    PAD_V: tl.constexpr,
):  # fmt: skip
    """One program: dk and dv of BLOCK_N keys of one head. WITH_DQ also adds dq, unscaled, into an fp32 buffer."""
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
    dq += begin * dq_stride_t + head * dq_stride_h
    key = _load_rows(k, first_row, n, d, k_stride_t, length, D, PAD_D, True)
    value = _load_rows(v, first_row, n, e, v_stride_t, length, V, PAD_V, True)
    k_high, k_low = 0.0, 0.0
    k_least, k_greatest = 0, 0
    if HAS_TIME:
        k_high, k_low, k_least, k_greatest = _tile_times(k_times + begin, s, length, total)
        k_high = k_high[:, None]
        k_low = k_low[:, None]
        q_times += begin
        q_least += begin // BLOCK_M + b
        q_greatest += begin // BLOCK_M + b

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
        full = _narrow(full, free, k_least, k_greatest, q_least, q_greatest, edges, NUM_BUCKETS, BLOCK_M, False)

    acc_k = tl.zeros([BLOCK_N, PAD_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, PAD_V], tl.float32)
    acc_k, acc_v = _attend_dkv(
        acc_k, acc_v, key, value, begin_row, tl.minimum(full, end), s, length, history, q, do, dq, q_stride_t,
        do_stride_t, dq_stride_t, half_alpha, window_size, position_bias, time_bias, edges, k_high, k_low, k_least,
        k_greatest, q_times, q_least, q_greatest, total, D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME,
        NUM_BUCKETS, WITH_DQ, FAST, PRECISION, True, BLOCK_M, PAD_D, PAD_V,
    )  # fmt: skip
    acc_k, acc_v = _attend_dkv(
        acc_k, acc_v, key, value, full, free, s, length, history, q, do, dq, q_stride_t,
        do_stride_t, dq_stride_t, half_alpha, window_size, position_bias, time_bias, edges, k_high, k_low, k_least,
        k_greatest, q_times, q_least, q_greatest, total, D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME,
        NUM_BUCKETS, WITH_DQ, FAST, PRECISION, False, BLOCK_M, PAD_D, PAD_V,
    )  # fmt: skip
    acc_k, acc_v = _attend_dkv(
        acc_k, acc_v, key, value, free, end, s, length, history, q, do, dq, q_stride_t,
        do_stride_t, dq_stride_t, half_alpha, window_size, position_bias, time_bias, edges, k_high, k_low, k_least,
        k_greatest, q_times, q_least, q_greatest, total, D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME,
        NUM_BUCKETS, WITH_DQ, FAST, PRECISION, True, BLOCK_M, PAD_D, PAD_V,
    )  # fmt: skip
    inside = (s < length)[:, None]
    dk += (begin + first_row) * dk_stride_t + head * dk_stride_h
    result = (acc_k * (alpha * half_inverse_n)).to(dk.dtype.element_ty)
    tl.store(dk + n[:, None] * dk_stride_t + d[None, :], result, inside & (d < D)[None, :])
    dv += (begin + first_row) * dv_stride_t + head * dv_stride_h
    result = (acc_v * (2.0 * half_inverse_n)).to(dv.dtype.element_ty)
    tl.store(dv + n[:, None] * dv_stride_t + e[None, :], result, inside & (e < V)[None, :])


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


def split_times(times: torch.Tensor, seq_offsets: torch.Tensor, max_seq_len: int, block: int) -> tuple:
    """(timestamps as fp32 pairs [2, T], least and greatest timestamp of each block)."""
    total, num_seqs = times.shape[0], seq_offsets.shape[0] - 1
    split = torch.empty(2, total, dtype=torch.float32, device=times.device)
    bounds = torch.empty(2, total // block + num_seqs, dtype=torch.int64, device=times.device)
    chunk = max(block, min(1024, triton.next_power_of_2(max_seq_len)))
    dense_attention_times_kernel[(num_seqs, cdiv(min(max_seq_len, total), chunk))](
        times.contiguous(), seq_offsets, split, bounds[0], bounds[1], total, BLOCK=block, CHUNK=chunk
    )
    return split, bounds[0], bounds[1]


@functools.lru_cache(maxsize=64)
def _edges(num_buckets: int, device: torch.device) -> torch.Tensor:
    """[num_buckets + 2]: edge k is the least value in bucket k, the last is infinite."""
    return torch.tensor([-math.inf, *bucket_edges(num_buckets), math.inf], dtype=torch.float32, device=device)


def fwd_config(pad_d: int, pad_v: int, dtype: torch.dtype, biased: bool) -> dict:
    """Tile sizes, warps and pipeline stages of the forward kernel."""
    if dtype == torch.float32:
        return dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2)
    if max(pad_d, pad_v) > 128:
        return dict(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)
    return dict(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3)


def bwd_dq_config(pad_d: int, pad_v: int, dtype: torch.dtype, biased: bool) -> dict:
    """The same for the kernel of dq and of the bias tables' gradients."""
    if dtype == torch.float32:
        return dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1)
    if max(pad_d, pad_v) > 128:
        return dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)
    return dict(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)


def bwd_dkv_config(pad_d: int, pad_v: int, dtype: torch.dtype, biased: bool) -> dict:
    """The same for the kernel of dk and dv."""
    if dtype == torch.float32:
        return dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1)
    if max(pad_d, pad_v) > 128:
        return dict(BLOCK_M=32, BLOCK_N=64, num_warps=8, num_stages=2)
    return dict(BLOCK_M=64, BLOCK_N=128, num_warps=8, num_stages=2)


def _precision(dtype: torch.dtype) -> str:
    """fp32 products are exact unless the user allowed tf32 for torch's own."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


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
        self.q, self.k, self.v = _rows(q), _rows(k), _rows(v)
        self.seq_offsets, self.max_seq_len, self.alpha = seq_offsets.contiguous(), max_seq_len, alpha
        self.num_targets, self.window_size = num_targets, window_size
        self.table_dtypes = [None if table is None else table.dtype for table in (position_bias, time_bias)]
        self.position_bias, self.time_bias = (
            None if table is None else table.to(torch.float32).contiguous() for table in (position_bias, time_bias)
        )
        self.timestamps, self.query_timestamps = timestamps, query_timestamps
        self.total, self.heads, self.d = q.shape
        self.v_size = v.shape[2]
        self.empty = self.total == 0 or seq_offsets.shape[0] == 1
        self.biased = position_bias is not None or time_bias is not None
        # Differences of int64 seconds never get past bucket 145, so a longer table has a tail that is never read.
        self.num_buckets = 0 if time_bias is None else min(time_bias.shape[0] - 1, MAX_BUCKETS)
        self.edges = None
        if time_bias is not None and not self.empty:
            self.edges = _edges(self.num_buckets, q.device)

    def constants(self) -> dict:
        return dict(
            H=self.heads,
            D=self.d,
            V=self.v_size,
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

    def choose(self, config) -> dict:
        return config(padded_head(self.d), padded_head(self.v_size), self.q.dtype, self.biased)

    def times(self, which: torch.Tensor, block: int) -> tuple:
        if self.time_bias is None:
            return None, None, None
        return split_times(which, self.seq_offsets, self.max_seq_len, block)

    def forward(self, config: dict | None = None) -> torch.Tensor:
        out = torch.empty(self.total, self.heads, self.v_size, dtype=self.q.dtype, device=self.q.device)
        if self.empty:
            return out.zero_()
        config = config or self.choose(fwd_config)
        tiles = schedule(self.seq_offsets, self.total, config["BLOCK_M"])
        k_times, k_least, k_greatest = self.times(self.timestamps, config["BLOCK_N"])
        q_times = k_times
        if self.query_timestamps is not self.timestamps:
            q_times = self.times(self.query_timestamps, config["BLOCK_N"])[0]
        dense_attention_fwd_kernel[(tiles.shape[0] * self.heads,)](
            self.q, self.k, self.v, out, *self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2],
            *out.stride()[:2], self.seq_offsets, tiles, self.num_targets, self.window_size, 0.5 * self.alpha,
            1.0 / self.max_seq_len, self.position_bias, self.time_bias, self.edges, q_times, k_times, k_least,
            k_greatest, self.total, **self.constants(), **config,
        )  # fmt: skip
        return out

    def backward(self, do: torch.Tensor, dq_config: dict | None = None, dkv_config: dict | None = None) -> tuple:
        """(dq, dk, dv, position_bias's gradient or None, time_bias's or None)."""
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (self.q, self.k, self.v))
        scratch = functools.partial(torch.zeros, dtype=torch.float32, device=self.q.device)
        position_grad = None if self.position_bias is None else scratch(self.max_seq_len)
        copies = 1 if INTERPRET else 64
        time_grad = None if self.time_bias is None else scratch(copies, self.num_buckets + 1)
        if not self.empty:
            do = _rows(do)
            self._backward_dkv(do, dk, dv, None, dkv_config or self.choose(bwd_dkv_config))
            self._backward_dq(do, dq, position_grad, time_grad, copies, dq_config or self.choose(bwd_dq_config))
        if position_grad is not None:
            position_grad = position_grad.to(self.table_dtypes[0])
        if time_grad is not None:
            unread = self.time_bias.shape[0] - 1 - self.num_buckets
            time_grad = torch.nn.functional.pad(time_grad.sum(0), (0, unread)).to(self.table_dtypes[1])
        return dq, dk, dv, position_grad, time_grad

    def _backward_dq(self, do, dq, position_grad, time_grad, copies, config):
        tiles = schedule(self.seq_offsets, self.total, config["BLOCK_M"])
        k_times, k_least, k_greatest = self.times(self.timestamps, config["BLOCK_N"])
        q_times = k_times
        if self.query_timestamps is not self.timestamps:
            q_times = self.times(self.query_timestamps, config["BLOCK_N"])[0]
        dense_attention_bwd_dq_kernel[(tiles.shape[0] * self.heads,)](
            self.q, self.k, self.v, do, dq, *self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2],
            *do.stride()[:2], *dq.stride()[:2], self.seq_offsets, tiles, self.num_targets, self.window_size,
            0.5 * self.alpha, 0.5 / self.max_seq_len, self.alpha, self.position_bias, self.time_bias, position_grad,
            time_grad, self.edges, q_times, k_times, k_least, k_greatest, self.total, **self.constants(),
            COPIES=copies, **config,
        )  # fmt: skip

    def _backward_dkv(self, do, dk, dv, dq, config):
        """With `dq`, a zeroed fp32 buffer, its unscaled gradient is added there too."""
        tiles = schedule(self.seq_offsets, self.total, config["BLOCK_N"])
        q_times, q_least, q_greatest = self.times(self.query_timestamps, config["BLOCK_M"])
        k_times = q_times
        if self.query_timestamps is not self.timestamps:
            k_times = self.times(self.timestamps, config["BLOCK_M"])[0]
        into = dk if dq is None else dq
        dense_attention_bwd_dkv_kernel[(tiles.shape[0] * self.heads,)](
            self.q, self.k, self.v, do, dk, dv, into, *self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2],
            *do.stride()[:2], *dk.stride()[:2], *dv.stride()[:2], *into.stride()[:2], self.seq_offsets, tiles,
            self.num_targets, self.window_size, 0.5 * self.alpha, 0.5 / self.max_seq_len, self.alpha,
            self.position_bias, self.time_bias, self.edges, q_times, k_times, q_least, q_greatest, self.total,
            **self.constants(), WITH_DQ=dq is not None, **config,
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
