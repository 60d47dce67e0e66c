"""Query-major kernels: a program owns a tile of queries and walks over the keys it sees.

They compute the compression branch, the group's own block and the window; with SELECT, where a group fills the tile
(BM == R), the chosen blocks too. Then one program holds the whole output, and nothing is added up in memory.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key and V value head size, BS block
size, S blocks chosen per group, R tokens per group, BM queries and BN keys of a tile.

SiLU has no normaliser, so a branch is its gate times a plain sum, and the gate can be multiplied into the weights.
"""

import triton
import triton.language as tl

from hstu_sparse.bsa.bias import (
    MOST_EDGES,
    add_position_gradient,
    add_time,
    add_time_gradient,
    add_to,
    load_origin,
    load_reach,
    load_times,
    means_reach,
    position_tile,
    span,
)
from hstu_sparse.tiles import load_rows, load_tile, locate, silu, silu_and_grad, store_rows


@triton.jit
def band_weight(g_slc, g_swa, t, s, window, BS: tl.constexpr, SELECT: tl.constexpr, WINDOW: tl.constexpr):
    """[BM, BN] weight of key s for query t: the window's gate, and without SELECT the own block's, where s <= t."""
    seen = s[None, :] <= t[:, None]
    weight = tl.zeros([t.shape[0], s.shape[0]], tl.float32)
    if not SELECT:
        weight += tl.where(seen & (s[None, :] // BS == t[:, None] // BS), g_slc[:, None], 0.0)
    if WINDOW:
        weight += tl.where(seen & (t[:, None] - s[None, :] < window), g_swa[:, None], 0.0)
    return weight


@triton.jit
def tile_span(bias, rows, live):
    """The earliest and the latest time of queries, as `span` gives them."""
    if bias.time is not None:
        high, low = load_times(bias.query_high, bias.query_low, rows, live)
        return span(high, low, live, 0)
    else:
        return 0.0, 0.0, 0.0, 0.0


@triton.jit(do_not_specialize=["B", "tiles"])
def bsa_query_fwd_kernel(
    q,
    k,
    v,
    kbar,
    vbar,
    offsets,
    indices,
    g_cmp,
    g_slc,
    g_swa,
    bias,
    reaches,
    out,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    alpha,
    inv_n,
    H,
    B,
    S,
    window,
    tiles,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SELECT: tl.constexpr,
    WINDOW: tl.constexpr,
    TMA: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):
    # Late tiles see the most blocks: they start first.
    tile, h = tiles - 1 - tl.program_id(0), tl.program_id(1)
    b, start, length, i = locate(offsets, tile, B, BM)
    begin = i * BM
    if begin >= length:
        return
    end = tl.minimum(begin + BM, length)
    t = begin + tl.arange(0, BM)
    live = t < length
    token = (start + t) * H + h
    queries = load_rows(q + start * q_stride_t + h * q_stride_h, t, q_stride_t, live, D, BD)
    origin = start.to(tl.int32)
    block_row = (start // BS + b).to(tl.int32)
    asked = tile_span(bias, start + t, live)
    if not TMA:
        k += start * k_stride_t + h * k_stride_h
        v += start * v_stride_t + h * v_stride_h
        kbar += ((start // BS + b) * H + h) * D
        vbar += ((start // BS + b) * H + h) * V
    acc = tl.zeros([BM, BV], tl.float32)

    complete = (t + 1) // BS
    for c in range(0, end // BS, BN):
        j = c + tl.arange(0, BN)
        known = j < end // BS
        keys = load_tile(kbar, j, H * D, known, block_row + c, h * D, D, BD, TMA)
        middle = tl.where(known, start + j * BS + BS // 2, start)
        lowest, edges = means_reach(bias, asked, middle, known, ASM)
        added = position_tile(bias, (c * BS + BS // 2 - t).to(tl.int64), tl.arange(0, BN).to(tl.int64) * BS, ASM)
        added = add_time(added, bias, middle, start + t, asked, lowest, edges, 1, False, ASM)
        score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha + added
        weight = tl.where(j[None, :] < complete[:, None], silu(score, FAST), 0.0)
        means = load_tile(vbar, j, H * V, known, block_row + c, h * V, V, BV, TMA)
        acc = tl.dot(weight.to(means.dtype), means, acc, input_precision=PRECISION)
    acc *= (tl.load(g_cmp + token, mask=live, other=0.0).to(tl.float32) * BS)[:, None]

    slc = tl.load(g_slc + token, mask=live, other=0.0).to(tl.float32)
    if SELECT:
        # One index a step, a scalar. Of a vector `index * BS + place % BS` Triton 3.6 takes every element for divisible
        # by BS once the loop is pipelined, and then the mask of a thread's first query for that of all its queries.
        tl.static_assert(BN <= BS)
        row = ((start // R + b + begin // R) * H + h) * S
        count = tl.minimum(begin // BS + 1, S)
        for e in range(0, count * BS, BN):
            first = tl.load(indices + row + e // BS) * BS + e % BS
            s = first + tl.arange(0, BN)
            known = s < end
            keys = load_tile(k, s, k_stride_t, known, origin + first, h * D, D, BD, TMA)
            lowest, edges = load_reach(None if reaches is None else reaches + row + e // BS, None, BM)
            added = position_tile(bias, (first - t).to(tl.int64), tl.arange(0, BN).to(tl.int64), ASM)
            sought = load_origin(bias, block_row + first // BS)
            added = add_time(added, bias, start + t, start + s, sought, lowest, edges, 0, True, ASM)
            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha + added
            visible = known[None, :] & (s[None, :] <= t[:, None])
            weight = tl.where(visible, silu(score, FAST) * slc[:, None], 0.0)
            values = load_tile(v, s, v_stride_t, known, origin + first, h * V, V, BV, TMA)
            acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)

    if WINDOW or not SELECT:
        swa = slc
        nearest = begin // BS * BS
        if WINDOW:
            swa = tl.load(g_swa + token, mask=live, other=0.0).to(tl.float32)
            nearest = tl.maximum(begin - window + 1, 0)
            if not SELECT:
                nearest = tl.minimum(nearest, begin // BS * BS)
            nearest = nearest // BN * BN
        for c in range(nearest, end, BN):
            s = c + tl.arange(0, BN)
            known = s < end
            keys = load_tile(k, s, k_stride_t, known, origin + c, h * D, D, BD, TMA)
            added = position_tile(bias, (c - t).to(tl.int64), tl.arange(0, BN).to(tl.int64), ASM)
            added = add_time(added, bias, start + t, start + s, (0.0, 0.0), 0, MOST_EDGES + 1, 0, True, ASM)
            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha + added
            weight = silu(score, FAST) * band_weight(slc, swa, t, s, window, BS, SELECT, WINDOW)
            values = load_tile(v, s, v_stride_t, known, origin + c, h * V, V, BV, TMA)
            acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)

    store_rows(out + (start * H + h) * V, t, H * V, live, acc * inv_n, V, BV)


@triton.jit(do_not_specialize=["B", "tiles"])
def bsa_query_bwd_dq_kernel(
    do,
    q,
    k,
    v,
    kbar,
    vbar,
    offsets,
    indices,
    g_cmp,
    g_slc,
    g_swa,
    dq,
    dg_cmp,
    dg_slc,
    dg_swa,
    bias,
    reaches,
    tables,
    pitch,
    do_stride_t,
    do_stride_h,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    alpha,
    inv_n,
    H,
    B,
    S,
    window,
    tiles,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SELECT: tl.constexpr,
    WINDOW: tl.constexpr,
    TMA: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):
    """Gradient of q and of the gates. A gate's gradient is its branch's output times do: the sum of weight * (do.v)."""
    tile, h = tiles - 1 - tl.program_id(0), tl.program_id(1)
    b, start, length, i = locate(offsets, tile, B, BM)
    begin = i * BM
    if begin >= length:
        return
    end = tl.minimum(begin + BM, length)
    t = begin + tl.arange(0, BM)
    live = t < length
    token = (start + t) * H + h
    queries = load_rows(q + start * q_stride_t + h * q_stride_h, t, q_stride_t, live, D, BD)
    upstream = load_rows(do + start * do_stride_t + h * do_stride_h, t, do_stride_t, live, V, BV)
    origin = start.to(tl.int32)
    block_row = (start // BS + b).to(tl.int32)
    asked = tile_span(bias, start + t, live)
    if not TMA:
        k += start * k_stride_t + h * k_stride_h
        v += start * v_stride_t + h * v_stride_h
        kbar += ((start // BS + b) * H + h) * D
        vbar += ((start // BS + b) * H + h) * V
    acc = tl.zeros([BM, BD], tl.float32)

    cmp = tl.load(g_cmp + token, mask=live, other=0.0).to(tl.float32) * BS
    complete = (t + 1) // BS
    branch = tl.zeros([BM], tl.float32)
    for c in range(0, end // BS, BN):
        j = c + tl.arange(0, BN)
        known = j < end // BS
        keys = load_tile(kbar, j, H * D, known, block_row + c, h * D, D, BD, TMA)
        values = load_tile(vbar, j, H * V, known, block_row + c, h * V, V, BV, TMA)
        middle = tl.where(known, start + j * BS + BS // 2, start)
        lowest, edges = means_reach(bias, asked, middle, known, ASM)
        added = position_tile(bias, (c * BS + BS // 2 - t).to(tl.int64), tl.arange(0, BN).to(tl.int64) * BS, ASM)
        added = add_time(added, bias, middle, start + t, asked, lowest, edges, 1, False, ASM)
        score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha + added
        dweight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
        weight, slope = silu_and_grad(score, FAST)
        visible = j[None, :] < complete[:, None]
        dweight = tl.where(visible, dweight, 0.0)
        branch += tl.sum(weight * dweight, 1)
        grad = dweight * slope
        acc = tl.dot(grad.to(keys.dtype), keys, acc, input_precision=PRECISION)
        grad *= cmp[:, None]
        add_time_gradient(tables, grad, bias, middle, start + t, asked, lowest, edges, 1, False, ASM)
        if tables.ahead is not None:
            add_to(tables.ahead + (t[:, None] - (j * BS + BS // 2)[None, :]), grad, tables.scale)
    acc *= cmp[:, None]
    tl.store(dg_cmp + token, branch * (BS * inv_n), mask=live)

    slc = tl.load(g_slc + token, mask=live, other=0.0).to(tl.float32)
    branch = tl.zeros([BM], tl.float32)
    if SELECT:
        tl.static_assert(BN <= BS)  # as in bsa_query_fwd_kernel
        row = ((start // R + b + begin // R) * H + h) * S
        count = tl.minimum(begin // BS + 1, S)
        for e in range(0, count * BS, BN):
            first = tl.load(indices + row + e // BS) * BS + e % BS
            s = first + tl.arange(0, BN)
            known = s < end
            keys = load_tile(k, s, k_stride_t, known, origin + first, h * D, D, BD, TMA)
            values = load_tile(v, s, v_stride_t, known, origin + first, h * V, V, BV, TMA)
            lowest, edges = load_reach(None if reaches is None else reaches + row + e // BS, None, BM)
            added = position_tile(bias, (first - t).to(tl.int64), tl.arange(0, BN).to(tl.int64), ASM)
            sought = load_origin(bias, block_row + first // BS)
            added = add_time(added, bias, start + t, start + s, sought, lowest, edges, 0, True, ASM)
            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha + added
            dweight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
            weight, slope = silu_and_grad(score, FAST)
            dweight = tl.where(known[None, :] & (s[None, :] <= t[:, None]), dweight, 0.0)
            branch += tl.sum(weight * dweight, 1)
            grad = dweight * slope * slc[:, None]
            acc = tl.dot(grad.to(keys.dtype), keys, acc, input_precision=PRECISION)
            add_time_gradient(tables, grad, bias, start + t, start + s, sought, lowest, edges, 0, True, ASM)
            add_position_gradient(tables, pitch, grad, t, s, 1)

    if WINDOW or not SELECT:
        swa = slc
        window_branch = tl.zeros([BM], tl.float32)
        nearest = begin // BS * BS
        if WINDOW:
            swa = tl.load(g_swa + token, mask=live, other=0.0).to(tl.float32)
            nearest = tl.maximum(begin - window + 1, 0)
            if not SELECT:
                nearest = tl.minimum(nearest, begin // BS * BS)
            nearest = nearest // BN * BN
        for c in range(nearest, end, BN):
            s = c + tl.arange(0, BN)
            known = s < end
            keys = load_tile(k, s, k_stride_t, known, origin + c, h * D, D, BD, TMA)
            values = load_tile(v, s, v_stride_t, known, origin + c, h * V, V, BV, TMA)
            added = position_tile(bias, (c - t).to(tl.int64), tl.arange(0, BN).to(tl.int64), ASM)
            added = add_time(added, bias, start + t, start + s, (0.0, 0.0), 0, MOST_EDGES + 1, 0, True, ASM)
            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha + added
            dweight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
            weight, slope = silu_and_grad(score, FAST)
            visible = s[None, :] <= t[:, None]
            if not SELECT:
                branch += tl.sum(tl.where(visible & (s[None, :] // BS == t[:, None] // BS), weight * dweight, 0.0), 1)
            if WINDOW:
                near = visible & (t[:, None] - s[None, :] < window)
                window_branch += tl.sum(tl.where(near, weight * dweight, 0.0), 1)
            grad = dweight * slope * band_weight(slc, swa, t, s, window, BS, SELECT, WINDOW)
            acc = tl.dot(grad.to(keys.dtype), keys, acc, input_precision=PRECISION)
            add_time_gradient(tables, grad, bias, start + t, start + s, (0.0, 0.0), 0, MOST_EDGES + 1, 0, True, ASM)
            add_position_gradient(tables, pitch, grad, t, s, 1)
        if WINDOW:
            tl.store(dg_swa + token, window_branch * inv_n, mask=live)

    tl.store(dg_slc + token, branch * inv_n, mask=live)
    store_rows(dq + (start * H + h) * D, t, H * D, live, acc * (alpha * inv_n), D, BD)
