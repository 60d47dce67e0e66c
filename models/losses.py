"""Define the training losses: predict the item after token t from out[t], at all positions.

The logit of an item is its cosine with the output, divided by the temperature. On a GPU most softmax losses are
`hstu_sparse.catalogue_loss` (`takes_kernel`); other losses are computed in chunks of positions.

Letters: T tokens, E embedding size, I items, K negatives, R positions of a chunk, N items of a position.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional as F

import hstu_sparse
from data.batch import Batch
from data.earlier import Earlier
from hstu_sparse.catalogue import BLOCK
from hstu_sparse.core.jagged import sequence_ids
from hstu_sparse.core.precision import without_autocast
from models.attention.contract import AuxLosses
from models.chunks import ChunkedSum, chunk_size
from models.embedding import InputEmbedding
from models.features import ItemFeatures
from models.heads import mol_loss, normalized
from models.hstu import SequenceModel
from models.options import LossConfig
from models.protocols import RankGroup
from models.repeats import RepeatTerm, add_terms

MAX_KERNEL_SIZE = 512  # the greatest embedding size of the kernels
MOST_POSITIONS, LEAST_BLOCKS = 1024, 64  # blocks that share negatives: positions of a block, blocks of a batch
TERM_WIDTH = 8  # elements that the term of repeats computes for each item of a window


class Negatives(NamedTuple):
    """Negatives: [K] shared by all positions, [T, K] for each position, or [G, K] for each of G blocks of positions.

    log_q [I]: the logarithm of each item's probability of being drawn.
    block [T]: the block of each position; None: position t is in block t % G.
    """

    ids: Tensor
    log_q: Tensor | None = None
    block: Tensor | None = None

    def in_blocks(self, positions: int) -> bool:
        return self.block is not None or (self.ids.dim() == 2 and len(self.ids) != positions)

    def per_position(self, positions: int) -> Tensor:
        """Return the ids with a row for each of `positions` = T positions, [T, K]."""
        if not self.in_blocks(positions):
            return self.ids.expand(positions, -1)
        tokens = torch.arange(positions, device=self.ids.device)
        return self.ids[tokens % len(self.ids) if self.block is None else self.block]

    def tiles(self, positions: int, unit: int) -> tuple[Tensor, Tensor, int]:
        """Return (the places [T] of positions in N tiles, the ids [N, K] of the tiles' negatives, a tile's size).

        The positions of a tile are of one block. The size is a multiple of `unit`. The size and N do not depend on
        values, so that steps can be captured.
        """
        blocks, tokens = len(self.ids), torch.arange(positions, device=self.ids.device)
        size = max(1, -(-positions // (blocks * unit))) * unit
        if self.block is None:
            return tokens % blocks * size + tokens // blocks, self.ids, size
        block, order = self.block.sort(stable=True)
        counts = block.new_zeros(blocks).index_add_(0, block, torch.ones_like(block))
        tiles = (counts + size - 1) // size
        begins = (tiles.cumsum(0) - tiles) * size - (counts.cumsum(0) - counts)
        places = torch.empty_like(order).index_copy_(0, order, tokens + begins[block])
        # There are at most positions // size full tiles, and one partly filled tile for each block.
        numbers = torch.arange(positions // size + blocks, device=tokens.device)
        owners = torch.searchsorted(tiles.cumsum(0), numbers, right=True).clamp(max=blocks - 1)
        return places, self.ids[owners], size


class Share(NamedTuple):
    """The targets of outputs and the competing items: a rank's share of the loss of a batch, or the whole loss.

    targets  [T], as indices into `items`; without `items` the numbers of `places_of`; -1 for none, padding included
    drawn    the negatives, numbered in the same way; None: targets compete with all items
    count    0-d, the number of targets of the whole batch; None: that of `targets`
    items    [R, E] or None
    ranks    the ranks whose shares add up to the loss (training/ranks/losses.py), or None
    """

    targets: Tensor
    drawn: Negatives | None = None
    count: Tensor | None = None  # type: ignore[assignment]  # a tuple has a method of that name
    items: Tensor | None = None
    ranks: RankGroup | None = None

    def part(self, index: Tensor) -> "Share":
        """Return the share of the outputs `index` [T'], in which items have the same numbers."""
        drawn = self.drawn
        if drawn is not None and drawn.in_blocks(len(self.targets)):
            drawn = drawn._replace(block=index % len(drawn.ids))
        elif drawn is not None and drawn.ids.dim() == 2:
            drawn = drawn._replace(ids=drawn.ids[index])
        return Share(self.targets[index], drawn, (self.targets >= 0).sum().clamp(min=1))


class Repeats(NamedTuple):
    """A term of the scores (models/repeats.py) and its inputs from the batch."""

    term: RepeatTerm
    earlier: Earlier


def head_loss(
    model: SequenceModel,
    config: LossConfig,
    out: Tensor,
    batch: Batch,
    share: Share | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, AuxLosses]:
    """Return (training loss, auxiliary losses) of outputs [T, E] of `SequenceModel.raw_output` with the model's head.

    share: a rank's share of the loss; None: the whole loss or, if `batch.cut` is set, the part of this rank's tokens.
    dtype: see `training_loss`.
    """
    features, longest = model.embedding.items, len(model.embedding.position)
    repeats = None
    if model.repeats is not None:
        items = places_of(features, batch.item_ids).clamp(min=0)
        repeats = Repeats(model.repeats, Earlier.of(batch, longest, items))
    if model.head is not None or repeats is not None or not takes_kernel(config, out):
        out = normalized(out.float())
    if share is None:
        targets = places_of(features, batch.target_ids if batch.cut is None else batch.cut.targets)
        num_items = len(model.item_weight) if features is None else len(features.trained)
        share = Share(targets, draw_negatives(config, num_items, targets))
        share = share if batch.cut is None else share.part(batch.cut.index)
    if share.items is not None:
        items = share.items
    elif features is not None:
        items, share = competing_items(model.embedding, share)
    else:
        items = model.item_table
    if model.head is None:
        items = F.dropout(items, model.item_dropout, model.training)
        learned = model.log_temperature
        temperature = None if learned is None else config.temperature * learned.exp()
        excluded = excluded_items(config, batch, longest)
        excluded = None if excluded is None else places_of(features, excluded)
        return training_loss(config, out, items, share, dtype, temperature, excluded, repeats), {}
    ids = None if share.drawn is None else share.drawn.per_position(len(share.targets))
    return mol_loss(model.head, out, items, share.targets, ids, share.ranks)


def places_of(features: ItemFeatures | None, targets: Tensor) -> Tensor:
    """Return the numbers of items in the loss, -1 for none: ids or, with features, indices into `features.trained`."""
    return targets if features is None else torch.where(targets < 0, -1, features.place[targets])


def competing_items(embedding: InputEmbedding, share: Share) -> tuple[Tensor, Share]:
    """Return (representations [R, E] of items with features, the share with indices into these).

    They are those of all items with a training event, or of targets and negatives alone if these are fewer.
    """
    targets, drawn = share.targets, share.drawn
    assert embedding.items is not None
    trained = embedding.items.trained
    if drawn is None or len(targets) + drawn.ids.numel() >= len(trained):
        return embedding.item_rows(), share
    places = torch.cat([targets.clamp(min=0), drawn.ids.flatten()])
    # A repeated item has one row, so that a negative equal to the target has the target's number.
    order = torch.arange(len(places), device=places.device)
    row = order.new_zeros(len(trained)).scatter_reduce_(0, places, order, "amax", include_self=False)
    rows = row[places]
    log_q = None if drawn.log_q is None else drawn.log_q[places]
    negatives = drawn._replace(ids=rows[len(targets) :].view(drawn.ids.shape).to(drawn.ids.dtype), log_q=log_q)
    share = share._replace(targets=torch.where(targets < 0, -1, rows[: len(targets)]), drawn=negatives)
    return embedding.item_rows(trained[places]), share


def block_count(positions: int) -> int:
    """Return the number of blocks of `loss.negatives: block`; position t is in block t % (the result).

    Neighbouring positions, whose outputs are similar, thus have different negatives. A batch has at least LEAST_BLOCKS
    blocks, but at most one for every BLOCK positions; a block has at most MOST_POSITIONS.
    """
    return max(1, min(-(-positions // BLOCK), max(LEAST_BLOCKS, -(-positions // MOST_POSITIONS))))


def draw_negatives(
    config: LossConfig, num_items: int, targets: Tensor, pool: Tensor | None = None, below: Any = None, blocks: int = 0
) -> Negatives | None:
    """Draw the negatives of the configured loss; None if the loss is over the whole catalogue.

    pool: the targets of the whole batch, from which in-batch negatives are drawn, if `targets` are a part of them.
    below: (limit, shape, dtype) -> random integers in [0, limit), by default from torch's global generator.
    blocks: the number of blocks of `block`, by default that of a batch with these targets.
    """
    if config.kind == "cross_entropy":
        return None
    shapes = {"shared": (), "block": (blocks or block_count(len(targets)),)}
    rows: tuple[int, ...] = shapes.get(config.negatives, (len(targets),))
    # The kernels read ids often, and int32 takes half the bytes; on a CPU torch only indexes with int64.
    dtype = torch.int32 if targets.is_cuda else torch.int64
    if below is None:
        below = lambda limit, shape, dtype: torch.randint(limit, shape, device=targets.device, dtype=dtype)

    def uniform(count: int) -> Tensor:
        return below(num_items, (*rows, count), dtype)

    if config.kind in ("sampled_softmax", "bce"):
        return Negatives(uniform(config.num_negatives))
    pool = targets if pool is None else pool
    scored = pool >= 0
    total = scored.sum().clamp(min=1)
    # Targets in front, so that their indices can be drawn without waiting for the device.
    candidates = pool.index_select(0, (~scored).int().argsort(stable=True)).to(dtype)

    def in_batch(count: int) -> Tensor:
        if not len(pool):
            return uniform(count)
        places = below(2**31 - 1 if targets.is_cuda else 2**62, (*rows, count), dtype) % total.to(dtype)
        return candidates.index_select(0, places.flatten()).view(places.shape)

    if config.kind == "in_batch":
        return Negatives(in_batch(config.num_negatives))
    count = config.num_in_batch
    share = count / config.num_negatives
    seen = torch.zeros(num_items, device=targets.device).index_add_(0, pool.clamp(min=0), scored.float())
    log_q = (share / total * seen + (1 - share) / num_items).log()
    return Negatives(torch.cat([in_batch(count), uniform(config.num_negatives - count)], -1), log_q)


def training_loss(
    config: LossConfig,
    out: Tensor,
    item_weight: Tensor,
    share: Share,
    dtype: torch.dtype | None = None,
    temperature: Tensor | None = None,
    excluded: Tensor | None = None,
    repeats: Repeats | None = None,
) -> Tensor:
    """Return the sum of the losses of positions with a target, divided by `share.count`.

    It has gradients for `out` and `item_weight` (no second derivative). A negative equal to the target does not count.

    Args:
        config: the loss.
        out: [T, E] fp32, L2-normalised; fp32 or bf16, with any norm, if `takes_kernel` is true.
        item_weight: [I, E].
        share: the targets and negatives.
        dtype: the dtype of matrix products on a GPU; by default the table's.
        temperature: 0-d, replaces the configured one and has a gradient.
        excluded: [T, N] int64, the items that `loss.exclude` excludes at each position, -1 for none; a target is never
            excluded.
        repeats: the term that is added to the cosines; outputs are then normalised.
    """
    targets, drawn, count = share.targets, share.drawn, share.count
    ids, log_q, _ = (None, None, None) if drawn is None else drawn
    kernel, size = repeats is None and takes_kernel(config, out), 1
    out = out.to(dtype or item_weight.dtype) if kernel else out
    item_weight = item_weight.to(out.dtype)
    if drawn is not None and drawn.in_blocks(len(out)):
        places, ids, size = drawn.tiles(len(out), BLOCK if out.is_cuda else 1)
        out = out.new_zeros(len(ids) * size, out.shape[1]).index_copy_(0, places, out)
        targets = targets.new_full((len(out),), -1).index_copy_(0, places, targets)
    if kernel:
        scale = config.temperature if temperature is None else temperature
        options: dict[str, Any] = dict(log_q=log_q, block=size, label_smoothing=config.label_smoothing)
        loss = hstu_sparse.catalogue_loss(out, item_weight, targets, temperature=scale, negatives=ids, **options)
        return loss if count is None else (targets >= 0).sum() / count * loss
    out = out if temperature is None else out * (config.temperature / temperature)
    whole = ids is None or (size == 1 and takes_whole_catalogue(config, out, item_weight))
    once = whole or ids is None or len(item_weight) <= ids.numel()
    items = normalized(item_weight) if once else item_weight
    # The number of elements to compute for each row of a chunk, which is a position or a tile.
    width = len(item_weight) if whole else (config.num_negatives + 1) * max(size, out.shape[1])
    in_rows = ids is not None and ids.dim() == 2
    if ids is not None and in_rows and not whole:
        out, targets = out.unflatten(0, (len(ids), size)), targets.unflatten(0, (len(ids), size))
    if repeats is not None:
        width += TERM_WIDTH * repeats.earlier.longest
    # Chunks are larger for gathered rows, since every chunk has a gradient as large as the table.
    rows = max(1, chunk_size(out) * (1 if whole else 2) // width)
    term_parameters = {} if repeats is None else dict(repeats.term.named_parameters())

    def chunk(out, targets, negatives, excluded, tokens, items, *parameters):
        if ids is not None:
            return _sampled_loss(config, once, out, items, targets, negatives if in_rows else ids, log_q)
        weights = dict(zip(term_parameters, parameters))
        terms = None if repeats is None else functional_call(repeats.term, weights, (out, tokens, repeats.earlier))
        return _catalogue_loss(config, out, items, targets, excluded, dtype, terms)

    rowwise = out, targets, ids if in_rows else None, excluded, torch.arange(len(out), device=out.device)
    total = ChunkedSum.apply(chunk, rows, len(rowwise), *rowwise, items, *term_parameters.values())
    return total / ((targets >= 0).sum().clamp(min=1) if count is None else count)


def takes_kernel(config: LossConfig, out: Tensor) -> bool:
    """Return whether the loss is `hstu_sparse.catalogue_loss`, which normalises outputs and items."""
    return out.is_cuda and config.kind != "bce" and config.exclude == "none" and out.shape[1] <= MAX_KERNEL_SIZE


def excluded_items(config: LossConfig, batch: Batch, longest: int) -> Tensor | None:
    """Return the items that `loss.exclude` excludes at each position, [T, N] with -1 for none; None if it is `none`.

    longest: the greatest number of tokens of a sequence.
    """
    if config.exclude == "none":
        return None
    tokens = torch.arange(batch.num_tokens, device=batch.item_ids.device)
    sequence = sequence_ids(batch.seq_offsets, batch.num_tokens)
    end = tokens + 1 if config.exclude == "history" else batch.seq_offsets[sequence + 1]
    places = batch.seq_offsets[sequence][:, None] + torch.arange(longest, device=tokens.device)
    inside, places = places < end[:, None], places.clamp(max=batch.num_tokens - 1)
    columns = [batch.item_ids] if config.exclude == "history" else [batch.item_ids, batch.target_ids]
    return torch.cat([torch.where(inside, column[places], -1) for column in columns], 1)


class _Product(torch.autograd.Function):
    """Compute a [R, E] @ b [I, E].T in fp32, with operands in bf16 or fp16 on a GPU."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.mm(a, b.T, out_dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        gradient = gradient.to(a.dtype)
        return gradient @ b, gradient.T @ a


@without_autocast
def _catalogue_loss(
    config: LossConfig,
    out: Tensor,
    items: Tensor,
    targets: Tensor,
    excluded: Tensor | None,
    dtype: torch.dtype | None,
    terms: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the sum of the losses of a chunk of positions over the catalogue without the items `excluded`.

    out, items: normalised. terms: (items [R, N], the terms that are added to their cosines [R, N]).
    """
    out, chosen = out / config.temperature, targets.clamp(min=0)[:, None]
    logits = _Product.apply(out.to(dtype), items.to(dtype)) if out.is_cuda and dtype is not None else out @ items.T
    if terms is not None:
        logits = add_terms(logits, terms[0], terms[1] / config.temperature)
    if excluded is None:
        smoothing = config.label_smoothing
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum", label_smoothing=smoothing)
    # Entries of -1 are replaced by the target, which is not excluded.
    left_out = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, torch.where(excluded < 0, chosen, excluded), True)
    left_out.scatter_(1, chosen, False)
    logits = logits.masked_fill_(left_out, float("-inf"))
    losses = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    if config.label_smoothing:
        mean = logits.masked_fill(left_out, 0).sum(1) / (~left_out).sum(1)
        losses = losses + config.label_smoothing * (logits.gather(1, chosen)[:, 0] - mean)
    return losses.masked_fill(targets < 0, 0).sum()


def takes_whole_catalogue(config: LossConfig, out: Tensor, item_weight: Tensor) -> bool:
    """Return whether sampled logits are gathered from one product with all items, which is faster for small catalogues.

    The product writes T * I logits. Gathering the rows of each position's own negatives reads T * K * E elements.
    """
    return config.negatives != "shared" and len(item_weight) <= config.num_negatives * out.shape[1]


def _sampled_loss(
    config: LossConfig, once: bool, out: Tensor, items: Tensor, targets: Tensor, negatives: Tensor, log_q: Tensor | None
) -> Tensor:
    """Return the sum of the losses of a chunk: positions [R, E] with negatives [K], or tiles [N, R, E] with [N, K].

    items: the item table, normalised if `once`. Positions with negatives [R, K] are multiplied by the whole table.
    """
    out = out / config.temperature
    if negatives.dim() == out.dim():
        positive = (out * F.embedding(targets.clamp(min=0), items)).sum(1)
        logits, ids = (out @ items.T).gather(1, negatives.clamp(min=0)), negatives
    else:
        # One look-up, since its gradient is as large as the table.
        rows = F.embedding(torch.cat([targets.flatten(), negatives.flatten()]).clamp(min=0), items)
        chosen, drawn = (rows if once else normalized(rows)).split([targets.numel(), negatives.numel()])
        positive = (out * chosen.view_as(out)).sum(-1)
        logits, ids = out @ drawn.unflatten(0, negatives.shape).mT, negatives[..., None, :]
    if log_q is not None:
        logits = logits - (log_q[ids] + math.log(config.num_negatives))
    same = ids == targets[..., None]
    if config.kind == "bce":
        # The mean over negatives, so that their number does not change the balance with the positive.
        fitting = (~same).sum(-1).clamp(min=1)
        losses = F.softplus(-positive) + F.softplus(logits).masked_fill(same, 0).sum(-1) / fitting
    else:
        losses = F.softplus(logits.masked_fill_(same, float("-inf")).logsumexp(-1) - positive)
    return losses.masked_fill(targets < 0, 0).sum()
