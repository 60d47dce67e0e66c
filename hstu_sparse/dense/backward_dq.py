"""Compute dq and the gradients of the bias tables: a program owns a tile of queries, as in forward.

Letters: H heads, D query/key head size, V value head size, N max_seq_len. m: query rows of a tile, n: its key rows; t
and s: their positions in the sequence.

Nothing but the inputs is kept from the forward pass: the scores are computed anew. The scale 1/N, scale and the factor
of 2 in the slope of SiLU (see ranges.py) are applied once, to the accumulator.
"""

import triton
import triton.language as tl

from hstu_sparse.bias.gradients import Gradients, add_position, add_time, exact_scale
from hstu_sparse.bias.scores import Bias, bias_position, half_bias, read_ahead
from hstu_sparse.bias.sums import (
    RING,
    histogram_close,
    histogram_lane,
    histogram_open,
    ring_flush,
    ring_open,
)
from hstu_sparse.dense.ranges import (
    CALLER_POINTERS,
    PER_BATCH,
    Kind,
    find_query_tile,
    query_tile_bias,
    scheduled,
    silu_and_slope,
    store_block,
    visible,
)
from hstu_sparse.tiles.rows import in_registers, load_block, row_pointer


@triton.jit
def _attend_dq(
    acc, ring_low, q, do, first, last, t, first_row, sequence, k, v, k_stride, v_stride, half_scale, bias, gradients,
    kind, MASKED: tl.constexpr, IS_NEAR: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return dq [BLOCK_M, D] plus the keys first .. last, sums for the bias tables, and the ring's least distance."""
    n = tl.arange(0, kind.BLOCK_N)
    place = bias_position(t, sequence.history, kind.HAS_TARGETS)[:, None]
    ahead = (0, 0.0, 0)
    if kind.HAS_TIME and not MASKED:
        ahead = read_ahead(first, last, bias, kind.BLOCK_N, kind.ASM)
    for start in range(first, last, kind.BLOCK_N):
        key = load_block(k, start, n, k_stride, sequence.length, kind.D, kind.PAD_D, MASKED)
        value = load_block(v, start, n, v_stride, sequence.length, kind.V, kind.PAD_V, MASKED)
        scores = tl.dot(q, tl.trans(key), input_precision=kind.PRECISION)
        entry = ahead[0]
        biases, buckets, ahead = half_bias(
            start, first_row, place, sequence, ahead, bias, kind, MASKED, IS_NEAR, True, kind.BLOCK_M, kind.BLOCK_N
        )
        # After the bias's branches, so that this product overlaps tanh.
        dp = tl.dot(do, tl.trans(value), input_precision=kind.PRECISION)
        half = scores * half_scale
        if kind.HAS_POSITION or kind.HAS_TIME:
            half += biases
        _, slope = silu_and_slope(half, kind.FAST)
        ds = dp * slope + dp
        if MASKED and not (IS_NEAR and kind.HAS_TIME):
            mask = visible(t[:, None], (start + n)[None, :], sequence, kind.HAS_TARGETS, kind.HAS_WINDOW)
            ds = tl.where(mask, ds, 0.0)
        acc = tl.dot(ds.to(key.dtype), key, acc, input_precision=kind.PRECISION)
        if kind.HAS_POSITION:
            ring_low = add_position(gradients, ring_low, ds, t, first_row, start, sequence, kind, EXACT)
        if kind.HAS_TIME:
            add_time(gradients, ds, buckets, entry, start, bias, MASKED, kind.ASM, EXACT)
    return acc, ring_low


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=CALLER_POINTERS)
def dense_attention_bwd_dq_kernel(
    q, k, v, do, dq, position_grad, time_grad, norms, time_shift, seq_offsets, num_targets, window_size, half_scale,
    half_inverse_n, scale, tiles, row, total, bias,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr, PAD_D: tl.constexpr,
    PAD_V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr, TABLE: tl.constexpr,
    COPIES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """Compute dq of BLOCK_M queries of one head in each program, and their part of the bias tables' gradients.

    norms: present if the sums of the tables' gradients are integers. HOLD: keep q and do in registers.
    """
    EXACT: tl.constexpr = norms is not None
    head, b, entry = scheduled(tiles.schedule, H)
    if b < 0:
        return
    begin, sequence, block, t = find_query_tile(b, entry, seq_offsets, num_targets, window_size, BLOCK_M)
    first_row = block * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    query = load_block(row_pointer(q, begin, head), first_row, m, q.stride_t, sequence.length, D, PAD_D, True)
    dout = load_block(row_pointer(do, begin, head), first_row, m, do.stride_t, sequence.length, V, PAD_V, True)
    query, dout = in_registers(query, HOLD), in_registers(dout, HOLD)
    bounds, bias_fields = query_tile_bias(
        b, begin, block, first_row, t, sequence, bias, tiles, row, total, HAS_TARGETS, HAS_WINDOW, HAS_TIME, BLOCK_M,
        BLOCK_N,
    )  # fmt: skip
    tile_bias = Bias(bias.position, bias.time, bias.cells, bias.steps, *bias_fields, total)
    ring, histogram, lane = 0, 0, 0
    sum_scale, time_scale = half_inverse_n, 1.0
    if EXACT:
        sum_scale = exact_scale(norms)
        time_scale = sum_scale / (1 << time_shift).to(tl.float32)
    if HAS_POSITION and EXACT and ASM:
        ring = ring_open(sequence.length)
    if HAS_TIME:
        # The small table has several copies, so that programs do not contend for one address.
        time_grad += (tl.program_id(0) % COPIES) * TABLE
        if ASM:
            histogram = histogram_open(sequence.length)
            lane = histogram_lane(histogram)
    if ((HAS_POSITION and EXACT) or HAS_TIME) and ASM:
        tl.debug_barrier()
    gradients = Gradients(position_grad, time_grad, ring, lane, sum_scale, time_scale)
    keys, values = row_pointer(k, begin, head), row_pointer(v, begin, head)
    acc = tl.zeros([BLOCK_M, PAD_D], tl.float32)
    ring_low = 1 << 30
    for part in tl.static_range(4):
        if (part > 0 or HAS_WINDOW) and (part != 2 or HAS_TIME):  # noqa: SIM102  known to the compiler
            if bounds[part] < bounds[part + 1]:
                acc, ring_low = _attend_dq(
                    acc, ring_low, query, dout, bounds[part], bounds[part + 1], t, first_row, sequence,
                    keys, values, k.stride_t, v.stride_t, half_scale, tile_bias, gradients,
                    Kind(
                        D, V, PAD_D, PAD_V, BLOCK_M, BLOCK_N, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME, FAST,
                        PRECISION, ASM,
                    ),
                    part != 1, part == 3, EXACT,
                )  # fmt: skip
    if HAS_POSITION and EXACT and ASM:
        tl.debug_barrier()
        end = bounds[4]
        nearest = first_row - (end - 1) // BLOCK_N * BLOCK_N - (BLOCK_N - 1)
        farthest = tl.minimum(first_row - bounds[0] + BLOCK_M, ring_low + RING)
        ring_flush(ring, position_grad, ring_low, tl.maximum(nearest, ring_low), farthest, sequence.length)
    if HAS_TIME and ASM:
        histogram_close(histogram, time_grad, half_inverse_n, time_shift, TABLE, EXACT)
    target = row_pointer(dq, begin + first_row, head)
    store_block(target, m, dq.stride_t, t < sequence.length, acc * (scale * half_inverse_n), D_OUT, PAD_D)
