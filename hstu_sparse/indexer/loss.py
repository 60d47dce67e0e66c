"""The index loss: its kernels, one program for each query.

Letters: T tokens of the batch, B sequences, H heads, D query/key head size, K chosen tokens per query; in padded chunks
C queries and S keys per sequence. A row is a query of either.

Keys are gathered twice in the forward pass: heads are summed after each has been divided by its own normaliser, which
the first walk over the chosen keys finds. Normalisers (one number for a head) are kept, so that the backward pass
gathers once and nothing of size K but the gradient itself is ever written. Scores are kept in units of log 2.
"""

import triton
import triton.language as tl

from hstu_sparse.indexer.pairs import LN2, LOG2E, chosen_bias, chosen_tokens
from hstu_sparse.tiles import load_rows


@triton.jit
def _row(q, k, begins, row, q_stride_b, q_stride_t, k_stride_b, offset, C, S, PADDED: tl.constexpr):
    """(its queries, its sequence's first key, that key's token, its last visible position) of a row."""
    if PADDED:
        sequence, i = row // C, row % C
        last = tl.minimum(offset + i, S - 1).to(tl.int32)
        return q + sequence * q_stride_b + i * q_stride_t, k + sequence * k_stride_b, row * 0, last
    else:
        begin = tl.load(begins + row)
        return q + row * q_stride_t, k, begin, (row - begin).to(tl.int32)


@triton.jit
def _attention(
    query, keys, s, visible, row, begin, t, k_stride_t, scale, position, time, cells, timestamps, query_timestamps,
    positions, D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of the attention [heads, BLOCK] in units of log 2, -inf where masked."""
    chosen = load_rows(keys, begin + s, k_stride_t, visible, D, BD)
    scores = tl.dot(query, tl.trans(chosen), input_precision=PRECISION) * (scale * LOG2E)
    if (position is not None) or (time is not None):
        bias, _ = chosen_bias(s, visible, row, begin, t, position, time, cells, timestamps, query_timestamps, positions)
        scores += (bias * LOG2E)[None, :]
    return tl.where(visible[None, :], scores, float("-inf"))


@triton.jit
def _index_scores(scores, row, start, visible, K, BLOCK: tl.constexpr):
    """The indexer's scores [BLOCK] in units of log 2, -inf where masked."""
    slot = start + tl.arange(0, BLOCK)
    found = tl.load(scores + row * K + slot, mask=visible, other=0.0).to(tl.float32)
    return tl.where(visible, found * LOG2E, float("-inf"))


@triton.jit(do_not_specialize=["positions", "offset", "C", "S"])
def index_loss_fwd_kernel(
    scores, q, k, indices, begins, valid, loss, lse, index_lse,
    position, time, cells, timestamps, query_timestamps, positions,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, offset, C, S, scale, eps, K,
    H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The loss of one row, and the log-sum-exps of its attention by head and of its index scores."""
    row = tl.program_id(0).to(tl.int64)
    if valid is not None:  # noqa: SIM102
        if tl.load(valid + row) == 0:
            tl.store(loss + row, 0.0)
            return
    queries, keys, begin, t = _row(q, k, begins, row, q_stride_b, q_stride_t, k_stride_b, offset, C, S, PADDED)
    head = tl.arange(0, BH)
    inside = head < H
    query = load_rows(queries, head, q_stride_h, inside, D, BD)
    most = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    index_most = float("-inf")
    index_total = 0.0
    for start in range(0, K, BLOCK):
        s, visible = chosen_tokens(indices, row, start, t, K, BLOCK)
        attention = _attention(
            query, keys, s, visible, row, begin, t, k_stride_t, scale, position, time, cells, timestamps,
            query_timestamps, positions, D, BD, PRECISION,
        )  # fmt: skip
        higher = tl.maximum(most, tl.max(attention, 1))
        # Where nothing has been seen yet the maximum is -inf, and a difference with it would not be a number.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(most - base) + tl.sum(tl.exp2(attention - base[:, None]), 1)
        most = higher
        index = _index_scores(scores, row, start, visible, K, BLOCK)
        index_higher = tl.maximum(index_most, tl.max(index, 0))
        index_base = tl.where(index_higher == float("-inf"), 0.0, index_higher)
        index_total = index_total * tl.exp2(index_most - index_base) + tl.sum(tl.exp2(index - index_base), 0)
        index_most = index_higher
    logarithm = tl.where(total == 0.0, 0.0, most + tl.log2(total))
    index_logarithm = tl.where(index_total == 0.0, 0.0, index_most + tl.log2(index_total))
    tl.store(lse + row * H + head, logarithm, mask=inside)
    tl.store(index_lse + row, index_logarithm)
    # Rows past H weigh nothing in the mean.
    logarithm = tl.where(inside, logarithm, float("inf"))
    divergence = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        s, visible = chosen_tokens(indices, row, start, t, K, BLOCK)
        attention = _attention(
            query, keys, s, visible, row, begin, t, k_stride_t, scale, position, time, cells, timestamps,
            query_timestamps, positions, D, BD, PRECISION,
        )  # fmt: skip
        p = tl.sum(tl.exp2(attention - logarithm[:, None]), 0) / H
        pi = tl.exp2(_index_scores(scores, row, start, visible, K, BLOCK) - index_logarithm)
        divergence += tl.where(p == 0.0, 0.0, p * (tl.log2(p + eps) - tl.log2(pi + eps)))
    tl.store(loss + row, tl.sum(divergence, 0) * LN2)


@triton.jit(do_not_specialize=["positions", "offset", "C", "S"])
def index_loss_bwd_kernel(
    grad, scores, q, k, indices, begins, valid, lse, index_lse, dscores,
    position, time, cells, timestamps, query_timestamps, positions,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, offset, C, S, scale, K,
    H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of one row's index scores: grad * (pi - p), 0 where masked."""
    row = tl.program_id(0).to(tl.int64)
    counts = True
    if valid is not None:
        counts = tl.load(valid + row) != 0
    queries, keys, begin, t = _row(q, k, begins, row, q_stride_b, q_stride_t, k_stride_b, offset, C, S, PADDED)
    head = tl.arange(0, BH)
    inside = (head < H) & counts
    query = load_rows(queries, head, q_stride_h, inside, D, BD)
    logarithm = tl.load(lse + row * H + head, mask=inside, other=float("inf"))
    index_logarithm = tl.load(index_lse + row, mask=counts, other=0.0)
    factor = tl.load(grad + row, mask=counts, other=0.0)
    for start in range(0, K, BLOCK):
        s, visible = chosen_tokens(indices, row, start, t, K, BLOCK)
        visible = visible & counts
        attention = _attention(
            query, keys, s, visible, row, begin, t, k_stride_t, scale, position, time, cells, timestamps,
            query_timestamps, positions, D, BD, PRECISION,
        )  # fmt: skip
        p = tl.sum(tl.exp2(attention - logarithm[:, None]), 0) / H
        pi = tl.exp2(_index_scores(scores, row, start, visible, K, BLOCK) - index_logarithm)
        slot = start + tl.arange(0, BLOCK)
        tl.store(dscores + row * K + slot, factor * (pi - p), mask=slot < K)
