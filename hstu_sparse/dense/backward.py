"""The backward kernels: dq and the bias tables' gradients by tiles of queries, dk and dv by tiles of keys.

Letters: H heads, D query/key head size, V value head size, N max_seq_len. m: query rows of a tile, n: its key rows; t
and s: their positions in the sequence.

Nothing but the inputs is kept from the forward pass: the scores are computed anew. The scale 1/N, alpha and the factor
of 2 in the slope of SiLU (see tiles.py) are applied once, to the accumulators.
"""

import triton
import triton.language as tl

from hstu_sparse._triton import COMPILED
from hstu_sparse.dense.bias import (
    NEAR,
    _ahead,
    _bias_position,
    _edge_place,
    _half_bias,
    _look_up,
    _opaque,
    _other_place,
    _reached,
)
from hstu_sparse.dense.bias_grad import (
    RING,
    _add_diagonals,
    _atomic_add,
    _barrier,
    _exact_scale,
    _greatest,
    _histogram_add,
    _histogram_add_sum,
    _histogram_close,
    _histogram_lane,
    _histogram_move_sum,
    _histogram_open,
    _keep_greatest,
    _ring_add,
    _ring_add_wgmma,
    _ring_check,
    _ring_flush,
    _ring_lane,
    _ring_open,
)
from hstu_sparse.dense.tiles import (
    GIVEN,
    PER_BATCH,
    _key_ranges,
    _load_rows,
    _matrix,
    _query_ranges,
    _sequence,
    _silu_and_slope,
    _visible,
)


@triton.jit
def _in_registers(x, WGMMA: tl.constexpr):
    """x, the left operand of products, held in registers and not read from shared memory for every one of them.

    Triton does so only with what comes out of a product: this one adds zeros.
    """
    if WGMMA:
        none = tl.dot(tl.zeros([x.shape[0], 16], x.dtype), tl.zeros([16, x.shape[1]], x.dtype))
        return (x.to(tl.float32) + none).to(x.dtype)
    else:
        return x


@triton.jit
def _add_buckets(gradients, bucket, ds, FAST: tl.constexpr):
    """The time bias's gradient at each pair's bucket += ds."""
    _, _, time_grad, lane, _, scale, time_scale = gradients
    if COMPILED:
        _histogram_add(lane, bucket, ds, time_scale, FAST)
    else:
        tl.atomic_add(time_grad + bucket, ds * scale, ds != 0.0)


@triton.jit
def _add_sum(gradients, bucket, ds, FAST: tl.constexpr):
    """The time bias's gradient at one bucket += the sum of ds."""
    _, _, time_grad, lane, _, scale, time_scale = gradients
    if COMPILED:
        _histogram_add_sum(lane, bucket, ds, time_scale, FAST)
    else:
        tl.atomic_add(time_grad + bucket, tl.sum(ds) * scale)


@triton.jit
def _move_sum(gradients, bucket, ds, own, other, origin, edge, FAST: tl.constexpr):
    """The time bias's gradient at a bucket += the sum of ds past its edge, and less so much at the bucket before."""
    _, _, time_grad, lane, _, scale, time_scale = gradients
    place = _edge_place(own, origin, tl.load(edge), True)
    if COMPILED:
        _histogram_move_sum(lane, bucket, ds, place, other, time_scale, FAST)
    else:
        total = tl.sum(ds * _reached(place, other)) * scale
        tl.atomic_add(time_grad + bucket, total)
        tl.atomic_add(time_grad + bucket - 1, -total)


@triton.jit
def _attend_dq(
    acc, ring_low, q, do, first, last, t, first_row, length, history, k, v, k_stride, v_stride, half_alpha,
    window_size, bias, gradients,
    D: tl.constexpr, V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr, IS_NEAR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WGMMA: tl.constexpr,
    PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, D] + the keys first .. last, the gradients of the bias tables, and the ring's lowest distance."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, PAD_D)
    e = tl.arange(0, PAD_V)
    place = _bias_position(t, history, HAS_TARGETS)[:, None]
    position_grad, ring, greatest, scale = gradients[0], gradients[1], gradients[4], gradients[5]
    ahead = (0, 0.0, 0)
    if HAS_TIME and not MASKED:
        ahead = _ahead(first, bias, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        s = start + n
        key = _load_rows(k, start, n, d, k_stride, length, D, PAD_D, MASKED)
        value = _load_rows(v, start, n, e, v_stride, length, V, PAD_V, MASKED)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        entry = ahead[0]
        half_bias, bucket, ahead = _half_bias(
            start, place, history, length, ahead, bias, HAS_TARGETS, HAS_POSITION, HAS_TIME, MASKED, IS_NEAR, True,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
        half = scores * half_alpha
        if HAS_POSITION or HAS_TIME:
            half += half_bias
        _, slope = _silu_and_slope(half, FAST)
        ds = dp * slope + dp
        if MASKED and not (IS_NEAR and HAS_TIME):
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
                _atomic_add(position_grad + tl.maximum(history - s, 0), column, seen)
                along = tl.where(candidate, 0.0, ds)
            if FAST and COMPILED:
                nearest = first_row - start - (BLOCK_N - 1)
                distance = tl.arange(0, BLOCK_M)[:, None] - n[None, :]
                if nearest < ring_low:  # at first, and when the ring is at its end
                    if WGMMA:
                        _ring_check(along, distance, greatest)
                    _barrier(length)
                    _ring_flush(ring, position_grad, ring_low, ring_low, tl.minimum(ring_low + RING, length), length)
                    _barrier(length)
                    ring_low = first_row - start + BLOCK_M - RING
                cell = 4 * (first_row - start - ring_low)
                if WGMMA:
                    _ring_add_wgmma(_ring_lane(ring) + cell, along, scale)
                else:
                    _ring_add(ring + cell + 4 * distance, along, scale)
            else:
                _add_diagonals(position_grad, along, first_row, start, length, scale, BLOCK_M, BLOCK_N)
        if HAS_TIME:
            if MASKED:
                _add_buckets(gradients, bucket, ds, FAST)
            else:
                lowest = entry >> 3
                edges = entry & 7
                _add_sum(gradients, lowest, ds, FAST)
                if edges > 0:
                    edge = bias[0][3] + lowest
                    origin = tl.load(bias[2][1] + start).to(tl.int64)
                    own = _opaque(bias[1][2])
                    other = _other_place(_look_up(bias[2][1], s.to(tl.int64)[None, :]), origin.to(tl.int32), True)
                    _move_sum(gradients, lowest + 1, ds, own, other, origin, edge + 1, FAST)
                    if edges > 1:
                        _move_sum(gradients, lowest + 2, ds, own, other, origin, edge + 2, FAST)
                    if edges > 2:
                        _move_sum(gradients, lowest + 3, ds, own, other, origin, edge + 3, FAST)
                        _move_sum(gradients, lowest + 4, ds, own, other, origin, edge + 4, FAST)
    return acc, ring_low


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=GIVEN)
def dense_attention_bwd_dq_kernel(
    q, k, v, do, dq, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, do_stride_t, do_stride_h,
    dq_stride_t, dq_stride_h, seq_offsets, tiles, num_targets, window_size, half_alpha, half_inverse_n, alpha,
    position_bias, time_bias, position_grad, time_grad, greatest, time_shift, cells, steps, q_times, q_offset,
    k_times, k_offset, tile_buckets, runs, near, row, total,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr,
    HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, TABLE: tl.constexpr, COPIES: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WGMMA: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """One program: dq of BLOCK_M queries of one head, and their part of the bias tables' gradients."""
    tile = tl.program_id(0) // H
    head = tl.program_id(0) % H
    b = tl.load(tiles + 2 * tile)
    if b < 0:
        return
    begin, length, history = _sequence(b, seq_offsets, num_targets, HAS_TARGETS)
    block = (length + BLOCK_M - 1) // BLOCK_M - 1 - tl.load(tiles + 2 * tile + 1)
    first_row = block * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PAD_D)
    e = tl.arange(0, PAD_V)
    t = first_row + m
    q += begin * q_stride_t + head * q_stride_h
    k += begin * k_stride_t + head * k_stride_h
    v += begin * v_stride_t + head * v_stride_h
    do += begin * do_stride_t + head * do_stride_h
    query = _in_registers(_load_rows(q, first_row, m, d, q_stride_t, length, D, PAD_D, True), WGMMA)
    dout = _in_registers(_load_rows(do, first_row, m, e, do_stride_t, length, V, PAD_V, True), WGMMA)
    histogram, lane = 0, 0
    ring = 0
    # Of the tables' gradients: in FAST compiled kernels they are integers, sums of terms times this.
    scale = half_inverse_n
    time_scale = 1.0
    if (HAS_POSITION or HAS_TIME) and FAST and COMPILED:
        scale = _exact_scale(greatest)
        time_scale = scale / (1 << time_shift).to(tl.float32)
    if HAS_POSITION and FAST and COMPILED:
        ring = _ring_open(length)
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
        # Several copies of the small table keep the programs' additions from queueing at one address.
        time_grad += (tl.program_id(0) % COPIES) * TABLE
        if COMPILED:
            histogram = _histogram_open(length)
            lane = _histogram_lane(histogram)
    bias = (
        (position_bias, time_bias, cells, steps), (q_high, q_low, q_offsets), (k_times, k_offset),
        (tile_buckets, near, nearest), total,
    )  # fmt: skip
    if ((HAS_POSITION and FAST) or HAS_TIME) and COMPILED:
        tl.debug_barrier()
    acc = tl.zeros([BLOCK_M, PAD_D], tl.float32)
    ring_low = 1 << 30
    gradients = (position_grad, ring, time_grad, lane, greatest, scale, time_scale)
    bounds = (first, full, diagonal, near_start, end)
    for part in tl.static_range(4):
        if (part > 0 or HAS_WINDOW) and (part != 2 or HAS_TIME):  # noqa: SIM102  known to the compiler
            if bounds[part] < bounds[part + 1]:
                acc, ring_low = _attend_dq(
                    acc, ring_low, query, dout, bounds[part], bounds[part + 1], t, first_row, length, history, k, v,
                    k_stride_t, v_stride_t, half_alpha, window_size, bias, gradients, D, V, HAS_TARGETS, HAS_WINDOW,
                    HAS_POSITION, HAS_TIME, FAST, PRECISION, part != 1, part == 3, BLOCK_M, BLOCK_N, WGMMA, PAD_D,
                    PAD_V,
                )  # fmt: skip
    if HAS_POSITION and FAST and COMPILED:
        tl.debug_barrier()
        nearest = first_row - (end - 1) // BLOCK_N * BLOCK_N - (BLOCK_N - 1)
        farthest = tl.minimum(first_row - first + BLOCK_M, ring_low + RING)
        _ring_flush(ring, position_grad, ring_low, tl.maximum(nearest, ring_low), farthest, length)
    if HAS_TIME and COMPILED:
        _histogram_close(histogram, time_grad, half_inverse_n, time_shift, TABLE, FAST)
    dq += (begin + first_row) * dq_stride_t + head * dq_stride_h
    inside = (t < length)[:, None] & (d < D_OUT)[None, :]
    result = acc * (alpha * half_inverse_n)
    tl.store(dq + m[:, None] * dq_stride_t + d[None, :], result.to(dq.dtype.element_ty), inside)


@triton.jit
def _attend_dkv(
    dk, dv, most, k, v, first, last, s, length, history, q, do, q_stride, do_stride, half_alpha, window_size, bias,
    D: tl.constexpr, V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, IS_NEAR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, TMA: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """dk [BLOCK_N, D] and dv [BLOCK_N, V] + the queries first .. last; tiles are transposed, keys x queries.

    EXACT: and `most` with the tiles of ds, see `_greatest`.
    """
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PAD_D)
    e = tl.arange(0, PAD_V)
    place = _bias_position(s, history, HAS_TARGETS)[:, None]
    ahead = (0, 0.0, 0)
    if HAS_TIME and not MASKED:
        ahead = _ahead(first, bias, BLOCK_M)
    for start in range(first, last, BLOCK_M):
        query = _load_rows(q, start, m, d, q_stride, length, D, PAD_D, MASKED, TMA)
        dout = _load_rows(do, start, m, e, do_stride, length, V, PAD_V, MASKED, TMA)
        scores = tl.dot(k, tl.trans(query), input_precision=PRECISION)
        half_bias, _, ahead = _half_bias(
            start, place, history, length, ahead, bias, HAS_TARGETS, HAS_POSITION, HAS_TIME, MASKED, IS_NEAR, False,
            BLOCK_N, BLOCK_M,
        )  # fmt: skip
        t = start + m
        half = scores * half_alpha
        if HAS_POSITION or HAS_TIME:
            half += half_bias
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        weights, slope = _silu_and_slope(half, FAST)
        if MASKED and not (IS_NEAR and HAS_TIME):
            mask = _visible(t[None, :], s[:, None], length, history, window_size, HAS_TARGETS, HAS_WINDOW)
            weights = tl.where(mask, weights, 0.0)
            slope = tl.where(mask, slope, -1.0)
        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
        ds = (dp * slope + dp).to(query.dtype)
        if EXACT:
            most = _greatest(most, ds)
        dk = tl.dot(ds, query, dk, input_precision=PRECISION)
    return dk, dv, most


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=GIVEN)
def dense_attention_bwd_dkv_kernel(
    q, k, v, do, dk, dv, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, do_stride_t,
    do_stride_h, dk_stride_t, dk_stride_h, dv_stride_t, dv_stride_h, seq_offsets, tiles,
    num_targets, window_size, half_alpha, half_inverse_n, alpha, position_bias, time_bias, greatest, cells, steps,
    q_times, q_offset, k_times, k_offset, tile_buckets, runs, near, row, total,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr,
    HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    PAD_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One program: dk and dv of BLOCK_N keys of one head; and `greatest`, see `_exact_scale`, if it is given."""
    tile = tl.program_id(0) // H
    head = tl.program_id(0) % H
    b = tl.load(tiles + 2 * tile)
    if b < 0:
        return
    begin, length, history = _sequence(b, seq_offsets, num_targets, HAS_TARGETS)
    first_row = (tl.load(tiles + 2 * tile + 1) & 0xFFFFFF) * BLOCK_N
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
    k_high, k_low, k_offsets = 0.0, 0.0, 0
    if HAS_TIME:
        k_high = tl.load(k_times + begin + s, s < length, 0.0)[:, None]
        k_low = tl.load(k_times + total + begin + s, s < length, 0.0)[:, None]
        k_offsets = tl.load(k_offset + begin + s, s < length, 0)[:, None]
        q_times += begin
        q_offset += begin
        slot = begin // BLOCK_N + b + first_row // BLOCK_N
        tile_buckets += slot * row
        near += slot * (tl.minimum(row, NEAR) * BLOCK_M * BLOCK_N)

    # Queries: masked up to `full`, free of masks up to `free`, masked up to `end`.
    begin_row, full, free, end = _query_ranges(
        first_row, length, history, window_size, HAS_TARGETS, HAS_WINDOW, BLOCK_M, BLOCK_N
    )
    if HAS_TIME:
        full = tl.load(runs + slot)
    wide = tl.minimum(full, end)
    near_end = tl.minimum(wide, begin_row + NEAR * BLOCK_M)

    q = _matrix(q, q_stride_t, length, D, BLOCK_M, PAD_D, TMA)
    do = _matrix(do, do_stride_t, length, V, BLOCK_M, PAD_V, TMA)
    acc_k = tl.zeros([BLOCK_N, PAD_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, PAD_V], tl.float32)
    most = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    bias = (
        (position_bias, time_bias, cells, steps), (k_high, k_low, k_offsets), (q_times, q_offset),
        (tile_buckets, near, begin_row // BLOCK_M), total,
    )  # fmt: skip
    if not HAS_TIME:
        near_end = wide
    ranges = ((begin_row, near_end), (near_end, wide), (full, free), (free, end))
    for part in tl.static_range(4):
        if part != 1 or HAS_TIME:  # noqa: SIM102  known to the compiler
            # The condition spares registers with TMA and costs some without.
            if not TMA or ranges[part][0] < ranges[part][1]:
                acc_k, acc_v, most = _attend_dkv(
                    acc_k, acc_v, most, key, value, *ranges[part], s, length, history, q, do, q_stride_t, do_stride_t,
                    half_alpha, window_size, bias, D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME, FAST,
                    PRECISION, part != 2, part == 0, BLOCK_M, BLOCK_N, PAD_D, PAD_V, TMA, greatest is not None,
                )  # fmt: skip
    if greatest is not None:
        _keep_greatest(most, greatest, key.dtype == tl.float16)
    inside = (s < length)[:, None]
    dk += (begin + first_row) * dk_stride_t + head * dk_stride_h
    result = (acc_k * (alpha * half_inverse_n)).to(dk.dtype.element_ty)
    tl.store(dk + n[:, None] * dk_stride_t + d[None, :], result, inside & (d < D_OUT)[None, :])
    dv += (begin + first_row) * dv_stride_t + head * dv_stride_h
    result = (acc_v * (2.0 * half_inverse_n)).to(dv.dtype.element_ty)
    tl.store(dv + n[:, None] * dv_stride_t + e[None, :], result, inside & (e < V_OUT)[None, :])
