"""Key-major kernels: a program owns a block of keys and walks over the queries that chose it, or that see it.

The choice is inverted first (blocks.py): for each list m = h * NB + block slot, the first tokens of the groups that
chose the block. A list is worked off in chunks, so that a block which nearly all queries chose does not hold up the
rest. A chosen block other than the group's own is complete and in the past: no mask within a tile.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key and V value head size, BS block
size, S blocks chosen per group, R tokens per group, NB block slots, BM queries and BN keys of a tile.
"""

import triton
import triton.language as tl

from hstu_sparse.bsa.bias import (
    MOST_EDGES,
    add_position_gradient,
    add_time,
    add_time_gradient,
    load_origin,
    load_reach,
    load_times,
    means_reach,
    position_tile,
    span,
)
from hstu_sparse.tiles import load_rows, load_tile, locate, silu, silu_and_grad, store_rows


@triton.jit
def listed_tokens(lists, first, row, count, stop, R: tl.constexpr, BM: tl.constexpr):
    """The BM tokens from row `row` of a list of `count` rows on, and which of them exist (before token `stop`)."""
    lane = row + tl.arange(0, BM)
    if R >= BM:
        t = tl.load(lists + first + row // R) + row % R + tl.arange(0, BM)
        return t, t < stop
    else:
        t = tl.load(lists + first + lane // R, mask=lane < count, other=0) + lane % R
        return t, (lane < count) & (t < stop)


@triton.jit
def listed_reach(reaches, first, row, count, R: tl.constexpr, BM: tl.constexpr):
    """`load_reach` of the same."""
    if R >= BM or reaches is None:
        return load_reach(None if reaches is None else reaches + first + row // R, None, BM)
    else:
        lane = row + tl.arange(0, BM)
        return load_reach(reaches + first + lane // R, lane < count, BM)


@triton.jit
def listed_bias(bias, t, position, start, first_key, key, sought, lowest, edges, ASM: tl.constexpr):
    """The bias of listed queries t (tokens, at `position` of their sequence) and keys from `first_key` on."""
    added = position_tile(bias, (first_key - position).to(tl.int64), key.to(tl.int64), ASM)
    return add_time(added, bias, t.to(tl.int64), start + first_key + key, sought, lowest, edges, 0, True, ASM)


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


@triton.jit
def find_chunk(chunk_list, chunk_start, list_start, m_first, M, CHUNK):
    """(list, chunk within the list, first entry, entries) of this program's chunk; list -1 if there is none.

    The chunks of the lists m_first .. m_first + M - 1 are the grid's.
    """
    chunk = tl.load(chunk_start + m_first) + tl.program_id(0)
    m = -1
    part = 0
    first = 0
    count = 0
    if chunk < tl.load(chunk_start + m_first + M):
        m = tl.load(chunk_list + chunk)
        part = chunk - tl.load(chunk_start + m)
        first = tl.load(list_start + m) + part * CHUNK
        count = tl.minimum(tl.load(list_start + m + 1) - first, CHUNK)
    return m, part, first, count


@triton.jit(do_not_specialize=["B", "NB", "m_first"])
def bsa_select_fwd_kernel(
    q,
    k,
    v,
    g_slc,
    out,
    offsets,
    lists,
    list_start,
    chunk_start,
    chunk_list,
    reaches,
    bias,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    alpha,
    inv_n,
    m_first,
    NB,
    H,
    B,
    CHUNK,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ATOMIC: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):
    m, _chunk, first, count = find_chunk(chunk_list, chunk_start, list_start, m_first, NB * H, CHUNK)
    if count <= 0:
        return
    h = (m - m_first) // NB
    _b, start, length, j = locate(offsets, m % NB, B, BS)
    stop = start + length
    key = tl.arange(0, BN)
    whole = key < BN
    k += (start + j * BS) * k_stride_t + h * k_stride_h
    v += (start + j * BS) * v_stride_t + h * v_stride_h
    sought = load_origin(bias, m % NB)
    q += h * q_stride_h
    out += h * V
    if BN == BS:
        keys = load_rows(k, key, k_stride_t, whole, D, BD)
        values = load_rows(v, key, v_stride_t, whole, V, BV)
    for row in range(0, count * R, BM):
        t, live = listed_tokens(lists, first, row, count * R, stop, R, BM)
        queries = load_rows(q, t, q_stride_t, live, D, BD)
        lowest, edges = listed_reach(reaches, first, row, count * R, R, BM)
        # Rows that are not there stand behind the block, where the table has entries.
        position = tl.where(live, (t - start).to(tl.int32), (j + 1) * BS)
        if BN == BS:
            added = listed_bias(bias, t, position, start, j * BS, key, sought, lowest, edges, ASM)
            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha + added
            part = tl.dot(silu(score, FAST).to(values.dtype), values, input_precision=PRECISION)
        else:
            part = tl.zeros([BM, BV], tl.float32)
            for s in range(0, BS, BN):
                some = load_rows(k + s * k_stride_t, key, k_stride_t, whole, D, BD)
                added = listed_bias(bias, t, position, start, j * BS + s, key, sought, lowest, edges, ASM)
                score = tl.dot(queries, tl.trans(some), input_precision=PRECISION) * alpha + added
                some = load_rows(v + s * v_stride_t, key, v_stride_t, whole, V, BV)
                part = tl.dot(silu(score, FAST).to(some.dtype), some, part, input_precision=PRECISION)
        gate = tl.load(g_slc + t.to(tl.int64) * H + h, mask=live, other=0.0).to(tl.float32)
        add_rows(out, t, H * V, live, part * (gate * inv_n)[:, None], V, BV, ATOMIC)


@triton.jit(do_not_specialize=["B", "NB", "m_first"])
def bsa_select_bwd_dq_kernel(
    do,
    q,
    k,
    v,
    g_slc,
    dq,
    dg_slc,
    offsets,
    lists,
    list_start,
    chunk_start,
    chunk_list,
    reaches,
    bias,
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
    m_first,
    NB,
    H,
    B,
    CHUNK,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):
    """Gradient of q and of the selection gate alone: what the deterministic mode adds up slot after slot."""
    m, _chunk, first, count = find_chunk(chunk_list, chunk_start, list_start, m_first, NB * H, CHUNK)
    if count <= 0:
        return
    h = (m - m_first) // NB
    _b, start, length, j = locate(offsets, m % NB, B, BS)
    stop = start + length
    key = tl.arange(0, BN)
    whole = key < BN
    k += (start + j * BS) * k_stride_t + h * k_stride_h
    v += (start + j * BS) * v_stride_t + h * v_stride_h
    sought = load_origin(bias, m % NB)
    for row in range(0, count * R, BM):
        t, live = listed_tokens(lists, first, row, count * R, stop, R, BM)
        queries = load_rows(q + h * q_stride_h, t, q_stride_t, live, D, BD)
        upstream = load_rows(do + h * do_stride_h, t, do_stride_t, live, V, BV)
        lowest, edges = listed_reach(reaches, first, row, count * R, R, BM)
        position = tl.where(live, (t - start).to(tl.int32), (j + 1) * BS)
        acc = tl.zeros([BM, BD], tl.float32)
        branch = tl.zeros([BM], tl.float32)
        for s in range(0, BS, BN):
            keys = load_rows(k + s * k_stride_t, key, k_stride_t, whole, D, BD)
            values = load_rows(v + s * v_stride_t, key, v_stride_t, whole, V, BV)
            added = listed_bias(bias, t, position, start, j * BS + s, key, sought, lowest, edges, ASM)
            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * alpha + added
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
def key_step(dk, dv, keys, values, queries, upstream, gate, alpha, added, FAST: tl.constexpr, PRECISION: tl.constexpr):
    """Adds one tile of queries to dk, dv; everything is transposed, keys first. `gate` is [1, BM] or [BN, BM].

    added: the bias. Also returns the scores' gradient [BN, BM] and weight * (do.v), what the gates' gradients sum.
    """
    score = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * alpha + added
    dweight = tl.dot(values, tl.trans(upstream), input_precision=PRECISION)
    weight, slope = silu_and_grad(score, FAST)
    dv = tl.dot((weight * gate).to(upstream.dtype), upstream, dv, input_precision=PRECISION)
    dscore = dweight * slope * gate
    dk = tl.dot(dscore.to(queries.dtype), queries, dk, input_precision=PRECISION)
    return dk, dv, dscore, weight * dweight


@triton.jit(do_not_specialize=["B", "NB"])
def bsa_select_bwd_dkv_kernel(
    do,
    q,
    k,
    v,
    dkbar,
    dvbar,
    g_slc,
    g_swa,
    dk,
    dv,
    parts,
    dq,
    dg_slc,
    offsets,
    lists,
    list_start,
    chunk_start,
    chunk_list,
    part_start,
    reaches,
    bias,
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
    window,
    NB,
    H,
    B,
    CHUNK,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    DQ: tl.constexpr,
    TMA: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):
    """Gradient of BN keys and values: from the block's mean, from the queries in it (and the window), from its list.

    With DQ it also adds the list's part of dq and of the selection gate's gradient, by fp32 atomics. A block of one
    chunk is written at once; the chunks of longer lists leave partial sums for bsa_merge_bwd_dkv_kernel.
    """
    m, chunk, first, count = find_chunk(chunk_list, chunk_start, list_start, 0, NB * H, CHUNK)
    if m < 0:
        return
    h = m // NB
    slot = m % NB
    _b, start, length, j = locate(offsets, slot, B, BS)
    if j * BS >= length:
        return
    offset = tl.program_id(1) * BN
    s = j * BS + offset + tl.arange(0, BN)
    known = s < length
    keys = load_rows(k + start * k_stride_t + h * k_stride_h, s, k_stride_t, known, D, BD)
    values = load_rows(v + start * v_stride_t + h * v_stride_h, s, v_stride_t, known, V, BV)
    sought = load_origin(bias, slot)
    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BV], tl.float32)
    origin = start.to(tl.int32)
    if not TMA:
        q += h * q_stride_h
        do += h * do_stride_h

    if chunk == 0:
        reach = (j + 1) * BS
        if WINDOW:
            reach = tl.maximum(reach, j * BS + offset + BN - 1 + window)
        for c in range((j * BS + offset) // BM * BM, tl.minimum(reach, length), BM):
            t = c + tl.arange(0, BM)
            live = t < length
            queries = load_tile(q, start + t, q_stride_t, live, origin + c, h * D, D, BD, TMA)
            upstream = load_tile(do, start + t, do_stride_t, live, origin + c, h * V, V, BV, TMA)
            token = (start + t) * H + h
            slc = tl.load(g_slc + token, mask=live, other=0.0).to(tl.float32)
            seen = s[:, None] <= t[None, :]
            gate = tl.where(seen & (t[None, :] < (j + 1) * BS), slc[None, :], 0.0)
            if WINDOW:
                swa = tl.load(g_swa + token, mask=live, other=0.0).to(tl.float32)
                gate += tl.where(seen & (t[None, :] - s[:, None] < window), swa[None, :], 0.0)
            added = position_tile(bias, s.to(tl.int64), -t.to(tl.int64), ASM)
            added = add_time(added, bias, start + t, start + s, (0.0, 0.0), 0, MOST_EDGES + 1, 1, True, ASM)
            acc_k, acc_v, _, _ = key_step(
                acc_k, acc_v, keys, values, queries, upstream, gate, alpha, added, FAST, PRECISION
            )

    stop = start + length
    for row in range(0, count * R, BM):
        t, live = listed_tokens(lists, first, row, count * R, stop, R, BM)
        begin = 0
        if R >= BM:
            begin = tl.load(lists + first + row // R) + row % R
        queries = load_tile(q, t, q_stride_t, live, begin, h * D, D, BD, TMA)
        upstream = load_tile(do, t, do_stride_t, live, begin, h * V, V, BV, TMA)
        token = t.to(tl.int64) * H + h
        gate = tl.load(g_slc + token, mask=live, other=0.0).to(tl.float32)
        if R >= BM:
            # The rows are of one group, consecutive, and lie within a block.
            position = begin - origin + tl.arange(0, BM)
        else:
            # Rows that are not there stand behind the block, where the table has entries.
            position = tl.where(live, (t - start).to(tl.int32), (j + 1) * BS)
        lowest, edges = listed_reach(reaches, first, row, count * R, R, BM)
        added = position_tile(bias, s.to(tl.int64), -position.to(tl.int64), ASM)
        added = add_time(added, bias, t.to(tl.int64), start + s, sought, lowest, edges, 1, True, ASM)
        acc_k, acc_v, dscore, product = key_step(
            acc_k, acc_v, keys, values, queries, upstream, gate[None, :], alpha, added, FAST, PRECISION
        )
        add_time_gradient(tables, dscore, bias, t.to(tl.int64), start + s, sought, lowest, edges, 1, True, ASM)
        add_position_gradient(tables, pitch, dscore, position, s, 0)
        if DQ:
            part = tl.dot(tl.trans(dscore.to(keys.dtype)), keys, input_precision=PRECISION)
            add_rows(dq + h * D, t, H * D, live, part * (alpha * inv_n), D, BD, True)
            tl.atomic_add(dg_slc + token, tl.sum(product, 0) * inv_n, mask=live, sem="relaxed")

    acc_k *= alpha * inv_n
    acc_v *= inv_n
    if chunk == 0:
        # The mean's gradient goes to the block's tokens in equal shares.
        size = tl.minimum(length - j * BS, BS)
        place = slot.to(tl.int64) * H + h
        d, e = tl.arange(0, BD), tl.arange(0, BV)
        acc_k += (tl.load(dkbar + place * D + d, mask=d < D, other=0.0) / size)[None, :]
        acc_v += (tl.load(dvbar + place * V + e, mask=e < V, other=0.0) / size)[None, :]
    part = tl.load(part_start + m)
    if tl.load(part_start + m + 1) == part:
        store_rows(dk + (start * H + h) * D, s, H * D, known, acc_k, D, BD)
        store_rows(dv + (start * H + h) * V, s, H * V, known, acc_v, V, BV)
    else:
        parts += (part + chunk).to(tl.int64) * (BS * (D + V)) + offset * (D + V)
        lane = tl.arange(0, BN)
        store_rows(parts, lane, D + V, lane < BN, acc_k, D, BD)
        store_rows(parts + D, lane, D + V, lane < BN, acc_v, V, BV)


@triton.jit(do_not_specialize=["B", "NB"])
def bsa_merge_bwd_dkv_kernel(
    parts,
    part_start,
    offsets,
    dk,
    dv,
    NB,
    H,
    B,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    BN: tl.constexpr,
):
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
    do,
    q,
    kbar,
    vbar,
    offsets,
    g_cmp,
    dkbar,
    dvbar,
    bias,
    do_stride_t,
    do_stride_h,
    q_stride_t,
    q_stride_h,
    alpha,
    inv_n,
    H,
    B,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ATOMIC: tl.constexpr,
    TMA: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):
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
    middle = j * BS + BS // 2
    rows = tl.where(known, start + middle, start)
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
        queries = load_tile(q, start + t, q_stride_t, live, origin + c, h * D, D, BD, TMA)
        upstream = load_tile(do, start + t, do_stride_t, live, origin + c, h * V, V, BV, TMA)
        cmp = tl.load(g_cmp + (start + t) * H + h, mask=live, other=0.0).to(tl.float32)
        gate = tl.where(j[:, None] < ((t + 1) // BS)[None, :], cmp[None, :], 0.0)
        added = position_tile(bias, middle.to(tl.int64), -t.to(tl.int64), ASM)
        if bias.time is not None:
            high, low = load_times(bias.query_high, bias.query_low, start + t, live)
            asked = span(high, low, live, 0)
            lowest, edges = means_reach(bias, asked, rows, known & (j * BS + BS <= c + BM), ASM)
            added = add_time(added, bias, rows, start + t, asked, lowest, edges, 0, False, ASM)
        acc_k, acc_v, _, _ = key_step(
            acc_k, acc_v, keys, values, queries, upstream, gate, alpha, added, FAST, PRECISION
        )
    if begin < length:
        add_rows(dkbar + base * D, j, H * D, known, acc_k * (BS * alpha * inv_n), D, BD, ATOMIC)
        add_rows(dvbar + base * V, j, H * V, known, acc_v * (BS * inv_n), V, BV, ATOMIC)
