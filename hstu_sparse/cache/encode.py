"""Define the kernels that write pages: codes of keys and values, uncompressed keys and values, and timestamps.

Letters: T new tokens, B sequences, P columns of a page table, S sink tokens, H heads, D query/key and V value head
size, C key channels of a head group, R tokens of a tile, BW channels of a block.

A program of `write_codes_kernel` has R new tokens of a head group, with a tuple of blocks for their channels. The
stages of the Hadamard transform across blocks then add registers of the same thread.
"""

import triton
import triton.language as tl

from hstu_sparse.cache import codec
from hstu_sparse.tiles.rows import load_head, locate, store_rows


@triton.jit
def rotated_blocks(k, token, mask, first_head, order, scale, form):
    """Return a tuple of the transformed blocks [R, BW] fp32 of the keys of a head group. k: `Rows`."""
    BW: tl.constexpr = form.K_BLOCK
    BLOCKS: tl.constexpr = form.K_BLOCKS
    place = tl.arange(0, BW)
    matrix = codec.sign(place[:, None], place[None, :]).to(k.pointer.dtype.element_ty)
    blocks = ()
    for b in tl.static_range(BLOCKS):
        x = codec.load_block(k, token, mask, first_head, order, b, form.CODED, form.CODED * form.G, BW, form.D)
        blocks += (tl.dot(x, matrix, input_precision="ieee"),)
    blocks = codec.butterfly(blocks, BLOCKS, 1)
    scaled = ()
    for b in tl.static_range(BLOCKS):
        scaled += (blocks[b] * scale,)
    return scaled


@triton.jit
def key_ranges(x, masks, INSET: tl.constexpr, form):
    """Return (scales, zeros), tuples of [R] fp16 for each quantisation group; if SPARSE, of the channels in `masks`."""
    R: tl.constexpr = x[0].shape[0]
    GROUPS: tl.constexpr = form.K_GROUPS
    PER: tl.constexpr = form.K_BLOCKS // GROUPS
    scales = ()
    zeros = ()
    for g in tl.static_range(GROUPS):
        least = tl.full([R], float("inf"), tl.float32)
        most = tl.full([R], float("-inf"), tl.float32)
        for b in tl.static_range(PER):
            low = x[g * PER + b]
            high = low
            if form.SPARSE:
                low = tl.where(masks[g * PER + b] != 0, low, float("inf"))
                high = tl.where(masks[g * PER + b] != 0, high, float("-inf"))
            least = tl.minimum(least, tl.min(low, 1))
            most = tl.maximum(most, tl.max(high, 1))
        scale, zero = codec.value_range(least, most, INSET, (1 << form.BITS) - 1)
        scales += (scale,)
        zeros += (zero,)
    return scales, zeros


@triton.jit
def value_blocks(v, token, mask, first_head, g: tl.constexpr, INSET: tl.constexpr, form):
    """Return (tuple of blocks [R, BW] fp32, scale, zero) of quantisation group g of values. v: `Rows`."""
    R: tl.constexpr = token.shape[0]
    BW: tl.constexpr = form.V_BLOCK
    CV: tl.constexpr = form.V * form.G
    PER: tl.constexpr = form.V_BLOCKS // form.V_GROUPS
    place = tl.arange(0, BW)
    least = tl.full([R], float("inf"), tl.float32)
    most = tl.full([R], float("-inf"), tl.float32)
    blocks = ()
    for i in tl.static_range(g * PER, g * PER + PER):
        x = codec.load_block(v, token, mask, first_head, None, i, form.V, CV, BW, form.V).to(tl.float32)
        blocks += (x,)
        if (i + 1) * BW <= CV:
            least = tl.minimum(least, tl.min(x, 1))
            most = tl.maximum(most, tl.max(x, 1))
        elif i * BW < CV:
            real = (i * BW + place < CV)[None, :]
            least = tl.minimum(least, tl.min(tl.where(real, x, float("inf")), 1))
            most = tl.maximum(most, tl.max(tl.where(real, x, float("-inf")), 1))
    scale, zero = codec.value_range(least, most, INSET, (1 << form.BITS) - 1)
    return blocks, scale, zero


@triton.jit
def store_bitmap(bitmap, row, slot, mask, is_kept, b: tl.constexpr, form):
    """Set the bits of kept channels of block b. row: [R] page and head group, at most two different ones in a tile."""
    column = b * form.K_BLOCK + tl.arange(0, form.K_BLOCK)
    bits = tl.where((is_kept != 0) & mask[:, None], tl.full([1, 1], 1, tl.int64) << slot[:, None].to(tl.int64), 0)
    first = tl.min(tl.where(mask, row, 0x7FFFFFFFFFFFFFFF), 0)
    last = tl.max(tl.where(mask, row, -1), 0)
    if last >= 0:
        word = tl.sum(tl.where((row == first)[:, None], bits, 0), 0)
        tl.atomic_or(bitmap + first * (form.CODED * form.G) + column, word)
        if last != first:
            word = tl.sum(tl.where((row != first)[:, None], bits, 0), 0)
            tl.atomic_or(bitmap + last * (form.CODED * form.G) + column, word)


@triton.jit
def store_sink(x, head, token, target, at, sink, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the rows `token` of a head of x (`Rows`) to the rows `at` of target [.., SIZE], where `sink`."""
    source = token[:, None] * x.stride_t + head.to(tl.int64) * x.stride_h
    for start in tl.static_range(0, SIZE, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = sink[:, None] & (column < SIZE)
        tl.store(target + at[:, None] * SIZE + column, tl.load(x.pointer + source + column, inside, 0.0), inside)


@triton.jit(do_not_specialize=["B", "P", "S"])
def write_codes_kernel(
    k, v, offsets, lengths, pages, order, target, B, P, S, scale,
    FORM: tl.constexpr, INSET: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write the codes of R new tokens of one head group to pages [B, P]. k, v: `Rows`; target: `Pages`.

    New tokens follow `lengths` [B] tokens of their sequences.
    """
    LEVELS: tl.constexpr = (1 << FORM.BITS) - 1
    G: tl.constexpr = FORM.G
    K_BLOCKS: tl.constexpr = FORM.K_BLOCKS
    K_GROUPS: tl.constexpr = FORM.K_GROUPS
    V_GROUPS: tl.constexpr = FORM.V_GROUPS
    b, begin, count, tile = locate(offsets, tl.program_id(0), B, R)
    if tile * R >= count:
        return
    group = tl.program_id(1)
    index = tile * R + tl.arange(0, R)
    real = index < count
    token = begin + index
    position = tl.load(lengths + b).to(tl.int32) + index
    packed = real & (position >= S)
    pages += b.to(tl.int64) * P
    page = tl.load(pages + (1 if FORM.SINKS else 0) + position // FORM.PAGE, packed, 0).to(tl.int64)
    packed = packed & (page >= 0)
    slot = position % FORM.PAGE
    row = page * (FORM.H // G) + group
    if order is not None:
        order += group * (FORM.CODED * G)

    if FORM.SINKS:
        first = tl.load(pages).to(tl.int64) * S
        sink = real & (position < S) & (first >= 0)
        for member in tl.static_range(G):
            head = group * G + member
            at = (first + position) * FORM.H + head
            store_sink(k, head, token, target.sink_k, at, sink, FORM.D, FORM.K_BLOCK)
            store_sink(v, head, token, target.sink_v, at, sink, FORM.V, FORM.V_BLOCK)

    x = rotated_blocks(k, token, packed, group * G, order, scale, FORM)
    masks = x
    if FORM.SPARSE:
        masks = codec.largest_mask(x, FORM.KEPT, K_BLOCKS)
    K_PER: tl.constexpr = K_BLOCKS // K_GROUPS
    scales, zeros = key_ranges(x, masks, INSET, FORM)
    before = tl.zeros([R], tl.int32)
    for i in tl.static_range(K_BLOCKS):
        codes = codec.encode(x[i], scales[i // K_PER], zeros[i // K_PER], LEVELS)
        if FORM.SPARSE:
            at = row * FORM.PAGE + slot
            store_bitmap(target.k_bitmap, row, slot, packed, masks[i], i, FORM)
            codec.store_kept(target.k, at, packed, codes, masks[i], before, FORM.BITS, FORM.KEPT, FORM.K_WORDS)
            before += tl.sum(masks[i], 1)
        else:
            at = (row * K_BLOCKS + i) * FORM.PAGE + slot
            codec.store_codes(target.k, at, packed, codes, FORM.BITS, FORM.K_WORDS)
    for g in tl.static_range(K_GROUPS):
        at = (row * K_GROUPS + g) * FORM.PAGE + slot
        codec.store_range(target.k_ranges + at, packed, scales[g], zeros[g])

    V_PER: tl.constexpr = FORM.V_BLOCKS // V_GROUPS
    CV: tl.constexpr = FORM.V * G
    for g in tl.static_range(V_GROUPS):
        y, scale, zero = value_blocks(v, token, packed, group * G, g, INSET, FORM)
        codec.store_range(target.v_ranges + (row * V_GROUPS + g) * FORM.PAGE + slot, packed, scale, zero)
        for i in tl.static_range(V_PER):
            codes = codec.encode(y[i], scale, zero, LEVELS)
            if (g * V_PER + i + 1) * FORM.V_BLOCK > CV:
                channel = (g * V_PER + i) * FORM.V_BLOCK + tl.arange(0, FORM.V_BLOCK)
                codes = tl.where((channel < CV)[None, :], codes, 0)
            at = (row * FORM.V_BLOCKS + g * V_PER + i) * FORM.PAGE + slot
            codec.store_codes(target.v, at, packed, codes, FORM.BITS, FORM.V_WORDS)


@triton.jit(do_not_specialize=["B", "P"])
def write_pages_kernel(
    k, v, offsets, lengths, pages, target, B, P,
    FORM: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write R new tokens of one head, uncompressed. k, v: `Rows`; target: `Pages`."""
    b, begin, count, tile = locate(offsets, tl.program_id(0), B, R)
    if tile * R >= count:
        return
    head = tl.program_id(1).to(tl.int64)
    index = tile * R + tl.arange(0, R)
    real = index < count
    position = tl.load(lengths + b).to(tl.int32) + index
    page = tl.load(pages + b.to(tl.int64) * P + position // FORM.PAGE, real, 0).to(tl.int64)
    real = real & (page >= 0)
    row = (page * FORM.H + head) * FORM.PAGE + position % FORM.PAGE
    x = load_head(k, head, begin + index, real, FORM.D, PAD_D)
    store_rows(target.k, row, FORM.D, real, x, FORM.D, PAD_D)
    x = load_head(v, head, begin + index, real, FORM.V, PAD_V)
    store_rows(target.v, row, FORM.V, real, x, FORM.V, PAD_V)


@triton.jit(do_not_specialize=["B", "P"])
def write_timestamps_kernel(
    new_times, offsets, lengths, pages, timestamps, B, P, SINKS: tl.constexpr, PAGE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write the timestamps of R new tokens."""
    b, begin, count, tile = locate(offsets, tl.program_id(0), B, R)
    if tile * R >= count:
        return
    index = tile * R + tl.arange(0, R)
    real = index < count
    position = tl.load(lengths + b).to(tl.int32) + index
    page = tl.load(pages + b.to(tl.int64) * P + (1 if SINKS else 0) + position // PAGE, real, 0).to(tl.int64)
    real = real & (page >= 0)
    tl.store(timestamps + page * PAGE + position % PAGE, tl.load(new_times + begin + index, real, 0), real)
