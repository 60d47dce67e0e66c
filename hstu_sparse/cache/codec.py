"""Define what the kernels on pages share: arguments, packing, quantisation and the Hadamard transform.

Letters: T tokens, H heads, D query/key and V value head size, R tokens of a tile, BW channels of a block, C channels of
a head group.

The Hadamard transform of C = blocks * BW channels multiplies each block by Sylvester's matrix of BW, on tensor cores,
and adds and subtracts blocks: block i contributes to output block o with the sign (-1) ** popcount(i & o). Codes are
transformed as small integers, which is exact; scale and zero are applied afterwards.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.tiles.rows import opaque

# Adding and subtracting this number rounds fp32 numbers below 2^22 to the nearest integer, ties to even.
ROUND = tl.constexpr(12582912.0)


class Form(NamedTuple):
    """The page format as constants of the kernels.

    H, G, D, V                heads, heads of a head group, head size of queries and keys, head size of values
    CODED                     D, padded with zeros for the Hadamard transform
    PAGE, SINKS               slots of a page, whether there are sinks
    BITS                      bits of a code; 0 for uncompressed keys and values
    SPARSE, KEPT              whether keys are pruned, the number of channels that are kept
    K_BLOCK, K_BLOCKS         channels of a block of keys, blocks of a head group
    K_WORDS, K_GROUPS         32-bit words of the codes of a block (SPARSE: of a token), quantisation groups
    V_BLOCK to V_GROUPS       the same for values
    """

    H: int
    G: int
    D: int
    V: int
    CODED: int
    PAGE: int
    SINKS: bool
    BITS: int
    SPARSE: bool
    KEPT: int
    K_BLOCK: int
    K_BLOCKS: int
    K_WORDS: int
    K_GROUPS: int
    V_BLOCK: int
    V_BLOCKS: int
    V_WORDS: int
    V_GROUPS: int


class Pages(NamedTuple):
    """The tensors of a layer of a pool, see `PageFormat.shapes`; None for absent tensors.

    k, v                codes, or uncompressed keys and values
    k_ranges, v_ranges  scale and zero of each quantisation group, two fp16 numbers in an int32
    """

    k: torch.Tensor
    v: torch.Tensor
    k_ranges: torch.Tensor | None = None
    v_ranges: torch.Tensor | None = None
    k_bitmap: torch.Tensor | None = None
    sink_k: torch.Tensor | None = None
    sink_v: torch.Tensor | None = None

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> "Pages":
        named = {name.removesuffix("_codes"): x for name, x in tensors.items()}
        return cls(**{name: x.view(torch.int32) if name.endswith("ranges") else x for name, x in named.items()})


@triton.jit
def odd(i, j):
    """Return popcount(i & j) & 1 for numbers below 2^16."""
    parity = i & j
    parity ^= parity >> 8
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return parity & 1


@triton.jit
def sign(i, j):
    """Return (-1) ** popcount(i & j) in fp32 for numbers below 2^16."""
    return 1.0 - 2.0 * odd(i, j).to(tl.float32)


@triton.jit
def unpack_fields(words, PLANE: tl.constexpr, WIDTH: tl.constexpr):
    """Unpack codes [R, WIDTH] int32 from the words [R, COUNT] of a plane."""
    R: tl.constexpr = words.shape[0]
    COUNT: tl.constexpr = words.shape[1]
    CHUNK: tl.constexpr = COUNT if COUNT < 4 else 4
    place = PLANE * tl.arange(0, WIDTH // (2 * COUNT))[None, None, :, None]
    x = tl.reshape(words, [R, COUNT // CHUNK, 1, CHUNK]) >> place
    return tl.reshape(tl.join(x, x >> 16), [R, WIDTH]) & ((1 << PLANE) - 1)


@triton.jit
def unpack_float_fields(words, PLANE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr):
    """Unpack 2 ** PLANE + codes [R, WIDTH] in a 16-bit float type, two at a time and without conversion to float.

    A code becomes the highest PLANE bits of the mantissa of 2 ** PLANE; the lowest of these bits has the value 1.
    """
    R: tl.constexpr = words.shape[0]
    COUNT: tl.constexpr = words.shape[1]
    CHUNK: tl.constexpr = COUNT if COUNT < 4 else 4
    MANTISSA: tl.constexpr = 10 if tl.float16 == DTYPE else 7
    BIAS: tl.constexpr = 15 if tl.float16 == DTYPE else 127
    MASK: tl.constexpr = (((1 << PLANE) - 1) << (MANTISSA - PLANE)) * 0x10001
    ONE: tl.constexpr = ((BIAS + PLANE) << MANTISSA) * 0x10001
    place = PLANE * tl.arange(0, WIDTH // (2 * COUNT))[None, None, :, None]
    x = tl.reshape(words, [R, COUNT // CHUNK, 1, CHUNK])
    x = (x << tl.maximum(MANTISSA - PLANE - place, 0)) >> tl.maximum(place - (MANTISSA - PLANE), 0)
    x = (x & MASK) | ONE
    halves = tl.join(x.to(tl.int16), (x >> 16).to(tl.int16))
    return tl.reshape(halves.to(DTYPE, bitcast=True), [R, WIDTH])


@triton.jit
def load_codes(
    base, row, mask, BITS: tl.constexpr, DTYPE: tl.constexpr, OFFSET: tl.constexpr, WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Load OFFSET + codes [R, WIDTH] as DTYPE from rows [R] of WORDS words each. OFFSET: see `launch.code_offset`."""
    if BITS == 3:
        # Rows of 3 or 6 words are aligned to 1 or 2 words. Triton 3.6 wrongly infers from the product of a loaded page
        # number and the slots of a page that rows are aligned to 8 or 16 bytes: hence `opaque`.
        row = opaque(row)
    pointers = base + row[:, None] * WORDS
    LOW: tl.constexpr = 2 if BITS == 3 else BITS
    COUNT: tl.constexpr = WIDTH * LOW // 32 if WIDTH * LOW >= 32 else 1
    words = tl.load(pointers + tl.arange(0, COUNT)[None, :], mask[:, None], 0)
    if OFFSET:
        codes = unpack_float_fields(words, LOW, DTYPE, WIDTH)
    else:
        codes = unpack_fields(words, LOW, WIDTH).to(DTYPE)
    if BITS == 3:
        HIGH: tl.constexpr = WIDTH // 32 if WIDTH >= 32 else 1
        words = tl.load(pointers + COUNT + tl.arange(0, HIGH)[None, :], mask[:, None], 0)
        if OFFSET:
            codes = (codes + 4 * unpack_float_fields(words, 1, DTYPE, WIDTH)).to(DTYPE)
        else:
            codes = (codes + 4 * unpack_fields(words, 1, WIDTH).to(DTYPE)).to(DTYPE)
    return codes


@triton.jit
def load_kept(
    base, row, mask, is_kept, before, BITS: tl.constexpr, DTYPE: tl.constexpr, KEPT: tl.constexpr, WORDS: tl.constexpr
):
    """Load the codes [R, BW] as DTYPE of the channels where `is_kept` (int32) is 1; 0 elsewhere.

    row: [R], rows of WORDS words, with KEPT codes each. before: [R], the number of kept channels before this block.
    """
    rank = before[:, None] + tl.cumsum(is_kept, 1) - is_kept
    inside = mask[:, None] & (is_kept != 0)
    LOW: tl.constexpr = 2 if BITS == 3 else BITS
    PER: tl.constexpr = 32 // LOW
    pointers = base + row[:, None] * WORDS
    words = tl.load(pointers + rank // PER, inside, 0)
    codes = (words >> LOW * (rank % PER)) & ((1 << LOW) - 1)
    if BITS == 3:
        words = tl.load(pointers + (KEPT * 2 + 31) // 32 + rank // 32, inside, 0)
        codes += 4 * ((words >> (rank % 32)) & 1)
    return tl.where(inside, codes, 0).to(DTYPE)


@triton.jit
def store_plane(pointers, mask, codes, PLANE: tl.constexpr):
    """Pack the low PLANE bits of codes [R, WIDTH] into words at pointers [R, 1]."""
    R: tl.constexpr = codes.shape[0]
    WIDTH: tl.constexpr = codes.shape[1]
    COUNT: tl.constexpr = WIDTH * PLANE // 32 if WIDTH * PLANE >= 32 else 1
    CHUNK: tl.constexpr = COUNT if COUNT < 4 else 4
    FIELDS: tl.constexpr = WIDTH // (2 * COUNT)
    part = tl.reshape(codes & ((1 << PLANE) - 1), [R, COUNT // CHUNK, FIELDS, CHUNK, 2])
    part = part << (PLANE * tl.arange(0, FIELDS)[None, None, :, None, None])
    part = part << (16 * tl.arange(0, 2)[None, None, None, None, :])
    words = tl.reshape(tl.sum(tl.sum(part, 4), 2), [R, COUNT]).to(tl.int32)
    tl.store(pointers + tl.arange(0, COUNT)[None, :], words, mask[:, None])


@triton.jit
def store_codes(base, row, mask, codes, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Pack codes [R, WIDTH] int32 into rows [R] of WORDS words."""
    pointers = base + row[:, None] * WORDS
    if BITS == 3:
        store_plane(pointers, mask, codes, 2)
        store_plane(pointers + codes.shape[1] // 16, mask, codes >> 2, 1)
    else:
        store_plane(pointers, mask, codes, BITS)


@triton.jit
def unpack_halves(x):
    """Return (scale, zero) in fp32 from int32 numbers that contain both in fp16."""
    low = x.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, (x >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def store_range(pointers, mask, scale, zero):
    """Write fp16 scales and zeros in the form that `unpack_halves` reads."""
    low = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    tl.store(pointers, low | (zero.to(tl.int16, bitcast=True).to(tl.int32) << 16), mask)


@triton.jit
def store_kept(base, row, mask, codes, is_kept, before, BITS: tl.constexpr, KEPT: tl.constexpr, WORDS: tl.constexpr):
    """Pack the codes [R, BW] int32 where `is_kept` is 1, after `before` [R] earlier codes. The words must be zero."""
    rank = before[:, None] + tl.cumsum(is_kept, 1) - is_kept
    inside = mask[:, None] & (is_kept != 0)
    pointers = base + row[:, None] * WORDS
    LOW: tl.constexpr = 2 if BITS == 3 else BITS
    PER: tl.constexpr = 32 // LOW
    tl.atomic_or(pointers + rank // PER, (codes & ((1 << LOW) - 1)) << LOW * (rank % PER), inside)
    if BITS == 3:
        tl.atomic_or(pointers + (KEPT * 2 + 31) // 32 + rank // 32, (codes >> 2) << (rank % 32), inside)


@triton.jit
def value_range(least, most, INSET: tl.constexpr, LEVELS: tl.constexpr):
    """Return (scale, zero) fp16 of codes for numbers from `least` to `most`.

    The codes leave out the share INSET of this range at each end. If least > most there are no numbers, and both are 0.
    """
    empty = least > most
    least = tl.where(empty, 0.0, least)
    most = tl.where(empty, 0.0, most)
    if INSET > 0:
        margin = (most - least) * INSET
        least += margin
        most -= margin
    scale = tl.minimum(tl.div_rn(most - least, tl.full(least.shape, LEVELS, tl.float32)), 65504.0)
    return scale.to(tl.float16), tl.minimum(tl.maximum(least, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def encode(x, scale, zero, LEVELS: tl.constexpr):
    """Return the codes int32 of x [R, BW] for scale and zero [R] fp16."""
    scale = scale.to(tl.float32)
    some = scale > 0.0
    inverse = tl.where(some, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(some, scale, 1.0)), 0.0)
    code = (x - zero.to(tl.float32)[:, None]) * inverse[:, None]
    code = tl.minimum(tl.maximum(code, 0.0), LEVELS)
    return (code + ROUND).to(tl.int32, bitcast=True) & 0x3FFFFF


@triton.jit
def largest_mask(x, KEPT: tl.constexpr, BLOCKS: tl.constexpr):
    """Return masks (int32 0 or 1) of the KEPT largest magnitudes of each token in blocks x [R, BW]; ties: the first.

    The bits of positive floats have the order of the floats: the smallest magnitude to keep is found bit by bit.
    """
    R: tl.constexpr = x[0].shape[0]
    least = tl.zeros([R], tl.int32)
    for step in range(31):
        candidate = least | (1 << (30 - step))
        count = tl.zeros([R], tl.int32)
        for b in tl.static_range(BLOCKS):
            reached = tl.abs(x[b]).to(tl.int32, bitcast=True) >= candidate[:, None]
            count += tl.sum(reached.to(tl.int32), 1)
        least = tl.where(count >= KEPT, candidate, least)
    room = tl.full([R], KEPT, tl.int32)
    for b in tl.static_range(BLOCKS):
        room -= tl.sum((tl.abs(x[b]).to(tl.int32, bitcast=True) > least[:, None]).to(tl.int32), 1)
    masks = ()
    for b in tl.static_range(BLOCKS):
        size = tl.abs(x[b]).to(tl.int32, bitcast=True)
        equal = (size == least[:, None]).to(tl.int32)
        first = tl.cumsum(equal, 1) <= room[:, None]
        masks += (((size > least[:, None]) | ((equal != 0) & first)).to(tl.int32),)
        room -= tl.sum(equal, 1)
    return masks


@triton.jit
def butterfly(x, BLOCKS: tl.constexpr, STRIDE: tl.constexpr):
    """Apply the unscaled Hadamard transform across sets of BLOCKS blocks of a tuple, STRIDE apart."""
    for stage in tl.static_range(10):
        if 1 << stage < BLOCKS:
            y = ()
            for b in tl.static_range(BLOCKS * STRIDE):
                if b // STRIDE & (1 << stage):
                    y += (x[b - (STRIDE << stage)] - x[b],)
                else:
                    y += (x[b] + x[b + (STRIDE << stage)],)
            x = y
    return x


@triton.jit
def load_block(
    x, token, mask, first_head, order, b: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr, BW: tl.constexpr,
    REAL: tl.constexpr,
):  # fmt: skip
    """Load block b [R, BW] of the CHANNELS of a head group from x (`Rows`), whose first head is first_head.

    order: pointer to a permutation of the channels, or None. Heads have SIZE channels, which are 0 from REAL on. The
    block is 0 outside of the mask and after the last channel.
    """
    place = tl.arange(0, BW)
    row = x.pointer + token[:, None] * x.stride_t + first_head.to(tl.int64) * x.stride_h
    channel = b * BW + place
    if order is not None:
        channel = tl.load(order + channel)
    inside = mask[:, None]
    if (b + 1) * BW > CHANNELS:
        inside = inside & (b * BW + place < CHANNELS)[None, :]
    if REAL < SIZE:
        inside = inside & (channel % SIZE < REAL)[None, :]
    if SIZE % BW == 0 and order is None:
        pointers = row + (b * BW // SIZE * x.stride_h + b * BW % SIZE) + place[None, :]
    else:
        pointers = row + ((channel // SIZE) * x.stride_h + channel % SIZE)[None, :]
    return tl.load(pointers, inside, 0.0)
