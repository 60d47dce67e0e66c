"""Restore keys from codes, in the kernels of decompression and of the round trip.

Letters: T tokens, B sequences, S sink tokens, H heads, D query/key and V value head size, G heads of a head group, C
its key channels, HG = H / G, R tokens of a tile, BW channels of a block of codes, OW channels of an output block.
"""

import triton
import triton.language as tl

from hstu_sparse.cache.codec import (
    butterfly,
    encode,
    greatest,
    halves_of,
    load_block,
    load_codes,
    load_kept,
    odd,
    sign,
)
from hstu_sparse.cache.encode import key_ranges, rotated_blocks, value_blocks
from hstu_sparse.tiles.rows import locate


@triton.jit
def matrix_block(
    i: tl.constexpr, first, order, DTYPE: tl.constexpr, BW: tl.constexpr, OW: tl.constexpr, PAD: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):  # fmt: skip
    """Return the contribution of block i of the codes to OW channels from `first` on: [BW, PAD], 1 and -1, zero behind
    OW.

    order: the index of each channel among the permuted ones; without it the sign of the blocks is left out. DTYPE: of
    16 bits. The numbers are built from their bits: converted ones are stored two in a register, and in kernels for
    which ptxas 12.8 spills 4 KB a thread it reloaded one of the two before both were stored (`ahead.early_reloads`).
    """
    row = tl.arange(0, BW)
    column = tl.arange(0, PAD)
    if HAS_ORDER:
        row += i * BW
        place = tl.load(order + first + column, column < OW, 0).to(tl.int32)
    else:
        place = first % BW + column
    ONE: tl.constexpr = 0x3C00 if tl.float16 == DTYPE else 0x3F80
    bits = ONE | (odd(row[:, None], place[None, :]) << 15)
    if PAD != OW:
        bits = tl.where((column < OW)[None, :], bits, 0)
    return bits.to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def restored_blocks(
    codes, key_mask, scales, zeros, factor, first, order, DTYPE: tl.constexpr, OFFSET: tl.constexpr, BW: tl.constexpr,
    BLOCKS: tl.constexpr, PER: tl.constexpr, OW: tl.constexpr, PAD: tl.constexpr, OUT: tl.constexpr,
    SPAN: tl.constexpr, SPARSE: tl.constexpr, HAS_ORDER: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Return a tuple of OUT blocks [R, PAD] fp32 of restored keys, OW channels each, times `factor` C ** 0.5.

    codes: tuple of blocks [R, BW] of DTYPE, OFFSET above the codes; key_mask: the same of 0 and 1, if SPARSE; scales,
    zeros: tuples of [R] fp32, of groups of PER blocks. first: first channel of the first output block, a multiple of
    OUT * OW; SPAN: how many of these blocks have different columns of Sylvester's matrix of BW.
    """
    # Whole output blocks: the transform across blocks sums blocks with equal indices modulo SPAN, with the signs of the
    # blocks from `first` on, and ends in a butterfly.
    WHOLE: tl.constexpr = OUT // SPAN
    # Codes and signs are exact in 16 bits; in 32 the matrices of 256 channels with an order needed more shared memory
    # than available.
    NARROW: tl.constexpr = DTYPE if DTYPE.primitive_bitwidth == 16 else tl.float16
    restored = ()
    constants = ()
    for _ in tl.static_range(OUT):
        restored += (tl.zeros([R, PAD], tl.float32),)
        constants += (tl.zeros([R], tl.float32),)
    for i in tl.static_range(BLOCKS):
        scale = scales[i // PER]
        zero = zeros[i // PER]
        if not SPARSE:
            zero = zero - OFFSET * scale
        new = ()
        new_constants = ()
        if HAS_ORDER:
            for o in tl.static_range(OUT):
                matrix = matrix_block(i, first + o * OW, order, NARROW, BW, OW, PAD, True)
                if SPARSE:
                    constant = tl.dot(key_mask[i].to(NARROW), matrix)
                else:
                    constant = tl.sum(matrix.to(tl.float32), 0)[None, :]
                part = scale[:, None] * tl.dot(codes[i].to(NARROW), matrix) + zero[:, None] * constant
                new += (restored[o] + factor * part,)
            restored = new
        else:
            block_sign = sign(i, first // BW) * factor
            for o in tl.static_range(OUT):
                x = restored[o]
                constant = constants[o]
                if o // SPAN == i % WHOLE:
                    matrix = matrix_block(i, first + o % SPAN * OW, order, NARROW, BW, OW, PAD, False)
                    x += (scale * block_sign)[:, None] * tl.dot(codes[i].to(NARROW), matrix)
                    if SPARSE:
                        x += (zero * block_sign)[:, None] * tl.dot(key_mask[i].to(NARROW), matrix)
                    constant += block_sign * zero
                new += (x,)
                new_constants += (constant,)
            restored = new
            constants = new_constants
    if HAS_ORDER:
        return restored
    outputs = ()
    for o in tl.static_range(OUT):
        x = restored[o]
        if not SPARSE:
            # A term that is constant over all channels of a block only affects the first column of Sylvester's matrix.
            alike = ((first + o % SPAN * OW) % BW + tl.arange(0, PAD) == 0).to(tl.float32) * BW
            x += constants[o][:, None] * alike[None, :]
        outputs += (x,)
    return butterfly(outputs, WHOLE, SPAN)


@triton.jit
def load_keys(
    k_codes, k_ranges, k_bitmap, row, slot, mask, DTYPE: tl.constexpr, OFFSET: tl.constexpr,
    PAGE: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr, BW: tl.constexpr, BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr, WORDS: tl.constexpr, KEPT: tl.constexpr, SPARSE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Load (codes, key_mask, scales, zeros) of keys for `restored_blocks`; row: [R] page and head group."""
    codes = ()
    key_mask = ()
    before = tl.zeros([R], tl.int32)
    for i in tl.static_range(BLOCKS):
        if SPARSE:
            # A tile of TILE tokens in pages of the same size is one page.
            column = i * BW + tl.arange(0, BW)
            some = (column >= 0) & (tl.max(mask.to(tl.int32), 0) > 0)
            word = tl.load(k_bitmap + tl.max(row, 0) * C + column, some, 0)
            bit = ((word[None, :] >> slot[:, None].to(tl.int64)) & 1).to(tl.int32)
            codes += (load_kept(k_codes, row * PAGE + slot, mask, bit, before, BITS, DTYPE, KEPT, WORDS),)
            key_mask += (bit.to(DTYPE),)
            before += tl.sum(bit, 1)
        else:
            at = (row * BLOCKS + i) * PAGE + slot
            codes += (load_codes(k_codes, at, mask, BITS, DTYPE, OFFSET, R, BW, WORDS),)
    scales = ()
    zeros = ()
    for g in tl.static_range(GROUPS):
        at = (row * GROUPS + g) * PAGE + slot
        scale, zero = halves_of(tl.load(k_ranges + at, mask, 0))
        scales += (scale,)
        zeros += (zero,)
    return codes, key_mask, scales, zeros


@triton.jit
def load_values(
    v_codes, v_ranges, row, slot, mask, b, DTYPE: tl.constexpr, OFFSET: tl.constexpr, PAGE: tl.constexpr,
    BITS: tl.constexpr, BW: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Load (OFFSET + codes [R, BW], scale, zero [R] fp32) of block b of values."""
    codes = load_codes(v_codes, (row * BLOCKS + b) * PAGE + slot, mask, BITS, DTYPE, OFFSET, R, BW, WORDS)
    at = (row * GROUPS + b // (BLOCKS // GROUPS)) * PAGE + slot
    scale, zero = halves_of(tl.load(v_ranges + at, mask, 0))
    return codes, scale, zero


@triton.jit
def load_group(x, token, mask, b, first_head, H: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr,
               BW: tl.constexpr):  # fmt: skip
    """Load block b [R, BW] of a head group's channels of x [T, H, SIZE], contiguous."""
    column = b * BW + tl.arange(0, BW)
    pointers = x + ((token * H + first_head) * SIZE)[:, None] + column[None, :]
    return tl.load(pointers, mask[:, None] & (column < CHANNELS)[None, :], 0.0)


@triton.jit
def store_group(out, token, mask, x, b, first_head, H: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr,
                BW: tl.constexpr):  # fmt: skip
    """Write block b [R, BW] of a head group's channels to out [T, H, SIZE], contiguous."""
    column = b * BW + tl.arange(0, BW)
    pointers = out + ((token * H + first_head) * SIZE)[:, None] + column[None, :]
    tl.store(pointers, x.to(out.dtype.element_ty), mask[:, None] & (column < CHANNELS)[None, :])


@triton.jit(do_not_specialize=["B", "P", "S"])
def rotatekv_decompress_kernel(
    seq_offsets, pages, inverse_order, k_codes, k_ranges, k_bitmap, v_codes, v_ranges, sink_k, sink_v, k, v, B, P, S,
    scale,
    HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr,
    K_BLOCK: tl.constexpr, K_BLOCKS: tl.constexpr, K_WORDS: tl.constexpr, K_GROUPS: tl.constexpr, KEPT: tl.constexpr,
    KEPT_WORDS: tl.constexpr, V_BLOCK: tl.constexpr, V_BLOCKS: tl.constexpr, V_WORDS: tl.constexpr,
    V_GROUPS: tl.constexpr, SPARSE: tl.constexpr, SINKS: tl.constexpr, HAS_ORDER: tl.constexpr, R: tl.constexpr,
    OFFSET: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Write R tokens of one head group to k [T, H, D] and v [T, H, V]; of the keys, the channels of OUT blocks."""
    C: tl.constexpr = D * G
    CV: tl.constexpr = V * G
    DTYPE: tl.constexpr = k.dtype.element_ty
    b, begin, count, tile = locate(seq_offsets, tl.program_id(0), B, R)
    if tile * R >= count:
        return
    group = tl.program_id(1)
    first_out = tl.program_id(2) * OUT
    if HAS_ORDER:
        inverse_order += group * C
    pages += b.to(tl.int64) * P
    index = tile * R + tl.arange(0, R)
    token = begin + index
    mask = index < count
    if SINKS:
        sink = mask & (index < S)
        mask = mask & (index >= S)
        at = tl.load(pages).to(tl.int64) * S + index
        for i in tl.static_range(OUT):
            o = first_out + i
            store_group(k, token, sink, load_group(sink_k, at, sink, o, group * G, HG * G, D, C, K_BLOCK),
                        o, group * G, HG * G, D, C, K_BLOCK)  # fmt: skip
        if first_out == 0:
            for i in tl.static_range(V_BLOCKS):
                store_group(v, token, sink, load_group(sink_v, at, sink, i, group * G, HG * G, V, CV, V_BLOCK),
                            i, group * G, HG * G, V, CV, V_BLOCK)  # fmt: skip
    page = tl.load(pages + (1 if SINKS else 0) + index // PAGE, mask, 0).to(tl.int64)
    slot = index % PAGE
    row = page * HG + group
    WORDS: tl.constexpr = KEPT_WORDS if SPARSE else K_WORDS
    codes, key_mask, scales, zeros = load_keys(
        k_codes, k_ranges, k_bitmap, row, slot, mask, DTYPE, OFFSET, PAGE, BITS, C, K_BLOCK, K_BLOCKS,
        K_GROUPS, WORDS, KEPT, SPARSE, R,
    )  # fmt: skip
    x = restored_blocks(
        codes, key_mask, scales, zeros, scale, first_out * K_BLOCK, inverse_order, DTYPE, OFFSET, K_BLOCK,
        K_BLOCKS, K_BLOCKS // K_GROUPS, K_BLOCK, K_BLOCK, OUT, 1, SPARSE, HAS_ORDER, R,
    )  # fmt: skip
    for i in tl.static_range(OUT):
        store_group(k, token, mask, x[i], first_out + i, group * G, HG * G, D, C, K_BLOCK)
    if first_out == 0:
        for i in tl.static_range(V_BLOCKS):
            code, v_scale, v_zero = load_values(
                v_codes, v_ranges, row, slot, mask, i, DTYPE, OFFSET, PAGE, BITS, V_BLOCK, V_BLOCKS, V_GROUPS,
                V_WORDS, R,
            )  # fmt: skip
            y = (v_zero - OFFSET * v_scale)[:, None] + v_scale[:, None] * code.to(tl.float32)
            store_group(v, token, mask, y, i, group * G, HG * G, V, CV, V_BLOCK)


@triton.jit(do_not_specialize=["B", "S"])
def rotatekv_round_trip_kernel(
    k, v, k_stride_t, k_stride_h, v_stride_t, v_stride_h, seq_offsets, order, inverse_order, k_out, v_out, B, S, scale,
    HG: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BITS: tl.constexpr,
    K_BLOCK: tl.constexpr, K_BLOCKS: tl.constexpr, K_GROUPS: tl.constexpr, KEPT: tl.constexpr, V_BLOCK: tl.constexpr,
    V_BLOCKS: tl.constexpr, V_GROUPS: tl.constexpr, SPARSE: tl.constexpr, HAS_ORDER: tl.constexpr, R: tl.constexpr,
    INSET: tl.constexpr,
):  # fmt: skip
    """Quantise and restore R tokens of one head group, to k_out [T, H, D] and v_out [T, H, V]; sinks are copied."""
    C: tl.constexpr = D * G
    CV: tl.constexpr = V * G
    LEVELS: tl.constexpr = (1 << BITS) - 1
    DTYPE: tl.constexpr = k.dtype.element_ty
    _, begin, count, tile = locate(seq_offsets, tl.program_id(0), B, R)
    if tile * R >= count:
        return
    group = tl.program_id(1)
    position = tile * R + tl.arange(0, R)
    mask = position < count
    sink = position < S
    token = begin + position
    K_PER: tl.constexpr = K_BLOCKS // K_GROUPS
    if HAS_ORDER:
        order += group * C
        inverse_order += group * C
    x = rotated_blocks(
        k, token, mask, group * G, k_stride_t, k_stride_h, order, scale, D, C, K_BLOCK, K_BLOCKS, HAS_ORDER, D
    )
    key_mask = x
    if SPARSE:
        key_mask = greatest(x, KEPT, K_BLOCKS, R)
    scales, zeros = key_ranges(x, key_mask, INSET, K_PER, K_GROUPS, LEVELS, SPARSE, R)
    codes = ()
    wide_scales = ()
    wide_zeros = ()
    marks = ()
    for i in tl.static_range(K_BLOCKS):
        code = encode(x[i], scales[i // K_PER], zeros[i // K_PER], LEVELS)
        if SPARSE:
            code = code * key_mask[i]
            marks += (key_mask[i].to(DTYPE),)
        codes += (code.to(DTYPE),)
    for g in tl.static_range(K_GROUPS):
        wide_scales += (scales[g].to(tl.float32),)
        wide_zeros += (zeros[g].to(tl.float32),)
    for i in tl.static_range(K_BLOCKS):
        y = restored_blocks(
            codes, marks, wide_scales, wide_zeros, scale, group * 0 + i * K_BLOCK, inverse_order, DTYPE, 0,
            K_BLOCK, K_BLOCKS, K_PER, K_BLOCK, K_BLOCK, 1, 1, SPARSE, HAS_ORDER, R,
        )  # fmt: skip
        same = load_block(k, token, mask & sink, group * G, k_stride_t, k_stride_h, order, i, D, C, K_BLOCK, False, D)
        out = tl.where(sink[:, None], same.to(tl.float32), y[0])
        store_group(k_out, token, mask, out, i, group * G, HG * G, D, C, K_BLOCK)
    V_PER: tl.constexpr = V_BLOCKS // V_GROUPS
    for g in tl.static_range(V_GROUPS):
        z, v_scale, v_zero = value_blocks(
            v, token, mask, group * G, v_stride_t, v_stride_h, INSET, V, CV, V_BLOCK, g * V_PER, V_PER, LEVELS, R
        )
        for i in tl.static_range(V_PER):
            v_code = encode(z[i], v_scale, v_zero, LEVELS).to(tl.float32)
            value = v_zero.to(tl.float32)[:, None] + v_scale.to(tl.float32)[:, None] * v_code
            value = tl.where(sink[:, None], z[i], value)
            store_group(v_out, token, mask, value, g * V_PER + i, group * G, HG * G, V, CV, V_BLOCK)
