"""Define the kernel of the index loss, with one program for each query.

Letters: T tokens of the batch, B sequences, H query heads, D query/key head size, K chosen tokens per query; in padded
chunks C queries and S keys per sequence. A row is a query of either; where R tokens share a choice, a group
(choices.py).

Heads are summed after each has been divided by its own normaliser, which is known once all chosen keys have been seen.
Scores of up to HELD blocks stay in registers, and the keys are gathered once; with more blocks, they are gathered
twice. Chosen keys are the rows of the tensor cores' tile and heads its columns (padded to 16), so that the sums over
heads and the maxima over keys stay within a few threads. Scores are in units of log 2.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.indexer.choices import (
    LN2,
    LOG2E,
    Query,
    chosen_bias,
    chosen_tokens,
    clamped_tokens,
    exp2,
    find_query,
    log2,
)
from hstu_sparse.tiles.rows import gather_rows, load_rows
from hstu_sparse.tiles.softmax import finite_or_zero


class Choice(NamedTuple):
    """A row's query and what it chose.

    query    see choices.py
    heads    for each key head the query's tile [channels, heads], with zeros for heads that another one serves
    indices  of the whole batch
    scores   the indexer's, of the whole batch
    counts   whether the row counts; otherwise everything is masked
    """

    query: Query
    heads: tl.tensor
    indices: tl.tensor
    scores: tl.tensor
    counts: tl.tensor


@triton.jit
def _attention(
    choice, k, bias, scale, start, K, D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, KEY_HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return unmasked scores of the attention [BLOCK, heads] of the slots from `start` on."""
    query = choice.query
    s = clamped_tokens(choice.indices, query, start, K, BLOCK)
    keys = gather_rows(k.pointer, query.begin + s, k.stride_t, D, BD)
    scores = tl.dot(keys, choice.heads[0], input_precision=PRECISION)
    for number in tl.static_range(1, KEY_HEADS):
        keys = gather_rows(k.pointer + number * k.stride_h, query.begin + s, k.stride_t, D, BD)
        scores = tl.dot(keys, choice.heads[number], scores, input_precision=PRECISION)
    scores = scores * (scale * LOG2E)
    if (bias.position is not None) or (bias.time is not None):
        scores += (chosen_bias(bias, query, s, s >= 0)[0] * LOG2E)[:, None]
    return scores


@triton.jit
def _visible(choice, start, K, BLOCK: tl.constexpr):
    """Return which of the BLOCK slots from `start` on are not masked."""
    return chosen_tokens(choice.indices, choice.query, start, K, BLOCK)[1] & choice.counts


@triton.jit
def _masked(scores, visible):
    return tl.where(visible[:, None], scores, float("-inf"))


@triton.jit
def _index_scores(choice, start, visible, K, BLOCK: tl.constexpr):
    """Return the indexer's scores of the BLOCK slots from `start` on, -inf where masked."""
    slot = start + tl.arange(0, BLOCK)
    # The load does not use `visible` as its mask, for which it would have to wait.
    loaded = tl.load(choice.scores + choice.query.row * K + slot, mask=slot < K, other=0.0).to(tl.float32)
    return tl.where(visible, loaded * LOG2E, float("-inf"))


@triton.jit
def _add_exponentials(most, total, values):
    """Update (maxima, sums of exponentials relative to them) elementwise, so that no step needs a reduction."""
    higher = tl.maximum(most, values)
    base = finite_or_zero(higher)
    return higher, total * exp2(most - base) + exp2(values - base)


@triton.jit
def _logarithm(most, total):
    """Return the logarithm of all sums of exponentials along the first axis; 0 if all are masked."""
    base = finite_or_zero(tl.max(most, 0))
    total = tl.sum(total * exp2(most - (base[None, :] if len(most.shape) == 2 else base)), 0)
    return tl.where(total == 0.0, 0.0, base + tl.log2(total))


@triton.jit
def _divergence(p, pi, eps):
    return tl.where(p == 0.0, 0.0, p * (log2(p + eps) - log2(pi + eps)))


@triton.jit(do_not_specialize=["G"])
def index_loss_kernel(
    scores, q, k, indices, rows, valid, loss, counted, difference, bias, scale, eps, K, G,
    H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr,
    KEY_HEADS: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the loss of one row and, if requested, the gradient pi - p of its index scores, 0 where masked.

    HELD: blocks of scores in registers, at least K / BLOCK; 0 for none. counted: None, or the output that is 1 for a
    row with a visible choice, else 0.
    """
    row = tl.program_id(0).to(tl.int64)
    query = find_query(rows, row, G, R)
    counts = True
    # With R = 1 the queries are the rows of q: those of a padded chunk are not the tokens of its keys.
    q_row = row
    if R > 1:
        # In a row without a choice everything is masked. Its gathers read its sequence's first token, or the batch's:
        # an empty sequence has no tokens, and may begin at the end of the batch.
        counts = query.last >= 0
        begin = tl.where(query.token < 0, 0, query.begin)
        q_row = tl.maximum(query.token, 0)
        query = Query(row, q_row, begin, tl.maximum(query.t, 0), tl.maximum(query.last, 0))
    if valid is not None:
        counts = counts & (tl.load(valid + q_row) != 0)
    head = tl.arange(0, BH)
    inside = head < H
    queries = q.pointer + q_row * q.stride_t
    served = inside & (head < H // KEY_HEADS)
    heads = (tl.trans(load_rows(queries, head, q.stride_h, served, D, BD)),)
    for number in tl.static_range(1, KEY_HEADS):
        served = inside & (head // (H // KEY_HEADS) == number)
        heads += (tl.trans(load_rows(queries, head, q.stride_h, served, D, BD)),)
    choice = Choice(query, heads, indices, scores, counts)
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
            attention = _attention(choice, k, bias, scale, start, K, D, BD, BLOCK, KEY_HEADS, PRECISION)
            # Each block has its own registers; with shifts the loop would not be pipelined.
            updated = ()
            for j in tl.static_range(HELD):
                updated += (tl.where(start == j * BLOCK, attention, blocks[j]),)
            blocks = updated
        # Masks are applied here: the loop waits only for the keys.
        seen = (chosen >= 0) & (chosen <= query.last) & counts
        has_choice = tl.max(seen.to(tl.int32)) > 0
        # Triton puts what meets a product into the product's order: with these zeros all masks at once.
        bits = tl.sum(tl.where(seen, bit, 0), 1)[:, None] + (blocks[0] < float("-inf")).to(tl.int32)
        masked = ()
        for j in tl.static_range(HELD):
            masked += (tl.where((bits & (1 << j)) != 0, blocks[j], float("-inf")),)
        most = masked[0]
        for j in tl.static_range(1, HELD):
            most = tl.maximum(most, masked[j])
        base = finite_or_zero(tl.max(most, 0))
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
        pi = exp2(index - finite_or_zero(tl.max(index)))
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
            attention = _attention(choice, k, bias, scale, start, K, D, BD, BLOCK, KEY_HEADS, PRECISION)
            visible = _visible(choice, start, K, BLOCK)
            seen |= visible.to(tl.int32)
            most, total = _add_exponentials(most, total, _masked(attention, visible))
            index = _index_scores(choice, start, visible, K, BLOCK)
            index_most, index_total = _add_exponentials(index_most, index_total, index)
        has_choice = tl.max(seen, 0) > 0
        logarithm = _logarithm(most, total)
        logarithm = tl.where(inside, logarithm, float("inf"))
        divergences = tl.zeros([BLOCK], tl.float32)
        index_logarithm = _logarithm(index_most, index_total)
        for start in range(0, K, BLOCK):
            attention = _attention(choice, k, bias, scale, start, K, D, BD, BLOCK, KEY_HEADS, PRECISION)
            visible = _visible(choice, start, K, BLOCK)
            p = tl.sum(exp2(_masked(attention, visible) - logarithm[None, :]), 1) / H
            index = _index_scores(choice, start, visible, K, BLOCK)
            pi = exp2(index - index_logarithm)
            if difference is not None:
                slot = start + tl.arange(0, BLOCK)
                tl.store(difference + row * K + slot, pi - p, mask=slot < K)
            divergences += _divergence(p, pi, eps)
        divergence = tl.sum(divergences, 0)
    tl.store(loss + row, divergence * LN2)
    if counted is not None:
        tl.store(counted + row, has_choice.to(tl.float32))
