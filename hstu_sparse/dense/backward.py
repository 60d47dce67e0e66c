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
    _add_narrow,
    _add_wide,
    _bias_position,
    _half_with_bias,
    _look_up,
    _narrow_run,
    _reached,
)
from hstu_sparse.dense.bias_grad import (
    _add_diagonals,
    _add_narrow_time_grad,
    _atomic_add,
    _barrier,
    _exact_scale,
    _histogram_add,
    _histogram_close,
    _histogram_open,
    _ring_add,
    _ring_flush,
    _ring_open,
)
from hstu_sparse.dense.tiles import GIVEN, PER_BATCH, _key_ranges, _load_rows, _sequence, _silu_and_slope, _visible


@triton.jit
def _opaque(x):
    """x, without the compiler's knowing it: what is computed from it is computed anew, not kept in registers."""
    if COMPILED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=True, pack=1)
    else:
        return x


@triton.jit
def _attend_dq(
    acc, q, do, first, last, t, first_row, length, history, k, v, k_stride, v_stride, half_alpha, window_size, scale,
    time_scale, position_bias, time_bias, position_grad, ring, time_grad, histogram, cells, steps, q_high, q_low,
    q_offset, k_times, k_offset, tile_buckets, total,
    D: tl.constexpr, V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, D] + the keys first .. last, and the gradients of the bias tables."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, PAD_D)
    e = tl.arange(0, PAD_V)
    row = _bias_position(t, history, HAS_TARGETS)[:, None]
    # Of the narrow tiles with the lowest bucket `base`: sums of ds, of ds past their first edge, and so on.
    base = -1
    sums0, sums1, sums2, sums3, sums4 = (tl.zeros([BLOCK_M], tl.float32),) * 5
    for start in range(first, last, BLOCK_N):
        key = _load_rows(k, start, n, d, k_stride, length, D, PAD_D, MASKED)
        value = _load_rows(v, start, n, e, v_stride, length, V, PAD_V, MASKED)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        s = start + n
        half, entry, bucket = _half_with_bias(
            scores, start, row, history, length, half_alpha, position_bias, time_bias, cells, steps, q_high, q_low,
            q_offset, k_times, k_offset, tile_buckets, total, HAS_TARGETS, HAS_POSITION, HAS_TIME, MASKED, BLOCK_N,
        )  # fmt: skip
        dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
        _, slope = _silu_and_slope(half, FAST)
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
                _atomic_add(position_grad + tl.maximum(history - s, 0), column, seen)
                along = tl.where(candidate, 0.0, ds)
            if FAST and COMPILED:
                _ring_add(ring, t[:, None] - s[None, :], along, scale)
                _barrier(length)
                # No barrier after it: these cells are next used two blocks on.
                _ring_flush(ring, position_grad, first_row - start + BLOCK_M - 1, length, BLOCK_N)
            else:
                _add_diagonals(position_grad, along, first_row, start, length, scale, BLOCK_M, BLOCK_N)
        if HAS_TIME:
            if not MASKED:
                if entry >> 3 != base:
                    _add_narrow_time_grad(time_grad, base, sums0, sums1, sums2, sums3, sums4, scale)
                    base = entry >> 3
                    sums0, sums1, sums2, sums3, sums4 = (tl.zeros([BLOCK_M], tl.float32),) * 5
                sums0 += tl.sum(ds, 1)
                if entry & 7 > 0:
                    own, other = _opaque(q_offset), _look_up(k_offset, s.to(tl.int64)[None, :])
                    sums1 += tl.sum(tl.where(_reached(own, other, tl.load(steps + base + 1), True), ds, 0.0), 1)
                    if entry & 7 > 1:
                        sums2 += tl.sum(tl.where(_reached(own, other, tl.load(steps + base + 2), True), ds, 0.0), 1)
                    if entry & 7 > 2:
                        sums3 += tl.sum(tl.where(_reached(own, other, tl.load(steps + base + 3), True), ds, 0.0), 1)
                        sums4 += tl.sum(tl.where(_reached(own, other, tl.load(steps + base + 4), True), ds, 0.0), 1)
            elif COMPILED:
                _histogram_add(histogram, bucket, ds, time_scale, FAST)
            else:
                tl.atomic_add(time_grad + bucket, ds * scale)
    if HAS_TIME and not MASKED:
        _add_narrow_time_grad(time_grad, base, sums0, sums1, sums2, sums3, sums4, scale)
    return acc


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=GIVEN)
def dense_attention_bwd_dq_kernel(
    q, k, v, do, dq, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, do_stride_t, do_stride_h,
    dq_stride_t, dq_stride_h, seq_offsets, tiles, num_targets, window_size, half_alpha, half_inverse_n, alpha,
    position_bias, time_bias, position_grad, time_grad, greatest, time_shift, cells, steps, q_times, q_offset,
    k_times, k_offset, tile_buckets, row, total,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr,
    HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, TABLE: tl.constexpr, COPIES: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    PAD_V: tl.constexpr,
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
    t = first_row + m
    q += begin * q_stride_t + head * q_stride_h
    k += begin * k_stride_t + head * k_stride_h
    v += begin * v_stride_t + head * v_stride_h
    do += begin * do_stride_t + head * do_stride_h
    query = _load_rows(q, first_row, m, d, q_stride_t, length, D, PAD_D, True)
    dout = _load_rows(do, first_row, m, tl.arange(0, PAD_V), do_stride_t, length, V, PAD_V, True)
    histogram = 0
    ring = 0
    # Of the tables' gradients: in FAST compiled kernels they are integers, sums of terms times this.
    scale = half_inverse_n
    time_scale = 1.0
    if (HAS_POSITION or HAS_TIME) and FAST and COMPILED:
        scale = _exact_scale(greatest)
        time_scale = scale / (1 << time_shift).to(tl.float32)
    if HAS_POSITION and FAST and COMPILED:
        ring = _ring_open(length)
    q_high, q_low, q_near = 0.0, 0.0, 0
    if HAS_TIME:
        q_high = tl.load(q_times + begin + t, t < length, 0.0)[:, None]
        q_low = tl.load(q_times + total + begin + t, t < length, 0.0)[:, None]
        q_near = tl.load(q_offset + begin + t, t < length, 0)[:, None]
        k_times += begin
        k_offset += begin
        tile_buckets += (begin // BLOCK_M + b + block) * row
        # Several copies of the small table keep the programs' additions from queueing at one address.
        time_grad += (tl.program_id(0) % COPIES) * TABLE
        if COMPILED:
            histogram = _histogram_open(length)

    first, full, diagonal, end = _key_ranges(
        first_row, length, history, window_size, HAS_TARGETS, HAS_WINDOW, BLOCK_M, BLOCK_N
    )
    if HAS_TIME:
        diagonal = _narrow_run(full, diagonal, tile_buckets, BLOCK_N, True)
    acc = tl.zeros([BLOCK_M, PAD_D], tl.float32)
    if HAS_WINDOW:  # noqa: SIM102  one is known to the compiler
        if first < full:
            acc = _attend_dq(
                acc, query, dout, first, full, t, first_row, length, history, k, v, k_stride_t, v_stride_t, half_alpha,
                window_size, scale, time_scale, position_bias, time_bias, position_grad, ring,
                time_grad, histogram, cells, steps, q_high, q_low, q_near, k_times, k_offset, tile_buckets, total, D,
                V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME, FAST, PRECISION, True, BLOCK_M,
                BLOCK_N, PAD_D, PAD_V,
            )  # fmt: skip
    if full < diagonal:
        acc = _attend_dq(
            acc, query, dout, full, diagonal, t, first_row, length, history, k, v, k_stride_t, v_stride_t, half_alpha,
            window_size, scale, time_scale, position_bias, time_bias, position_grad, ring, time_grad,
            histogram, cells, steps, q_high, q_low, q_near, k_times, k_offset, tile_buckets, total, D, V, HAS_TARGETS,
            HAS_WINDOW, HAS_POSITION, HAS_TIME, FAST, PRECISION, False, BLOCK_M, BLOCK_N, PAD_D, PAD_V,
        )  # fmt: skip
    if diagonal < end:
        acc = _attend_dq(
            acc, query, dout, diagonal, end, t, first_row, length, history, k, v, k_stride_t, v_stride_t, half_alpha,
            window_size, scale, time_scale, position_bias, time_bias, position_grad, ring, time_grad,
            histogram, cells, steps, q_high, q_low, q_near, k_times, k_offset, tile_buckets, total, D, V, HAS_TARGETS,
            HAS_WINDOW, HAS_POSITION, HAS_TIME, FAST, PRECISION, True, BLOCK_M, BLOCK_N, PAD_D, PAD_V,
        )  # fmt: skip
    if HAS_POSITION and FAST and COMPILED:
        tl.debug_barrier()
        _ring_flush(ring, position_grad, first_row - (end - 1) // BLOCK_N * BLOCK_N + BLOCK_M - 1, length, 256)
    if HAS_TIME and COMPILED:
        _histogram_close(histogram, time_grad, half_inverse_n, time_shift, TABLE, FAST)
    dq += (begin + first_row) * dq_stride_t + head * dq_stride_h
    inside = (t < length)[:, None] & (d < D_OUT)[None, :]
    result = acc * (alpha * half_inverse_n)
    tl.store(dq + m[:, None] * dq_stride_t + d[None, :], result.to(dq.dtype.element_ty), inside)


@triton.jit
def _attend_dkv(
    dk, dv, k, v, first, last, s, length, history, q, do, q_stride, do_stride, half_alpha, window_size,
    position_bias, time_bias, cells, steps, k_high, k_low, k_offset, q_times, q_offset, tile_buckets, total,
    D: tl.constexpr, V: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr,
    PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """dk [BLOCK_N, D] and dv [BLOCK_N, V] + the queries first .. last; tiles are transposed, keys x queries."""
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PAD_D)
    e = tl.arange(0, PAD_V)
    column = _bias_position(s, history, HAS_TARGETS)[:, None]
    for start in range(first, last, BLOCK_M):
        query = _load_rows(q, start, m, d, q_stride, length, D, PAD_D, MASKED)
        dout = _load_rows(do, start, m, e, do_stride, length, V, PAD_V, MASKED)
        scores = tl.dot(k, tl.trans(query), input_precision=PRECISION)
        t = start + m
        half = scores * half_alpha
        if HAS_POSITION:
            half += _look_up(position_bias, _bias_position(t, history, HAS_TARGETS)[None, :] - column)
        if HAS_TIME and MASKED:
            q_high = tl.load(q_times + t, t < length, 0.0)[None, :]
            q_low = tl.load(q_times + total + t, t < length, 0.0)[None, :]
            half, _ = _add_wide(half, q_high, q_low, k_high, k_low, time_bias, cells)
        elif HAS_TIME:
            entry = tl.load(tile_buckets + start // BLOCK_M).to(tl.int32)
            half = _add_narrow(half, entry, time_bias, steps, k_offset, q_offset, t.to(tl.int64)[None, :], False)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        weights, slope = _silu_and_slope(half, FAST)
        if MASKED:
            mask = _visible(t[None, :], s[:, None], length, history, window_size, HAS_TARGETS, HAS_WINDOW)
            weights = tl.where(mask, weights, 0.0)
            slope = tl.where(mask, slope, -1.0)
        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
        ds = (dp * slope + dp).to(query.dtype)
        dk = tl.dot(ds, query, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=GIVEN)
def dense_attention_bwd_dkv_kernel(
    q, k, v, do, dk, dv, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, do_stride_t,
    do_stride_h, dk_stride_t, dk_stride_h, dv_stride_t, dv_stride_h, seq_offsets, tiles,
    num_targets, window_size, half_alpha, half_inverse_n, alpha, position_bias, time_bias, cells, steps, q_times,
    q_offset, k_times, k_offset, tile_buckets, row, total,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr,
    HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    PAD_V: tl.constexpr,
):  # fmt: skip
    """One program: dk and dv of BLOCK_N keys of one head."""
    tile = tl.program_id(0) // H
    head = tl.program_id(0) % H
    b = tl.load(tiles + 2 * tile)
    if b < 0:
        return
    begin, length, history = _sequence(b, seq_offsets, num_targets, HAS_TARGETS)
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
        tile_buckets += (begin // BLOCK_N + b + first_row // BLOCK_N) * row

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
        full = _narrow_run(full, free, tile_buckets, BLOCK_M, False)

    acc_k = tl.zeros([BLOCK_N, PAD_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, PAD_V], tl.float32)
    acc_k, acc_v = _attend_dkv(
        acc_k, acc_v, key, value, begin_row, tl.minimum(full, end), s, length, history, q, do, q_stride_t,
        do_stride_t, half_alpha, window_size, position_bias, time_bias, cells, steps, k_high, k_low,
        k_near, q_times, q_offset, tile_buckets, total, D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME,
        FAST, PRECISION, True, BLOCK_M, PAD_D, PAD_V,
    )  # fmt: skip
    acc_k, acc_v = _attend_dkv(
        acc_k, acc_v, key, value, full, free, s, length, history, q, do, q_stride_t,
        do_stride_t, half_alpha, window_size, position_bias, time_bias, cells, steps, k_high, k_low,
        k_near, q_times, q_offset, tile_buckets, total, D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME,
        FAST, PRECISION, False, BLOCK_M, PAD_D, PAD_V,
    )  # fmt: skip
    acc_k, acc_v = _attend_dkv(
        acc_k, acc_v, key, value, free, end, s, length, history, q, do, q_stride_t,
        do_stride_t, half_alpha, window_size, position_bias, time_bias, cells, steps, k_high, k_low,
        k_near, q_times, q_offset, tile_buckets, total, D, V, HAS_TARGETS, HAS_WINDOW, HAS_POSITION, HAS_TIME,
        FAST, PRECISION, True, BLOCK_M, PAD_D, PAD_V,
    )  # fmt: skip
    inside = (s < length)[:, None]
    dk += (begin + first_row) * dk_stride_t + head * dk_stride_h
    result = (acc_k * (alpha * half_inverse_n)).to(dk.dtype.element_ty)
    tl.store(dk + n[:, None] * dk_stride_t + d[None, :], result, inside & (d < D_OUT)[None, :])
    dv += (begin + first_row) * dv_stride_t + head * dv_stride_h
    result = (acc_v * (2.0 * half_inverse_n)).to(dv.dtype.element_ty)
    tl.store(dv + n[:, None] * dv_stride_t + e[None, :], result, inside & (e < V_OUT)[None, :])
