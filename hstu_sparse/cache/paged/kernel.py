"""Define the kernels of attention of new tokens to the pages of their sequence, and of the merge of parts.

Letters: Tq new tokens, B sequences, P columns of the page table, S sink tokens, H heads, D query/key and V value head
size, G heads of a head group, C its key channels, R positions of a tile.

A program has BQ new tokens of one sequence for HEADS heads of one head group, in rows head * BQ + token. It loops over
a part of the sequence's pages in tiles of R positions. If there are few new tokens, a program has all heads of a group,
so that each code is unpacked once. Uncompressed pages have groups of one head (G = 1).

The kernel transforms queries instead of transforming cached keys back. Sylvester's matrix of C = G * D channels is the
Kronecker product of those of G and D, so that

    q[h] . k[h] = C^(-1/2) * sum over heads g of the group of sign(h, g) * (Hadamard(q[h]) . k'[g])

and the transformed query is multiplied by the codes k' of the whole group. With few rows (SCALED) scale and zero are
applied to the products, otherwise to the codes. RoPE does not commute with the transform: with RoPE each tile of keys
is restored. Position 64 a + r is rotated by the angles of 64 a and of r, so that two small tables suffice.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.bias.scores import table_bias
from hstu_sparse.cache.codec import Pages, load_codes, sign, unpack_halves
from hstu_sparse.cache.decode import load_keys, load_values, restored_blocks
from hstu_sparse.tiles.rows import load_rows, locate, opaque, silu


@triton.jit(do_not_specialize=["P"])
def candidate_bias_kernel(
    out, pages, lengths, num_context, timestamps, bias, P, PAGE: tl.constexpr, SINKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write out [B, P * PAGE + 1] fp32: the bias of candidates with cached token s, and at lengths[b] with themselves.

    All candidates of a sequence have the same position and time, so that their bias depends on the key only. A look-up
    in the attention kernel would be repeated for every column of each thread (Triton 3.6, 3.7): 230 loads of 4 bytes in
    place of 5 for 128 candidates. Each program writes BLOCK positions; entries after lengths[b] are not written.
    """
    b = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + b).to(tl.int32)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) * BLOCK > length:
        return
    candidate_time = 0
    times = 0
    if bias.time is not None:
        candidate_time = tl.load(bias.query_times + b)
        cached = position < length
        page = tl.load(pages + b * P + (1 if SINKS else 0) + position // PAGE, cached, 0).to(tl.int64)
        times = tl.load(timestamps + page * PAGE + position % PAGE, cached, 0)
        times = tl.where(cached, times, tl.load(bias.key_times + b))
    inside = position <= length
    distance = length - position
    if num_context is not None:
        front = tl.load(num_context + b).to(tl.int32)
        distance = tl.maximum(length, front - 1) - tl.maximum(position, front - 1)
    values = table_bias(bias, distance, inside, candidate_time, times)[0]
    tl.store(out + b * (P * PAGE + 1) + position, values, inside)


# The maximum number of elements of the sign matrices of a channel order (64 KB). The compiler keeps these loop
# invariants in shared memory; those of 1,024 channels would need 512 KB.
MAX_SIGNS = tl.constexpr(32768)


class History(NamedTuple):
    """The cached keys and values.

    source      their tensors
    table       [B, P], the page table; None if token n of sequence b is page offsets[b] + n
    offsets     [B+1], without a table
    timestamps  of each slot of a page, with a time bias
    order       [H / G, C], the inverse permutation of the channels, or None
    near, far   [.., 2, D / 2], cos and sin of the angles of positions 0, 1, .. and 0, 64, 128, .. (RoPE), or None
    """

    source: Pages
    table: torch.Tensor | None
    offsets: torch.Tensor | None = None
    timestamps: torch.Tensor | None = None
    order: torch.Tensor | None = None
    near: torch.Tensor | None = None
    far: torch.Tensor | None = None


@triton.jit
def locate_tokens(history, first, position, inside, form, CANDIDATES: tl.constexpr):
    """Return (page, slot) of positions. Dropped tokens, whose page is -1, get page 0.

    first: pointer to the sequence's row of the table; without a table the sequence's first token.
    """
    if history.table is None:
        return first + position, position * 0
    else:
        page = tl.load(first + (1 if form.SINKS else 0) + position // form.PAGE, inside, 0)
        if not CANDIDATES:
            page = tl.maximum(page, 0)
        return page.to(tl.int64), position % form.PAGE


@triton.jit
def load_group(x, token, head, mask, channel, first_head, SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """Load channels of a head group of x (`Rows`), [rows, channels]; channels of other heads than the row's are 0."""
    member = channel // SIZE
    belongs = mask[:, None] & (first_head + member[None, :] == head[:, None]) & (channel < CHANNELS)[None, :]
    row = x.pointer + token[:, None] * x.stride_t + head[:, None].to(tl.int64) * x.stride_h
    return tl.load(row + (channel % SIZE)[None, :], belongs, 0.0)


@triton.jit
def rotated_queries(q_rows, member, first_member, order, rotation, form, HEADS: tl.constexpr):
    """Return a tuple of blocks [rows, BW] of the transformed queries."""
    DTYPE: tl.constexpr = q_rows.dtype
    BW: tl.constexpr = form.K_BLOCK
    BLOCKS: tl.constexpr = form.K_BLOCKS
    place = tl.arange(0, q_rows.shape[1])
    blocks = ()
    for b in tl.static_range(BLOCKS):
        channel = b * BW + tl.arange(0, BW)
        if order is None:
            matrix = sign(place[:, None], (channel % form.CODED)[None, :]).to(DTYPE)
            x = tl.dot(q_rows, matrix, input_precision="ieee") * rotation
            x *= sign(member[:, None], (channel // form.CODED)[None, :])
        else:
            x = tl.zeros([q_rows.shape[0], BW], tl.float32)
            for h in tl.static_range(HEADS):
                permuted = tl.load(order + (first_member + h) * form.D + place, place < form.D, 0)
                matrix = sign(permuted[:, None], channel[None, :]).to(DTYPE)
                product = tl.dot(q_rows, matrix, input_precision="ieee") * rotation
                x = tl.where((member == first_member + h)[:, None], product, x)
        blocks += (x.to(DTYPE),)
    return blocks


@triton.jit
def rope_keys(x, start, near, far, D: tl.constexpr, OW: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr = 64):
    """Apply RoPE to a tuple of OUT blocks [R, PAD] fp32 of keys, at the positions from `start` on.

    OW: the number of channels of a block without padding.
    """
    HALF: tl.constexpr = D // 2
    STEP: tl.constexpr = HALF // OW
    step = tl.arange(0, x[0].shape[0])[:, None]
    place = tl.arange(0, x[0].shape[1])
    rotated = ()
    for o in tl.static_range(OUT):
        angle = tl.where(place < OW, o * OW % HALF + place, 0)[None, :]
        n = near + (start % TILE + step) * (2 * HALF) + angle
        f = far + (start // TILE) * (2 * HALF) + angle
        a, b, c, d = tl.load(n), tl.load(n + HALF), tl.load(f), tl.load(f + HALF)
        cos, sin = a * c - b * d, a * d + b * c
        if o // STEP % 2 == 0:
            rotated += (x[o] * cos - x[o + STEP] * sin,)
        else:
            rotated += (x[o] * cos + x[o - STEP] * sin,)
    return rotated


@triton.jit
def visible(inside, at, token, front, window, WINDOW: tl.constexpr, CONTEXT: tl.constexpr):
    """Return (distances in positions, visible pairs) [rows, R] of queries `at` and keys `token`.

    front: the number of context tokens.
    """
    distance = at[:, None] - token[None, :]
    seen = distance > 0
    if CONTEXT:
        near = token[None, :] < front
        together = near & (at < front)[:, None] & (distance != 0)
        distance = tl.maximum(at, front - 1)[:, None] - tl.maximum(token, front - 1)[None, :]
        if WINDOW:
            seen = seen & (near | (distance < window))
        seen = seen | together
    elif WINDOW:
        seen = seen & (distance < window)
    return distance, inside[None, :] & seen


@triton.jit
def add_bias(scores, distance, seen, inside, token, query_time, cached_times, bias, candidates):
    """Return scores [rows, R] plus their bias. cached_times: (pointer to the timestamps, offsets of the keys)."""
    if candidates is not None:
        scores += tl.load(candidates + token, inside, 0.0)[None, :]
    elif bias.position is not None or bias.time is not None:
        times = 0
        if bias.time is not None:
            times = tl.load(cached_times[0] + cached_times[1], inside, 0)[None, :]
        scores += table_bias(bias, distance, seen, query_time, times)[0]
    return scores


@triton.jit
def attention_weights(scores, seen, score_max, total, SOFTMAX: tl.constexpr, FAST: tl.constexpr):
    """Return (weights [rows, R], new score_max, new total, the factor that rescales earlier sums)."""
    factor = total * 0.0 + 1.0
    if SOFTMAX:
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(score_max, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        factor = tl.exp(score_max - safe)
        weights = tl.exp(scores - safe[:, None])
        total = total * factor + tl.sum(weights, 1)
        score_max = new
    else:
        weights = tl.where(seen, silu(scores, FAST), 0.0)
    return weights, score_max, total, factor


@triton.jit(do_not_specialize=["B", "P", "S", "Tq", "SPLITS", "window"])
def paged_attention_fwd_kernel(
    q, k, v, q_offsets, lengths, num_context, history, bias, candidates, out, lse, B, P, S, Tq, SPLITS, window,
    score_scale, rotation, inverse_n,
    FORM: tl.constexpr, OFFSET: tl.constexpr, PAD_D: tl.constexpr, OUT_V: tl.constexpr, CANDIDATES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTMAX: tl.constexpr, SCALED: tl.constexpr, HEADS: tl.constexpr, BQ: tl.constexpr,
    R: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention of a tile of new tokens to a part of the pages; out, lse: [SPLITS, Tq, H, ...].

    Part 0 also has the sinks and the new tokens themselves. With one part, out and lse are the final results.

    q, k, v: `Rows`; without k and v, new tokens do not attend to themselves. num_context: [B] or None. history:
    `History`. bias: `KernelBias`. candidates: the result of `candidate_bias_kernel`, in place of a bias. WINDOW: tokens
    attend to the latest `window` positions and to context. OUT_V: the number of blocks of values of a program.
    """
    DTYPE: tl.constexpr = q.pointer.dtype.element_ty
    H: tl.constexpr = FORM.H
    G: tl.constexpr = FORM.G
    D: tl.constexpr = FORM.D
    V: tl.constexpr = FORM.V
    K_BLOCK: tl.constexpr = FORM.K_BLOCK
    K_BLOCKS: tl.constexpr = FORM.K_BLOCKS
    V_BLOCK: tl.constexpr = FORM.V_BLOCK
    PAGE: tl.constexpr = FORM.PAGE
    ROPE: tl.constexpr = history.near is not None
    ROWS: tl.constexpr = HEADS * BQ
    CV: tl.constexpr = V * G
    CONTEXT: tl.constexpr = num_context is not None
    LEVELS: tl.constexpr = (1 << FORM.BITS) - 1
    source = history.source
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
    # No row attends to positions from `last` on.
    last = length if CANDIDATES else length + tl.minimum(count, q_tile * BQ + BQ) - 1
    front = tl.load(num_context + b).to(tl.int32) if CONTEXT else 0
    if CONTEXT and not CANDIDATES:  # new context tokens attend to all context tokens
        last = tl.where(length + q_tile * BQ < front, tl.maximum(last, tl.minimum(front, length + count)), last)
    begin = 0  # no row attends to positions before `begin`, except to context
    if WINDOW:
        begin = tl.maximum((length if CANDIDATES else length + q_tile * BQ) - window + 1, 0)
    query_time = 0
    if bias.time is not None:
        query_time = tl.load(bias.query_times + query, real, 0)[:, None]
    if candidates is not None:
        candidates += b.to(tl.int64) * (P * PAGE + 1)
    if history.table is not None:
        first = history.table + b.to(tl.int64) * P
        if not CANDIDATES:
            last = tl.where(tl.load(first) < 0, 0, last)  # a row of -1 pads the batch
    else:
        first = tl.load(history.offsets + b).to(tl.int64)
    order = history.order
    if order is not None:
        order += group * (D * G)
    # The first block of values of this program, which has all blocks or those of its head.
    first_v = first_member * V // V_BLOCK if OUT_V != FORM.V_BLOCKS else 0

    column = tl.arange(0, PAD_D)[None, :]
    inside_head = real[:, None] & (column < D)
    q_row = query[:, None] * q.stride_t + head[:, None].to(tl.int64) * q.stride_h
    q_rows = tl.load(q.pointer + q_row + column, inside_head, 0.0)

    # Attention of the new tokens to themselves.
    score_max = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    self_weight = tl.zeros([ROWS], tl.float32)
    if k is not None:  # noqa: SIM102  known to the compiler
        if split == 0:
            k_row = query[:, None] * k.stride_t + head[:, None].to(tl.int64) * k.stride_h
            self_k = tl.load(k.pointer + k_row + column, inside_head, 0.0)
            self_score = tl.sum(q_rows.to(tl.float32) * self_k.to(tl.float32), 1) * score_scale
            if candidates is not None:
                self_score += tl.load(candidates + length)
            elif not CANDIDATES:
                new_time = 0
                if bias.time is not None:
                    new_time = tl.load(bias.key_times + query, real, 0)[:, None]
                none = tl.zeros([ROWS, 1], tl.int32)
                self_score += tl.sum(table_bias(bias, none, real[:, None], query_time, new_time)[0], 1)
            if SOFTMAX:
                score_max = self_score
                total = tl.full([ROWS], 1.0, tl.float32)
                self_weight = total
            else:
                self_weight = silu(self_score, FAST)
    sums = ()
    constants = ()
    for i in tl.static_range(OUT_V):
        if k is not None:
            row_channel = (first_v + i) * V_BLOCK + tl.arange(0, V_BLOCK)
            x = load_group(v, query, head, real & (split == 0), row_channel, group * G, V, CV)
            sums += (x.to(tl.float32) * self_weight[:, None],)
        else:
            sums += (tl.zeros([ROWS, V_BLOCK], tl.float32),)
        constants += (tl.zeros([ROWS, R], tl.float32),)

    if FORM.SINKS:
        # Only part 0 has the sinks.
        sinks = tl.where(split == 0, tl.minimum(S, last), 0)
        sink = tl.load(first).to(tl.int64) * S
        for sink_tile in tl.range((sinks + R - 1) // R, num_stages=1):
            position = sink_tile * R + tl.arange(0, R)
            inside = position < sinks
            scores = tl.zeros([ROWS, R], tl.float32)
            for h in tl.static_range(HEADS):
                base = source.sink_k + (group * G + first_member + h) * D
                key = load_rows(base, sink + position, H * D, inside, D, PAD_D).to(DTYPE)
                product = tl.dot(q_rows, tl.trans(key), input_precision=PRECISION)
                scores = tl.where((row // BQ == h)[:, None], product, scores)
            page, slot = locate_tokens(history, first, position, inside, FORM, CANDIDATES)
            distance, seen = visible(inside, at, position, front, window, WINDOW, CONTEXT)
            scores *= score_scale
            times = history.timestamps, page * PAGE + slot
            scores = add_bias(scores, distance, seen, inside, position, query_time, times, bias, candidates)
            weights, score_max, total, factor = attention_weights(scores, seen, score_max, total, SOFTMAX, FAST)
            low_weights = weights.to(DTYPE)
            new = ()
            for i in tl.static_range(OUT_V):
                channel = (first_v + i) * V_BLOCK + tl.arange(0, V_BLOCK)
                pointers = source.sink_v + (sink + position)[:, None] * (H * V) + (group * CV + channel)[None, :]
                value = tl.load(pointers, inside[:, None] & (channel < CV)[None, :], 0.0).to(DTYPE)
                before = sums[i] * factor[:, None] if SOFTMAX else sums[i]
                new += (tl.dot(low_weights, value, before, input_precision=PRECISION),)
            sums = new

    queries = (q_rows,)
    query_sums = ()
    if ROPE:
        # Keys are restored in blocks of OW channels, each within one half of a head.
        OW: tl.constexpr = K_BLOCK if K_BLOCK < D // 2 else D // 2
        PAD: tl.constexpr = OW if OW > 16 else 16
        OUT: tl.constexpr = HEADS * D // OW
        SPAN: tl.constexpr = (K_BLOCK if K_BLOCK < HEADS * D else HEADS * D) // OW
        queries = ()
        place = tl.arange(0, PAD)
        for o in tl.static_range(OUT):
            key_channel = tl.where(place < OW, first_member * D + o * OW + place, G * D)
            queries += (load_group(q, query, head, real, key_channel, group * G, D, G * D),)
    elif FORM.BITS:
        queries = rotated_queries(q_rows, member, first_member, order, rotation, FORM, HEADS)
        for i in tl.static_range(K_BLOCKS):
            query_sums += (tl.sum(queries[i].to(tl.float32), 1),)
    K_PER: tl.constexpr = K_BLOCKS // FORM.K_GROUPS
    first_tile = S // R if FORM.SINKS else 0
    gap = 0  # the number of tiles between context and the window, which are skipped
    if WINDOW:
        near_tile = tl.maximum(first_tile, begin // R)
        if CONTEXT:
            context_end = tl.minimum(tl.maximum((front + R - 1) // R, first_tile), near_tile)
            gap = near_tile - context_end
        else:
            first_tile = near_tile
    tiles = tl.maximum((last + R - 1) // R - first_tile - gap, 0)
    per = (tiles + SPLITS - 1) // SPLITS
    first_tile += split * per
    for step in range(first_tile, first_tile + tl.minimum(per, tiles - split * per)):
        tile = step + tl.where(step < context_end, 0, gap) if WINDOW and CONTEXT else step
        position = tile * R + tl.arange(0, R)
        inside = position < last
        if FORM.SINKS:
            inside = inside & (position >= S)
        page, slot = locate_tokens(history, first, position, inside, FORM, CANDIDATES)
        page_group = page * (H // G) + group
        scores = tl.zeros([ROWS, R], tl.float32)
        if ROPE or FORM.SPARSE:
            codes, marks, scales, zeros = load_keys(source, page_group, slot, inside, FORM, DTYPE, OFFSET)
            if ROPE:
                first_channel = first_member * D
                if order is not None and K_BLOCKS * OUT * K_BLOCK * PAD > MAX_SIGNS:
                    first_channel += opaque(tile) - tile  # 0, unknown to the compiler
                keys = restored_blocks(
                    codes, marks, scales, zeros, rotation, first_channel, order, FORM, OFFSET, OW, PAD, OUT, SPAN
                )
                keys = rope_keys(keys, tile * R, history.near, history.far, D, OW, OUT)
                for o in tl.static_range(OUT):
                    scores = tl.dot(queries[o], tl.trans(keys[o].to(DTYPE)), scores, input_precision=PRECISION)
            else:
                for i in tl.static_range(K_BLOCKS):
                    key = zeros[i // K_PER][:, None] + scales[i // K_PER][:, None] * codes[i].to(tl.float32)
                    key = tl.where(marks[i] != 0, key, 0.0).to(DTYPE)
                    scores = tl.dot(queries[i], tl.trans(key), scores, input_precision=PRECISION)
        else:
            for i in tl.static_range(K_BLOCKS):
                if FORM.BITS:
                    at_range = (page_group * FORM.K_GROUPS + i // K_PER) * PAGE + slot
                    scale, zero = unpack_halves(tl.load(source.k_ranges + at_range, inside, 0))
                    at_codes = (page_group * K_BLOCKS + i) * PAGE + slot
                    codes = load_codes(source.k, at_codes, inside, FORM.BITS, DTYPE, OFFSET, K_BLOCK, FORM.K_WORDS)
                    zero -= OFFSET * scale
                    if SCALED:
                        part = tl.dot(queries[i], tl.trans(codes), input_precision=PRECISION)
                        scores += part * scale[None, :] + query_sums[i][:, None] * zero[None, :]
                    else:
                        key = (zero[:, None] + scale[:, None] * codes.to(tl.float32)).to(DTYPE)
                        scores = tl.dot(queries[i], tl.trans(key), scores, input_precision=PRECISION)
                else:
                    key = load_rows(source.k, page_group * PAGE + slot, D, inside, D, K_BLOCK).to(DTYPE)
                    scores = tl.dot(queries[i], tl.trans(key), scores, input_precision=PRECISION)
        distance, seen = visible(inside, at, position, front, window, WINDOW, CONTEXT)
        scores *= score_scale
        times = history.timestamps, page * PAGE + slot
        scores = add_bias(scores, distance, seen, inside, position, query_time, times, bias, candidates)
        weights, score_max, total, factor = attention_weights(scores, seen, score_max, total, SOFTMAX, FAST)
        new = ()
        new_constants = ()
        for i in tl.static_range(OUT_V):
            before = sums[i] * factor[:, None] if SOFTMAX else sums[i]
            constant = constants[i]
            if FORM.BITS:
                block = tl.minimum(first_v + i, FORM.V_BLOCKS - 1)
                codes, scale, zero = load_values(source, page_group, slot, inside, block, FORM, DTYPE, OFFSET)
                if SCALED:
                    # Centre the codes at 0, so that rounding the weights adds no more error than without codes.
                    value = (codes - (OFFSET + LEVELS / 2)).to(DTYPE)
                    used = (weights * scale[None, :]).to(DTYPE)
                    if SOFTMAX:
                        constant = constant * factor[:, None]
                    constant += weights * (zero + LEVELS / 2 * scale)[None, :]
                else:
                    value = ((zero - OFFSET * scale)[:, None] + scale[:, None] * codes.to(tl.float32)).to(DTYPE)
                    used = weights.to(DTYPE)
            else:
                value = load_rows(source.v, page_group * PAGE + slot, V, inside, V, V_BLOCK).to(DTYPE)
                used = weights.to(DTYPE)
            new += (tl.dot(used, value, before, input_precision=PRECISION),)
            new_constants += (constant,)
        sums = new
        constants = new_constants

    to = split * Tq.to(tl.int64) + query
    divisor = tl.where(total == 0.0, 1.0, total)
    if lse is not None:
        tl.store(lse + to * H + head, tl.where(total == 0.0, float("-inf"), score_max + tl.log(divisor)), real)
    for i in tl.static_range(OUT_V):
        channel = (first_v + i) * V_BLOCK + tl.arange(0, V_BLOCK)
        x = sums[i]
        if SCALED:
            x += tl.sum(constants[i], 1)[:, None]
        x = x / divisor[:, None] if SOFTMAX else x * inverse_n
        belongs = real[:, None] & ((channel // V)[None, :] == member[:, None])
        pointers = out + (to * H + head)[:, None] * V + (channel % V)[None, :]
        tl.store(pointers, x.to(out.dtype.element_ty), belongs)


@triton.jit(do_not_specialize=["rows", "SPLITS"])
def merge_parts_kernel(parts, part_lse, out, lse, rows, SPLITS, V: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr):
    """Merge parts [SPLITS, rows, V] fp32 into out [rows, V]: their sum, or with part_lse their softmax merge."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    real = row < rows
    column = tl.arange(0, PAD)[None, :]
    inside = real[:, None] & (column < V)
    total = tl.zeros([ROWS, PAD], tl.float32)
    score_max = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    for split in range(SPLITS):
        at = split * rows.to(tl.int64) + row
        x = tl.load(parts + at[:, None] * V + column, inside, 0.0)
        if part_lse is not None:
            split_lse = tl.load(part_lse + at, real, float("-inf"))
            new = tl.maximum(score_max, split_lse)
            safe = tl.where(new == float("-inf"), 0.0, new)
            factor, share = tl.exp(score_max - safe), tl.exp(split_lse - safe)
            total = total * factor[:, None] + x * share[:, None]
            weight = weight * factor + share
            score_max = new
        else:
            total += x
    if part_lse is not None:
        divisor = tl.where(weight == 0.0, 1.0, weight)
        total = total / divisor[:, None]
        if lse is not None:
            tl.store(lse + row, tl.where(weight == 0.0, float("-inf"), score_max + tl.log(divisor)), real)
    tl.store(out + row[:, None] * V + column, total.to(out.dtype.element_ty), inside)
