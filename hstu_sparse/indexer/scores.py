"""Compute the indexer's scores at chosen tokens, and their gradients; one program for each row of a choice.

Letters: T tokens of the batch, J index heads, E index head size, K chosen tokens per row, G rows of a choice and R
tokens that share one (see choices.py).

The index heads of a query, padded to 16, are the rows of a tile. The gradients of keys and tables are summed by atomic
additions.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.bias.buckets import pair_bucket
from hstu_sparse.bias.gradients import add_to, add_to_tables
from hstu_sparse.bias.scores import load_times
from hstu_sparse.indexer.choices import POSITION_COPIES, TIME_COPIES, chosen_bias, chosen_tokens, find_query
from hstu_sparse.tiles.rows import Rows, load_rows, store_rows


class Index(NamedTuple):
    """The indexer's inputs: iq [T, J, E], ik [T, E] as [T, 1, E], w [T, J]."""

    iq: Rows
    ik: Rows
    w: Rows

    @classmethod
    def of(cls, iq, ik, w) -> "Index":
        return cls(Rows.of(iq), Rows(ik, ik.stride(0), 0), Rows.of(w))


@triton.jit
def load_query(index, token, J: tl.constexpr, E: tl.constexpr, BJ: tl.constexpr, BE: tl.constexpr):
    """Return (queries [BJ, BE], weights [BJ] fp32) of a token's heads, zeros past J."""
    iq, w, head = index.iq, index.w, tl.arange(0, BJ)
    weights = tl.load(w.pointer + token * w.stride_t + head * w.stride_h, mask=head < J, other=0.0)
    query = load_rows(iq.pointer + token * iq.stride_t, head, iq.stride_h, head < J, E, BE)
    return query, weights.to(tl.float32)


@triton.jit(do_not_specialize=["G"])
def index_scores_fwd_kernel(
    index, indices, rows, scores, bias, K, G,
    J: tl.constexpr, E: tl.constexpr, BJ: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the scores of one row's chosen tokens, -inf where masked: everywhere in a row without a query."""
    query = find_query(rows, tl.program_id(0).to(tl.int64), G, R)
    queries, weights = load_query(index, tl.maximum(query.token, 0), J, E, BJ, BE)
    for start in range(0, K, BLOCK):
        s, visible = chosen_tokens(indices, query, start, K, BLOCK)
        keys = load_rows(index.ik.pointer, query.begin + s, index.ik.stride_t, visible, E, BE)
        dots = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        weighted = tl.sum(tl.maximum(dots, 0.0) * weights[:, None], 0)
        bias_values, _ = chosen_bias(bias, query, s, visible)
        slot = start + tl.arange(0, BLOCK)
        value = tl.where(visible, weighted + bias_values, float("-inf"))
        tl.store(scores + query.row * K + slot, value, mask=slot < K)


@triton.jit(do_not_specialize=["G"])
def index_scores_bwd_kernel(
    grad, index, indices, rows, diq, dik, dw, tables, bias, K, G,
    J: tl.constexpr, E: tl.constexpr, OUT_E: tl.constexpr, BJ: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr,
    R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute diq and dw of one row's query, and add to the gradients of keys and tables."""
    query = find_query(rows, tl.program_id(0).to(tl.int64), G, R)
    if query.token < 0:
        return
    queries, weights = load_query(index, query.token, J, E, BJ, BE)
    query_grad = tl.zeros([BJ, BE], tl.float32)
    weight_grad = tl.zeros([BJ], tl.float32)
    column = tl.arange(0, BE)
    for start in range(0, K, BLOCK):
        s, visible = chosen_tokens(indices, query, start, K, BLOCK)
        token = query.begin + s
        keys = load_rows(index.ik.pointer, token, index.ik.stride_t, visible, E, BE)
        slot = start + tl.arange(0, BLOCK)
        upstream = tl.load(grad.pointer + query.row * grad.stride_t + slot * grad.stride_h, mask=visible, other=0.0)
        upstream = upstream.to(tl.float32)
        dots = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        weight_grad += tl.sum(tl.maximum(dots, 0.0) * upstream[None, :], 1)
        narrow = tl.where(dots > 0.0, weights[:, None] * upstream[None, :], 0.0).to(keys.dtype)
        query_grad = tl.dot(narrow, keys, query_grad, input_precision=PRECISION)
        bucket = s * 0
        if tables.time is not None:
            query_time = load_times(bias.query_times, query.token, query.token >= 0)
            bucket = pair_bucket(query_time, load_times(bias.key_times, token, visible), bias.cells)
        add_to_tables(tables, upstream, query.t - s, visible, bucket, query.row, POSITION_COPIES, TIME_COPIES)
        share = tl.dot(tl.trans(narrow), queries, input_precision=PRECISION)
        where = dik.pointer + token[:, None] * OUT_E + column[None, :]
        add_to(where, share, dik.unit, visible[:, None] & (column < OUT_E)[None, :])
    head = tl.arange(0, BJ)
    store_rows(diq + query.token * (J * OUT_E), head, OUT_E, head < J, query_grad, OUT_E, BE)
    tl.store(dw + query.token * J + head, weight_grad, mask=head < J)
