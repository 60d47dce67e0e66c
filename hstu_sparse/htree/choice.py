"""Define the kernel that chooses nodes of the tree, from the top layer down, and what other kernels share with it.

Letters: T tokens of the batch, B sequences, H key/value heads, G query heads of each, R tokens of a group, D query/key
and V value head size, r compression_rate (RATE), C a query's candidates in a layer. BG, BN: rows of heads and
candidates of a tile; HALF = D / 2: the first channels of RoPE's pairs are one half of a head, BH wide in a tile.
SORT_BLOCK sort keys and LIST_BLOCK chosen nodes are in registers at a time.

A group of R tokens chooses once. Group g of sequence b has the slot `offsets[b] // R + b + g` of T // R + B.
`htree_choose_fwd_kernel` chooses for the first token of each group and fills a table [choices + 1, TOP_K + WORDS] with
a row for each (slot, head, layer above the tokens): the chosen nodes, ascending and padded with -1, and a bit for each
candidate, set if it was chosen. The nodes of the last row are 0, 1, ..., the parents of a top layer's candidates.

Candidate c is child c % r of parent c // r; all parents except the last have all their children. If a tile holds only
SIBLINGS, children of one parent, its keys are already rotated to their positions in the tile (`pooling.py`). The query
is then rotated by C - 1 - c0, since scores depend only on differences of positions. From tile to tile this position
changes by BN: 16-bit queries with D up to 64 are rotated by this step in registers (STEPPED). Without SIBLINGS keys
are stored rotated by c % r, and each tile of keys is rotated further by c // r * r.

The backward pass may compute the table again, with the same bits: whatever a compiler could contract to a fused
multiply-add is written as one.

A program's workspace, in global memory, holds one after the other
    parents  [LIST] nodes: the parents of the top layer's candidates
    marks    [CANDIDATES] importances, which become sort keys
    tops     [CANDIDATES / 32] the maxima that the importances are relative to; later, counts of chosen candidates
Scores are never stored.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.tiles.rows import locate, row_pointer

# The bits of infinity, above every other importance: the last candidate's importance, so that it is always chosen.
INFINITE = tl.constexpr(0x7F800000)


class Nodes(NamedTuple):
    """The tree that a kernel reads.

    key_rows, value_rows  [H, rows, 2 BH] and [H, rows, BV], the nodes of all layers
    offsets               [B + 1]
    cos, sin              [positions, BH], RoPE's tables
    """

    key_rows: object
    value_rows: object
    offsets: object
    cos: object
    sin: object


class NodeGradients(NamedTuple):
    """The sums of the nodes' gradients, dk [H, rows, D] and dv [H, rows, V].

    units [2]: if they are integers, in multiples of 1 / units[0] and 1 / units[1], else None.
    """

    dk: object
    dv: object
    units: object


@triton.jit
def rotate(low, high, cos, sin):
    """Rotate pairs of channels by an angle; with -sin rotate back."""
    return tl.fma(low, cos, -(high * sin)), tl.fma(high, cos, low * sin)


@triton.jit
def load_query(base, row, stride, live, scale, HALF: tl.constexpr, BH: tl.constexpr):
    """Load both halves of the channels of a group's heads, in fp32, scaled."""
    f = tl.arange(0, BH)[None, :]
    pointers = base + row[:, None].to(tl.int64) * stride + f
    mask = live[:, None] & (f < HALF)
    low = tl.load(pointers, mask=mask, other=0.0)
    high = tl.load(pointers + HALF, mask=mask, other=0.0)
    if BH <= 32 and low.dtype != tl.float32 and row.shape[0] < 64:
        # A product with the identity puts the halves into the layout of products' operands, in which they are rotated.
        # With 64 rows the products would be wgmma from one buffer of shared memory, for which ptxas 12.8 (Triton 3.6)
        # leaves a register unset: `python -m tests.operators.compiling htree 90` reports unset_registers.
        identity = (f == tl.arange(0, BH)[:, None]).to(low.dtype)
        low, high = tl.dot(low, identity, input_precision="ieee"), tl.dot(high, identity, input_precision="ieee")
    return low.to(tl.float32) * scale, high.to(tl.float32) * scale


@triton.jit
def candidate_nodes(parents, c, C, RATE: tl.constexpr):
    """Return the candidates' nodes, node 0 past the last candidate."""
    inside = c < C
    return tl.where(inside, tl.load(parents + c // RATE, mask=inside, other=0) * RATE + c % RATE, 0)


@triton.jit
def first_node(parents, c0, C, RATE: tl.constexpr, SIBLINGS: tl.constexpr):
    """Return the first node of a tile of SIBLINGS."""
    node = 0
    if SIBLINGS:
        node = tl.load(parents + c0 // RATE, mask=c0 < C, other=0) * RATE + c0 % RATE
    return node


@triton.jit
def row_angle(cos, sin, position, BH: tl.constexpr):
    """Return [1, BH] cos and sin of one position."""
    row = position * BH + tl.arange(0, BH)[None, :]
    return tl.load(cos + row), tl.load(sin + row)


@triton.jit
def first_query(low, high, cos, sin, C, BH: tl.constexpr):
    """Return the queries at their position C - 1, rotated for the tile of candidates 0 .. BN - 1."""
    row_cos, row_sin = row_angle(cos, sin, C - 1, BH)
    return rotate(low, high, row_cos, row_sin)


@triton.jit
def tile_query(
    low, high, q_low, q_high, cos, sin, c0, C, BH: tl.constexpr, SIBLINGS: tl.constexpr, STEPPED: tl.constexpr
):
    """Return the queries rotated for the tile that begins at c0.

    If STEPPED, low and high are these queries: `next_query` rotates them by a fixed step. Otherwise the angle is looked
    up, so that no rounding errors accumulate. Without SIBLINGS the keys are rotated instead.
    """
    if SIBLINGS and not STEPPED:
        row_cos, row_sin = row_angle(cos, sin, tl.maximum(C - 1 - c0, 0), BH)
        low, high = rotate(q_low, q_high, row_cos, row_sin)
    return low, high


@triton.jit
def next_query(low, high, step_cos, step_sin, STEPPED: tl.constexpr):
    """Rotate the queries to the next tile, if they are STEPPED."""
    if STEPPED:
        low, high = rotate(low, high, step_cos, -step_sin)
    return low, high


@triton.jit
def load_keys(
    keys, parents, first, c0, C, cos, sin, BH: tl.constexpr, BN: tl.constexpr, RATE: tl.constexpr,
    SIBLINGS: tl.constexpr,
):  # fmt: skip
    """Load both halves of the keys of the candidates c0 .. c0 + BN - 1 of C; keys past C are arbitrary.

    SIBLINGS are adjacent, from the node `first` on, and not rotated further: the query is (`tile_query`). Other keys
    are rotated here.
    """
    f = tl.arange(0, BH)[None, :]
    c = c0 + tl.arange(0, BN)
    if SIBLINGS:
        node = first.to(tl.int64) + tl.arange(0, BN)
    else:
        node = candidate_nodes(parents, c, C, RATE).to(tl.int64)
    pointers = keys + node[:, None] * (2 * BH) + f
    low, high = tl.load(pointers), tl.load(pointers + BH)
    if not SIBLINGS:
        row = (c // RATE * RATE)[:, None] * BH + f
        low, high = rotate(low.to(tl.float32), high.to(tl.float32), tl.load(cos + row), tl.load(sin + row))
        low, high = low.to(keys.dtype.element_ty), high.to(keys.dtype.element_ty)
    return low, high


@triton.jit
def top_layer(length, t, tokens, B, layers, TOP_K: tl.constexpr, RATE: tl.constexpr):
    """Return (top layer, tokens below one of its nodes, its first slot, candidates there) for the token t."""
    layer, size, base, nodes = 0, 1, 0, length
    while (nodes > RATE * TOP_K) & (layer < layers):
        nodes = (nodes + RATE - 1) // RATE
        base += tokens // size + tl.where(layer > 0, B, 0)
        size *= RATE
        layer += 1
    return layer, size, base, tl.minimum(t // size + 1, RATE * TOP_K)


@triton.jit
def begin_walk(parents, length, t, tokens, B, layers, TOP_K: tl.constexpr, LIST: tl.constexpr, RATE: tl.constexpr):
    """Return `top_layer`, and set `parents` to 0, 1, ..., the parents of the top layer's candidates."""
    layer, size, base, C = top_layer(length, t, tokens, B, layers, TOP_K, RATE)
    j = tl.arange(0, LIST)
    tl.debug_barrier()
    tl.store(parents + j, j, mask=j < TOP_K)
    tl.debug_barrier()
    return layer, size, base, C


@triton.jit
def step_down(layer, size, base, C, t, tokens, B, TOP_K: tl.constexpr, RATE: tl.constexpr):
    """Return the values of `top_layer` for the layer below."""
    size = tl.maximum(size // RATE, 1)
    base -= tokens // size + tl.where(layer > 1, B, 0)
    return layer - 1, size, base, (tl.minimum(C, TOP_K) - 1) * RATE + t // size % RATE + 1


@triton.jit
def importances(
    low, high, q_low, q_high, keys, cos, sin, parents, first, c0, C, G: tl.constexpr, BG: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, RATE: tl.constexpr, SIBLINGS: tl.constexpr, STEPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return [BN, BG] scores of a tile in base 2, -inf for heads past the last and for candidates from the last on.

    Candidates are the rows, so that most of a sum over the heads stays within a thread.
    """
    low, high = tile_query(low, high, q_low, q_high, cos, sin, c0, C, BH, SIBLINGS, STEPPED)
    k_low, k_high = load_keys(keys, parents, first, c0, C, cos, sin, BH, BN, RATE, SIBLINGS)
    s = tl.dot(k_low, tl.trans(low).to(k_low.dtype), input_precision=PRECISION)
    s = tl.dot(k_high, tl.trans(high).to(k_low.dtype), s, input_precision=PRECISION)
    # The last candidate also pools tokens after the query.
    seen = (c0 + tl.arange(0, BN) < C - 1)[:, None]
    if G < BG:
        seen = seen & (tl.arange(0, BG) < G)[None, :]
    return tl.where(seen, s, -float("inf"))


@triton.jit
def sort_keys(marks, tops, top, b0, SORT_BLOCK: tl.constexpr, LOW_BITS: tl.constexpr):
    """Return the sort keys [SORT_BLOCK // 32, 32] of the candidates from b0 on, by their importances; -1 stays -1."""
    part = tl.arange(0, SORT_BLOCK // 32)
    c = b0 + part[:, None] * 32 + tl.arange(0, 32)[None, :]
    mark = tl.load(marks + c)
    reference = tl.load(tops + b0 // 32 + part).to(tl.float32, bitcast=True)
    factor = tl.where(reference == top, 1.0, tl.exp2(reference - top))
    # NaN, from keys that are not finite, would mislead the bisection; its maximum with 0 is 0.
    importance = tl.maximum(mark.to(tl.float32, bitcast=True) * factor[:, None], 0.0)
    key = (importance.to(tl.int32, bitcast=True) & ~LOW_BITS) | (~c & LOW_BITS)
    return tl.where(mark == -1, -1, key)


@triton.jit
def bits_set(word):
    """Return the number of set bits in an int32."""
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    return (eights * 0x01010101) >> 24


@triton.jit
def nth_chosen(words, counts, j, CANDIDATES: tl.constexpr):
    """Return the candidate of the j-th set bit in `words`; counts: the number of set bits up to each word's end."""
    row = tl.zeros_like(j)
    step = CANDIDATES // 64
    while step > 0:
        row += tl.where(tl.load(counts + row + step - 1) <= j, step, 0)
        step //= 2
    word = tl.load(words + row)
    remaining = bits_set(word) - (tl.load(counts + row) - j)
    place = tl.zeros_like(j)
    width = 16
    while width > 0:
        below = bits_set(word & (((1 << width) - 1) << place))
        beyond = below <= remaining
        remaining -= tl.where(beyond, below, 0)
        place += tl.where(beyond, width, 0)
        width //= 2
    return row * 32 + place


@triton.jit
def choose(
    q_low, q_high, keys, cos, sin, step_cos, step_sin, parents, children, words, marks, tops, C,
    G: tl.constexpr, BG: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, RATE: tl.constexpr, TOP_K: tl.constexpr,
    LIST: tl.constexpr, LIST_BLOCK: tl.constexpr, CANDIDATES: tl.constexpr, SORT_BLOCK: tl.constexpr,
    LOW_BITS: tl.constexpr, LIMIT: tl.constexpr, SIBLINGS: tl.constexpr, STEPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the TOP_K chosen nodes of C > TOP_K candidates to `children`, and a bit for each of them to `words`.

    Importances are computed for two tiles at a time relative to the maximum so far, and rescaled to the last maximum
    afterwards. Bisection finds a number that exactly TOP_K keys reach, which exists since keys are distinct. The first
    SORT_BLOCK keys stay in registers.
    """
    top = -float("inf")
    low, high = first_query(q_low, q_high, cos, sin, C, BH)
    node0, node1 = first_node(parents, 0, C, RATE, SIBLINGS), first_node(parents, BN, C, RATE, SIBLINGS)
    for c0 in range(0, C, 2 * BN):
        next0 = first_node(parents, c0 + 2 * BN, C, RATE, SIBLINGS)
        next1 = first_node(parents, c0 + 3 * BN, C, RATE, SIBLINGS)
        c = c0 + tl.arange(0, BN)
        s0 = importances(
            low, high, q_low, q_high, keys, cos, sin, parents, node0, c0, C,
            G, BG, BH, BN, RATE, SIBLINGS, STEPPED, PRECISION,
        )  # fmt: skip
        low, high = next_query(low, high, step_cos, step_sin, STEPPED)
        s1 = importances(
            low, high, q_low, q_high, keys, cos, sin, parents, node1, c0 + BN, C,
            G, BG, BH, BN, RATE, SIBLINGS, STEPPED, PRECISION,
        )  # fmt: skip
        low, high = next_query(low, high, step_cos, step_sin, STEPPED)
        top = tl.maximum(top, tl.max(tl.max(tl.maximum(s0, s1), 1), 0))
        tl.store(marks + c, tl.sum(tl.exp2(s0 - top), 1).to(tl.int32, bitcast=True))
        tl.store(marks + BN + c, tl.sum(tl.exp2(s1 - top), 1).to(tl.int32, bitcast=True))
        tl.store(tops + c0 // (2 * BN), top.to(tl.int32, bitcast=True))
        node0, node1 = next0, next1
    tl.debug_barrier()
    for c0 in range(C - 1, CANDIDATES, 64):
        c = c0 + tl.arange(0, 64)
        tl.store(marks + c, tl.where(c == C - 1, INFINITE, -1), mask=c < CANDIDATES)
    tl.debug_barrier()

    sorted_keys = sort_keys(marks, tops, top, 0, SORT_BLOCK, LOW_BITS)
    part, bit = tl.arange(0, SORT_BLOCK // 32), tl.arange(0, 32)
    if CANDIDATES > SORT_BLOCK:
        for b0 in range(SORT_BLOCK, CANDIDATES, SORT_BLOCK):
            key = sort_keys(marks, tops, top, b0, SORT_BLOCK, LOW_BITS)
            tl.store(marks + b0 + part[:, None] * 32 + bit[None, :], key)
        tl.debug_barrier()
    least, limit, count = 0, LIMIT, C
    while (count != TOP_K) & (limit - least > 1):
        middle = least + (limit - least) // 2
        reached = tl.sum((sorted_keys >= middle).to(tl.int32))
        if CANDIDATES > SORT_BLOCK:
            for b0 in range(SORT_BLOCK, CANDIDATES, SORT_BLOCK):
                reached += tl.sum((tl.load(marks + b0 + tl.arange(0, SORT_BLOCK)) >= middle).to(tl.int32), 0)
        if reached >= TOP_K:
            least, count = middle, reached
        else:
            limit = middle

    for b0 in range(0, CANDIDATES, SORT_BLOCK):
        if (b0 > 0) & (CANDIDATES > SORT_BLOCK):
            sorted_keys = tl.load(marks + b0 + part[:, None] * 32 + bit[None, :])
        tl.store(words + b0 // 32 + part, tl.sum(tl.where(sorted_keys >= least, 1 << bit[None, :], 0), 1))
    tl.debug_barrier()
    rank = 0
    for b0 in range(0, CANDIDATES // 32, SORT_BLOCK // 32):
        bit_counts = bits_set(tl.load(words + b0 + part))
        tl.store(tops + b0 + part, rank + tl.cumsum(bit_counts, 0))
        rank += tl.sum(bit_counts, 0)
    tl.debug_barrier()
    for j0 in range(0, LIST, LIST_BLOCK):
        j = j0 + tl.arange(0, LIST_BLOCK)
        c = nth_chosen(words, tops, j, CANDIDATES)
        tl.store(children + j, candidate_nodes(parents, c, C, RATE), mask=j < TOP_K)
    tl.debug_barrier()


@triton.jit
def choose_all(parents, children, C, LIST: tl.constexpr, RATE: tl.constexpr):
    """Expand all candidates if there are no more than TOP_K, so that none enters the softmax."""
    c = tl.arange(0, LIST)
    tl.store(children + c, candidate_nodes(parents, c, C, RATE), mask=c < C)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["B", "tokens", "layers", "rows", "begin", "slots"])
def htree_choose_fwd_kernel(
    q, nodes, workspace, table, scale, B, tokens, layers, rows, begin, slots,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, BG: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr,
    BN: tl.constexpr, RATE: tl.constexpr, TOP_K: tl.constexpr, LIST: tl.constexpr, LIST_BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr, SORT_BLOCK: tl.constexpr, WORKSPACE: tl.constexpr, LOW_BITS: tl.constexpr,
    LIMIT: tl.constexpr, SIBLINGS: tl.constexpr, STEPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill the table of slots begin .. begin + slots - 1; it is initially -1.

    The words of a layer whose candidates are all chosen stay -1.

    q: `Rows`. nodes: without values. workspace: [programs, WORKSPACE].
    """
    keys, offsets, cos, sin = nodes.key_rows, nodes.offsets, nodes.cos, nodes.sin
    workspace += tl.program_id(0).to(tl.int64) * WORKSPACE
    marks = workspace + LIST
    tops = marks + CANDIDATES
    step_cos, step_sin = row_angle(cos, sin, BN, BH)
    row = tl.arange(0, BG)
    live = row < G
    for item in range(tl.program_id(0), slots * H, tl.num_programs(0)):
        g, slot = (item // slots).to(tl.int64), (item % slots).to(tl.int64)
        b, start, length, number = locate(offsets, begin + slot, B, R)
        t = number * R
        layer, size, base, C = begin_walk(workspace, length, t, tokens, B, layers, TOP_K, LIST, RATE)
        layer = tl.where(t < length, layer, 0)  # a slot without a group
        pointer = row_pointer(q, start + tl.minimum(t, length - 1), g * G)
        q_low, q_high = load_query(pointer, row, q.stride_h, live & (t < length), scale, HALF, BH)
        parents = workspace
        while layer > 0:
            layer_keys = keys + (g * rows + base + start // size + b) * (2 * BH)
            children = table + ((slot * H + g) * layers + layer - 1) * (TOP_K + CANDIDATES // 32)
            if C <= TOP_K:
                choose_all(parents, children, C, LIST, RATE)
            else:
                choose(
                    q_low, q_high, layer_keys, cos, sin, step_cos, step_sin, parents, children,
                    children + TOP_K, marks, tops, C, G, BG, BH, BN, RATE, TOP_K, LIST, LIST_BLOCK,
                    CANDIDATES, SORT_BLOCK, LOW_BITS, LIMIT, SIBLINGS, STEPPED, PRECISION,
                )  # fmt: skip
            parents = children
            layer, size, base, C = step_down(layer, size, base, C, t, tokens, B, TOP_K, RATE)
