"""Compute the catalogue loss in plain PyTorch (the specification), and over a catalogue that processes share.

Letters: T tokens, I items (local items, if processes share the catalogue), E embedding size, K negatives.

Each process computes the log-sum-exps over its items, and merges them with those of the other processes.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hstu_sparse.core.launch import on_device
from hstu_sparse.core.precision import widened, working_dtype

NORM_EPS = 1e-6


def catalogue_loss_reference(
    out: torch.Tensor,
    items: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float | torch.Tensor,
    normalize: bool,
    negatives: torch.Tensor | None,
    log_q: torch.Tensor | None,
    label_smoothing: float,
    block: int = 1,
) -> torch.Tensor:
    """Compute `catalogue_loss` for each target, [T], 0 without a target. 16-bit inputs are converted to fp32."""
    dtype = working_dtype(out.dtype)
    out, items = widened(out, items)

    def ready(x):
        return F.normalize(x, dim=-1, eps=NORM_EPS) if normalize else x

    out = ready(out)
    rows = targets.clamp(min=0)
    if negatives is None:
        logits = out @ ready(items).T / temperature
        losses = F.cross_entropy(logits, rows.long(), label_smoothing=label_smoothing, reduction="none")
    else:
        positive = (out * ready(items[rows])).sum(-1) / temperature
        if block > 1:
            negatives = negatives.repeat_interleave(block, 0)[: len(out)]
        drawn = negatives.clamp(min=0)
        if negatives.dim() == 1:
            logits = out @ ready(items[drawn]).T / temperature
        else:
            logits = torch.einsum("te,tke->tk", out, ready(items[drawn])) / temperature
        if log_q is not None:
            logits = logits - (log_q[drawn].to(dtype) + math.log(max(1, negatives.shape[-1])))
        logits = logits.masked_fill((negatives == targets[:, None]) | (negatives < 0), float("-inf"))
        losses = torch.cat([positive[:, None], logits], 1).logsumexp(1) - positive
    return losses.masked_fill(targets < 0, 0.0)


LN2 = math.log(2)
CHUNK = 2**22  # the number of logits that the reference computes at a time


class CatalogueShard(NamedTuple):
    """The consecutive items of a catalogue that a process has, from item `first` on.

    merge: (log-sum-exp [T], logit of the target [T]) over these items, in fp32 (fp64) -> both over the whole catalogue.
    The logit is 0 if the process does not have the target, and the log-sum-exp is -inf if it has no items. Forward
    calls `merge` once; processes communicate in it.
    """

    first: int
    merge: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def part_loss(
    out, items, targets, temperature, normalize: bool, part: CatalogueShard, backend: str, reduced: bool = True
) -> Tensor:
    """Compute `catalogue_loss` over the whole catalogue, with the gradients of this part.

    items: the items of the part. reduced: return the mean, otherwise the loss of each target [T].
    """
    if backend == "triton" and len(items):
        return _Kernels.apply(out, items, targets, temperature, normalize, part, reduced)
    out, items = widened(out, items)
    if normalize:
        out, items = (x / x.norm(dim=-1, keepdim=True).clamp(min=NORM_EPS) for x in (out, items))
    return _Reference.apply(out / temperature, items, targets, part, reduced)


def _local_rows(targets: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return (rows of the targets among the local items, 0 for others; whether the targets are local)."""
    inside = (targets >= first) & (targets < first + count)
    return torch.where(inside, targets - first, 0), inside


def _loss(lse: Tensor, logit: Tensor, targets: Tensor, reduced: bool) -> tuple[Tensor, Tensor]:
    """Return (the mean loss, or the loss of each target; the factor of each target's loss in it)."""
    has_target = targets >= 0
    losses = torch.where(has_target, lse - logit, 0.0)
    if not reduced:
        return losses, lse.new_ones(())
    share = 1 / has_target.sum().clamp(min=1).to(lse.dtype)
    return losses.sum() * share, share


class _Reference(torch.autograd.Function):
    """Compute the loss of scaled outputs and items in plain PyTorch, a chunk of tokens at a time."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, items: Tensor, targets: Tensor, part: CatalogueShard, reduced: bool) -> Tensor:
        rows, inside = _local_rows(targets, part.first, len(items))
        ctx.size = max(1, CHUNK // max(1, len(items)))
        lse, logit = out.new_full((len(out),), -math.inf), out.new_zeros(len(out))
        if len(items):
            lse = torch.cat([(chunk @ items.T).logsumexp(1) for chunk in out.split(ctx.size)] or [lse])
            logit = torch.where(inside, (out * items[rows]).sum(1), 0.0)
        lse, logit = part.merge(lse, logit)
        loss, share = _loss(lse, logit, targets, reduced)
        ctx.save_for_backward(out, items, targets, rows, inside, lse, share)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        out, items, targets, rows, inside, lse, share = ctx.saved_tensors
        dout, ditems = torch.zeros_like(out), torch.zeros_like(items)
        if not len(items):
            return dout, ditems, None, None, None
        factors = torch.where(targets >= 0, share * grad, 0.0)
        for begin in range(0, len(out), ctx.size):
            chunk = slice(begin, begin + ctx.size)
            slopes = (out[chunk] @ items.T - lse[chunk, None]).exp()
            slopes.scatter_add_(1, rows[chunk, None].long(), -inside[chunk, None].to(slopes))
            slopes *= factors[chunk, None]
            dout[chunk] = slopes @ items
            ditems += slopes.T @ out[chunk]
        return dout, ditems, None, None, None


class _Kernels(torch.autograd.Function):
    """Compute the loss by the kernels for a whole catalogue. For a target in another part, `hits` is -1."""

    @staticmethod
    def forward(
        ctx: Any, out, items, targets, temperature, normalize: bool, part: CatalogueShard, reduced: bool
    ) -> Tensor:
        from hstu_sparse.catalogue import launches

        ctx.learned = temperature if isinstance(temperature, Tensor) else None
        ctx.options = (1.0 if ctx.learned is not None else temperature, normalize, 0.0, reduced)
        rows, inside = _local_rows(targets, part.first, len(items))
        has_target = targets >= 0
        with _device(out):
            call = _call(ctx, out, items, torch.where(has_target, rows, -1))
            _, lse, row_scale, item_scale, logit, *_ = launches.forward_products(call)
        lse, logit = part.merge(lse * LN2, torch.where(inside, logit * LN2, 0.0))
        loss, share = _loss(lse, logit, targets, reduced)
        ctx.save_for_backward(out, items, rows, inside, has_target, lse, row_scale, item_scale, share)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        from hstu_sparse.catalogue import launches

        out, items, rows, inside, has_target, lse, row_scale, item_scale, share = ctx.saved_tensors
        lse = torch.where(has_target, lse / LN2, math.inf)
        with _device(out):
            call = _call(ctx, out, items, torch.where(has_target, rows, -1))
            dout, along = torch.empty_like(call.out, memory_format=torch.contiguous_format), call.new(call.T)
            # The factor of the target in a gradient is 2^(positive - lse) - 1: -1 for a local target, 0 for others.
            positive = torch.where(inside, -math.inf, torch.where(has_target, lse, 0.0))
            hits = torch.where(inside, rows, -1).to(torch.int32)
            grad, weights = call.token_weights(grad)
            above = launches.Above(grad, share[None], weights)
            ditems = launches.backward_products(call, above, lse, row_scale, item_scale, positive, dout, along, hits)
        slope = None
        if ctx.learned is not None:
            slope = (-along.sum() * share * grad / ctx.learned).to(ctx.learned.dtype)
        return dout, ditems, None, slope, None, None, None


def _device(x: Tensor):
    return on_device(x.device) if x.is_cuda else nullcontext()


def _call(ctx: Any, out: Tensor, items: Tensor, targets: Tensor):
    from hstu_sparse.catalogue.launches import Arguments, _Call

    return _Call(Arguments(out, items, targets, ctx.learned, None, None, *ctx.options))
