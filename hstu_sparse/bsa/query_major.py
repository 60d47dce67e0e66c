"""Query-major kernels: a program owns a tile of queries and walks over the keys it sees.

They compute the compression branch, the group's own block and the window; with SELECT, where a group fills the tile
(BM == R), the chosen past blocks too. Then one program holds the whole output, and nothing is added up in memory.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key and V value head size, BS block
size, S blocks chosen per group, R tokens per group, BM queries and BN keys of a tile.

SiLU has no normaliser, so a branch is its gate times a plain sum, and the gate can be multiplied into the weights.

An `if` stands around each loop that adds to an accumulator, and none around that: where ptxas sees a path on which the
accumulator may have been set by other instructions meanwhile, it waits for each of the tensor cores' instructions by
itself (C7515).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.assembly import look_up
from hstu_sparse.bsa.bias import (
    add_position_gradient,
    add_time_gradient,
    chosen_tile,
    load_origin,
    means_tile,
    own_buckets,
    own_tile,
    position_tile,
    time_tile,
    with_bias,
)
from hstu_sparse.bsa.program_sums import add_keys, add_means, close_means, close_sums, open_sums
from hstu_sparse.bsa.reach import LOWEST, MOST_EDGES, keys_reach, load_reach, load_times, map_row, means_reach, span
from hstu_sparse.tiles import add_to, load_rows, load_tile, locate, silu, silu_and_grad, store_rows


@triton.jit
def band_weight(g_slc, g_swa, t, s, window, BS: tl.constexpr, WINDOW: tl.constexpr):
    """[BM, BN] weight of key s for query t: the own block's gate and the window's, where s <= t."""
    seen = s[None, :] <= t[:, None]
    weight = tl.where(seen & (s[None, :] // BS == t[:, None] // BS), g_slc[:, None], 0.0)
    if WINDOW:
        weight += tl.where(seen & (t[:, None] - s[None, :] < window), g_swa[:, None], 0.0)
    return weight


# A score whose SiLU and its slope are 0.
HIDDEN = tl.constexpr(-80.0)


class QueryTile(NamedTuple):
    """A program's queries.

    b, start       their sequence and its first token
    begin, end     their positions begin .. end - 1, none if end <= begin
    lane           [BM] 0 .. BM - 1, int64
    t, live        [BM] positions, and whether there are such
    token          [BM] their places in [T, H]
    block_row      slot of the sequence's first block
    map_row        see `map_row`
    asked          their earliest and latest time, as `span` gives them
    """

    b: tl.tensor
    start: tl.tensor
    begin: tl.tensor
    end: tl.tensor
    lane: tl.tensor
    t: tl.tensor
    live: tl.tensor
    token: tl.tensor
    block_row: tl.tensor
    map_row: tl.tensor
    asked: tuple


@triton.jit
def find_queries(offsets, bias, tiles, H, B, BM: tl.constexpr, BS: tl.constexpr):
    # Late tiles see the most blocks: they start first.
    b, start, length, i = locate(offsets, tiles - 1 - tl.program_id(0), B, BM)
    t = i * BM + tl.arange(0, BM)
    live = t < length
    asked = (0.0, 0.0, 0.0, 0.0)
    if bias.time is not None:
        high, low = load_times(bias.query_high, bias.query_low, start + t, live)
        asked = span(high, low, live, 0)
    return QueryTile(
        b, start, i * BM, tl.minimum(i * BM + BM, length), tl.arange(0, BM).to(tl.int64), t, live,
        (start + t) * H + tl.program_id(1), (start // BS + b).to(tl.int32), map_row(start, b, i * BM, BS), asked,
    )  # fmt: skip


@triton.jit
def means_position(bias, asks, c, BN: tl.constexpr, BS: tl.constexpr, ASM: tl.constexpr):
    """The position's bias of a tile with the BN mean keys from block c on."""
    return position_tile(bias, c * BS + BS // 2 - asks.begin, -asks.lane, tl.arange(0, BN).to(tl.int64) * BS, ASM)


@triton.jit
def means_time(bias, asks, c, known, near, BN: tl.constexpr, BS: tl.constexpr, ASM: tl.constexpr):
    """The time's, and what `add_time_gradient` wants: far to reaches. near: the queries' places in time."""
    middle = (c + tl.arange(0, BN)) * BS + BS // 2
    rows = tl.where(known, asks.start + middle, asks.start)
    found = rows, asks.start + asks.t, asks.asked, means_reach(bias, asks.map_row, c, BN, ASM)
    if bias.time is not None:
        return means_tile(bias, asks.map_row, c, rows, asks.start + asks.t, near, 1, ASM), found
    else:
        return 0.0, found


@triton.jit
def keys_position(bias, asks, first, BN: tl.constexpr, ASM: tl.constexpr):
    """The position's bias of a tile with the BN keys from position `first` on."""
    return position_tile(bias, first - asks.begin, -asks.lane, tl.arange(0, BN).to(tl.int64), ASM)


@triton.jit
def keys_time(bias, asks, first, sought, reaches, BN: tl.constexpr, ASM: tl.constexpr):
    """As `means_time`, of these keys."""
    found = asks.start + asks.t, asks.start + first + tl.arange(0, BN).to(tl.int64), sought, reaches
    return time_tile(bias, *found, 0, True, ASM), found


@triton.jit
def band_bias(
    bias, asks, c, known, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, EXACT: tl.constexpr,
    OWN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Both, with keys of the own block or the window, and what `add_time_gradient` wants.

    Without EXACT as if they reached many buckets, which keys next to the diagonal do. OWN: all queries stand in the
    keys' block.
    """
    if EXACT:
        reaches = keys_reach(bias, asks.asked, asks.start + c + tl.arange(0, BN), known, BM, ASM)
    else:
        reaches = tl.zeros([BM], tl.int32), MOST_EDGES + 1, 0, 0
    time, found = keys_time(bias, asks, c, load_origin(bias, asks.block_row + c // BS, ASM), reaches, BN, ASM)
    if OWN:
        time = own_tile(bias, found[0], own_places(c, BN, BS), 0, BS, ASM)
    return (keys_position(bias, asks, c, BN, ASM), time), found


@triton.jit
def own_places(c, BN: tl.constexpr, BS: tl.constexpr):
    """Where the keys c .. c + BN - 1 stand in their block."""
    return tl.cast(c % BS, tl.int64) + tl.arange(0, BN).to(tl.int64)


@triton.jit
def chosen_first(chosen, row, e, BN: tl.constexpr, BS: tl.constexpr, ASM: tl.constexpr):
    """The position of the first of the chosen keys e .. e + BN - 1. row: of the queries in `chosen`.

    Not by tl.load, which Triton would move through shared memory, one load's time before what hangs on it.
    """
    return tl.multiple_of(look_up(chosen.indices + row, tl.cast(e // BS, tl.int64), ASM) * BS + e % BS, BN)


@triton.jit
def chosen_time(bias, asks, edge, e, first, TIMED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BS: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """As `keys_time`, of those keys; without TIMED of such as reach no edge. edge: see `edge_places`."""
    chosen, place, _ = edge
    if TIMED:
        reaches = load_reach(chosen.reaches + place, None, BM, ASM)
        origin = load_origin(bias, asks.block_row + first // BS, ASM)
        found = asks.start + asks.t, asks.start + first + tl.arange(0, BN).to(tl.int64), origin, reaches
        return chosen_tile(bias, edge, found[0], found[1], reaches[1], ASM), found
    elif chosen.bases is not None:
        lowest = look_up(chosen.reaches, place, ASM) & LOWEST
        reaches = tl.zeros([BM], tl.int32) + lowest, 0, lowest, lowest
        found = asks.start + asks.t, asks.start + first + tl.arange(0, BN).to(tl.int64), (0.0, 0.0), reaches
        return look_up(chosen.bases, place, ASM), found
    else:
        return 0.0, (0, 0, 0, 0)


@triton.jit(do_not_specialize=["B", "tiles"])
def bsa_query_fwd_kernel(
    q, k, v, wide_k, wide_v, kbar, vbar, offsets, chosen, g_cmp, g_slc, g_swa, bias, out, q_stride_t, q_stride_h,
    k_stride_t, k_stride_h, v_stride_t, v_stride_h, alpha, inv_n, H, B, S, window, tiles,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, SELECT: tl.constexpr, WINDOW: tl.constexpr,
    TMA: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    asks = find_queries(offsets, bias, tiles, H, B, BM, BS)
    b, start, begin, end, t, live, token = asks.b, asks.start, asks.begin, asks.end, asks.t, asks.live, asks.token
    if end <= begin:
        return
    queries = load_rows(q + start * q_stride_t + h * q_stride_h, t, q_stride_t, live, D, BD)
    origin = start.to(tl.int32)
    block_row = asks.block_row
    if not TMA:
        k += start * k_stride_t + h * k_stride_h
        v += start * v_stride_t + h * v_stride_h
        wide_k, wide_v = k, v
        kbar += ((start // BS + b) * H + h) * D
        vbar += ((start // BS + b) * H + h) * V
    acc = tl.zeros([BM, BV], tl.float32)

    near = 0.0 if bias.time is None else look_up(bias.places, start + t, ASM)
    complete = (t + 1) // BS
    if end >= BS:  # see the head of this file
        position = means_position(bias, asks, 0, BN, BS, ASM)
        for c in range(0, end // BS, BN):
            j = c + tl.arange(0, BN)
            known = j < end // BS
            next_position = means_position(bias, asks, c + BN, BN, BS, ASM)
            time, _ = means_time(bias, asks, c, known, near, BN, BS, ASM)
            keys = load_tile(kbar, j, H * D, known, block_row + c, h * D, D, BD, TMA)
            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha
            score = with_bias(score, bias, (position, time))
            score = tl.where(j[None, :] < complete[:, None], score, HIDDEN)
            weight = silu(score, FAST)
            means = load_tile(vbar, j, H * V, known, block_row + c, h * V, V, BV, TMA)
            acc = tl.dot(weight.to(means.dtype), means, acc, input_precision=PRECISION)
            position = next_position
    acc *= (tl.load(g_cmp + token, mask=live, other=0.0).to(tl.float32) * BS)[:, None]

    slc = tl.load(g_slc + token, mask=live, other=0.0).to(tl.float32)
    if SELECT:
        # One index a step, a scalar. Of a vector `index * BS + place % BS` Triton 3.6 takes every element for divisible
        # by BS once the loop is pipelined, and then the mask of a thread's first query for that of all its queries.
        tl.static_assert((BN <= WIDE) & (WIDE <= BS))
        row = ((start // R + b + begin // R) * H + h) * S
        # The own block is the last one, and the next loop's.
        count = tl.minimum(begin // BS, S - 1) * BS
        first_timed = count
        if chosen.reaches is not None:
            first_timed = look_up(chosen.reaches + row, tl.cast(S - 1, tl.int64), ASM) * BS
        TURNS: tl.constexpr = 1 if chosen.reaches is None else 2
        WIDTH: tl.constexpr = (WIDE, BN)
        for TIMED in tl.static_range(TURNS):
            begin_at, end_at = (first_timed, count) if TIMED else (0, first_timed)
            some_k, some_v = (k, v) if TIMED else (wide_k, wide_v)
            if begin_at < end_at:
                position = keys_position(
                    bias, asks, chosen_first(chosen, row, begin_at, WIDTH[TIMED], BS, ASM), WIDTH[TIMED], ASM
                )
                for e in range(begin_at, end_at, WIDTH[TIMED]):
                    first = chosen_first(chosen, row, e, WIDTH[TIMED], BS, ASM)
                    next_position = keys_position(
                        bias,
                        asks,
                        chosen_first(chosen, row, e + WIDTH[TIMED], WIDTH[TIMED], BS, ASM),
                        WIDTH[TIMED],
                        ASM,
                    )
                    edge = chosen, tl.cast(row + e // BS, tl.int64), near
                    time, _ = chosen_time(bias, asks, edge, e, first, TIMED, BM, WIDTH[TIMED], BS, ASM)
                    s = first + tl.arange(0, WIDTH[TIMED])
                    known = s < end
                    keys = load_tile(some_k, s, k_stride_t, known, origin + first, h * D, D, BD, TMA)
                    score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha
                    weight = silu(with_bias(score, bias, (position, time)), FAST) * slc[:, None]
                    values = load_tile(some_v, s, v_stride_t, known, origin + first, h * V, V, BV, TMA)
                    acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)
                    position = next_position

    swa = slc
    nearest = begin // BS * BS
    if WINDOW:
        swa = tl.load(g_swa + token, mask=live, other=0.0).to(tl.float32)
        nearest = tl.minimum(nearest, tl.maximum(begin - window + 1, 0)) // BN * BN
    if nearest < end:
        for c in range(nearest, end, BN):
            s = c + tl.arange(0, BN)
            known = s < end
            keys = load_tile(k, s, k_stride_t, known, origin + c, h * D, D, BD, TMA)
            added, _ = band_bias(bias, asks, c, known, BM, BN, BS, WINDOW, not WINDOW and BM <= BS, ASM)
            score = with_bias(tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha, bias, added)
            weight = silu(score, FAST) * band_weight(slc, swa, t, s, window, BS, WINDOW)
            values = load_tile(v, s, v_stride_t, known, origin + c, h * V, V, BV, TMA)
            acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)

    store_rows(out + (start * H + h) * V, t, H * V, live, acc * inv_n, V, BV)


@triton.jit
def add_keys_gradient(
    tables, pitch, sums, grad, bias, found, edge, own, t, s, first_apart, part, SUMS: tl.constexpr, SPAN: tl.constexpr,
    ASM: tl.constexpr
):  # fmt: skip
    """Adds a tile's gradient to the tables; its keys stand side by side. first_apart: of its first query and first key.

    Returns `sums`, where such are kept. edge, own, part, SPAN: as in `add_keys`.
    """
    if SUMS:
        return add_keys(tables, sums, grad, bias, *found, edge, own, first_apart, part, SPAN, ASM)
    else:
        add_time_gradient(tables, grad, bias, *found, 0, True, ASM)
        add_position_gradient(tables, pitch, grad, t, s, 1)
        return sums


@triton.jit(do_not_specialize=["B", "tiles"])
def bsa_query_bwd_dq_kernel(
    do, q, k, v, wide_k, wide_v, kbar, vbar, offsets, chosen, g_cmp, g_slc, g_swa, dq, dg_cmp, dg_slc, dg_swa, bias,
    tables, pitch, norm, means_unit, keys_unit, do_stride_t, do_stride_h, q_stride_t, q_stride_h,
    k_stride_t, k_stride_h, v_stride_t, v_stride_h, alpha, inv_n, H, B, S, window, tiles,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, SELECT: tl.constexpr, WINDOW: tl.constexpr,
    SUMS: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Gradient of q and of the gates. A gate's gradient is its branch's output times do: the sum of weight * (do.v).

    SUMS: the tables' gradients are summed up in shared memory first: program_sums.py, also on `norm` and the units.
    """
    h = tl.program_id(1)
    asks = find_queries(offsets, bias, tiles, H, B, BM, BS)
    b, start, begin, end, t, live, token = asks.b, asks.start, asks.begin, asks.end, asks.t, asks.live, asks.token
    if end <= begin:
        return
    queries = load_rows(q + start * q_stride_t + h * q_stride_h, t, q_stride_t, live, D, BD)
    upstream = load_rows(do + start * do_stride_t + h * do_stride_h, t, do_stride_t, live, V, BV)
    origin = start.to(tl.int32)
    block_row = asks.block_row
    if not TMA:
        k += start * k_stride_t + h * k_stride_h
        v += start * v_stride_t + h * v_stride_h
        wide_k, wide_v = k, v
        kbar += ((start // BS + b) * H + h) * D
        vbar += ((start // BS + b) * H + h) * V

    cmp = tl.load(g_cmp + token, mask=live, other=0.0).to(tl.float32) * BS
    slc = tl.load(g_slc + token, mask=live, other=0.0).to(tl.float32)
    swa = slc
    if WINDOW:
        swa = tl.load(g_swa + token, mask=live, other=0.0).to(tl.float32)
    sums = 0
    if SUMS:
        sums = open_sums(bias, upstream, norm, cmp, tl.abs(slc) + tl.abs(swa) if WINDOW else slc, means_unit, keys_unit)

    SPAN: tl.constexpr = BN if BS < BN else min(BS, 64)
    acc = tl.zeros([BM, BD], tl.float32)
    near = 0.0 if bias.time is None else look_up(bias.places, start + t, ASM)
    complete = (t + 1) // BS
    branch = tl.zeros([BM], tl.float32)
    if end >= BS:  # see the head of this file
        position = means_position(bias, asks, 0, BN, BS, ASM)
        for c in range(0, end // BS, BN):
            j = c + tl.arange(0, BN)
            known = j < end // BS
            next_position = means_position(bias, asks, c + BN, BN, BS, ASM)
            time, found = means_time(bias, asks, c, known, near, BN, BS, ASM)
            keys = load_tile(kbar, j, H * D, known, block_row + c, h * D, D, BD, TMA)
            values = load_tile(vbar, j, H * V, known, block_row + c, h * V, V, BV, TMA)
            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha
            score = with_bias(score, bias, (position, time))
            dweight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
            weight, slope = silu_and_grad(score, FAST)
            dweight = tl.where(j[None, :] < complete[:, None], dweight, 0.0)
            branch += tl.sum(weight * dweight, 1)
            grad = dweight * slope
            acc = tl.dot(grad.to(keys.dtype), keys, acc, input_precision=PRECISION)
            grad *= cmp[:, None]
            if SUMS:
                add_means(sums, grad, bias, found, asks.map_row, c, near, ASM)
            else:
                add_time_gradient(tables, grad, bias, *found, 1, False, ASM)
            if tables.ahead is not None:
                add_to(tables.ahead + (t[:, None] - (j * BS + BS // 2)[None, :]), grad, tables.scale)
            position = next_position
        if SUMS:
            close_means(tables, sums)
    acc *= cmp[:, None]
    tl.store(dg_cmp + token, branch * (BS * inv_n), mask=live)

    branch = tl.zeros([BM], tl.float32)
    if SELECT:
        tl.static_assert((BN <= WIDE) & (WIDE <= BS))  # as in bsa_query_fwd_kernel
        row = ((start // R + b + begin // R) * H + h) * S
        count = tl.minimum(begin // BS, S - 1) * BS
        first_timed = count
        if chosen.reaches is not None:
            first_timed = look_up(chosen.reaches + row, tl.cast(S - 1, tl.int64), ASM) * BS
        TURNS: tl.constexpr = 1 if chosen.reaches is None else 2
        WIDTH: tl.constexpr = (WIDE, BN)
        for TIMED in tl.static_range(TURNS):
            begin_at, end_at = (first_timed, count) if TIMED else (0, first_timed)
            some_k, some_v = (k, v) if TIMED else (wide_k, wide_v)
            if begin_at < end_at:
                for e in range(begin_at, end_at, WIDTH[TIMED]):
                    first = chosen_first(chosen, row, e, WIDTH[TIMED], BS, ASM)
                    position = keys_position(bias, asks, first, WIDTH[TIMED], ASM)
                    edge = chosen, tl.cast(row + e // BS, tl.int64), near
                    time, found = chosen_time(bias, asks, edge, e, first, TIMED, BM, WIDTH[TIMED], BS, ASM)
                    s = first + tl.arange(0, WIDTH[TIMED])
                    known = s < end
                    keys = load_tile(some_k, s, k_stride_t, known, origin + first, h * D, D, BD, TMA)
                    values = load_tile(some_v, s, v_stride_t, known, origin + first, h * V, V, BV, TMA)
                    score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha
                    score = with_bias(score, bias, (position, time))
                    dweight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
                    weight, slope = silu_and_grad(score, FAST)
                    branch += tl.sum(weight * dweight, 1)
                    grad = dweight * slope * slc[:, None]
                    acc = tl.dot(grad.to(keys.dtype), keys, acc, input_precision=PRECISION)
                    sums = add_keys_gradient(
                        tables,
                        pitch,
                        sums,
                        grad,
                        bias,
                        found,
                        edge,
                        None,
                        t,
                        s,
                        begin - first,
                        e % SPAN,
                        SUMS,
                        SPAN,
                        ASM,
                    )

    OWN: tl.constexpr = not WINDOW and BM <= BS
    window_branch = tl.zeros([BM], tl.float32)
    nearest = begin // BS * BS
    if WINDOW:
        nearest = tl.minimum(nearest, tl.maximum(begin - window + 1, 0)) // BN * BN
    if nearest < end:
        for c in range(nearest, end, BN):
            s = c + tl.arange(0, BN)
            known = s < end
            keys = load_tile(k, s, k_stride_t, known, origin + c, h * D, D, BD, TMA)
            values = load_tile(v, s, v_stride_t, known, origin + c, h * V, V, BV, TMA)
            added, found = band_bias(bias, asks, c, known, BM, BN, BS, WINDOW or not SUMS, OWN, ASM)
            score = with_bias(tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha, bias, added)
            dweight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
            weight, slope = silu_and_grad(score, FAST)
            visible = s[None, :] <= t[:, None]
            dweight = tl.where(visible, dweight, 0.0)
            branch += tl.sum(tl.where(s[None, :] // BS == t[:, None] // BS, weight * dweight, 0.0), 1)
            if WINDOW:
                inside = t[:, None] - s[None, :] < window
                window_branch += tl.sum(tl.where(inside, weight * dweight, 0.0), 1)
            grad = dweight * slope * band_weight(slc, swa, t, s, window, BS, WINDOW)
            acc = tl.dot(grad.to(keys.dtype), keys, acc, input_precision=PRECISION)
            own = None
            if OWN and SUMS and bias.time is not None:
                own = own_buckets(bias, asks.start + asks.t, own_places(c, BN, BS), 0, BS, ASM)
            sums = add_keys_gradient(
                tables,
                pitch,
                sums,
                grad,
                bias,
                found,
                None,
                own,
                t,
                s,
                begin - c,
                (c - nearest) % SPAN,
                SUMS,
                SPAN,
                ASM,
            )
    if WINDOW:
        tl.store(dg_swa + token, window_branch * inv_n, mask=live)
    if SUMS:
        close_sums(tables, sums)

    tl.store(dg_slc + token, branch * inv_n, mask=live)
    store_rows(dq + (start * H + h) * D, t, H * D, live, acc * (alpha * inv_n), D, BD)
