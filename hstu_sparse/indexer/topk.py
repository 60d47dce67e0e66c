"""Choose the top-k of each query's scores, exactly and stably, without a [T, N] tensor of scores.

Letters: T tokens of the batch, B sequences, J index heads, E index head size, K chosen tokens per query (top_k), R
tokens that share a choice (selection_group): every R-th token of a sequence is a query. With R = 1 a query may choose
itself, otherwise only earlier tokens.

There are five kernels. `rows` numbers the queries. `sample` scores some of the keys for each tile of queries;
`threshold` selects, from a query's sample, a score that a few more than K of all its keys reach. `collect` scores all
keys and writes those that reach the threshold to the query's row of candidates, ordered by s; `finish` selects the K
greatest of that row. If the sample was misleading, so that a row has fewer than K candidates or more than its
capacity, `refill` scores the query's keys again, prunes the row whenever it is full, and needs no threshold: the result
is exact for any sample, only slower.

Sampled keys are one of each stretch of equal length, at a pseudorandom place in it, so that no period of the data, like
actions between items, is hidden from them. If a query sees no more tokens than the capacity of a row, all are
candidates. Tokens equal to the threshold that come after the first K candidates cannot be chosen, and are left out, so
that a row suffices even if all keys have the same score.
"""

import triton
import triton.language as tl

from hstu_sparse.bias.buckets import load_split_times
from hstu_sparse.bias.scores import pair_bias
from hstu_sparse.indexer.pairs import split_bias
from hstu_sparse.tiles.rows import COMPILED, load_rows, locate


@triton.jit
def _queries(tile, length, ROWS: tl.constexpr, R: tl.constexpr):
    """Return (positions of a tile's queries, the mask of valid ones, the last position that each may choose)."""
    t = (tile * ROWS + tl.arange(0, ROWS)) * R
    return t, t < length, t if R == 1 else t - 1


@triton.jit(do_not_specialize=["B"])
def lightning_indexer_rows_kernel(offsets, tokens, begins, targets, B, ROWS: tl.constexpr, R: tl.constexpr):
    """Store each query's token (-1 if there is none), its sequence's first token and its row of the result."""
    slot = tl.program_id(0)
    b, begin, length, tile = locate(offsets, slot, B, ROWS * R)
    t, inside, _ = _queries(tile, length, ROWS, R)
    row = slot.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(tokens + row, tl.where(inside, begin + t, -1))
    tl.store(begins + row, begin + tl.zeros([ROWS], tl.int64))
    tl.store(targets + row, begin + t if R == 1 else begin // R + b + t // R)


@triton.jit
def _weighed(query, weight, keys, PRECISION: tl.constexpr):
    """Compute one head's part of a tile of scores. x + |x| = 2 ReLU(x), exactly, at twice the rate of a maximum."""
    dots = tl.dot(query, keys, input_precision=PRECISION)
    return (dots + tl.abs(dots)) * weight[:, None]


@triton.jit
def _scores(
    queries, weights, iq, w, ik, rows, inside, key_token, key_inside, t, s, seen,
    position, time, cells, timestamps, query_timestamps, positions,
    iq_stride_t, iq_stride_h, ik_stride_t, w_stride_t, w_stride_h,
    J: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Compute I(t, s) of a tile [ROWS, BLOCK]. queries, weights: of the first heads, see `_load_heads`."""
    keys = tl.trans(load_rows(ik, key_token, ik_stride_t, key_inside, E, BE))
    scores = _weighed(queries[0], weights[0], keys, PRECISION)
    for head in tl.static_range(1, len(queries)):
        scores += _weighed(queries[head], weights[head], keys, PRECISION)
    for head in range(len(queries), J):
        query, weight = _load_head(iq, w, rows, inside, head, iq_stride_t, iq_stride_h, w_stride_t, w_stride_h, E, BE)
        scores += _weighed(query, weight, keys, PRECISION)
    if (position is not None) or (time is not None):
        query_times = 0.0, 0.0
        key_times = 0.0, 0.0
        if time is not None:
            high, low = load_split_times(query_timestamps + rows, inside)
            query_times = high[:, None], low[:, None]
            high, low = load_split_times(timestamps + key_token, key_inside)
            key_times = high[None, :], low[None, :]
        scores += split_bias(
            t[:, None] - s[None, :], seen, query_times, key_times, position, time, cells, positions, ASM
        )
    return scores


@triton.jit
def _load_head(
    iq, w, rows, inside, head, iq_stride_t, iq_stride_h, w_stride_t, w_stride_h, E: tl.constexpr, BE: tl.constexpr
):
    """Load (queries [ROWS, BE], half the weights, fp32 [ROWS]) of a head: see `_weighed`."""
    query = load_rows(iq + head * iq_stride_h, rows, iq_stride_t, inside, E, BE)
    weight = tl.load(w + head * w_stride_h + rows * w_stride_t, mask=inside, other=0.0)
    return query, 0.5 * weight.to(tl.float32)


@triton.jit
def _load_heads(
    iq, w, rows, inside, iq_stride_t, iq_stride_h, w_stride_t, w_stride_h, E: tl.constexpr, BE: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Load the first HEADS heads by `_load_head`: (tuple of queries, tuple of weights)."""
    queries = ()
    weights = ()
    for head in tl.static_range(HEADS):
        query, weight = _load_head(iq, w, rows, inside, head, iq_stride_t, iq_stride_h, w_stride_t, w_stride_h, E, BE)
        queries += (query,)
        weights += (weight,)
    return queries, weights


@triton.jit
def _sampled(i, stride, length):
    """Return the i-th sampled key: one of the i-th `stride` keys."""
    mixed = (i.to(tl.uint32) + 1) * 2654435761
    mixed = (mixed ^ (mixed >> 15)) * 2246822519
    mixed = mixed ^ (mixed >> 13)
    return i * stride + (mixed % stride.to(tl.uint32)).to(tl.int32)


@triton.jit(do_not_specialize=["positions", "B", "first_slot"])
def lightning_indexer_sample_kernel(
    iq, ik, w, offsets, sampled,
    position, time, cells, timestamps, query_timestamps, positions,
    iq_stride_t, iq_stride_h, ik_stride_t, w_stride_t, w_stride_h, B, first_slot, capacity,
    J: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Compute scores of SAMPLE keys for a tile of queries, -inf for keys that a query does not see."""
    slot = tl.program_id(0)
    _, begin, length, tile = locate(offsets, first_slot + slot, B, ROWS * R)
    t, inside, last = _queries(tile, length, ROWS, R)
    end = tl.minimum(tl.max(last, 0) + 1, length)
    if (tile * ROWS * R >= length) | (end <= capacity):
        return
    rows = begin + t
    row = slot.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # With few keys, a quarter of them is enough.
    stride = tl.maximum((end + SAMPLE - 1) // SAMPLE, 4)
    sampled_keys = tl.cdiv(tl.cdiv(end, stride), BLOCK) * BLOCK
    queries, weights = _load_heads(iq, w, rows, inside, iq_stride_t, iq_stride_h, w_stride_t, w_stride_h, E, BE, HEADS)
    for start in range(sampled_keys, SAMPLE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(sampled + row[:, None] * SAMPLE + i[None, :], tl.full([ROWS, BLOCK], float("-inf"), tl.float32))
    for start in range(0, sampled_keys, BLOCK):
        i = start + tl.arange(0, BLOCK)
        s = _sampled(i, stride, end)
        seen = (s[None, :] <= last[:, None]) & inside[:, None]
        scores = _scores(
            queries, weights, iq, w, ik, rows, inside, begin + s, s < end, t, s, seen,
            position, time, cells, timestamps, query_timestamps, positions,
            iq_stride_t, iq_stride_h, ik_stride_t, w_stride_t, w_stride_h, J, E, BE, PRECISION, ASM,
        )  # fmt: skip
        tl.store(sampled + row[:, None] * SAMPLE + i[None, :], tl.where(seen, scores, float("-inf")))


@triton.jit
def _ordered(x):
    """Return int32 in the order of the fp32 numbers x; 0 and -0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(bits):
    """Invert `_ordered`."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _cut(keys, low, high, count, least, most):
    """Find the greatest number that at least `least` keys reach, by trisection; stop once at most `most` reach it.

    low, high: bounds of the keys; count: how many reach `low`; the result is meaningful if that is at least `least`.
    There must be fewer than 2^16 keys.
    """
    while (low < high) & (count > most):
        # Two numbers in (low, high]; the width may exceed an int32.
        width = high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
        step = (width + 2) // 3
        first = low + step.to(tl.int32, bitcast=True)
        second = first + tl.minimum(step, width - step).to(tl.int32, bitcast=True)
        # Both counts in one sum, since the synchronisation of threads takes most of the time.
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
    """Compute for one query a score that very likely K to `capacity` of its keys reach; -inf if all fit anyway."""
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
        # The expected number of the K greatest in the sample, and a margin of several standard deviations.
        expected = K * (size.to(tl.float32) / seen)
        rank = (expected + 5.0 * tl.sqrt(expected) + 3.0).to(tl.int32)
        if rank < size:
            keys = _ordered(scores)
            low = tl.min(tl.where(visible, keys, 0x7FFFFFFF), 0)
            keys = tl.where(visible, keys, -0x7FFFFFFF)
            threshold = _unordered(_cut(keys, low, tl.max(keys, 0), size, rank, rank + rank // 32))
    tl.store(thresholds + row, threshold)


@triton.jit
def _reaches(scores, bar):
    """Return 1.0 where scores >= bar and 0.0 elsewhere, also for NaN."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "set.ge.f32.f32 $0, $1, $2;", constraints="=f,f,f", args=[scores, bar], dtype=tl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        return (scores >= bar).to(tl.float32)


@triton.jit
def _collect(
    start, count, queries, weights, threshold, above, limit, triangle, iq, w, ik, buffer, rows, inside, begin,
    length, t, last, position, time, cells, timestamps, query_timestamps, positions,
    iq_stride_t, iq_stride_h, ik_stride_t, w_stride_t, w_stride_h, K,
    CAPACITY: tl.constexpr, J: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write the candidates of a block of keys to `buffer`; return the updated number of candidates in each row."""
    s = start + tl.arange(0, BLOCK)
    seen = inside[:, None] & (s[None, :] <= last[:, None])
    scores = _scores(
        queries, weights, iq, w, ik, rows, inside, begin + s, s < length, t, s, seen,
        position, time, cells, timestamps, query_timestamps, positions,
        iq_stride_t, iq_stride_h, ik_stride_t, w_stride_t, w_stride_h, J, E, BE, PRECISION, ASM,
    )  # fmt: skip
    # Keys that equal the threshold and come after the first K candidates are dropped. Past its limit a row accepts
    # nothing, not even an infinite score.
    bar = tl.where(count > limit, float("nan"), tl.where(count >= K, above, threshold))
    if MASKED:
        scores = tl.where(seen, scores, float("nan"))
    # Prefix sums along the rows are products of small numbers, exact in fp16: a scan would move the tile between
    # threads.
    # Half of one on the triangle's diagonal records whether an entry itself is selected. With 2^22 added, the bits of a
    # sum are twice the index after the entry in `buffer` and that half: a conversion would take longer.
    selected = _reaches(scores, bar[:, None]).to(tl.float16)
    row = tl.arange(0, ROWS) * CAPACITY
    first = (row + count).to(tl.float32) + 4194304.0
    place = (tl.dot(selected, triangle) + first[:, None]).to(tl.uint32, bitcast=True)
    # The column is in one word with the place, and the score in the next, so that the tile may be stored in any order.
    # In the store's own order it would go through shared memory, in many steps.
    word = (place << 9) | tl.arange(0, BLOCK)[None, :].to(tl.uint32)
    pair = (scores.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | word.to(tl.uint64)
    pair = tl.reshape(pair, [ROWS * BLOCK], can_reorder=True)
    word = pair.to(tl.uint32)
    s = (word & 511).to(tl.int32) | start
    packed = (pair >> 32 << 32) | s.to(tl.uint32).to(tl.uint64)
    # In halves of an entry, less an entry and a half, since the index is one past the entry and the selected bit is
    # set.
    halves = buffer.to(tl.pointer_type(tl.int32), bitcast=True) - 3 + (word >> 9).to(tl.uint64)
    tl.store(halves.to(tl.pointer_type(tl.int64), bitcast=True), packed.to(tl.int64), mask=(word & 512) != 0)
    behind = tl.sum(tl.where((tl.arange(0, BLOCK) == BLOCK - 1)[None, :], place, 0), 1)
    return ((behind & 0x7FFFFF) >> 1).to(tl.int32) - row


@triton.jit(do_not_specialize=["positions", "B", "first_slot", "slots"])
def lightning_indexer_collect_kernel(
    iq, ik, w, offsets, thresholds, candidates, counts,
    position, time, cells, timestamps, query_timestamps, positions,
    iq_stride_t, iq_stride_h, ik_stride_t, w_stride_t, w_stride_h, B, first_slot, slots, K,
    CAPACITY: tl.constexpr, J: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write the candidates of a tile of queries, ordered by s, and their number; CAPACITY + 1 if there may be more."""
    # The tiles late in a sequence take longest, so they come first.
    slot = slots - 1 - tl.program_id(0)
    _, begin, length, tile = locate(offsets, first_slot + slot, B, ROWS * R)
    if tile * ROWS * R >= length:
        return
    t, inside, last = _queries(tile, length, ROWS, R)
    rows = begin + t
    row = slot.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    buffer = candidates + slot.to(tl.int64) * (ROWS * CAPACITY)
    threshold = tl.load(thresholds + row, mask=inside, other=float("inf"))
    above = tl.where(threshold == float("-inf"), threshold, _unordered(_ordered(threshold) + 1))
    # The limit at which a whole block might no longer fit. CAPACITY tokens always fit.
    limit = tl.where(last >= CAPACITY, CAPACITY - BLOCK, CAPACITY)
    queries, weights = _load_heads(iq, w, rows, inside, iq_stride_t, iq_stride_h, w_stride_t, w_stride_h, E, BE, HEADS)
    step = tl.arange(0, BLOCK)
    triangle = (step[:, None] <= step[None, :]).to(tl.float16) + 0.5 * (step[:, None] == step[None, :]).to(tl.float16)
    count = tl.zeros([ROWS], tl.int32)
    unmasked_end = (tile * ROWS * R) // BLOCK * BLOCK
    for start in range(0, unmasked_end, BLOCK):
        count = _collect(
            start, count, queries, weights, threshold, above, limit, triangle, iq, w, ik, buffer, rows, inside,
            begin, length, t, last, position, time, cells, timestamps, query_timestamps, positions, iq_stride_t,
            iq_stride_h, ik_stride_t, w_stride_t, w_stride_h, K, CAPACITY, J, E, BE, ROWS, BLOCK, False, PRECISION, ASM,
        )  # fmt: skip
    for start in range(unmasked_end, tl.minimum(tl.max(last, 0) + 1, length), BLOCK):
        count = _collect(
            start, count, queries, weights, threshold, above, limit, triangle, iq, w, ik, buffer, rows, inside,
            begin, length, t, last, position, time, cells, timestamps, query_timestamps, positions, iq_stride_t,
            iq_stride_h, ik_stride_t, w_stride_t, w_stride_h, K, CAPACITY, J, E, BE, ROWS, BLOCK, True, PRECISION, ASM,
        )  # fmt: skip
    tl.store(counts + row, tl.where(count > limit, CAPACITY + 1, count), mask=inside)


@triton.jit
def _keep(packed, inside, count, K):
    """Return (which of `count` candidates are the first K by score, then by s; their places; the cut)."""
    keys = _ordered((packed >> 32).to(tl.int32).to(tl.float32, bitcast=True))
    low = tl.min(tl.where(inside, keys, 0x7FFFFFFF), 0)
    keys = tl.where(inside, keys, -0x7FFFFFFF)
    cut = _cut(keys, low, tl.max(keys, 0), count, K, K)
    above = inside & (keys > cut)
    equal = inside & (keys == cut)
    # Both ranks in one scan: each is less than 2^16.
    ranks = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    num_ties = K - tl.sum(above.to(tl.int32), 0)
    place = (ranks & 0xFFFF) + tl.minimum(ranks >> 16, num_ties) - 1
    return above | (equal & ((ranks >> 16) <= num_ties)), place, cut


@triton.jit
def _refill(
    iq, ik, w, token, begin, buffer, position, time, cells, timestamps, query_timestamps, positions,
    iq_stride_t, iq_stride_h, ik_stride_t, w_stride_t, w_stride_h, capacity, K,
    J: tl.constexpr, E: tl.constexpr, BJ: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
    R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a query's candidates to `buffer` again, without a threshold; return their number."""
    t = (token - begin).to(tl.int32)
    end = t + 1 if R == 1 else t
    head = tl.arange(0, BJ)
    inside = head < J
    query = load_rows(iq + token * iq_stride_t, head, iq_stride_h, inside, E, BE)
    weight = tl.load(w + token * w_stride_t + head * w_stride_h, mask=inside, other=0.0).to(tl.float32)
    place = tl.arange(0, SIZE)
    bar = float("-inf")
    num_kept = 0
    for start in range(0, end, BLOCK):
        s = start + tl.arange(0, BLOCK)
        seen = s < end
        keys = load_rows(ik, begin + s, ik_stride_t, seen, E, BE)
        dots = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        scores = tl.sum(tl.maximum(dots, 0.0) * weight[:, None], 0)
        if (position is not None) or (time is not None):
            query_time = 0
            key_times = 0
            if time is not None:
                query_time = tl.load(query_timestamps + token)
                key_times = tl.load(timestamps + begin + s, mask=seen, other=0)
            bias, _ = pair_bias(t - s, seen, query_time, key_times, position, time, cells, positions)
            scores += bias
        take = seen & (scores > bar)
        packed = (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | s.to(tl.int64)
        tl.store(buffer + num_kept + tl.cumsum(take.to(tl.int32), 0) - 1, packed, mask=take)
        num_kept += tl.sum(take.to(tl.int32), 0)
        if num_kept > capacity - BLOCK:
            # Threads read here what others wrote. A later score has to be greater than the last one selected.
            tl.debug_barrier()
            candidates = tl.load(buffer + place, mask=place < num_kept, other=0)
            selected, target, cut = _keep(candidates, place < num_kept, num_kept, K)
            tl.debug_barrier()
            tl.store(buffer + target, candidates, mask=selected)
            tl.debug_barrier()
            bar = _unordered(cut)
            num_kept = tl.minimum(num_kept, K)
    return num_kept


@triton.jit(do_not_specialize=["positions"])
def lightning_indexer_refill_kernel(
    iq, ik, w, begins, tokens, candidates, counts,
    position, time, cells, timestamps, query_timestamps, positions,
    iq_stride_t, iq_stride_h, ik_stride_t, w_stride_t, w_stride_h, capacity, K,
    J: tl.constexpr, E: tl.constexpr, BJ: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SIZE: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the candidates again for the few queries of a tile whose candidates do not suffice."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    each = tl.arange(0, ROWS)
    token = tl.load(tokens + first + each)
    inside = token >= 0
    begin = tl.load(begins + first + each)
    count = tl.load(counts + first + each, mask=inside, other=0)
    num_needed = tl.minimum(token - begin + (1 if R == 1 else 0), K)
    wrong = (inside & ((count < num_needed) | (count > capacity))).to(tl.int32)
    remaining = tl.sum(wrong, 0)
    while remaining > 0:
        # Process the first such row, and then the next.
        row_in_tile = tl.min(tl.where(wrong > 0, each, ROWS), 0)
        wrong = tl.where(each == row_in_tile, 0, wrong)
        remaining -= 1
        row = first + row_in_tile
        query_token = tl.load(tokens + row)
        num_candidates = _refill(
            iq, ik, w, query_token, tl.load(begins + row), candidates + row * capacity,
            position, time, cells, timestamps, query_timestamps, positions,
            iq_stride_t, iq_stride_h, ik_stride_t, w_stride_t, w_stride_h, capacity, K, J, E, BJ, BE, BLOCK, SIZE,
            R, PRECISION,
        )  # fmt: skip
        tl.store(counts + row, num_candidates)


@triton.jit
def lightning_indexer_finish_kernel(
    tokens, targets, candidates, counts, scores, indices, capacity, K, LEAST: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the K greatest of one query's candidates, padded with -1, if their number is LEAST to SIZE."""
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
    selected, rank, _ = _keep(packed, inside, count, K)
    tl.store(scores + rank, (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True), mask=selected)
    tl.store(indices + rank, packed.to(tl.int32), mask=selected)
    for start in range(count, K, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        tl.store(scores + slot, float("-inf"), mask=slot < K)
        tl.store(indices + slot, -1, mask=slot < K)
