"""Device functions of the attention kernel for few queries (few.py) that turn keys to their positions: RoPE.

Letters: D query/key head size, R tokens of a tile.

A key stands in the cache as the transform of a head group's channels: Sylvester's matrix in blocks of 64 channels, and
across blocks. Of each key only the former is undone, as a product with the matrix of 16 and sums across runs of 16. The
latter, RoPE's own pairing of a head's two halves and the query go together into what a key's cos and sin meet:

    score = sum over blocks of  scale * ((key * cos) . with_cos + (key * sin) . with_sin)

so that an element takes two sums, two products and its part in two products on tensor cores, all in pairs of fp16.
"""

import triton
import triton.language as tl

from hstu_sparse.pages.codec import sign
from hstu_sparse.rotatekv.attention import turn
from hstu_sparse.tiles import COMPILED


@triton.jit
def halves(pairs, DTYPE: tl.constexpr):
    """The two 16-bit numbers [.., 2] of int32 pairs."""
    return tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(DTYPE, bitcast=True)


@triton.jit
def pair(low, high):
    """int32 pairs of fp16 numbers."""
    low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def paired(x, R: tl.constexpr):
    """x [R, 16] with its columns in the order 0, 1, 8, 9, 2, 3, ..: as a thread has them of a product, for the next."""
    return tl.reshape(tl.permute(tl.reshape(x, [R, 2, 4, 2]), 0, 2, 1, 3), [R, 16])


@triton.jit
def side_by_side(low, high, R: tl.constexpr):
    """[R, 16] fp16 in the order of `paired`, of int32 pairs [R, 4] of columns 0 to 7 and of those behind."""
    x = tl.join(halves(low, tl.float16), halves(high, tl.float16))
    return tl.reshape(tl.permute(x, 0, 1, 3, 2), [R, 16])


@triton.jit
def by_twos(OPERATION: tl.constexpr, a, b):
    """add, sub or mul of fp16 numbers, two in one instruction, which the compiler does not find out by itself."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            OPERATION + ".rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.float16, is_pure=True, pack=2
        )  # fmt: skip
    else:
        return a + b if OPERATION == "add" else a - b if OPERATION == "sub" else a * b


@triton.jit
def load_angles(table, position, WORDS: tl.constexpr, STEP: tl.constexpr, R: tl.constexpr):
    """cos and sin [R, 16] fp16, in the order of `paired`, of 16 angles from 16 * STEP on at positions [R].

    table: [.., WORDS] int32, in the order in which threads want it: see `angles.angle_pairs`.
    """
    found = tl.load(table + position[:, None] * WORDS + (STEP * 16 + tl.arange(0, 16))[None, :])
    cos, sin = tl.split(tl.permute(tl.reshape(found, [R, 4, 2, 2]), 0, 1, 3, 2))  # [R, 4, first 8 or others]
    return tl.reshape(halves(cos, tl.float16), [R, 16]), tl.reshape(halves(sin, tl.float16), [R, 16])


@triton.jit
def load_turns(table, position, HALF: tl.constexpr, R: tl.constexpr):
    """What `turned_scores` needs to know of positions [R]: `load_angles` of each 16 angles, and first ones.

    Those are int32 pairs [R] of cos and sin of the first angle of each 64.
    """
    turns = ()
    firsts = ()
    for o in tl.static_range(HALF):
        word = table + position * (HALF * 64) + o * 64
        firsts += ((tl.load(word) & 0xFFFF) | (tl.load(word + 2) << 16),)
        for a in tl.static_range(4):
            turns += (load_angles(table, position, HALF * 64, o * 4 + a, R),)
    return turns, firsts


@triton.jit
def transformed(words, matrix, centre, FIRST: tl.constexpr, PLANE: tl.constexpr, R: tl.constexpr):
    """Sylvester's transform of a block of codes, less their middle, / 512: four times `paired` [R, 16] fp16, exact.

    words: a tuple of [R, 4], of which the block's begin at FIRST. The transform of 64 is one of 16 on tensor cores, and
    one of 4 across runs of 16 channels. centre: what the middle of 16 codes is after theirs.
    """
    FIELDS: tl.constexpr = 16 // PLANE
    MASK: tl.constexpr = ((1 << PLANE) - 1) * 0x10001
    x = ()
    for t in tl.static_range(4):
        fields = words[FIRST + 2 * t // FIELDS] >> (2 * t % FIELDS * PLANE)
        codes = side_by_side(fields & MASK, fields & (MASK << PLANE), R)
        x += (paired(tl.dot(codes, matrix, centre, out_dtype=tl.float16), R),)
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
def pieces(x, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    """A tuple of COUNT [4, COLUMNS] of x [4, COLUMNS, COUNT]; COUNT is 8 or 16."""
    found = (x,)
    for level in tl.static_range(4):
        if COUNT >> level > 1:
            halved = ()
            for i in tl.static_range(1 << level):
                low, high = tl.split(
                    tl.permute(tl.reshape(found[i], [4, COLUMNS, 2, COUNT >> (level + 1)]), 0, 1, 3, 2)
                )
                if COUNT >> (level + 1) == 1:
                    halved += (tl.reshape(low, [4, COLUMNS]), tl.reshape(high, [4, COLUMNS]))
                else:
                    halved += (low, high)
            found = halved
    return found


@triton.jit
def turning_queries(
    q, query, head, own, real, length, near, far, stride_t, stride_h, zero_scale, unit, D: tl.constexpr,
    COLUMNS: tl.constexpr, K_BLOCKS: tl.constexpr,
):  # fmt: skip
    """What keys meet that are turned to their position by cos and sin of it.

    Blocks o and o + HALF of a key's head are turned together, and meet the query's x and y there:

        score = key_o * (cos x + sin y) + key_(o + HALF) * (cos y - sin x)

    and each of the two is a sum over the blocks i of the transformed key, with Sylvester's signs, which go to the
    queries. own: [COLUMNS], the head's number in its group.

    Returns:
        (queries, zero queries, greatest element [COLUMNS]). queries: for each block i of a head, each o and each 16
        channels what meets key i * cos, and what meets key i * sin, [16, COLUMNS] fp16 in the order of `paired`.
        zero queries: for each o what meets channel 0 of all blocks, int32 pairs [COLUMNS, 4] by block.
    """
    BLOCKS: tl.constexpr = D // 64
    HALF: tl.constexpr = D // 128
    j = tl.arange(0, 4)
    channel = 8 * tl.arange(0, 8 * HALF)[None, None, :] + (2 * j)[:, None, None]
    base = (q + query * stride_t + head.to(tl.int64) * stride_h)[None, :, None] + channel * unit
    most = tl.zeros([COLUMNS], tl.float32)
    turned = ()
    for odd in tl.static_range(2):
        x = tl.load(base + odd, real[None, :, None], 0.0).to(tl.float32)
        y = tl.load(base + D // 2 + odd, real[None, :, None], 0.0).to(tl.float32)
        cos, sin = turn(length, 0, channel + odd, near, far, D // 2)
        x, y = x * cos - y * sin, y * cos + x * sin
        most = tl.maximum(most, tl.max(tl.max(tl.maximum(tl.abs(x), tl.abs(y)), 2), 0))
        turned += (pieces(x, 8 * HALF, COLUMNS), pieces(y, 8 * HALF, COLUMNS))
    divisor = (1.0 / tl.where(most > 0.0, most, 1.0))[None, :]
    queries = ()
    for i in tl.static_range(BLOCKS):
        for o in tl.static_range(HALF):
            first, second = sign(i + j * 0, o)[:, None] * divisor, sign(i + j * 0, o + HALF)[:, None] * divisor
            for a in tl.static_range(4):
                for by_sin in tl.static_range(2):
                    eighths = ()
                    for eighth in tl.static_range(2):
                        both = ()
                        for odd in tl.static_range(2):
                            x = turned[2 * odd][(o * 4 + a) * 2 + eighth]
                            y = turned[2 * odd + 1][(o * 4 + a) * 2 + eighth]
                            both += (first * y - second * x if by_sin else first * x + second * y,)
                        eighths += (tl.trans(pair(both[0], both[1])),)
                    queries += (tl.trans(side_by_side(eighths[0], eighths[1], COLUMNS)),)
    zero_queries = ()
    of_head = tl.where(j[:, None] < K_BLOCKS, sign((j // BLOCKS)[:, None], own[None, :]), 0.0) * divisor * zero_scale
    for o in tl.static_range(HALF):
        first, second = sign(j, o)[:, None] * of_head, sign(j, o + HALF)[:, None] * of_head
        x = tl.sum(tl.where(j[:, None] == 0, turned[0][o * 8], 0.0), 0)[None, :]
        y = tl.sum(tl.where(j[:, None] == 0, turned[1][o * 8], 0.0), 0)[None, :]
        zero_queries += (tl.trans(pair(first * x + second * y, first * y - second * x)),)
    return queries, zero_queries, most


@triton.jit
def turned_scores(
    words, scales, zeros, queries, zero_queries, signs, matrix, centre, angles, D: tl.constexpr,
    K_BLOCKS: tl.constexpr, K_PER: tl.constexpr, CHUNKS: tl.constexpr, PLANE: tl.constexpr, R: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scores [R, COLUMNS] of keys that are turned back and to their positions, a block of them at a time.

    zeros: [R, 4] of each block, what its middle code stands for; queries, zero_queries: of `turning_queries`; signs:
    [COLUMNS] of each head of the group, what Sylvester's matrix has for it and the column's own; angles: of
    `load_turns`.
    """
    HALF: tl.constexpr = D // 128
    OWN: tl.constexpr = D // 64
    turns, firsts = angles
    zero = halves(pair(zeros, zeros), tl.float16)
    x = zero * halves(tl.broadcast_to(firsts[0][:, None], [R, 4]), tl.float16)
    y = zero * halves(tl.broadcast_to(firsts[HALF - 1][:, None], [R, 4]), tl.float16)
    zero = tl.reshape(tl.permute(tl.join(x, y), 0, 1, 3, 2), [R, 16])
    zero_query = side_by_side(zero_queries[0], zero_queries[HALF - 1] if HALF > 1 else zero_queries[0] * 0, COLUMNS)
    scores = tl.dot(zero, tl.trans(zero_query), tl.zeros([R, COLUMNS], tl.float32))
    for i in tl.static_range(K_BLOCKS):
        x = transformed(words, matrix, centre, i * CHUNKS, PLANE, R)
        part = tl.zeros([R, COLUMNS], tl.float32)
        for o in tl.static_range(HALF):
            for a in tl.static_range(4):
                for c in tl.static_range(2):
                    query = queries[((i % OWN * HALF + o) * 4 + a) * 2 + c]
                    part = tl.dot(by_twos("mul", x[a], turns[o * 4 + a][c]), query, part)
        part *= scales[i // K_PER][:, None]
        scores += part if i < OWN else part * signs[i // OWN][None, :]
    return scores
