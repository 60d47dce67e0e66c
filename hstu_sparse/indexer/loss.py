"""Define, launch and register the index loss: one kernel, with one program for each query.

Letters: T tokens of the batch, B sequences, H query heads, D query/key head size, K chosen tokens per query; in padded
chunks C queries and S keys per sequence. There are G rows: a row is a query, or, if R tokens share a choice, a group
(choices.py).

A head's weights are divided by their sum over all chosen keys before heads are summed. So keys are gathered twice,
unless the scores of all blocks (up to HELD) stay in registers. In a tile, chosen keys are the rows and heads the
columns (padded to 16), so that the sums over heads and the maxima over keys stay within a few threads. Scores are in
units of log 2.

If a gradient is needed, the forward pass writes pi - p, and the backward pass multiplies it in place by a factor for
each row. If other ranks have further heads, the forward pass writes p, which is then averaged over the ranks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hstu_sparse.bias.relative import BIAS, RelativeBias, unflatten_arguments
from hstu_sparse.core import launch
from hstu_sparse.core.launch import INTERPRET, LaunchConfig, cdiv, configuration, next_power_of_2, padded_head, run
from hstu_sparse.core.registration import Operator
from hstu_sparse.indexer import choices
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
from hstu_sparse.tiles.rows import Rows, as_rows, finite_or_zero, gather_rows, load_rows

# The kernel's output for each chosen token: nothing, pi - p, or p.
NOTHING, DIFFERENCE, ATTENTION = 0, 1, 2


class Choice(NamedTuple):
    """A row's query and its choice.

    query    see choices.py
    heads    for each key head the query's tile [channels, heads], with zeros for heads that use another key head
    indices  pointer to those of the whole batch
    scores   pointer to the indexer's scores of the whole batch
    counts   whether the row counts; otherwise all its tokens are masked
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
    """Return the attention's scores [BLOCK, heads] of the slots from `start` on, without the mask."""
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
    # The load does not use `visible` as its mask, since it would have to wait for it.
    loaded = tl.load(choice.scores + choice.query.row * K + slot, mask=slot < K, other=0.0).to(tl.float32)
    return tl.where(visible, loaded * LOG2E, float("-inf"))


@triton.jit
def _add_exponentials(maxima, total, values):
    """Update (maxima, sums of exponentials relative to the maxima) elementwise: the loop needs no reductions."""
    new_maxima = tl.maximum(maxima, values)
    base = finite_or_zero(new_maxima)
    return new_maxima, total * exp2(maxima - base) + exp2(values - base)


@triton.jit
def _logarithm(maxima, total):
    """Return the log-sum-exp along the first axis, from maxima and sums; 0 if all entries are masked."""
    base = finite_or_zero(tl.max(maxima, 0))
    total = tl.sum(total * exp2(maxima - (base[None, :] if len(maxima.shape) == 2 else base)), 0)
    return tl.where(total == 0.0, 0.0, base + tl.log2(total))


@triton.jit
def _divergence(p, pi, eps):
    return tl.where(p == 0.0, 0.0, p * (log2(p + eps) - log2(pi + eps)))


@triton.jit(do_not_specialize=["G"])
def index_loss_kernel(
    scores, q, k, indices, rows, valid, loss, counted, difference, bias, scale, eps, K, G,
    H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr,
    KEY_HEADS: tl.constexpr, R: tl.constexpr, WRITES_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the loss of one row and, if requested, the gradient pi - p of its index scores, or p; 0 where masked.

    HELD: blocks of scores in registers, at least K / BLOCK; 0 for none. counted: None, or an output, 1 for a row that
    sees a chosen token and 0 otherwise.
    """
    row = tl.program_id(0).to(tl.int64)
    query = find_query(rows, row, G, R)
    counts = True
    # With R = 1 row i of q has the query: in a padded chunk, indices of queries and of keys differ.
    q_row = row
    if R > 1:
        # In a row without a choice all tokens are masked. It gathers the first token of its sequence, or, if it has no
        # query, of the batch, since an empty sequence may begin at the batch's end.
        counts = query.last >= 0
        begin = tl.where(query.token < 0, 0, query.begin)
        q_row = tl.maximum(query.token, 0)
        query = Query(row, q_row, begin, tl.maximum(query.t, 0), tl.maximum(query.last, 0))
    if valid is not None:
        counts = counts & (tl.load(valid + q_row) != 0)
    head = tl.arange(0, BH)
    inside = head < H
    queries = q.pointer + q_row * q.stride_t
    uses_key_head = inside & (head < H // KEY_HEADS)
    heads = (tl.trans(load_rows(queries, head, q.stride_h, uses_key_head, D, BD)),)
    for number in tl.static_range(1, KEY_HEADS):
        uses_key_head = inside & (head // (H // KEY_HEADS) == number)
        heads += (tl.trans(load_rows(queries, head, q.stride_h, uses_key_head, D, BD)),)
    choice = Choice(query, heads, indices, scores, counts)
    if HELD > 0:
        # Column j has the slots of block j. They are loaded here and used after the loop.
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
            # Each block has its own registers; shifting blocks would keep the loop from being pipelined.
            updated = ()
            for j in tl.static_range(HELD):
                updated += (tl.where(start == j * BLOCK, attention, blocks[j]),)
            blocks = updated
        # Masks are applied here, so that the loop waits only for the keys.
        seen = (chosen >= 0) & (chosen <= query.last) & counts
        has_choice = tl.max(seen.to(tl.int32)) > 0
        # Triton converts what is added to a product to the product's layout: adding zeros converts all masks at once.
        bits = tl.sum(tl.where(seen, bit, 0), 1)[:, None] + (blocks[0] < float("-inf")).to(tl.int32)
        masked = ()
        for j in tl.static_range(HELD):
            masked += (tl.where((bits & (1 << j)) != 0, blocks[j], float("-inf")),)
        maxima = masked[0]
        for j in tl.static_range(1, HELD):
            maxima = tl.maximum(maxima, masked[j])
        base = finite_or_zero(tl.max(maxima, 0))
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
            tl.store(difference + row * K + slot, p if WRITES_P else pi - p, mask=present)
        divergence = tl.sum(_divergence(p, pi, eps))
    else:
        maxima = tl.full([BLOCK, BH], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK, BH], tl.float32)
        index_maxima = tl.full([BLOCK], float("-inf"), tl.float32)
        index_total = tl.zeros([BLOCK], tl.float32)
        seen = tl.zeros([BLOCK], tl.int32)
        for start in range(0, K, BLOCK):
            attention = _attention(choice, k, bias, scale, start, K, D, BD, BLOCK, KEY_HEADS, PRECISION)
            visible = _visible(choice, start, K, BLOCK)
            seen |= visible.to(tl.int32)
            maxima, total = _add_exponentials(maxima, total, _masked(attention, visible))
            index = _index_scores(choice, start, visible, K, BLOCK)
            index_maxima, index_total = _add_exponentials(index_maxima, index_total, index)
        has_choice = tl.max(seen, 0) > 0
        logarithm = _logarithm(maxima, total)
        logarithm = tl.where(inside, logarithm, float("inf"))
        divergences = tl.zeros([BLOCK], tl.float32)
        index_logarithm = _logarithm(index_maxima, index_total)
        for start in range(0, K, BLOCK):
            attention = _attention(choice, k, bias, scale, start, K, D, BD, BLOCK, KEY_HEADS, PRECISION)
            visible = _visible(choice, start, K, BLOCK)
            p = tl.sum(exp2(_masked(attention, visible) - logarithm[None, :]), 1) / H
            index = _index_scores(choice, start, visible, K, BLOCK)
            pi = exp2(index - index_logarithm)
            if difference is not None:
                slot = start + tl.arange(0, BLOCK)
                tl.store(difference + row * K + slot, p if WRITES_P else pi - p, mask=slot < K)
            divergences += _divergence(p, pi, eps)
        divergence = tl.sum(divergences, 0)
    tl.store(loss + row, divergence * LN2)
    if counted is not None:
        tl.store(counted + row, has_choice.to(tl.float32))


# Scores of one query for all heads that fit into the registers of half a multiprocessor.
MAX_HELD = 16 * 2048


@configuration
def loss_config(dtype: torch.dtype, width: int, heads: int, top_k: int, arch: int, key_heads: int = 1) -> LaunchConfig:
    """Return the configuration of `index_loss_kernel`; it is fixed rather than tuned at run time.

    width: padded head size; heads: padded.
    """
    if INTERPRET:
        return LaunchConfig(4, 2, BLOCK=32, HELD=next_power_of_2(cdiv(top_k, 32)) if top_k <= 64 else 0)
    if key_heads > 1:
        block = 16
        if dtype.itemsize == 2:  # keys of all heads in 16 KB
            block = max(16, min(64, 8192 // (width * next_power_of_2(key_heads))))
        few = dtype.itemsize == 2 and top_k <= 4 * block
        return LaunchConfig(4, 2, BLOCK=block, HELD=cdiv(top_k, block) if few else 0)
    if dtype.itemsize == 4 or width > 128:
        return LaunchConfig(4, 3, BLOCK=64 if dtype.itemsize == 2 else 32, HELD=0)
    num_scores = heads * next_power_of_2(max(top_k, 64))
    if num_scores <= MAX_HELD // 4:
        block = 128 if top_k > 64 else 64
        return LaunchConfig(4, 4, BLOCK=block, HELD=cdiv(top_k, block))
    # A program fills a multiprocessor, or half of it, and needs its shared memory: 160 KB or more on these.
    if num_scores > MAX_HELD or heads > 32 or arch not in (80, 90, 100, 103):
        return LaunchConfig(4, 5, BLOCK=64, HELD=0)
    block = 128 if num_scores <= MAX_HELD // 2 else 256
    return LaunchConfig(8, 5, BLOCK=block, HELD=cdiv(top_k, block))


class Arguments(NamedTuple):
    """The operator's arguments in the order of its schema.

    k: [T, D] or [T, Hkv, D]; rows: see choices.py; written: NOTHING, DIFFERENCE or ATTENTION.
    """

    scores: Tensor
    q: Tensor
    k: Tensor
    indices: Tensor
    rows: Tensor
    bias: RelativeBias
    valid: Tensor | None
    scale: float
    eps: float
    group: int
    written: int


def _forward(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Return (losses of the rows [G], 1 for rows that count [G] if tokens share choices, the output `written`)."""
    a = unflatten_arguments(Arguments, arguments)
    loss, counted, difference = _fake(*arguments)
    G, H = a.rows.shape[1], a.q.shape[1]
    if G:
        q, k = as_rows(a.q, choices.by_heads(a.k))
        width, heads, K, key_heads = padded_head(q.shape[2]), padded_head(H), a.indices.shape[1], k.shape[1]
        config = loss_config(q.dtype, width, heads, K, launch.architecture(q.device), key_heads)
        outputs = loss, counted if a.group > 1 else None, difference if a.written else None
        sizes = dict(H=H, D=q.shape[2], BH=heads, BD=width, KEY_HEADS=key_heads, R=a.group)
        sizes["WRITES_P"] = a.written == ATTENTION
        run(
            index_loss_kernel, G, a.scores.contiguous(), Rows.of(q), Rows.of(k), a.indices, a.rows, a.valid, *outputs,
            choices.kernel_bias(a.bias), a.scale, a.eps, K, G, **sizes, **config, PRECISION=launch.precision(q.dtype),
        )  # fmt: skip
    return loss, counted, difference


def _backward(grad, *arguments) -> list[Tensor]:
    """Return the gradient of the scores, in the memory of the last argument, pi - p."""
    difference = arguments[-1]
    return [difference.mul_(grad[:, None])]


def _fake(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    a = unflatten_arguments(Arguments, arguments)
    G = a.rows.shape[1]
    rows, counted = (a.q.new_empty(n, dtype=torch.float32) for n in (G, G if a.group > 1 else 0))
    return rows, counted, a.scores.new_empty(a.scores.shape if a.written else 0)


_SCHEMA = (
    f"Tensor scores, Tensor q, Tensor k, Tensor indices, Tensor rows, {BIAS}, Tensor? valid, float scale, float eps, "
    "SymInt group, SymInt written"
)
indexer_loss_jagged = Operator(
    "index_loss", _SCHEMA, _forward, _backward, _fake, "scores", outputs=3, overwrites_saved=True
)


def indexer_loss_operator(scores: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    """Return (losses of the rows, 1 for groups that count). arguments: the operator's without `written`."""
    written = DIFFERENCE if torch.is_grad_enabled() and scores.requires_grad else NOTHING
    return indexer_loss_jagged(scores, *arguments, written)[:2]


def chosen_attention(scores: Tensor, *arguments) -> Tensor:
    """Return p [G, K], fp32. arguments: those of `indexer_loss_operator`."""
    return indexer_loss_jagged.forward(scores.detach().float(), *arguments, ATTENTION)[2]


def padded_loss(
    index_score: Tensor, query: Tensor, key: Tensor, indices: Tensor, chunk_offset: int, *numbers
) -> Tensor:
    """Return the loss of each query of padded chunks, [B * C]: see `padded_indexer_loss`. numbers: scale and eps."""
    (B, _, C, _), S = query.shape, key.shape[1]
    begin = S * torch.arange(B, device=query.device)[:, None].expand(B, C)
    last = (chunk_offset + torch.arange(C, device=query.device)).clamp(max=S - 1)
    rows = torch.stack([begin, begin + last, torch.ones_like(begin)]).flatten(1)
    chunk = (x.flatten(0, 1) for x in (index_score, query.transpose(1, 2), key, indices))
    return indexer_loss_operator(*chunk, rows, None, None, None, None, None, *numbers, 1)[0]
