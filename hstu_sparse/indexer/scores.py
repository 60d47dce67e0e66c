"""Compute the indexer's scores at chosen tokens, and their gradients; one program for each query (or key).

Letters: T tokens of the batch, J index heads, E index head size, K chosen tokens per query, G rows of a choice and R
tokens that share one (see choices.py).

The index heads of a query are the rows of the tensor cores' tile, padded to 16. The keys' gradient is a sum over the
queries that chose them: by atomics, or from lists by a program that has the key (see attention.py).
"""

import triton
import triton.language as tl

from hstu_sparse.bias.buckets import pair_bucket
from hstu_sparse.indexer.choices import query_of
from hstu_sparse.indexer.pairs import add_table_gradients, chosen_bias, chosen_tokens
from hstu_sparse.tiles.rows import load_rows, store_rows


@triton.jit(do_not_specialize=["positions", "G"])
def index_scores_fwd_kernel(
    iq, ik, w, indices, rows, scores,
    position, time, cells, timestamps, query_timestamps, positions,
    iq_stride_t, iq_stride_h, ik_stride_t, w_stride_t, w_stride_h, K, G,
    J: tl.constexpr, E: tl.constexpr, BJ: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the scores of one query's chosen tokens, -inf where masked."""
    row = tl.program_id(0).to(tl.int64)
    token, begin, t, last = query_of(rows, row, G, R)
    token = tl.maximum(token, 0)  # in a row without a group everything is masked
    head = tl.arange(0, BJ)
    inside = head < J
    query = load_rows(iq + token * iq_stride_t, head, iq_stride_h, inside, E, BE)
    weight = tl.load(w + token * w_stride_t + head * w_stride_h, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, K, BLOCK):
        s, visible = chosen_tokens(indices, row, start, last, K, BLOCK)
        keys = load_rows(ik, begin + s, ik_stride_t, visible, E, BE)
        dots = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        weighted = tl.sum(tl.maximum(dots, 0.0) * weight[:, None], 0)
        bias, _ = chosen_bias(
            s, visible, token, begin, t, position, time, cells, timestamps, query_timestamps, positions
        )
        slot = start + tl.arange(0, BLOCK)
        tl.store(scores + row * K + slot, tl.where(visible, weighted + bias, float("-inf")), mask=slot < K)


@triton.jit(do_not_specialize=["positions", "buckets", "G"])
def index_scores_bwd_kernel(
    grad, iq, ik, w, indices, rows, diq, dik, dw, position_grad, time_grad, unit,
    cells, timestamps, query_timestamps, positions, buckets,
    grad_stride_t, grad_stride_k, iq_stride_t, iq_stride_h, ik_stride_t, w_stride_t, w_stride_h, K, G,
    J: tl.constexpr, E: tl.constexpr, OUT_E: tl.constexpr, BJ: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr,
    POSITION_COPIES: tl.constexpr, TIME_COPIES: tl.constexpr, ATOMIC: tl.constexpr, R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute diq and dw of one query, its share of the tables' gradients and, ATOMIC, of dik."""
    row = tl.program_id(0).to(tl.int64)
    token, begin, t, last = query_of(rows, row, G, R)
    if token < 0:
        return
    head = tl.arange(0, BJ)
    inside = head < J
    query = load_rows(iq + token * iq_stride_t, head, iq_stride_h, inside, E, BE)
    weight = tl.load(w + token * w_stride_t + head * w_stride_h, mask=inside, other=0.0).to(tl.float32)
    query_grad = tl.zeros([BJ, BE], tl.float32)
    weight_grad = tl.zeros([BJ], tl.float32)
    for start in range(0, K, BLOCK):
        s, visible = chosen_tokens(indices, row, start, last, K, BLOCK)
        keys = load_rows(ik, begin + s, ik_stride_t, visible, E, BE)
        slot = start + tl.arange(0, BLOCK)
        upstream = tl.load(grad + row * grad_stride_t + slot * grad_stride_k, mask=visible, other=0.0).to(tl.float32)
        dots = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        weight_grad += tl.sum(tl.maximum(dots, 0.0) * upstream[None, :], 1)
        share = tl.where(dots > 0.0, weight[:, None] * upstream[None, :], 0.0)
        narrow = share.to(keys.dtype)
        query_grad = tl.dot(narrow, keys, query_grad, input_precision=PRECISION)
        bucket = s * 0
        if time_grad is not None:
            query_time = tl.load(query_timestamps + token)
            key_times = tl.load(timestamps + begin + s, mask=visible, other=0)
            bucket = pair_bucket(query_time, key_times, cells)
        add_table_gradients(
            position_grad, time_grad, unit, upstream, s, visible, bucket, row, t, positions, buckets,
            POSITION_COPIES, TIME_COPIES,
        )  # fmt: skip
        if ATOMIC:
            column = tl.arange(0, BE)
            key_share = tl.dot(tl.trans(narrow), query, input_precision=PRECISION)
            where = dik + (begin + s)[:, None] * OUT_E + column[None, :]
            tl.atomic_add(where, key_share, mask=visible[:, None] & (column < OUT_E)[None, :], sem="relaxed")
    store_rows(diq + token * (J * OUT_E), head, OUT_E, inside, query_grad, OUT_E, BE)
    tl.store(dw + token * J + head, weight_grad, mask=inside)


@triton.jit(do_not_specialize=["G"])
def index_scores_bwd_dik_kernel(
    grad, iq, ik, w, rows, pairs, starts, dik,
    grad_stride_t, grad_stride_k, iq_stride_t, iq_stride_h, ik_stride_t, w_stride_t, w_stride_h, K, G,
    J: tl.constexpr, E: tl.constexpr, OUT_E: tl.constexpr, BJ: tl.constexpr, BE: tl.constexpr, QUERIES: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Compute dik of one key, from the pairs of its list, QUERIES at a time. BJ may be below 16: no tl.dot."""
    token = tl.program_id(0).to(tl.int64)
    first, end = tl.load(starts + token), tl.load(starts + token + 1)
    column = tl.arange(0, BE)
    key = tl.load(ik + token * ik_stride_t + column, mask=column < E, other=0.0).to(tl.float32)
    line = tl.arange(0, QUERIES * BJ)
    head = line % BJ
    acc = tl.zeros([BE], tl.float32)
    for entry in range(first, end, QUERIES):
        place = entry + line // BJ
        inside = (place < end) & (head < J)
        pair = tl.load(pairs + place, mask=place < end, other=0)
        row, slot = pair // K, pair % K
        asker = row if R == 1 else tl.load(rows + G + row, mask=inside, other=0)
        query = tl.load(
            iq + (asker * iq_stride_t + head * iq_stride_h)[:, None] + column[None, :],
            mask=inside[:, None] & (column < E)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        upstream = tl.load(grad + row * grad_stride_t + slot * grad_stride_k, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(w + asker * w_stride_t + head * w_stride_h, mask=inside, other=0.0).to(tl.float32)
        dots = tl.sum(query * key[None, :], 1)
        acc += tl.sum(tl.where(dots > 0.0, weight * upstream, 0.0)[:, None] * query, 0)
    tl.store(dik + token * OUT_E + column, acc, mask=column < OUT_E)
