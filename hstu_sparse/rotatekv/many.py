"""The fused attention kernel for many queries: a tile of the history is unpacked into shared memory, for BQ queries.

Letters: T cached tokens, Tq queries, B sequences, S sink tokens, H heads, D query/key and V value head size, G heads of
a head group, HG = H / G, R tokens of a tile, BQ queries of a program.

A program has one head. The transform of a head group is that of its heads, D channels each, and then one across heads:
the latter costs little as codes are unpacked, the former goes to the queries, or, for RoPE, to the key. Queries are
made ready by a kernel of their own.

Numbers are unpacked two at a time, as int32 pairs, and the channels of a tile stand in whatever order that leaves them
in (`channel_of`): the queries and the result follow it.
"""

import triton
import triton.language as tl

from hstu_sparse.bias.scores import time_bias
from hstu_sparse.pages.codec import halves_of, sign
from hstu_sparse.rotatekv.attention import turn
from hstu_sparse.rotatekv.turning import halves
from hstu_sparse.tiles import COMPILED, locate, silu

SIGNS = tl.constexpr(-2147450880)  # the sign bits of a pair


@triton.jit
def fused_pairs(a, b, c, DTYPE: tl.constexpr):
    """a * b + c of int32 pairs of fp16 or bf16 numbers."""
    if COMPILED:
        if tl.float16 == DTYPE:
            return tl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)
        else:
            return tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)
    else:
        x = halves(a, DTYPE).to(tl.float32) * halves(b, DTYPE).to(tl.float32) + halves(c, DTYPE).to(tl.float32)
        low, high = tl.split(x.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
        return low | (high << 16)


@triton.jit
def both(x, HIGH: tl.constexpr):
    """The low or the high half of an int32 twice."""
    if COMPILED:
        if HIGH:
            return tl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x3232;", "=r,r", [x], tl.int32, True, 1)
        else:
            return tl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x1010;", "=r,r", [x], tl.int32, True, 1)
    else:
        return ((x >> 16 if HIGH else x) & 0xFFFF) * 0x10001


@triton.jit
def twice(x, BIAS: tl.constexpr, MANTISSA: tl.constexpr):
    """2 ** x in both halves of an int32, as numbers with that exponent's bias and that mantissa."""
    return ((BIAS + x) << MANTISSA) * 0x10001


@triton.jit
def code_pairs(words, none, PLANE: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of words [R, 4] as int32 pairs of DTYPE: a tuple, by field, of [R, 4].

    none: [R, 1] int32, 0, which the compiler does not know. Two constants go into one instruction if one of them stands
    in a register of each thread.
    """
    MANTISSA: tl.constexpr = 10 if tl.float16 == DTYPE else 7
    BIAS: tl.constexpr = 15 if tl.float16 == DTYPE else 127
    PER: tl.constexpr = MANTISSA // PLANE
    large = none | twice(MANTISSA, BIAS, MANTISSA)
    found = ()
    for field in tl.static_range(16 // PLANE):
        # In the mantissa of 2 ** MANTISSA the field at place p is worth code * 2 ** p.
        x = (words >> (field // PER * PER * PLANE)) & ((((1 << PLANE) - 1) * 0x10001) << (field % PER * PLANE))
        step = tl.full(words.shape, twice(-(field % PER) * PLANE, BIAS, MANTISSA), tl.int32)
        minus = tl.full(words.shape, twice(MANTISSA - field % PER * PLANE, BIAS, MANTISSA) + SIGNS, tl.int32)
        found += (fused_pairs(x | large, step, minus, DTYPE),)
    return found


@triton.jit
def side_by_side(x, COUNT: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr):
    """[R, 8 COUNT] of a tuple of COUNT int32 pairs [R, 4]: channels in the order of `channel_of`."""
    for level in tl.static_range(5):
        if COUNT >> level > 1:
            y = ()
            for i in tl.static_range(COUNT >> (level + 1)):
                y += (tl.join(x[2 * i], x[2 * i + 1]),)
            x = y
    # 64 channels, 16 of each word, are a row of shared memory: what a quarter of a warp stores at once, 16 bytes a
    # thread, lies in different banks.
    x = tl.permute(tl.reshape(x[0], [R, 4, COUNT // 8, 8]), 0, 2, 1, 3)
    return tl.reshape(halves(x, DTYPE), [R, 8 * COUNT])


@triton.jit
def channel_of(place, COUNT: tl.constexpr):
    """The channel of a head at each place of `side_by_side`'s order.

    That is: the last bit of the pair's number if there are 16, word, the other bits backwards, half. Pairs are numbered
    by block, chunk and field.
    """
    rest = place // 64 * 8 + place % 16 // 2
    number = rest * 0
    for bit in tl.static_range(5):
        if COUNT >> bit > 1:
            number = number * 2 + (rest >> bit) % 2
    return (number * 4 + place % 64 // 16) * 2 + place % 2


@triton.jit
def by_channel(x, BQ: tl.constexpr, V: tl.constexpr):
    """[BQ, V] with channels as they are numbered, from the order of `channel_of`."""
    if V == 128:
        x = tl.permute(tl.reshape(x, [BQ, 2, 4, 2, 2, 2, 2]), 0, 5, 4, 3, 1, 2, 6)
    else:
        x = tl.permute(tl.reshape(x, [BQ, 4, 2, 2, 2, 2]), 0, 4, 3, 2, 1, 5)
    return tl.reshape(x, [BQ, V])


@triton.jit
def load_pages(page_table, tile, pages, R: tl.constexpr, PAGE: tl.constexpr):
    """The page of each of a tile's tokens, [R]; the last one's of those behind it."""
    return tl.load(page_table + tl.minimum(tile * (R // PAGE) + tl.arange(0, R) // PAGE, pages - 1))


@triton.jit
def load_words(
    codes, ranges, row, slot, block, group, PAGE: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr,
    GROUPS: tl.constexpr, COUNT: tl.constexpr, GROUP_COUNT: tl.constexpr,
):  # fmt: skip
    """Words [R, 4] of COUNT blocks from `block` on, by block and chunk; scales and zeros of groups, int32 [R] each."""
    words = ()
    for i in tl.static_range(COUNT):
        for c in tl.static_range(WORDS // 4):
            at = ((row * BLOCKS + block + i) * PAGE + slot) * WORDS + c * 4
            words += (tl.load(codes + at[:, None] + tl.arange(0, 4)[None, :]),)
    found = ()
    for g in tl.static_range(GROUP_COUNT):
        found += (tl.load(ranges + (row * GROUPS + group + g) * PAGE + slot),)
    return words, found


@triton.jit
def load_tile(
    k_codes, k_ranges, v_codes, v_ranges, page, group, own, HG: tl.constexpr, PAGE: tl.constexpr, R: tl.constexpr,
    K_BLOCKS: tl.constexpr, K_WORDS: tl.constexpr, K_GROUPS: tl.constexpr, V_BLOCKS: tl.constexpr,
    V_WORDS: tl.constexpr, V_GROUPS: tl.constexpr, OWN_V: tl.constexpr, OWN_GROUPS: tl.constexpr,
):  # fmt: skip
    """What `load_words` finds of the group's keys and of the values of head `own`: (words, ranges, words, ranges)."""
    row = page.to(tl.int64) * HG + group
    slot = tl.arange(0, R) % PAGE
    keys, key_ranges = load_words(
        k_codes, k_ranges, row, slot, 0, 0, PAGE, K_BLOCKS, K_WORDS, K_GROUPS, K_BLOCKS, K_GROUPS
    )
    block = own * OWN_V
    values, value_ranges = load_words(
        v_codes, v_ranges, row, slot, block, block * V_GROUPS // V_BLOCKS, PAGE, V_BLOCKS, V_WORDS, V_GROUPS, OWN_V,
        OWN_GROUPS,
    )  # fmt: skip
    return keys, key_ranges, values, value_ranges


@triton.jit
def head_keys(
    keys, ranges, own, none, G: tl.constexpr, OWN_K: tl.constexpr, K_PER: tl.constexpr, CHUNKS: tl.constexpr,
    PLANE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """[R, D] fp16: what head `own` of the group sees of its keys, up to the transform of D."""
    FIELDS: tl.constexpr = 16 // PLANE
    found = ()
    for i in tl.static_range(OWN_K):
        zero = both(ranges[i // K_PER], True)
        for g in tl.static_range(1, G):
            one = tl.full([R], 0x3C003C00, tl.int32) ^ tl.where(sign(g, own) < 0, SIGNS, 0)
            zero = fused_pairs(both(ranges[(g * OWN_K + i) // K_PER], True), one, zero, tl.float16)
        for c in tl.static_range(CHUNKS):
            pairs = ()
            for _ in tl.static_range(FIELDS):
                pairs += (tl.broadcast_to(zero[:, None], [R, 4]),)
            for g in tl.static_range(G):
                step = both(ranges[(g * OWN_K + i) // K_PER], False) ^ tl.where(sign(g, own) < 0, SIGNS, 0)
                step = tl.broadcast_to(step[:, None], [R, 4])
                codes = code_pairs(keys[(g * OWN_K + i) * CHUNKS + c], none, PLANE, tl.float16)
                new = ()
                for f in tl.static_range(FIELDS):
                    new += (fused_pairs(codes[f], step, pairs[f], tl.float16),)
                pairs = new
            found += pairs
    return side_by_side(found, OWN_K * CHUNKS * FIELDS, R, tl.float16)


@triton.jit
def head_values(
    values, ranges, none, OWN_V: tl.constexpr, V_PER: tl.constexpr, CHUNKS: tl.constexpr, PLANE: tl.constexpr,
    DTYPE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """[R, V] of DTYPE: a head's values."""
    FIELDS: tl.constexpr = 16 // PLANE
    found = ()
    for i in tl.static_range(OWN_V):
        step, zero = halves_of(ranges[i // V_PER])
        step = tl.broadcast_to(both(step.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32), False)[:, None], [R, 4])
        zero = tl.broadcast_to(both(zero.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32), False)[:, None], [R, 4])
        for c in tl.static_range(CHUNKS):
            codes = code_pairs(values[i * CHUNKS + c], none, PLANE, DTYPE)
            for f in tl.static_range(FIELDS):
                found += (fused_pairs(codes[f], step, zero, DTYPE),)
    return side_by_side(found, OWN_V * CHUNKS * FIELDS, R, DTYPE)


@triton.jit(do_not_specialize=["q_stride_t", "q_stride_h", "B"])
def rotatekv_queries_fwd_kernel(
    q, q_stride_t, q_stride_h, q_offsets, seq_offsets, near, far, out, factors, B, factor,
    H: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Queries as keys meet them: transformed, their channels in the order of `channel_of`; or turned to their position.

    out: [Tq, H, D] fp16, divided by the query's greatest element, so that fp16 holds them; factors: [Tq, H] fp32, that
    times `factor`.
    """
    b, first_query, asked_count, q_tile = locate(q_offsets, tl.program_id(0) // H, B, BQ)
    if q_tile * BQ >= asked_count:
        return
    head = tl.program_id(0) % H
    index = q_tile * BQ + tl.arange(0, BQ)
    real = index < asked_count
    row = (first_query + index) * H + head
    base = q + ((first_query + index) * q_stride_t + head.to(tl.int64) * q_stride_h)[:, None]
    place = tl.arange(0, D)[None, :]
    if ROPE:
        HALF: tl.constexpr = D // 2
        length = (tl.load(seq_offsets + b + 1) - tl.load(seq_offsets + b)).to(tl.int32)
        x = tl.load(base + place, real[:, None], 0.0).to(tl.float32)
        other = tl.load(base + (place + HALF) % D, real[:, None], 0.0).to(tl.float32)
        cos, sin = turn(length, 0, place % HALF, near, far, HALF)
        x = x * cos + other * tl.where(place < HALF, -sin, sin)
    else:
        channel = channel_of(tl.arange(0, D), D // 8)
        x = tl.zeros([BQ, D], tl.float32)
        for i in tl.static_range(D // 64):
            part = i * 64 + tl.arange(0, 64)
            matrix = sign(part[:, None], channel[None, :]).to(q.dtype.element_ty)
            x = tl.dot(tl.load(base + part[None, :], real[:, None], 0.0), matrix, x)
    most = tl.max(tl.abs(x), 1)
    most = tl.where(most > 0.0, most, 1.0)
    tl.store(out + (row * D)[:, None] + place, (x * (1.0 / most)[:, None]).to(tl.float16), real[:, None])
    tl.store(factors + row, most * factor, real)


@triton.jit(do_not_specialize=["B", "S", "Tq", "SPLITS"])
def rotatekv_many_fwd_kernel(
    queries, factors, q_offsets, seq_offsets, page_offsets, page_table,
    k_codes, k_ranges, v_codes, v_ranges,
    position_table, time_table, cells, timestamps, query_timestamps, angles,
    out, lse, B, S, Tq, SPLITS, scale, inverse_n,
    DTYPE: tl.constexpr, HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr,
    BITS: tl.constexpr, K_BLOCKS: tl.constexpr, K_WORDS: tl.constexpr, K_GROUPS: tl.constexpr, V_BLOCKS: tl.constexpr,
    V_WORDS: tl.constexpr, V_GROUPS: tl.constexpr, R: tl.constexpr, SOFTMAX: tl.constexpr, ROPE: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, BQ: tl.constexpr, FAST: tl.constexpr, LSE: tl.constexpr,
    AHEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One part of BQ queries of one head; out and lse: [SPLITS, Tq, H, ...], or the final ones.

    queries, factors: of rotatekv_queries_fwd_kernel. DTYPE: of weights and values; fp16, if it holds them, is unpacked
    with fewer instructions. scale: of the transform of keys, with RoPE. AHEAD: words are loaded a tile ahead.
    """
    CHUNKS: tl.constexpr = K_WORDS // 4
    OWN_K: tl.constexpr = K_BLOCKS // G
    OWN_V: tl.constexpr = V_BLOCKS // G
    K_PER: tl.constexpr = K_BLOCKS // K_GROUPS
    V_PER: tl.constexpr = V_BLOCKS // V_GROUPS
    OWN_GROUPS: tl.constexpr = OWN_V // V_PER if OWN_V > V_PER else 1
    HALF: tl.constexpr = D // 2
    # exp2 takes one instruction less than exp.
    LOG2E: tl.constexpr = 1.4426950408889634 if SOFTMAX else 1.0
    b, first_query, asked_count, q_tile = locate(q_offsets, tl.program_id(0) // (SPLITS * HG * G), B, BQ)
    if q_tile * BQ >= asked_count:
        return
    head = tl.program_id(0) % (HG * G)
    group = head // G
    own = head % G
    split = tl.program_id(0) // (HG * G) % SPLITS
    index = q_tile * BQ + tl.arange(0, BQ)
    real = index < asked_count
    query = first_query + index
    begin = tl.load(seq_offsets + b).to(tl.int64)
    length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
    asked = tl.zeros([BQ], tl.int64)
    if HAS_TIME:
        asked = tl.load(query_timestamps + query, real, 0)
    q_scale = tl.load(factors + query * (HG * G) + head, real, 0.0)
    base = queries + ((query * (HG * G) + head) * D)[:, None]
    # What is loaded is read where it lies in shared memory; what is computed would take registers.
    if ROPE:
        place = tl.arange(0, HALF)
        near_query = tl.load(base + place[None, :], real[:, None], 0.0)
        far_query = tl.load(base + (HALF + place)[None, :], real[:, None], 0.0)
        channel = channel_of(tl.arange(0, D), D // 8)
        near_matrix = (sign(channel[:, None], place[None, :]) * scale).to(tl.float16)
        far_matrix = (sign(channel[:, None], HALF + place[None, :]) * scale).to(tl.float16)
    else:
        whole_query = tl.load(base + tl.arange(0, D)[None, :], real[:, None], 0.0)

    sums = tl.zeros([BQ, V], tl.float32)
    # Parts of a row's sum, as the threads have them: they meet at the end.
    total = tl.zeros([BQ, 8], tl.float32)
    greatest = tl.full([BQ], float("-inf"), tl.float32)
    packed = tl.maximum(length - S, 0)
    tiles = (packed + R - 1) // R
    per = (tiles + SPLITS - 1) // SPLITS
    first = split * per
    last = tl.minimum(tiles, first + per)
    page_table += tl.load(page_offsets + b)
    pages = (packed + PAGE - 1) // PAGE
    r = tl.arange(0, R)
    if first < last:
        # Tokens behind the last one have codes of some page, and no weight.
        page = load_pages(page_table, first, pages, R, PAGE)
        none = (page >> 31)[:, None]
        if AHEAD:
            loaded = load_tile(
                k_codes, k_ranges, v_codes, v_ranges, page, group, own, HG, PAGE, R, K_BLOCKS, K_WORDS, K_GROUPS,
                V_BLOCKS, V_WORDS, V_GROUPS, OWN_V, OWN_GROUPS,
            )  # fmt: skip
            page = load_pages(page_table, first + 1, pages, R, PAGE)
        for tile in tl.range(first, last, num_stages=STAGES):
            if not AHEAD:
                loaded = load_tile(
                    k_codes, k_ranges, v_codes, v_ranges, page, group, own, HG, PAGE, R, K_BLOCKS, K_WORDS, K_GROUPS,
                    V_BLOCKS, V_WORDS, V_GROUPS, OWN_V, OWN_GROUPS,
                )  # fmt: skip
                page = load_pages(page_table, tile + 1, pages, R, PAGE)
            # Keys and values are stored side by side: one barrier before them, one behind.
            key = head_keys(loaded[0], loaded[1], own, none, G, OWN_K, K_PER, CHUNKS, BITS, R)
            value = head_values(loaded[2], loaded[3], none, OWN_V, V_PER, CHUNKS, BITS, DTYPE, R)
            behind = tile * R + r
            inside = behind < packed
            scores = tl.zeros([BQ, R], tl.float32)
            if ROPE:
                angle = angles + ((S + behind) * D)[:, None] + tl.arange(0, HALF)[None, :]
                cos, sin = tl.load(angle).to(tl.float32), tl.load(angle + HALF).to(tl.float32)
                near_half, far_half = tl.dot(key, near_matrix), tl.dot(key, far_matrix)
                near_key = (near_half * cos - far_half * sin).to(tl.float16)
                far_key = (far_half * cos + near_half * sin).to(tl.float16)
                scores = tl.dot(near_query, tl.trans(near_key), scores)
                scores = tl.dot(far_query, tl.trans(far_key), scores)
            else:
                scores = tl.dot(whole_query, tl.trans(key), scores)
            if AHEAD:
                # Here no fence is to come that would wait for them: the next one is where they are stored.
                loaded = load_tile(
                    k_codes, k_ranges, v_codes, v_ranges, page, group, own, HG, PAGE, R, K_BLOCKS, K_WORDS, K_GROUPS,
                    V_BLOCKS, V_WORDS, V_GROUPS, OWN_V, OWN_GROUPS,
                )  # fmt: skip
                page = load_pages(page_table, tile + 2, pages, R, PAGE)
            factor = q_scale
            if HAS_POSITION or HAS_TIME:
                scores *= q_scale[:, None]
                factor = tl.full([BQ], 1.0, tl.float32)
            if HAS_POSITION:
                scores += tl.load(position_table + length - S - behind, inside, 0.0).to(tl.float32)[None, :] * LOG2E
            if HAS_TIME:
                seen = tl.load(timestamps + begin + S + behind, inside, 0)
                scores += time_bias(time_table, cells, asked[:, None], seen[None, :])[0] * LOG2E
            if SOFTMAX:
                if (tile + 1) * R > packed:
                    scores = tl.where(inside[None, :], scores, float("-inf"))
                new = tl.maximum(greatest, tl.max(scores, 1) * factor)
                safe = tl.where(new == float("-inf"), 0.0, new)
                shrink = tl.exp2(greatest - safe)
                weights = tl.exp2(scores * factor[:, None] - safe[:, None])
                total = total * shrink[:, None] + tl.sum(tl.reshape(weights, [BQ, R // 8, 8]), 1)
                sums *= shrink[:, None]
                greatest = new
            else:
                weights = tl.where(inside[None, :], silu(scores * factor[:, None], FAST), 0.0)
            sums = tl.dot(weights.to(DTYPE), value, sums)

    row = split * Tq.to(tl.int64) + query
    if SOFTMAX:
        total = tl.sum(total, 1)
        divisor = tl.where(total > 0.0, total, 1.0)
        sums = sums / divisor[:, None]
        if LSE:
            value = tl.where(total > 0.0, greatest / LOG2E + tl.log(divisor), float("-inf"))
            tl.store(lse + row * (HG * G) + head, value, real)
    else:
        sums *= inverse_n
    pointers = out + ((row * (HG * G) + head) * V)[:, None] + tl.arange(0, V)[None, :]
    tl.store(pointers, by_channel(sums.to(out.dtype.element_ty), BQ, V), real[:, None])
