"""Choose the top_k scores of each query, exactly and stably, without a [T, N] tensor of scores.

Letters: T tokens of the batch, B sequences, J index heads, E index head size, K chosen tokens per query (top_k), R
tokens that share a choice (selection_group): every R-th token of a sequence is a query. With R = 1 a query may choose
itself, otherwise only earlier tokens.

There are six kernels:
- `rows` numbers the queries.
- `sample` scores some of the keys for each tile of queries.
- `threshold` selects, from a query's sample, a score that a few more than K of all its keys reach.
- `collect` scores all keys and writes those that reach the threshold to the query's row of candidates, ordered by s.
- `refill` runs if the sample was misleading: if a row has fewer than K candidates or more than its capacity. It scores
  the query's keys again and prunes the row whenever it is full, without a threshold. So the result is exact for any
  sample, only slower.
- `finish` selects the K greatest candidates of a row.

The sample has one key, at a pseudorandom position, of each of equally long parts of the sequence, so that periodic
data, such as alternating items and actions, do not bias it. If a query sees no more tokens than the capacity of a row,
all are candidates. Tokens whose score equals the threshold cannot be chosen after the first K candidates, and are
dropped, so that a row suffices even if all keys have the same score.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.bias.buckets import bucket_of, load_split_times
from hstu_sparse.bias.scores import load_times, table_bias
from hstu_sparse.indexer.scores import load_query
from hstu_sparse.tiles.assembly import look_up
from hstu_sparse.tiles.rows import COMPILED, load_rows, locate


class Heads(NamedTuple):
    """The constants of a kernel: index heads, their size in memory and in tiles, tokens that share a choice."""

    J: int
    E: int
    BE: int
    R: int
    PRECISION: str
    ASM: bool


class Tile(NamedTuple):
    """A tile of queries of one sequence.

    begin     the sequence's first token
    t         [ROWS] positions of the queries
    inside    [ROWS] the mask of those that exist
    last      [ROWS] the last position that each query may choose
    """

    begin: tl.tensor
    t: tl.tensor
    inside: tl.tensor
    last: tl.tensor


@triton.jit
def _find_tile(begin, tile, length, ROWS: tl.constexpr, R: tl.constexpr):
    t = (tile * ROWS + tl.arange(0, ROWS)) * R
    return Tile(begin, t, t < length, t if R == 1 else t - 1)


@triton.jit(do_not_specialize=["B"])
def lightning_indexer_rows_kernel(offsets, tokens, begins, targets, B, ROWS: tl.constexpr, R: tl.constexpr):
    """Store each query's token (-1 if there is none), its sequence's first token and its row of the result."""
    slot = tl.program_id(0)
    b, begin, length, tile = locate(offsets, slot, B, ROWS * R)
    queries = _find_tile(begin, tile, length, ROWS, R)
    row = slot.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(tokens + row, tl.where(queries.inside, begin + queries.t, -1))
    tl.store(begins + row, begin + tl.zeros([ROWS], tl.int64))
    tl.store(targets + row, begin + queries.t if R == 1 else begin // R + b + queries.t // R)


@triton.jit
def _weighted_relu(query, weight, keys, heads: tl.constexpr):
    """Compute one head's part of a tile of scores; x + |x| = 2 ReLU(x) exactly, and is twice as fast as a maximum."""
    dots = tl.dot(query, keys, input_precision=heads.PRECISION)
    return (dots + tl.abs(dots)) * weight[:, None]


@triton.jit
def _load_head(index, tile, head, heads: tl.constexpr):
    """Load (queries [ROWS, BE], half the weights, fp32 [ROWS]) of a head: see `_weighted_relu`."""
    rows, iq, w = tile.begin + tile.t, index.iq, index.w
    query = load_rows(iq.pointer + head * iq.stride_h, rows, iq.stride_t, tile.inside, heads.E, heads.BE)
    weight = tl.load(w.pointer + head * w.stride_h + rows * w.stride_t, mask=tile.inside, other=0.0)
    return query, 0.5 * weight.to(tl.float32)


@triton.jit
def _load_heads(index, tile, heads: tl.constexpr, HEADS: tl.constexpr):
    """Load the first HEADS heads by `_load_head`: a tuple of pairs."""
    loaded = ()
    for head in tl.static_range(HEADS):
        loaded += (_load_head(index, tile, head, heads),)
    return loaded


@triton.jit
def _split_bias(bias, distance, seen, query_times, key_times, ASM: tl.constexpr):
    """Return the same bits as `table_bias` for a tile of pairs; with ASM, arbitrary biases where not `seen`.

    query_times, key_times: the times of queries and keys, each as (high, low), see `load_split_times`. With ASM, which
    needs fp32 tables, look-ups stay in the tile's layout; ordinary loads would move addresses and values through shared
    memory.
    """
    added = tl.zeros_like(distance.to(tl.float32))
    if bias.position is not None:
        if ASM:
            place = tl.minimum(tl.maximum(distance, 0), bias.positions - 1)
            added += tl.where(distance < bias.positions, look_up(bias.position, place, ASM), 0.0)
        else:
            mask = seen & (distance < bias.positions)
            added += tl.load(bias.position + distance, mask=mask, other=0.0).to(tl.float32)
    if bias.time is not None:
        difference = tl.abs((query_times[0] - key_times[0]) + (query_times[1] - key_times[1]))
        bucket = bucket_of(difference, bias.cells, ASM)
        if ASM:
            added += look_up(bias.time, bucket, ASM)
        else:
            added += tl.load(bias.time + tl.where(seen, bucket, 0)).to(tl.float32)
    return added


@triton.jit
def _scores(loaded, index, tile, s, key_inside, seen, bias, heads: tl.constexpr):
    """Compute I(t, s) of a tile [ROWS, BLOCK]. loaded: the first heads, see `_load_heads`."""
    key_token = tile.begin + s
    keys = tl.trans(load_rows(index.ik.pointer, key_token, index.ik.stride_t, key_inside, heads.E, heads.BE))
    scores = _weighted_relu(loaded[0][0], loaded[0][1], keys, heads)
    for head in tl.static_range(1, len(loaded)):
        scores += _weighted_relu(loaded[head][0], loaded[head][1], keys, heads)
    for head in range(len(loaded), heads.J):
        query, weight = _load_head(index, tile, head, heads)
        scores += _weighted_relu(query, weight, keys, heads)
    if (bias.position is not None) or (bias.time is not None):
        query_times = 0.0, 0.0
        key_times = 0.0, 0.0
        if bias.time is not None:
            high, low = load_split_times(bias.query_times + tile.begin + tile.t, tile.inside)
            query_times = high[:, None], low[:, None]
            high, low = load_split_times(bias.key_times + key_token, key_inside)
            key_times = high[None, :], low[None, :]
        distance = tile.t[:, None] - s[None, :]
        scores += _split_bias(bias, distance, seen, query_times, key_times, heads.ASM)
    return scores


@triton.jit
def _sample_key(i, stride, length):
    """Return the i-th sampled key: one of the keys i * stride .. (i + 1) * stride - 1."""
    mixed = (i.to(tl.uint32) + 1) * 2654435761
    mixed = (mixed ^ (mixed >> 15)) * 2246822519
    mixed = mixed ^ (mixed >> 13)
    return i * stride + (mixed % stride.to(tl.uint32)).to(tl.int32)


@triton.jit(do_not_specialize=["B", "first_slot"])
def lightning_indexer_sample_kernel(
    index, offsets, sampled, bias, B, first_slot, capacity,
    heads: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Compute scores of SAMPLE keys for a tile of queries, -inf for keys that a query does not see."""
    slot = tl.program_id(0)
    _, begin, length, number = locate(offsets, first_slot + slot, B, ROWS * heads.R)
    tile = _find_tile(begin, number, length, ROWS, heads.R)
    end = tl.minimum(tl.max(tile.last, 0) + 1, length)
    if (number * ROWS * heads.R >= length) | (end <= capacity):
        return
    row = slot.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # For few keys, a sample of a quarter suffices.
    stride = tl.maximum((end + SAMPLE - 1) // SAMPLE, 4)
    sampled_keys = tl.cdiv(tl.cdiv(end, stride), BLOCK) * BLOCK
    loaded = _load_heads(index, tile, heads, HEADS)
    for start in range(sampled_keys, SAMPLE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(sampled + row[:, None] * SAMPLE + i[None, :], tl.full([ROWS, BLOCK], float("-inf"), tl.float32))
    for start in range(0, sampled_keys, BLOCK):
        i = start + tl.arange(0, BLOCK)
        s = _sample_key(i, stride, end)
        seen = (s[None, :] <= tile.last[:, None]) & tile.inside[:, None]
        scores = _scores(loaded, index, tile, s, s < end, seen, bias, heads)
        tl.store(sampled + row[:, None] * SAMPLE + i[None, :], tl.where(seen, scores, float("-inf")))


@triton.jit
def _to_ordered_int(x):
    """Return int32 keys with the order of the fp32 numbers x; 0 and -0 have one key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_ordered_int(bits):
    """Invert `_to_ordered_int`."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _find_cut(keys, low, high, count, least, most):
    """Find the greatest number that at least `least` keys reach, by trisection; stop when at most `most` reach it.

    low, high: bounds of the keys; count: the number of keys that reach `low`, at least `least` for a meaningful result.
    There must be fewer than 2^16 keys.
    """
    while (low < high) & (count > most):
        # Two numbers in (low, high]; the width may exceed an int32.
        width = high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
        step = (width + 2) // 3
        first = low + step.to(tl.int32, bitcast=True)
        second = first + tl.minimum(step, width - step).to(tl.int32, bitcast=True)
        # One sum has both counts, since synchronising threads takes most of the time.
        counts = tl.sum((keys >= first).to(tl.int32) + ((keys >= second).to(tl.int32) << 16), 0)
        reach_first, reach_second = counts & 0xFFFF, counts >> 16
        if reach_second >= least:
            low = second
            count = reach_second
        elif reach_first >= least:
            low = first
            count = reach_first
            high = second - 1
        else:
            high = first - 1
    return low


@triton.jit
def lightning_indexer_threshold_kernel(
    sampled, begins, tokens, thresholds, capacity, K, SAMPLE: tl.constexpr, R: tl.constexpr
):
    """Compute a score that very likely K to `capacity` of a query's keys reach; -inf if all keys fit."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    if token < 0:
        return
    seen = (token - tl.load(begins + row) + (1 if R == 1 else 0)).to(tl.int32)
    threshold = float("-inf")
    if seen > capacity:
        scores = tl.load(sampled + row * SAMPLE + tl.arange(0, SAMPLE))
        visible = scores > float("-inf")
        size = tl.sum(visible.to(tl.int32), 0)
        # The expected number of the K greatest keys in the sample, plus several standard deviations.
        expected = K * (size.to(tl.float32) / seen)
        rank = (expected + 5.0 * tl.sqrt(expected) + 3.0).to(tl.int32)
        if rank < size:
            keys = _to_ordered_int(scores)
            low = tl.min(tl.where(visible, keys, 0x7FFFFFFF), 0)
            keys = tl.where(visible, keys, -0x7FFFFFFF)
            threshold = _from_ordered_int(_find_cut(keys, low, tl.max(keys, 0), size, rank, rank + rank // 32))
    tl.store(thresholds + row, threshold)


@triton.jit
def _reach(scores, bound):
    """Return 1.0 where scores >= bound and 0.0 elsewhere, also for NaN."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "set.ge.f32.f32 $0, $1, $2;", constraints="=f,f,f", args=[scores, bound], dtype=tl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        return (scores >= bound).to(tl.float32)


class CandidateRows(NamedTuple):
    """The rows of candidates of a tile.

    buffer            pointer to the first row
    threshold, above  [ROWS] the least score of candidates, and the next greater number
    limit             [ROWS] a row with more candidates accepts no further ones
    """

    buffer: tl.tensor
    threshold: tl.tensor
    above: tl.tensor
    limit: tl.tensor


@triton.jit
def _collect(
    start, count, loaded, rows, triangle, index, tile, length, bias, K,
    heads: tl.constexpr, CAPACITY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write the candidates of a block of keys to their rows; return the updated number of candidates of each row."""
    s = start + tl.arange(0, BLOCK)
    seen = tile.inside[:, None] & (s[None, :] <= tile.last[:, None])
    scores = _scores(loaded, index, tile, s, s < length, seen, bias, heads)
    # After K candidates, keys that equal the threshold are dropped. Past its limit a row accepts nothing, not even an
    # infinite score.
    bound = tl.where(count > rows.limit, float("nan"), tl.where(count >= K, rows.above, rows.threshold))
    if MASKED:
        scores = tl.where(seen, scores, float("nan"))
    # Prefix sums along the rows are computed by a product with a triangle of ones, exactly in fp16; a scan would move
    # the tile between threads. The triangle's diagonal has an additional 1/2, which records whether an entry is
    # selected. With 2^22 added, the low bits of a sum are twice the index after the entry in `buffer`, plus 1 if the
    # entry is selected: a conversion to integers would take longer.
    selected = _reach(scores, bound[:, None]).to(tl.float16)
    row = tl.arange(0, ROWS) * CAPACITY
    first = (row + count).to(tl.float32) + 4194304.0
    place = (tl.dot(selected, triangle) + first[:, None]).to(tl.uint32, bitcast=True)
    # One word has the column and the place, the next the score, so that the tile may be stored in any order. A store in
    # order would go through shared memory, in many steps.
    word = (place << 9) | tl.arange(0, BLOCK)[None, :].to(tl.uint32)
    pair = (scores.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | word.to(tl.uint64)
    pair = tl.reshape(pair, [ROWS * BLOCK], can_reorder=True)
    word = pair.to(tl.uint32)
    s = (word & 511).to(tl.int32) | start
    packed = (pair >> 32 << 32) | s.to(tl.uint32).to(tl.uint64)
    # Pointers count halves of an entry. Three halves are subtracted, since the index is one past the entry and the
    # selected bit is set.
    halves = rows.buffer.to(tl.pointer_type(tl.int32), bitcast=True) - 3 + (word >> 9).to(tl.uint64)
    tl.store(halves.to(tl.pointer_type(tl.int64), bitcast=True), packed.to(tl.int64), mask=(word & 512) != 0)
    end = tl.sum(tl.where((tl.arange(0, BLOCK) == BLOCK - 1)[None, :], place, 0), 1)
    return ((end & 0x7FFFFF) >> 1).to(tl.int32) - row


@triton.jit(do_not_specialize=["B", "first_slot", "slots"])
def lightning_indexer_collect_kernel(
    index, offsets, thresholds, candidates, counts, bias, B, first_slot, slots, K,
    heads: tl.constexpr, HEADS: tl.constexpr, CAPACITY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each query's candidates, ordered by s, and their number: CAPACITY + 1 if some may be missing."""
    # Tiles at a sequence's end take longest, so they start first.
    slot = slots - 1 - tl.program_id(0)
    _, begin, length, number = locate(offsets, first_slot + slot, B, ROWS * heads.R)
    if number * ROWS * heads.R >= length:
        return
    tile = _find_tile(begin, number, length, ROWS, heads.R)
    row = slot.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    threshold = tl.load(thresholds + row, mask=tile.inside, other=float("inf"))
    above = tl.where(threshold == float("-inf"), threshold, _from_ordered_int(_to_ordered_int(threshold) + 1))
    # Past the limit another block might not fit. CAPACITY tokens always fit.
    limit = tl.where(tile.last >= CAPACITY, CAPACITY - BLOCK, CAPACITY)
    rows = CandidateRows(candidates + slot.to(tl.int64) * (ROWS * CAPACITY), threshold, above, limit)
    loaded = _load_heads(index, tile, heads, HEADS)
    step = tl.arange(0, BLOCK)
    triangle = (step[:, None] <= step[None, :]).to(tl.float16) + 0.5 * (step[:, None] == step[None, :]).to(tl.float16)
    count = tl.zeros([ROWS], tl.int32)
    unmasked_end = (number * ROWS * heads.R) // BLOCK * BLOCK
    for start in range(0, unmasked_end, BLOCK):
        count = _collect(
            start, count, loaded, rows, triangle, index, tile, length, bias, K, heads, CAPACITY, ROWS, BLOCK, False
        )
    for start in range(unmasked_end, tl.minimum(tl.max(tile.last, 0) + 1, length), BLOCK):
        count = _collect(
            start, count, loaded, rows, triangle, index, tile, length, bias, K, heads, CAPACITY, ROWS, BLOCK, True
        )
    tl.store(counts + row, tl.where(count > limit, CAPACITY + 1, count), mask=tile.inside)


@triton.jit
def _select_first(packed, inside, count, K):
    """Return (mask of the first K of `count` candidates by score, then by s; their places; the K-th greatest key)."""
    keys = _to_ordered_int((packed >> 32).to(tl.int32).to(tl.float32, bitcast=True))
    low = tl.min(tl.where(inside, keys, 0x7FFFFFFF), 0)
    keys = tl.where(inside, keys, -0x7FFFFFFF)
    cut = _find_cut(keys, low, tl.max(keys, 0), count, K, K)
    above = inside & (keys > cut)
    equal = inside & (keys == cut)
    # One scan has both ranks, which are below 2^16.
    ranks = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    num_ties = K - tl.sum(above.to(tl.int32), 0)
    place = (ranks & 0xFFFF) + tl.minimum(ranks >> 16, num_ties) - 1
    return above | (equal & ((ranks >> 16) <= num_ties)), place, cut


@triton.jit
def _refill(
    index, token, begin, buffer, bias, capacity, K,
    heads: tl.constexpr, BJ: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write a query's candidates to `buffer` again, without a threshold; return their number."""
    t = (token - begin).to(tl.int32)
    end = t + 1 if heads.R == 1 else t
    query, weight = load_query(index, token, heads.J, heads.E, BJ, heads.BE)
    place = tl.arange(0, SIZE)
    bound = float("-inf")
    num_kept = 0
    for start in range(0, end, BLOCK):
        s = start + tl.arange(0, BLOCK)
        seen = s < end
        keys = load_rows(index.ik.pointer, begin + s, index.ik.stride_t, seen, heads.E, heads.BE)
        dots = tl.dot(query, tl.trans(keys), input_precision=heads.PRECISION)
        scores = tl.sum(tl.maximum(dots, 0.0) * weight[:, None], 0)
        if (bias.position is not None) or (bias.time is not None):
            query_time = load_times(bias.query_times, token, token >= 0)
            key_times = load_times(bias.key_times, begin + s, seen)
            scores += table_bias(bias, t - s, seen, query_time, key_times)[0]
        take = seen & (scores > bound)
        packed = (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | s.to(tl.int64)
        tl.store(buffer + num_kept + tl.cumsum(take.to(tl.int32), 0) - 1, packed, mask=take)
        num_kept += tl.sum(take.to(tl.int32), 0)
        if num_kept > capacity - BLOCK:
            # Threads read entries that others wrote. A later score must exceed the least one selected.
            tl.debug_barrier()
            candidates = tl.load(buffer + place, mask=place < num_kept, other=0)
            selected, target, cut = _select_first(candidates, place < num_kept, num_kept, K)
            tl.debug_barrier()
            tl.store(buffer + target, candidates, mask=selected)
            tl.debug_barrier()
            bound = _from_ordered_int(cut)
            num_kept = tl.minimum(num_kept, K)
    return num_kept


@triton.jit
def lightning_indexer_refill_kernel(
    index, begins, tokens, candidates, counts, bias, capacity, K,
    heads: tl.constexpr, BJ: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the candidates again for those queries of a tile that have too few or too many, which are rare."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    each = tl.arange(0, ROWS)
    token = tl.load(tokens + first + each)
    inside = token >= 0
    begin = tl.load(begins + first + each)
    count = tl.load(counts + first + each, mask=inside, other=0)
    num_needed = tl.minimum(token - begin + (1 if heads.R == 1 else 0), K)
    wrong = (inside & ((count < num_needed) | (count > capacity))).to(tl.int32)
    remaining = tl.sum(wrong, 0)
    while remaining > 0:
        row_in_tile = tl.min(tl.where(wrong > 0, each, ROWS), 0)
        wrong = tl.where(each == row_in_tile, 0, wrong)
        remaining -= 1
        row = first + row_in_tile
        buffer = candidates + row * capacity
        num_candidates = _refill(
            index, tl.load(tokens + row), tl.load(begins + row), buffer, bias, capacity, K, heads, BJ, BLOCK, SIZE
        )
        tl.store(counts + row, num_candidates)


@triton.jit
def lightning_indexer_finish_kernel(
    tokens, targets, candidates, counts, scores, indices, capacity, K, LEAST: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the K greatest of one query's candidates, padded with -1, if it has LEAST to SIZE candidates."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(tokens + row) < 0:
        return
    count = tl.load(counts + row)
    if (count < LEAST) | (count > SIZE):
        return
    target = tl.load(targets + row) * K
    buffer, scores, indices = candidates + row * capacity, scores + target, indices + target
    place = tl.arange(0, SIZE)
    inside = place < count
    packed = tl.load(buffer + place, mask=inside, other=0)
    selected, rank, _ = _select_first(packed, inside, count, K)
    tl.store(scores + rank, (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True), mask=selected)
    tl.store(indices + rank, packed.to(tl.int32), mask=selected)
    for start in range(count, K, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        tl.store(scores + slot, float("-inf"), mask=slot < K)
        tl.store(indices + slot, -1, mask=slot < K)
