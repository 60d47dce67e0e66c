"""The fused attention kernel for many queries: a tile of the history is unpacked into shared memory, for BQ queries.

Letters: T cached tokens, Tq queries, B sequences, S sink tokens, H heads, D query/key and V value head size, G heads of
a head group, HG = H / G, R tokens of a tile, BQ queries of a program.

A program has one head. The transform of a head group is that of its heads, D channels each, and then one across heads:
A program has one head. The transform of a head group is that of its heads, D channels each, and one across heads:
costs little as codes are unpacked; the turn goes to the queries, or, for RoPE, to the key.

Numbers are unpacked two at a time, as int32 pairs, and the channels of a tile stand in whatever order that leaves them
in (`channel_of`): the queries and the result follow it.
"""

import triton
import triton.language as tl

from hstu_sparse.rotatekv.attention import time_bias, turn
from hstu_sparse.rotatekv.codec import sign
from hstu_sparse.rotatekv.few import halves
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
def both(x):
    """int32 pairs of a 16-bit number twice."""
    return (x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001


@triton.jit
def code_pairs(words, unit, PLANE: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of words [R, 4] as int32 pairs of DTYPE: a tuple, by field, of [R, 4]."""
    MANTISSA: tl.constexpr = 10 if tl.float16 == DTYPE else 7
    BIAS: tl.constexpr = 15 if tl.float16 == DTYPE else 127
    PER: tl.constexpr = MANTISSA // PLANE
    found = ()
    for field in tl.static_range(16 // PLANE):
        # At place p of a mantissa of M bits a step is worth 1 if the number is 2 ** (M - p) and more, which goes again
        # by a sum.
        one = ((BIAS + MANTISSA - field % PER * PLANE) << MANTISSA) * 0x10001
        x = (words >> (field // PER * PER * PLANE)) & (((1 << PLANE) - 1) * 0x10001 << (field % PER * PLANE))
        minus = tl.full(words.shape, one + SIGNS, tl.int32)
        unity = tl.full(words.shape, (BIAS << MANTISSA) * 0x10001, tl.int32)
        found += (fused_pairs(x | (one * unit), unity, minus, DTYPE),)
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
    return tl.reshape(halves(x[0], DTYPE), [R, 8 * COUNT])


@triton.jit
def channel_of(place, COUNT: tl.constexpr, FIELDS: tl.constexpr):
    """The channel of a head at each place of `side_by_side`'s order.

    That is: word, the bits of the pair's number backwards, half. Pairs are numbered by block, chunk and field.
    """
    rest = place % (2 * COUNT) // 2
    number = rest * 0
    for bit in tl.static_range(5):
        if COUNT >> bit > 1:
            number = number * 2 + (rest >> bit) % 2
    return (number * 4 + place // (2 * COUNT)) * 2 + place % 2


@triton.jit
def load_tile(
    page_table, tile, last, packed, k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros, group, own,
    HG: tl.constexpr, PAGE: tl.constexpr, K_BLOCKS: tl.constexpr, K_WORDS: tl.constexpr, K_GROUPS: tl.constexpr,
    V_BLOCKS: tl.constexpr, V_WORDS: tl.constexpr, V_GROUPS: tl.constexpr, OWN_V: tl.constexpr,
    OWN_GROUPS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Words, scales and zeros of a tile: keys of the group, values of head `own` in it; zero behind the last token."""
    behind = tile * R + tl.arange(0, R)
    inside = behind < packed
    page = tl.load(page_table + behind // PAGE, inside, 0).to(tl.int64) * HG + group
    slot = behind % PAGE
    four = tl.arange(0, 4)
    keys = ()
    for i in tl.static_range(K_BLOCKS):
        for c in tl.static_range(K_WORDS // 4):
            at = ((page * K_BLOCKS + i) * PAGE + slot) * K_WORDS + c * 4
            keys += (tl.load(k_codes + at[:, None] + four[None, :], inside[:, None], 0),)
    key_ranges = ()
    for g in tl.static_range(K_GROUPS):
        at = (page * K_GROUPS + g) * PAGE + slot
        key_ranges += (tl.load(k_scales + at, inside, 0.0), tl.load(k_zeros + at, inside, 0.0))
    values = ()
    for i in tl.static_range(OWN_V):
        for c in tl.static_range(V_WORDS // 4):
            at = ((page * V_BLOCKS + own * OWN_V + i) * PAGE + slot) * V_WORDS + c * 4
            values += (tl.load(v_codes + at[:, None] + four[None, :], inside[:, None], 0),)
    value_ranges = ()
    for g in tl.static_range(OWN_GROUPS):
        at = (page * V_GROUPS + own * OWN_V * V_GROUPS // V_BLOCKS + g) * PAGE + slot
        value_ranges += (tl.load(v_scales + at, inside, 0.0), tl.load(v_zeros + at, inside, 0.0))
    return keys, key_ranges, values, value_ranges


@triton.jit
def head_keys(
    keys, ranges, own, unit, G: tl.constexpr, OWN_K: tl.constexpr, K_PER: tl.constexpr, CHUNKS: tl.constexpr,
    PLANE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """[R, D] fp16: what head `own` of the group sees of its keys, up to the transform of D."""
    FIELDS: tl.constexpr = 16 // PLANE
    found = ()
    for i in tl.static_range(OWN_K):
        zero = both(ranges[2 * (i // K_PER) + 1])
        for g in tl.static_range(1, G):
            one = tl.full([R], 0x3C003C00, tl.int32) ^ tl.where(sign(g, own) < 0, SIGNS, 0)
            zero = fused_pairs(both(ranges[2 * ((g * OWN_K + i) // K_PER) + 1]), one, zero, tl.float16)
        for c in tl.static_range(CHUNKS):
            pairs = ()
            for _ in tl.static_range(FIELDS):
                pairs += (tl.broadcast_to(zero[:, None], [R, 4]),)
            for g in tl.static_range(G):
                step = both(ranges[2 * ((g * OWN_K + i) // K_PER)]) ^ tl.where(sign(g, own) < 0, SIGNS, 0)
                step = tl.broadcast_to(step[:, None], [R, 4])
                codes = code_pairs(keys[(g * OWN_K + i) * CHUNKS + c], unit, PLANE, tl.float16)
                new = ()
                for f in tl.static_range(FIELDS):
                    new += (fused_pairs(codes[f], step, pairs[f], tl.float16),)
                pairs = new
            found += pairs
    return side_by_side(found, OWN_K * CHUNKS * FIELDS, R, tl.float16)


@triton.jit
def head_values(
    values, ranges, unit, OWN_V: tl.constexpr, V_PER: tl.constexpr, CHUNKS: tl.constexpr, PLANE: tl.constexpr,
    DTYPE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """[R, V] of DTYPE: a head's values."""
    FIELDS: tl.constexpr = 16 // PLANE
    found = ()
    for i in tl.static_range(OWN_V):
        step = tl.broadcast_to(both(ranges[2 * (i // V_PER)].to(tl.float32).to(DTYPE))[:, None], [R, 4])
        zero = tl.broadcast_to(both(ranges[2 * (i // V_PER) + 1].to(tl.float32).to(DTYPE))[:, None], [R, 4])
        for c in tl.static_range(CHUNKS):
            codes = code_pairs(values[i * CHUNKS + c], unit, PLANE, DTYPE)
            for f in tl.static_range(FIELDS):
                found += (fused_pairs(codes[f], step, zero, DTYPE),)
    return side_by_side(found, OWN_V * CHUNKS * FIELDS, R, DTYPE)


@triton.jit(do_not_specialize=["q_stride_t", "q_stride_h", "B", "S", "Tq", "SPLITS", "unit"])
def rotatekv_many_fwd_kernel(
    q, q_stride_t, q_stride_h, q_offsets, seq_offsets, page_offsets, page_table,
    k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros,
    position_table, time_table, cells, timestamps, query_timestamps, near, far, angles,
    out, lse, B, S, Tq, SPLITS, alpha, scale, inverse_n, unit,
    HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr,
    K_BLOCKS: tl.constexpr, K_WORDS: tl.constexpr, K_GROUPS: tl.constexpr, V_BLOCKS: tl.constexpr,
    V_WORDS: tl.constexpr, V_GROUPS: tl.constexpr, R: tl.constexpr, SOFTMAX: tl.constexpr, ROPE: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, BQ: tl.constexpr, FAST: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """One part of BQ queries of one head; out and lse: [SPLITS, Tq, H, ...], or the final ones. unit: 1, see few.py."""
    DTYPE: tl.constexpr = q.dtype.element_ty
    CHUNKS: tl.constexpr = K_WORDS // 4
    FIELDS: tl.constexpr = 16 // BITS
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

    # Queries [channels, BQ] are divided by their greatest element, so that fp16 holds them.
    channel = channel_of(tl.arange(0, D), D // 8, FIELDS)
    base = q + query[None, :] * q_stride_t + head.to(tl.int64) * q_stride_h
    turned = ()
    matrices = ()
    if ROPE:
        place = tl.arange(0, HALF)
        x = tl.load(base + place[:, None], real[None, :], 0.0).to(tl.float32)
        y = tl.load(base + HALF + place[:, None], real[None, :], 0.0).to(tl.float32)
        q_cos, q_sin = turn(length, 0, place, near, far, HALF)
        turned += (x * q_cos[:, None] - y * q_sin[:, None], y * q_cos[:, None] + x * q_sin[:, None])
        matrices += (sign(channel[:, None], place[None, :]).to(tl.float16),)
        matrices += (sign(channel[:, None], HALF + place[None, :]).to(tl.float16),)
    else:
        whole = tl.zeros([D, BQ], tl.float32)
        for i in tl.static_range(OWN_K):
            place = i * 64 + tl.arange(0, 64)
            x = tl.load(base + place[:, None], real[None, :], 0.0)
            whole = tl.dot(sign(channel[:, None], place[None, :]).to(DTYPE), x, whole)
        turned += (whole,)
    most = tl.zeros([BQ], tl.float32)
    for i in tl.static_range(2 if ROPE else 1):
        most = tl.maximum(most, tl.max(tl.abs(turned[i]), 0))
    most = tl.where(most > 0.0, most, 1.0)
    queries = ()
    for i in tl.static_range(2 if ROPE else 1):
        queries += ((turned[i] * (1.0 / most)[None, :]).to(tl.float16),)
    q_scale = most * ((1.0 if ROPE else scale) * alpha * LOG2E)

    sums = tl.zeros([BQ, V], tl.float32)
    total = tl.zeros([BQ], tl.float32)
    greatest = tl.full([BQ], float("-inf"), tl.float32)
    packed = tl.maximum(length - S, 0)
    tiles = (packed + R - 1) // R
    per = (tiles + SPLITS - 1) // SPLITS
    page_table += tl.load(page_offsets + b)
    for tile in tl.range(split * per, tl.minimum(tiles, split * per + per), num_stages=1):
        keys, key_ranges, values, value_ranges = load_tile(
            page_table, tile, tiles, packed, k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros, group, own, HG,
            PAGE, K_BLOCKS, K_WORDS, K_GROUPS, V_BLOCKS, V_WORDS, V_GROUPS, OWN_V, OWN_GROUPS, R,
        )  # fmt: skip
        behind = tile * R + tl.arange(0, R)
        inside = behind < packed
        key = head_keys(keys, key_ranges, own, unit, G, OWN_K, K_PER, CHUNKS, BITS, R)
        scores = tl.zeros([BQ, R], tl.float32)
        if ROPE:
            angle = angles + ((S + behind) * D)[:, None] + tl.arange(0, HALF)[None, :]
            cos, sin = tl.load(angle).to(tl.float32) * scale, tl.load(angle + HALF).to(tl.float32) * scale
            near_half, far_half = tl.dot(key, matrices[0]), tl.dot(key, matrices[1])
            near_key = (near_half * cos - far_half * sin).to(tl.float16)
            far_key = (far_half * cos + near_half * sin).to(tl.float16)
            near_query, far_query = queries
            scores = tl.dot(tl.trans(near_query), tl.trans(near_key), scores)
            scores = tl.dot(tl.trans(far_query), tl.trans(far_key), scores)
        else:
            own_query = queries[0]
            scores = tl.dot(tl.trans(own_query), tl.trans(key), scores)
        factor = q_scale
        if HAS_POSITION or HAS_TIME:
            scores *= q_scale[:, None]
            factor = tl.full([BQ], 1.0, tl.float32)
        if HAS_POSITION:
            scores += tl.load(position_table + length - S - behind, inside, 0.0).to(tl.float32)[None, :] * LOG2E
        if HAS_TIME:
            seen = tl.load(timestamps + begin + S + behind, inside, 0)
            scores += time_bias(time_table, cells, seen, asked) * LOG2E
        if SOFTMAX:
            if (tile + 1) * R > packed:
                scores = tl.where(inside[None, :], scores, float("-inf"))
            new = tl.maximum(greatest, tl.max(scores, 1) * factor)
            safe = tl.where(new == float("-inf"), 0.0, new)
            shrink = tl.exp2(greatest - safe)
            weights = tl.exp2(scores * factor[:, None] - safe[:, None])
            total = total * shrink + tl.sum(weights, 1)
            sums *= shrink[:, None]
            greatest = new
        else:
            weights = tl.where(inside[None, :], silu(scores * factor[:, None], FAST), 0.0)
        value = head_values(values, value_ranges, unit, OWN_V, V_PER, CHUNKS, BITS, DTYPE, R)
        sums = tl.dot(weights.to(DTYPE), value, sums)

    row = split * Tq.to(tl.int64) + query
    if SOFTMAX:
        divisor = tl.where(total > 0.0, total, 1.0)
        sums = sums / divisor[:, None]
        if LSE:
            value = tl.where(total > 0.0, greatest / LOG2E + tl.log(divisor), float("-inf"))
            tl.store(lse + row * (HG * G) + head, value, real)
    else:
        sums *= inverse_n
    out_channel = channel_of(tl.arange(0, V), V // 8, FIELDS)
    pointers = out + ((row * (HG * G) + head) * V)[:, None] + out_channel[None, :]
    tl.store(pointers, sums.to(out.dtype.element_ty), real[:, None])
