"""Compress keys and values: one kernel rotates, prunes, quantises and packs both in one pass.

Letters: T new tokens, B sequences, S sink tokens, H heads, D query/key and V value head size, G heads of a head group,
C its key channels, HG = H / G, R tokens of a tile, BW channels of a block.

A program owns R new tokens of one head group, with all their channels, in blocks that a tuple holds. Written so, every
stage of the transform across blocks is a sum of registers of one thread.
"""

import triton
import triton.language as tl

from hstu_sparse.cache.codec import (
    butterfly,
    encode,
    greatest,
    load_block,
    sign,
    store_codes,
    store_kept,
    store_range,
    value_range,
)
from hstu_sparse.tiles.rows import locate


@triton.jit
def rotated_blocks(
    k, token, mask, first_head, stride_t, stride_h, order, scale, D: tl.constexpr, C: tl.constexpr, BW: tl.constexpr,
    BLOCKS: tl.constexpr, HAS_ORDER: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Return a tuple of the transformed blocks [R, BW] fp32 of keys of heads of D channels, REAL of them without
    padding.
    """
    place = tl.arange(0, BW)
    matrix = sign(place[:, None], place[None, :]).to(k.dtype.element_ty)
    blocks = ()
    for b in tl.static_range(BLOCKS):
        x = load_block(k, token, mask, first_head, stride_t, stride_h, order, b, D, C, BW, HAS_ORDER, REAL)
        blocks += (tl.dot(x, matrix, input_precision="ieee"),)
    blocks = butterfly(blocks, BLOCKS, 1)
    scaled = ()
    for b in tl.static_range(BLOCKS):
        scaled += (blocks[b] * scale,)
    return scaled


@triton.jit
def key_ranges(
    x,
    masks,
    INSET: tl.constexpr,
    PER: tl.constexpr,
    GROUPS: tl.constexpr,
    LEVELS: tl.constexpr,
    SPARSE: tl.constexpr,
    R: tl.constexpr,
):
    """Return tuples of scale and zero [R] fp16 of each group of PER blocks, over the channels in `masks`."""
    scales = ()
    zeros = ()
    for g in tl.static_range(GROUPS):
        least = tl.full([R], float("inf"), tl.float32)
        most = tl.full([R], float("-inf"), tl.float32)
        for b in tl.static_range(PER):
            low = x[g * PER + b]
            high = low
            if SPARSE:
                low = tl.where(masks[g * PER + b] != 0, low, float("inf"))
                high = tl.where(masks[g * PER + b] != 0, high, float("-inf"))
            least = tl.minimum(least, tl.min(low, 1))
            most = tl.maximum(most, tl.max(high, 1))
        scale, zero = value_range(least, most, INSET, LEVELS)
        scales += (scale,)
        zeros += (zero,)
    return scales, zeros


@triton.jit
def value_blocks(
    v, token, mask, first_head, stride_t, stride_h, INSET: tl.constexpr, V: tl.constexpr, CV: tl.constexpr,
    BW: tl.constexpr, FIRST: tl.constexpr, PER: tl.constexpr, LEVELS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Return (tuple of blocks [R, BW] fp32 of a group of PER blocks from FIRST on, its scale, its zero)."""
    place = tl.arange(0, BW)
    least = tl.full([R], float("inf"), tl.float32)
    most = tl.full([R], float("-inf"), tl.float32)
    blocks = ()
    for i in tl.static_range(PER):
        x = load_block(v, token, mask, first_head, stride_t, stride_h, v, FIRST + i, V, CV, BW, False, V)
        x = x.to(tl.float32)
        blocks += (x,)
        if (FIRST + i + 1) * BW <= CV:
            least = tl.minimum(least, tl.min(x, 1))
            most = tl.maximum(most, tl.max(x, 1))
        elif (FIRST + i) * BW < CV:
            real = ((FIRST + i) * BW + place < CV)[None, :]
            least = tl.minimum(least, tl.min(tl.where(real, x, float("inf")), 1))
            most = tl.maximum(most, tl.max(tl.where(real, x, float("-inf")), 1))
    scale, zero = value_range(least, most, INSET, LEVELS)
    return blocks, scale, zero


@triton.jit
def store_bitmap(bitmap, row, slot, mask, is_kept, b: tl.constexpr, C: tl.constexpr, BW: tl.constexpr):
    """Set the bits of kept channels; the tile's tokens are in at most two pages; `row`: page and head group."""
    column = b * BW + tl.arange(0, BW)
    bits = tl.where((is_kept != 0) & mask[:, None], tl.full([1, 1], 1, tl.int64) << slot[:, None].to(tl.int64), 0)
    first = tl.min(tl.where(mask, row, 0x7FFFFFFFFFFFFFFF), 0)
    last = tl.max(tl.where(mask, row, -1), 0)
    if last >= 0:
        word = tl.sum(tl.where((row == first)[:, None], bits, 0), 0)
        tl.atomic_or(bitmap + first * C + column, word)
        if last != first:
            word = tl.sum(tl.where((row != first)[:, None], bits, 0), 0)
            tl.atomic_or(bitmap + last * C + column, word)


@triton.jit(do_not_specialize=["B", "P", "S"])
def write_codes_kernel(
    k, v, offsets, lengths, pages, order, sink_k, sink_v, k_codes, k_ranges, k_bitmap, v_codes, v_ranges, B, P, S,
    scale,
    HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr, REAL: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr,
    BITS: tl.constexpr,
    K_BLOCK: tl.constexpr, K_BLOCKS: tl.constexpr, K_WORDS: tl.constexpr, K_GROUPS: tl.constexpr, KEPT: tl.constexpr,
    KEPT_WORDS: tl.constexpr, V_BLOCK: tl.constexpr, V_BLOCKS: tl.constexpr, V_WORDS: tl.constexpr,
    V_GROUPS: tl.constexpr, SPARSE: tl.constexpr, SINKS: tl.constexpr, HAS_ORDER: tl.constexpr, R: tl.constexpr,
    INSET: tl.constexpr,
):  # fmt: skip
    """Write R new tokens of one head group, after `lengths` [B] others, into the pages of the table [B, P].

    k, v: `Rows`. D: channels of a head, padded; REAL: without padding.
    """
    C: tl.constexpr = D * G
    CV: tl.constexpr = V * G
    LEVELS: tl.constexpr = (1 << BITS) - 1
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
    page = tl.load(pages + (1 if SINKS else 0) + position // PAGE, packed, 0).to(tl.int64)
    packed = packed & (page >= 0)
    slot = position % PAGE
    row = page * HG + group
    if HAS_ORDER:
        order += group * C

    if SINKS:
        first = tl.load(pages).to(tl.int64) * S
        sink = real & (position < S) & (first >= 0)
        for head in tl.static_range(G):
            at = (first + position) * (HG * G) + group * G + head
            source = token[:, None] * k.stride_t + (group * G + head).to(tl.int64) * k.stride_h
            for start in tl.static_range(0, D, K_BLOCK):
                column = start + tl.arange(0, K_BLOCK)[None, :]
                inside = sink[:, None] & (column < REAL)
                tl.store(
                    sink_k + at[:, None] * REAL + column, tl.load(k.pointer + source + column, inside, 0.0), inside
                )
            source = token[:, None] * v.stride_t + (group * G + head).to(tl.int64) * v.stride_h
            for start in tl.static_range(0, V, V_BLOCK):
                column = start + tl.arange(0, V_BLOCK)[None, :]
                inside = sink[:, None] & (column < V)
                tl.store(sink_v + at[:, None] * V + column, tl.load(v.pointer + source + column, inside, 0.0), inside)

    x = rotated_blocks(
        k.pointer, token, packed, group * G, k.stride_t, k.stride_h, order, scale, D, C, K_BLOCK, K_BLOCKS, HAS_ORDER,
        REAL,
    )  # fmt: skip
    masks = x
    if SPARSE:
        masks = greatest(x, KEPT, K_BLOCKS, R)
    K_PER: tl.constexpr = K_BLOCKS // K_GROUPS
    scales, zeros = key_ranges(x, masks, INSET, K_PER, K_GROUPS, LEVELS, SPARSE, R)
    before = tl.zeros([R], tl.int32)
    for i in tl.static_range(K_BLOCKS):
        codes = encode(x[i], scales[i // K_PER], zeros[i // K_PER], LEVELS)
        if SPARSE:
            store_bitmap(k_bitmap, row, slot, packed, masks[i], i, C, K_BLOCK)
            store_kept(k_codes, row * PAGE + slot, packed, codes, masks[i], before, BITS, KEPT, KEPT_WORDS)
            before += tl.sum(masks[i], 1)
        else:
            store_codes(k_codes, (row * K_BLOCKS + i) * PAGE + slot, packed, codes, BITS, R, K_BLOCK, K_WORDS)
    for g in tl.static_range(K_GROUPS):
        at = (row * K_GROUPS + g) * PAGE + slot
        store_range(k_ranges + at, packed, scales[g], zeros[g])

    V_PER: tl.constexpr = V_BLOCKS // V_GROUPS
    for g in tl.static_range(V_GROUPS):
        y, v_scale, v_zero = value_blocks(
            v.pointer, token, packed, group * G, v.stride_t, v.stride_h, INSET, V, CV, V_BLOCK, g * V_PER, V_PER,
            LEVELS,
            R,
        )  # fmt: skip
        at = (row * V_GROUPS + g) * PAGE + slot
        store_range(v_ranges + at, packed, v_scale, v_zero)
        for i in tl.static_range(V_PER):
            v_code = encode(y[i], v_scale, v_zero, LEVELS)
            if (g * V_PER + i + 1) * V_BLOCK > CV:
                v_code = tl.where(((g * V_PER + i) * V_BLOCK + tl.arange(0, V_BLOCK) < CV)[None, :], v_code, 0)
            at = (row * V_BLOCKS + g * V_PER + i) * PAGE + slot
            store_codes(v_codes, at, packed, v_code, BITS, R, V_BLOCK, V_WORDS)
