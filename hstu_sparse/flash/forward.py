"""Define the forward kernel, and what both passes share: tiles, ranges, the mask, dropout.

Letters: B sequences, H heads of queries, D query/key and V value head size, P pieces of a sequence (see reference.py).
m: query rows of a tile, n: its key rows, counted within a piece; t and s: positions in the sequence.

A program has one tile of queries (forward, dq) or of keys (dk and dv) and iterates over blocks of the other side, of
which only the first and the last ones need masks. The forward kernel keeps a running maximum.

Scores are in units of log2: exp2 is one instruction, and the scale is folded into the product with log2(e).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.core.launch import INTERPRET
from hstu_sparse.tiles import ranges
from hstu_sparse.tiles.rows import block_source, load_block, load_head, locate, row_pointer

# Triton must not specialise on numbers that differ between batches, or on the alignment of the caller's pointers.
PER_BATCH = ["num_pieces", "total", "left", "right", "slope_stride"]
CALLER_POINTERS = ["q_offsets", "k_offsets", "q_starts", "k_starts", "seed"]

# The initial maximum: finite, so that differences of two maxima are defined.
INITIAL_MAX = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)
# If all scores (in units of log2) are at most this far from 0, the softmax needs no maximum: weights and their sums,
# 2^-80 to 2^80 times the number of keys, are far from the limits of fp32 and bf16.
SCORE_BOUND = tl.constexpr(80.0)
# The number of queries in a slot of `rows` (see `flash_attention_bwd_rows_kernel`): at least that of a tile.
ROW_BLOCK = tl.constexpr(128)
# The number of tiles of one head that start before those of the next head; a head's tiles are padded to a multiple.
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
    """The options of a launch: the scale times log2(e), the slopes or None, and the dropout.

    num_targets, num_context: as in core/mask.py; read only with an EXTENSION.
    """

    scale: object
    slopes: object
    dropout: object
    num_targets: object = None
    num_context: object = None


class HeadOptions(NamedTuple):
    """The options of a sequence's head: slope in units of log2, or None; pair: the head's number in Philox's counters.

    sequence: a `ranges.Sequence` with an EXTENSION, else None.
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
    """A program's tile: the rows from `first` on of piece `index`, for one head."""

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
    REVERSED: tl.constexpr,
):  # fmt: skip
    """Return the program's Tile, `first` negative if there is none. REVERSED: begin with the last tile.

    TOGETHER tiles of a head start one after another: concurrent programs then read the same keys of few heads, which
    stay in the L2 cache.
    """
    number = tl.program_id(0)
    head = number // TOGETHER % HEADS
    slot = number // (TOGETHER * HEADS) * TOGETHER + number % TOGETHER
    if REVERSED:
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

    ahead: position of the first query minus that of the first key. All but `end` are multiples of BLOCK_N.
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
    """Return `key_ranges` of the queries that see a tile of keys; all but `end` are multiples of BLOCK_M."""
    return key_ranges(first_key, k_length, q_length, -ahead, right, left, HAS_RIGHT, HAS_LEFT, BLOCK_N, BLOCK_M)


@triton.jit
def mask_sequence(call, tile, q_offsets, left):
    """Return the `ranges.Sequence` of the tile's sequence, for a mask with an EXTENSION."""
    _, sequence = ranges.find_sequence(tile.sequence, q_offsets, call.num_targets, left + 1, call.num_context)
    return sequence


@triton.jit
def masked_key_ranges(
    first_row, sequence, HAS_LEFT: tl.constexpr, EXTENSION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return `key_ranges` for a mask with an EXTENSION, and (0, end) of the visible keys before them."""
    begin, full, free, end = ranges.key_ranges(first_row, sequence, True, HAS_LEFT, BLOCK_M, BLOCK_N, EXTENSION)
    prefix = (ranges.prefix_tokens(sequence, EXTENSION) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    return begin, full, free, end, 0, tl.minimum(prefix, begin)


@triton.jit
def masked_query_ranges(
    first_key, sequence, HAS_LEFT: tl.constexpr, EXTENSION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return `query_ranges` for a mask with an EXTENSION, and (0, end) of the context queries that see the keys."""
    begin, full, free, end = ranges.query_ranges(first_key, sequence, True, HAS_LEFT, BLOCK_M, BLOCK_N, EXTENSION)
    return begin, full, free, end, 0, tl.minimum(ranges.context_rows(first_key, sequence, BLOCK_M, EXTENSION), begin)


@triton.jit
def distances(t, s, sequence, EXTENSION: tl.constexpr):
    """Return the distances of queries and keys in positions, at least 0."""
    if EXTENSION is not None:
        query = ranges.token_position(t, sequence, True, EXTENSION)
        key = ranges.token_position(s, sequence, True, EXTENSION)
        return tl.maximum(query - key, 0)
    else:
        return tl.abs(t - s)


@triton.jit
def head_slope(slopes, tile, head, stride):
    """Return the slope of a head of the tile's sequence, in units of log2."""
    return tl.load(slopes + tile.sequence * stride + head) * LOG2_E


@triton.jit
def mask_scores(
    scores, t, s, q_inside, k_inside, options, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EXTENSION: tl.constexpr
):
    """Set the scores of masked pairs to -inf; t, s, q_inside and k_inside broadcast to their shape."""
    seen = q_inside & k_inside
    if EXTENSION is not None:
        seen = seen & ranges.visible(t, s, options.sequence, True, HAS_LEFT, EXTENSION)
    else:
        if HAS_RIGHT:
            seen = seen & (s - t <= options.right)
        if HAS_LEFT:
            seen = seen & (t - s <= options.left)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def dropout_mask(options, t_first, s_first, ALIGNED: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return [M, N] bool: the weights of M queries from position t_first and N keys from s_first that are not dropped.

    A Philox call yields the numbers of four keys, from a multiple of four on. ALIGNED: s_first is such a multiple.
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
    acc, row_max, row_sum, q, first, last, t, t_first, q_inside, k, v, k_stride, v_stride, k_length, k_position,
    options,
    D: tl.constexpr, V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EXTENSION: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the keys first .. last of a piece to the online softmax: acc [m, V], row_max [m] and row_sum [m]."""
    n = tl.arange(0, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        key = load_block(k, start, n, k_stride, k_length, D, PAD_D, MASKED, TMA)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        s = (k_position + start + n)[None, :]
        factor = options.scale
        if options.slope is not None:
            scores *= options.scale
            scores -= options.slope * distances(t, s, options.sequence, EXTENSION).to(tl.float32)
            factor = 1.0
        if MASKED:
            inside = (start + n < k_length)[None, :]
            scores = mask_scores(scores, t, s, q_inside, inside, options, HAS_LEFT, HAS_RIGHT, EXTENSION)
        if BOUNDED:
            weights = tl.exp2(scores * factor - row_max[:, None])
            row_sum += tl.sum(weights, 1)
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
            weights = tl.exp2(scores * factor - new_max[:, None])
            rescale = tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            acc = acc * rescale[:, None]
            row_max = new_max
        if options.seed is not None:
            keep = dropout_mask(options, t_first, k_position + start, ALIGNED, BLOCK_M, BLOCK_N)
            weights = tl.where(keep, weights, 0.0)
        value = load_block(v, start, n, v_stride, k_length, V, PAD_V, MASKED, TMA)
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit
def _attend_all(
    acc, other_lse, query, tile, t, t_first, q_inside, k, v, k_head, k_offsets, k_starts, options,
    D: tl.constexpr, V: tl.constexpr, PIECES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    EXTENSION: tl.constexpr, ADD: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    BOUNDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Apply `_attend` to all keys. ADD: acc and other_lse (in units of log2) have the results of other keys."""
    row_max = tl.full([BLOCK_M], 0.0 if BOUNDED else INITIAL_MAX, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if ADD:
        row_max = tl.maximum(other_lse, row_max)
        row_sum = tl.exp2(other_lse - row_max)
        acc = acc * row_sum[:, None]
    for i in tl.static_range(PIECES):
        k_begin, k_length, k_position = piece(tile.sequence * PIECES + i, k_offsets, k_starts)
        if EXTENSION is not None:
            bounds = masked_key_ranges(tile.first, options.sequence, HAS_LEFT, EXTENSION, BLOCK_M, BLOCK_N)
        else:
            bounds = key_ranges(
                tile.first, tile.length, k_length, tile.position - k_position, options.left, options.right, HAS_LEFT,
                HAS_RIGHT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        keys = block_source(row_pointer(k, k_begin, k_head), k.stride_t, k_length, D, BLOCK_N, PAD_D, TMA)
        values = block_source(row_pointer(v, k_begin, k_head), v.stride_t, k_length, V, BLOCK_N, PAD_V, TMA)
        for part in tl.static_range(3 if EXTENSION is None else 5):
            if part != 3 and (part > 0 or HAS_LEFT or EXTENSION is not None):  # noqa: SIM102  a compile-time constant
                if bounds[part] < bounds[part + 1]:
                    acc, row_max, row_sum = _attend(
                        acc, row_max, row_sum, query, bounds[part], bounds[part + 1], t, t_first, q_inside, keys,
                        values, k.stride_t, v.stride_t, k_length, k_position, options,
                        D, V, HAS_LEFT, HAS_RIGHT, EXTENSION, ALIGNED, PRECISION, part != 1, BOUNDED, BLOCK_M,
                        BLOCK_N, PAD_D, PAD_V, TMA,
                    )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["total"])
def flash_attention_key_norms_kernel(
    k, key_norms, total,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PAD_D: tl.constexpr,
):  # fmt: skip
    """Compute key_norms [Hkv]: the square of the greatest norm of each head's keys."""
    head = tl.program_id(0) % HEADS
    token = (tl.program_id(0) // HEADS).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = load_head(k, head, token, token < total, D, PAD_D).to(tl.float32)
    tl.atomic_max(key_norms + head, tl.max(tl.sum(key * key, 1)), sem="relaxed")


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=CALLER_POINTERS)
def flash_attention_fwd_kernel(
    q, k, v, key_norms, before, out, lse, q_offsets, k_offsets, q_starts, k_starts, num_pieces, total, call, left,
    right, slope_stride, seed,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr,
    PIECES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EXTENSION: tl.constexpr,
    IN_PLACE: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    PAD_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M queries of one head in one program.

    key_norms: None, or the output of `flash_attention_key_norms_kernel` (see `SCORE_BOUND`).
    before: None, or, with `lse`, the results of earlier calls for other keys: [T, H, V] fp32, contiguous.
    IN_PLACE: whether `before` is `out`.
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
    sequence = None if EXTENSION is None else mask_sequence(call, tile, q_offsets, left)
    pair = tile.sequence * H + head
    options = HeadOptions(call.scale, slope, left, right, seed, pair, call.dropout, sequence)
    inside = q_inside & (e < V_OUT)[None, :]
    lse += head.to(tl.int64) * total + begin + first_row + m

    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)
    other_lse = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if ADD:
        other_lse = tl.load(lse, first_row + m < length, float("-inf")) * LOG2_E
        before += (begin + first_row) * (H * V_OUT) + head * V_OUT
        # `before` was divided by 1 - dropout.
        acc = tl.load(before + m[:, None] * (H * V_OUT) + e[None, :], inside, 0.0) * (1.0 - call.dropout)
    bounded = False
    if key_norms is not None:
        # The product of two norms bounds all scores; NaN and inf compare as not bounded.
        norm = tl.max(tl.sum(query.to(tl.float32) * query.to(tl.float32), 1))
        bounded = norm * tl.load(key_norms + head // GROUP) * (call.scale * call.scale) <= SCORE_BOUND * SCORE_BOUND
        if ADD:
            # Nor may the sum over the other keys underflow, with 0 as the maximum.
            bounded = bounded & (tl.min(tl.where(other_lse > float("-inf"), other_lse, 0.0)) >= -SCORE_BOUND)
    if bounded:
        acc, row_max, row_sum = _attend_all(
            acc, other_lse, query, tile, t, t_first, q_inside, k, v, head // GROUP, k_offsets, k_starts, options,
            D, V, PIECES, HAS_LEFT, HAS_RIGHT, EXTENSION, ADD, ALIGNED, PRECISION, True, BLOCK_M, BLOCK_N, PAD_D,
            PAD_V, TMA,
        )  # fmt: skip
    else:
        acc, row_max, row_sum = _attend_all(
            acc, other_lse, query, tile, t, t_first, q_inside, k, v, head // GROUP, k_offsets, k_starts, options,
            D, V, PIECES, HAS_LEFT, HAS_RIGHT, EXTENSION, ADD, ALIGNED, PRECISION, False, BLOCK_M, BLOCK_N, PAD_D,
            PAD_V, TMA,
        )  # fmt: skip
    sees_keys = row_sum != 0.0  # true for NaN
    row_sum = tl.where(sees_keys, row_sum, 1.0)  # acc is 0 for a query without keys
    tl.store(lse, tl.where(sees_keys, (row_max + tl.log2(row_sum)) / LOG2_E, float("-inf")), first_row + m < length)
    result = acc / (row_sum * (1.0 - call.dropout))[:, None]
    target = row_pointer(out, begin + first_row, head) + m[:, None] * out.stride_t + e[None, :]
    tl.store(target, result.to(out.pointer.dtype.element_ty), inside)
