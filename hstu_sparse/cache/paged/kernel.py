"""Attend with tiles of new tokens to the pages of their sequence.

Letters: Tq new tokens, B sequences, P columns of the page table, S sink tokens, H heads, D query/key and V value head
size, G heads of a head group, C its key channels, R positions of a tile.

A program owns BQ new tokens of one sequence for HEADS heads of one head group, in rows head * BQ + token, and a part of
the sequence's pages, which it walks over in tiles of R positions. Pages of keys and values as they are know no groups
(G = 1). Codes lie by head group: where new tokens are few a program takes all heads of a group, so that each code is
unpacked once.

Keys stay rotated: with Sylvester's matrix of C = G * D channels as the product of one of G and one of D,

    q[h] . k[h] = C^(-1/2) * sum over heads g of the group of sign(h, g) * (Hadamard(q[h]) . k'[g])

so that a new token's query is transformed once, and meets the codes of the whole group as they are. Its part with a
quantisation group is scaled after the product where rows are few (SCALED), and the codes before it where they are many.
"""

import triton
import triton.language as tl

from hstu_sparse.bias.scores import pair_bias
from hstu_sparse.cache.codec import halves_of, load_codes, sign
from hstu_sparse.tiles.rows import in_registers, load_rows, locate, silu


@triton.jit
def load_group(base, token, head, mask, b: tl.constexpr, stride_t, stride_h, first_head, SIZE: tl.constexpr,
               CHANNELS: tl.constexpr, BW: tl.constexpr, first=0):  # fmt: skip
    """Load block `first` + b of a head group's values, [rows, BW]; each row has its own head's channels, else zeros."""
    channel = (first + b) * BW + tl.arange(0, BW)
    member = channel // SIZE
    belongs = mask[:, None] & (first_head + member[None, :] == head[:, None]) & (channel < CHANNELS)[None, :]
    pointers = base + token[:, None] * stride_t + head[:, None].to(tl.int64) * stride_h + (channel % SIZE)[None, :]
    return tl.load(pointers, belongs, 0.0)


@triton.jit
def page_of(entries, inside, CANDIDATES: tl.constexpr):
    """Load entries of the page table; page 0, of any content, in place of -1, where new tokens were dropped."""
    page = tl.load(entries, inside, 0)
    if not CANDIDATES:
        page = tl.maximum(page, 0)
    return page.to(tl.int64)


@triton.jit
def rotated_queries(
    q_rows, member, rotation, DTYPE: tl.constexpr, PAD_D: tl.constexpr, CODED: tl.constexpr, BW: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return a tuple of blocks [rows, BW] of the queries, transformed as the codes of a head group are."""
    # In shared memory they would begin where the tiles of keys do. ptxas 12.8 then made a descriptor of keys in blocks
    # of 32 channels from an address in bytes, and the kernel read outside of its memory.
    q_rows = in_registers(q_rows, BW == 32 and q_rows.shape[0] >= 64)
    place = tl.arange(0, PAD_D)
    blocks = ()
    for b in tl.static_range(BLOCKS):
        channel = b * BW + tl.arange(0, BW)
        matrix = sign(place[:, None], (channel % CODED)[None, :]).to(DTYPE)
        x = tl.dot(q_rows, matrix, input_precision="ieee") * rotation
        blocks += ((x * sign(member[:, None], (channel // CODED)[None, :])).to(DTYPE),)
    return blocks


@triton.jit
def weigh(scores, seen, greatest, total, SOFTMAX: tl.constexpr, FAST: tl.constexpr):
    """Return (weights [rows, R] of scores, new greatest score, new total, factor of the earlier sums)."""
    factor = total * 0.0 + 1.0
    if SOFTMAX:
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(greatest, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        factor = tl.exp(greatest - safe)
        weights = tl.exp(scores - safe[:, None])
        total = total * factor + tl.sum(weights, 1)
        greatest = new
    else:
        weights = tl.where(seen, silu(scores, FAST), 0.0)
    return weights, greatest, total, factor


@triton.jit(do_not_specialize=["B", "P", "S", "Tq", "positions", "SPLITS"])
def paged_attention_fwd_kernel(
    q, q_stride_t, q_stride_h, k, k_stride_t, k_stride_h, v, v_stride_t, v_stride_h, q_offsets, pages, lengths,
    key_pages, key_ranges, value_pages, value_ranges, sink_k, sink_v, timestamps,
    position_table, time_table, cells, new_times, query_times, candidate_bias,
    out, lse, B, P, S, Tq, positions, SPLITS, score_scale, rotation, inverse_n,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAD_D: tl.constexpr, PAGE: tl.constexpr,
    BITS: tl.constexpr, OFFSET: tl.constexpr, CODED: tl.constexpr, K_BLOCK: tl.constexpr, K_BLOCKS: tl.constexpr,
    K_WORDS: tl.constexpr, K_GROUPS: tl.constexpr, V_BLOCK: tl.constexpr, V_BLOCKS: tl.constexpr, V_WORDS: tl.constexpr,
    V_GROUPS: tl.constexpr, OUT_V: tl.constexpr, SINKS: tl.constexpr, CANDIDATES: tl.constexpr, SOFTMAX: tl.constexpr,
    SCALED: tl.constexpr, HEADS: tl.constexpr, BQ: tl.constexpr,
    R: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Compute one part of one tile of new tokens; out and lse: [SPLITS, Tq, H, ...], or the final results if SPLITS is
    1.

    BITS: 0 for pages of uncompressed keys and values. OUT_V: blocks of values that a program sums. The part with number
    0 also attends to the sinks and to the tokens themselves. Candidates use `candidate_bias` (bias.py) instead of the
    tables.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    ROWS: tl.constexpr = HEADS * BQ
    CV: tl.constexpr = V * G
    LEVELS: tl.constexpr = (1 << BITS) - 1
    b, first_query, count, q_tile = locate(q_offsets, tl.program_id(0), B, BQ)
    if q_tile * BQ >= count:
        return
    group = tl.program_id(1) // (G // HEADS)
    first_member = tl.program_id(1) % (G // HEADS)
    split = tl.program_id(2)
    row = tl.arange(0, ROWS)
    index = q_tile * BQ + row % BQ
    real = index < count
    query = first_query + index
    member = first_member + row // BQ
    head = group * G + member
    length = tl.load(lengths + b).to(tl.int32)
    at = row * 0 + length if CANDIDATES else length + index
    # The end of the last row's positions; no row sees later ones.
    last = length if CANDIDATES else length + tl.minimum(count, q_tile * BQ + BQ) - 1
    query_time = 0
    if time_table is not None:
        query_time = tl.load(query_times + query, real, 0)[:, None]
    if candidate_bias is not None:
        candidate_bias += b.to(tl.int64) * (P * PAGE + 1)
    pages += b.to(tl.int64) * P
    if not CANDIDATES:
        last = tl.where(tl.load(pages) < 0, 0, last)  # padding of the batch: nothing was written
    # Blocks of values that this program sums: all, or those with its head's channels.
    first_v = first_member * V // V_BLOCK if OUT_V != V_BLOCKS else 0

    column = tl.arange(0, PAD_D)[None, :]
    inside_head = real[:, None] & (column < D)
    own_row = query[:, None] * q_stride_t + head[:, None].to(tl.int64) * q_stride_h
    q_rows = tl.load(q + own_row + column, inside_head, 0.0)

    # The tokens themselves.
    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    own_weight = tl.zeros([ROWS], tl.float32)
    if split == 0:
        own_row = query[:, None] * k_stride_t + head[:, None].to(tl.int64) * k_stride_h
        own_k = tl.load(k + own_row + column, inside_head, 0.0)
        own_score = tl.sum(q_rows.to(tl.float32) * own_k.to(tl.float32), 1) * score_scale
        if candidate_bias is not None:
            own_score += tl.load(candidate_bias + length)
        elif not CANDIDATES:
            new_time = 0
            if time_table is not None:
                new_time = tl.load(new_times + query, real, 0)[:, None]
            none = tl.zeros([ROWS, 1], tl.int32)
            bias, _ = pair_bias(none, real[:, None], query_time, new_time, position_table, time_table, cells, positions)
            own_score += tl.sum(bias, 1)
        if SOFTMAX:
            greatest = own_score
            total = tl.full([ROWS], 1.0, tl.float32)
            own_weight = total
        else:
            own_weight = silu(own_score, FAST)
    sums = ()
    constants = ()
    for i in tl.static_range(OUT_V):
        x = load_group(
            v, query, head, real & (split == 0), i, v_stride_t, v_stride_h, group * G, V, CV, V_BLOCK, first_v
        )
        sums += (x.to(tl.float32) * own_weight[:, None],)
        constants += (tl.zeros([ROWS, R], tl.float32),)

    if SINKS:
        # Only the first part attends to them.
        sinks = tl.where(split == 0, tl.minimum(S, last), 0)
        sink = tl.load(pages).to(tl.int64) * S
        for tile in tl.range((sinks + R - 1) // R, num_stages=1):
            position = tile * R + tl.arange(0, R)
            inside = position < sinks
            scores = tl.zeros([ROWS, R], tl.float32)
            for h in tl.static_range(HEADS):
                base = sink_k + (group * G + first_member + h) * D
                key = load_rows(base, sink + position, H * D, inside, D, PAD_D).to(DTYPE)
                product = tl.dot(q_rows, tl.trans(key), input_precision=PRECISION)
                scores = tl.where((row // BQ == h)[:, None], product, scores)
            page = page_of(pages + 1 + position // PAGE, inside, CANDIDATES)
            seen = inside[None, :] & (position[None, :] < at[:, None])
            scores = biased(
                scores * score_scale, inside, at, position, page * PAGE + position % PAGE, query_time, timestamps,
                position_table, time_table, cells, positions, candidate_bias,
            )  # fmt: skip
            weights, greatest, total, factor = weigh(scores, seen, greatest, total, SOFTMAX, FAST)
            low_weights = weights.to(DTYPE)
            new = ()
            for i in tl.static_range(OUT_V):
                channel = (first_v + i) * V_BLOCK + tl.arange(0, V_BLOCK)
                pointers = sink_v + (sink + position)[:, None] * (H * V) + (group * CV + channel)[None, :]
                value = tl.load(pointers, inside[:, None] & (channel < CV)[None, :], 0.0).to(DTYPE)
                before = sums[i] * factor[:, None] if SOFTMAX else sums[i]
                new += (tl.dot(low_weights, value, before, input_precision=PRECISION),)
            sums = new

    queries = (q_rows,)
    query_sums = ()
    if BITS:
        queries = rotated_queries(q_rows, member, rotation, DTYPE, PAD_D, CODED, K_BLOCK, K_BLOCKS)
        for i in tl.static_range(K_BLOCKS):
            query_sums += (tl.sum(queries[i].to(tl.float32), 1),)
    K_PER: tl.constexpr = K_BLOCKS // K_GROUPS
    V_PER: tl.constexpr = V_BLOCKS // V_GROUPS
    first_tile = S // R if SINKS else 0
    tiles = tl.maximum((last + R - 1) // R - first_tile, 0)
    per = (tiles + SPLITS - 1) // SPLITS
    first_tile += split * per
    for tile in range(first_tile, first_tile + tl.minimum(per, tiles - split * per)):
        position = tile * R + tl.arange(0, R)
        inside = position < last
        if SINKS:
            inside = inside & (position >= S)
        page = page_of(pages + (1 if SINKS else 0) + position // PAGE, inside, CANDIDATES)
        slot = position % PAGE
        page_group = page * (H // G) + group
        scores = tl.zeros([ROWS, R], tl.float32)
        for i in tl.static_range(K_BLOCKS):
            if BITS:
                at_range = (page_group * K_GROUPS + i // K_PER) * PAGE + slot
                scale, zero = halves_of(tl.load(key_ranges + at_range, inside, 0))
                at_codes = (page_group * K_BLOCKS + i) * PAGE + slot
                codes = load_codes(key_pages, at_codes, inside, BITS, DTYPE, OFFSET, R, K_BLOCK, K_WORDS)
                zero -= OFFSET * scale
                if SCALED:
                    part = tl.dot(queries[i], tl.trans(codes), input_precision=PRECISION)
                    scores += part * scale[None, :] + query_sums[i][:, None] * zero[None, :]
                else:
                    key = (zero[:, None] + scale[:, None] * codes.to(tl.float32)).to(DTYPE)
                    scores = tl.dot(queries[i], tl.trans(key), scores, input_precision=PRECISION)
            else:
                key = load_rows(key_pages, page_group * PAGE + slot, D, inside, D, K_BLOCK).to(DTYPE)
                scores = tl.dot(queries[i], tl.trans(key), scores, input_precision=PRECISION)
        seen = inside[None, :] & (position[None, :] < at[:, None])
        scores = biased(
            scores * score_scale, inside, at, position, page * PAGE + slot, query_time, timestamps, position_table,
            time_table, cells, positions, candidate_bias,
        )  # fmt: skip
        weights, greatest, total, factor = weigh(scores, seen, greatest, total, SOFTMAX, FAST)
        new = ()
        new_constants = ()
        for i in tl.static_range(OUT_V):
            before = sums[i] * factor[:, None] if SOFTMAX else sums[i]
            constant = constants[i]
            if BITS:
                block = tl.minimum(first_v + i, V_BLOCKS - 1)
                at_range = (page_group * V_GROUPS + block // V_PER) * PAGE + slot
                scale, zero = halves_of(tl.load(value_ranges + at_range, inside, 0))
                at_codes = (page_group * V_BLOCKS + block) * PAGE + slot
                codes = load_codes(value_pages, at_codes, inside, BITS, DTYPE, OFFSET, R, V_BLOCK, V_WORDS)
                if SCALED:
                    # Codes centred at 0, so that the rounding of the weights has the same effect as with values.
                    value = (codes - (OFFSET + LEVELS / 2)).to(DTYPE)
                    used = (weights * scale[None, :]).to(DTYPE)
                    if SOFTMAX:
                        constant = constant * factor[:, None]
                    constant += weights * (zero + LEVELS / 2 * scale)[None, :]
                else:
                    value = ((zero - OFFSET * scale)[:, None] + scale[:, None] * codes.to(tl.float32)).to(DTYPE)
                    used = weights.to(DTYPE)
            else:
                value = load_rows(value_pages, page_group * PAGE + slot, V, inside, V, V_BLOCK).to(DTYPE)
                used = weights.to(DTYPE)
            new += (tl.dot(used, value, before, input_precision=PRECISION),)
            new_constants += (constant,)
        sums = new
        constants = new_constants

    to = split * Tq.to(tl.int64) + query
    divisor = tl.where(total == 0.0, 1.0, total)
    if LSE:
        tl.store(lse + to * H + head, tl.where(total == 0.0, float("-inf"), greatest + tl.log(divisor)), real)
    for i in tl.static_range(OUT_V):
        channel = (first_v + i) * V_BLOCK + tl.arange(0, V_BLOCK)
        x = sums[i]
        if SCALED:
            x += tl.sum(constants[i], 1)[:, None]
        x = x / divisor[:, None] if SOFTMAX else x * inverse_n
        own_channel = (channel // V)[None, :] == member[:, None]
        pointers = out + (to * H + head)[:, None] * V + (channel % V)[None, :]
        tl.store(pointers, x.to(out.dtype.element_ty), real[:, None] & own_channel)


@triton.jit
def biased(
    scores, inside, at, position, at_time, query_time, timestamps, position_table, time_table, cells, positions,
    candidate_bias,
):  # fmt: skip
    """Return scores [rows, R] plus the bias of position and time."""
    if candidate_bias is not None:
        scores += tl.load(candidate_bias + position, inside, 0.0)[None, :]
    elif position_table is not None or time_table is not None:
        distance = at[:, None] - position[None, :]
        times = 0
        if time_table is not None:
            times = tl.load(timestamps + at_time, inside, 0)[None, :]
        seen = inside[None, :] & (distance > 0)
        scores += pair_bias(distance, seen, query_time, times, position_table, time_table, cells, positions)[0]
    return scores
