"""Compute the output: a program owns a tile of queries and walks over the keys that they see.

Letters: H heads, D query/key head size, V value head size, N max_seq_len. m: query rows of a tile, n: its key rows; t
and s: their positions in the sequence.

Since SiLU needs no normaliser there is no running maximum and no rescaling of the accumulator. The scale 1/N is applied
once, to the accumulator.
"""

import triton
import triton.language as tl

from hstu_sparse.bias.scores import Bias, bias_position, half_bias, read_ahead
from hstu_sparse.dense.ranges import (
    CALLER_POINTERS,
    PER_BATCH,
    Kind,
    find_query_tile,
    query_tile_bias,
    scheduled,
    silu_of_half,
    store_block,
    visible,
)
from hstu_sparse.tiles.rows import load_block, row_pointer


@triton.jit
def _attend(
    acc, q, first, last, t, first_row, sequence, k, v, k_stride, v_stride, half_scale, bias, kind, MASKED: tl.constexpr,
    IS_NEAR: tl.constexpr,
):  # fmt: skip
    """Return acc [BLOCK_M, V] plus the keys first .. last (multiples of BLOCK_N; MASKED: `last` may pass the end)."""
    n = tl.arange(0, kind.BLOCK_N)
    place = bias_position(t, sequence.history, kind.HAS_TARGETS)[:, None]
    ahead = (0, 0.0, 0)
    if kind.HAS_TIME and not MASKED:
        ahead = read_ahead(first, last, bias, kind.BLOCK_N, kind.ASM)
    for start in range(first, last, kind.BLOCK_N):
        key = load_block(k, start, n, k_stride, sequence.length, kind.D, kind.PAD_D, MASKED)
        scores = tl.dot(q, tl.trans(key), input_precision=kind.PRECISION)
        biases, _, ahead = half_bias(
            start, first_row, place, sequence, ahead, bias, kind, MASKED, IS_NEAR, True, kind.BLOCK_M, kind.BLOCK_N
        )
        half = scores * half_scale
        if kind.HAS_POSITION or kind.HAS_TIME:
            half += biases
        weights = silu_of_half(half, kind.FAST)
        if MASKED and not (IS_NEAR and kind.HAS_TIME):
            mask = visible(t[:, None], (start + n)[None, :], sequence, kind.HAS_TARGETS, kind.HAS_WINDOW)
            weights = tl.where(mask, weights, 0.0)
        value = load_block(v, start, n, v_stride, sequence.length, kind.V, kind.PAD_V, MASKED)
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=kind.PRECISION)
    return acc


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=CALLER_POINTERS)
def dense_attention_fwd_kernel(
    q, k, v, out, seq_offsets, num_targets, window_size, half_scale, inverse_n, tiles, row, total, bias,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr, PAD_D: tl.constexpr,
    PAD_V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of BLOCK_M queries of one head in each program.

    q, k, v, out: `Rows`. tiles: `TileMap`, row: its `row`. bias: `KernelBias`.
    """
    head, b, entry = scheduled(tiles.schedule, H)
    if b < 0:
        return
    begin, sequence, block, t = find_query_tile(b, entry, seq_offsets, num_targets, window_size, BLOCK_M)
    first_row = block * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    query = load_block(row_pointer(q, begin, head), first_row, m, q.stride_t, sequence.length, D, PAD_D, True)
    bounds, bias_fields = query_tile_bias(
        b, begin, block, first_row, t, sequence, bias, tiles, row, total, HAS_TARGETS, HAS_WINDOW, HAS_TIME, BLOCK_M,
        BLOCK_N,
    )  # fmt: skip
    tile_bias = Bias(bias.position, bias.time, bias.cells, bias.steps, *bias_fields, total)
    keys, values = row_pointer(k, begin, head), row_pointer(v, begin, head)
    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)
    for part in tl.static_range(4):
        if (part > 0 or HAS_WINDOW) and (part != 2 or HAS_TIME):  # noqa: SIM102  known to the compiler
            if bounds[part] < bounds[part + 1]:
                acc = _attend(
                    acc, query, bounds[part], bounds[part + 1], t, first_row, sequence, keys, values, k.stride_t,
                    v.stride_t, half_scale, tile_bias,
                    Kind(
                        D, V, PAD_D, PAD_V, BLOCK_M, BLOCK_N, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME, FAST,
                        PRECISION, ASM,
                    ),
                    part != 1, part == 3,
                )  # fmt: skip
    store_block(
        row_pointer(out, begin + first_row, head), m, out.stride_t, t < sequence.length, acc * inverse_n, V_OUT, PAD_V
    )
