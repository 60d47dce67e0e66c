"""Define the fused attention kernel: queries against the packed history, or against plain keys and values.

Letters: T cached tokens, Tq queries, B sequences, S sink tokens, H heads, D query/key and V value head size, G heads of
a head group, C its key channels, N max_seq_len, R tokens of a tile, BQ queries of a tile.

A program has BQ queries of HEADS heads of one head group (all of them, or one), in columns head * BQ + query, and a
part of their sequence's history. It iterates over tiles of R tokens with scores [R, columns], so that the unpacked data
are the left operand of every product, which tensor cores read from registers, where unpacking leaves them.
Either the queries are rotated, once (KEYS_BACK is off): a query is in its head's slot of the C channels, the keys'
codes are used without restoring, and scale and zero are applied to each quantisation group's part of the score. Or the
keys are restored, tile by tile, which RoPE requires, and which is less work with many queries.

RoPE rotates position 64 a + r by the angle of 64 a and by that of r: two small tables instead of one row per position.
"""

import triton
import triton.language as tl

from hstu_sparse.bias.scores import time_bias
from hstu_sparse.cache.codec import butterfly, sign
from hstu_sparse.cache.rotatekv.decode import load_keys, load_values, restored_blocks
from hstu_sparse.tiles.rows import locate, opaque, silu

# Signs of the matrices of a channel order, of all channels, that may be in shared memory throughout the loop, where the
# compiler puts loop invariants: 64 KB. For 1,024 channels it is 512 KB.
MOST_SIGNS = tl.constexpr(32768)


@triton.jit
def turn(start, step, channel, near, far, HALF: tl.constexpr, TILE: tl.constexpr = 64):
    """Return (cos, sin) of the angle of positions start + step, which lie in one tile, at channels.

    near, far: [.., 2, HALF], cos and sin of the angles of 0, 1, .. and of 0, TILE, 2 TILE, ..; start is a number.
    """
    n = near + (start % TILE + step) * (2 * HALF) + channel
    f = far + (start // TILE) * (2 * HALF) + channel
    a, b, c, d = tl.load(n), tl.load(n + HALF), tl.load(f), tl.load(f + HALF)
    return a * c - b * d, a * d + b * c


@triton.jit
def load_queries(q, query, head, real, channel, first, stride_t, stride_h, D: tl.constexpr):
    """Load [channels, columns] of queries: channel (of the group, from head `first` on) where it belongs to the
    column.
    """
    belongs = channel[:, None] // D == (head - first)[None, :]
    pointers = q + query[None, :] * stride_t + head[None, :].to(tl.int64) * stride_h + (channel % D)[:, None]
    return tl.load(pointers, belongs & real[None, :], 0.0)


@triton.jit
def rotated_queries(
    q, query, head, real, group, order, scale, stride_t, stride_h, G: tl.constexpr, D: tl.constexpr,
    BW: tl.constexpr, BLOCKS: tl.constexpr, HAS_ORDER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tuple of blocks [BW, columns] of the rotated queries, rounded to q's dtype."""
    place = tl.arange(0, BW)
    matrix = sign(place[:, None], place[None, :]).to(q.dtype.element_ty)
    blocks = ()
    for b in tl.static_range(BLOCKS):
        channel = b * BW + place
        if HAS_ORDER:
            channel = tl.load(order + channel).to(tl.int32)
        x = load_queries(q, query, head, real, channel, group * G, stride_t, stride_h, D)
        # With few columns this is no warp-group product (ptxas is known to fail at two of those that alternate in one
        # buffer: `ahead`).
        blocks += (tl.dot(tl.trans(x), matrix, input_precision=PRECISION),)
    blocks = butterfly(blocks, BLOCKS, 1)
    rotated = ()
    for b in tl.static_range(BLOCKS):
        rotated += (tl.trans((blocks[b] * scale).to(q.dtype.element_ty)),)
    return rotated


@triton.jit
def plain_queries(
    q, query, head, real, group, first, length, near, far, stride_t, stride_h, G: tl.constexpr, D: tl.constexpr,
    OW: tl.constexpr, PAD: tl.constexpr, OUT: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Return a tuple of OUT blocks [PAD, columns] of queries, or rotated to position `length`; OW channels each.

    first: the group's channel that the first block begins at.
    """
    place = tl.arange(0, PAD)
    HALF: tl.constexpr = D // 2
    blocks = ()
    for o in tl.static_range(OUT):
        begin = first + o * OW
        channel = tl.where(place < OW, begin + place, G * D)
        x = load_queries(q, query, head, real, channel, group * G, stride_t, stride_h, D)
        if ROPE:
            local = begin % D
            lower = local < HALF
            partner = tl.where(place < OW, tl.where(lower, channel + HALF, channel - HALF), G * D)
            other = load_queries(q, query, head, real, partner, group * G, stride_t, stride_h, D)
            angle = tl.where(place < OW, local % HALF + place, 0)
            cos, sin = turn(length, 0, angle, near, far, HALF)
            sin = tl.where(lower, -sin, sin)
            x = x.to(tl.float32) * cos[:, None] + other.to(tl.float32) * sin[:, None]
        blocks += (x.to(q.dtype.element_ty),)
    return blocks


@triton.jit
def turned_keys(
    x, start, near, far, D: tl.constexpr, OW: tl.constexpr, PAD: tl.constexpr, OUT: tl.constexpr, R: tl.constexpr
):
    """Return a tuple of key blocks [R, PAD] fp32, of whole heads, rotated to the positions from `start` on."""
    HALF: tl.constexpr = D // 2
    place = tl.arange(0, PAD)
    STEP: tl.constexpr = HALF // OW
    turned = ()
    for o in tl.static_range(OUT):
        angle = tl.where(place < OW, o * OW % HALF + place, 0)
        cos, sin = turn(start, tl.arange(0, R)[:, None], angle[None, :], near, far, HALF)
        if o // STEP % 2 == 0:
            turned += (x[o] * cos - x[o + STEP] * sin,)
        else:
            turned += (x[o] * cos + x[o - STEP] * sin,)
    return turned


@triton.jit
def biased(
    scores, inside, position, token, length, tables, query_times, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr
):
    """Return scores [R, columns] of tokens at `position` [R] with the bias of position and time."""
    position_table, time_table, cells, timestamps = tables
    if HAS_POSITION:
        scores += tl.load(position_table + length - position, inside, 0.0).to(tl.float32)[:, None]
    if HAS_TIME:
        key_times = tl.load(timestamps + token, inside, 0)
        scores += time_bias(time_table, cells, query_times[None, :], key_times[:, None])[0]
    return scores


@triton.jit
def take(
    scores, values_state, inside, position, token, length, score_scale, tables, query_times,
    SOFTMAX: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Return weights [R, columns] of scores, and for softmax the new state and the factor for earlier sums."""
    greatest, total = values_state
    scores = biased(scores * score_scale, inside, position, token, length, tables, query_times, HAS_POSITION, HAS_TIME)
    factor = 1.0
    if SOFTMAX:
        scores = tl.where(inside[:, None], scores, float("-inf"))
        new = tl.maximum(greatest, tl.max(scores, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        factor = tl.exp(greatest - safe)
        weights = tl.exp(scores - safe[None, :])
        total = total * factor + tl.sum(weights, 0)
        greatest = new
    else:
        weights = tl.where(inside[:, None], silu(scores, FAST), 0.0)
    return weights, (greatest, total), factor


@triton.jit(do_not_specialize=["B", "P", "S", "Tq", "SPLITS"])
def rotatekv_attention_fwd_kernel(
    q, q_stride_t, q_stride_h, q_offsets, seq_offsets, pages, order, inverse_order,
    k_codes, k_ranges, k_bitmap, v_codes, v_ranges,
    plain_k, pk_stride_t, pk_stride_h, plain_v, pv_stride_t, pv_stride_h,
    position_table, time_table, cells, timestamps, query_timestamps, near, far,
    out, lse, B, P, S, Tq, SPLITS, score_scale, scale, inverse_n,
    HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr,
    K_BLOCK: tl.constexpr, K_BLOCKS: tl.constexpr, K_WORDS: tl.constexpr, K_GROUPS: tl.constexpr, KEPT: tl.constexpr,
    KEPT_WORDS: tl.constexpr, V_BLOCK: tl.constexpr, V_BLOCKS: tl.constexpr, V_WORDS: tl.constexpr,
    V_GROUPS: tl.constexpr, SPARSE: tl.constexpr, HAS_ORDER: tl.constexpr, R: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, PLAIN: tl.constexpr, SINKS: tl.constexpr, SOFTMAX: tl.constexpr, ROPE: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, KEYS_BACK: tl.constexpr, SCALED_WEIGHTS: tl.constexpr,
    HEADS: tl.constexpr, BQ: tl.constexpr, OW: tl.constexpr, PAD: tl.constexpr, P_PAD: tl.constexpr,
    OUT_V: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Compute one part of one tile of queries; out and lse: [SPLITS, Tq, H, ...], or the final results if SPLITS is 1.

    PLAIN: tokens from plain_k and plain_v: with SINKS the first S of a sequence, S in each of the rows that column 0 of
    `pages` [B, P] names, else all, [T, H, ...]. PACKED: tokens from the pages.
    """
    C: tl.constexpr = D * G
    CV: tl.constexpr = V * G
    COLUMNS: tl.constexpr = HEADS * BQ
    LEVELS: tl.constexpr = (1 << BITS) - 1
    DTYPE: tl.constexpr = q.dtype.element_ty
    b, first_query, num_queries, q_tile = locate(q_offsets, tl.program_id(0), B, BQ)
    if q_tile * BQ >= num_queries:
        return
    group = tl.program_id(1) // (G // HEADS)
    own_head = tl.program_id(1) % (G // HEADS)
    split = tl.program_id(2)
    if HAS_ORDER:
        order += group * C
        inverse_order += group * C
    column = tl.arange(0, COLUMNS)
    index = q_tile * BQ + column % BQ
    real = index < num_queries
    query = first_query + index
    head = group * G + own_head + column // BQ
    begin = tl.load(seq_offsets + b).to(tl.int64)
    length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
    query_times = tl.zeros([COLUMNS], tl.int64)
    if HAS_TIME:
        query_times = tl.load(query_timestamps + query, real, 0)
    tables = (position_table, time_table, cells, timestamps)
    if PACKED:
        pages += b.to(tl.int64) * P

    first_channel = own_head * D
    OUT: tl.constexpr = HEADS * D // OW
    SPAN: tl.constexpr = (K_BLOCK if K_BLOCK < HEADS * D else HEADS * D) // OW
    # Blocks of values that this program sums: all, or its head's.
    first_v = own_head * (V // V_BLOCK if OUT_V != V_BLOCKS else 0)
    V_PER: tl.constexpr = V_BLOCKS // V_GROUPS
    sums = ()
    constants = ()
    for _ in tl.static_range(OUT_V):
        sums += (tl.zeros([V_BLOCK, COLUMNS], tl.float32),)
        constants += (tl.zeros([R, COLUMNS], tl.float32),)
    state = (tl.full([COLUMNS], float("-inf"), tl.float32), tl.zeros([COLUMNS], tl.float32))

    if PLAIN:
        HALVES: tl.constexpr = 2 if ROPE else 1
        WIDTH: tl.constexpr = D // HALVES
        plain = tl.minimum(S, length) if SINKS else length
        tiles = (plain + R - 1) // R
        per = (tiles + SPLITS - 1) // SPLITS
        place = tl.arange(0, P_PAD)
        q_plain = plain_queries(
            q, query, head, real, group, first_channel, length, near, far, q_stride_t, q_stride_h, G, D, WIDTH,
            P_PAD, HEADS * HALVES, ROPE,
        )  # fmt: skip
        row_begin = tl.load(pages).to(tl.int64) * S if SINKS else begin
        # Sinks are few: prefetched copies would take more shared memory than they save time.
        for tile in tl.range(split * per, tl.minimum(tiles, split * per + per), num_stages=1 if SINKS else None):
            position = tile * R + tl.arange(0, R)
            inside = position < plain
            scores = tl.zeros([R, COLUMNS], tl.float32)
            for h in tl.static_range(HEADS):
                base = plain_k + (group * G + own_head + h).to(tl.int64) * pk_stride_h
                pointers = base + (row_begin + position)[:, None] * pk_stride_t + place[None, :]
                whole = inside[:, None] & (place < WIDTH)[None, :]
                key = (tl.load(pointers, whole, 0.0),)
                if ROPE:
                    key += (tl.load(pointers + WIDTH, whole, 0.0),)
                    key = turned_keys(
                        (key[0].to(tl.float32), key[1].to(tl.float32)), tile * R, near, far, D, WIDTH, P_PAD, 2, R
                    )
                for half in tl.static_range(HALVES):
                    scores += tl.dot(key[half].to(DTYPE), q_plain[h * HALVES + half], input_precision=PRECISION)
            weights, state, factor = take(
                scores, state, inside, position, begin + position, length, score_scale, tables, query_times, SOFTMAX,
                HAS_POSITION, HAS_TIME, FAST,
            )  # fmt: skip
            low_weights = weights.to(DTYPE)
            new = ()
            for i in tl.static_range(OUT_V):
                channel = (first_v + i) * V_BLOCK + tl.arange(0, V_BLOCK)
                pointers = plain_v + (row_begin + position)[:, None] * pv_stride_t
                pointers += ((group * G + channel // V).to(tl.int64) * pv_stride_h + channel % V)[None, :]
                value = tl.load(pointers, inside[:, None] & (channel < CV)[None, :], 0.0).to(DTYPE)
                before = sums[i]
                if SOFTMAX:
                    before = before * factor[None, :]
                new += (tl.dot(tl.trans(value), low_weights, before, input_precision=PRECISION),)
            sums = new

    if PACKED:
        if KEYS_BACK:
            q_packed = plain_queries(
                q, query, head, real, group, first_channel, length, near, far, q_stride_t, q_stride_h, G, D, OW, PAD,
                OUT, ROPE,
            )  # fmt: skip
        else:
            q_packed = rotated_queries(
                q, query, head, real, group, order, scale, q_stride_t, q_stride_h, G, D, K_BLOCK, K_BLOCKS,
                HAS_ORDER, PRECISION,
            )  # fmt: skip
            q_sums = ()
            for i in tl.static_range(K_BLOCKS):
                q_sums += (tl.sum(q_packed[i].to(tl.float32), 0),)
        K_PER: tl.constexpr = K_BLOCKS // K_GROUPS
        WORDS: tl.constexpr = KEPT_WORDS if SPARSE else K_WORDS
        first_tile = S // R
        tiles = tl.maximum((length + R - 1) // R - first_tile, 0)
        per = (tiles + SPLITS - 1) // SPLITS
        first_tile += split * per
        for tile in range(first_tile, first_tile + tl.minimum(per, tiles - split * per)):
            position = tile * R + tl.arange(0, R)
            inside = (position >= S) & (position < length)
            slot = position % PAGE
            page = tl.load(pages + (1 if SINKS else 0) + position // PAGE, inside, 0).to(tl.int64)
            row = page * HG + group
            codes, key_mask, scales, zeros = load_keys(
                k_codes, k_ranges, k_bitmap, row, slot, inside, DTYPE, OFFSET, PAGE, BITS, C, K_BLOCK,
                K_BLOCKS, K_GROUPS, WORDS, KEPT, SPARSE, R,
            )  # fmt: skip
            scores = tl.zeros([R, COLUMNS], tl.float32)
            if KEYS_BACK:
                first = first_channel
                if HAS_ORDER and K_BLOCKS * OUT * K_BLOCK * PAD > MOST_SIGNS:
                    first += opaque(tile) - tile  # 0, unknown to the compiler
                keys = restored_blocks(
                    codes, key_mask, scales, zeros, scale, first, inverse_order, DTYPE, OFFSET, K_BLOCK, K_BLOCKS,
                    K_PER, OW, PAD, OUT, SPAN, SPARSE, HAS_ORDER, R,
                )  # fmt: skip
                if ROPE:
                    keys = turned_keys(keys, tile * R, near, far, D, OW, PAD, OUT, R)
                for o in tl.static_range(OUT):
                    scores += tl.dot(keys[o].to(DTYPE), q_packed[o], input_precision=PRECISION)
            else:
                for i in tl.static_range(K_BLOCKS):
                    k_scale, k_zero = scales[i // K_PER], zeros[i // K_PER]
                    part = tl.dot(codes[i], q_packed[i], input_precision=PRECISION)
                    scores += k_scale[:, None] * part
                    if SPARSE:
                        scores += k_zero[:, None] * tl.dot(key_mask[i], q_packed[i], input_precision=PRECISION)
                    else:
                        scores += (k_zero - OFFSET * k_scale)[:, None] * q_sums[i][None, :]
            weights, state, factor = take(
                scores, state, inside, position, begin + position, length, score_scale, tables, query_times, SOFTMAX,
                HAS_POSITION, HAS_TIME, FAST,
            )  # fmt: skip
            new = ()
            new_constants = ()
            for i in tl.static_range(OUT_V):
                code, v_scale, v_zero = load_values(
                    v_codes, v_ranges, row, slot, inside, first_v + i, DTYPE, OFFSET, PAGE, BITS, V_BLOCK,
                    V_BLOCKS, V_GROUPS, V_WORDS, R,
                )  # fmt: skip
                before = sums[i]
                if SOFTMAX:
                    before = before * factor[None, :]
                if SCALED_WEIGHTS:
                    # Codes centred at 0, so that the rounding of the weights has the same effect as with values.
                    value = (code - (OFFSET + LEVELS / 2)).to(DTYPE)
                    rounded = (weights * v_scale[:, None]).to(DTYPE)
                    constant = constants[i]
                    if i % V_PER == 0 or OUT_V != V_BLOCKS:
                        if SOFTMAX:
                            constant = constant * factor[None, :]
                        constant += weights * (v_zero + LEVELS / 2 * v_scale)[:, None]
                    new_constants += (constant,)
                else:
                    value = (v_zero - OFFSET * v_scale)[:, None] + v_scale[:, None] * code.to(tl.float32)
                    value = value.to(DTYPE)
                    rounded = weights.to(DTYPE)
                    new_constants += (constants[i],)
                new += (tl.dot(tl.trans(value), rounded, before, input_precision=PRECISION),)
            sums = new
            constants = new_constants

    greatest, total = state
    row = split * Tq.to(tl.int64) + query
    divisor = tl.where(total == 0.0, 1.0, total) if SOFTMAX else tl.full([COLUMNS], 1.0, tl.float32)
    if LSE:
        tl.store(lse + row * (HG * G) + head, tl.where(total == 0.0, float("-inf"), greatest + tl.log(divisor)), real)
    for i in tl.static_range(OUT_V):
        channel = (first_v + i) * V_BLOCK + tl.arange(0, V_BLOCK)
        x = sums[i]
        if SCALED_WEIGHTS:
            x += tl.sum(constants[i // V_PER * V_PER if OUT_V == V_BLOCKS else i], 0)[None, :]
        x = x / divisor[None, :] if SOFTMAX else x * inverse_n
        belongs = (channel[:, None] // V == (head - group * G)[None, :]) & real[None, :]
        pointers = out + (row * (HG * G) + head)[None, :] * V + (channel % V)[:, None]
        tl.store(pointers, x.to(out.dtype.element_ty), belongs)
