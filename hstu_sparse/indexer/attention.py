"""Define the kernels of sparse attention, with one program for each query (or, for dk and dv from lists, for each key).

Letters: T tokens of the batch, H heads, D query/key and V value head size, K chosen tokens per query.

The heads of a query share their keys, so they are the rows of the tensor cores' tile (padded to 16), and a chosen key
is read once for all of them. Keys and values are gathered from the L2 cache, which bounds the speed. Scores are in
units of log 2, for exp2.

dk and dv are computed in two ways. With atomics the kernel of dq adds a query's share to fp32 buffers: D + V additions
for a pair. With lists, which hold for each key the pairs that include it, a program has a key and reads q and do of
each query that chose it: no atomics and the same bits in every run, but H (D + V) elements for a pair, not D + V.
"""

import triton
import triton.language as tl

from hstu_sparse.bias.scores import pair_bias
from hstu_sparse.indexer.pairs import LOG2E, add_table_gradients, chosen_bias, chosen_tokens
from hstu_sparse.tiles.rows import load_rows, store_rows


@triton.jit
def _scores(
    q, keys, visible, s, token, begin, t, scale, position, time, cells, timestamps, query_timestamps, positions,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (scores [heads, BLOCK] in units of log 2, -inf where masked; time buckets [BLOCK])."""
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2E)
    bias, bucket = chosen_bias(
        s, visible, token, begin, t, position, time, cells, timestamps, query_timestamps, positions
    )
    if (position is not None) or (time is not None):
        scores += (bias * LOG2E)[None, :]
    return tl.where(visible[None, :], scores, float("-inf")), bucket


@triton.jit(do_not_specialize=["positions"])
def sparse_attention_fwd_kernel(
    q, k, v, indices, rows, out, lse,
    position, time, cells, timestamps, query_timestamps, positions,
    q_stride_t, q_stride_h, k_stride_t, v_stride_t, scale, K,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, OUT_V: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the output of one query, and its scores' log-sum-exp by head."""
    token = tl.program_id(0).to(tl.int64)
    begin = tl.load(rows + token)
    t = (token - begin).to(tl.int32)
    head = tl.arange(0, BH)
    query = load_rows(q + token * q_stride_t, head, q_stride_h, head < H, D, BD)
    most = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    result = tl.zeros([BH, BV], tl.float32)
    for start in range(0, K, BLOCK):
        s, visible = chosen_tokens(indices, token, start, t, K, BLOCK)
        keys = load_rows(k, begin + s, k_stride_t, visible, D, BD)
        values = load_rows(v, begin + s, v_stride_t, visible, V, BV)
        scores, _ = _scores(
            query, keys, visible, s, token, begin, t, scale, position, time, cells, timestamps, query_timestamps,
            positions, PRECISION,
        )  # fmt: skip
        higher = tl.maximum(most, tl.max(scores, 1))
        # Until a key has been seen the maximum is -inf, and a difference from it would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None]
        result = tl.dot(weights.to(values.dtype), values, result, input_precision=PRECISION)
        most = higher
    result = tl.where(total[:, None] == 0.0, 0.0, result / total[:, None])
    store_rows(out + token * (H * OUT_V), head, OUT_V, head < H, result, OUT_V, BV)
    # 0 for a query that sees nothing: its weights exp2(-inf - 0) are then zeros in the backward pass.
    logarithm = tl.where(total == 0.0, 0.0, most + tl.log2(total))
    tl.store(lse + token * H + head, logarithm, mask=head < H)


@triton.jit(do_not_specialize=["positions", "buckets"])
def sparse_attention_bwd_kernel(
    do, q, k, v, out, lse, indices, rows, dq, dk, dv, delta, position_grad, time_grad, unit,
    position, time, cells, timestamps, query_timestamps, positions, buckets,
    do_stride_t, do_stride_h, q_stride_t, q_stride_h, k_stride_t, v_stride_t, scale, K,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, OUT_D: tl.constexpr, OUT_V: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr,
    POSITION_COPIES: tl.constexpr, TIME_COPIES: tl.constexpr, ATOMIC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq of one query, `delta` = do . out by head, its share of the tables' gradients and, ATOMIC, of dk and
    dv.
    """
    token = tl.program_id(0).to(tl.int64)
    begin = tl.load(rows + token)
    t = (token - begin).to(tl.int32)
    head = tl.arange(0, BH)
    inside = head < H
    query = load_rows(q + token * q_stride_t, head, q_stride_h, inside, D, BD)
    grad = load_rows(do + token * do_stride_t, head, do_stride_h, inside, V, BV)
    result = load_rows(out + token * (H * OUT_V), head, OUT_V, inside, OUT_V, BV)
    logarithm = tl.load(lse + token * H + head, mask=inside, other=0.0)
    along = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(delta + token * H + head, along, mask=inside)
    acc = tl.zeros([BH, BD], tl.float32)
    for start in range(0, K, BLOCK):
        s, visible = chosen_tokens(indices, token, start, t, K, BLOCK)
        keys = load_rows(k, begin + s, k_stride_t, visible, D, BD)
        values = load_rows(v, begin + s, v_stride_t, visible, V, BV)
        scores, bucket = _scores(
            query, keys, visible, s, token, begin, t, scale, position, time, cells, timestamps, query_timestamps,
            positions, PRECISION,
        )  # fmt: skip
        # Rows past H have weights too, but their do and q are zeros.
        weights = tl.exp2(scores - logarithm[:, None])
        dweights = tl.dot(grad, tl.trans(values), input_precision=PRECISION)
        dscores = weights * (dweights - along[:, None])
        add_table_gradients(
            position_grad, time_grad, unit, tl.sum(dscores, 0), s, visible, bucket, token, t, positions, buckets,
            POSITION_COPIES, TIME_COPIES,
        )  # fmt: skip
        narrow = dscores.to(keys.dtype)
        acc = tl.dot(narrow, keys, acc, input_precision=PRECISION)
        if ATOMIC:
            column = tl.arange(0, BD)
            share = tl.dot(tl.trans(narrow), query, input_precision=PRECISION) * scale
            where = dk + (begin + s)[:, None] * OUT_D + column[None, :]
            tl.atomic_add(where, share, mask=visible[:, None] & (column < OUT_D)[None, :], sem="relaxed")
            column = tl.arange(0, BV)
            share = tl.dot(tl.trans(weights.to(grad.dtype)), grad, input_precision=PRECISION)
            where = dv + (begin + s)[:, None] * OUT_V + column[None, :]
            tl.atomic_add(where, share, mask=visible[:, None] & (column < OUT_V)[None, :], sem="relaxed")
    store_rows(dq + token * (H * OUT_D), head, OUT_D, inside, acc * scale, OUT_D, BD)


@triton.jit(do_not_specialize=["positions"])
def sparse_attention_bwd_dkv_kernel(
    do, q, k, v, lse, delta, pairs, starts, dk, dv,
    position, time, cells, timestamps, query_timestamps, positions,
    do_stride_t, do_stride_h, q_stride_t, q_stride_h, k_stride_t, v_stride_t, scale, K,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, OUT_D: tl.constexpr, OUT_V: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one key, from the pairs of its list, QUERIES at a time. No tl.dot, so BH may be below 16."""
    token = tl.program_id(0).to(tl.int64)
    first, end = tl.load(starts + token), tl.load(starts + token + 1)
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    key = tl.load(k + token * k_stride_t + column, mask=column < D, other=0.0).to(tl.float32)
    value = tl.load(v + token * v_stride_t + value_column, mask=value_column < V, other=0.0).to(tl.float32)
    row = tl.arange(0, QUERIES * BH)
    head = row % BH
    key_grad = tl.zeros([BD], tl.float32)
    value_grad = tl.zeros([BV], tl.float32)
    for entry in range(first, end, QUERIES):
        place = entry + row // BH
        inside = (place < end) & (head < H)
        query_token = tl.load(pairs + place, mask=place < end, other=0) // K
        query = tl.load(
            q + (query_token * q_stride_t + head * q_stride_h)[:, None] + column[None, :],
            mask=inside[:, None] & (column < D)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        grad = tl.load(
            do + (query_token * do_stride_t + head * do_stride_h)[:, None] + value_column[None, :],
            mask=inside[:, None] & (value_column < V)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        distance = (query_token - token).to(tl.int32)
        query_time = 0
        key_time = 0
        if time is not None:
            query_time = tl.load(query_timestamps + query_token, mask=inside, other=0)
            key_time = tl.load(timestamps + token)
        bias, _ = pair_bias(distance, inside, query_time, key_time, position, time, cells, positions)
        scores = tl.sum(query * key[None, :], 1) * (scale * LOG2E) + bias * LOG2E
        logarithm = tl.load(lse + query_token * H + head, mask=inside, other=float("inf"))
        along = tl.load(delta + query_token * H + head, mask=inside, other=0.0)
        weights = tl.exp2(scores - logarithm)
        dscores = weights * (tl.sum(grad * value[None, :], 1) - along)
        key_grad += tl.sum(dscores[:, None] * query, 0)
        value_grad += tl.sum(weights[:, None] * grad, 0)
    tl.store(dk + token * OUT_D + column, key_grad * scale, mask=column < OUT_D)
    tl.store(dv + token * OUT_V + value_column, value_grad, mask=value_column < OUT_V)
