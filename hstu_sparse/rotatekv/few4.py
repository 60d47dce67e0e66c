"""The fused attention kernel for few queries, whose time goes into unpacking: no more instructions a code than needed.

Letters: T cached tokens, Tq queries, B sequences, S sink tokens, H heads, D query/key and V value head size, G heads of
a head group, C its key and CV its value channels, HG = H / G, R tokens of a tile, NW words of a token's values, BQ
queries of a program.

The codes are the left operand of both products and go to it from the registers where they were unpacked. For the
scores a pair of neighbouring channels must lie in a register, which is how the words hold them. For the sums over
tokens it must be a pair of neighbouring tokens: two words of two tokens trade halves before they are unpacked.

A column of scores, weights and sums stands for a query and for a run of value channels that has one head and one
quantisation group; there are PAIRS such runs. A column's weights are scaled by its own group's scale, so that one
product serves all groups, and each channel takes its sum from its own column.
"""

import triton
import triton.language as tl

from hstu_sparse.rotatekv.attention import biased, load_queries
from hstu_sparse.rotatekv.codec import butterfly, halves_of, sign
from hstu_sparse.rotatekv.turning import by_twos, halves, pair, turning_queries, side_by_side
from hstu_sparse.rotatekv.few import sequence_of
from hstu_sparse.tiles import locate, silu


@triton.jit
def places(PLANE: tl.constexpr, FIELDS: tl.constexpr, MANTISSA: tl.constexpr):
    """(shift, place, offset) int32 [FIELDS]: a field comes to `place` of the mantissa and leaves 2 ** offset on top.

    At place p of a mantissa of M bits a step is worth 1 if the number is 2 ** (M - p) and more: several fields take
    one shift.
    """
    PER: tl.constexpr = MANTISSA // PLANE
    field = tl.arange(0, FIELDS)
    place = field % PER * PLANE
    return field // PER * (PER * PLANE), place, MANTISSA - place


@triton.jit
def code_pairs(x, shift, place, offset, unit, PLANE: tl.constexpr, DTYPE: tl.constexpr):
    """The codes in the two halves of x (int32, fields broadcast against it), as numbers of DTYPE: [..., 2].

    In fp16 a code is a number below the least normal one, code * 2 ** (place - 24); in bf16 2 ** offset + code.
    """
    x = (x >> shift) & ((((1 << PLANE) - 1) * 0x10001) << place)
    if tl.bfloat16 == DTYPE:
        # By `unit`, which the compiler does not know, the constant comes to stand in a register: then one instruction
        # takes both constants.
        x |= (((127 + offset) << 7) * 0x10001) * unit
    return halves(x, DTYPE)


@triton.jit
def power(offset):
    """2 ** offset in fp32."""
    return ((127 + offset) << 23).to(tl.float32, bitcast=True)


@triton.jit
def key_codes(words, unit, PLANE: tl.constexpr):
    """Codes [16, CHUNK] in fp16 of words [16, 4]: see `code_pairs`; their channels: `key_channels`."""
    FIELDS: tl.constexpr = 16 // PLANE
    shift, place, offset = places(PLANE, FIELDS, 10)
    shift, place, offset = shift[None, :, None], place[None, :, None], offset[None, :, None]
    found = code_pairs(words[:, None, :], shift, place, offset, unit, PLANE, tl.float16)
    found = tl.reshape(found, [16, FIELDS // 2, 2, 4, 2])
    return tl.reshape(tl.permute(found, 0, 1, 3, 2, 4), [16, FIELDS * 8])


@triton.jit
def key_channels(PLANE: tl.constexpr):
    """(channel of a chunk, its field), in the order in which `key_codes` gives them."""
    k = tl.arange(0, 128 // PLANE)
    field = k // 16 * 2 + k // 2 % 2
    return field * 8 + k // 4 % 4 * 2 + k % 2, field


@triton.jit
def value_codes(words, unit, PLANE: tl.constexpr, DTYPE: tl.constexpr, NW: tl.constexpr):
    """Codes [FIELDS * 2 * NW, 16] of DTYPE (see `code_pairs`) of a tuple of words [NW, 4], of tokens 4j + i by i.

    A row of the result stands for (field, half of the word, word).
    """
    FIELDS: tl.constexpr = 16 // PLANE
    pairs = ()
    for i in tl.static_range(2):
        a, b = words[2 * i], words[2 * i + 1]
        pairs += (tl.join((a & 0xFFFF) | (b << 16), ((a >> 16) & 0xFFFF) | (b & -65536)),)  # [NW, 4, half]
    x = tl.permute(tl.join(pairs[0], pairs[1]), 2, 0, 1, 3)
    shift, place, offset = places(PLANE, FIELDS, 10 if tl.float16 == DTYPE else 7)
    shift, place, offset = shift[:, None, None], place[:, None, None], offset[:, None, None]
    found = code_pairs(tl.reshape(x, [1, 2 * NW, 8]), shift, place, offset, unit, PLANE, DTYPE)
    return tl.reshape(found, [FIELDS * 2 * NW, 16])


@triton.jit
def of_rows(x):
    """[W, 16, J] of [J, 8, W, 2]: what a thread has of a product's left operand."""
    return tl.reshape(tl.permute(x, 2, 3, 1, 0), [x.shape[2], 16, x.shape[0]])


@triton.jit
def load_page(
    k_codes, k_ranges, v_codes, v_ranges, page, j, g, half, group, unit, PAIRS: tl.constexpr, HG: tl.constexpr,
    K_BLOCKS: tl.constexpr, K_WORDS: tl.constexpr, K_GROUPS: tl.constexpr, V_BLOCKS: tl.constexpr,
    V_WORDS: tl.constexpr, V_GROUPS: tl.constexpr, BY_BLOCK: tl.constexpr,
):
    R: tl.constexpr = 16
    row = page.to(tl.int64) * HG + group
    base = k_codes + row * (K_BLOCKS * R * K_WORDS) + (j * unit + g * (K_WORDS * unit) + half * (8 * K_WORDS))
    words = ()
    for i in tl.static_range(K_BLOCKS):
        for c in tl.static_range(K_WORDS // 4):
            words += (of_rows(tl.load(base + (i * R * K_WORDS + c * 4))),)
    ranges = ()
    base = k_ranges + row * (K_GROUPS * R) + (j * 0 + g * unit + half * 8)
    for i in tl.static_range(K_GROUPS):
        ranges += (of_rows(tl.load(base + i * R)),)
    if BY_BLOCK:
        at = base + (tl.minimum(j, K_BLOCKS - 1) * K_GROUPS // K_BLOCKS) * (R * unit)
        ranges += (of_rows(tl.load(at)),)
    values = ()
    NW: tl.constexpr = V_BLOCKS * V_WORDS
    base = v_codes + row * (V_BLOCKS * R * V_WORDS) + (4 * V_WORDS * j + ((g // V_WORDS) * (R * V_WORDS) + g % V_WORDS)) * unit + half * (8 // V_WORDS * R * V_WORDS)
    for i in tl.static_range(4):
        values += (of_rows(tl.load(base + i * V_WORDS)),)
    base = v_ranges + row * (V_GROUPS * R) + (g * unit + half * 8)
    for e in tl.static_range(2):
        values += (of_rows(tl.load(base + (2 * j + e) % PAIRS * V_GROUPS // PAIRS * (R * unit))),)
    return words, ranges, values


@triton.jit
def key_codes4(words, unit, PLANE: tl.constexpr):
    FIELDS: tl.constexpr = 16 // PLANE
    W: tl.constexpr = words.shape[0]
    shift, place, offset = places(PLANE, FIELDS, 10)
    shift, place, offset = shift[None, None, :, None], place[None, None, :, None], offset[None, None, :, None]
    found = code_pairs(words[:, :, None, :], shift, place, offset, unit, PLANE, tl.float16)
    found = tl.reshape(found, [W, 16, FIELDS // 2, 2, 4, 2])
    return tl.reshape(tl.permute(found, 0, 1, 2, 4, 3, 5), [W, 16, FIELDS * 8])


@triton.jit
def value_codes4(words, unit, PLANE: tl.constexpr, DTYPE: tl.constexpr, NW: tl.constexpr):
    FIELDS: tl.constexpr = 16 // PLANE
    W: tl.constexpr = words[0].shape[0]
    pairs = ()
    for i in tl.static_range(2):
        a, b = words[2 * i], words[2 * i + 1]
        pairs += (tl.join((a & 0xFFFF) | (b << 16), ((a >> 16) & 0xFFFF) | (b & -65536)),)
    x = tl.permute(tl.join(pairs[0], pairs[1]), 0, 3, 1, 2, 4)
    shift, place, offset = places(PLANE, FIELDS, 10 if tl.float16 == DTYPE else 7)
    shift, place, offset = shift[None, :, None, None], place[None, :, None, None], offset[None, :, None, None]
    found = code_pairs(tl.reshape(x, [W, 1, 2 * NW, 8]), shift, place, offset, unit, PLANE, DTYPE)
    return tl.reshape(found, [W, FIELDS * 2 * NW, 16])


@triton.jit
def wide(x):
    """[W, 16, 8] of [W, 16, 4]."""
    return tl.reshape(tl.join(x, x), [x.shape[0], 16, 8])


@triton.jit
def any_of(a, b):
    return a | b


@triton.jit
def paired4(x):
    W: tl.constexpr = x.shape[0]
    return tl.reshape(tl.permute(tl.reshape(x, [W, 16, 2, 4, 2]), 0, 1, 3, 2, 4), [W, 16, 16])


@triton.jit
def side_by_side4(low, high):
    x = tl.join(halves(low, tl.float16), halves(high, tl.float16))
    return tl.reshape(tl.permute(x, 0, 1, 2, 4, 3), [x.shape[0], 16, 16])


@triton.jit
def load_angles4(table, position, WORDS: tl.constexpr, STEP: tl.constexpr):
    """position [2, W, 8, 1]."""
    W: tl.constexpr = position.shape[1]
    found = tl.load(table + position * WORDS + (STEP * 16 + tl.arange(0, 16))[None, None, None, :])
    found = tl.reshape(tl.permute(found, 1, 0, 2, 3), [W, 16, 4, 2, 2])
    cos, sin = tl.split(tl.permute(found, 0, 1, 2, 4, 3))
    return (
        tl.reshape(halves(cos, tl.float16), [W, 16, 16]),
        tl.reshape(halves(sin, tl.float16), [W, 16, 16]),
    )


@triton.jit
def load_turns4(table, position, flat_position, HALF: tl.constexpr):
    """position [2, W, 8, 1], flat_position [4, 8, W, 2]."""
    turns = ()
    firsts = ()
    for o in tl.static_range(HALF):
        at = table + flat_position * (HALF * 64) + o * 64
        firsts += (of_rows((tl.load(at) & 0xFFFF) | (tl.load(at + 2) << 16)),)
        for a in tl.static_range(4):
            turns += (load_angles4(table, position, HALF * 64, o * 4 + a),)
    return turns, firsts


@triton.jit
def transformed4(words, matrix, centre, FIRST: tl.constexpr, PLANE: tl.constexpr):
    FIELDS: tl.constexpr = 16 // PLANE
    MASK: tl.constexpr = ((1 << PLANE) - 1) * 0x10001
    x = ()
    for t in tl.static_range(4):
        fields = words[FIRST + 2 * t // FIELDS] >> (2 * t % FIELDS * PLANE)
        codes = side_by_side4(fields & MASK, fields & (MASK << PLANE))
        x += (paired4(tl.dot(codes, matrix, centre, out_dtype=tl.float16)),)
    for stage in tl.static_range(2):
        y = ()
        for i in tl.static_range(4):
            if i & (1 << stage):
                y += (by_twos("sub", x[i - (1 << stage)], x[i]),)
            else:
                y += (by_twos("add", x[i], x[i + (1 << stage)]),)
        x = y
    return x


@triton.jit
def turned_scores4(
    words, scales, zeros, queries, zero_queries, signs, matrix, centre, angles, D: tl.constexpr,
    K_BLOCKS: tl.constexpr, K_PER: tl.constexpr, CHUNKS: tl.constexpr, PLANE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 128
    OWN: tl.constexpr = D // 64
    W: tl.constexpr = zeros.shape[0]
    turns, firsts = angles
    zero = halves(pair(zeros, zeros), tl.float16)
    x = zero * halves(firsts[0], tl.float16)
    y = zero * halves(firsts[HALF - 1], tl.float16)
    zero = tl.reshape(tl.permute(tl.join(x, y), 0, 1, 2, 4, 3), [W, 16, 16])
    zero_query = side_by_side(zero_queries[0], zero_queries[HALF - 1] if HALF > 1 else zero_queries[0] * 0, COLUMNS)
    zero_query = tl.broadcast_to(tl.trans(zero_query)[None], [W, 16, COLUMNS])
    scores = tl.dot(zero, zero_query, tl.zeros([W, 16, COLUMNS], tl.float32))
    for i in tl.static_range(K_BLOCKS):
        x = transformed4(words, matrix, centre, i * CHUNKS, PLANE)
        part = tl.zeros([W, 16, COLUMNS], tl.float32)
        for o in tl.static_range(HALF):
            for a in tl.static_range(4):
                for c in tl.static_range(2):
                    query = tl.broadcast_to(queries[((i % OWN * HALF + o) * 4 + a) * 2 + c][None], [W, 16, COLUMNS])
                    part = tl.dot(by_twos("mul", x[a], turns[o * 4 + a][c]), query, part)
        part *= wide(scales[i // K_PER])
        scores += part if i < OWN else part * signs[i // OWN][None, None, :]
    return scores


@triton.jit(do_not_specialize=["q_stride_t", "q_stride_h", "B", "S", "Tq", "SPLITS", "unit"])
def rotatekv_few4_fwd_kernel(
    q, q_stride_t, q_stride_h, q_offsets, seq_offsets, page_offsets, page_table, order,
    k_codes, k_ranges, v_codes, v_ranges,
    position_table, time_table, cells, timestamps, query_timestamps, near, far, angles,
    out, lse, B, S, Tq, SPLITS, alpha, scale, inverse_n, unit,
    HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr,
    K_BLOCKS: tl.constexpr, K_WORDS: tl.constexpr, K_GROUPS: tl.constexpr, V_BLOCKS: tl.constexpr,
    V_WORDS: tl.constexpr, V_GROUPS: tl.constexpr, HAS_ORDER: tl.constexpr, SOFTMAX: tl.constexpr, ROPE: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, PAIRS: tl.constexpr, BQ: tl.constexpr, FAST: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
    LSE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """One part of BQ queries, of one head group; out and lse: [SPLITS, Tq, H, ...], or the final ones."""
    C: tl.constexpr = D * G
    CV: tl.constexpr = V * G
    COLUMNS: tl.constexpr = PAIRS * BQ
    LEVELS: tl.constexpr = (1 << BITS) - 1
    FIELDS: tl.constexpr = 16 // BITS
    NW: tl.constexpr = V_BLOCKS * V_WORDS
    R: tl.constexpr = 16
    DTYPE: tl.constexpr = q.dtype.element_ty
    SLACK: tl.constexpr = 8.0 if tl.bfloat16 == DTYPE else 0.0  # fp16 has no room for it
    slot = tl.program_id(0) // (SPLITS * HG)
    if ALONE:
        b = sequence_of(q_offsets, slot, B)
        first_query = slot.to(tl.int64)
        asked_count = 1
        q_tile = 0
    else:
        b, first_query, asked_count, q_tile = locate(q_offsets, slot, B, BQ)
        if q_tile * BQ >= asked_count:
            return
    split = tl.program_id(0) % SPLITS
    group = tl.program_id(0) // SPLITS % HG
    if HAS_ORDER:
        order += group * C
    column = tl.arange(0, COLUMNS)
    index = q_tile * BQ + column // PAIRS
    real = index < asked_count
    query = first_query + index
    head = group * G + column % PAIRS * G // PAIRS
    own_group = column % PAIRS * V_GROUPS // PAIRS
    begin = tl.load(seq_offsets + b).to(tl.int64)
    length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
    asked = tl.zeros([COLUMNS], tl.int64)
    if HAS_TIME:
        asked = tl.load(query_timestamps + query, real, 0)
    tables = (position_table, time_table, cells, timestamps)

    # Queries are divided by their greatest element, so that fp16 holds them. A code is 2 ** -24 of itself in fp16, and
    # more the higher its place: what takes that off is exact.
    place = tl.arange(0, 64)
    permuted, field = key_channels(BITS)
    BACK: tl.constexpr = 512
    CHUNKS: tl.constexpr = K_WORDS // 4
    K_PER: tl.constexpr = K_BLOCKS * CHUNKS // K_GROUPS
    shrink = power(15 - field % (10 // BITS) * BITS)
    queries = ()
    q_sums = ()
    most = tl.zeros([COLUMNS], tl.float32)
    if ROPE:
        signs = ()
        for g in tl.static_range(G):
            signs += (sign(head - group * G, g),)
        queries, zero_queries, most = turning_queries(
            q, query, head, head - group * G, real, length, near, far, q_stride_t, q_stride_h, scale * 64, unit, D,
            COLUMNS, K_BLOCKS,
        )  # fmt: skip
        # 16 channels in the order of `side_by_side`; the second field's codes are one place higher.
        k = tl.arange(0, 16)
        matrix = sign((k // 2 % 2 * 8 + k // 4 * 2 + k % 2)[:, None], k[None, :])
        matrix = (matrix * power(15 - k // 2 % 2 * BITS)[:, None]).to(tl.float16)
        centre = tl.where((k == 0)[None, :], -8 * LEVELS / BACK, tl.zeros([R, 16], tl.float32)).to(tl.float16)
        q_scale = most * alpha
        matrix = tl.broadcast_to(matrix[None], [W, 16, 16])
        centre = tl.broadcast_to(centre[None], [W, 16, 16])
    else:
        turned = ()
        for i in tl.static_range(K_BLOCKS):
            channel = i * 64 + place
            if HAS_ORDER:
                channel = tl.load(order + channel).to(tl.int32)
            x = load_queries(q, query, head, real, channel, group * G, q_stride_t, q_stride_h, D)
            for c in tl.static_range(CHUNKS):
                matrix = sign(place[:, None], (c * (64 // CHUNKS) + permuted)[None, :]).to(DTYPE)
                turned += (tl.dot(tl.trans(x), matrix),)
        turned = butterfly(turned, K_BLOCKS, CHUNKS)
        for i in tl.static_range(K_BLOCKS * CHUNKS):
            most = tl.maximum(most, tl.max(tl.abs(turned[i]), 1))
        divisor = 1.0 / tl.where(most > 0.0, most, 1.0)
        for g in tl.static_range(K_GROUPS):
            total = tl.zeros([COLUMNS], tl.float32)
            for i in tl.static_range(K_PER):
                low = (turned[g * K_PER + i] * divisor[:, None]).to(tl.float16).to(tl.float32)
                queries += ((low * shrink[None, :]).to(tl.float16),)
                total += tl.sum(low, 1)
            q_sums += (total / BACK,)
        q_scale = most * (scale * alpha * BACK)

    sums = tl.zeros([W, CV, COLUMNS], tl.float32)
    scaled = tl.zeros([W, R, COLUMNS], tl.float32)
    constant = tl.zeros([W, R, COLUMNS], tl.float32)
    totals = tl.zeros([W, R, COLUMNS], tl.float32)
    greatest = tl.full([COLUMNS], float("-inf"), tl.float32)
    packed = tl.maximum(length - S, 0)
    pages = (packed + R - 1) // R
    tiles = (pages + W - 1) // W
    per = (tiles + SPLITS - 1) // SPLITS
    page_table += tl.load(page_offsets + b)
    first = split * per
    last = tl.minimum(tiles, first + per)
    if first < last:
        jj = tl.arange(0, 4)[:, None, None, None]
        gg = tl.arange(0, 8)[None, :, None, None]
        hh = tl.arange(0, 2)[None, None, None, :]
        ww = tl.arange(0, W)[None, None, :, None]
        flat = (jj + gg) * (unit - 1) + ww * unit
        last_page = pages - 1
        page = tl.load(page_table + tl.minimum(first * W + flat, last_page))
        if not ROPE:
          next_keys, next_ranges, next_values = load_page(
            k_codes, k_ranges, v_codes, v_ranges, page, jj, gg, hh, group, unit, PAIRS, HG, K_BLOCKS, K_WORDS, K_GROUPS,
            V_BLOCKS, V_WORDS, V_GROUPS, False,
          )
          page = tl.load(page_table + tl.minimum((first + 1) * W + flat, last_page))
        rr = tl.arange(0, W)[:, None] * R + tl.arange(0, R)[None, :]
        place8 = tl.arange(0, 2)[:, None, None, None] * 8 + tl.arange(0, W)[None, :, None, None] * R + tl.arange(0, 8)[None, None, :, None]
        flat8 = (jj * (unit - 1)) + gg + ww * R + hh * 8
        for tile in tl.range(first, last, num_stages=STAGES):
            if ROPE:
                page = tl.load(page_table + tl.minimum(tile * W + flat, last_page))
                keys, ranges, values = load_page(
                    k_codes, k_ranges, v_codes, v_ranges, page, jj, gg, hh, group, unit, PAIRS, HG, K_BLOCKS, K_WORDS,
                    K_GROUPS, V_BLOCKS, V_WORDS, V_GROUPS, True,
                )
            else:
                keys = next_keys
                ranges = next_ranges
                values = next_values
                next_keys, next_ranges, next_values = load_page(
                    k_codes, k_ranges, v_codes, v_ranges, page, jj, gg, hh, group, unit, PAIRS, HG, K_BLOCKS, K_WORDS,
                    K_GROUPS, V_BLOCKS, V_WORDS, V_GROUPS, False,
                )
                page = tl.load(page_table + tl.minimum((tile + 2) * W + flat, last_page))
            behind = tile * (W * R) + rr
            inside = behind < packed
            if ROPE:
                start = S + tile * (W * R)
                turns = load_turns4(angles, start + place8, start + flat8, D // 128)
                small_scales = ()
                for gr in tl.static_range(K_GROUPS):
                    k_scale, k_zero = halves_of(ranges[gr])
                    small_scales += (k_scale * (scale * BACK),)
                k_scale, k_zero = halves_of(ranges[K_GROUPS])
                middle = k_zero + LEVELS / 2 * k_scale
                scores = turned_scores4(keys, small_scales, middle, queries, zero_queries, signs, matrix, centre,
                                        turns, D, K_BLOCKS, K_PER // CHUNKS, CHUNKS, BITS, COLUMNS)  # fmt: skip
            else:
                scores = tl.zeros([W, R, COLUMNS], tl.float32)
                for gr in tl.static_range(K_GROUPS):
                    k_scale, k_zero = halves_of(ranges[gr])
                    part = tl.zeros([W, R, COLUMNS], tl.float32)
                    for i in tl.static_range(gr * K_PER, (gr + 1) * K_PER):
                        query_t = tl.broadcast_to(tl.trans(queries[i])[None], [W, 128 // BITS, COLUMNS])
                        part = tl.dot(key_codes4(keys[i], unit, BITS), query_t, part)
                    scores += wide(k_scale) * part + wide(k_zero) * q_sums[gr][None, None, :]
            scores = scores * q_scale[None, None, :]
            scores = tl.where(inside[:, :, None], scores, float("-inf"))
            above = tl.where(scores > (greatest + SLACK)[None, None, :], 1.0, 0.0)
            if tl.max(above, None) > 0:
                new = tl.maximum(greatest, tl.max(tl.max(scores, 1), 0))
                factor = tl.exp(greatest - tl.where(new == float("-inf"), 0.0, new))[None, None, :]
                greatest = new
                sums *= factor
                scaled *= factor
                constant *= factor
                totals *= factor
            weights = tl.exp(scores - tl.where(greatest == float("-inf"), 0.0, greatest)[None, None, :])
            totals += weights
            even_scale, even_zero = halves_of(values[4])
            odd_scale, odd_zero = halves_of(values[5])
            v_scale = tl.reshape(tl.join(even_scale, odd_scale), [W, R, COLUMNS])
            v_zero = tl.reshape(tl.join(even_zero, odd_zero), [W, R, COLUMNS])
            low_weights = (weights * v_scale).to(DTYPE)
            scaled += low_weights.to(tl.float32)
            constant += weights * (v_zero + LEVELS / 2 * v_scale)
            sums = tl.dot(value_codes4(values, unit, BITS, DTYPE, NW), low_weights, sums)

    sums = tl.sum(sums, 0)
    scaled = tl.sum(scaled, 0)
    constant = tl.sum(constant, 0)
    totals = tl.sum(totals, 0)
    total = tl.sum(totals, 0)
    row = split * Tq.to(tl.int64) + query
    divisor = tl.where(total > 0.0, total, 1.0) if SOFTMAX else tl.full([COLUMNS], 1.0, tl.float32)
    m = tl.arange(0, CV)
    field = m // (2 * NW)
    half = m // NW % 2
    word = m % NW
    above = tl.full([CV], LEVELS / 2, tl.float32)
    if tl.bfloat16 == DTYPE:
        above += power(7 - field % (7 // BITS) * BITS)
    if tl.float16 == DTYPE:
        sums *= power(24 - field % (10 // BITS) * BITS)[:, None]
    channel = word // V_WORDS * 64 + ((word % V_WORDS // 4 * FIELDS + field) * 4 + word % 4) * 2 + half
    x = sums - above[:, None] * tl.sum(scaled, 0)[None, :] + tl.sum(constant, 0)[None, :]
    x = x / divisor[None, :] if SOFTMAX else x * inverse_n
    own = (channel * PAIRS // CV)[:, None] == (column % PAIRS)[None, :]
    pointers = out + (row * (HG * G) + head)[None, :] * V + (channel % V)[:, None]
    tl.store(pointers, x.to(out.dtype.element_ty), own & real[None, :])
    if LSE:
        first_of_head = column % PAIRS % (PAIRS // G) == 0
        value = tl.where(total > 0.0, greatest + tl.log(divisor), float("-inf"))
        tl.store(lse + row * (HG * G) + head, value, real & first_of_head)
