"""Define the backward kernel of hierarchical tree attention: the same walk, with gradients instead of the softmax.

Letters as in `forward.py`. With s_c the score in natural units, p_c = exp(s_c - lse) and o the output,
    dv_c = sum over heads p_c do,   ds_c = p_c (do.v_c - do.o),   dq = scale R^-1 sum_c ds_c R_c k_c,
    dk_c = scale R_c^-1 sum over heads ds_c R q
where R and R_c are RoPE's rotations. A candidate's gradients are added to its node's in memory; the gradients of nodes
above the tokens are passed on to their children afterwards (`pooling.py`).
"""

import triton
import triton.language as tl

from hstu_sparse.bias.gradients import add_to
from hstu_sparse.htree.forward import entering, find_sequence
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
    turn,
)
from hstu_sparse.tiles.rows import load_rows, row_pointer, store_rows


@triton.jit
def add_rows(base, row, stride, column, value, inside, units, PLACE: tl.constexpr, FIXED: tl.constexpr):
    """Add a tile to rows in memory, in any order: fp32, or with FIXED multiples of 1 / units[PLACE]."""
    pointers = base + row[:, None] * stride + column
    add_to(pointers, value, units + PLACE if FIXED else None, inside)


@triton.jit
def add_gradients(
    dq_low, dq_high, q_low, q_high, do, lse, delta, keys, values, dk, dv, cos, sin, step_cos, step_sin, units, parents,
    words, above, C, HALF: tl.constexpr, BH: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    RATE: tl.constexpr, SIBLINGS: tl.constexpr, STEPPED: tl.constexpr, FIXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a layer's share of dq, and the gradients of its candidates that entered the softmax.

    If queries are rotated by steps, or not at all, the sum for dq is rotated with them, and back once, at the end.
    """
    f, e = tl.arange(0, BH)[None, :], tl.arange(0, BV)[None, :]
    # The last candidate above the tokens pools tokens after the query's.
    end = tl.where(above, C - 1, C)
    low, high = first_query(q_low, q_high, cos, sin, C, BH)
    sum_low, sum_high = dq_low, dq_high
    if STEPPED or not SIBLINGS:
        sum_low, sum_high = tl.zeros_like(low), tl.zeros_like(high)
    node_start = first_node(parents, 0, C, RATE, SIBLINGS)
    for c0 in range(0, C, BN):
        behind = first_node(parents, c0 + BN, C, RATE, SIBLINGS)
        word = entering(words, above, c0 // (2 * BN) * (2 * BN), C, BN)
        c = c0 + tl.arange(0, BN)
        node, k_low, k_high = load_keys(keys, parents, node_start, c0, C, end, cos, sin, BH, BN, RATE, SIBLINGS)
        # Candidates are the rows of scores: in this order, they and their gradients are operands of dk's and dv's
        # products.
        tile_low, tile_high = tile_query(low, high, q_low, q_high, cos, sin, c0, C, BH, SIBLINGS, STEPPED)
        s = tl.dot(k_low, tl.trans(tile_low).to(k_low.dtype), input_precision=PRECISION)
        s = tl.dot(k_high, tl.trans(tile_high).to(k_low.dtype), s, input_precision=PRECISION)
        enters = ((word & (1 << (c % (2 * BN)))) != 0)[:, None]
        p = tl.where(enters, tl.exp2(s - lse[None, :]), 0.0)
        value = tl.load(values + node[:, None] * BV + e, mask=(c < end)[:, None], other=0.0)
        dp = tl.dot(value, tl.trans(do), input_precision=PRECISION)
        ds = (p * (dp - delta[None, :])).to(k_low.dtype)
        dk_low = tl.dot(ds, tile_low.to(k_low.dtype), input_precision=PRECISION)
        dk_high = tl.dot(ds, tile_high.to(k_low.dtype), input_precision=PRECISION)
        if not SIBLINGS:
            row = (c // RATE * RATE)[:, None] * BH + f
            dk_low, dk_high = turn(dk_low, dk_high, tl.load(cos + row), -tl.load(sin + row))
        add_rows(dk, node, 2 * HALF, f, dk_low, enters & (f < HALF), units, 0, FIXED)
        add_rows(dk + HALF, node, 2 * HALF, f, dk_high, enters & (f < HALF), units, 0, FIXED)
        dvalue = tl.dot(p.to(do.dtype), do, input_precision=PRECISION)
        add_rows(dv, node, V, e, dvalue, enters & (e < V), units, 1, FIXED)

        ds = tl.trans(ds)
        if SIBLINGS and not STEPPED:
            part_low = tl.dot(ds, k_low, input_precision=PRECISION)
            part_high = tl.dot(ds, k_high, input_precision=PRECISION)
            row_cos, row_sin = row_angle(cos, sin, tl.maximum(C - 1 - c0, 0), BH)
            part_low, part_high = turn(part_low, part_high, row_cos, -row_sin)
            sum_low, sum_high = sum_low + part_low, sum_high + part_high
        else:
            sum_low = tl.dot(ds, k_low, sum_low, input_precision=PRECISION)
            sum_high = tl.dot(ds, k_high, sum_high, input_precision=PRECISION)
        if STEPPED:
            sum_low, sum_high = turn(sum_low, sum_high, step_cos, -step_sin)
        low, high = next_query(low, high, step_cos, step_sin, STEPPED)
        node_start = behind
    if STEPPED:
        row_cos, row_sin = row_angle(cos, sin, (C + BN - 1) // BN * BN - (C - 1), BH)
        sum_low, sum_high = turn(sum_low, sum_high, row_cos, row_sin)
    elif not SIBLINGS:
        row_cos, row_sin = row_angle(cos, sin, C - 1, BH)
        sum_low, sum_high = turn(sum_low, sum_high, row_cos, -row_sin)
    if STEPPED or not SIBLINGS:
        sum_low, sum_high = dq_low + sum_low, dq_high + sum_high
    return sum_low, sum_high


@triton.jit(do_not_specialize=["B", "tokens", "layers", "rows"])
def htree_attend_bwd_kernel(
    do, q, nodes, workspace, out, lse, dq, gradients, q_scale, scale, B, tokens, layers, rows,
    H: tl.constexpr, G: tl.constexpr, BG: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, BN: tl.constexpr, RATE: tl.constexpr, TOP_K: tl.constexpr, LIST: tl.constexpr,
    SOME: tl.constexpr, CANDIDATES: tl.constexpr, HELD: tl.constexpr, WORKSPACE: tl.constexpr, LOW_BITS: tl.constexpr,
    LIMIT: tl.constexpr, SIBLINGS: tl.constexpr, STEPPED: tl.constexpr, FIXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq [T, Hq, D], and add to dk [H, rows, D] and dv [H, rows, V]; keys' gradients are rotated like the keys.

    do, q: `Rows`. FIXED: the sums of dk and dv are integers.
    """
    keys, values, offsets, cos, sin = nodes.key_rows, nodes.value_rows, nodes.offsets, nodes.cos, nodes.sin
    dk, dv, units = gradients.dk, gradients.dv, gradients.units
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
        q_low, q_high = load_query(row_pointer(q, token, g * G), row, q.stride_h, live, q_scale, HALF, BH)
        upstream = load_rows(row_pointer(do, token, g * G), row, do.stride_h, live, V, BV)
        output = load_rows(out + (token * H + g) * G * V, row, V, live, V, BV)
        delta = tl.sum(upstream.to(tl.float32) * output.to(tl.float32), 1)
        total = tl.load(lse + (token * H + g) * G + row, mask=live, other=float("inf"))

        dq_low = tl.zeros([BG, BH], tl.float32)
        dq_high = tl.zeros([BG, BH], tl.float32)
        current = 0
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
                dq_low, dq_high = add_gradients(
                    dq_low, dq_high, q_low, q_high, upstream, total, delta, layer_keys, values + first * BV,
                    dk + first * (2 * HALF), dv + first * V, cos, sin, step_cos, step_sin, units, parents, words,
                    layer > 0, C, HALF, BH, V, BV, BN, RATE, SIBLINGS, STEPPED, FIXED, PRECISION,
                )  # fmt: skip
                tl.debug_barrier()
            current = 1 - current
            layer, size, base, C = step_down(layer, size, base, C, t, tokens, B, TOP_K, RATE)

        target = dq + (token * H + g) * G * (2 * HALF)
        store_rows(target, row, 2 * HALF, live, dq_low * scale, HALF, BH)
        store_rows(target + HALF, row, 2 * HALF, live, dq_high * scale, HALF, BH)
