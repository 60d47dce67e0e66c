"""Launches the kernels of the index loss and registers them: jagged as torch.ops.hstu_sparse.index_loss_fwd and _bwd,
in padded chunks as index_loss_padded_fwd and _bwd. Both give the loss of each row, [rows] fp32.

Letters: T tokens of the batch, B sequences, H heads, D query/key head size, K chosen tokens per query; C queries and S
keys of a padded chunk.
"""

import torch
from torch import Tensor

from hstu_sparse.indexer.launch import NO_BIAS, Launch, kernel_bias, key_block, token_begins
from hstu_sparse.indexer.loss import index_loss_bwd_kernel, index_loss_fwd_kernel
from hstu_sparse.launch import aligned, padded_head, precision
from hstu_sparse.registration import Operator


def launches(dtype: torch.dtype, width: int) -> dict[str, Launch]:
    """By kernel. `width` is that of a key, padded. Fixed rather than tuned at run time."""
    block = key_block(dtype, 2 * width)
    return {"fwd": Launch(block, 4, 3), "bwd": Launch(block, 4, 3)}


def _launch_forward(scores, q, k, indices, begins, valid, bias, strides, chunk, scale, eps, rows, H):
    loss, index_lse = (torch.empty(rows, dtype=torch.float32, device=q.device) for _ in range(2))
    lse = torch.empty(rows, H, dtype=torch.float32, device=q.device)
    if rows:
        index_loss_fwd_kernel[(rows,)](
            scores.contiguous(), q, k, indices, begins, valid, loss, lse, index_lse, *bias, *strides, *chunk, scale,
            eps, indices.shape[-1], **_tiles(q, H, "fwd"), PADDED=begins is None,
        )  # fmt: skip
    return loss, lse, index_lse


def _launch_backward(grad, scores, q, k, indices, begins, valid, bias, strides, chunk, scale, H, lse, index_lse):
    dscores = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    if dscores.numel():
        index_loss_bwd_kernel[(lse.shape[0],)](
            grad, scores.contiguous(), q, k, indices, begins, valid, lse, index_lse, dscores, *bias, *strides, *chunk,
            scale, indices.shape[-1], **_tiles(q, H, "bwd"), PADDED=begins is None,
        )  # fmt: skip
    return [dscores]


def _tiles(q: Tensor, heads: int, kernel: str) -> dict:
    width = padded_head(q.shape[-1])
    sizes = dict(H=heads, D=q.shape[-1], BH=padded_head(heads), BD=width, PRECISION=precision(q.dtype))
    return sizes | launches(q.dtype, width)[kernel]._asdict()


def _jagged(q, k, seq_offsets, position, time, timestamps, query_timestamps):
    """(q, k, begins, bias, strides, chunk) of the kernels."""
    q, k = aligned(q), aligned(k)
    begins = token_begins(seq_offsets, q.shape[0])[0]
    bias = kernel_bias(position, time, timestamps, query_timestamps)
    return q, k, begins, bias, (0, *q.stride()[:2], 0, k.stride(0)), (0, 1, 1)


def _forward(scores, q, k, indices, seq_offsets, position, time, timestamps, query_timestamps, valid, scale, eps):
    rows, H, _ = q.shape
    q, k, begins, bias, strides, chunk = _jagged(q, k, seq_offsets, position, time, timestamps, query_timestamps)
    return _launch_forward(scores, q, k, indices, begins, valid, bias, strides, chunk, scale, eps, rows, H)


def _backward(
    grad, scores, q, k, indices, seq_offsets, position, time, timestamps, query_timestamps, valid, scale, eps, lse,
    index_lse,
):  # fmt: skip
    H = q.shape[1]
    q, k, begins, bias, strides, chunk = _jagged(q, k, seq_offsets, position, time, timestamps, query_timestamps)
    return _launch_backward(grad, scores, q, k, indices, begins, valid, bias, strides, chunk, scale, H, lse, index_lse)


def _fake(scores, q, *_):
    loss = q.new_empty(q.shape[:1], dtype=torch.float32)
    return loss, q.new_empty(q.shape[:2], dtype=torch.float32), torch.empty_like(loss)


indexer_loss_jagged = Operator(
    "index_loss",
    "Tensor scores, Tensor q, Tensor k, Tensor indices, Tensor seq_offsets, Tensor? position, Tensor? time, "
    "Tensor? timestamps, Tensor? query_timestamps, Tensor? valid, float scale, float eps",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    differentiable=("scores",),
    outputs=3,
)


def _padded(query, key, chunk_offset):
    query, key = aligned(query), aligned(key)
    batch, head, row, _ = query.stride()
    return query, key, (batch, row, head, *key.stride()[:2]), (chunk_offset, query.shape[2], key.shape[1])


def _padded_forward(scores, query, key, indices, scale, chunk_offset, eps):
    B, H, C, _ = query.shape
    query, key, strides, chunk = _padded(query, key, chunk_offset)
    return _launch_forward(scores, query, key, indices, None, None, NO_BIAS, strides, chunk, scale, eps, B * C, H)


def _padded_backward(grad, scores, query, key, indices, scale, chunk_offset, eps, lse, index_lse):
    H = query.shape[1]
    query, key, strides, chunk = _padded(query, key, chunk_offset)
    return _launch_backward(
        grad, scores, query, key, indices, None, None, NO_BIAS, strides, chunk, scale, H, lse, index_lse
    )


def _padded_fake(scores, query, *_):
    B, H, C, _ = query.shape
    loss = query.new_empty(B * C, dtype=torch.float32)
    return loss, query.new_empty(B * C, H, dtype=torch.float32), torch.empty_like(loss)


indexer_loss_padded = Operator(
    "index_loss_padded",
    "Tensor scores, Tensor query, Tensor key, Tensor indices, float scale, SymInt chunk_offset, float eps",
    forward=_padded_forward,
    backward=_padded_backward,
    fake=_padded_fake,
    differentiable=("scores",),
    outputs=3,
)


def indexer_loss_operator(*arguments) -> Tensor:
    """Arguments as registered for jagged tensors; the rows' losses alone."""
    return indexer_loss_jagged(*arguments)[0]


def padded_loss_operator(*arguments) -> Tensor:
    """Arguments as registered for padded chunks; the rows' losses alone."""
    return indexer_loss_padded(*arguments)[0]
