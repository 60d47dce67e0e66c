"""Key-major kernels: a program owns a block of keys and walks over the queries that chose it, or that see it.

The choice is inverted first (blocks.py): for each list m = h * NB + block slot, the first tokens of the groups that
chose the block. A list is worked off in chunks, so that a block which nearly all queries chose does not hold up the
rest. A chosen block other than the group's own is complete and in the past: no mask within a tile.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key and V value head size, BS block
size, S blocks chosen per group, R tokens per group, NB block slots, BM queries and BN keys of a tile.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.assembly import look_up
from hstu_sparse.bsa.bias import (
    add_position_gradient,
    add_time_gradient,
    load_origin,
    means_tile,
    own_tile,
    position_tile,
    time_tile,
    with_bias,
)
from hstu_sparse.bsa.reach import MOST_EDGES, PARTS, load_reach, map_row
from hstu_sparse.tiles import load_rows, load_tile, locate, silu, silu_and_grad, store_rows


class ListPointers(NamedTuple):
    """What kernels read of `Lists` (lists.py)."""

    tokens: object
    start: object
    chunk_start: object
    chunk_list: object
    reaches: object
    counts: object


class ListedBlock(NamedTuple):
    """A program's chunk of a list, and the block of keys that the list is of.

    m, chunk       the list, -1 if there is none for the program, and the chunk's number in it
    first, rows    its first entry, and its queries, R for each entry
    timed          of the rows those before the first whose group reaches no edge, as all behind it
    h, slot        head and slot of the block
    start, stop    the first token of its sequence, and the one behind the last
    begin          position of its first key
    origin         its earliest time, see `load_origin`
    """

    m: tl.tensor
    chunk: tl.tensor
    first: tl.tensor
    rows: tl.tensor
    timed: tl.tensor
    h: tl.tensor
    slot: tl.tensor
    start: tl.tensor
    stop: tl.tensor
    begin: tl.tensor
    origin: tuple


@triton.jit
def find_listed_block(
    lists, offsets, bias, m_first, NB, H, B, CHUNK, BS: tl.constexpr, R: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The program's `ListedBlock`; the chunks of the lists m_first .. m_first + NB * H - 1 are the grid's."""
    chunk = tl.load(lists.chunk_start + m_first) + tl.program_id(0)
    m = -1
    part = 0
    first = 0
    count = 0
    timed = 0
    if chunk < tl.load(lists.chunk_start + m_first + NB * H):
        m = tl.load(lists.chunk_list + chunk)
        part = chunk - tl.load(lists.chunk_start + m)
        first = tl.load(lists.start + m) + part * CHUNK
        last = tl.load(lists.start + m + 1)
        count = tl.minimum(last - first, CHUNK)
        timed = count
        if lists.counts is not None:
            plain = tl.load(lists.counts + m * PARTS + (PARTS - 1))
            timed = tl.minimum(tl.maximum(last - plain - first, 0), count)
    slot = tl.maximum(m, 0) % NB
    _b, start, length, j = locate(offsets, slot, B, BS)
    return ListedBlock(
        m,
        part,
        first,
        count * R,
        timed * R,
        (m - m_first) // NB,
        slot,
        start,
        start + length,
        j * BS,
        load_origin(bias, slot, ASM),
    )


@triton.jit
def listed_queries(lists, block, row, R: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, ASM: tl.constexpr):
    """The BM queries from row `row` of a list on: (tokens, which there are, two parts of their positions, and what
    `load_reach` finds).

    The parts are the first one's position and the others' distance from it, where they are consecutive, else 0 and all
    positions. Rows that are not there stand behind the block, where the position table has entries.
    """
    begin = 0
    if R >= BM:
        entry = (block.first + row // R).to(tl.int64)
        token = look_up(lists.tokens, entry, ASM) + row % R  # as in `chosen_keys`
        reaches = None if lists.reaches is None else lists.reaches + entry
        ahead = tl.arange(0, BM)
        t = token + ahead
        live = t < block.stop
        reach = load_reach(reaches, None, BM, ASM)
        begin = token - block.start.to(tl.int32)
    else:
        lane = row + tl.arange(0, BM)
        inside = lane < block.rows
        entry = block.first + lane // R
        t = tl.load(lists.tokens + entry, mask=inside, other=0) + lane % R
        live = inside & (t < block.stop)
        reach = load_reach(None if lists.reaches is None else lists.reaches + entry, inside, BM, ASM)
        ahead = tl.where(live, (t - block.start).to(tl.int32), block.begin + BS)
    return t, live, begin, ahead, reach


@triton.jit
def listed_bias(
    bias, block, t, begin, ahead, reach, first, BN: tl.constexpr, AXIS: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The bias of listed queries and a block's BN keys from place `first` on (the queries on the tile's axis AXIS), and
    what `add_time_gradient` wants: far to reaches.
    """
    place = tl.arange(0, BN)
    s = block.begin + first + place
    rows, ahead = place.to(tl.int64), -ahead.to(tl.int64)
    found = t.to(tl.int64), block.start + s, block.origin, reach
    if AXIS == 0:
        position = position_tile(bias, block.begin + first - begin, ahead, rows, ASM)
    else:
        position = position_tile(bias, block.begin + first - begin, rows, ahead, ASM)
    return (position, time_tile(bias, *found, AXIS, True, ASM)), found


@triton.jit
def add_rows(base, rows, stride, mask, value, SIZE: tl.constexpr, PADDED: tl.constexpr, ATOMIC: tl.constexpr):
    """base[rows] += value in fp32; without ATOMIC the caller sees to it that no two programs share a row."""
    columns = tl.arange(0, PADDED)
    pointers = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if SIZE == PADDED:
        inside = tl.broadcast_to(mask[:, None], value.shape)
    else:
        inside = mask[:, None] & (columns < SIZE)[None, :]
    if ATOMIC:
        tl.atomic_add(pointers, value, mask=inside, sem="relaxed")
    else:
        total = tl.load(pointers, mask=inside, other=0.0) + value
        # Several threads may hold the same element: all of them must have read it before one writes.
        tl.debug_barrier()
        tl.store(pointers, total, mask=inside)


@triton.jit(do_not_specialize=["B", "NB", "m_first"])
def bsa_select_fwd_kernel(
    q, k, v, g_slc, out, offsets, lists, bias, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    alpha, inv_n, m_first, NB, H, B, CHUNK,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, ATOMIC: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    block = find_listed_block(lists, offsets, bias, m_first, NB, H, B, CHUNK, BS, R, ASM)
    if block.rows <= 0:
        return
    h = block.h
    key = tl.arange(0, BN)
    whole = key < BN
    k += (block.start + block.begin) * k_stride_t + h * k_stride_h
    v += (block.start + block.begin) * v_stride_t + h * v_stride_h
    if BN == BS:
        keys = load_rows(k, key, k_stride_t, whole, D, BD)
        values = load_rows(v, key, v_stride_t, whole, V, BV)
    for row in range(0, block.rows, BM):
        t, live, begin, ahead, reach = listed_queries(lists, block, row, R, BM, BS, ASM)
        queries = load_rows(q + h * q_stride_h, t, q_stride_t, live, D, BD)
        if BN == BS:
            added, _ = listed_bias(bias, block, t, begin, ahead, reach, 0, BN, 0, ASM)
            score = with_bias(tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha, bias, added)
            part = tl.dot(silu(score, FAST).to(values.dtype), values, input_precision=PRECISION)
        else:
            part = tl.zeros([BM, BV], tl.float32)
            for s in range(0, BS, BN):
                some = load_rows(k + s * k_stride_t, key, k_stride_t, whole, D, BD)
                added, _ = listed_bias(bias, block, t, begin, ahead, reach, s, BN, 0, ASM)
                score = with_bias(tl.dot(queries, tl.trans(some), input_precision=PRECISION) * alpha, bias, added)
                some = load_rows(v + s * v_stride_t, key, v_stride_t, whole, V, BV)
                part = tl.dot(silu(score, FAST).to(some.dtype), some, part, input_precision=PRECISION)
        gate = tl.load(g_slc + t.to(tl.int64) * H + h, mask=live, other=0.0).to(tl.float32)
        add_rows(out + h * V, t, H * V, live, part * (gate * inv_n)[:, None], V, BV, ATOMIC)


@triton.jit(do_not_specialize=["B", "NB", "m_first"])
def bsa_select_bwd_dq_kernel(
    do, q, k, v, g_slc, dq, dg_slc, offsets, lists, bias, do_stride_t, do_stride_h, q_stride_t, q_stride_h,
    k_stride_t, k_stride_h, v_stride_t, v_stride_h, alpha, inv_n, m_first, NB, H, B, CHUNK,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Gradient of q and of the selection gate alone: what the deterministic mode adds up slot after slot."""
    block = find_listed_block(lists, offsets, bias, m_first, NB, H, B, CHUNK, BS, R, ASM)
    if block.rows <= 0:
        return
    h = block.h
    place = tl.arange(0, BN)
    k += (block.start + block.begin) * k_stride_t + h * k_stride_h
    v += (block.start + block.begin) * v_stride_t + h * v_stride_h
    for row in range(0, block.rows, BM):
        t, live, begin, ahead, reach = listed_queries(lists, block, row, R, BM, BS, ASM)
        queries = load_rows(q + h * q_stride_h, t, q_stride_t, live, D, BD)
        upstream = load_rows(do + h * do_stride_h, t, do_stride_t, live, V, BV)
        acc = tl.zeros([BM, BD], tl.float32)
        branch = tl.zeros([BM], tl.float32)
        for s in range(0, BS, BN):
            keys = load_rows(k + s * k_stride_t, place, k_stride_t, place < BN, D, BD)
            values = load_rows(v + s * v_stride_t, place, v_stride_t, place < BN, V, BV)
            added, _ = listed_bias(bias, block, t, begin, ahead, reach, s, BN, 0, ASM)
            score = with_bias(tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha, bias, added)
            dweight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
            weight, slope = silu_and_grad(score, FAST)
            branch += tl.sum(weight * dweight, 1)
            acc = tl.dot((dweight * slope).to(keys.dtype), keys, acc, input_precision=PRECISION)
        token = t.to(tl.int64) * H + h
        gate = tl.load(g_slc + token, mask=live, other=0.0).to(tl.float32)
        add_rows(dq + h * D, t, H * D, live, acc * (gate * alpha * inv_n)[:, None], D, BD, False)
        total = tl.load(dg_slc + token, mask=live, other=0.0) + branch * inv_n
        tl.debug_barrier()
        tl.store(dg_slc + token, total, mask=live)


@triton.jit
def key_step(
    dk, dv, keys, values, queries, upstream, gate, alpha, bias, added, FAST: tl.constexpr, PRECISION: tl.constexpr
):
    """Adds one tile of queries to dk, dv; everything is transposed, keys first. `gate` is [1, BM] or [BN, BM].

    added: the bias. Also returns the scores' gradient [BN, BM] and weight * (do.v), what the gates' gradients sum.
    """
    score = with_bias(tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * alpha, bias, added)
    dweight = tl.dot(values, tl.trans(upstream), input_precision=PRECISION)
    weight, slope = silu_and_grad(score, FAST)
    dv = tl.dot((weight * gate).to(upstream.dtype), upstream, dv, input_precision=PRECISION)
    dscore = dweight * slope * gate
    dk = tl.dot(dscore.to(queries.dtype), queries, dk, input_precision=PRECISION)
    return dk, dv, dscore, weight * dweight


@triton.jit(do_not_specialize=["B", "NB"])
def bsa_select_bwd_dkv_kernel(
    do, q, k, v, dkbar, dvbar, g_slc, g_swa, dk, dv, parts, dq, dg_slc, offsets, lists, part_start, bias, tables,
    pitch, do_stride_t, do_stride_h, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, alpha,
    inv_n, window, NB, H, B, CHUNK,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, DQ: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Gradient of BN keys and values: from the block's mean, from the queries in it (and the window), from its list.

    With DQ it also adds the list's part of dq and of the selection gate's gradient, by fp32 atomics. A block of one
    chunk is written at once; the chunks of longer lists leave partial sums for bsa_merge_bwd_dkv_kernel.
    """
    block = find_listed_block(lists, offsets, bias, 0, NB, H, B, CHUNK, BS, R, ASM)
    h, start, stop, chunk = block.h, block.start, block.stop, block.chunk
    length = (stop - start).to(tl.int32)
    if (block.m < 0) | (block.begin >= length):
        return
    offset = tl.program_id(1) * BN
    place = offset + tl.arange(0, BN)
    s = block.begin + place
    known = s < length
    keys = load_rows(k + start * k_stride_t + h * k_stride_h, s, k_stride_t, known, D, BD)
    values = load_rows(v + start * v_stride_t + h * v_stride_h, s, v_stride_t, known, V, BV)
    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BV], tl.float32)
    origin = start.to(tl.int32)
    if not TMA:
        q += h * q_stride_h
        do += h * do_stride_h

    end = block.begin + BS
    if WINDOW:
        end = tl.maximum(end, block.begin + offset + BN - 1 + window)
    # Only the first chunk has queries of the block itself.
    first = (block.begin + offset) // BM * BM
    end = tl.where(chunk == 0, tl.minimum(end, length), first)
    # The reason for the conditions is in query_major.py. With DQ others: there the products that run side by side cost
    # registers that there are not.
    inside = first < end
    if DQ:
        inside = chunk == 0
    if inside:
        for c in range(first, end, BM):
            t = c + tl.arange(0, BM)
            live = t < length
            none = tl.zeros([BM], tl.int32)
            added, _ = listed_bias(
                bias, block, start + t, c, tl.arange(0, BM), (none, MOST_EDGES + 1, 0, 0), offset, BN, 1, ASM
            )
            if not WINDOW and BM <= BS:
                added = added[0], own_tile(bias, start + t, place.to(tl.int64), 1, BS, ASM)
            queries = load_tile(q, start + t, q_stride_t, live, origin + c, h * D, D, BD, TMA)
            upstream = load_tile(do, start + t, do_stride_t, live, origin + c, h * V, V, BV, TMA)
            token = (start + t) * H + h
            slc = tl.load(g_slc + token, mask=live, other=0.0).to(tl.float32)
            seen = s[:, None] <= t[None, :]
            gate = tl.where(seen & (t[None, :] < block.begin + BS), slc[None, :], 0.0)
            if WINDOW:
                swa = tl.load(g_swa + token, mask=live, other=0.0).to(tl.float32)
                gate += tl.where(seen & (t[None, :] - s[:, None] < window), swa[None, :], 0.0)
            acc_k, acc_v, _, _ = key_step(
                acc_k, acc_v, keys, values, queries, upstream, gate, alpha, bias, added, FAST, PRECISION
            )

    # Two loops: the groups that reach no edge stand behind the others.
    TURNS: tl.constexpr = 1 if lists.counts is None else 2
    for PLAIN in tl.static_range(TURNS):
        begin_at, end_at = 0, block.rows
        if TURNS == 2:
            timed = (block.timed + BM - 1) // BM * BM
            begin_at, end_at = (timed, block.rows) if PLAIN else (0, tl.minimum(timed, block.rows))
        listed = begin_at < end_at
        if DQ:
            listed = True
        if listed:
            for row in range(begin_at, end_at, BM):
                t, live, begin, ahead, reach = listed_queries(lists, block, row, R, BM, BS, ASM)
                if PLAIN:
                    reach = reach[0], 0, reach[2], reach[3]
                added, found = listed_bias(bias, block, t, begin, ahead, reach, offset, BN, 1, ASM)
                queries = load_tile(q, t, q_stride_t, live, origin + begin, h * D, D, BD, TMA)
                upstream = load_tile(do, t, do_stride_t, live, origin + begin, h * V, V, BV, TMA)
                token = t.to(tl.int64) * H + h
                gate = tl.load(g_slc + token, mask=live, other=0.0).to(tl.float32)
                acc_k, acc_v, dscore, product = key_step(
                    acc_k, acc_v, keys, values, queries, upstream, gate[None, :], alpha, bias, added, FAST, PRECISION
                )
                add_time_gradient(tables, dscore, bias, *found, 1, True, ASM)
                add_position_gradient(tables, pitch, dscore, begin + ahead, s, 0)
                if DQ:
                    part = tl.dot(tl.trans(dscore.to(keys.dtype)), keys, input_precision=PRECISION)
                    add_rows(dq + h * D, t, H * D, live, part * (alpha * inv_n), D, BD, True)
                    tl.atomic_add(dg_slc + token, tl.sum(product, 0) * inv_n, mask=live, sem="relaxed")

    acc_k *= alpha * inv_n
    acc_v *= inv_n
    if chunk == 0:
        # The mean's gradient goes to the block's tokens in equal shares.
        size = tl.minimum(length - block.begin, BS)
        mean = block.slot.to(tl.int64) * H + h
        d, e = tl.arange(0, BD), tl.arange(0, BV)
        acc_k += (tl.load(dkbar + mean * D + d, mask=d < D, other=0.0) / size)[None, :]
        acc_v += (tl.load(dvbar + mean * V + e, mask=e < V, other=0.0) / size)[None, :]
    part = tl.load(part_start + block.m)
    if tl.load(part_start + block.m + 1) == part:
        store_rows(dk + (start * H + h) * D, s, H * D, known, acc_k, D, BD)
        store_rows(dv + (start * H + h) * V, s, H * V, known, acc_v, V, BV)
    else:
        parts += (part + chunk).to(tl.int64) * (BS * (D + V)) + offset * (D + V)
        lane = tl.arange(0, BN)
        store_rows(parts, lane, D + V, lane < BN, acc_k, D, BD)
        store_rows(parts + D, lane, D + V, lane < BN, acc_v, V, BV)


@triton.jit(do_not_specialize=["B", "NB"])
def bsa_merge_bwd_dkv_kernel(
    parts, part_start, offsets, dk, dv, NB, H, B,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of a long list's chunks, in their order, into dk and dv."""
    m = tl.program_id(0)
    part = tl.load(part_start + m)
    last = tl.load(part_start + m + 1)
    if part == last:
        return
    h = m // NB
    _b, start, length, j = locate(offsets, m % NB, B, BS)
    lane = tl.program_id(1) * BN + tl.arange(0, BN)
    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BV], tl.float32)
    source = parts + part.to(tl.int64) * (BS * (D + V))
    for _ in range(part, last):
        acc_k += load_rows(source, lane, D + V, lane < BS, D, BD)
        acc_v += load_rows(source + D, lane, D + V, lane < BS, V, BV)
        source += BS * (D + V)
    s = j * BS + lane
    store_rows(dk + (start * H + h) * D, s, H * D, s < length, acc_k, D, BD)
    store_rows(dv + (start * H + h) * V, s, H * V, s < length, acc_v, V, BV)


@triton.jit(do_not_specialize=["B"])
def bsa_compress_bwd_dkv_kernel(
    do, q, kbar, vbar, offsets, g_cmp, dkbar, dvbar, bias, do_stride_t, do_stride_h, q_stride_t, q_stride_h, alpha,
    inv_n, H, B,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, ATOMIC: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Gradient of BN mean keys and values from every query after them; the queries are dealt to grid axis 2 in turn."""
    b, start, length, i = locate(offsets, tl.program_id(0), B, BN * BS)
    h = tl.program_id(1)
    blocks = length // BS
    if i * BN >= blocks:
        return
    j = i * BN + tl.arange(0, BN)
    known = j < blocks
    base = (start // BS + b) * H + h
    keys = load_rows(kbar + base * D, j, H * D, known, D, BD)
    values = load_rows(vbar + base * V, j, H * V, known, V, BV)
    rows = tl.where(known, start + j * BS + BS // 2, start)
    spaced, side = tl.arange(0, BN).to(tl.int64) * BS, -tl.arange(0, BM).to(tl.int64)
    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BV], tl.float32)
    origin = start.to(tl.int32)
    if not TMA:
        q += h * q_stride_h
        do += h * do_stride_h
    # The first block of the tile is complete for its own last token.
    begin = (i * BN * BS + BS - 1) // BM * BM + tl.program_id(2) * BM
    for c in range(begin, length, BM * tl.num_programs(2)):
        t = c + tl.arange(0, BM)
        live = t < length
        position, time = position_tile(bias, i * BN * BS + BS // 2 - c, spaced, side, ASM), None
        if bias.time is not None:
            near = look_up(bias.places, start + t, ASM)
            time = means_tile(bias, map_row(start, b, c, BS), i * BN, rows, start + t, near, 0, ASM)
        queries = load_tile(q, start + t, q_stride_t, live, origin + c, h * D, D, BD, TMA)
        upstream = load_tile(do, start + t, do_stride_t, live, origin + c, h * V, V, BV, TMA)
        cmp = tl.load(g_cmp + (start + t) * H + h, mask=live, other=0.0).to(tl.float32)
        gate = tl.where(j[:, None] < ((t + 1) // BS)[None, :], cmp[None, :], 0.0)
        acc_k, acc_v, _, _ = key_step(
            acc_k, acc_v, keys, values, queries, upstream, gate, alpha, bias, (position, time), FAST, PRECISION
        )
    if begin < length:
        add_rows(dkbar + base * D, j, H * D, known, acc_k * (BS * alpha * inv_n), D, BD, ATOMIC)
        add_rows(dvbar + base * V, j, H * V, known, acc_v * (BS * inv_n), V, BV, ATOMIC)
