"""Define the backward kernel of hierarchical tree attention: the same layers, with gradients instead of the softmax.

Letters and rows as in `attend.py`. With s_c the score in natural units, p_c = exp(s_c - lse) and o the output,
    dv_c = sum over rows p_c do,   ds_c = p_c (do.v_c - do.o),   dq = scale R^-1 sum_c ds_c R_c k_c,
    dk_c = scale R_c^-1 sum over rows ds_c R q
where R and R_c are RoPE's rotations. A candidate's gradients are summed over all rows of a program, and then added to
its node's in memory; the gradients of nodes above the tokens are passed on to their children afterwards (`pooling.py`).
"""

import triton
import triton.language as tl

from hstu_sparse.bias.gradients import add_to
from hstu_sparse.htree.attend import find_group, find_level, gather_keys, place_angles, tile_rows, turned_queries
from hstu_sparse.htree.choice import row_angle, step_down, top_layer, turn
from hstu_sparse.tiles.rows import load_rows, store_rows


@triton.jit
def add_rows(base, row, stride, column, value, inside, units, PLACE: tl.constexpr, FIXED: tl.constexpr):
    """Add a tile to rows in memory, in any order: fp32, or with FIXED multiples of 1 / units[PLACE]."""
    pointers = base + row[:, None] * stride + column
    add_to(pointers, value, units + PLACE if FIXED else None, inside)


@triton.jit(do_not_specialize=["B", "tokens", "layers", "rows", "choices", "begin", "slots"])
def htree_attend_bwd_kernel(
    do, q, nodes, table, out, lse, dq, gradients, q_scale, scale, B, tokens, layers, rows, choices, begin, slots,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, HALF: tl.constexpr,
    BH: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, RATE: tl.constexpr, TURN: tl.constexpr,
    TOP_K: tl.constexpr, WORDS: tl.constexpr, BY_TILE: tl.constexpr, FIXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq [T, Hq, D], and add to dk [H, rows, D] and dv [H, rows, V]; keys' gradients are rotated like the keys.

    do, q: `Rows`. FIXED: the sums of dk and dv are integers.
    """
    DTYPE: tl.constexpr = nodes.key_rows.dtype.element_ty
    WIDE: tl.constexpr = tl.float32 if BY_TILE else DTYPE
    keys, values, offsets, cos, sin = nodes.key_rows, nodes.value_rows, nodes.offsets, nodes.cos, nodes.sin
    dk, dv, units = gradients.dk, gradients.dv, gradients.units
    slot, part = (slots - 1 - tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    g = tl.program_id(1).to(tl.int64)
    group = find_group(offsets, begin + slot, part, g, B, G, R, BM)
    if group.most < 0:
        return
    e = tl.arange(0, BV)[None, :]
    f = tl.arange(0, BH)[None, :]
    upstream = tl.load(
        do.pointer + group.token[:, None] * do.stride_t + group.head[:, None] * do.stride_h + e,
        mask=group.live[:, None] & (e < V), other=0.0,
    )  # fmt: skip
    row = group.token * (H * G) + group.head
    output = load_rows(out, row, V, group.live, V, BV)
    delta = tl.sum(upstream.to(tl.float32) * output.to(tl.float32), 1)
    total = tl.load(lse + row, mask=group.live, other=float("inf"))
    dq_low = tl.zeros([BM, BH], tl.float32)
    dq_high = tl.zeros([BM, BH], tl.float32)
    layer, size, base, C = top_layer(group.length, group.t, tokens, B, layers, TOP_K, RATE)
    top = layer
    while layer >= 0:
        if (layer == 0) | (C > TOP_K):
            level = find_level(
                group, g, slot * H + g, table, choices, layer, top, size, base, C, layers, rows, TOP_K, WORDS
            )
            low, high, row_cos, row_sin = turned_queries(
                q.pointer, group, level.place, cos, sin, q.stride_t, q.stride_h, q_scale, HALF, BH, WIDE
            )
            # dq is summed in the order of the rotated queries, and rotated back after the layer.
            dq_low, dq_high = turn(dq_low, dq_high, row_cos, row_sin)
            for c0 in range(0, level.end, BN):
                node, k_low, k_high, enters = gather_keys(keys, cos, sin, level, c0, BH, BN, RATE, TURN, BY_TILE)
                tile_low, tile_high = tile_rows(low, high, cos, sin, c0, DTYPE, BH, BY_TILE)
                c = c0 + tl.arange(0, BN)
                value = tl.load(values + node[:, None] * BV + e, mask=(c < level.end)[:, None], other=0.0)
                s = tl.dot(tile_low, tl.trans(k_low), input_precision=PRECISION)
                s = tl.dot(tile_high, tl.trans(k_high), s, input_precision=PRECISION)
                dp = tl.dot(upstream, tl.trans(value), input_precision=PRECISION)
                seen = enters[None, :] & (c[None, :] < level.limit[:, None])
                p = tl.where(seen, tl.exp2(s - total[:, None]), 0.0)
                ds = (p * (dp - delta[:, None])).to(DTYPE)
                if BY_TILE:
                    part_low = tl.dot(ds, k_low, input_precision=PRECISION)
                    part_high = tl.dot(ds, k_high, input_precision=PRECISION)
                    tile_cos, tile_sin = row_angle(cos, sin, c0, BH)
                    part_low, part_high = turn(part_low, part_high, tile_cos, tile_sin)
                    dq_low, dq_high = dq_low + part_low, dq_high + part_high
                else:
                    dq_low = tl.dot(ds, k_low, dq_low, input_precision=PRECISION)
                    dq_high = tl.dot(ds, k_high, dq_high, input_precision=PRECISION)
                dvalue = tl.dot(tl.trans(p.to(upstream.dtype)), upstream, input_precision=PRECISION)
                add_rows(dv, node, V, e, dvalue, enters[:, None] & (e < V), units, 1, FIXED)
                ds = tl.trans(ds)
                dk_low = tl.dot(ds, tile_low, input_precision=PRECISION)
                dk_high = tl.dot(ds, tile_high, input_precision=PRECISION)
                if not BY_TILE:
                    angle = (c // TURN * TURN)[:, None] * BH + f
                    dk_low, dk_high = turn(dk_low, dk_high, tl.load(cos + angle), -tl.load(sin + angle))
                add_rows(dk, node, 2 * HALF, f, dk_low, enters[:, None] & (f < HALF), units, 0, FIXED)
                add_rows(dk + HALF, node, 2 * HALF, f, dk_high, enters[:, None] & (f < HALF), units, 0, FIXED)
            # Loaded again, since they would occupy many registers in between.
            row_cos, row_sin = place_angles(cos, sin, level.place, BH)
            dq_low, dq_high = turn(dq_low, dq_high, row_cos, -row_sin)
        layer, size, base, C = step_down(layer, size, base, C, group.t, tokens, B, TOP_K, RATE)

    store_rows(dq, row, 2 * HALF, group.live, dq_low * scale, HALF, BH)
    store_rows(dq + HALF, row, 2 * HALF, group.live, dq_high * scale, HALF, BH)
