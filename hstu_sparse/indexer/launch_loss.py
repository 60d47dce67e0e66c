"""Launch the kernel of the index loss and register it as torch.ops.hstu_sparse.index_loss_fwd and _bwd.

Letters: T tokens of the batch, H heads, D query/key head size, K chosen tokens per row of a choice, G rows of a choice
and R tokens that share one (see choices.py). A padded chunk has B sequences with C queries and S keys each.

Forward writes pi - p if a gradient is needed: it is the gradient except for a factor of each row, by which backward
multiplies it in place.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hstu_sparse.bias.relative import RelativeBias
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
from hstu_sparse.indexer.launch import BIAS, by_heads, kernel_bias
from hstu_sparse.indexer.loss import index_loss_kernel
from hstu_sparse.tiles.rows import Rows

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


class Arguments(NamedTuple):
    """The operator's arguments in the order of its schema. k: [T, D] or [T, Hkv, D]; rows: see choices.py."""

    scores: Tensor
    q: Tensor
    k: Tensor
    indices: Tensor
    rows: Tensor
    position: Tensor | None
    time: Tensor | None
    timestamps: Tensor | None
    query_timestamps: Tensor | None
    valid: Tensor | None
    scale: float
    eps: float
    group: int
    with_grad: bool

    @property
    def bias(self) -> RelativeBias:
        return RelativeBias(self.position, self.time, self.timestamps, self.query_timestamps)


def _forward(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Return (the rows' losses [G], which rows count [G] if tokens share choices, pi - p like `scores` or empty)."""
    a = Arguments(*arguments)
    loss, counted, difference = _fake(*arguments)
    G, H = a.rows.shape[1], a.q.shape[1]
    if G:
        q, k = as_rows(a.q, by_heads(a.k))
        width, heads, K, key_heads = padded_head(q.shape[2]), padded_head(H), a.indices.shape[1], k.shape[1]
        config = loss_config(q.dtype, width, heads, K, architecture(q.device), key_heads)
        outputs = loss, counted if a.group > 1 else None, difference if a.with_grad else None
        sizes = dict(H=H, D=q.shape[2], BH=heads, BD=width, KEY_HEADS=key_heads, R=a.group)
        run(
            index_loss_kernel, G, a.scores.contiguous(), Rows.of(q), Rows.of(k), a.indices, a.rows, a.valid, *outputs,
            kernel_bias(a.bias), a.scale, a.eps, K, G, **sizes, **config, PRECISION=precision(q.dtype),
        )  # fmt: skip
    return loss, counted, difference


def _backward(grad, *arguments) -> list[Tensor]:
    """Overwrite the difference, the last argument."""
    difference = arguments[-1]
    return [difference.mul_(grad[:, None])]


def _fake(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    a = Arguments(*arguments)
    G = a.rows.shape[1]
    rows, counted = (a.q.new_empty(n, dtype=torch.float32) for n in (G, G if a.group > 1 else 0))
    return rows, counted, a.scores.new_empty(a.scores.shape if a.with_grad else 0)


indexer_loss_jagged = Operator(
    "index_loss",
    f"Tensor scores, Tensor q, Tensor k, Tensor indices, Tensor rows, {BIAS}, Tensor? valid, float scale, float eps, "
    "SymInt group, bool with_grad",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    differentiable=("scores",),
    outputs=3,
    spends=True,
)


def indexer_loss_operator(scores: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    """Call the operator without `with_grad`; return the rows' losses, and which groups count."""
    return indexer_loss_jagged(scores, *arguments, torch.is_grad_enabled() and scores.requires_grad)[:2]


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
