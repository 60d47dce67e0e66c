"""Forward kernel of hierarchical tree attention.

Letters: T tokens of the batch, B sequences, Hkv key/value heads, G query heads of each, D query/key and V value head
size, r compression_rate (RATE), C a query's candidates in a layer; tile sizes as in `walk.py`.

A program takes one token and one key/value head at a time: the heads of the group are the rows of its products. Tokens
that are worked off at the same time are neighbours, of the same head, so that what they read in common lies in the L1
and L2 caches. The programs stay for the whole launch, as many as the GPU holds at once: memory for notes is needed for
these alone.
"""

import triton
import triton.language as tl

from hstu_sparse.htree.walk import (
    begin_walk,
    candidate_nodes,
    choose,
    choose_all,
    load_halves,
    turned_keys,
    turned_query,
)
from hstu_sparse.tiles import load_rows, store_rows


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
    running_max, running_sum, acc, q_low, q_high, keys, values, k_stride, v_stride, cos, sin, parents, marks, least, C,
    scores, HALF: tl.constexpr, BH: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr,
    BN: tl.constexpr, RATE: tl.constexpr, G: tl.constexpr, CANDIDATES: tl.constexpr, ABOVE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes a layer's candidates into the softmax: all of them, or those whose key (`marks`) is below `least`."""
    for c0 in range(0, C, BN):
        c = c0 + tl.arange(0, BN)
        node = candidate_nodes(parents, c, C, RATE)
        enters = c < C
        k_low, k_high = turned_keys(keys, k_stride, node, enters, cos, sin, HALF, BH, BN)
        low, high = turned_query(q_low, q_high, cos, sin, C - 1 - c0, HALF, BH)
        s = tl.dot(low.to(k_low.dtype), tl.trans(k_low), input_precision=PRECISION)
        s = tl.dot(high.to(k_low.dtype), tl.trans(k_high), s, input_precision=PRECISION)
        if scores is not None:
            h = tl.arange(0, BG)[:, None]
            tl.store(scores + h * CANDIDATES + c[None, :], s, mask=(h < G) & enters[None, :])
        if ABOVE:
            enters &= tl.load(marks + c, mask=enters, other=0) < least
        s = tl.where(enters[None, :], s, -float("inf"))
        new_max = tl.maximum(running_max, tl.max(s, 1))
        # Until something has entered, the maximum is -inf, from which nothing may be subtracted.
        reference = tl.where(new_max == -float("inf"), 0.0, new_max)
        p = tl.exp2(s - reference[:, None])
        rescale = tl.exp2(running_max - reference)
        running_sum = running_sum * rescale + tl.sum(p, 1)
        # Values of what does not enter may be those of tokens after the query's.
        value = load_rows(values, node, v_stride, enters, V, BV)
        acc = tl.dot(p.to(value.dtype), value, acc * rescale[:, None], input_precision=PRECISION)
        running_max = new_max
    return running_max, running_sum, acc


@triton.jit(do_not_specialize=["B", "tokens", "count", "layers", "slots"])
def htree_attend_fwd_kernel(
    q, k, v, k_nodes, v_nodes, offsets, cos, sin, notes, out, lse, positions, choices, trace_scores, trace_state,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    scale, B, tokens, count, layers, slots,
    H: tl.constexpr, G: tl.constexpr, BG: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, BN: tl.constexpr, RATE: tl.constexpr, TOP_K: tl.constexpr, LIST: tl.constexpr,
    CANDIDATES: tl.constexpr, NOTES: tl.constexpr, LOW_BITS: tl.constexpr, LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Output [T, Hq, V] and the logarithm (base 2) of the softmax's sum [T, Hq], for `count` tokens.

    These are all tokens, or those at `positions`, whose rows `out` and `lse` then have. For the tests and the
    comparison tool the walk leaves traces, if asked for: `choices` [count, H, layers, TOP_K] the chosen nodes of the
    layers 1, 2, ...; trace_scores [count, H, layers + 1, G, CANDIDATES], in base 2, of the layers where anything enters
    the softmax; trace_state [count, H, layers + 1, G, BV + 2] output, maximum and sum after each.
    """
    notes += tl.program_id(0).to(tl.int64) * NOTES
    marks, tops = notes + 2 * LIST, notes + 2 * LIST + CANDIDATES
    row = tl.arange(0, BG)
    live = row < G
    for item in range(tl.program_id(0), count * H, tl.num_programs(0)):
        g, i = item // count, (item % count).to(tl.int64)
        token = i
        if positions is not None:
            token = tl.load(positions + i).to(tl.int64)
        b, start, length = find_sequence(offsets, token, B)
        t = (token - start).to(tl.int32)
        q_low, q_high = load_halves(q + token * q_stride_t + g * G * q_stride_h, row, q_stride_h, live, HALF, BH)
        q_low, q_high = q_low * scale, q_high * scale

        tl.debug_barrier()
        layer, size, base, C = begin_walk(notes, length, t, tokens, B, layers, TOP_K, LIST, RATE)
        running_max = tl.full([BG], -float("inf"), tl.float32)
        running_sum = tl.zeros([BG], tl.float32)
        acc = tl.zeros([BG, BV], tl.float32)
        here = 0  # which of the two lists holds this layer's parents
        while layer > 0:
            first = (g.to(tl.int64) * slots + base + start // size + b).to(tl.int64)
            keys, values = k_nodes + first * (2 * HALF), v_nodes + first * V
            parents, children = notes + here * LIST, notes + (1 - here) * LIST
            scores = None
            if trace_scores is not None:
                scores = trace_scores + ((i * H + g) * (layers + 1) + layer) * G * CANDIDATES
            if C <= TOP_K:
                choose_all(parents, children, C, LIST, RATE)
            else:
                least = choose(
                    q_low, q_high, keys, 2 * HALF, cos, sin, parents, children, marks, tops, C,
                    G, BG, HALF, BH, BN, RATE, TOP_K, CANDIDATES, LOW_BITS, LIMIT, PRECISION,
                )  # fmt: skip
                running_max, running_sum, acc = accumulate(
                    running_max, running_sum, acc, q_low, q_high, keys, values, 2 * HALF, V, cos, sin, parents, marks,
                    least, C, scores, HALF, BH, V, BV, BG, BN, RATE, G, CANDIDATES, True, PRECISION,
                )  # fmt: skip
                tl.debug_barrier()
            chosen = tl.minimum(C, TOP_K)
            if choices is not None:
                j = tl.arange(0, LIST)
                target = choices + ((i * H + g) * layers + layer - 1) * TOP_K + j
                tl.store(target, tl.load(children + j, mask=j < chosen, other=-1), mask=j < TOP_K)
            if trace_state is not None:
                state = trace_state + (((i * H + g) * (layers + 1) + layer) * G + row) * (BV + 2)
                tl.store(state[:, None] + tl.arange(0, BV)[None, :], acc, mask=live[:, None])
                tl.store(state + BV, running_max, mask=live)
                tl.store(state + BV + 1, running_sum, mask=live)
            here = 1 - here
            layer -= 1
            size //= RATE
            base -= tl.where(layer > 0, tokens // size + B, 0)
            C = (chosen - 1) * RATE + t // size % RATE + 1

        scores = None
        if trace_scores is not None:
            scores = trace_scores + (i * H + g) * (layers + 1) * G * CANDIDATES
        running_max, running_sum, acc = accumulate(
            running_max, running_sum, acc, q_low, q_high, k + start * k_stride_t + g * k_stride_h,
            v + start * v_stride_t + g * v_stride_h, k_stride_t, v_stride_t, cos, sin, notes + here * LIST, marks,
            0, C, scores, HALF, BH, V, BV, BG, BN, RATE, G, CANDIDATES, False, PRECISION,
        )  # fmt: skip
        if trace_state is not None:
            state = trace_state + ((i * H + g) * (layers + 1) * G + row) * (BV + 2)
            tl.store(state[:, None] + tl.arange(0, BV)[None, :], acc, mask=live[:, None])
            tl.store(state + BV, running_max, mask=live)
            tl.store(state + BV + 1, running_sum, mask=live)
        store_rows(out + (i * H + g) * G * V, row, V, live, acc / running_sum[:, None], V, BV)
        tl.store(lse + (i * H + g) * G + row, running_max + tl.log2(running_sum), mask=live)
