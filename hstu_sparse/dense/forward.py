"""The forward kernel: a program owns a tile of queries and walks over the keys they see.

Letters: H heads, D query/key head size, V value head size, N max_seq_len. m: query rows of a tile, n: its key rows; t
and s: their positions in the sequence.

Since SiLU needs no normaliser there is no running maximum and no rescaling of the accumulator. The scale 1/N is applied
once, to the accumulator.
"""

import triton
import triton.language as tl

from hstu_sparse.dense.bias import _bias_position, _half_with_bias, _narrow_run
from hstu_sparse.dense.tiles import GIVEN, PER_BATCH, _key_ranges, _load_rows, _sequence, _silu, _visible


@triton.jit
def _attend(
    acc, q, first, last, t, length, history, k, v, k_stride, v_stride, half_alpha, window_size,
    position_bias, time_bias, cells, steps, q_high, q_low, q_offset, k_times, k_offset, tile_buckets, total,
    D: tl.constexpr, V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, V] + the keys first .. last (multiples of BLOCK_N; `last` may pass the end when MASKED)."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, PAD_D)
    e = tl.arange(0, PAD_V)
    row = _bias_position(t, history, HAS_TARGETS)[:, None]
    for start in range(first, last, BLOCK_N):
        key = _load_rows(k, start, n, d, k_stride, length, D, PAD_D, MASKED)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        s = start + n
        half, _, _ = _half_with_bias(
            scores, start, row, history, length, half_alpha, position_bias, time_bias, cells, steps, q_high, q_low,
            q_offset, k_times, k_offset, tile_buckets, total, HAS_TARGETS, HAS_POSITION, HAS_TIME, MASKED, BLOCK_N,
        )  # fmt: skip
        weights = _silu(half, FAST)
        if MASKED:
            mask = _visible(t[:, None], s[None, :], length, history, window_size, HAS_TARGETS, HAS_WINDOW)
            weights = tl.where(mask, weights, 0.0)
        value = _load_rows(v, start, n, e, v_stride, length, V, PAD_V, MASKED)
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=GIVEN)
def dense_attention_fwd_kernel(
    q, k, v, out, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, out_stride_t, out_stride_h,
    seq_offsets, tiles, num_targets, window_size, half_alpha, inverse_n,
    position_bias, time_bias, cells, steps, q_times, q_offset, k_times, k_offset, tile_buckets, row, total,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr,
    HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head."""
    tile = tl.program_id(0) // H
    head = tl.program_id(0) % H
    b = tl.load(tiles + 2 * tile)
    if b < 0:
        return
    begin, length, history = _sequence(b, seq_offsets, num_targets, HAS_TARGETS)
    block = (length + BLOCK_M - 1) // BLOCK_M - 1 - tl.load(tiles + 2 * tile + 1)
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
        tile_buckets += (begin // BLOCK_M + b + block) * row

    first, full, diagonal, end = _key_ranges(
        first_row, length, history, window_size, HAS_TARGETS, HAS_WINDOW, BLOCK_M, BLOCK_N
    )
    if HAS_TIME:
        diagonal = _narrow_run(full, diagonal, tile_buckets, BLOCK_N, True)
    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)
    if HAS_WINDOW:  # noqa: SIM102  one is known to the compiler
        if first < full:
            acc = _attend(
                acc, query, first, full, t, length, history, k, v, k_stride_t, v_stride_t, half_alpha, window_size,
                position_bias, time_bias, cells, steps, q_high, q_low, q_near, k_times, k_offset, tile_buckets, total,
                D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME, FAST, PRECISION, True, BLOCK_N,
                PAD_D, PAD_V,
            )  # fmt: skip
    if full < diagonal:
        acc = _attend(
            acc, query, full, diagonal, t, length, history, k, v, k_stride_t, v_stride_t, half_alpha, window_size,
            position_bias, time_bias, cells, steps, q_high, q_low, q_near, k_times, k_offset, tile_buckets, total,
            D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME, FAST, PRECISION, False, BLOCK_N, PAD_D,
            PAD_V,
        )  # fmt: skip
    if diagonal < end:
        acc = _attend(
            acc, query, diagonal, end, t, length, history, k, v, k_stride_t, v_stride_t, half_alpha, window_size,
            position_bias, time_bias, cells, steps, q_high, q_low, q_near, k_times, k_offset, tile_buckets, total,
            D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME, FAST, PRECISION, True, BLOCK_N, PAD_D,
            PAD_V,
        )  # fmt: skip
    e = tl.arange(0, PAD_V)
    out += (begin + first_row) * out_stride_t + head * out_stride_h
    inside = (t < length)[:, None] & (e < V_OUT)[None, :]
    tl.store(out + m[:, None] * out_stride_t + e[None, :], (acc * inverse_n).to(out.dtype.element_ty), inside)
