"""Define the kernels of hierarchical tree attention over the choices of `choice.py`, forward and backward.

Letters: T tokens of the batch, B sequences, H key/value heads, G query heads of each, R tokens of a group (slots as in
`choice.py`), D query/key and V value head size, r compression_rate (RATE), C candidates of a group's first token in a
layer.

A program has BM rows: the queries of R tokens times G heads, or as many of them as fit into a tile. Row m is head m % G
of the group's token m // G. The group's choices are in the table of `choice.py`. All tokens of a group have the same
candidates, except at layer 0, where token i of the group has i more than the first.

RoPE rotates the key of candidate c to position c. `pooling.py` has already rotated it by c % PERIOD; the rest,
c // PERIOD * PERIOD, is done here. Scores depend only on differences of positions. With BY_TILE (a tile of BN
candidates lies within PERIOD neighbours) the rows are therefore rotated back by the tile's first candidate, c0,
instead: less work for few rows.
The queries are rotated to their positions once in each layer.

The backward pass visits the same layers. With s_c the score in natural units, p_c = exp(s_c - lse) and o the output,
    dv_c = sum over rows p_c do,   ds_c = p_c (do.v_c - do.o),   dq = scale R^-1 sum_c ds_c R_c k_c,
    dk_c = scale R_c^-1 sum over rows ds_c R q
where R and R_c are RoPE's rotations. A candidate's gradients are summed over the rows of a program and then added to
the gradients of its node in memory. Afterwards nodes above the tokens pass their gradients on to their children
(`pooling.py`).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.bias.gradients import add_to
from hstu_sparse.htree.choice import rotate, row_angle, step_down, top_layer
from hstu_sparse.tiles.rows import add_scores, load_rows, locate, store_rows


class Group(NamedTuple):
    """The group and the rows of a program.

    b, start, length  the sequence, its first token, its length
    t                 position of the group's first token
    i                 [BM] the rows' tokens, counted from the group's first token
    live              [BM] the mask of valid rows
    most              the greatest i of a live row
    token, head       [BM] the rows' tokens in the batch and their query heads
    """

    b: tl.tensor
    start: tl.tensor
    length: tl.tensor
    t: tl.tensor
    i: tl.tensor
    live: tl.tensor
    most: tl.tensor
    token: tl.tensor
    head: tl.tensor


@triton.jit
def find_group(offsets, slot, part, g, B, G: tl.constexpr, R: tl.constexpr, BM: tl.constexpr):
    """Return the rows part * BM .. of a slot's group; `most` is negative if there are none."""
    b, start, length, number = locate(offsets, slot, B, R)
    t = number * R
    row = part * BM + tl.arange(0, BM)
    i = row // G
    count = tl.minimum(R, length - t)
    live = i < count
    most = tl.minimum((part * BM + BM - 1) // G, count - 1)
    most = tl.where(part * BM // G < count, most, -1)
    token = start + tl.where(live, t + i, 0)
    return Group(b, start, length, t, i, live, most, token, g * G + row % G)


class Level(NamedTuple):
    """A layer of the tree and its candidates, for the rows of a group.

    first    the first node of the group's sequence and head, in the buffer of all layers
    parents  pointer to the nodes whose children are the candidates
    words    pointer to the bits of those candidates that were chosen; only read above the tokens
    above    whether it is above the tokens
    limit    [BM] candidates that a row may see
    end      the greatest of these
    place    [BM] the rows' positions
    """

    first: tl.tensor
    parents: tl.tensor
    words: tl.tensor
    above: tl.tensor
    limit: tl.tensor
    end: tl.tensor
    place: tl.tensor


@triton.jit
def find_level(
    group, g, entry, table, choices, layer, top, size, base, C, layers, rows, TOP_K: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Return the `Level` of a group in `layer`; entry: slot * H + head; choices: the table's rows without the last."""
    above = layer > 0
    first = g * rows + base + group.start // size + tl.where(above, group.b, 0)
    parents = table + tl.where(layer < top, entry * layers + layer, choices) * (TOP_K + WORDS)
    chosen = table + (entry * layers + tl.maximum(layer - 1, 0)) * (TOP_K + WORDS) + TOP_K
    # Above the tokens, the last candidate also pools tokens after the query, and is not read.
    end = tl.where(above, C - 1, C + group.most)
    limit = tl.where(above, end, tl.minimum(C + group.i, end))
    place = tl.where(above, C - 1, limit - 1)
    return Level(first, parents, chosen, above, limit, end, place)


@triton.jit
def gather_keys(
    keys, cos, sin, level, c0, HEAD: tl.constexpr, BN: tl.constexpr, RATE: tl.constexpr, PERIOD: tl.constexpr,
    BY_TILE: tl.constexpr,
):  # fmt: skip
    """Return (nodes, low and high halves of rotated keys, mask of entering ones) of the candidates from c0 on.

    Candidates that are chosen do not enter the softmax. HEAD: channels of a half, padded. Missing keys are zeros.
    """
    f = tl.arange(0, HEAD)[None, :]
    c = c0 + tl.arange(0, BN)
    inside = c < level.end
    if BY_TILE:
        node = tl.load(level.parents + c0 // RATE) * RATE + c % RATE
    else:
        node = tl.load(level.parents + c // RATE, mask=inside, other=0) * RATE + c % RATE
    word = tl.load(level.words + c // 32, mask=inside & level.above, other=0)
    enters = inside & ((word >> (c % 32)) & 1 == 0)
    node = tl.where(inside, node, 0) + level.first
    pointers = keys + node[:, None] * (2 * HEAD) + f
    low = tl.load(pointers, mask=inside[:, None], other=0.0)
    high = tl.load(pointers + HEAD, mask=inside[:, None], other=0.0)
    if not BY_TILE:
        angle = (c // PERIOD * PERIOD)[:, None] * HEAD + f
        angle_cos, angle_sin = tl.load(cos + angle), tl.load(sin + angle)
        key_low, key_high = rotate(low.to(tl.float32), high.to(tl.float32), angle_cos, angle_sin)
        low, high = key_low.to(low.dtype), key_high.to(high.dtype)
    return node, low, high, enters


@triton.jit
def tile_rows(low, high, cos, sin, c0, DTYPE: tl.constexpr, BH: tl.constexpr, BY_TILE: tl.constexpr):
    """Return both halves of the rows for the tile of candidates from c0 on: with BY_TILE rotated back by c0."""
    if BY_TILE:
        tile_cos, tile_sin = row_angle(cos, sin, c0, BH)
        low, high = rotate(low, high, tile_cos, -tile_sin)
    return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def place_angles(cos, sin, place, BH: tl.constexpr):
    """Return [BM, BH] cos and sin of the rows' positions."""
    at = place[:, None] * BH + tl.arange(0, BH)[None, :]
    return tl.load(cos + at), tl.load(sin + at)


@triton.jit
def rotated_queries(
    q, group, place, cos, sin, stride_t, stride_h, scale, HALF: tl.constexpr, BH: tl.constexpr, DTYPE: tl.constexpr
):
    """Return both halves of the rows' channels, scaled and rotated to `place`, and the angles of `place_angles`.

    DTYPE: fp32 if the rows are rotated for each tile.
    """
    row_cos, row_sin = place_angles(cos, sin, place, BH)
    f = tl.arange(0, BH)[None, :]
    pointers = q + group.token[:, None] * stride_t + group.head[:, None] * stride_h + f
    mask = group.live[:, None] & (f < HALF)
    low, high = tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + HALF, mask=mask, other=0.0)
    low, high = rotate(low.to(tl.float32) * scale, high.to(tl.float32) * scale, row_cos, row_sin)
    return low.to(DTYPE), high.to(DTYPE), row_cos, row_sin


@triton.jit(do_not_specialize=["B", "tokens", "layers", "rows", "choices", "begin", "slots"])
def htree_attend_fwd_kernel(
    q, nodes, table, out, lse, scale, B, tokens, layers, rows, choices, begin, slots,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, HALF: tl.constexpr,
    BH: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, RATE: tl.constexpr, PERIOD: tl.constexpr,
    TOP_K: tl.constexpr, WORDS: tl.constexpr, BY_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the output [T, Hq, V] and the log-sum-exp in base 2 [T, Hq] of slots begin .. begin + slots - 1.

    table: their choices. q: `Rows`. PARTS programs share a group.
    """
    DTYPE: tl.constexpr = nodes.key_rows.dtype.element_ty
    WIDE: tl.constexpr = tl.float32 if BY_TILE else DTYPE
    keys, values, offsets, cos, sin = nodes.key_rows, nodes.value_rows, nodes.offsets, nodes.cos, nodes.sin
    # Late groups have the most candidates, so they start first.
    slot, part = (slots - 1 - tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    g = tl.program_id(1).to(tl.int64)
    group = find_group(offsets, begin + slot, part, g, B, G, R, BM)
    if group.most < 0:
        return
    running_max = tl.full([BM], -float("inf"), tl.float32)
    running_sum = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    e = tl.arange(0, BV)[None, :]
    layer, size, base, C = top_layer(group.length, group.t, tokens, B, layers, TOP_K, RATE)
    top = layer
    while layer >= 0:
        if (layer == 0) | (C > TOP_K):
            level = find_level(
                group, g, slot * H + g, table, choices, layer, top, size, base, C, layers, rows, TOP_K, WORDS
            )
            low, high, _, _ = rotated_queries(
                q.pointer, group, level.place, cos, sin, q.stride_t, q.stride_h, scale, HALF, BH, WIDE
            )
            for c0 in range(0, level.end, BN):
                node, k_low, k_high, enters = gather_keys(keys, cos, sin, level, c0, BH, BN, RATE, PERIOD, BY_TILE)
                tile_low, tile_high = tile_rows(low, high, cos, sin, c0, DTYPE, BH, BY_TILE)
                s = tl.dot(tile_low, tl.trans(k_low), input_precision=PRECISION)
                s = tl.dot(tile_high, tl.trans(k_high), s, input_precision=PRECISION)
                c = c0 + tl.arange(0, BN)
                s = tl.where(enters[None, :] & (c[None, :] < level.limit[:, None]), s, -float("inf"))
                running_max, running_sum, p, rescale = add_scores(running_max, running_sum, s)
                value = tl.load(values + node[:, None] * BV + e, mask=(c < level.end)[:, None], other=0.0)
                acc = tl.dot(p.to(value.dtype), value, acc * rescale[:, None], input_precision=PRECISION)
        layer, size, base, C = step_down(layer, size, base, C, group.t, tokens, B, TOP_K, RATE)

    row = group.token * (H * G) + group.head
    store_rows(out, row, V, group.live, acc / running_sum[:, None], V, BV)
    tl.store(lse + row, running_max + tl.log2(running_sum), mask=group.live)


@triton.jit
def add_rows(base, row, stride, column, value, inside, units, PLACE: tl.constexpr, FIXED: tl.constexpr):
    """Add a tile to rows in memory, in any order: fp32, or with FIXED multiples of 1 / units[PLACE]."""
    pointers = base + row[:, None] * stride + column
    add_to(pointers, value, units + PLACE if FIXED else None, inside)


@triton.jit(do_not_specialize=["B", "tokens", "layers", "rows", "choices", "begin", "slots"])
def htree_attend_bwd_kernel(
    do, q, nodes, table, out, lse, dq, gradients, q_scale, scale, B, tokens, layers, rows, choices, begin, slots,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, HALF: tl.constexpr,
    BH: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, RATE: tl.constexpr, PERIOD: tl.constexpr,
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
            low, high, row_cos, row_sin = rotated_queries(
                q.pointer, group, level.place, cos, sin, q.stride_t, q.stride_h, q_scale, HALF, BH, WIDE
            )
            # dq is summed as the gradient of the rotated queries, and rotated back after the layer.
            dq_low, dq_high = rotate(dq_low, dq_high, row_cos, row_sin)
            for c0 in range(0, level.end, BN):
                node, k_low, k_high, enters = gather_keys(keys, cos, sin, level, c0, BH, BN, RATE, PERIOD, BY_TILE)
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
                    part_low, part_high = rotate(part_low, part_high, tile_cos, tile_sin)
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
                    angle = (c // PERIOD * PERIOD)[:, None] * BH + f
                    dk_low, dk_high = rotate(dk_low, dk_high, tl.load(cos + angle), -tl.load(sin + angle))
                add_rows(dk, node, 2 * HALF, f, dk_low, enters[:, None] & (f < HALF), units, 0, FIXED)
                add_rows(dk + HALF, node, 2 * HALF, f, dk_high, enters[:, None] & (f < HALF), units, 0, FIXED)
            # Loaded again, since they would occupy many registers during the loop.
            row_cos, row_sin = place_angles(cos, sin, level.place, BH)
            dq_low, dq_high = rotate(dq_low, dq_high, row_cos, -row_sin)
        layer, size, base, C = step_down(layer, size, base, C, group.t, tokens, B, TOP_K, RATE)

    store_rows(dq, row, 2 * HALF, group.live, dq_low * scale, HALF, BH)
    store_rows(dq + HALF, row, 2 * HALF, group.live, dq_high * scale, HALF, BH)
