"""Define the forward kernel, and what both passes do with a tile: its place, what it sees, its dropout.

Letters: B sequences, H heads of queries, D query/key and V value head size, P pieces of a sequence (see reference.py).
m: query rows of a tile, n: its key rows, counted within a piece; t and s: positions in the sequence.

One program has one tile of queries (forward, dq) or of keys (dk and dv) and iterates over the other side. In a range of
tiles that it iterates over, only the first and the last ones need masks. Forward keeps a running maximum.

Scores are in units of log2: exp2 is one instruction, and the scale is folded into the product with log2(e).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.core.launch import INTERPRET
from hstu_sparse.tiles import ranges
from hstu_sparse.tiles.rows import block_source, load_block, load_head, locate, row_pointer

# Numbers that differ between batches, for which Triton would compile again, and the caller's pointers.
PER_BATCH = ["num_pieces", "total", "left", "right", "slope_stride"]
CALLER_POINTERS = ["q_offsets", "k_offsets", "q_starts", "k_starts", "seed"]

# The initial maximum: finite, so that differences of two maxima are defined.
LEAST = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)
# If all scores (in units of log2) are within this distance of 0, the softmax needs no maximum: its weights and their
# sums, 2^-80 to 2^80 times the number of keys, are far from the limits of fp32 and of bf16.
STEADY = tl.constexpr(80.0)
# The size of slots for the numbers of queries that backward computes first, at least the queries of a tile.
ROW_BLOCK = tl.constexpr(128)
# Tiles of one head that begin before those of the next one; the number of tiles is rounded up to a multiple of it.
TOGETHER = tl.constexpr(2 if INTERPRET else 32)


@triton.jit
def piece(index, offsets, starts):
    """Return (first row in memory, length, position of the first row) of a piece."""
    begin = tl.load(offsets + index).to(tl.int64)
    length = (tl.load(offsets + index + 1) - begin).to(tl.int32)
    position = 0
    if starts is not None:
        position = tl.load(starts + index).to(tl.int32)
    return begin, length, position


class Call(NamedTuple):
    """The numbers of a launch that batches share: the scale times log2(e), the slopes or None, and the dropout.

    num_targets, num_context: as in core/mask.py; kernels with a `MORE` read them.
    """

    scale: object
    slopes: object
    dropout: object
    num_targets: object = None
    num_context: object = None


class HeadOptions(NamedTuple):
    """The options of a sequence's head: slope in units of log2, or None; `pair`: its number in Philox's counters.

    sequence: a `ranges.Sequence` if the mask has options, else None.
    """

    scale: tl.tensor
    slope: tl.tensor
    left: tl.tensor
    right: tl.tensor
    seed: tl.tensor
    pair: tl.tensor
    dropout: tl.tensor
    sequence: ranges.Sequence


class Tile(NamedTuple):
    """The rows of a program's tile, `first` .. of a piece, for one head. `index`: the piece's."""

    head: tl.tensor
    index: tl.tensor
    sequence: tl.tensor
    begin: tl.tensor
    length: tl.tensor
    position: tl.tensor
    first: tl.tensor


@triton.jit
def find_tile(
    offsets, starts, num_pieces, HEADS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
    LAST_FIRST: tl.constexpr,
):  # fmt: skip
    """Return the program's Tile, `first` negative if there is none. LAST_FIRST: from the last piece's end on.

    TOGETHER tiles of a head begin one after another: they read the same keys at about the same time, and programs that
    run at the same time read the keys of few heads, so that long sequences' keys are found in the L2 cache.
    """
    number = tl.program_id(0)
    head = number // TOGETHER % HEADS
    slot = number // (TOGETHER * HEADS) * TOGETHER + number % TOGETHER
    if LAST_FIRST:
        slot = tl.num_programs(0) // HEADS - 1 - slot
    index, begin, length, tile = locate(offsets, slot, num_pieces, BLOCK)
    _, _, position = piece(index, offsets, starts)
    first = tl.where(tile * BLOCK < length, tile * BLOCK, -1)
    return Tile(head, index, index // PIECES, begin, length, position, first)


@triton.jit
def key_ranges(
    first_row, q_length, k_length, ahead, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return (begin, full, free, end): the keys that a tile of queries sees; only those in full .. free need no mask.

    ahead: position of the first query less that of the first key. All but `end` are multiples of BLOCK_N.
    """
    last_row = tl.minimum(first_row + BLOCK_M, q_length) - 1
    begin = 0
    full = 0
    end = k_length
    free = k_length
    if HAS_RIGHT:
        end = tl.maximum(tl.minimum(end, last_row + ahead + right + 1), 0)
        free = tl.maximum(tl.minimum(free, first_row + ahead + right + 1), 0)
    free = free // BLOCK_N * BLOCK_N
    if HAS_LEFT:
        begin = tl.maximum(first_row + ahead - left, 0) // BLOCK_N * BLOCK_N
        full = (tl.maximum(last_row + ahead - left, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        free = tl.maximum(free, begin)
        full = tl.minimum(full, free)
    return begin, full, free, end


@triton.jit
def keys_seen(
    tile, k_offsets, k_starts, left, right, PIECES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the number of keys, possibly 0, that a tile of queries has to iterate over."""
    count = 0
    for i in tl.static_range(PIECES):
        _, k_length, k_position = piece(tile.sequence * PIECES + i, k_offsets, k_starts)
        begin, _, _, end = key_ranges(
            tile.first, tile.length, k_length, tile.position - k_position, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M,
            BLOCK_N,
        )  # fmt: skip
        count += tl.maximum(end - begin, 0)
    return count


@triton.jit
def query_ranges(
    first_key, q_length, k_length, ahead, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the same for the queries that see a tile of keys; all but `end` are multiples of BLOCK_M."""
    return key_ranges(first_key, k_length, q_length, -ahead, right, left, HAS_RIGHT, HAS_LEFT, BLOCK_N, BLOCK_M)


@triton.jit
def mask_sequence(call, tile, q_offsets, left):
    """Return the `ranges.Sequence` of the tile's sequence, for a mask with options."""
    _, sequence = ranges.find_sequence(tile.sequence, q_offsets, call.num_targets, left + 1, call.num_context)
    return sequence


@triton.jit
def masked_key_ranges(
    first_row, sequence, HAS_LEFT: tl.constexpr, MORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return `key_ranges` for a mask with options, and (0, end) of the keys seen before them."""
    begin, full, free, end = ranges.key_ranges(first_row, sequence, True, HAS_LEFT, BLOCK_M, BLOCK_N, MORE)
    prefix = (ranges.prefix_tokens(sequence, MORE) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    return begin, full, free, end, 0, tl.minimum(prefix, begin)


@triton.jit
def masked_query_ranges(
    first_key, sequence, HAS_LEFT: tl.constexpr, MORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return `query_ranges` for a mask with options, and (0, end) of the context that sees the keys."""
    begin, full, free, end = ranges.query_ranges(first_key, sequence, True, HAS_LEFT, BLOCK_M, BLOCK_N, MORE)
    return begin, full, free, end, 0, tl.minimum(ranges.front_rows(first_key, sequence, BLOCK_M, MORE), begin)


@triton.jit
def span(t, s, sequence, MORE: tl.constexpr):
    """Return the distances of queries and keys in positions, at least 0."""
    if MORE is not None:
        return tl.maximum(ranges.place(t, sequence, True, MORE) - ranges.place(s, sequence, True, MORE), 0)
    else:
        return tl.abs(t - s)


@triton.jit
def head_slope(slopes, tile, head, stride):
    """Return the slope of a head of the tile's sequence, in units of log2."""
    return tl.load(slopes + tile.sequence * stride + head) * LOG2_E


@triton.jit
def hide(
    scores, t, s, q_inside, k_inside, options, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MORE: tl.constexpr
):
    """Set masked pairs to -inf; t, s and the others broadcast to the shape of the scores."""
    seen = q_inside & k_inside
    if MORE is not None:
        seen = seen & ranges.visible(t, s, options.sequence, True, HAS_LEFT, MORE)
    else:
        if HAS_RIGHT:
            seen = seen & (s - t <= options.right)
        if HAS_LEFT:
            seen = seen & (t - s <= options.left)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def dropout_mask(options, t_first, s_first, ALIGNED: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return [M, N] bool: the weights of M queries from position t_first and N keys from s_first that are not dropped.

    A call of Philox gives the numbers of four keys, from a multiple of four on. ALIGNED: s_first is such a multiple.
    """
    key = tl.load(options.seed)
    t = t_first + tl.arange(0, M)[:, None]
    if ALIGNED:
        zero = tl.zeros([M, N // 4], tl.int32)
        group = s_first // 4 + tl.arange(0, N // 4)[None, :]
        first, second, third, fourth = tl.philox(key, zero + group, zero + t, zero + options.pair, zero)
        bits = tl.join(tl.join(first, third), tl.join(second, fourth)).reshape(M, N)
    else:
        zero = tl.zeros([M, N], tl.int32)
        s = s_first + tl.arange(0, N)[None, :]
        first, second, third, fourth = tl.philox(key, zero + s // 4, zero + t, zero + options.pair, zero)
        word = s % 4
        bits = tl.where(word < 2, tl.where(word == 0, first, second), tl.where(word == 2, third, fourth))
    return (bits >> 8).to(tl.float32) >= options.dropout * 16777216.0


@triton.jit
def _attend(
    acc, peak, total, q, first, last, t, t_first, q_inside, k, v, k_stride, v_stride, k_length, k_position, options,
    D: tl.constexpr, V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MORE: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, IS_STEADY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return (output before normalisation [m, V], maximum [m], sum [m]) with the keys first .. last of a piece."""
    n = tl.arange(0, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        key = load_block(k, start, n, k_stride, k_length, D, PAD_D, MASKED, TMA)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        s = (k_position + start + n)[None, :]
        factor = options.scale
        if options.slope is not None:
            scores = scores * options.scale - options.slope * span(t, s, options.sequence, MORE).to(tl.float32)
            factor = 1.0
        if MASKED:
            inside = (start + n < k_length)[None, :]
            scores = hide(scores, t, s, q_inside, inside, options, HAS_LEFT, HAS_RIGHT, MORE)
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
    MORE: tl.constexpr, ADD: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    IS_STEADY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr,
    TMA: tl.constexpr,
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
        if MORE is not None:
            bounds = masked_key_ranges(tile.first, options.sequence, HAS_LEFT, MORE, BLOCK_M, BLOCK_N)
        else:
            bounds = key_ranges(
                tile.first, tile.length, k_length, tile.position - k_position, options.left, options.right, HAS_LEFT,
                HAS_RIGHT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        keys = block_source(row_pointer(k, k_begin, k_head), k.stride_t, k_length, D, BLOCK_N, PAD_D, TMA)
        values = block_source(row_pointer(v, k_begin, k_head), v.stride_t, k_length, V, BLOCK_N, PAD_V, TMA)
        for part in tl.static_range(3 if MORE is None else 5):
            if part != 3 and (part > 0 or HAS_LEFT or MORE is not None):  # noqa: SIM102  a compile-time constant
                if bounds[part] < bounds[part + 1]:
                    acc, peak, sums = _attend(
                        acc, peak, sums, query, bounds[part], bounds[part + 1], t, t_first, q_inside, keys, values,
                        k.stride_t, v.stride_t, k_length, k_position, options,
                        D, V, HAS_LEFT, HAS_RIGHT, MORE, ALIGNED, PRECISION, part != 1, IS_STEADY, BLOCK_M, BLOCK_N,
                        PAD_D, PAD_V, TMA,
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
    PIECES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MORE: tl.constexpr,
    IN_PLACE: tl.constexpr,
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
    sequence = None if MORE is None else mask_sequence(call, tile, q_offsets, left)
    pair = tile.sequence * H + head
    options = HeadOptions(call.scale, slope, left, right, seed, pair, call.dropout, sequence)
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
            D, V, PIECES, HAS_LEFT, HAS_RIGHT, MORE, ADD, ALIGNED, PRECISION, True, BLOCK_M, BLOCK_N, PAD_D, PAD_V,
            TMA,
        )  # fmt: skip
    else:
        acc, peak, sums = _walk(
            acc, other_lse, query, tile, t, t_first, q_inside, k, v, head // GROUP, k_offsets, k_starts, options,
            D, V, PIECES, HAS_LEFT, HAS_RIGHT, MORE, ADD, ALIGNED, PRECISION, False, BLOCK_M, BLOCK_N, PAD_D, PAD_V,
            TMA,
        )  # fmt: skip
    sees_keys = sums != 0.0  # true for NaN
    sums = tl.where(sees_keys, sums, 1.0)  # acc is 0 for a query without keys
    tl.store(lse, tl.where(sees_keys, (peak + tl.log2(sums)) / LOG2_E, float("-inf")), first_row + m < length)
    result = acc / (sums * (1.0 - call.dropout))[:, None]
    target = row_pointer(out, begin + first_row, head) + m[:, None] * out.stride_t + e[None, :]
    tl.store(target, result.to(out.pointer.dtype.element_ty), inside)
