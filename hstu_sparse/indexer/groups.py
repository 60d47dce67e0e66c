"""Define the kernels of sparse attention where R tokens share a choice; a program has some tokens of a group.

Letters: T tokens of the batch, H query heads (of which HEADS share a key head), D query/key and V value head size, K
chosen tokens per group, G rows of a choice and R tokens that share one (selection_group, see choices.py).

Tokens times heads are the rows of the tensor cores' tile, so that a gathered key is used by R times H queries. A row is
token * BH + head, BH being the heads padded to a power of two. The first loop is over the group's choice, whose keys
are gathered and visible to all rows; the second over the group's own tokens, which are adjacent, each visible from
itself on. The bias belongs to token and key: it is computed once for all heads. Scores are in units of log 2.

With several key heads a tile of rows meets the tile of each one after another, with zeros in the rows of heads that
another one serves: choice and bias are read once for all of them.

dk and dv are sums by atomic additions, or from lists by a program that has a key (see attention.py). The lists hold the
group's own tokens as slots behind those of its choice.
"""

import triton
import triton.language as tl

from hstu_sparse.bias.gradients import add_pairs
from hstu_sparse.bias.scores import pair_bias
from hstu_sparse.indexer.pairs import LOG2E, chosen_tokens
from hstu_sparse.tiles.rows import load_rows


@triton.jit
def _group(rows, row, G, lead, TOKENS: tl.constexpr, BH: tl.constexpr):
    """Return (first token of the sequence, the group's first token and its number of tokens; for each row of the tile
    the index of its token in the group, and the head).
    """
    line = tl.arange(0, TOKENS * BH)
    begin, first = tl.load(rows + row), tl.load(rows + G + row)
    return begin, first, tl.load(rows + 2 * G + row).to(tl.int32), lead + line // BH, line % BH


@triton.jit
def _load_lines(base, token, head, inside, stride_t, stride_h, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load a tile [rows, PADDED] of [T, H, SIZE], zeros where not `inside`."""
    return load_rows(base, token * stride_t + head * stride_h, 1, inside, SIZE, PADDED)


@triton.jit
def _load_key_heads(
    base, rows, stride_t, stride_h, mask, SIZE: tl.constexpr, PADDED: tl.constexpr, KEY_HEADS: tl.constexpr
):
    """Return the tile [keys, PADDED] of every key head, a tuple, from [T, KEY_HEADS, SIZE]."""
    tiles = (load_rows(base, rows, stride_t, mask, SIZE, PADDED),)
    for number in tl.static_range(1, KEY_HEADS):
        tiles += (load_rows(base + number * stride_h, rows, stride_t, mask, SIZE, PADDED),)
    return tiles


@triton.jit
def _of_key_head(x, head, number: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr):
    """Zero the rows of x whose query head another key head than `number` serves."""
    if KEY_HEADS == 1:
        return x
    else:
        return tl.where((head // HEADS == number)[:, None], x, 0.0).to(x.dtype)


@triton.jit
def _products(x, tiles, head, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the products [rows, keys] of the rows of x and the tiles of their key heads."""
    mine = _of_key_head(x, head, 0, HEADS, KEY_HEADS)
    products = tl.dot(mine, tl.trans(tiles[0]), input_precision=PRECISION)
    for number in tl.static_range(1, KEY_HEADS):
        mine = _of_key_head(x, head, number, HEADS, KEY_HEADS)
        products = tl.dot(mine, tl.trans(tiles[number]), products, input_precision=PRECISION)
    return products


@triton.jit
def _weighted(weights, tiles, head, acc, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, PRECISION: tl.constexpr):
    """Add to acc [rows, channels] the tiles of the rows' key heads, weighted by [rows, keys]."""
    for number in tl.static_range(KEY_HEADS):
        mine = _of_key_head(weights, head, number, HEADS, KEY_HEADS)
        acc = tl.dot(mine, tiles[number], acc, input_precision=PRECISION)
    return acc


@triton.jit
def _spread(x, BH: tl.constexpr):
    """Repeat [tokens, keys] for every head: [tokens * BH, keys]."""
    if BH == 1:
        return x
    else:
        wide = tl.broadcast_to(x[:, None, :], [x.shape[0], BH, x.shape[1]])
        return tl.reshape(wide, [x.shape[0] * BH, x.shape[1]])


@triton.jit
def _sum_heads(x, BH: tl.constexpr):
    """Sum over heads: [tokens * BH, keys] -> [tokens, keys]."""
    if BH == 1:
        return x
    else:
        return tl.sum(tl.reshape(x, [x.shape[0] // BH, BH, x.shape[1]]), 1)


@triton.jit
def _scores(
    products, s, visible, queries, begin, position, time, cells, timestamps, query_timestamps, positions, scale,
    BH: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Return (scores [rows, keys] in units of log 2, -inf where masked; time buckets and visibility [tokens, keys]).

    products: those of queries and keys. queries: the tokens' positions and validity, and the positions of the rows'
    tokens. LOCAL: a key is visible from its own token on.
    """
    t, is_token, t_row = queries
    scores = products * (scale * LOG2E)
    seen = is_token[:, None] & visible[None, :]
    if LOCAL:
        seen = seen & (s[None, :] <= t[:, None])
    bucket = tl.zeros(seen.shape, tl.int32)
    if (position is not None) or (time is not None):
        query_times = 0
        key_times = 0
        if time is not None:
            query_times = tl.load(query_timestamps + begin + t, mask=is_token, other=0)[:, None]
            key_times = tl.load(timestamps + begin + s, mask=visible, other=0)[None, :]
        distance = t[:, None] - s[None, :]
        bias, bucket = pair_bias(distance, seen, query_times, key_times, position, time, cells, positions)
        scores += _spread(bias * LOG2E, BH)
    # Rows without a token or head are not masked: their results are dropped.
    mask = visible[None, :]
    if LOCAL:
        mask = mask & (s[None, :] <= t_row[:, None])
    return tl.where(mask, scores, float("-inf")), bucket, seen


@triton.jit
def _add(
    most, total, result, scores, values, head, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, PRECISION: tl.constexpr
):
    """Update the online softmax with a block."""
    higher = tl.maximum(most, tl.max(scores, 1))
    # Until a key has been seen the maximum is -inf, and a difference from it would be NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(values[0].dtype)
    result = _weighted(weights, values, head, result * shrink[:, None], HEADS, KEY_HEADS, PRECISION)
    return higher, total, result


@triton.jit(do_not_specialize=["positions", "G"])
def group_attention_fwd_kernel(
    q, k, v, indices, rows, out, lse,
    position, time, cells, timestamps, query_timestamps, positions,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, scale, K, G,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, OUT_V: tl.constexpr, KEY_HEADS: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of TOKENS tokens of a group, and their scores' log-sum-exp by head."""
    row, lead = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOKENS
    begin, first, size, place, head = _group(rows, row, G, lead, TOKENS, BH)
    if lead >= size:
        return
    HEADS: tl.constexpr = H // KEY_HEADS
    t0 = (first - begin).to(tl.int32)
    each = lead + tl.arange(0, TOKENS)
    asker = t0 + each, each < size, t0 + place
    inside = (place < size) & (head < H)
    query = _load_lines(q, first + place, head, inside, q_stride_t, q_stride_h, D, BD)
    most = tl.full([TOKENS * BH], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * BH], tl.float32)
    result = tl.zeros([TOKENS * BH, BV], tl.float32)
    for start in range(0, K, BLOCK):
        s, visible = chosen_tokens(indices, row, start, t0 - 1, K, BLOCK)
        keys = _load_key_heads(k, begin + s, k_stride_t, k_stride_h, visible, D, BD, KEY_HEADS)
        values = _load_key_heads(v, begin + s, v_stride_t, v_stride_h, visible, V, BV, KEY_HEADS)
        products = _products(query, keys, head, HEADS, KEY_HEADS, PRECISION)
        scores, _, _ = _scores(
            products, s, visible, asker, begin, position, time, cells, timestamps, query_timestamps, positions, scale,
            BH, False,
        )  # fmt: skip
        most, total, result = _add(most, total, result, scores, values, head, HEADS, KEY_HEADS, PRECISION)
    for start in range(0, tl.minimum(lead + TOKENS, size), NEAR):
        ahead = start + tl.arange(0, NEAR)
        keys = _load_key_heads(k, first + ahead, k_stride_t, k_stride_h, ahead < size, D, BD, KEY_HEADS)
        values = _load_key_heads(v, first + ahead, v_stride_t, v_stride_h, ahead < size, V, BV, KEY_HEADS)
        products = _products(query, keys, head, HEADS, KEY_HEADS, PRECISION)
        scores, _, _ = _scores(
            products, t0 + ahead, ahead < size, asker, begin, position, time, cells, timestamps, query_timestamps,
            positions, scale, BH, True,
        )  # fmt: skip
        most, total, result = _add(most, total, result, scores, values, head, HEADS, KEY_HEADS, PRECISION)
    result = result / total[:, None]  # a token sees itself
    column = tl.arange(0, BV)
    line = (first + place) * H + head
    tl.store(
        out + line[:, None] * OUT_V + column[None, :], result.to(out.dtype.element_ty),
        mask=inside[:, None] & (column < OUT_V)[None, :],
    )  # fmt: skip
    tl.store(lse + line, most + tl.log2(total), mask=inside)


@triton.jit
def _add_pairs(
    position_grad, time_grad, unit, dscores, s, seen, t, bucket, row, positions, buckets, BH: tl.constexpr,
    POSITION_COPIES: tl.constexpr, TIME_COPIES: tl.constexpr,
):  # fmt: skip
    """Add the scores' gradients to a copy of each table's gradient."""
    if (position_grad is not None) or (time_grad is not None):
        if position_grad is not None:
            position_grad += (row % POSITION_COPIES) * positions
        if time_grad is not None:
            time_grad += (row % TIME_COPIES) * buckets
        distance = t[:, None] - s[None, :]
        add_pairs(position_grad, time_grad, unit, _sum_heads(dscores, BH), distance, seen, bucket, positions)


@triton.jit
def _add_keys(target, token, visible, share, STRIDE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    where = target + token[:, None] * STRIDE + column[None, :]
    tl.atomic_add(where, share, mask=visible[:, None] & (column < SIZE)[None, :], sem="relaxed")


@triton.jit
def _gradients(
    query, grad, logarithm, along, acc, keys, values, s, visible, queries, head, row, begin,
    dk, dv, position_grad, time_grad, unit, position, time, cells, timestamps, query_timestamps, positions, buckets,
    scale, OUT_D: tl.constexpr, OUT_V: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    POSITION_COPIES: tl.constexpr, TIME_COPIES: tl.constexpr, ATOMIC: tl.constexpr, LOCAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contribution of a block of keys: to dq, which is returned, to the tables' gradients and, ATOMIC, to dk
    and dv.
    """
    scores, bucket, seen = _scores(
        _products(query, keys, head, HEADS, KEY_HEADS, PRECISION), s, visible, queries, begin, position, time, cells,
        timestamps, query_timestamps, positions, scale, BH, LOCAL,
    )  # fmt: skip
    weights = tl.exp2(scores - logarithm[:, None])
    dweights = _products(grad, values, head, HEADS, KEY_HEADS, PRECISION)
    dscores = weights * (dweights - along[:, None])
    _add_pairs(
        position_grad, time_grad, unit, dscores, s, seen, queries[0], bucket, row, positions, buckets, BH,
        POSITION_COPIES, TIME_COPIES,
    )  # fmt: skip
    narrow = dscores.to(keys[0].dtype)
    if ATOMIC:
        for number in tl.static_range(KEY_HEADS):
            mine = _of_key_head(narrow, head, number, HEADS, KEY_HEADS)
            share = tl.dot(tl.trans(mine), query, input_precision=PRECISION) * scale
            _add_keys(dk + number * OUT_D, begin + s, visible, share, KEY_HEADS * OUT_D, OUT_D, BD)
            mine = _of_key_head(weights.to(grad.dtype), head, number, HEADS, KEY_HEADS)
            share = tl.dot(tl.trans(mine), grad, input_precision=PRECISION)
            _add_keys(dv + number * OUT_V, begin + s, visible, share, KEY_HEADS * OUT_V, OUT_V, BV)
    return _weighted(narrow, keys, head, acc, HEADS, KEY_HEADS, PRECISION)


@triton.jit(do_not_specialize=["positions", "buckets", "G"])
def group_attention_bwd_kernel(
    do, q, k, v, out, lse, indices, rows, dq, dk, dv, delta, position_grad, time_grad, unit,
    position, time, cells, timestamps, query_timestamps, positions, buckets,
    do_stride_t, do_stride_h, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, scale, K, G,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, OUT_D: tl.constexpr, OUT_V: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    NEAR: tl.constexpr, POSITION_COPIES: tl.constexpr, TIME_COPIES: tl.constexpr, ATOMIC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq of TOKENS tokens of a group, `delta` = do . out by head, their share of the tables' gradients and,
    ATOMIC, of dk and dv.
    """
    row, lead = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOKENS
    begin, first, size, place, head = _group(rows, row, G, lead, TOKENS, BH)
    if lead >= size:
        return
    HEADS: tl.constexpr = H // KEY_HEADS
    t0 = (first - begin).to(tl.int32)
    each = lead + tl.arange(0, TOKENS)
    asker = t0 + each, each < size, t0 + place
    inside = (place < size) & (head < H)
    line = (first + place) * H + head
    query = _load_lines(q, first + place, head, inside, q_stride_t, q_stride_h, D, BD)
    grad = _load_lines(do, first + place, head, inside, do_stride_t, do_stride_h, V, BV)
    result = _load_lines(out, first + place, head, inside, H * OUT_V, OUT_V, OUT_V, BV)
    # Infinity gives rows without a token or head zero weight.
    logarithm = tl.load(lse + line, mask=inside, other=float("inf"))
    along = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(delta + line, along, mask=inside)
    acc = tl.zeros([TOKENS * BH, BD], tl.float32)
    for start in range(0, K, BLOCK):
        s, visible = chosen_tokens(indices, row, start, t0 - 1, K, BLOCK)
        keys = _load_key_heads(k, begin + s, k_stride_t, k_stride_h, visible, D, BD, KEY_HEADS)
        values = _load_key_heads(v, begin + s, v_stride_t, v_stride_h, visible, V, BV, KEY_HEADS)
        acc = _gradients(
            query, grad, logarithm, along, acc, keys, values, s, visible, asker, head, row, begin,
            dk, dv, position_grad, time_grad, unit, position, time, cells, timestamps, query_timestamps, positions,
            buckets, scale, OUT_D, OUT_V, HEADS, KEY_HEADS, BH, BD, BV, POSITION_COPIES, TIME_COPIES, ATOMIC, False,
            PRECISION,
        )  # fmt: skip
    for start in range(0, tl.minimum(lead + TOKENS, size), NEAR):
        ahead = start + tl.arange(0, NEAR)
        keys = _load_key_heads(k, first + ahead, k_stride_t, k_stride_h, ahead < size, D, BD, KEY_HEADS)
        values = _load_key_heads(v, first + ahead, v_stride_t, v_stride_h, ahead < size, V, BV, KEY_HEADS)
        acc = _gradients(
            query, grad, logarithm, along, acc, keys, values, t0 + ahead, ahead < size, asker, head, row, begin,
            dk, dv, position_grad, time_grad, unit, position, time, cells, timestamps, query_timestamps, positions,
            buckets, scale, OUT_D, OUT_V, HEADS, KEY_HEADS, BH, BD, BV, POSITION_COPIES, TIME_COPIES, ATOMIC, True,
            PRECISION,
        )  # fmt: skip
    column = tl.arange(0, BD)
    tl.store(
        dq + line[:, None] * OUT_D + column[None, :], (acc * scale).to(dq.dtype.element_ty),
        mask=inside[:, None] & (column < OUT_D)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["positions", "G", "SLOTS"])
def group_attention_bwd_dkv_kernel(
    do, q, k, v, lse, delta, rows, pairs, starts, dk, dv,
    position, time, cells, timestamps, query_timestamps, positions,
    do_stride_t, do_stride_h, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, scale, SLOTS, G,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, OUT_D: tl.constexpr, OUT_V: tl.constexpr,
    KEY_HEADS: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one key of a key head, from the groups of its list, TOKENS of their tokens at a time. No
    tl.dot.
    """
    token, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k += token * k_stride_t + number * k_stride_h
    v += token * v_stride_t + number * v_stride_h
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    key = tl.load(k + column, mask=column < D, other=0.0).to(tl.float32)
    value = tl.load(v + value_column, mask=value_column < V, other=0.0).to(tl.float32)
    key_grad = tl.zeros([BD], tl.float32)
    value_grad = tl.zeros([BV], tl.float32)
    for entry in range(tl.load(starts + token), tl.load(starts + token + 1)):
        row = tl.load(pairs + entry) // SLOTS
        _begin, first, size, place, head = _group(rows, row, G, 0, TOKENS, BH)
        for lead in range(0, size, TOKENS):
            query_token = first + lead + place
            # Each of the group's own tokens is visible from itself on, and other keys to all tokens.
            inside = (lead + place < size) & (head // (H // KEY_HEADS) == number) & (query_token >= token)
            query = _load_lines(q, query_token, head, inside, q_stride_t, q_stride_h, D, BD).to(tl.float32)
            grad = _load_lines(do, query_token, head, inside, do_stride_t, do_stride_h, V, BV).to(tl.float32)
            query_time = 0
            key_time = 0
            if time is not None:
                query_time = tl.load(query_timestamps + query_token, mask=inside, other=0)
                key_time = tl.load(timestamps + token)
            distance = (query_token - token).to(tl.int32)
            bias = pair_bias(distance, inside, query_time, key_time, position, time, cells, positions)[0]
            scores = tl.sum(query * key[None, :], 1) * (scale * LOG2E) + bias * LOG2E
            line = query_token * H + head
            logarithm = tl.load(lse + line, mask=inside, other=float("inf"))
            along = tl.load(delta + line, mask=inside, other=0.0)
            weights = tl.exp2(scores - logarithm)
            dscores = weights * (tl.sum(grad * value[None, :], 1) - along)
            key_grad += tl.sum(dscores[:, None] * query, 0)
            value_grad += tl.sum(weights[:, None] * grad, 0)
    target = token * KEY_HEADS + number
    tl.store(dk + target * OUT_D + column, key_grad * scale, mask=column < OUT_D)
    tl.store(dv + target * OUT_V + value_column, value_grad, mask=value_column < OUT_V)
