"""Compute dk and dv: a program owns a tile of keys and walks over the queries that see them.

Letters: H heads, D query/key head size, V value head size, N max_seq_len. m: rows of a block of queries, n: key rows of
the tile; t and s: their positions in the sequence. Tiles are transposed, keys x queries.

As in dq the scores are computed anew, and constant factors are applied once, to the accumulators.
"""

import triton
import triton.language as tl

from hstu_sparse.bias.scores import NEAR, Bias, bias_position, half_bias, read_ahead
from hstu_sparse.dense.ranges import (
    CALLER_POINTERS,
    MOST_TILES,
    PER_BATCH,
    Kind,
    find_sequence,
    query_ranges,
    scheduled,
    silu_and_slope,
    store_block,
    visible,
)
from hstu_sparse.tiles.rows import block_source, load_block, row_pointer


@triton.jit
def _attend_dkv(
    dk, dv, k, v, first, last, s, first_row, sequence, q, do, q_stride, do_stride, half_scale, bias, kind,
    MASKED: tl.constexpr, IS_NEAR: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return dk [BLOCK_N, D] and dv [BLOCK_N, V] plus the terms of the queries first .. last."""
    m = tl.arange(0, kind.BLOCK_M)
    place = bias_position(s, sequence.history, kind.HAS_TARGETS)[:, None]
    ahead = (0, 0.0, 0)
    if kind.HAS_TIME and not MASKED:
        ahead = read_ahead(first, last, bias, kind.BLOCK_M, kind.ASM)
    for start in range(first, last, kind.BLOCK_M):
        query = load_block(q, start, m, q_stride, sequence.length, kind.D, kind.PAD_D, MASKED, TMA)
        dout = load_block(do, start, m, do_stride, sequence.length, kind.V, kind.PAD_V, MASKED, TMA)
        scores = tl.dot(k, tl.trans(query), input_precision=kind.PRECISION)
        biases, _, ahead = half_bias(
            start, first_row, place, sequence, ahead, bias, kind, MASKED, IS_NEAR, False, kind.BLOCK_N, kind.BLOCK_M
        )
        half = scores * half_scale
        if kind.HAS_POSITION or kind.HAS_TIME:
            half += biases
        dp = tl.dot(v, tl.trans(dout), input_precision=kind.PRECISION)
        weights, slope = silu_and_slope(half, kind.FAST)
        if MASKED and not (IS_NEAR and kind.HAS_TIME):
            mask = visible((start + m)[None, :], s[:, None], sequence, kind.HAS_TARGETS, kind.HAS_WINDOW)
            weights = tl.where(mask, weights, 0.0)
            slope = tl.where(mask, slope, -1.0)
        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=kind.PRECISION)
        dk = tl.dot((dp * slope + dp).to(query.dtype), query, dk, input_precision=kind.PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=CALLER_POINTERS)
def dense_attention_bwd_dkv_kernel(
    q, k, v, do, dk, dv, seq_offsets, num_targets, window_size, half_scale, half_inverse_n, scale, tiles, row, total,
    bias,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr, PAD_D: tl.constexpr,
    PAD_V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of BLOCK_N keys of one head in each program. TMA: load queries by tensor descriptor."""
    head, b, entry = scheduled(tiles.schedule, H)
    if b < 0:
        return
    begin, sequence = find_sequence(b, seq_offsets, num_targets, window_size)
    length = sequence.length
    # The mask tells the compiler that it is not negative: divisions by powers of two are shifts, with fewer registers.
    first_row = (tl.load(entry + 1) & MOST_TILES) * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    s = first_row + n
    key = load_block(row_pointer(k, begin, head), first_row, n, k.stride_t, length, D, PAD_D, True)
    value = load_block(row_pointer(v, begin, head), first_row, n, v.stride_t, length, V, PAD_V, True)
    begin_row, full, free, end = query_ranges(first_row, sequence, HAS_TARGETS, HAS_WINDOW, BLOCK_M, BLOCK_N)
    high, low, offset = 0.0, 0.0, 0
    q_times, q_offset, entries, near = bias.query_times, bias.query_offset, tiles.entries, tiles.near
    if HAS_TIME:
        high = tl.load(bias.key_times + begin + s, s < length, 0.0)[:, None]
        low = tl.load(bias.key_times + total + begin + s, s < length, 0.0)[:, None]
        offset = tl.load(bias.key_offset + begin + s, s < length, 0)[:, None]
        q_times += begin
        q_offset += begin
        slot = begin // BLOCK_N + b + first_row // BLOCK_N
        entries += slot * row
        near += slot * (tl.minimum(row, NEAR) * BLOCK_M * BLOCK_N)
        full = tl.load(tiles.runs + slot)
    tile_bias = Bias(
        bias.position, bias.time, bias.cells, bias.steps, high, low, offset, q_times, q_offset, entries, near,
        begin_row // BLOCK_M, total,
    )  # fmt: skip
    # The loops are over: near blocks, or, without times, all up to `full`; with times, other blocks that need masks;
    # blocks that need no mask; the sequence's end.
    wide = tl.minimum(full, end)
    near_end = tl.minimum(wide, begin_row + NEAR * BLOCK_M) if HAS_TIME else wide
    ranges = ((begin_row, near_end), (near_end, wide), (full, free), (free, end))

    queries = block_source(row_pointer(q, begin, head), q.stride_t, length, D, BLOCK_M, PAD_D, TMA)
    douts = block_source(row_pointer(do, begin, head), do.stride_t, length, V, BLOCK_M, PAD_V, TMA)
    acc_k = tl.zeros([BLOCK_N, PAD_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, PAD_V], tl.float32)
    for part in tl.static_range(4):
        if part != 1 or HAS_TIME:  # noqa: SIM102  known to the compiler
            # The condition saves registers with TMA and costs some without.
            if not TMA or ranges[part][0] < ranges[part][1]:
                acc_k, acc_v = _attend_dkv(
                    acc_k, acc_v, key, value, *ranges[part], s, first_row, sequence, queries, douts, q.stride_t,
                    do.stride_t, half_scale, tile_bias,
                    Kind(
                        D, V, PAD_D, PAD_V, BLOCK_M, BLOCK_N, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME, FAST,
                        PRECISION, ASM,
                    ),
                    part != 2, part == 0, TMA,
                )  # fmt: skip
    target = row_pointer(dk, begin + first_row, head)
    store_block(target, n, dk.stride_t, s < length, acc_k * (scale * half_inverse_n), D_OUT, PAD_D)
    target = row_pointer(dv, begin + first_row, head)
    store_block(target, n, dv.stride_t, s < length, acc_v * (2.0 * half_inverse_n), V_OUT, PAD_V)
