"""Define the kernel of the index loss, with one program for each query.

Letters: T tokens of the batch, B sequences, H query heads, D query/key head size, K chosen tokens per query; in padded
chunks C queries and S keys per sequence. A row is a query of either; where R tokens share a choice, a group
(choices.py).

Heads are summed after each has been divided by its own normaliser, which is known once all chosen keys have been seen.
Scores of up to HELD blocks stay in registers, and the keys are gathered once; with more blocks, they are gathered
twice. Chosen keys are the rows of the tensor cores' tile and heads its columns (padded to 16), so that the sums over
heads and the maxima over keys stay within a few threads. Scores are in units of log 2.
"""

import triton
import triton.language as tl

from hstu_sparse.indexer.choices import query_of
from hstu_sparse.indexer.pairs import LN2, LOG2E, chosen_bias, chosen_tokens, clamped_tokens, exp2, gather_rows, log2
from hstu_sparse.tiles.rows import load_rows


@triton.jit
def _attention(
    query, keys, indices, start, row, token, begin, t, last, K, k_stride_t, k_stride_h, scale, position, time, cells,
    timestamps, query_timestamps, positions, D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr,
    KEY_HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return unmasked scores of the attention [BLOCK, heads] of the slots from `start` on.

    query: for each key head a tile [channels, heads], with zeros for heads that another one serves.
    """
    s = clamped_tokens(indices, row, start, last, K, BLOCK)
    chosen = gather_rows(keys, begin + s, k_stride_t, D, BD)
    scores = tl.dot(chosen, query[0], input_precision=PRECISION)
    for number in tl.static_range(1, KEY_HEADS):
        chosen = gather_rows(keys + number * k_stride_h, begin + s, k_stride_t, D, BD)
        scores = tl.dot(chosen, query[number], scores, input_precision=PRECISION)
    scores = scores * (scale * LOG2E)
    if (position is not None) or (time is not None):
        bias, _ = chosen_bias(
            s, s >= 0, token, begin, t, position, time, cells, timestamps, query_timestamps, positions
        )
        scores += (bias * LOG2E)[:, None]
    return scores


@triton.jit
def _visible(indices, row, start, last, counts, K, BLOCK: tl.constexpr):
    _, visible = chosen_tokens(indices, row, start, last, K, BLOCK)
    return visible & counts


@triton.jit
def _masked(scores, visible):
    return tl.where(visible[:, None], scores, float("-inf"))


@triton.jit
def _index_scores(scores, row, start, visible, K, BLOCK: tl.constexpr):
    """Return the indexer's scores of the BLOCK slots from `start` on, -inf where masked."""
    slot = start + tl.arange(0, BLOCK)
    # The load does not use `visible` as its mask, for which it would have to wait.
    loaded = tl.load(scores + row * K + slot, mask=slot < K, other=0.0).to(tl.float32)
    return tl.where(visible, loaded * LOG2E, float("-inf"))


@triton.jit
def _base(most):
    """Return what to subtract from scores with maximum `most`: 0 if that is -inf, since a difference would be NaN."""
    return tl.where(most == float("-inf"), 0.0, most)


@triton.jit
def _add_exponentials(most, total, values):
    """Update (maxima, sums of exponentials relative to them) elementwise, so that no step needs a reduction."""
    higher = tl.maximum(most, values)
    base = _base(higher)
    return higher, total * exp2(most - base) + exp2(values - base)


@triton.jit
def _logarithm(most, total):
    """Return the logarithm of all sums of exponentials along the first axis; 0 if all are masked."""
    base = _base(tl.max(most, 0))
    total = tl.sum(total * exp2(most - (base[None, :] if len(most.shape) == 2 else base)), 0)
    return tl.where(total == 0.0, 0.0, base + tl.log2(total))


@triton.jit
def _divergence(p, pi, eps):
    return tl.where(p == 0.0, 0.0, p * (log2(p + eps) - log2(pi + eps)))


@triton.jit(do_not_specialize=["positions", "offset", "C", "S", "G"])
def index_loss_kernel(
    scores, q, k, indices, rows, valid, loss, counted, difference,
    position, time, cells, timestamps, query_timestamps, positions,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, offset, C, S, scale, eps, K, G,
    H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr,
    KEY_HEADS: tl.constexpr, R: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the loss of one row and, if requested, the gradient pi - p of its index scores, 0 where masked.

    HELD: blocks of scores in registers, at least K / BLOCK; 0 for none. counted: None, or the output that is 1 for a
    row with a visible choice, else 0.
    """
    row = tl.program_id(0).to(tl.int64)
    counts = True
    token = row
    if PADDED:
        sequence, i = row // C, row % C
        last = tl.minimum(offset + i, S - 1).to(tl.int32)
        t = last
        queries, keys, begin = q + sequence * q_stride_b + i * q_stride_t, k + sequence * k_stride_b, row * 0
    else:
        token, begin, t, last = query_of(rows, row, G, R)
        if R > 1:
            # In a row without a choice everything is masked. Its gathers read its sequence's first token, or the
            # batch's: an empty sequence has no tokens, and may begin at the end of the batch.
            counts = last >= 0
            begin = tl.where(token < 0, 0, begin)
            token, t, last = tl.maximum(token, 0), tl.maximum(t, 0), tl.maximum(last, 0)
        queries, keys = q + token * q_stride_t, k
    if valid is not None:
        counts = counts & (tl.load(valid + token) != 0)
    head = tl.arange(0, BH)
    inside = head < H
    served = inside & (head < H // KEY_HEADS)
    query = (tl.trans(load_rows(queries, head, q_stride_h, served, D, BD)),)
    for number in tl.static_range(1, KEY_HEADS):
        served = inside & (head // (H // KEY_HEADS) == number)
        query += (tl.trans(load_rows(queries, head, q_stride_h, served, D, BD)),)
    if HELD > 0:
        # Each column has a block of all slots. It is loaded here and first read after the loop.
        column = tl.arange(0, BH)
        bit = tl.where(column < HELD, 1 << (column & 31), 0)[None, :]
        slot = column[None, :] * BLOCK + tl.arange(0, BLOCK)[:, None]
        present = (slot < K) & (column < HELD)[None, :]
        chosen = tl.load(indices + row * K + slot, mask=present, other=-1)
        index_loaded = tl.load(scores + row * K + slot, mask=present, other=0.0)
        blocks = ()
        for _ in tl.static_range(HELD):
            blocks += (tl.zeros([BLOCK, BH], tl.float32),)
        for start in range(0, K, BLOCK):
            attention = _attention(
                query, keys, indices, start, row, token, begin, t, last, K, k_stride_t, k_stride_h, scale, position,
                time, cells, timestamps, query_timestamps, positions, D, BD, BLOCK, KEY_HEADS, PRECISION,
            )  # fmt: skip
            # Each block has its own registers; with shifts the loop would not be pipelined.
            updated = ()
            for j in tl.static_range(HELD):
                updated += (tl.where(start == j * BLOCK, attention, blocks[j]),)
            blocks = updated
        # Masks are applied here: the loop waits only for the keys.
        seen = (chosen >= 0) & (chosen <= last) & counts
        has_choice = tl.max(seen.to(tl.int32)) > 0
        # Triton puts what meets a product into the product's order: with these zeros all masks at once.
        bits = tl.sum(tl.where(seen, bit, 0), 1)[:, None] + (blocks[0] < float("-inf")).to(tl.int32)
        masked = ()
        for j in tl.static_range(HELD):
            masked += (tl.where((bits & (1 << j)) != 0, blocks[j], float("-inf")),)
        most = masked[0]
        for j in tl.static_range(1, HELD):
            most = tl.maximum(most, masked[j])
        base = _base(tl.max(most, 0))
        weights = (exp2(masked[0] - base[None, :]),)
        total = weights[0]
        for j in tl.static_range(1, HELD):
            weights += (exp2(masked[j] - base[None, :]),)
            total += weights[j]
        total = tl.sum(total, 0)
        # Heads past H have zero weight in the mean.
        share = tl.where(inside & (total != 0.0), 1.0 / (total * H), 0.0)
        p = tl.zeros([BLOCK, BH], tl.float32)
        for j in tl.static_range(HELD):
            p = tl.where((column == j)[None, :], tl.sum(weights[j] * share[None, :], 1)[:, None], p)
        index = tl.where((bits & bit) != 0, index_loaded.to(tl.float32) * LOG2E, float("-inf"))
        pi = exp2(index - _base(tl.max(index)))
        total = tl.sum(pi)
        pi *= tl.where(total == 0.0, 0.0, 1.0 / total)
        if difference is not None:
            tl.store(difference + row * K + slot, pi - p, mask=present)
        divergence = tl.sum(_divergence(p, pi, eps))
    else:
        most = tl.full([BLOCK, BH], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK, BH], tl.float32)
        index_most = tl.full([BLOCK], float("-inf"), tl.float32)
        index_total = tl.zeros([BLOCK], tl.float32)
        seen = tl.zeros([BLOCK], tl.int32)
        for start in range(0, K, BLOCK):
            attention = _attention(
                query, keys, indices, start, row, token, begin, t, last, K, k_stride_t, k_stride_h, scale, position,
                time, cells, timestamps, query_timestamps, positions, D, BD, BLOCK, KEY_HEADS, PRECISION,
            )  # fmt: skip
            visible = _visible(indices, row, start, last, counts, K, BLOCK)
            seen |= visible.to(tl.int32)
            most, total = _add_exponentials(most, total, _masked(attention, visible))
            index = _index_scores(scores, row, start, visible, K, BLOCK)
            index_most, index_total = _add_exponentials(index_most, index_total, index)
        has_choice = tl.max(seen, 0) > 0
        logarithm = _logarithm(most, total)
        logarithm = tl.where(inside, logarithm, float("inf"))
        divergences = tl.zeros([BLOCK], tl.float32)
        index_logarithm = _logarithm(index_most, index_total)
        for start in range(0, K, BLOCK):
            attention = _attention(
                query, keys, indices, start, row, token, begin, t, last, K, k_stride_t, k_stride_h, scale, position,
                time, cells, timestamps, query_timestamps, positions, D, BD, BLOCK, KEY_HEADS, PRECISION,
            )  # fmt: skip
            visible = _visible(indices, row, start, last, counts, K, BLOCK)
            p = tl.sum(exp2(_masked(attention, visible) - logarithm[None, :]), 1) / H
            index = _index_scores(scores, row, start, visible, K, BLOCK)
            pi = exp2(index - index_logarithm)
            if difference is not None:
                slot = start + tl.arange(0, BLOCK)
                tl.store(difference + row * K + slot, pi - p, mask=slot < K)
            divergences += _divergence(p, pi, eps)
        divergence = tl.sum(divergences, 0)
    tl.store(loss + row, divergence * LN2)
    if counted is not None:
        tl.store(counted + row, has_choice.to(tl.float32))
