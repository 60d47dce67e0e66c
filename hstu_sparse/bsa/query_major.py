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

import triton
import triton.language as tl

from hstu_sparse.assembly import look_up
from hstu_sparse.bias.gradients import add_to
from hstu_sparse.bsa.bias_tiles import add_position_gradient, add_time_gradient, own_buckets, with_bias
from hstu_sparse.bsa.program_sums import MOST_MOVED, add_keys, add_means, close_keys, close_means, open_sums
from hstu_sparse.bsa.query_tiles import (
    band_bias,
    band_weight,
    chosen_both,
    chosen_ends,
    chosen_first,
    find_queries,
    in_block,
    keys_position,
    means_ends,
    means_position,
    means_time,
)
from hstu_sparse.bsa.reach import MOST_EDGES
from hstu_sparse.tiles import (
    head_and_slot,
    load_rows,
    load_tile,
    opaque,
    silu_and_grad_of_twice,
    silu_of_twice,
    store_rows,
)

# Half of a score whose SiLU and its slope are 0.
HIDDEN = tl.constexpr(-40.0)


@triton.jit(do_not_specialize=["B", "tiles", "together"])
def bsa_query_fwd_kernel(
    q, k, v, wide_k, wide_v, kbar, vbar, offsets, chosen, g_cmp, g_slc, g_swa, bias, out, q_stride_t, q_stride_h,
    k_stride_t, k_stride_h, v_stride_t, v_stride_h, scale, inv_n, H, B, S, window, tiles, together,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, SELECT: tl.constexpr, WINDOW: tl.constexpr,
    TMA: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    h, tile = head_and_slot(tl.program_id(0), tiles, H, together)
    asks = find_queries(offsets, bias, tiles, h, tile, B, H, BM, BS)
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
    half = 0.5 * scale

    near = 0.0 if bias.time is None else look_up(bias.places + start + begin, asks.lane, ASM)
    slc = tl.load(g_slc + token, mask=live, other=0.0).to(tl.float32)
    plain = means_ends(bias, asks, BS)
    if SELECT:
        # One index a step, a scalar. Of a vector `index * BS + place % BS` Triton 3.6 takes every element for divisible
        # by BS once the loop is pipelined, and then the mask of a thread's first query for that of all its queries.
        tl.static_assert((BN <= WIDE) & (WIDE <= BS))
        row = ((start // R + b + begin // R) * H + h) * S
        # The own block is the last one, and the last loop's.
        count = tl.minimum(begin // BS, S - 1) * BS
        ends = chosen_ends(chosen, row, count, S, BS, ASM)
        WIDTH: tl.constexpr = (WIDE, WIDE, BN)
        TURNS: tl.constexpr = 1 if chosen.reaches is None else 3
    # The own block comes first where it has the choice's gate alone: nothing has to be found out about its keys, and
    # meanwhile what was chosen arrives.
    OWN: tl.constexpr = not WINDOW and BM <= BS
    FIRST: tl.constexpr = SELECT and OWN
    for PART in tl.static_range(2):
        if (PART == 1) == FIRST:  # chosen blocks
            if SELECT:
                for EDGES in tl.static_range(TURNS):
                    begin_at = 0 if EDGES == 0 else ends[EDGES - 1]
                    end_at = count if EDGES == 2 else ends[EDGES]
                    some_k, some_v = (k, v) if EDGES == 2 else (wide_k, wide_v)
                    if begin_at < end_at:
                        first = chosen_first(chosen, row, begin_at, WIDTH[EDGES], BS, ASM)
                        position = keys_position(bias, asks, first, WIDTH[EDGES], ASM)
                        for e in range(begin_at, end_at, WIDTH[EDGES]):
                            first = chosen_first(chosen, row, e, WIDTH[EDGES], BS, ASM)
                            next_first = chosen_first(chosen, row, e + WIDTH[EDGES], WIDTH[EDGES], BS, ASM)
                            next_position = keys_position(bias, asks, next_first, WIDTH[EDGES], ASM)
                            edge = chosen, tl.cast(row + e // BS, tl.int64), near, asks.map_row
                            added, _ = chosen_both(
                                bias, asks, edge, position, first, EDGES, MOST_EDGES, BM, WIDTH[EDGES], BS, ASM
                            )
                            s = first + tl.arange(0, WIDTH[EDGES])
                            known = s < end
                            keys = load_tile(some_k, s, k_stride_t, known, origin + first, h * D, D, BD, TMA)
                            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * half
                            weight = silu_of_twice(with_bias(score, bias, added, EDGES < 2), FAST)
                            values = load_tile(some_v, s, v_stride_t, known, origin + first, h * V, V, BV, TMA)
                            acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)
                            position = next_position
                acc *= slc[:, None]

        else:  # the own block and the window
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
                    added, _ = band_bias(bias, asks, c, known, BM, BN, BS, WINDOW, OWN, ASM)
                    score = with_bias(tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * half, bias, added)
                    if FIRST:
                        weight = tl.where(s[None, :] <= t[:, None], silu_of_twice(score, FAST), 0.0)
                    else:
                        weight = silu_of_twice(score, FAST) * band_weight(slc, swa, t, s, window, BS, WINDOW)
                    values = load_tile(v, s, v_stride_t, known, origin + c, h * V, V, BV, TMA)
                    acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)

    complete = (t + 1) // BS
    if end >= BS:  # see the head of this file
        cmp = tl.load(g_cmp + token, mask=live, other=0.0).to(tl.float32) * BS
        position = means_position(bias, asks, 0, BN, BS, ASM)
        for c in range(0, end // BS, BN):
            j = c + tl.arange(0, BN)
            known = j < end // BS
            next_position = means_position(bias, asks, c + BN, BN, BS, ASM)
            # A branch where the backward kernels have two loops: without it ptxas reads the biases behind the product.
            time, _ = means_time(bias, asks, c, known, near, c + BN > plain, BN, BS, ASM)
            keys = load_tile(kbar, j, H * D, known, block_row + c, h * D, D, BD, TMA)
            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * half
            score = tl.where(j[None, :] < complete[:, None], with_bias(score, bias, (position, time)), HIDDEN)
            weight = silu_of_twice(score, FAST) * cmp[:, None]
            means = load_tile(vbar, j, H * V, known, block_row + c, h * V, V, BV, TMA)
            acc = tl.dot(weight.to(means.dtype), means, acc, input_precision=PRECISION)
            position = next_position

    store_rows(out + (start * H + h) * V, t, H * V, live, acc * inv_n, V, BV)


@triton.jit
def add_keys_gradient(
    tables, pitch, sums, grad, gate, bias, found, edge, EDGES: tl.constexpr, buckets, t, s, first_apart, part,
    SUMS: tl.constexpr, SPAN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Adds a tile's gradient to the tables; its keys stand side by side. first_apart: of its first query and first key.

    Returns `sums`, where such are kept. gate, edge, EDGES, buckets, part, SPAN: as in `add_keys`.
    """
    if SUMS:
        return add_keys(tables, sums, grad, gate, bias, *found, edge, EDGES, buckets, first_apart, part, SPAN, ASM)
    else:
        if gate is not None:
            grad *= gate[:, None]
        add_time_gradient(tables, grad, bias, *found, 0, True, ASM)
        add_position_gradient(tables, pitch, grad, t, s, 1)
        return sums


@triton.jit(do_not_specialize=["B", "tiles", "together"])
def bsa_query_bwd_dq_kernel(
    do, q, k, v, wide_k, wide_v, kbar, vbar, offsets, chosen, g_cmp, g_slc, g_swa, dq, dg_cmp, dg_slc, dg_swa, bias,
    tables, pitch, norm, means_unit, keys_unit, do_stride_t, do_stride_h, q_stride_t, q_stride_h,
    k_stride_t, k_stride_h, v_stride_t, v_stride_h, scale, inv_n, H, B, S, window, tiles, together,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, SELECT: tl.constexpr, WINDOW: tl.constexpr,
    SUMS: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Gradient of q and of the gates. A gate's gradient is its branch's output times do: the sum of weight * (do.v).

    SUMS: the tables' gradients are summed up in shared memory first: program_sums.py, also on `norm` and the units.
    """
    h, tile = head_and_slot(tl.program_id(0), tiles, H, together)
    asks = find_queries(offsets, bias, tiles, h, tile, B, H, BM, BS)
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
    # Of two tiles of mean keys a second loop costs more than looking the first one's buckets up.
    plain = means_ends(bias, asks, BS, 2 * BN)
    sums = 0
    if SUMS:
        sums = open_sums(bias, upstream, norm, cmp, tl.abs(slc) + tl.abs(swa) if WINDOW else slc, means_unit, keys_unit)

    SPAN: tl.constexpr = BN if BS < BN else min(BS, 64)
    acc = tl.zeros([BM, BD], tl.float32)
    half = 0.5 * scale
    near = 0.0 if bias.time is None else look_up(bias.places + start + begin, asks.lane, ASM)

    branch = tl.zeros([BM], tl.float32)
    OWN: tl.constexpr = not WINDOW and BM <= BS
    FIRST: tl.constexpr = SELECT and OWN  # as in bsa_query_fwd_kernel
    window_branch = tl.zeros([BM], tl.float32)
    if SELECT:
        tl.static_assert((BN <= WIDE) & (WIDE <= BS))  # as in bsa_query_fwd_kernel
        row = ((start // R + b + begin // R) * H + h) * S
        count = tl.minimum(begin // BS, S - 1) * BS
        ends = chosen_ends(chosen, row, count, S, BS, ASM)
        TURNS: tl.constexpr = 1 if chosen.reaches is None else 3
        WIDTH: tl.constexpr = (WIDE, WIDE, BN)
    for PART in tl.static_range(2):
        if (PART == 1) == FIRST:  # chosen blocks
            if SELECT:
                for EDGES in tl.static_range(TURNS):
                    begin_at = 0 if EDGES == 0 else ends[EDGES - 1]
                    end_at = count if EDGES == 2 else ends[EDGES]
                    some_k, some_v = (k, v) if EDGES == 2 else (wide_k, wide_v)
                    if begin_at < end_at:
                        for e in range(begin_at, end_at, WIDTH[EDGES]):
                            first = chosen_first(chosen, row, e, WIDTH[EDGES], BS, ASM)
                            position = keys_position(bias, asks, first, WIDTH[EDGES], ASM)
                            edge = chosen, tl.cast(row + e // BS, tl.int64), near, asks.map_row
                            added, found = chosen_both(
                                bias, asks, edge, position, first, EDGES, MOST_MOVED, BM, WIDTH[EDGES], BS, ASM
                            )
                            s = first + tl.arange(0, WIDTH[EDGES])
                            known = s < end
                            keys = load_tile(some_k, s, k_stride_t, known, origin + first, h * D, D, BD, TMA)
                            values = load_tile(some_v, s, v_stride_t, known, origin + first, h * V, V, BV, TMA)
                            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * half
                            score = with_bias(score, bias, added, EDGES < 2)
                            dweight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
                            weight, slope = silu_and_grad_of_twice(score, FAST)
                            branch += tl.sum(weight * dweight, 1)
                            grad = dweight * slope
                            acc = tl.dot(grad.to(keys.dtype), keys, acc, input_precision=PRECISION)
                            sums = add_keys_gradient(
                                tables, pitch, sums, grad, slc, bias, found, edge, EDGES, added[2], t, s,
                                begin - first, e % SPAN, SUMS, SPAN, ASM,
                            )  # fmt: skip
                acc *= slc[:, None]

        else:  # the own block and the window
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
                    score = with_bias(tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * half, bias, added)
                    dweight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
                    weight, slope = silu_and_grad_of_twice(score, FAST)
                    visible = s[None, :] <= t[:, None]
                    dweight = tl.where(visible, dweight, 0.0)
                    branch += tl.sum(tl.where(s[None, :] // BS == t[:, None] // BS, weight * dweight, 0.0), 1)
                    if WINDOW:
                        inside = t[:, None] - s[None, :] < window
                        window_branch += tl.sum(tl.where(inside, weight * dweight, 0.0), 1)
                    grad = dweight * slope
                    if not FIRST:
                        grad *= band_weight(slc, swa, t, s, window, BS, WINDOW)
                    acc = tl.dot(grad.to(keys.dtype), keys, acc, input_precision=PRECISION)
                    buckets = None
                    if OWN and SUMS and bias.time is not None:
                        buckets = own_buckets(bias, *in_block(asks, c, BN, BS), 0, BS, ASM)
                    sums = add_keys_gradient(
                        tables, pitch, sums, grad, slc if FIRST else None, bias, found, None, None, buckets, t, s,
                        begin - c, (c - nearest) % SPAN, SUMS, SPAN, ASM,
                    )  # fmt: skip
    if WINDOW:
        tl.store(dg_swa + token, window_branch * inv_n, mask=live)
    tl.store(dg_slc + token, branch * inv_n, mask=live)
    if SUMS:
        close_keys(tables, sums, BM, SPAN)

    complete = (t + 1) // BS
    means_branch = tl.zeros([BM], tl.float32)
    if SUMS:  # read again: a register less until here
        cmp = tl.load(g_cmp + token, mask=live, other=0.0).to(tl.float32) * BS
    if end >= BS:  # see the head of this file
        for SEVERAL in tl.static_range(1 if bias.time is None else 2):
            begin_at, end_at = (plain, end // BS) if SEVERAL else (0, plain)
            if begin_at < end_at:
                position = means_position(bias, asks, begin_at, BN, BS, ASM)
                for c in range(begin_at, end_at, BN):
                    j = c + tl.arange(0, BN)
                    known = j < end // BS
                    at = opaque(c)
                    next_position = means_position(bias, asks, at + BN, BN, BS, ASM)
                    time, found = means_time(bias, asks, at, known, near, SEVERAL, BN, BS, ASM)
                    keys = load_tile(kbar, j, H * D, known, block_row + c, h * D, D, BD, TMA)
                    values = load_tile(vbar, j, H * V, known, block_row + c, h * V, V, BV, TMA)
                    score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * half
                    score = with_bias(score, bias, (position, time))
                    dweight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
                    weight, slope = silu_and_grad_of_twice(score, FAST)
                    dweight = tl.where(j[None, :] < complete[:, None], dweight, 0.0)
                    means_branch += tl.sum(weight * dweight, 1)
                    grad = dweight * slope * cmp[:, None]
                    acc = tl.dot(grad.to(keys.dtype), keys, acc, input_precision=PRECISION)
                    if SUMS:
                        add_means(sums, grad, bias, found, asks.map_row, at, near, SEVERAL, ASM)
                    else:
                        add_time_gradient(tables, grad, bias, *found, 1, False, ASM)
                    if tables.ahead is not None:
                        ahead = tables.ahead + (begin - at * BS - BS // 2) + asks.lane
                        add_to(ahead[:, None] - (tl.arange(0, BN) * BS).to(tl.int64)[None, :], grad, tables.scale)
                    position = next_position
        if SUMS:
            close_means(tables, sums)
    tl.store(dg_cmp + token, means_branch * (BS * inv_n), mask=live)

    store_rows(dq + (start * H + h) * D, t, H * D, live, acc * (scale * inv_n), D, BD)
