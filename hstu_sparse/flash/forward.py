"""Define the forward kernel: a program has a tile of queries and a running maximum over the keys they see.

Letters: H heads of queries, D query/key and V value head size. m: query rows of a tile, n: its key rows, counted
within a piece; t and s: positions in the sequence.
"""

import triton
import triton.language as tl

from hstu_sparse.flash.tiles import (
    CALLER_POINTERS,
    LEAST,
    LOG2_E,
    PER_BATCH,
    STEADY,
    HeadOptions,
    dropout_mask,
    find_tile,
    head_slope,
    hide,
    key_ranges,
    keys_seen,
    piece,
)
from hstu_sparse.tiles.rows import block_source, load_block, load_head, row_pointer


@triton.jit
def _attend(
    acc, peak, total, q, first, last, t, t_first, q_inside, k, v, k_stride, v_stride, k_length, k_position, options,
    D: tl.constexpr, V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr, IS_STEADY: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return (output before normalisation [m, V], maximum [m], sum [m]) with the keys first .. last of a piece."""
    n = tl.arange(0, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        key = load_block(k, start, n, k_stride, k_length, D, PAD_D, MASKED, TMA)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        s = (k_position + start + n)[None, :]
        factor = options.scale
        if options.slope is not None:
            scores = scores * options.scale - options.slope * tl.abs(t - s).to(tl.float32)
            factor = 1.0
        if MASKED:
            inside = (start + n < k_length)[None, :]
            scores = hide(scores, t, s, q_inside, inside, options.left, options.right, HAS_LEFT, HAS_RIGHT)
        if IS_STEADY:
            weights = tl.exp2(scores * factor - peak[:, None])
            total += tl.sum(weights, 1)
        else:
            higher = tl.maximum(peak, tl.max(scores, 1) * factor)
            weights = tl.exp2(scores * factor - higher[:, None])
            correction = tl.exp2(peak - higher)
            total = total * correction + tl.sum(weights, 1)
            acc = acc * correction[:, None]
            peak = higher
        if options.seed is not None:
            keep = dropout_mask(options, t_first, k_position + start, ALIGNED, BLOCK_M, BLOCK_N)
            weights = tl.where(keep, weights, 0.0)
        value = load_block(v, start, n, v_stride, k_length, V, PAD_V, MASKED, TMA)
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
    return acc, peak, total


@triton.jit
def _walk(
    acc, other_lse, query, tile, t, t_first, q_inside, k, v, k_head, k_offsets, k_starts, options,
    D: tl.constexpr, V: tl.constexpr, PIECES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    ADD: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, IS_STEADY: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Apply `_attend` to all keys. ADD: acc and other_lse (in units of log2) are the results of other keys."""
    peak = tl.full([BLOCK_M], 0.0 if IS_STEADY else LEAST, tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    if ADD:
        peak = tl.maximum(other_lse, peak)
        sums = tl.exp2(other_lse - peak)
        acc = acc * sums[:, None]
    for i in tl.static_range(PIECES):
        k_begin, k_length, k_position = piece(tile.sequence * PIECES + i, k_offsets, k_starts)
        bounds = key_ranges(
            tile.first, tile.length, k_length, tile.position - k_position, options.left, options.right, HAS_LEFT,
            HAS_RIGHT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        keys = block_source(row_pointer(k, k_begin, k_head), k.stride_t, k_length, D, BLOCK_N, PAD_D, TMA)
        values = block_source(row_pointer(v, k_begin, k_head), v.stride_t, k_length, V, BLOCK_N, PAD_V, TMA)
        for part in tl.static_range(3):
            if part > 0 or HAS_LEFT:  # noqa: SIM102  a compile-time constant
                if bounds[part] < bounds[part + 1]:
                    acc, peak, sums = _attend(
                        acc, peak, sums, query, bounds[part], bounds[part + 1], t, t_first, q_inside, keys, values,
                        k.stride_t, v.stride_t, k_length, k_position, options,
                        D, V, HAS_LEFT, HAS_RIGHT, ALIGNED, PRECISION, part != 1, IS_STEADY, BLOCK_M, BLOCK_N, PAD_D,
                        PAD_V, TMA,
                    )  # fmt: skip
    return acc, peak, sums


@triton.jit(do_not_specialize=["total"])
def flash_attention_longest_kernel(
    k, longest, total,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PAD_D: tl.constexpr,
):  # fmt: skip
    """Compute longest [Hkv]: the square of each head's greatest norm of a key."""
    head = tl.program_id(0) % HEADS
    token = (tl.program_id(0) // HEADS).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = load_head(k, head, token, token < total, D, PAD_D).to(tl.float32)
    tl.atomic_max(longest + head, tl.max(tl.sum(key * key, 1)), sem="relaxed")


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=CALLER_POINTERS)
def flash_attention_fwd_kernel(
    q, k, v, longest, before, out, lse, q_offsets, k_offsets, q_starts, k_starts, num_pieces, total, call, left,
    right, slope_stride, seed,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr,
    PIECES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, IN_PLACE: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    PAD_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M queries of one head in one program.

    longest: None, or for each head of keys the square of the greatest norm (see `STEADY`).
    before: None, or, with `lse`, the results of earlier calls for other keys: [T, H, V] fp32, contiguous.
    IN_PLACE: it is `out`.
    """
    ADD: tl.constexpr = before is not None
    # With a causal mask the last tile has the most work.
    tile = find_tile(q_offsets, q_starts, num_pieces, H, PIECES, BLOCK_M, True)
    if tile.first < 0:
        return
    if ADD and IN_PLACE:
        num_seen = keys_seen(tile, k_offsets, k_starts, left, right, PIECES, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N)
        if num_seen == 0:
            return
    head, begin, length, first_row = tile.head, tile.begin, tile.length, tile.first
    m = tl.arange(0, BLOCK_M)
    e = tl.arange(0, PAD_V)
    q_inside = (first_row + m < length)[:, None]
    t_first = tile.position + first_row
    t = (t_first + m)[:, None]
    query = load_block(row_pointer(q, begin, head), first_row, m, q.stride_t, length, D, PAD_D, True)
    slope = None if call.slopes is None else head_slope(call.slopes, tile, head, slope_stride)
    options = HeadOptions(call.scale, slope, left, right, seed, tile.sequence * H + head, call.dropout)
    inside = q_inside & (e < V_OUT)[None, :]
    lse += head.to(tl.int64) * total + begin + first_row + m

    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)
    other_lse = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if ADD:
        other_lse = tl.load(lse, first_row + m < length, float("-inf")) * LOG2_E
        before += (begin + first_row) * (H * V_OUT) + head * V_OUT
        # The stored output has been divided by 1 - dropout.
        acc = tl.load(before + m[:, None] * (H * V_OUT) + e[None, :], inside, 0.0) * (1.0 - call.dropout)
    steady = False
    if longest is not None:
        # The product of two norms bounds all scores: NaN or inf is not steady.
        norm = tl.max(tl.sum(query.to(tl.float32) * query.to(tl.float32), 1))
        steady = norm * tl.load(longest + head // GROUP) * (call.scale * call.scale) <= STEADY * STEADY
        if ADD:
            # The other keys' sum must not vanish beside a maximum of 0 either.
            steady = steady & (tl.min(tl.where(other_lse > float("-inf"), other_lse, 0.0)) >= -STEADY)
    if steady:
        acc, peak, sums = _walk(
            acc, other_lse, query, tile, t, t_first, q_inside, k, v, head // GROUP, k_offsets, k_starts, options,
            D, V, PIECES, HAS_LEFT, HAS_RIGHT, ADD, ALIGNED, PRECISION, True, BLOCK_M, BLOCK_N, PAD_D, PAD_V, TMA,
        )  # fmt: skip
    else:
        acc, peak, sums = _walk(
            acc, other_lse, query, tile, t, t_first, q_inside, k, v, head // GROUP, k_offsets, k_starts, options,
            D, V, PIECES, HAS_LEFT, HAS_RIGHT, ADD, ALIGNED, PRECISION, False, BLOCK_M, BLOCK_N, PAD_D, PAD_V, TMA,
        )  # fmt: skip
    sees_keys = sums != 0.0  # true for NaN
    sums = tl.where(sees_keys, sums, 1.0)  # acc is 0 for a query without keys
    tl.store(lse, tl.where(sees_keys, (peak + tl.log2(sums)) / LOG2_E, float("-inf")), first_row + m < length)
    result = acc / (sums * (1.0 - call.dropout))[:, None]
    target = row_pointer(out, begin + first_row, head) + m[:, None] * out.stride_t + e[None, :]
    tl.store(target, result.to(out.pointer.dtype.element_ty), inside)
