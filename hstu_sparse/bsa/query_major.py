"""Define query-major kernels: a program has a tile of queries and iterates over the keys that it sees.

They compute the compression branch, the group's own block and the window; with SELECT, if the tile is within a group
(BM <= R), also the chosen past blocks. Then one program has the whole output, and nothing is added up in memory.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key and V value head size, BS block
size, S blocks chosen per group, R tokens per group, BM queries and BN keys of a tile.

cmp, slc and swa are the branches' names in the paper (arXiv 2502.11089): compression, selection, sliding window.

SiLU has no normaliser, so a branch is its gate times a plain sum, and the branches add up in one accumulator. Scores
are computed halved, from halved tables: SiLU(2x) = x tanh(x) + x. docs/bsa_kernel.md explains the forward kernel.

Two details help the compiler (Triton 3.6, ptxas 12.8). Each loop that adds to an accumulator is inside an `if`, and no
`if` is around the accumulation itself: if ptxas sees a path on which other instructions may have set the accumulator,
it waits for each instruction of the tensor cores (its warning C7515). And each step loads the index of one chosen block
instead of a vector: in a pipelined loop, Triton 3.6 assumes that every element of a vector `index * BS + place % BS` is
divisible by BS, and uses the mask of a thread's first query for all its queries.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.bias.gradients import add_pair_times
from hstu_sparse.bsa.bias import (
    Side,
    add_block_times,
    add_mean_positions,
    add_position_tile,
    block_tile,
    close_times,
    means_gradients,
    open_gradients,
    pair_tile,
)
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


class QueryTile(NamedTuple):
    """A program's queries.

    b, start    their sequence and its first token
    begin, end  the range of their positions begin .. end - 1, empty if end <= begin
    t, live     [BM] positions, and the mask of valid ones
    token       [BM] their indices in [T, H]
    block_row   the slot of the sequence's first block
    side        the queries as the side of a tile
    """

    b: tl.tensor
    start: tl.tensor
    begin: tl.tensor
    end: tl.tensor
    t: tl.tensor
    live: tl.tensor
    token: tl.tensor
    block_row: tl.tensor
    side: Side


@triton.jit
def find_queries(offsets, tiles, h, slot, B, H, BM: tl.constexpr, BS: tl.constexpr):
    """Return the `QueryTile` of one of `tiles` slots; none of its queries is live if the slot is unused."""
    # Late tiles see the most blocks, so they start first.
    b, start, length, i = locate(offsets, tiles - 1 - slot, B, BM)
    begin = i * BM
    t = begin + tl.arange(0, BM)
    side = Side(start + begin, begin, tl.arange(0, BM).to(tl.int64))
    end = tl.minimum(begin + BM, length)
    return QueryTile(
        b, start, begin, end, t, t < length, (start + t) * H + h, (start // BS + b).to(tl.int32), side
    )  # fmt: skip


@triton.jit
def consecutive(tile, first, BN: tl.constexpr):
    """Return the BN keys from position `first` on as the side of a tile."""
    return Side(tile.start + first, first, tl.arange(0, BN).to(tl.int64))


@triton.jit
def means(tile, j, c, known, BS: tl.constexpr):
    """Return the mean keys of blocks j = c, c + 1, ... as the side of a tile: at the blocks' middle tokens.

    Masked blocks get the index of the first one, where memory can be read.
    """
    first = c * BS + BS // 2
    return Side(tile.start + first, first, tl.where(known, (j - c) * BS, 0).to(tl.int64))


@triton.jit
def chosen_block(chosen, place, e, BN: tl.constexpr, BS: tl.constexpr, ASM: tl.constexpr):
    """Return (position of the first key, entry) of the chosen keys e .. e + BN - 1, which lie in one block.

    place: the index of the queries' first choice in `chosen`. The choice is not read by tl.load, which Triton would
    route through shared memory: everything that depends on it would be delayed by the time of one load.
    """
    at = tl.cast(e // BS, tl.int64)
    first = tl.multiple_of(look_up(chosen.indices + place, at, ASM) * BS + e % BS, BN)
    if chosen.entries is not None:
        return first, scalar(chosen.entries + place + at, ASM).to(tl.int32)
    else:
        return first, 0


@triton.jit
def band_weight(slc, swa, t, s, window, BS: tl.constexpr, WINDOW: tl.constexpr):
    """Return the gates [BM, BN] of keys s <= t: selection's in the query's block, plus the window's in the window."""
    seen = s[None, :] <= t[:, None]
    weight = tl.where(seen & (s[None, :] // BS == t[:, None] // BS), slc[:, None], 0.0)
    if WINDOW:
        weight += tl.where(seen & (t[:, None] - s[None, :] < window), swa[:, None], 0.0)
    return weight


@triton.jit
def band_begin(tile, window, BN: tl.constexpr, BS: tl.constexpr, WINDOW: tl.constexpr):
    """Return the begin of the first query's block or window, whichever is earlier; a multiple of BN or BS."""
    first = tile.begin // BS * BS
    if WINDOW:
        first = tl.minimum(first, tl.maximum(tile.begin - window + 1, 0)) // BN * BN
    return first


@triton.jit(do_not_specialize=["B", "tiles", "together"])
def bsa_query_fwd_kernel(
    q, k, v, kbar, vbar, offsets, chosen, gates, bias, out, strides, call, B, tiles, together,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SELECT: tl.constexpr, WINDOW: tl.constexpr, TMA: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Compute the output of BM queries of one head. TMA: k, v, kbar and vbar are tensor descriptors."""
    scale, inv_n, H, S, window = call.scale, call.inv_n, call.H, call.S, call.window
    h, slot = head_and_slot(tl.program_id(0), tiles, H, together)
    tile = find_queries(offsets, tiles, h, slot, B, H, BM, BS)
    start, end, t, live = tile.start, tile.end, tile.t, tile.live
    if end <= tile.begin:
        return
    queries = load_rows(q + start * strides.q_t + h * strides.q_h, t, strides.q_t, live, D, BD)
    origin = start.to(tl.int32)
    if not TMA:
        k += start * strides.k_t + h * strides.k_h
        v += start * strides.v_t + h * strides.v_h
        kbar += ((start // BS + tile.b) * H + h) * D
        vbar += ((start // BS + tile.b) * H + h) * V
    slc = tl.load(gates.slc + tile.token, mask=live, other=0.0).to(tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    half = 0.5 * scale

    if SELECT:  # the chosen past blocks; the own block is the last entry
        tl.static_assert(BN <= BS)
        place = ((start // R + tile.b + tile.begin // R) * H + h) * S
        count = tl.minimum(tile.begin // BS, S - 1) * BS
        if count > 0:
            for e in range(0, count, BN):
                first, entry = chosen_block(chosen, place, e, BN, BS, ASM)
                s = first + tl.arange(0, BN)
                keys = load_tile(k, s, strides.k_t, s < end, origin + first, h * D, D, BD, TMA)
                biases = block_tile(bias, entry, tile.side, consecutive(tile, first, BN), 0, ASM)
                score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * half + biases
                weight = silu_of_half(score, FAST)
                values = load_tile(v, s, strides.v_t, s < end, origin + first, h * V, V, BV, TMA)
                acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)
        acc *= slc[:, None]

    swa = slc
    if WINDOW:
        swa = tl.load(gates.swa + tile.token, mask=live, other=0.0).to(tl.float32)
    nearest = band_begin(tile, window, BN, BS, WINDOW)
    if nearest < end:  # the query's own block and the window
        for c in range(nearest, end, BN):
            s = c + tl.arange(0, BN)
            keys = load_tile(k, s, strides.k_t, s < end, origin + c, h * D, D, BD, TMA)
            biases, _ = pair_tile(bias, tile.side, consecutive(tile, c, BN), 0, ASM)
            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * half + biases
            weight = silu_of_half(score, FAST) * band_weight(slc, swa, t, s, window, BS, WINDOW)
            values = load_tile(v, s, strides.v_t, s < end, origin + c, h * V, V, BV, TMA)
            acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)

    complete = (t + 1) // BS
    if end >= BS:  # the means of the complete blocks
        cmp = tl.load(gates.cmp + tile.token, mask=live, other=0.0).to(tl.float32) * BS
        for c in range(0, end // BS, BN):
            j = c + tl.arange(0, BN)
            known = j < end // BS
            keys = load_tile(kbar, j, H * D, known, tile.block_row + c, h * D, D, BD, TMA)
            biases, _ = pair_tile(bias, tile.side, means(tile, j, c, known, BS), 0, ASM)
            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * half + biases
            weight = tl.where(j[None, :] < complete[:, None], silu_of_half(score, FAST), 0.0) * cmp[:, None]
            values = load_tile(vbar, j, H * V, known, tile.block_row + c, h * V, V, BV, TMA)
            acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)

    store_rows(out + (start * H + h) * V, t, H * V, live, acc * inv_n, V, BV)


@triton.jit(do_not_specialize=["B", "tiles", "together", "time_shift"])
def bsa_query_bwd_dq_kernel(
    do, q, k, v, kbar, vbar, offsets, chosen, gates, dq, dgates, bias, tables, time_shift, strides, call, B, tiles,
    together,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SELECT: tl.constexpr, WINDOW: tl.constexpr, SUMS: tl.constexpr,
    TMA: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of q and of the gates: for a gate, the sum of its branch's weight * (do.v).

    SUMS, time_shift: see `open_gradients`.
    """
    scale, inv_n, H, S, window = call.scale, call.inv_n, call.H, call.S, call.window
    h, slot = head_and_slot(tl.program_id(0), tiles, H, together)
    tile = find_queries(offsets, tiles, h, slot, B, H, BM, BS)
    start, end, t, live = tile.start, tile.end, tile.t, tile.live
    if end <= tile.begin:
        return
    queries = load_rows(q + start * strides.q_t + h * strides.q_h, t, strides.q_t, live, D, BD)
    upstream = load_rows(do + start * strides.do_t + h * strides.do_h, t, strides.do_t, live, V, BV)
    origin = start.to(tl.int32)
    if not TMA:
        k += start * strides.k_t + h * strides.k_h
        v += start * strides.v_t + h * strides.v_h
        kbar += ((start // BS + tile.b) * H + h) * D
        vbar += ((start // BS + tile.b) * H + h) * V
    slc = tl.load(gates.slc + tile.token, mask=live, other=0.0).to(tl.float32)
    gradients, histogram = open_gradients(tables, time_shift, SUMS)
    acc = tl.zeros([BM, BD], tl.float32)
    slc_branch = tl.zeros([BM], tl.float32)
    swa_branch = tl.zeros([BM], tl.float32)
    cmp_branch = tl.zeros([BM], tl.float32)
    half = 0.5 * scale

    if SELECT:  # the chosen past blocks
        tl.static_assert(BN <= BS)
        place = ((start // R + tile.b + tile.begin // R) * H + h) * S
        count = tl.minimum(tile.begin // BS, S - 1) * BS
        if count > 0:
            for e in range(0, count, BN):
                first, entry = chosen_block(chosen, place, e, BN, BS, ASM)
                s = first + tl.arange(0, BN)
                side = consecutive(tile, first, BN)
                keys = load_tile(k, s, strides.k_t, s < end, origin + first, h * D, D, BD, TMA)
                values = load_tile(v, s, strides.v_t, s < end, origin + first, h * V, V, BV, TMA)
                biases = block_tile(bias, entry, tile.side, side, 0, ASM)
                score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * half + biases
                dweight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
                weight, slope = silu_and_grad_of_half(score, FAST)
                slc_branch += tl.sum(weight * dweight, 1)
                dscore = dweight * slope * slc[:, None]
                acc = tl.dot(dscore.to(keys.dtype), keys, acc, input_precision=PRECISION)
                if tables.position is not None:
                    add_position_tile(gradients, dscore, tile.side, side, end, SUMS)
                if tables.time is not None:
                    add_block_times(gradients, dscore, bias, entry, tile.side, side, SUMS, ASM)

    swa = slc
    if WINDOW:
        swa = tl.load(gates.swa + tile.token, mask=live, other=0.0).to(tl.float32)
    nearest = band_begin(tile, window, BN, BS, WINDOW)
    if nearest < end:  # the own block and the window
        for c in range(nearest, end, BN):
            s = c + tl.arange(0, BN)
            side = consecutive(tile, c, BN)
            keys = load_tile(k, s, strides.k_t, s < end, origin + c, h * D, D, BD, TMA)
            values = load_tile(v, s, strides.v_t, s < end, origin + c, h * V, V, BV, TMA)
            biases, buckets = pair_tile(bias, tile.side, side, 0, ASM)
            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * half + biases
            dweight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
            weight, slope = silu_and_grad_of_half(score, FAST)
            dweight = tl.where(s[None, :] <= t[:, None], dweight, 0.0)
            slc_branch += tl.sum(tl.where(s[None, :] // BS == t[:, None] // BS, weight * dweight, 0.0), 1)
            if WINDOW:
                swa_branch += tl.sum(tl.where(t[:, None] - s[None, :] < window, weight * dweight, 0.0), 1)
            dscore = dweight * slope * band_weight(slc, swa, t, s, window, BS, WINDOW)
            acc = tl.dot(dscore.to(keys.dtype), keys, acc, input_precision=PRECISION)
            if tables.position is not None:
                add_position_tile(gradients, dscore, tile.side, side, end, SUMS)
            if tables.time is not None:
                add_pair_times(gradients, dscore, buckets, SUMS, SUMS)
    close_times(gradients, histogram, tables, SUMS)

    complete = (t + 1) // BS
    if end >= BS:  # the means of the complete blocks
        gradients = means_gradients(gradients, histogram, tables, SUMS)
        cmp = tl.load(gates.cmp + tile.token, mask=live, other=0.0).to(tl.float32) * BS
        for c in range(0, end // BS, BN):
            j = c + tl.arange(0, BN)
            known = j < end // BS
            side = means(tile, j, c, known, BS)
            keys = load_tile(kbar, j, H * D, known, tile.block_row + c, h * D, D, BD, TMA)
            values = load_tile(vbar, j, H * V, known, tile.block_row + c, h * V, V, BV, TMA)
            biases, buckets = pair_tile(bias, tile.side, side, 0, ASM)
            score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * half + biases
            dweight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
            weight, slope = silu_and_grad_of_half(score, FAST)
            dweight = tl.where(j[None, :] < complete[:, None], dweight, 0.0)
            cmp_branch += tl.sum(weight * dweight, 1)
            dscore = dweight * slope * cmp[:, None]
            acc = tl.dot(dscore.to(keys.dtype), keys, acc, input_precision=PRECISION)
            if tables.position is not None:
                add_mean_positions(gradients, tables, dscore, tile.side, side)
            if tables.time is not None:
                add_pair_times(gradients, dscore, buckets, SUMS, SUMS)
        close_times(gradients, histogram, tables, SUMS)
    tl.store(dgates.cmp + tile.token, cmp_branch * (BS * inv_n), mask=live)
    tl.store(dgates.slc + tile.token, slc_branch * inv_n, mask=live)
    if WINDOW:
        tl.store(dgates.swa + tile.token, swa_branch * inv_n, mask=live)
    store_rows(dq + (start * H + h) * D, t, H * D, live, acc * (scale * inv_n), D, BD)
