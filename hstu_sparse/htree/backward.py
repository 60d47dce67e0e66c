"""Backward kernel of hierarchical tree attention: the walk again, with gradients in place of the softmax.

Letters as in `forward.py`. With s_c the score in natural units, p_c = exp(s_c - lse) and o the output,
    dv_c = sum over heads p_c do,   ds_c = p_c (do.v_c - do.o),   dq = scale R^-1 sum_c ds_c R_c k_c,
    dk_c = scale R_c^-1 sum over heads ds_c R q
where R and R_c are RoPE's rotations. A candidate's gradients are added to its node's in memory; what the nodes above
the tokens have gathered goes down to their children afterwards (`pooling.py`).
"""

import triton
import triton.language as tl

from hstu_sparse.htree.forward import find_sequence
from hstu_sparse.htree.walk import (
    begin_walk,
    candidate_nodes,
    choose,
    choose_all,
    load_halves,
    turn,
    turned_query,
)
from hstu_sparse.tiles import load_rows, store_rows

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def add_rows(base, row, stride, column, value, inside, units, PLACE: tl.constexpr, FIXED: tl.constexpr):
    """Adds a tile to rows in memory: fp32, or with FIXED whole multiples of 1 / units[PLACE]: then the order makes no odds."""
    pointers = base + row[:, None].to(tl.int64) * stride + column
    if FIXED:
        value = tl.floor(value * tl.load(units + PLACE) + 0.5).to(tl.int64)
    tl.atomic_add(pointers, value, mask=inside, sem="relaxed")


@triton.jit
def add_gradients(
    dq_low, dq_high, q_low, q_high, do, lse, delta, keys, values, k_stride, v_stride, dk, dv, cos, sin, units, parents,
    marks, least, C, HALF: tl.constexpr, BH: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    RATE: tl.constexpr, ABOVE: tl.constexpr, FIXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A layer's share of dq, and the gradients of its candidates that entered the softmax."""
    dtype = keys.dtype.element_ty
    f, e = tl.arange(0, BH)[None, :], tl.arange(0, BV)[None, :]
    place = tl.arange(0, BN)[:, None] * HALF + f
    for c0 in range(0, C, BN):
        c = c0 + tl.arange(0, BN)
        node = candidate_nodes(parents, c, C, RATE)
        enters = c < C
        if ABOVE:
            enters &= tl.load(marks + c, mask=enters, other=0) < least
        tile_cos = tl.load(cos + place, mask=f < HALF, other=0.0)
        tile_sin = tl.load(sin + place, mask=f < HALF, other=0.0)
        k_low, k_high = load_halves(keys, node, k_stride, enters, HALF, BH)
        k_low, k_high = turn(k_low, k_high, tile_cos, tile_sin)
        k_low, k_high = k_low.to(dtype), k_high.to(dtype)
        low, high = turned_query(q_low, q_high, cos, sin, C - 1 - c0, HALF, BH)
        low, high = low.to(dtype), high.to(dtype)
        s = tl.dot(low, tl.trans(k_low), input_precision=PRECISION)
        s = tl.dot(high, tl.trans(k_high), s, input_precision=PRECISION)
        p = tl.where(enters[None, :], tl.exp2(s - lse[:, None]), 0.0)
        value = load_rows(values, node, v_stride, enters, V, BV)
        dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
        ds = (p * (dp - delta[:, None])).to(dtype)

        part_low = tl.dot(ds, k_low, input_precision=PRECISION)
        part_high = tl.dot(ds, k_high, input_precision=PRECISION)
        row = (C - 1 - c0) * HALF + f
        row_cos = tl.load(cos + row, mask=f < HALF, other=0.0)
        row_sin = tl.load(sin + row, mask=f < HALF, other=0.0)
        part_low, part_high = turn(part_low, part_high, row_cos, -row_sin)
        dq_low += part_low
        dq_high += part_high

        turned = tl.trans(ds)
        dk_low = tl.dot(turned, low, input_precision=PRECISION)
        dk_high = tl.dot(turned, high, input_precision=PRECISION)
        dk_low, dk_high = turn(dk_low, dk_high, tile_cos, -tile_sin)
        inside = enters[:, None] & (f < HALF)
        # q came in base 2: its factor log2(e) goes again.
        add_rows(dk, node, 2 * HALF, f, dk_low * LN2, inside, units, 0, FIXED)
        add_rows(dk + HALF, node, 2 * HALF, f, dk_high * LN2, inside, units, 0, FIXED)
        dvalue = tl.dot(tl.trans(p.to(dtype)), do, input_precision=PRECISION)
        add_rows(dv, node, V, e, dvalue, enters[:, None] & (e < V), units, 1, FIXED)
    return dq_low, dq_high


@triton.jit(do_not_specialize=["B", "tokens", "layers", "slots"])
def htree_attend_bwd_kernel(
    do, q, k, v, k_nodes, v_nodes, offsets, cos, sin, notes, out, lse, dq, dk, dv, units,
    do_stride_t, do_stride_h, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    q_scale, scale, B, tokens, layers, slots,
    H: tl.constexpr, G: tl.constexpr, BG: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, BN: tl.constexpr, RATE: tl.constexpr, TOP_K: tl.constexpr, LIST: tl.constexpr,
    CANDIDATES: tl.constexpr, NOTES: tl.constexpr, LOW_BITS: tl.constexpr, LIMIT: tl.constexpr,
    FIXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [T, Hq, D], and sums into dk [H, T + slots, D] and dv [H, T + slots, V]: the tokens', then the nodes'.

    units [2]: with FIXED, in how many parts of 1 the sums of dk and of dv count.
    """
    notes += tl.program_id(0).to(tl.int64) * NOTES
    marks, tops = notes + 2 * LIST, notes + 2 * LIST + CANDIDATES
    row = tl.arange(0, BG)
    live = row < G
    f = tl.arange(0, BH)[None, :]
    rows = tokens + slots
    for item in range(tl.program_id(0), tokens * H, tl.num_programs(0)):
        g, token = item // tokens, (item % tokens).to(tl.int64)
        b, start, length = find_sequence(offsets, token, B)
        t = (token - start).to(tl.int32)
        q_low, q_high = load_halves(q + token * q_stride_t + g * G * q_stride_h, row, q_stride_h, live, HALF, BH)
        q_low, q_high = q_low * q_scale, q_high * q_scale
        upstream = load_rows(do + token * do_stride_t + g * G * do_stride_h, row, do_stride_h, live, V, BV)
        output = load_rows(out + (token * H + g) * G * V, row, V, live, V, BV)
        delta = tl.sum(upstream.to(tl.float32) * output.to(tl.float32), 1)
        total = tl.load(lse + (token * H + g) * G + row, mask=live, other=float("inf"))

        tl.debug_barrier()
        layer, size, base, C = begin_walk(notes, length, t, tokens, B, layers, TOP_K, LIST, RATE)
        dq_low = tl.zeros([BG, BH], tl.float32)
        dq_high = tl.zeros([BG, BH], tl.float32)
        here = 0
        while layer > 0:
            first = base + start // size + b
            node = g.to(tl.int64) * slots + first
            keys, values = k_nodes + node * (2 * HALF), v_nodes + node * V
            target = g.to(tl.int64) * rows + tokens + first
            parents, children = notes + here * LIST, notes + (1 - here) * LIST
            if C <= TOP_K:
                choose_all(parents, children, C, LIST, RATE)
            else:
                least = choose(
                    q_low, q_high, keys, 2 * HALF, cos, sin, parents, children, marks, tops, C,
                    G, BG, HALF, BH, BN, RATE, TOP_K, CANDIDATES, LOW_BITS, LIMIT, PRECISION,
                )  # fmt: skip
                dq_low, dq_high = add_gradients(
                    dq_low, dq_high, q_low, q_high, upstream, total, delta, keys, values, 2 * HALF, V,
                    dk + target * (2 * HALF), dv + target * V, cos, sin, units, parents, marks, least, C,
                    HALF, BH, V, BV, BN, RATE, True, FIXED, PRECISION,
                )  # fmt: skip
                tl.debug_barrier()
            here = 1 - here
            layer -= 1
            size //= RATE
            base -= tl.where(layer > 0, tokens // size + B, 0)
            C = (tl.minimum(C, TOP_K) - 1) * RATE + t // size % RATE + 1

        target = g.to(tl.int64) * rows + start
        dq_low, dq_high = add_gradients(
            dq_low, dq_high, q_low, q_high, upstream, total, delta, k + start * k_stride_t + g * k_stride_h,
            v + start * v_stride_t + g * v_stride_h, k_stride_t, v_stride_t,
            dk + target * (2 * HALF), dv + target * V, cos, sin, units, notes + here * LIST, marks, 0, C,
            HALF, BH, V, BV, BN, RATE, False, FIXED, PRECISION,
        )  # fmt: skip
        first_row = dq + (token * H + g) * G * (2 * HALF)
        store_rows(first_row, row, 2 * HALF, live, dq_low * scale, HALF, BH)
        store_rows(first_row + HALF, row, 2 * HALF, live, dq_high * scale, HALF, BH)
