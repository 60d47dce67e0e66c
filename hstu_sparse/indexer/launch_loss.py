"""Launch the kernel of the index loss and register it: jagged as torch.ops.hstu_sparse.index_loss_fwd and _bwd, in
padded chunks as index_loss_padded_fwd and _bwd. Both return the loss of each row, [rows] fp32.

Letters: T tokens of the batch, B sequences, H heads, D query/key head size, K chosen tokens per query, G rows of a
choice and R tokens that share one (see choices.py); C queries and S keys of a padded chunk.

Forward writes pi - p if a gradient is needed: it is the gradient except for a factor of each row, by which backward
multiplies it in place.
"""

import torch
from torch import Tensor

from hstu_sparse.core.launch import (
    INTERPRET,
    LaunchConfig,
    architecture,
    cdiv,
    configuration,
    next_power_of_2,
    padded_head,
    precision,
    run,
)
from hstu_sparse.core.registration import Operator
from hstu_sparse.core.rows import as_rows
from hstu_sparse.indexer.choices import choice_rows
from hstu_sparse.indexer.launch import NO_BIAS, kernel_bias, key_layout
from hstu_sparse.indexer.loss import index_loss_kernel

# Scores of one query, all heads', that its program has in registers: as many as fit into half a multiprocessor's.
MOST_HELD = 16 * 2048


@configuration
def loss_config(dtype: torch.dtype, width: int, heads: int, top_k: int, arch: int, key_heads: int = 1) -> LaunchConfig:
    """Return the configuration of `index_loss_kernel` for a head padded to `width` and padded `heads`. It is fixed
    rather than tuned at run time.
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
    if num_scores <= MOST_HELD // 4:
        block = 128 if top_k > 64 else 64
        return LaunchConfig(4, 4, BLOCK=block, HELD=cdiv(top_k, block))
    # One program fills a multiprocessor, or half of it, and needs its shared memory: these have 160 KB and more.
    if num_scores > MOST_HELD or heads > 32 or arch not in (80, 90, 100, 103):
        return LaunchConfig(4, 5, BLOCK=64, HELD=0)
    block = 128 if num_scores <= MOST_HELD // 2 else 256
    return LaunchConfig(8, 5, BLOCK=block, HELD=cdiv(top_k, block))


def _launch(
    scores, q, k, indices, rows, valid, bias, strides, chunk, scale, eps, number, H, key_heads, group, with_grad
):  # fmt: skip
    """Return (the loss of each of `number` rows; which rows count, if groups choose; pi - p like `scores`, or
    empty).
    """
    loss = torch.empty(number, dtype=torch.float32, device=q.device)
    counted = torch.empty(number if group > 1 else 0, dtype=torch.float32, device=q.device)
    difference = torch.empty(scores.shape if with_grad else 0, dtype=scores.dtype, device=scores.device)
    if number:
        width, heads, K = padded_head(q.shape[-1]), padded_head(H), indices.shape[-1]
        arguments = (
            scores.contiguous(), q, k, indices, rows, valid, loss, counted if group > 1 else None,
            difference if with_grad else None, *bias, *strides, *chunk, scale, eps, K, number,
        )  # fmt: skip
        config = loss_config(q.dtype, width, heads, K, architecture(q.device), key_heads)
        sizes = dict(H=H, D=q.shape[-1], BH=heads, BD=width, KEY_HEADS=key_heads, R=group, PADDED=rows is None)
        run(index_loss_kernel, number, *arguments, **sizes, **config, PRECISION=precision(q.dtype))
    return loss, counted, difference


def _backward(grad, *arguments):
    """Overwrite the difference, the last argument."""
    difference = arguments[-1]
    return [difference.mul_(grad.view(difference.shape[:-1])[..., None])]


def _forward(
    scores, q, k, indices, seq_offsets, position, time, timestamps, query_timestamps, valid, scale, eps, group,
    with_grad,
):  # fmt: skip
    T, H, _ = q.shape
    q, k = as_rows(q, k)
    rows = choice_rows(seq_offsets, T, group)
    bias = kernel_bias(position, time, timestamps, query_timestamps)
    key_heads, key_strides = key_layout(k)
    strides, chunk = (0, *q.stride()[:2], 0, *key_strides), (0, 1, 1)
    number = rows.shape[-1]
    return _launch(
        scores, q, k, indices, rows, valid, bias, strides, chunk, scale, eps, number, H, key_heads, group, with_grad
    )  # fmt: skip


def _fake(scores, *others):
    number = scores.shape[:-1].numel()
    rows, counted = (scores.new_empty(n, dtype=torch.float32) for n in (number, number if others[-2] > 1 else 0))
    return rows, counted, scores.new_empty(scores.shape if others[-1] else 0)


def _fake_padded(scores, *others):
    return _fake(scores, 1, others[-1])


indexer_loss_jagged = Operator(
    "index_loss",
    "Tensor scores, Tensor q, Tensor k, Tensor indices, Tensor seq_offsets, Tensor? position, Tensor? time, "
    "Tensor? timestamps, Tensor? query_timestamps, Tensor? valid, float scale, float eps, SymInt group, "
    "bool with_grad",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    differentiable=("scores",),
    outputs=3,
    spends=True,
)


def _padded(query, key, chunk_offset):
    query, key = as_rows(query, key)
    batch, head, row, _ = query.stride()
    return query, key, (batch, row, head, *key.stride()[:2], 0), (chunk_offset, query.shape[2], key.shape[1])


def _padded_forward(scores, query, key, indices, scale, chunk_offset, eps, with_grad):
    B, H, C, _ = query.shape
    query, key, strides, chunk = _padded(query, key, chunk_offset)
    arguments = (None, None, NO_BIAS, strides, chunk, scale, eps, B * C, H, 1, 1, with_grad)
    return _launch(scores, query, key, indices, *arguments)


indexer_loss_padded = Operator(
    "index_loss_padded",
    "Tensor scores, Tensor query, Tensor key, Tensor indices, float scale, SymInt chunk_offset, float eps, "
    "bool with_grad",
    forward=_padded_forward,
    backward=_backward,
    fake=_fake_padded,
    differentiable=("scores",),
    outputs=3,
    spends=True,
)


def indexer_loss_operator(scores: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    """Call the operator for jagged tensors without `with_grad`; return the rows' losses, and which groups count."""
    return indexer_loss_jagged(scores, *arguments, torch.is_grad_enabled() and scores.requires_grad)[:2]


def padded_loss_operator(scores: Tensor, *arguments) -> Tensor:
    """Call the operator for padded chunks without `with_grad`; return only the rows' losses."""
    return indexer_loss_padded(scores, *arguments, torch.is_grad_enabled() and scores.requires_grad)[0]
