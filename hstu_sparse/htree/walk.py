"""Device functions of a query's walk down the tree: candidates, turned keys and queries, scores, the choice.

Letters: T tokens of the batch, B sequences, G query heads of a key/value head, D query/key and V value head size, r
compression_rate (RATE), C a query's candidates in a layer. BG, BN: rows of heads and candidates of a tile; HALF = D / 2
channels, the first of RoPE's pairs, in a tile of BH.

A tile holds the candidates c0 .. c0 + BN - 1. Position c is c0 plus the place in the tile, so the keys are turned by
their place, with a table that is the same for every tile, and the query by C - 1 - c0: scores depend on the difference.

Forward and backward pass make the same choice, bit by bit, for they call the same functions, and whatever a compiler
could contract to a fused multiply-add is written as one.

A program's notes, in global memory: the list of parents of this layer, the list that becomes the next layer's, the
candidates' keys and the maxima that their importances refer to. Nothing else of size r * top_k leaves the registers.
"""

import triton
import triton.language as tl

# Above every key: the last candidate's, which is chosen always.
FIRST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def turn(low, high, cos, sin):
    """Turns pairs of channels by an angle; with -sin back."""
    return tl.fma(low, cos, -(high * sin)), tl.fma(high, cos, low * sin)


@triton.jit
def turned_query(low, high, cos, sin, position, HALF: tl.constexpr, BH: tl.constexpr):
    f = tl.arange(0, BH)
    row_cos = tl.load(cos + position * HALF + f, mask=f < HALF, other=0.0)[None, :]
    row_sin = tl.load(sin + position * HALF + f, mask=f < HALF, other=0.0)[None, :]
    return turn(low, high, row_cos, row_sin)


@triton.jit
def load_halves(base, row, stride, inside, HALF: tl.constexpr, BH: tl.constexpr):
    """Both halves of the channels of some rows, in fp32."""
    f = tl.arange(0, BH)[None, :]
    pointers = base + row[:, None].to(tl.int64) * stride + f
    if HALF == BH:
        mask = inside[:, None]
    else:
        mask = inside[:, None] & (f < HALF)
    low = tl.load(pointers, mask=mask, other=0.0)
    high = tl.load(pointers + HALF, mask=mask, other=0.0)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def turned_keys(keys, stride, node, inside, cos, sin, HALF: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr):
    """The keys of a tile, turned by their places in it."""
    low, high = load_halves(keys, node, stride, inside, HALF, BH)
    place = tl.arange(0, BN)[:, None] * HALF + tl.arange(0, BH)[None, :]
    mask = tl.arange(0, BH)[None, :] < HALF
    tile_cos = tl.load(cos + place, mask=mask, other=0.0)
    tile_sin = tl.load(sin + place, mask=mask, other=0.0)
    low, high = turn(low, high, tile_cos, tile_sin)
    return low.to(keys.dtype.element_ty), high.to(keys.dtype.element_ty)


@triton.jit
def candidate_nodes(parents, c, C, RATE: tl.constexpr):
    """Candidate c is child c % r of parent c // r: all parents but the last have all their children."""
    return tl.load(parents + c // RATE, mask=c < C, other=0) * RATE + c % RATE


@triton.jit
def begin_walk(parents, length, t, tokens, B, layers, TOP_K: tl.constexpr, LIST: tl.constexpr, RATE: tl.constexpr):
    """(top layer, tokens below one of its nodes, its first slot in the buffer, candidates there) for the token t.

    The top layer's candidates are the children of 0, 1, ...: with that list it is a layer like the others.
    """
    layer, size, base, nodes = 0, 1, 0, length
    while (nodes > RATE * TOP_K) & (layer < layers):
        nodes = (nodes + RATE - 1) // RATE
        base += tl.where(layer > 0, tokens // size + B, 0)
        size *= RATE
        layer += 1
    j = tl.arange(0, LIST)
    tl.store(parents + j, j, mask=j < TOP_K)
    tl.debug_barrier()
    return layer, size, base, tl.minimum(t // size + 1, RATE * TOP_K)


@triton.jit
def choose(
    q_low, q_high, keys, stride, cos, sin, parents, children, marks, tops, C,
    G: tl.constexpr, BG: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
    RATE: tl.constexpr, TOP_K: tl.constexpr, CANDIDATES: tl.constexpr, LOW_BITS: tl.constexpr, LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the C > TOP_K candidates' keys to `marks` and the chosen nodes to `children`; returns the least chosen key.

    Importances are summed up tile by tile against the maximum so far, and brought to the last maximum afterwards. The
    least chosen key is found by bisection: no key occurs twice, so some number has exactly TOP_K keys from it on.
    """
    live = tl.arange(0, BG)[:, None] < G
    top = -float("inf")
    for c0 in range(0, C, BN):
        c = c0 + tl.arange(0, BN)
        node = candidate_nodes(parents, c, C, RATE)
        k_low, k_high = turned_keys(keys, stride, node, c < C, cos, sin, HALF, BH, BN)
        low, high = turned_query(q_low, q_high, cos, sin, C - 1 - c0, HALF, BH)
        s = tl.dot(low.to(k_low.dtype), tl.trans(k_low), input_precision=PRECISION)
        s = tl.dot(high.to(k_low.dtype), tl.trans(k_high), s, input_precision=PRECISION)
        # The last candidate pools tokens after the query's.
        s = tl.where(live & (c < C - 1)[None, :], s, -float("inf"))
        top = tl.maximum(top, tl.max(tl.max(s, 1), 0))
        tl.store(marks + c, tl.sum(tl.exp2(s - top), 0).to(tl.int32, bitcast=True), mask=c < C)
        tl.store(tops + c0 // BN, top.to(tl.int32, bitcast=True))
    tl.debug_barrier()

    c = tl.arange(0, CANDIDATES)
    inside = c < C
    importance = tl.load(marks + c, mask=inside, other=0).to(tl.float32, bitcast=True)
    reference = tl.load(tops + c // BN, mask=inside, other=0).to(tl.float32, bitcast=True)
    importance *= tl.exp2(reference - top)
    # NaN, of keys that are not finite, would lead the bisection astray.
    importance = tl.where(importance >= 0.0, importance, 0.0)
    key = (importance.to(tl.int32, bitcast=True) & ~LOW_BITS) | (LOW_BITS - c)
    key = tl.where(inside, tl.where(c == C - 1, FIRST, key), -1)
    tl.debug_barrier()
    tl.store(marks + c, key, mask=inside)

    least, limit, count = 0, LIMIT, C
    while (count != TOP_K) & (limit - least > 1):
        middle = least + (limit - least) // 2
        found = tl.sum((key >= middle).to(tl.int32), 0)
        if found >= TOP_K:
            least, count = middle, found
        else:
            limit = middle

    chosen = key >= least
    rank = tl.cumsum(chosen.to(tl.int32), 0) - 1
    node = candidate_nodes(parents, c, C, RATE)
    tl.store(children + rank, node, mask=chosen & (rank < TOP_K))
    tl.debug_barrier()
    return least


@triton.jit
def choose_all(parents, children, C, LIST: tl.constexpr, RATE: tl.constexpr):
    """Where there are no more than TOP_K candidates all are expanded, and none enters the softmax."""
    c = tl.arange(0, LIST)
    tl.store(children + c, candidate_nodes(parents, c, C, RATE), mask=c < C)
    tl.debug_barrier()
