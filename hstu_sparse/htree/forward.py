"""Define the forward kernel of hierarchical tree attention.

Letters: T tokens of the batch, B sequences, H key/value heads, G query heads of each, D query/key and V value head
size, r compression_rate (RATE), C a query's candidates in a layer; tile sizes as in `walk.py`.

A program processes one token and one key/value head at a time: the query heads of that key/value head are the rows of
its products. Tokens that are processed at the same time are neighbours, of the same head, so that the L2 cache holds
what they read. The launch has as many programs as the GPU runs at once, so that only these need a workspace.
"""

import triton
import triton.language as tl

from hstu_sparse.htree.walk import (
    begin_walk,
    choose,
    choose_all,
    first_node,
    first_query,
    load_keys,
    load_query,
    next_query,
    row_angle,
    step_down,
    tile_query,
)
from hstu_sparse.tiles.rows import row_pointer, sequence_of, store_rows


@triton.jit
def find_sequence(offsets, token, B):
    """Return (sequence, its first token, its length) of a token."""
    low = sequence_of(offsets, token, B)
    start = tl.load(offsets + low).to(tl.int64)
    return low, start, (tl.load(offsets + low + 1) - start).to(tl.int32)


@triton.jit
def entering(words, above, c0, C, BN: tl.constexpr):
    """Return a bit for each of the candidates c0 .. c0 + 2 BN - 1 (32), set if it enters the softmax."""
    inside = tl.where(C - c0 >= 32, -1, (1 << tl.minimum(C - c0, 31)) - 1)
    return ~tl.load(words + c0 // (2 * BN), mask=above & (c0 < C), other=0) & inside


@triton.jit
def entering_scores(
    low, high, q_low, q_high, keys, cos, sin, parents, first, word, c0, C,
    BH: tl.constexpr, BN: tl.constexpr, RATE: tl.constexpr, SIBLINGS: tl.constexpr, STEPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (nodes of a tile, scores [BG, BN] in base 2, -inf for candidates that do not enter the softmax)."""
    low, high = tile_query(low, high, q_low, q_high, cos, sin, c0, C, BH, SIBLINGS, STEPPED)
    node, k_low, k_high = load_keys(keys, parents, first, c0, C, None, cos, sin, BH, BN, RATE, SIBLINGS)
    s = tl.dot(low.to(k_low.dtype), tl.trans(k_low), input_precision=PRECISION)
    s = tl.dot(high.to(k_low.dtype), tl.trans(k_high), s, input_precision=PRECISION)
    c = c0 + tl.arange(0, BN)
    return node, tl.where(((word & (1 << (c % (2 * BN)))) != 0)[None, :], s, -float("inf"))


@triton.jit
def add_values(acc, p, values, node, c0, end, BV: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """Add p times the values of a tile of nodes to acc."""
    pointers = values + node[:, None] * BV + tl.arange(0, BV)[None, :]
    value = tl.load(pointers, mask=(c0 + tl.arange(0, BN) < end)[:, None], other=0.0)
    return tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)


@triton.jit
def accumulate(
    running_max, running_sum, acc, q_low, q_high, keys, values, cos, sin, step_cos, step_sin, parents, words, above, C,
    BH: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, RATE: tl.constexpr, SIBLINGS: tl.constexpr,
    STEPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a layer's candidates to the softmax, two tiles at a time: above the tokens those not in `words`."""
    # The last candidate above the tokens pools tokens after the query's, which may be NaN: it is not even multiplied by
    # 0.
    end = tl.where(above, C - 1, C)
    low, high = first_query(q_low, q_high, cos, sin, C, BH)
    here0, here1 = first_node(parents, 0, C, RATE, SIBLINGS), first_node(parents, BN, C, RATE, SIBLINGS)
    word = entering(words, above, 0, C, BN)
    for c0 in range(0, C, 2 * BN):
        next0 = first_node(parents, c0 + 2 * BN, C, RATE, SIBLINGS)
        next1 = first_node(parents, c0 + 3 * BN, C, RATE, SIBLINGS)
        next_word = entering(words, above, c0 + 2 * BN, C, BN)
        node0, s0 = entering_scores(
            low, high, q_low, q_high, keys, cos, sin, parents, here0, word, c0, C,
            BH, BN, RATE, SIBLINGS, STEPPED, PRECISION,
        )  # fmt: skip
        low, high = next_query(low, high, step_cos, step_sin, STEPPED)
        node1, s1 = entering_scores(
            low, high, q_low, q_high, keys, cos, sin, parents, here1, word, c0 + BN, C,
            BH, BN, RATE, SIBLINGS, STEPPED, PRECISION,
        )  # fmt: skip
        low, high = next_query(low, high, step_cos, step_sin, STEPPED)
        new_max = tl.maximum(running_max, tl.max(tl.maximum(s0, s1), 1))
        # Until a candidate has entered, the maximum is -inf, and a difference from it would be NaN.
        reference = tl.where(new_max == -float("inf"), 0.0, new_max)
        p0, p1 = tl.exp2(s0 - reference[:, None]), tl.exp2(s1 - reference[:, None])
        rescale = tl.exp2(running_max - reference)
        running_sum = running_sum * rescale + tl.sum(p0 + p1, 1)
        acc = add_values(acc * rescale[:, None], p0, values, node0, c0, end, BV, BN, PRECISION)
        acc = add_values(acc, p1, values, node1, c0 + BN, end, BV, BN, PRECISION)
        running_max = new_max
        here0, here1, word = next0, next1, next_word
    return running_max, running_sum, acc


@triton.jit(do_not_specialize=["B", "tokens", "layers", "rows"])
def htree_attend_fwd_kernel(
    q, nodes, workspace, out, lse, choices, scale, B, tokens, layers, rows,
    H: tl.constexpr, G: tl.constexpr, BG: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, BN: tl.constexpr, RATE: tl.constexpr, TOP_K: tl.constexpr, LIST: tl.constexpr,
    SOME: tl.constexpr, CANDIDATES: tl.constexpr, HELD: tl.constexpr, WORKSPACE: tl.constexpr, LOW_BITS: tl.constexpr,
    LIMIT: tl.constexpr, SIBLINGS: tl.constexpr, STEPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the output [T, Hq, V] and the logarithm (base 2) of the softmax's sum [T, Hq].

    q: `Rows`. choices [T, H, layers, TOP_K]: if given, it gets the chosen nodes of the layers 1, 2, ..., for the tests.
    """
    keys, values, offsets, cos, sin = nodes.key_rows, nodes.value_rows, nodes.offsets, nodes.cos, nodes.sin
    workspace += tl.program_id(0).to(tl.int64) * WORKSPACE
    marks = workspace + 2 * LIST
    tops, words = marks + CANDIDATES, marks + CANDIDATES + CANDIDATES // 32
    step_cos, step_sin = row_angle(cos, sin, BN, BH)
    row = tl.arange(0, BG)
    live = row < G
    for item in range(tl.program_id(0), tokens * H, tl.num_programs(0)):
        g, token = (item // tokens).to(tl.int64), (item % tokens).to(tl.int64)
        b, start, length = find_sequence(offsets, token, B)
        t = (token - start).to(tl.int32)
        q_low, q_high = load_query(row_pointer(q, token, g * G), row, q.stride_h, live, scale, HALF, BH)

        running_max = tl.full([BG], -float("inf"), tl.float32)
        running_sum = tl.zeros([BG], tl.float32)
        acc = tl.zeros([BG, BV], tl.float32)
        current = 0  # the list, of two, with this layer's parents
        layer, size, base, C = begin_walk(workspace, length, t, tokens, B, layers, TOP_K, LIST, RATE)
        while layer >= 0:
            first = g * rows + base + start // size + tl.where(layer > 0, b, 0)
            layer_keys = keys + first * (2 * BH)
            parents, children = workspace + current * LIST, workspace + (1 - current) * LIST
            if (layer > 0) & (C <= TOP_K):
                choose_all(parents, children, C, LIST, RATE)
            else:
                if layer > 0:
                    choose(
                        q_low, q_high, layer_keys, cos, sin, step_cos, step_sin, parents, children, words, marks, tops,
                        C, G, BG, BH, BN, RATE, TOP_K, LIST, SOME, CANDIDATES, HELD, LOW_BITS, LIMIT, SIBLINGS, STEPPED,
                        PRECISION,
                    )  # fmt: skip
                running_max, running_sum, acc = accumulate(
                    running_max, running_sum, acc, q_low, q_high, layer_keys, values + first * BV, cos, sin, step_cos,
                    step_sin, parents, words, layer > 0, C, BH, BV, BN, RATE, SIBLINGS, STEPPED, PRECISION,
                )  # fmt: skip
                tl.debug_barrier()
            if choices is not None:
                j = tl.arange(0, LIST)
                target = choices + ((token * H + g) * layers + layer - 1) * TOP_K + j
                node = tl.load(children + j, mask=j < tl.minimum(C, TOP_K), other=-1)
                tl.store(target, node, mask=(j < TOP_K) & (layer > 0))
            current = 1 - current
            layer, size, base, C = step_down(layer, size, base, C, t, tokens, B, TOP_K, RATE)

        store_rows(out + (token * H + g) * G * V, row, V, live, acc / running_sum[:, None], V, BV)
        tl.store(lse + (token * H + g) * G + row, running_max + tl.log2(running_sum), mask=live)
