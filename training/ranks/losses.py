"""Compute a rank's share of a loss: draw negatives, look up items, and share the loss over the catalogue.

Letters: T tokens of a rank, E embedding size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import hstu_sparse
from data.batch import Batch
from hstu_sparse.catalogue import CatalogueShard
from models.attention.contract import AuxLosses
from models.embedding import InputEmbedding
from models.heads import CataloguePart, as_share, mol_loss, normalized
from models.hstu import SequenceModel
from models.losses import Share, block_count, draw_negatives, places_of
from models.options import LossConfig
from training.graph import padded_tokens
from training.ranks.draws import Draws
from training.ranks.processes import Ranks


class Rows(NamedTuple):
    """The rows of a sharded table that a rank uses in a step.

    values [R, E]; ids [R] int64, their items, each once; inverse [T] int64: ids[inverse] are the items of the batch.
    """

    values: Tensor
    ids: Tensor
    inverse: Tensor


class Prepared(NamedTuple):
    """A rank's share of the loss and, if the table is sharded, the rows.

    With negatives, targets and negatives are then indices into the rows.
    """

    share: Share
    rows: Rows | None = None


def prepare(model: SequenceModel, config: LossConfig | None, bases: Tensor, batch: Batch, ranks: Ranks) -> Prepared:
    """Draw a rank's negatives, and look up all items of the step if the table is sharded, before the forward pass.

    config: the options of a loss over items; None for other losses. bases: see `Draws`.
    """
    embedding = model.embedding
    targets, drawn = batch.target_ids, None
    if config is not None:
        features = embedding.items
        num_items = embedding.num_items if features is None else len(features.trained)
        targets = places_of(features, targets)
        pool = None
        if config.kind in ("in_batch", "mixed_negatives"):
            pool = gather_tokens(targets + 1, batch, ranks) - 1
        assert batch.whole is not None and batch.rows is not None
        blocks = block_count(padded_tokens(batch.whole.tokens))  # padded as in a captured step
        in_blocks = config.negatives == "block"
        rows = torch.arange(blocks, device=bases.device) if in_blocks else batch.rows
        drawn = draw_negatives(config, num_items, targets, pool, Draws(bases, rows).below, blocks)
        if drawn is not None and in_blocks:
            drawn = drawn._replace(block=batch.rows % blocks)
    share = Share(targets, drawn, ranks.sum((targets >= 0).sum()).clamp(min=1), ranks=ranks)
    return Prepared(share) if embedding.sharded is None else look_up(embedding, batch, share)


def look_up(embedding: InputEmbedding, batch: Batch, share: Share) -> Prepared:
    """Look up the rows of inputs and, if there are any, of negatives and their targets; each distinct row once."""
    assert embedding.sharded is not None
    targets, drawn = share.targets, share.drawn
    ids_to_look_up = [batch.item_ids]
    if drawn is not None:
        trained = None if embedding.items is None else embedding.items.trained
        items_drawn = drawn.ids.flatten() if trained is None else trained[drawn.ids.flatten()]
        # A token without a target looks up its input again: fused adam updates every row that is looked up, so no other
        # row may be added.
        ids_to_look_up += [torch.where(batch.target_ids < 0, batch.item_ids, batch.target_ids), items_drawn]
    ids, rows = torch.unique(torch.cat(ids_to_look_up), return_inverse=True)
    looked_up = Rows(embedding.sharded.look_up(ids), ids, rows[: batch.num_tokens])
    if drawn is None:
        return Prepared(share, looked_up)
    target_rows, negative_rows = rows[batch.num_tokens :].split([len(targets), drawn.ids.numel()])
    log_q = None
    if drawn.log_q is not None:
        log_q = drawn.log_q[ids if embedding.items is None else embedding.items.place[ids].clamp(min=0)]
    negatives = drawn._replace(ids=negative_rows.view(drawn.ids.shape).to(drawn.ids.dtype), log_q=log_q)
    targets = torch.where(targets < 0, -1, target_rows)
    return Prepared(share._replace(targets=targets, drawn=negatives), looked_up)


def gather_tokens(x: Tensor, batch: Batch, ranks: Ranks) -> Tensor:
    """Gather `x` [T, ...] of all ranks in the order of the whole batch, without a gradient."""
    assert batch.whole is not None and batch.rows is not None
    whole = x.new_zeros(batch.whole.tokens, *x.shape[1:])
    return ranks.sum(whole.index_add_(0, batch.rows, x.detach() * batch.real.view(-1, *[1] * (x.dim() - 1))))


class _Gathered(torch.autograd.Function):
    """Compute `gather_tokens`; the backward pass sums the ranks' gradients of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, batch: Batch, ranks: Ranks) -> Tensor:
        ctx.batch, ctx.ranks = batch, ranks
        return gather_tokens(x, batch, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        grad_x = ctx.ranks.sum(gradient).index_select(0, ctx.batch.rows)
        return grad_x * ctx.batch.real[:, None], None, None


def catalogue_share(
    model: SequenceModel, config: LossConfig, out: Tensor, batch: Batch, ranks: Ranks, dtype: torch.dtype | None
) -> tuple[Tensor, AuxLosses]:
    """Return this rank's shares of the loss over the whole catalogue and of its auxiliary losses, by name.

    The table is sharded row-wise. Each rank multiplies the outputs [T, E] of all ranks by the items of its shard; then
    the log-sum-exps of the ranks are merged, and in the backward pass the gradients of the outputs are summed. Source:
    the vocabulary-parallel cross-entropy of Megatron-LM (Shoeybi et al., arXiv 1909.08053).
    """
    learned, out = model.log_temperature, out.float()
    items, first = model.embedding.local_items()
    targets = places_of(model.embedding.items, gather_tokens(batch.target_ids + 1, batch, ranks) - 1)

    def merge(lse: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
        top = ranks.max(lse)
        return top + ranks.sum((lse - top).exp()).log(), ranks.sum(logit)

    if model.head is not None:
        part = CataloguePart(first, -(-model.embedding.num_items // ranks.world), merge)
        outs = normalized(_Gathered.apply(out, batch, ranks))
        return mol_loss(model.head, outs, items, targets, None, ranks, part)
    dtype = dtype if dtype is not None and out.is_cuda else torch.float32
    loss = hstu_sparse.catalogue_loss(
        _Gathered.apply(out, batch, ranks).to(dtype),
        F.dropout(items, model.item_dropout, model.training).to(dtype),
        targets,
        temperature=config.temperature if learned is None else config.temperature * learned.exp(),
        part=CatalogueShard(first, merge),
    )
    return as_share(loss, ranks.world), {}
