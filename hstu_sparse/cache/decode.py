"""Restore keys and values from codes: device functions, and the kernels of decompression and of a round trip.

Letters: T tokens, B sequences, P columns of a page table, S sink tokens, H heads, D query/key and V value head size, C
key channels of a head group, R tokens of a tile, BW channels of a block of codes, OW channels of an output block.
"""

import triton
import triton.language as tl

from hstu_sparse.cache import codec
from hstu_sparse.cache.encode import key_ranges, rotated_blocks, value_blocks
from hstu_sparse.tiles.rows import locate


@triton.jit
def matrix_block(
    i: tl.constexpr, first, order, DTYPE: tl.constexpr, BW: tl.constexpr, OW: tl.constexpr, PAD: tl.constexpr
):
    """Return the signs [BW, PAD] with which block i of the codes enters OW channels from `first` on; 0 after OW.

    order: the inverse permutation of the channels; without it, the sign of the whole block is left out. DTYPE: a 16-bit
    type. The numbers are built from bits, since ptxas 12.8 miscompiles a conversion in kernels that spill 4 KB a
    thread: it reloads a pair of numbers before both are stored (`early_reloads` in tools/ahead.py).
    """
    row = tl.arange(0, BW)
    column = tl.arange(0, PAD)
    if order is not None:
        row += i * BW
        place = tl.load(order + first + column, column < OW, 0).to(tl.int32)
    else:
        place = first % BW + column
    ONE: tl.constexpr = 0x3C00 if tl.float16 == DTYPE else 0x3F80
    bits = ONE | (codec.odd(row[:, None], place[None, :]) << 15)
    if PAD != OW:
        bits = tl.where((column < OW)[None, :], bits, 0)
    return bits.to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def restored_blocks(
    codes, marks, scales, zeros, factor, first, order, form, OFFSET: tl.constexpr, OW: tl.constexpr, PAD: tl.constexpr,
    OUT: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Return a tuple of OUT blocks [R, PAD] fp32 of restored keys, OW channels each, times factor * C ** 0.5.

    Args:
        codes: tuple of blocks [R, BW] of codes plus OFFSET.
        marks: tuple of blocks [R, BW], 1 for kept channels and 0 for pruned ones; empty unless SPARSE.
        scales, zeros: tuples of [R] fp32 for each quantisation group.
        first: the first channel of the first output block, a multiple of OUT * OW.
        SPAN: the number of output blocks with different columns of Sylvester's matrix of BW.
    """
    R: tl.constexpr = codes[0].shape[0]
    BW: tl.constexpr = form.K_BLOCK
    BLOCKS: tl.constexpr = form.K_BLOCKS
    PER: tl.constexpr = BLOCKS // form.K_GROUPS
    # The transform across whole blocks first sums blocks whose indices are equal modulo WHOLE, with the signs for
    # `first`, and then applies a butterfly.
    WHOLE: tl.constexpr = OUT // SPAN
    # Codes and signs are exact in 16 bits. 32-bit matrices of 256 channels with an order exceed the shared memory.
    NARROW: tl.constexpr = codes[0].dtype if codes[0].dtype.primitive_bitwidth == 16 else tl.float16
    restored = ()
    constants = ()
    for _ in tl.static_range(OUT):
        restored += (tl.zeros([R, PAD], tl.float32),)
        constants += (tl.zeros([R], tl.float32),)
    for i in tl.static_range(BLOCKS):
        scale = scales[i // PER]
        zero = zeros[i // PER]
        if not form.SPARSE:
            zero = zero - OFFSET * scale
        new = ()
        new_constants = ()
        if order is not None:
            for o in tl.static_range(OUT):
                matrix = matrix_block(i, first + o * OW, order, NARROW, BW, OW, PAD)
                if form.SPARSE:
                    constant = tl.dot(marks[i].to(NARROW), matrix)
                else:
                    constant = tl.sum(matrix.to(tl.float32), 0)[None, :]
                part = scale[:, None] * tl.dot(codes[i].to(NARROW), matrix) + zero[:, None] * constant
                new += (restored[o] + factor * part,)
            restored = new
        else:
            block_sign = codec.sign(i, first // BW) * factor
            for o in tl.static_range(OUT):
                x = restored[o]
                constant = constants[o]
                if o // SPAN == i % WHOLE:
                    matrix = matrix_block(i, first + o % SPAN * OW, order, NARROW, BW, OW, PAD)
                    x += (scale * block_sign)[:, None] * tl.dot(codes[i].to(NARROW), matrix)
                    if form.SPARSE:
                        x += (zero * block_sign)[:, None] * tl.dot(marks[i].to(NARROW), matrix)
                    constant += block_sign * zero
                new += (x,)
                new_constants += (constant,)
            restored = new
            constants = new_constants
    if order is not None:
        return restored
    outputs = ()
    for o in tl.static_range(OUT):
        x = restored[o]
        if not form.SPARSE:
            # A term that is constant over the channels of a block only changes the first channel of the result.
            first_column = ((first + o % SPAN * OW) % BW + tl.arange(0, PAD) == 0).to(tl.float32) * BW
            x += constants[o][:, None] * first_column[None, :]
        outputs += (x,)
    return codec.butterfly(outputs, WHOLE, SPAN)


@triton.jit
def load_keys(source, row, slot, mask, form, DTYPE: tl.constexpr, OFFSET: tl.constexpr):
    """Load (codes, marks, scales, zeros) for `restored_blocks`. source: `Pages`; row: [R] page and head group."""
    R: tl.constexpr = slot.shape[0]
    BLOCKS: tl.constexpr = form.K_BLOCKS
    GROUPS: tl.constexpr = form.K_GROUPS
    codes = ()
    marks = ()
    before = tl.zeros([R], tl.int32)
    for i in tl.static_range(BLOCKS):
        if form.SPARSE:
            # A tile has the tokens of one page.
            column = i * form.K_BLOCK + tl.arange(0, form.K_BLOCK)
            not_empty = (column >= 0) & (tl.max(mask.to(tl.int32), 0) > 0)
            word = tl.load(source.k_bitmap + tl.max(row, 0) * (form.CODED * form.G) + column, not_empty, 0)
            bit = ((word[None, :] >> slot[:, None].to(tl.int64)) & 1).to(tl.int32)
            at = row * form.PAGE + slot
            codes += (codec.load_kept(source.k, at, mask, bit, before, form.BITS, DTYPE, form.KEPT, form.K_WORDS),)
            marks += (bit.to(DTYPE),)
            before += tl.sum(bit, 1)
        else:
            at = (row * BLOCKS + i) * form.PAGE + slot
            codes += (codec.load_codes(source.k, at, mask, form.BITS, DTYPE, OFFSET, form.K_BLOCK, form.K_WORDS),)
    scales = ()
    zeros = ()
    for g in tl.static_range(GROUPS):
        at = (row * GROUPS + g) * form.PAGE + slot
        scale, zero = codec.unpack_halves(tl.load(source.k_ranges + at, mask, 0))
        scales += (scale,)
        zeros += (zero,)
    return codes, marks, scales, zeros


@triton.jit
def load_values(source, row, slot, mask, b, form, DTYPE: tl.constexpr, OFFSET: tl.constexpr):
    """Load (OFFSET + codes [R, BW], scale [R], zero [R]) of block b of values. source: `Pages`."""
    at = (row * form.V_GROUPS + b // (form.V_BLOCKS // form.V_GROUPS)) * form.PAGE + slot
    scale, zero = codec.unpack_halves(tl.load(source.v_ranges + at, mask, 0))
    at = (row * form.V_BLOCKS + b) * form.PAGE + slot
    return codec.load_codes(source.v, at, mask, form.BITS, DTYPE, OFFSET, form.V_BLOCK, form.V_WORDS), scale, zero


@triton.jit
def group_pointers(x, token, mask, b, first_head, form, SIZE: tl.constexpr, BW: tl.constexpr):
    """Return (pointers to block b [R, BW] of a head group in a contiguous x [T, H, SIZE], their mask)."""
    column = b * BW + tl.arange(0, BW)
    pointers = x + ((token * form.H + first_head) * SIZE)[:, None] + column[None, :]
    return pointers, mask[:, None] & (column < SIZE * form.G)[None, :]


@triton.jit
def store_group(out, token, mask, x, b, first_head, form, SIZE: tl.constexpr):
    """Write block b [R, BW] of a head group to a contiguous out [T, H, SIZE]."""
    pointers, inside = group_pointers(out, token, mask, b, first_head, form, SIZE, x.shape[1])
    tl.store(pointers, x.to(out.dtype.element_ty), inside)


@triton.jit
def copy_group(source, at, out, token, mask, b, first_head, form, SIZE: tl.constexpr, BW: tl.constexpr):
    """Copy block b of a head group from the rows `at` of source [.., H, SIZE] to out [T, H, SIZE]."""
    pointers, inside = group_pointers(source, at, mask, b, first_head, form, SIZE, BW)
    store_group(out, token, mask, tl.load(pointers, inside, 0.0), b, first_head, form, SIZE)


@triton.jit(do_not_specialize=["B", "P", "S"])
def rotatekv_decompress_kernel(
    seq_offsets, pages, inverse_order, source, k, v, B, P, S, scale,
    FORM: tl.constexpr, OFFSET: tl.constexpr, OUT: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Restore R tokens of one head group: OUT blocks of k [T, H, D]; the program of its first blocks also v [T, H, V].

    source: `Pages`; pages: [B, P], the page table.
    """
    DTYPE: tl.constexpr = k.dtype.element_ty
    V_BLOCKS: tl.constexpr = FORM.V_BLOCKS
    b, begin, count, tile = locate(seq_offsets, tl.program_id(0), B, R)
    if tile * R >= count:
        return
    group = tl.program_id(1)
    first_head = group * FORM.G
    first_out = tl.program_id(2) * OUT
    if inverse_order is not None:
        inverse_order += group * (FORM.D * FORM.G)
    pages += b.to(tl.int64) * P
    index = tile * R + tl.arange(0, R)
    token = begin + index
    mask = index < count
    if FORM.SINKS:
        sink = mask & (index < S)
        mask = mask & (index >= S)
        at = tl.load(pages).to(tl.int64) * S + index
        for i in tl.static_range(OUT):
            copy_group(source.sink_k, at, k, token, sink, first_out + i, first_head, FORM, FORM.D, FORM.K_BLOCK)
        if first_out == 0:
            for i in tl.static_range(V_BLOCKS):
                copy_group(source.sink_v, at, v, token, sink, i, first_head, FORM, FORM.V, FORM.V_BLOCK)
    page = tl.load(pages + (1 if FORM.SINKS else 0) + index // FORM.PAGE, mask, 0).to(tl.int64)
    slot = index % FORM.PAGE
    row = page * (FORM.H // FORM.G) + group
    codes, marks, scales, zeros = load_keys(source, row, slot, mask, FORM, DTYPE, OFFSET)
    x = restored_blocks(
        codes, marks, scales, zeros, scale, first_out * FORM.K_BLOCK, inverse_order, FORM, OFFSET, FORM.K_BLOCK,
        FORM.K_BLOCK, OUT, 1,
    )  # fmt: skip
    for i in tl.static_range(OUT):
        store_group(k, token, mask, x[i], first_out + i, first_head, FORM, FORM.D)
    if first_out == 0:
        for i in tl.static_range(V_BLOCKS):
            code, v_scale, v_zero = load_values(source, row, slot, mask, i, FORM, DTYPE, OFFSET)
            y = (v_zero - OFFSET * v_scale)[:, None] + v_scale[:, None] * code.to(tl.float32)
            store_group(v, token, mask, y, i, first_head, FORM, FORM.V)


@triton.jit(do_not_specialize=["B", "S"])
def rotatekv_round_trip_kernel(
    k, v, seq_offsets, order, inverse_order, k_out, v_out, B, S, scale,
    FORM: tl.constexpr, INSET: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Quantise and restore R tokens of one head group to k_out [T, H, D] and v_out [T, H, V]; copy sinks.

    k, v: `Rows`.
    """
    LEVELS: tl.constexpr = (1 << FORM.BITS) - 1
    DTYPE: tl.constexpr = k_out.dtype.element_ty
    C: tl.constexpr = FORM.D * FORM.G
    K_BLOCKS: tl.constexpr = FORM.K_BLOCKS
    K_GROUPS: tl.constexpr = FORM.K_GROUPS
    V_GROUPS: tl.constexpr = FORM.V_GROUPS
    _, begin, count, tile = locate(seq_offsets, tl.program_id(0), B, R)
    if tile * R >= count:
        return
    group = tl.program_id(1)
    first_head = group * FORM.G
    position = tile * R + tl.arange(0, R)
    mask = position < count
    sink = position < S
    token = begin + position
    K_PER: tl.constexpr = K_BLOCKS // K_GROUPS
    if order is not None:
        order += group * C
        inverse_order += group * C
    x = rotated_blocks(k, token, mask, first_head, order, scale, FORM)
    masks = x
    if FORM.SPARSE:
        masks = codec.largest_mask(x, FORM.KEPT, K_BLOCKS)
    scales, zeros = key_ranges(x, masks, INSET, FORM)
    codes = ()
    wide_scales = ()
    wide_zeros = ()
    marks = ()
    for i in tl.static_range(K_BLOCKS):
        code = codec.encode(x[i], scales[i // K_PER], zeros[i // K_PER], LEVELS)
        if FORM.SPARSE:
            code = code * masks[i]
            marks += (masks[i].to(DTYPE),)
        codes += (code.to(DTYPE),)
    for g in tl.static_range(K_GROUPS):
        wide_scales += (scales[g].to(tl.float32),)
        wide_zeros += (zeros[g].to(tl.float32),)
    for i in tl.static_range(K_BLOCKS):
        y = restored_blocks(
            codes, marks, wide_scales, wide_zeros, scale, group * 0 + i * FORM.K_BLOCK, inverse_order, FORM, 0,
            FORM.K_BLOCK, FORM.K_BLOCK, 1, 1,
        )  # fmt: skip
        same = codec.load_block(k, token, mask & sink, first_head, None, i, FORM.D, C, FORM.K_BLOCK, FORM.D)
        out = tl.where(sink[:, None], same.to(tl.float32), y[0])
        store_group(k_out, token, mask, out, i, first_head, FORM, FORM.D)
    V_PER: tl.constexpr = FORM.V_BLOCKS // V_GROUPS
    for g in tl.static_range(V_GROUPS):
        z, v_scale, v_zero = value_blocks(v, token, mask, first_head, g, INSET, FORM)
        for i in tl.static_range(V_PER):
            code = codec.encode(z[i], v_scale, v_zero, LEVELS).to(tl.float32)
            value = v_zero.to(tl.float32)[:, None] + v_scale.to(tl.float32)[:, None] * code
            value = tl.where(sink[:, None], z[i], value)
            store_group(v_out, token, mask, value, g * V_PER + i, first_head, FORM, FORM.V)
