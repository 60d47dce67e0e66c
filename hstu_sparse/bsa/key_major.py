"""Define key-major kernels: a program has a block of keys and iterates over the queries that chose it, or that see it.

blocks.py inverts the choice: for each head and block slot (`head_slot_number`) it lists the first tokens of the groups
that chose the block. A list is processed in chunks, so that a block chosen by nearly all queries does not delay the
others. Listed blocks are complete and in the past, so that their tiles need no mask.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key and V value head size, BS block
size, S blocks chosen per group, R tokens per group, NB block slots, BM queries and BN keys of a tile.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.bsa.bias import Side, add_gathered, block_tile, pair_tile
from hstu_sparse.tiles.assembly import look_up, scalar
from hstu_sparse.tiles.rows import (
    head_and_slot,
    load_rows,
    load_tile,
    locate,
    silu_and_grad_of_half,
    silu_of_half,
    store_rows,
)


class ListedBlock(NamedTuple):
    """A program's chunk of a list, and the block of keys of that list.

    m, chunk       the list, -1 if the program has none, and the chunk's number in it
    first, rows    the chunk's first entry, and the number of its queries, R for each entry
    h, slot        head and slot of the block
    b              its sequence
    start, stop    the first token of the sequence, and one past the last
    begin          position of its first key
    """

    m: tl.tensor
    chunk: tl.tensor
    first: tl.tensor
    rows: tl.tensor
    h: tl.tensor
    slot: tl.tensor
    b: tl.tensor
    start: tl.tensor
    stop: tl.tensor
    begin: tl.tensor


@triton.jit
def find_listed_block(
    lists, offsets, m_first, NB, together, H, B, BS: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Return the program's `ListedBlock`; the grid covers the chunks of the lists m_first .. m_first + NB * H - 1."""
    chunk = tl.load(lists.chunk_start + m_first) + tl.program_id(0)
    m = -1
    part = 0
    first = 0
    count = 0
    if chunk < tl.load(lists.chunk_start + m_first + NB * H):
        m = tl.load(lists.chunk_list + chunk)
        part = chunk - tl.load(lists.chunk_start + m)
        first = tl.load(lists.start + m) + part * lists.chunk
        count = tl.minimum(tl.load(lists.start + m + 1) - first, lists.chunk)
    h, slot = head_and_slot(tl.maximum(m - m_first, 0), NB, H, together)
    b, start, length, j = locate(offsets, slot, B, BS)
    return ListedBlock(m, part, first, count * R, h, slot, b, start, start + length, j * BS)


@triton.jit
def listed_queries(lists, block, row, R: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, ASM: tl.constexpr):
    """Return BM queries from row `row` of a list on: (the side of a tile, the mask of valid ones, their entries).

    The entries are one number if the queries are of one group, otherwise [BM]. Rows past the list's end get indices
    after the block.
    """
    entries = 0
    if R >= BM:
        entry = (block.first + row // R).to(tl.int64)
        first = look_up(lists.tokens, entry, ASM) + row % R  # as in `chosen_block`
        lane = tl.arange(0, BM)
        live = lane < (block.stop - first).to(tl.int32)
        if lists.entries is not None:
            entries = scalar(lists.entries + entry, ASM).to(tl.int32)
        return Side(first.to(tl.int64), first - block.start.to(tl.int32), lane.to(tl.int64)), live, entries
    else:
        lane = row + tl.arange(0, BM)
        entry = block.first + lane // R
        t = tl.load(lists.tokens + entry, mask=lane < block.rows, other=0) + lane % R
        live = (lane < block.rows) & (t < block.stop)
        if lists.entries is not None:
            entries = tl.load(lists.entries + entry, live, 0).to(tl.int32)
        t = tl.where(live, t, block.start + block.begin + BS).to(tl.int64)
        return Side(tl.cast(0, tl.int64), -block.start.to(tl.int32), t), live, entries


@triton.jit
def block_keys(block, first, lane):
    """Return a block's keys at the indices first + lane as the side of a tile."""
    place = block.begin + first
    return Side(block.start + place, place, lane.to(tl.int64))


@triton.jit
def load_gates(gates, first, live, BM: tl.constexpr, ASM: tl.constexpr):
    """Load a head's `gates` of the BM tokens from `first` (int64) on, 0 for masked ones."""
    return tl.where(live, look_up(gates + first, tl.arange(0, BM).to(tl.int64), ASM), 0.0)


@triton.jit
def add_rows(base, rows, stride, mask, value, SIZE: tl.constexpr, PADDED: tl.constexpr, ATOMIC: tl.constexpr):
    """Compute base[rows] += value in fp32; without ATOMIC the caller ensures that no two programs share a row."""
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


@triton.jit(do_not_specialize=["B", "NB", "together", "m_first"])
def bsa_select_fwd_kernel(
    q, k, v, g_slc, out, offsets, lists, bias, strides, call, m_first, NB, together, B,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, ATOMIC: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Add a chunk's part to `out`: its queries attend to the block of keys that they chose.

    m_first: the first of the launch's lists; NB, together: see `head_and_slot`.
    """
    scale, inv_n, H = call.scale, call.inv_n, call.H
    block = find_listed_block(lists, offsets, m_first, NB, together, H, B, BS, R)
    if block.rows <= 0:
        return
    h = block.h
    key = tl.arange(0, BN)
    in_block = key < BN
    k += (block.start + block.begin) * strides.k_t + h * strides.k_h
    v += (block.start + block.begin) * strides.v_t + h * strides.v_h
    if BN == BS:  # loaded once for all queries
        keys = load_rows(k, key, strides.k_t, in_block, D, BD)
        values = load_rows(v, key, strides.v_t, in_block, V, BV)
    for row in range(0, block.rows, BM):
        side, live, entry = listed_queries(lists, block, row, R, BM, BS, ASM)
        t = side.token + side.lane
        queries = load_rows(q + h * strides.q_h, t, strides.q_t, live, D, BD)
        part = tl.zeros([BM, BV], tl.float32)
        for s in range(0, BS, BN):
            if BN < BS:
                some_keys = load_rows(k + s * strides.k_t, key, strides.k_t, in_block, D, BD)
                some_values = load_rows(v + s * strides.v_t, key, strides.v_t, in_block, V, BV)
            else:
                some_keys, some_values = keys, values
            biases = block_tile(bias, entry, side, block_keys(block, s, key), 0, ASM)
            score = tl.dot(queries, tl.trans(some_keys), input_precision=PRECISION) * (0.5 * scale) + biases
            weight = silu_of_half(score, FAST).to(some_values.dtype)
            part = tl.dot(weight, some_values, part, input_precision=PRECISION)
        gate = tl.load(g_slc + t.to(tl.int64) * H + h, mask=live, other=0.0).to(tl.float32)
        add_rows(out + h * V, t, H * V, live, part * (gate * inv_n)[:, None], V, BV, ATOMIC)


@triton.jit(do_not_specialize=["B", "NB", "together", "m_first"])
def bsa_select_bwd_dq_kernel(
    do, q, k, v, g_slc, dq, dg_slc, offsets, lists, bias, strides, call, m_first, NB, together, B,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add a chunk's part to the gradients of q and the selection gate; in deterministic mode, slot by slot."""
    scale, inv_n, H = call.scale, call.inv_n, call.H
    block = find_listed_block(lists, offsets, m_first, NB, together, H, B, BS, R)
    if block.rows <= 0:
        return
    h = block.h
    place = tl.arange(0, BN)
    k += (block.start + block.begin) * strides.k_t + h * strides.k_h
    v += (block.start + block.begin) * strides.v_t + h * strides.v_h
    for row in range(0, block.rows, BM):
        side, live, entry = listed_queries(lists, block, row, R, BM, BS, ASM)
        t = side.token + side.lane
        queries = load_rows(q + h * strides.q_h, t, strides.q_t, live, D, BD)
        upstream = load_rows(do + h * strides.do_h, t, strides.do_t, live, V, BV)
        acc = tl.zeros([BM, BD], tl.float32)
        branch = tl.zeros([BM], tl.float32)
        for s in range(0, BS, BN):
            keys = load_rows(k + s * strides.k_t, place, strides.k_t, place < BN, D, BD)
            values = load_rows(v + s * strides.v_t, place, strides.v_t, place < BN, V, BV)
            biases = block_tile(bias, entry, side, block_keys(block, s, place), 0, ASM)
            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (0.5 * scale) + biases
            dweight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
            weight, slope = silu_and_grad_of_half(score, FAST)
            branch += tl.sum(weight * dweight, 1)
            acc = tl.dot((dweight * slope).to(keys.dtype), keys, acc, input_precision=PRECISION)
        token = t.to(tl.int64) * H + h
        gate = tl.load(g_slc + token, mask=live, other=0.0).to(tl.float32)
        add_rows(dq + h * D, t, H * D, live, acc * (gate * scale * inv_n)[:, None], D, BD, False)
        total = tl.load(dg_slc + token, mask=live, other=0.0) + branch * inv_n
        tl.debug_barrier()
        tl.store(dg_slc + token, total, mask=live)


@triton.jit
def key_step(dk, dv, keys, values, queries, upstream, gate, scale, biases, FAST: tl.constexpr, PRECISION: tl.constexpr):
    """Add one tile of queries to dk and dv; tiles are transposed, keys first. `gate` is [1, BM] or [BN, BM].

    biases: half the biases, [BN, BM]. Also returns the scores' gradient [BN, BM] and weight * (do.v), whose sums are
    the gates' gradients.
    """
    score = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * (0.5 * scale) + biases
    dweight = tl.dot(values, tl.trans(upstream), input_precision=PRECISION)
    weight, slope = silu_and_grad_of_half(score, FAST)
    dv = tl.dot((weight * gate).to(upstream.dtype), upstream, dv, input_precision=PRECISION)
    dscore = dweight * slope * gate
    dk = tl.dot(dscore.to(queries.dtype), queries, dk, input_precision=PRECISION)
    return dk, dv, dscore, weight * dweight


@triton.jit(do_not_specialize=["B", "NB", "together", "gates_stride_h"])
def bsa_select_bwd_dkv_kernel(
    do, q, k, v, gates, gates_stride_h, gradients, dq, dg_slc, offsets, lists, bias, tables, strides, call, NB,
    together, B,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, DQ: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of BN keys and values, from the block's mean, its own queries, the window and its list.

    With DQ it also adds the list's part of dq and of the selection gate's gradient, by fp32 atomics. A block with one
    chunk is written directly; the chunks of longer lists write partial sums for bsa_merge_bwd_dkv_kernel.

    gates: by head. gradients: `KeyGradients`.
    """
    scale, inv_n, H, window = call.scale, call.inv_n, call.H, call.window
    block = find_listed_block(lists, offsets, 0, NB, together, H, B, BS, R)
    h, start, stop, chunk = block.h, block.start, block.stop, block.chunk
    length = (stop - start).to(tl.int32)
    if (block.m < 0) | (block.begin >= length):
        return
    offset = tl.program_id(1) * BN
    lane = tl.arange(0, BN)
    if tables.position is not None:
        lane = BN - 1 - lane  # descending, as `add_gathered` requires
    place = offset + lane
    s = block.begin + place
    known = s < length
    keys = load_rows(k + start * strides.k_t + h * strides.k_h, s, strides.k_t, known, D, BD)
    values = load_rows(v + start * strides.v_t + h * strides.v_h, s, strides.v_t, known, V, BV)
    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BV], tl.float32)
    origin = start.to(tl.int32)
    g_slc = gates.slc + h * gates_stride_h
    g_swa = gates.swa + h * gates_stride_h
    if not TMA:
        q += h * strides.q_h
        do += h * strides.do_h

    end = block.begin + BS
    if WINDOW:
        end = tl.maximum(end, block.begin + offset + BN - 1 + window)
    # Only the first chunk has queries of the block itself.
    first = (block.begin + offset) // BM * BM
    end = tl.where(chunk == 0, tl.minimum(end, length), first)
    # query_major.py explains the conditions. With DQ and no bias they differ, since overlapping products would need too
    # many registers.
    APART: tl.constexpr = DQ and bias.position is None and bias.time is None
    inside = first < end
    if APART:
        inside = chunk == 0
    if inside:
        for c in range(first, end, BM):
            t = c + tl.arange(0, BM)
            live = t < length
            side = Side(start + c, c, tl.arange(0, BM).to(tl.int64))
            biases, _ = pair_tile(bias, side, block_keys(block, offset, lane), 1, ASM)
            queries = load_tile(q, start + t, strides.q_t, live, origin + c, h * D, D, BD, TMA)
            upstream = load_tile(do, start + t, strides.do_t, live, origin + c, h * V, V, BV, TMA)
            slc = load_gates(g_slc, start + c, live, BM, ASM)
            seen = s[:, None] <= t[None, :]
            in_block = seen & (t[None, :] < block.begin + BS) if WINDOW or BM > BS else seen
            gate = tl.where(in_block, slc[None, :], 0.0)
            if WINDOW:
                swa = load_gates(g_swa, start + c, live, BM, ASM)
                gate += tl.where(seen & (t[None, :] - s[:, None] < window), swa[None, :], 0.0)
            acc_k, acc_v, _, _ = key_step(
                acc_k, acc_v, keys, values, queries, upstream, gate, scale, biases, FAST, PRECISION
            )

    listed = block.rows > 0
    if APART:
        listed = True
    if listed:
        key_side = block_keys(block, offset, lane)
        for row in range(0, block.rows, BM):
            side, live, entry = listed_queries(lists, block, row, R, BM, BS, ASM)
            t = side.token + side.lane
            biases = block_tile(bias, entry, side, key_side, 1, ASM)
            queries = load_tile(q, t, strides.q_t, live, origin + side.place, h * D, D, BD, TMA)
            upstream = load_tile(do, t, strides.do_t, live, origin + side.place, h * V, V, BV, TMA)
            if R >= BM:
                gate = load_gates(g_slc, side.token, live, BM, ASM)
            else:
                gate = tl.load(g_slc + t, mask=live, other=0.0)
            acc_k, acc_v, dscore, product = key_step(
                acc_k, acc_v, keys, values, queries, upstream, gate[None, :], scale, biases, FAST, PRECISION
            )
            if tables.position is not None or tables.time is not None:
                add_gathered(tables, dscore, bias, entry, side, key_side, ASM)
            if DQ:
                part = tl.dot(tl.trans(dscore.to(keys.dtype)), keys, input_precision=PRECISION)
                add_rows(dq + h * D, t, H * D, live, part * (scale * inv_n), D, BD, True)
                tl.atomic_add(dg_slc + t * H + h, tl.sum(product, 0) * inv_n, mask=live, sem="relaxed")

    acc_k *= scale * inv_n
    acc_v *= inv_n
    if chunk == 0:
        # The mean's gradient is divided equally among the block's tokens.
        size = tl.minimum(length - block.begin, BS)
        mean = block.slot.to(tl.int64) * H + h
        d, e = tl.arange(0, BD), tl.arange(0, BV)
        acc_k += (tl.load(gradients.dkbar + mean * D + d, mask=d < D, other=0.0) / size)[None, :]
        acc_v += (tl.load(gradients.dvbar + mean * V + e, mask=e < V, other=0.0) / size)[None, :]
    part = tl.load(lists.part_start + block.m)
    if tl.load(lists.part_start + block.m + 1) == part:
        store_rows(gradients.dk + (start * H + h) * D, s, H * D, known, acc_k, D, BD)
        store_rows(gradients.dv + (start * H + h) * V, s, H * V, known, acc_v, V, BV)
    else:
        parts = gradients.parts + (part + chunk).to(tl.int64) * (BS * (D + V)) + offset * (D + V)
        store_rows(parts, lane, D + V, lane < BN, acc_k, D, BD)
        store_rows(parts + D, lane, D + V, lane < BN, acc_v, V, BV)


@triton.jit(do_not_specialize=["B", "NB", "together"])
def bsa_merge_bwd_dkv_kernel(
    parts, part_start, offsets, dk, dv, NB, together, H, B,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of a long list's chunks, in their order, to dk and dv."""
    m = tl.program_id(0)
    part = tl.load(part_start + m)
    last = tl.load(part_start + m + 1)
    if part == last:
        return
    h, slot = head_and_slot(m, NB, H, together)
    _b, start, length, j = locate(offsets, slot, B, BS)
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


@triton.jit(do_not_specialize=["B", "gates_stride_h"])
def bsa_compress_bwd_dkv_kernel(
    do, q, kbar, vbar, offsets, gates, gates_stride_h, gradients, bias, strides, call, B,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, ATOMIC: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of BN mean keys and values from every later query, which programs of grid axis 2 share.

    gates: by head. gradients: `KeyGradients`.
    """
    scale, inv_n, H = call.scale, call.inv_n, call.H
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
    first = i * BN * BS + BS // 2
    side = Side(start + first, first, tl.where(known, (j - i * BN) * BS, 0).to(tl.int64))
    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BV], tl.float32)
    origin = start.to(tl.int32)
    g_cmp = gates.cmp + h * gates_stride_h
    if not TMA:
        q += h * strides.q_h
        do += h * strides.do_h
    # The last token of the tile's first block is the first query that sees this block.
    begin = (i * BN * BS + BS - 1) // BM * BM + tl.program_id(2) * BM
    step = BM * tl.num_programs(2)
    if begin < length:
        for c in range(begin, length, step):
            t = c + tl.arange(0, BM)
            live = t < length
            biases, _ = pair_tile(bias, Side(start + c, c, tl.arange(0, BM).to(tl.int64)), side, 1, ASM)
            queries = load_tile(q, start + t, strides.q_t, live, origin + c, h * D, D, BD, TMA)
            upstream = load_tile(do, start + t, strides.do_t, live, origin + c, h * V, V, BV, TMA)
            cmp = load_gates(g_cmp, start + c, live, BM, ASM)
            gate = tl.where((j * BS + (BS - 1))[:, None] <= t[None, :], cmp[None, :], 0.0)
            acc_k, acc_v, _, _ = key_step(
                acc_k, acc_v, keys, values, queries, upstream, gate, scale, biases, FAST, PRECISION
            )
        add_rows(gradients.dkbar + base * D, j, H * D, known, acc_k * (BS * scale * inv_n), D, BD, ATOMIC)
        add_rows(gradients.dvbar + base * V, j, H * V, known, acc_v * (BS * inv_n), V, BV, ATOMIC)
