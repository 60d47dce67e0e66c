"""The fused attention kernel for many queries: tiles of the history are unpacked into shared memory, once for BQ queries.

Letters: T cached tokens, Tq queries, B sequences, S sink tokens, H heads, D query/key and V value head size, G heads of
a head group, HG = H / G, R tokens of a tile, BQ queries of a program.

A program has one head. The transform of a head group is that of its heads, D channels each, and then one across heads:
what head h sees of a key is sum over g of sign(h, g) * k'_g, D channels, turned by the transform of D. The sum costs a
few additions as codes are unpacked, and the rest goes to the queries (or, for RoPE, to the key).
"""

import triton
import triton.language as tl

from hstu_sparse.rotatekv.attention import time_bias, turn
from hstu_sparse.rotatekv.codec import butterfly, sign
from hstu_sparse.rotatekv.few import halves
from hstu_sparse.tiles import COMPILED, locate, silu


@triton.jit
def fused_pairs(a, b, c, DTYPE: tl.constexpr):
    """a * b + c of int32 pairs of fp16 or bf16 numbers."""
    if COMPILED:
        if tl.float16 == DTYPE:
            return tl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)
        else:
            return tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)
    else:
        x = (halves(a) * halves(b) + halves(c)).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        low, high = tl.split(x)
        return low | (high << 16)


@triton.jit
def both(x):
    """int32 pairs of a number of 16 bits twice."""
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
        x |= one * unit
        minus = tl.full(words.shape, one - 2147450880, tl.int32)
        found += (fused_pairs(x, tl.full(words.shape, (BIAS << MANTISSA) * 0x10001, tl.int32), minus, DTYPE),)
    return found


@triton.jit
def side_by_side(x, R: tl.constexpr, FIELDS: tl.constexpr, DTYPE: tl.constexpr):
    """[R, channels] of a tuple of int32 pairs [R, 4]: in the order of `channel_of`."""
    if FIELDS == 8:
        low = tl.join(tl.join(x[0], x[1]), tl.join(x[2], x[3]))
        y = tl.join(low, tl.join(tl.join(x[4], x[5]), tl.join(x[6], x[7])))
    else:
        y = tl.join(tl.join(x[0], x[1]), tl.join(x[2], x[3]))
    y = tl.join(y.to(tl.int16), (y >> 16).to(tl.int16))
    return tl.reshape(y.to(DTYPE, bitcast=True), [R, FIELDS * 8])


@triton.jit
def channel_of(place, FIELDS: tl.constexpr):
    """The channel of a chunk at each place of `side_by_side`'s order."""
    if FIELDS == 8:
        field = place // 8 % 2 + place // 4 % 2 * 2 + place // 2 % 2 * 4
    else:
        field = place // 4 % 2 + place // 2 % 2 * 2
    return (field * 4 + place // (2 * FIELDS)) * 2 + place % 2


@triton.jit
def load_tile(
    page_table, tile, last, packed, k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros, group, own,
    HG: tl.constexpr, PAGE: tl.constexpr, K_BLOCKS: tl.constexpr, K_WORDS: tl.constexpr, K_GROUPS: tl.constexpr,
    V_BLOCKS: tl.constexpr, V_WORDS: tl.constexpr, V_GROUPS: tl.constexpr, OWN_V: tl.constexpr, OWN_GROUPS: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Words and scales of a tile: keys of the group, values of head `own` in it."""
    r = tl.arange(0, R)
    behind = tile * R + r
    page = tl.load(page_table + behind // PAGE, behind < packed, 0).to(tl.int64) * HG + group
    slot = behind % PAGE
    four = tl.arange(0, 4)
    keys = ()
    for i in tl.static_range(K_BLOCKS):
        for c in tl.static_range(K_WORDS // 4):
            at = ((page * K_BLOCKS + i) * PAGE + slot) * K_WORDS + c * 4
            keys += (tl.load(k_codes + at[:, None] + four[None, :]),)
    key_ranges = ()
    for g in tl.static_range(K_GROUPS):
        at = (page * K_GROUPS + g) * PAGE + slot
        key_ranges += (tl.load(k_scales + at), tl.load(k_zeros + at))
    values = ()
    for i in tl.static_range(OWN_V):
        for c in tl.static_range(V_WORDS // 4):
            at = ((page * V_BLOCKS + own * OWN_V + i) * PAGE + slot) * V_WORDS + c * 4
            values += (tl.load(v_codes + at[:, None] + four[None, :]),)
    value_ranges = ()
    for g in tl.static_range(OWN_GROUPS):
        at = (page * V_GROUPS + own * OWN_V * V_GROUPS // V_BLOCKS + g) * PAGE + slot
        value_ranges += (tl.load(v_scales + at), tl.load(v_zeros + at))
    return keys, key_ranges, values, value_ranges


@triton.jit(do_not_specialize=["B", "S", "Tq", "SPLITS", "unit"])
def rotatekv_many_fwd_kernel(
    q, q_stride_t, q_stride_h, q_offsets, seq_offsets, page_offsets, page_table,
    k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros,
    position_table, time_table, cells, timestamps, query_timestamps, near, far, angles,
    out, lse, B, S, Tq, SPLITS, alpha, scale, inverse_n, unit,
    HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr,
    K_BLOCKS: tl.constexpr, K_WORDS: tl.constexpr, K_GROUPS: tl.constexpr,
    V_BLOCKS: tl.constexpr, V_WORDS: tl.constexpr, V_GROUPS: tl.constexpr, R: tl.constexpr,
    SOFTMAX: tl.constexpr, ROPE: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr,
    BQ: tl.constexpr, FAST: tl.constexpr, LSE: tl.constexpr, PREFETCH: tl.constexpr, LAZY: tl.constexpr,
):  # fmt: skip
    """One part of BQ queries of one head; out and lse: [SPLITS, Tq, H, ...], or the final ones."""
    DTYPE: tl.constexpr = q.dtype.element_ty
    KT: tl.constexpr = tl.float16
    CHUNKS: tl.constexpr = K_WORDS // 4
    WIDTH: tl.constexpr = 64 // CHUNKS
    OWN_K: tl.constexpr = K_BLOCKS // G
    OWN_V: tl.constexpr = V_BLOCKS // G
    K_PER: tl.constexpr = K_BLOCKS // K_GROUPS
    V_PER: tl.constexpr = V_BLOCKS // V_GROUPS
    OWN_GROUPS: tl.constexpr = OWN_V // V_PER if OWN_V > V_PER else 1
    b, first_query, asked_count, q_tile = locate(q_offsets, tl.program_id(0), B, BQ)
    if q_tile * BQ >= asked_count:
        return
    head = tl.program_id(1)
    group = head // G
    own = head % G
    split = tl.program_id(2)
    index = q_tile * BQ + tl.arange(0, BQ)
    real = index < asked_count
    query = first_query + index
    begin = tl.load(seq_offsets + b).to(tl.int64)
    length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
    asked = tl.zeros([BQ], tl.int64)
    if HAS_TIME:
        asked = tl.load(query_timestamps + query, real, 0)

    place = tl.arange(0, 64)
    FIELDS: tl.constexpr = 16 // BITS
    permuted = channel_of(tl.arange(0, WIDTH), FIELDS)
    turned = ()
    matrices = ()
    base = q + query[None, :] * q_stride_t + head.to(tl.int64) * q_stride_h
    if ROPE:
        for i in tl.static_range(OWN_K):
            low_half = i < OWN_K // 2
            other = i + OWN_K // 2 if low_half else i - OWN_K // 2
            x = tl.load(base + (i * 64 + place)[:, None], real[None, :], 0.0).to(tl.float32)
            y = tl.load(base + (other * 64 + place)[:, None], real[None, :], 0.0).to(tl.float32)
            cos, sin = turn(length, 0, i % (OWN_K // 2) * 64 + place, near, far, D // 2)
            sin = -sin if low_half else sin
            turned += (x * cos[:, None] + y * sin[:, None],)
        for c in tl.static_range(CHUNKS):
            matrices += (sign((c * WIDTH + permuted)[:, None], place[None, :]).to(KT),)
    else:
        for i in tl.static_range(OWN_K):
            x = tl.load(base + (i * 64 + place)[:, None], real[None, :], 0.0)
            for c in tl.static_range(CHUNKS):
                matrix = sign((c * WIDTH + permuted)[:, None], place[None, :]).to(DTYPE)
                turned += (tl.dot(matrix, x),)
        turned = butterfly(turned, OWN_K, CHUNKS)
    most = tl.zeros([BQ], tl.float32)
    PARTS: tl.constexpr = OWN_K if ROPE else OWN_K * CHUNKS
    for i in tl.static_range(PARTS):
        most = tl.maximum(most, tl.max(tl.abs(turned[i]), 0))
    divisor = 1.0 / tl.where(most > 0.0, most, 1.0)
    queries = ()
    for i in tl.static_range(PARTS):
        queries += ((turned[i] * divisor[None, :]).to(KT),)
    LOG2E: tl.constexpr = 1.4426950408889634
    q_scale = tl.where(most > 0.0, most, 1.0) * ((1.0 if ROPE else scale) * alpha * (LOG2E if SOFTMAX else 1.0))

    sums = ()
    for _ in tl.static_range(OWN_V * CHUNKS):
        sums += (tl.zeros([BQ, WIDTH], tl.float32),)
    total = tl.zeros([BQ], tl.float32)
    greatest = tl.full([BQ], float("-inf"), tl.float32)
    packed = tl.maximum(length - S, 0)
    tiles = (packed + R - 1) // R
    per = (tiles + SPLITS - 1) // SPLITS
    page_table += tl.load(page_offsets + b)
    first = split * per
    last = tl.minimum(tiles, first + per)
    r = tl.arange(0, R)
    negative = ()
    for g in tl.static_range(G):
        negative += (tl.where(sign(g, own) < 0, -2147450880, 0),)
    loaded = load_tile(
        page_table, first, last, packed, k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros, group, own, HG, PAGE,
        K_BLOCKS, K_WORDS, K_GROUPS, V_BLOCKS, V_WORDS, V_GROUPS, OWN_V, OWN_GROUPS, R,
    )  # fmt: skip
    for tile in tl.range(first, last, num_stages=1):
        keys, key_ranges, values, value_ranges = loaded
        if PREFETCH:
            loaded = load_tile(
                page_table, tile + 1, last, packed, k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros, group, own,
                HG, PAGE, K_BLOCKS, K_WORDS, K_GROUPS, V_BLOCKS, V_WORDS, V_GROUPS, OWN_V, OWN_GROUPS, R,
            )  # fmt: skip
        else:
            keys, key_ranges, values, value_ranges = load_tile(
                page_table, tile, last, packed, k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros, group, own,
                HG, PAGE, K_BLOCKS, K_WORDS, K_GROUPS, V_BLOCKS, V_WORDS, V_GROUPS, OWN_V, OWN_GROUPS, R,
            )  # fmt: skip
        behind = tile * R + r
        inside = behind < packed
        scores = tl.zeros([BQ, R], tl.float32)
        restored = ()
        for i in tl.static_range(OWN_K):
            zero = both(key_ranges[2 * (i // K_PER) + 1])
            for g in tl.static_range(1, G):
                z = both(key_ranges[2 * ((g * OWN_K + i) // K_PER) + 1])
                zero = fused_pairs(z, tl.full([R], 0x3C003C00, tl.int32) ^ negative[g], zero, KT)
            own_space = tl.zeros([R, 64], tl.float32)
            for c in tl.static_range(CHUNKS):
                pairs = ()
                for _ in tl.static_range(FIELDS):
                    pairs += (tl.broadcast_to(zero[:, None], [R, 4]),)
                for g in tl.static_range(G):
                    step = both(key_ranges[2 * ((g * OWN_K + i) // K_PER)]) ^ negative[g]
                    codes = code_pairs(keys[(g * OWN_K + i) * CHUNKS + c], unit, BITS, KT)
                    new = ()
                    for f in tl.static_range(FIELDS):
                        new += (fused_pairs(codes[f], tl.broadcast_to(step[:, None], [R, 4]), pairs[f], KT),)
                    pairs = new
                key = side_by_side(pairs, R, FIELDS, KT)
                if ROPE:
                    own_space = tl.dot(key, matrices[c], own_space)
                else:
                    query_t = queries[i * CHUNKS + c]
                    scores = tl.dot(tl.trans(query_t), tl.trans(key), scores)
            restored += (own_space,)
        if ROPE:
            restored = butterfly(restored, OWN_K, 1)
            for a in tl.static_range(OWN_K // 2):
                at = angles + ((S + behind) * D)[:, None] + (a * 64 + place)[None, :]
                key_cos, key_sin = tl.load(at).to(tl.float32) * scale, tl.load(at + D // 2).to(tl.float32) * scale
                first_half, second_half = restored[a], restored[a + OWN_K // 2]
                key = (first_half * key_cos - second_half * key_sin).to(KT)
                query_t = queries[a]
                scores = tl.dot(tl.trans(query_t), tl.trans(key), scores)
                key = (second_half * key_cos + first_half * key_sin).to(KT)
                query_t = queries[a + OWN_K // 2]
                scores = tl.dot(tl.trans(query_t), tl.trans(key), scores)
        if SOFTMAX:
            if (tile + 1) * R > packed:
                scores = tl.where(inside[None, :], scores, float("-inf"))
            peak = tl.max(scores, 1) * q_scale
            if LAZY:
                if tl.max((peak > greatest + 8.0).to(tl.int32), 0) > 0:
                    above = tl.maximum(greatest, peak)
                    factor = tl.exp2(greatest - tl.where(above == float("-inf"), 0.0, above))
                    greatest = above
                    total *= factor
                    scaled_sums = ()
                    for i in tl.static_range(OWN_V * CHUNKS):
                        scaled_sums += (sums[i] * factor[:, None],)
                    sums = scaled_sums
            else:
                above = tl.maximum(greatest, peak)
                factor = tl.exp2(greatest - tl.where(above == float("-inf"), 0.0, above))
                greatest = above
                total *= factor
                scaled_sums = ()
                for i in tl.static_range(OWN_V * CHUNKS):
                    scaled_sums += (sums[i] * factor[:, None],)
                sums = scaled_sums
            weights = tl.exp2(scores * q_scale[:, None] - tl.where(greatest == float("-inf"), 0.0, greatest)[:, None])
            total += tl.sum(weights, 1)
        else:
            weights = tl.where(inside[None, :], silu(scores * q_scale[:, None], FAST), 0.0)
        low = weights.to(DTYPE)
        new_sums = ()
        for i in tl.static_range(OWN_V):
            step = both(value_ranges[2 * (i // V_PER)].to(tl.float32).to(DTYPE))[:, None]
            zero = both(value_ranges[2 * (i // V_PER) + 1].to(tl.float32).to(DTYPE))[:, None]
            for c in tl.static_range(CHUNKS):
                codes = code_pairs(values[i * CHUNKS + c], unit, BITS, DTYPE)
                new = ()
                for f in tl.static_range(FIELDS):
                    new += (fused_pairs(codes[f], tl.broadcast_to(step, [R, 4]), tl.broadcast_to(zero, [R, 4]), DTYPE),)
                value = side_by_side(new, R, FIELDS, DTYPE)
                before = sums[i * CHUNKS + c]
                new_sums += (tl.dot(low, value, before),)
        sums = new_sums

    divisor = tl.where(total > 0.0, total, 1.0) if SOFTMAX else tl.full([BQ], 1.0, tl.float32)
    row = split * Tq.to(tl.int64) + query
    if LSE:
        value = tl.where(total > 0.0, greatest / LOG2E + tl.log(divisor), float("-inf"))
        tl.store(lse + row * (HG * G) + head, value, real)
    for i in tl.static_range(OWN_V):
        for c in tl.static_range(CHUNKS):
            x = sums[i * CHUNKS + c]
            x = x / divisor[:, None] if SOFTMAX else x * inverse_n
            channel = i * 64 + c * WIDTH + permuted
            pointers = out + ((row * (HG * G) + head) * V)[:, None] + channel[None, :]
            tl.store(pointers, x.to(out.dtype.element_ty), real[:, None])
