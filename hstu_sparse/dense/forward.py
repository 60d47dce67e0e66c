"""The forward kernel: a program owns a tile of queries and walks over the keys they see.

Letters: H heads, D query/key head size, V value head size, N max_seq_len. m: query rows of a tile, n: its key rows; t
and s: their positions in the sequence.

Since SiLU needs no normaliser there is no running maximum and no rescaling of the accumulator. The scale 1/N is applied
once, to the accumulator.
"""

import triton
import triton.language as tl

from hstu_sparse.dense.bias import NEAR, _ahead, _bias_position, _half_bias
from hstu_sparse.dense.tiles import GIVEN, PER_BATCH, _key_ranges, _load_rows, _sequence, _silu, _visible


@triton.jit
def _attend(
    acc, q, first, last, t, length, history, k, v, k_stride, v_stride, half_alpha, window_size, bias,
    D: tl.constexpr, V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr, IS_NEAR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, V] + the keys first .. last (multiples of BLOCK_N; `last` may pass the end when MASKED)."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, PAD_D)
    e = tl.arange(0, PAD_V)
    place = _bias_position(t, history, HAS_TARGETS)[:, None]
    ahead = (0, 0.0, 0)
    if HAS_TIME and not MASKED:
        ahead = _ahead(first, bias, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        key = _load_rows(k, start, n, d, k_stride, length, D, PAD_D, MASKED)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        half_bias, _, ahead = _half_bias(
            start, place, history, length, ahead, bias, HAS_TARGETS, HAS_POSITION, HAS_TIME, MASKED, IS_NEAR, True,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        half = scores * half_alpha
        if HAS_POSITION or HAS_TIME:
            half += half_bias
        weights = _silu(half, FAST)
        if MASKED and not (IS_NEAR and HAS_TIME):
            mask = _visible(t[:, None], (start + n)[None, :], length, history, window_size, HAS_TARGETS, HAS_WINDOW)
            weights = tl.where(mask, weights, 0.0)
        value = _load_rows(v, start, n, e, v_stride, length, V, PAD_V, MASKED)
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=GIVEN)
def dense_attention_fwd_kernel(
    q, k, v, out, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, out_stride_t, out_stride_h,
    seq_offsets, tiles, num_targets, window_size, half_alpha, inverse_n,
    position_bias, time_bias, cells, steps, q_times, q_offset, k_times, k_offset, tile_buckets, runs, near, row, total,
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
    first, full, diagonal, end = _key_ranges(
        first_row, length, history, window_size, HAS_TARGETS, HAS_WINDOW, BLOCK_M, BLOCK_N
    )
    q_high, q_low, q_offsets = 0.0, 0.0, 0
    nearest, near_start = 0, diagonal
    if HAS_TIME:
        slot = begin // BLOCK_M + b + block
        q_high = tl.load(q_times + begin + t, t < length, 0.0)[:, None]
        q_low = tl.load(q_times + total + begin + t, t < length, 0.0)[:, None]
        q_offsets = tl.load(q_offset + begin + t, t < length, 0)[:, None]
        k_times += begin
        k_offset += begin
        tile_buckets += slot * row
        near += slot * (tl.minimum(row, NEAR) * BLOCK_M * BLOCK_N)
        nearest = (end - 1) // BLOCK_N
        diagonal = tl.load(runs + slot)
        near_start = tl.maximum(diagonal, (nearest - (NEAR - 1)) * BLOCK_N)
    bias = (
        (position_bias, time_bias, cells, steps), (q_high, q_low, q_offsets), (k_times, k_offset),
        (tile_buckets, near, nearest), total,
    )  # fmt: skip
    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)
    bounds = (first, full, diagonal, near_start, end)
    for part in tl.static_range(4):
        if (part > 0 or HAS_WINDOW) and (part != 2 or HAS_TIME):  # noqa: SIM102  known to the compiler
            if bounds[part] < bounds[part + 1]:
                acc = _attend(
                    acc, query, bounds[part], bounds[part + 1], t, length, history, k, v, k_stride_t,
                    v_stride_t, half_alpha, window_size, bias, D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME,
                    FAST, PRECISION, part != 1, part == 3, BLOCK_M, BLOCK_N, PAD_D, PAD_V,
                )  # fmt: skip
    e = tl.arange(0, PAD_V)
    out += (begin + first_row) * out_stride_t + head * out_stride_h
    inside = (t < length)[:, None] & (e < V_OUT)[None, :]
    tl.store(out + m[:, None] * out_stride_t + e[None, :], (acc * inverse_n).to(out.dtype.element_ty), inside)
