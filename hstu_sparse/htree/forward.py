"""Forward kernel of hierarchical tree attention.

Letters: T tokens of the batch, B sequences, H key/value heads, G query heads of each, D query/key and V value head
size, r compression_rate (RATE), C a query's candidates in a layer; tile sizes as in `walk.py`.

A program takes one token and one key/value head at a time: the heads of the group are the rows of its products. Tokens
that are worked off at the same time are neighbours, of the same head, so that what they read in common lies in the L1
and L2 caches. The programs stay for the whole launch, as many as the GPU holds at once: memory for notes is needed for
these alone.
"""

import triton
import triton.language as tl

from hstu_sparse.htree.walk import (
    FIRST,
    begin_walk,
    candidate_nodes,
    choose,
    choose_all,
    load_query,
    step_down,
    turned_keys,
    turned_query,
)
from hstu_sparse.tiles import store_rows


@triton.jit
def find_sequence(offsets, token, B):
    """(sequence, its first token, its length) of a token."""
    low = 0
    high = B - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(offsets + middle) <= token:
            low = middle
        else:
            high = middle - 1
    start = tl.load(offsets + low).to(tl.int64)
    return low, start, (tl.load(offsets + low + 1) - start).to(tl.int32)


@triton.jit
def accumulate(
    running_max, running_sum, acc, low, high, keys, values, cos, sin, parents, marks, marked, least, C, scores,
    G: tl.constexpr, BG: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, RATE: tl.constexpr,
    CANDIDATES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes a layer's candidates into the softmax: all of them, or if they are marked those with a key below `least`."""
    for c0 in range(0, C, BN):
        c = c0 + tl.arange(0, BN)
        node = candidate_nodes(parents, c, C, RATE)
        inside = c < C
        # What does not enter is not read either: the last candidate pools tokens after the query's.
        enters = inside & (tl.load(marks + c, mask=inside & marked, other=-1) < least)
        reads = enters
        if scores is not None:
            reads = inside
        k_low, k_high, _cos, _sin = turned_keys(keys, node, reads, c, cos, sin, BH, RATE)
        s = tl.dot(low, tl.trans(k_low), input_precision=PRECISION)
        s = tl.dot(high, tl.trans(k_high), s, input_precision=PRECISION)
        if scores is not None:
            h = tl.arange(0, BG)[:, None]
            tl.store(scores + h * CANDIDATES + c[None, :], s, mask=(h < G) & inside[None, :])
        s = tl.where(enters[None, :], s, -float("inf"))
        new_max = tl.maximum(running_max, tl.max(s, 1))
        # Until something has entered, the maximum is -inf, from which nothing may be subtracted.
        reference = tl.where(new_max == -float("inf"), 0.0, new_max)
        p = tl.exp2(s - reference[:, None])
        rescale = tl.exp2(running_max - reference)
        running_sum = running_sum * rescale + tl.sum(p, 1)
        pointers = values + node[:, None].to(tl.int64) * BV + tl.arange(0, BV)[None, :]
        value = tl.load(pointers, mask=enters[:, None], other=0.0)
        acc = tl.dot(p.to(value.dtype), value, acc * rescale[:, None], input_precision=PRECISION)
        running_max = new_max
    return running_max, running_sum, acc


@triton.jit(do_not_specialize=["B", "tokens", "count", "layers", "rows"])
def htree_attend_fwd_kernel(
    q, keys, values, offsets, cos, sin, notes, out, lse, positions, choices, trace_scores, trace_state,
    q_stride_t, q_stride_h, scale, B, tokens, count, layers, rows,
    H: tl.constexpr, G: tl.constexpr, BG: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, BN: tl.constexpr, RATE: tl.constexpr, TOP_K: tl.constexpr, LIST: tl.constexpr,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, NOTES: tl.constexpr, LOW_BITS: tl.constexpr, LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Output [T, Hq, V] and the logarithm (base 2) of the softmax's sum [T, Hq], for `count` tokens.

    keys [H, rows, 2 BH] and values [H, rows, BV] hold all layers. The tokens are all, or those at `positions`, whose
    rows `out` and `lse` then have. For the tests and the comparison tool the walk leaves traces, if asked for: choices
    [count, H, layers, TOP_K] the chosen nodes of the layers 1, 2, ...; trace_scores [count, H, layers + 1, G,
    CANDIDATES], in base 2, of the layers where anything enters the softmax; trace_state [count, H, layers + 1, G,
    BV + 2] output, maximum and sum after each layer.
    """
    notes += tl.program_id(0).to(tl.int64) * NOTES
    marks, tops = notes + 2 * LIST, notes + 2 * LIST + CANDIDATES
    dtype: tl.constexpr = keys.dtype.element_ty
    row = tl.arange(0, BG)
    live = row < G
    for item in range(tl.program_id(0), count * H, tl.num_programs(0)):
        g, i = (item // count).to(tl.int64), (item % count).to(tl.int64)
        token = i
        if positions is not None:
            token = tl.load(positions + i).to(tl.int64)
        b, start, length = find_sequence(offsets, token, B)
        t = (token - start).to(tl.int32)
        q_low, q_high = load_query(q + token * q_stride_t + g * G * q_stride_h, row, q_stride_h, live, scale, HALF, BH)

        running_max = tl.full([BG], -float("inf"), tl.float32)
        running_sum = tl.zeros([BG], tl.float32)
        acc = tl.zeros([BG, BV], tl.float32)
        here = 0  # which of the two lists holds this layer's parents
        layer, size, base, C = begin_walk(notes, length, t, tokens, B, layers, TOP_K, LIST, RATE)
        while layer >= 0:
            first = g * rows + base + start // size + tl.where(layer > 0, b, 0)
            layer_keys = keys + first * (2 * BH)
            parents, children = notes + here * LIST, notes + (1 - here) * LIST
            trace = (i * H + g) * (layers + 1) + layer
            if (layer > 0) & (C <= TOP_K):
                choose_all(parents, children, C, LIST, RATE)
            else:
                low, high = turned_query(q_low, q_high, cos, sin, C - 1, dtype, BH)
                least = FIRST
                if layer > 0:
                    least = choose(
                        low, high, layer_keys, cos, sin, parents, children, marks, tops, C,
                        G, BG, BH, BN, RATE, TOP_K, CANDIDATES, BLOCK, LOW_BITS, LIMIT, PRECISION,
                    )  # fmt: skip
                scores = None
                if trace_scores is not None:
                    scores = trace_scores + trace * G * CANDIDATES
                running_max, running_sum, acc = accumulate(
                    running_max, running_sum, acc, low, high, layer_keys, values + first * BV, cos, sin, parents, marks,
                    layer > 0, least, C, scores, G, BG, BH, BV, BN, RATE, CANDIDATES, PRECISION,
                )  # fmt: skip
                tl.debug_barrier()
            if choices is not None:
                j = tl.arange(0, LIST)
                target = choices + ((i * H + g) * layers + layer - 1) * TOP_K + j
                node = tl.load(children + j, mask=j < tl.minimum(C, TOP_K), other=-1)
                tl.store(target, node, mask=(j < TOP_K) & (layer > 0))
            if trace_state is not None:
                state = trace_state + (trace * G + row) * (BV + 2)
                tl.store(state[:, None] + tl.arange(0, BV)[None, :], acc, mask=live[:, None])
                tl.store(state + BV, running_max, mask=live)
                tl.store(state + BV + 1, running_sum, mask=live)
            here = 1 - here
            layer, size, base, C = step_down(layer, size, base, C, t, tokens, B, TOP_K, RATE)

        store_rows(out + (i * H + g) * G * V, row, V, live, acc / running_sum[:, None], V, BV)
        tl.store(lse + (i * H + g) * G + row, running_max + tl.log2(running_sum), mask=live)
