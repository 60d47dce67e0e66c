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

from hstu_sparse.pages.codec import butterfly, halves_of, sign
from hstu_sparse.rotatekv.attention import biased, load_queries
from hstu_sparse.rotatekv.turning import halves, load_turns, turned_scores, turning_queries
from hstu_sparse.tiles import locate, sequence_of, silu


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
def load_keys(
    k_codes, k_ranges, row, unit, K_BLOCKS: tl.constexpr, K_WORDS: tl.constexpr, K_GROUPS: tl.constexpr,
    BY_BLOCK: tl.constexpr,
):  # fmt: skip
    """All that is kept of a page's keys: words [16, 4] by block and chunk, scales and zeros in an int32 [16] by group.

    BY_BLOCK: the last of these is [16, 4], by block.
    unit: 1, which the compiler does not know. Where it cannot tell what lies side by side it gives each thread one word
    of a tensor, row by row, and so the words where a product wants them.
    """
    R: tl.constexpr = 16
    r = tl.arange(0, R)
    four = tl.arange(0, 4)
    base = k_codes + row * (K_BLOCKS * R * K_WORDS) + ((four * unit)[:, None] + (r * K_WORDS * unit)[None, :])
    words = ()
    for i in tl.static_range(K_BLOCKS):
        for c in tl.static_range(K_WORDS // 4):
            words += (tl.trans(tl.load(base + (i * R * K_WORDS + c * 4))),)
    ranges = ()
    at = row * (K_GROUPS * R)
    for g in tl.static_range(K_GROUPS):
        ranges += (tl.load(k_ranges + at + r + g * R),)
    if BY_BLOCK:
        of_block = tl.minimum(four, K_BLOCKS - 1) * K_GROUPS // K_BLOCKS * R
        ranges += (tl.trans(tl.load(k_ranges + at + ((of_block * unit)[:, None] + (r * unit)[None, :]))),)
    return words, ranges


@triton.jit
def load_values(
    v_codes, v_ranges, row, own_group, unit, V_BLOCKS: tl.constexpr, V_WORDS: tl.constexpr,
    V_GROUPS: tl.constexpr,
):  # fmt: skip
    """Of a page's values: words [NW, 4] of tokens 4j + i by i, scales and zeros in int32 [16, columns]."""
    R: tl.constexpr = 16
    word = tl.arange(0, V_BLOCKS * V_WORDS)
    word = ((word // V_WORDS) * (R * V_WORDS) + word % V_WORDS) * unit
    token = (4 * V_WORDS) * tl.arange(0, 4) * unit
    base = v_codes + row * (V_BLOCKS * R * V_WORDS) + (token[:, None] + word[None, :])
    words = ()
    for i in tl.static_range(4):
        words += (tl.trans(tl.load(base + i * V_WORDS)),)
    at = row * (V_GROUPS * R) + (tl.arange(0, R)[:, None] + (own_group * R)[None, :])
    return words, tl.load(v_ranges + at)


@triton.jit(do_not_specialize=["q_stride_t", "q_stride_h", "B", "S", "Tq", "SPLITS", "unit"])
def rotatekv_few_fwd_kernel(
    q, q_stride_t, q_stride_h, q_offsets, seq_offsets, page_offsets, page_table, order,
    k_codes, k_ranges, v_codes, v_ranges,
    position_table, time_table, cells, timestamps, query_timestamps, near, far, angles,
    out, lse, B, S, Tq, SPLITS, score_scale, scale, inverse_n, unit,
    HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr,
    K_BLOCKS: tl.constexpr, K_WORDS: tl.constexpr, K_GROUPS: tl.constexpr, V_BLOCKS: tl.constexpr,
    V_WORDS: tl.constexpr, V_GROUPS: tl.constexpr, HAS_ORDER: tl.constexpr, SOFTMAX: tl.constexpr, ROPE: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, PAIRS: tl.constexpr, BQ: tl.constexpr, FAST: tl.constexpr,
    LSE: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """One part of BQ queries, or of a SINGLE one, of one head group.

    out and lse: [SPLITS, Tq, H, ...], or the final ones. A processor has room for eight programs, but where some end at
    once, as those of slots without queries do (see `locate`), it takes fewer. SINGLE has no such slots.
    """
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
    if SINGLE:
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
        q_scale = most * score_scale
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
        q_scale = most * (scale * score_scale * BACK)

    sums = tl.zeros([CV, COLUMNS], tl.float32)
    scaled = tl.zeros([R, COLUMNS], tl.float32)
    constant = tl.zeros([R, COLUMNS], tl.float32)
    totals = tl.zeros([R, COLUMNS], tl.float32)
    greatest = tl.full([COLUMNS], float("-inf"), tl.float32)
    packed = tl.maximum(length - S, 0)
    tiles = (packed + R - 1) // R
    per = (tiles + SPLITS - 1) // SPLITS
    page_table += tl.load(page_offsets + b)
    first = split * per
    last = tl.minimum(tiles, first + per)
    if first < last:
        r = tl.arange(0, R)
        # While one page is worked on, all of the next is under way, and it is known which page comes then. With RoPE
        # registers are too few for that, and the next page is on its way to shared memory.
        if not ROPE:
            row = tl.load(page_table + first).to(tl.int64) * HG + group
            next_page = tl.load(page_table + tl.minimum(first + 1, last - 1))
            next_keys = load_keys(k_codes, k_ranges, row, unit, K_BLOCKS, K_WORDS, K_GROUPS, False)
            next_values = load_values(v_codes, v_ranges, row, own_group, unit, V_BLOCKS, V_WORDS, V_GROUPS)
        for tile in tl.range(first, last, num_stages=2 if ROPE else 1):
            if ROPE:
                row = tl.load(page_table + tile).to(tl.int64) * HG + group
                keys, ranges = load_keys(k_codes, k_ranges, row, unit, K_BLOCKS, K_WORDS, K_GROUPS, True)
                values = load_values(v_codes, v_ranges, row, own_group, unit, V_BLOCKS, V_WORDS, V_GROUPS)
            else:
                keys, ranges = next_keys
                values = next_values
                row = next_page.to(tl.int64) * HG + group
                next_page = tl.load(page_table + tl.minimum(tile + 2, last - 1))
                next_keys = load_keys(k_codes, k_ranges, row, unit, K_BLOCKS, K_WORDS, K_GROUPS, False)
                next_values = load_values(v_codes, v_ranges, row, own_group, unit, V_BLOCKS, V_WORDS, V_GROUPS)
            behind = tile * R + r
            inside = behind < packed
            scales = ()
            zeros = ()
            for g in tl.static_range(K_GROUPS):
                k_scale, k_zero = halves_of(ranges[g])
                scales += (k_scale,)
                zeros += (k_zero,)
            if ROPE:
                turns = load_turns(angles, S + behind, D // 128, R)
                small_scales = ()
                for g in tl.static_range(K_GROUPS):
                    small_scales += (scales[g] * (scale * BACK),)
                k_scale, k_zero = halves_of(ranges[K_GROUPS])
                middle = k_zero + LEVELS / 2 * k_scale
                scores = turned_scores(keys, small_scales, middle, queries, zero_queries, signs, matrix, centre,
                                       turns, D, K_BLOCKS, K_PER // CHUNKS, CHUNKS, BITS, R, COLUMNS)  # fmt: skip
            else:
                scores = tl.zeros([R, COLUMNS], tl.float32)
                for g in tl.static_range(K_GROUPS):
                    part = tl.zeros([R, COLUMNS], tl.float32)
                    for i in tl.static_range(g * K_PER, (g + 1) * K_PER):
                        query_t = queries[i]
                        part = tl.dot(key_codes(keys[i], unit, BITS), tl.trans(query_t), part)
                    scores += scales[g][:, None] * part + zeros[g][:, None] * q_sums[g][None, :]
            position = S + behind
            scores = biased(
                scores * q_scale[None, :], inside, position, begin + position, length, tables, asked, HAS_POSITION,
                HAS_TIME,
            )  # fmt: skip
            if SOFTMAX:
                scores = tl.where(inside[:, None], scores, float("-inf"))
                most = tl.max(scores, 0)
                # What was summed is scaled anew only where weights would grow beyond e ** SLACK.
                if tl.max((most > greatest + SLACK).to(tl.int32), 0) > 0:
                    new = tl.maximum(greatest, most)
                    factor = tl.exp(greatest - tl.where(new == float("-inf"), 0.0, new))[None, :]
                    greatest = new
                    sums *= factor
                    scaled *= factor
                    constant *= factor
                    totals *= factor
                weights = tl.exp(scores - tl.where(greatest == float("-inf"), 0.0, greatest)[None, :])
                totals += weights
            else:
                weights = tl.where(inside[:, None], silu(scores, FAST), 0.0)
            v_words, v_range = values
            v_scale, v_zero = halves_of(v_range)
            low_weights = (weights * v_scale).to(DTYPE)
            scaled += low_weights.to(tl.float32)
            constant += weights * (v_zero + LEVELS / 2 * v_scale)
            v_now = value_codes(v_words, unit, BITS, DTYPE, NW)
            sums = tl.dot(v_now, low_weights, sums)

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
