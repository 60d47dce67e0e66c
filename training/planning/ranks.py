"""Imitate the first of several ranks inside `imagined_gpu`: communication only allocates its buffers.

The buffers are those of torchrec 1.6 to 1.8 and of DDP with `gradient_as_bucket_view`.

Letters: m rows that this rank reads for all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from data.batch import Batch, Whole
from training.config import RunConfig
from training.ranks.processes import Ranks
from training.ranks.sharding import distinct
from training.ranks.tables import ShardedTable

SORTING = 6  # int64 per id that are allocated while ids are sorted and counted on a GPU


class ImaginedRanks(Ranks):
    """The first of several ranks, without a process group; no sequence is shared by several ranks."""

    def __init__(self, data: int, world: int, distributed_step: bool = True):
        self.distributed_step, self.context, self.data, self.world = distributed_step, 1, data, world
        self.rank = self.place = self.context_rank = 0
        self.group = self.context_group = None

    def _reduced(self, x: Tensor, how) -> Tensor:
        return x.detach().clone()

    def data_parallel(self, module: nn.Module, **options) -> Summed:
        return Summed(module)

    def sequences(self, batch: Batch) -> Batch:
        begin, end = self.share(batch.num_sequences)
        tokens = batch.num_tokens * (end - begin) // batch.num_sequences
        return resized(batch, tokens, end - begin)

    def broadcast(self, value):
        return value

    def all_gather(self, value) -> list:
        return [value] * self.world


def resized(batch: Batch, tokens: int, sequences: int, values: dict[str, int] | None = None) -> Batch:
    """Return an uninitialised batch with the same fields and other sizes; values: the lengths of jagged fields."""
    lengths = {"token": tokens, "sequence": sequences, "offsets": sequences + 1}
    fields: dict[str, Any] = {
        name: torch.empty(
            (values or {}).get(name, len(x)) if layout.offsets else lengths[layout.kind], *x.shape[1:], dtype=x.dtype
        )
        for name, x, layout in batch._tensors()
    }
    return dataclasses.replace(batch, **fields)


def part_of_a_step(batch: Batch, ranks: ImaginedRanks) -> Batch:
    """Mark a batch as one rank's part of the batch of all ranks."""
    rows = torch.empty(batch.num_tokens, dtype=torch.int64)
    return dataclasses.replace(batch, rows=rows, whole=Whole(0, batch.num_tokens * ranks.data, 1.0))


class _Rows(torch.autograd.Function):
    """Read rows [m, columns] of a shard; the backward pass sorts the ids and sums the gradient of each row."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, columns: int, fused: bool) -> Tensor:
        ctx.save_for_backward(weight, ids)
        ctx.fused = fused
        return weight.new_empty(len(ids), columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        weight, ids = ctx.saved_tensors
        while_sorted = [torch.empty_like(ids) for _ in range(SORTING)]
        whole = torch.zeros_like(weight)
        if not ctx.fused:  # a fused optimiser updates the rows here
            while_sorted.append(torch.empty_like(gradient))  # the sums of rows, before they are stored in `whole`
        return whole, None, None, None


class _Exchanged(torch.autograd.Function):
    """Send rows to the ranks that requested them: allocate a copy in their order, and `count` received rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int) -> Tensor:
        ctx.shape = rows.shape
        ordered = rows.clone()
        return ordered.new_empty(count, ordered.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        return gradient.new_empty(ctx.shape).clone(), None


class ImaginedTable(ShardedTable):
    """The first rank's shard of an item table."""

    def __init__(self, config: RunConfig, num_items: int, ranks: Ranks, device: torch.device):
        p, size, world = config.parallel, config.model.embedding_dim, ranks.world
        self.ranks, self.device, self.num_items, self.size, self.fused = ranks, device, num_items, size, p.fused
        self.kind, self.kernel = p.embedding, None
        rows = -(-num_items // world) if self.kind == "row_wise" else num_items
        columns = size // world if self.kind == "column_wise" else size
        self.begin, self.end = (0, 0), (rows, columns)
        self.weight, self.parameter = torch.empty(rows, columns), None
        if self.fused:
            count = rows if self.fused == "rowwise_adagrad" else 2 * rows * columns
            self.anchor, self.state = torch.zeros((), requires_grad=True), torch.empty(count)
        else:
            self.parameter = nn.Parameter(self.weight.view(-1))

    def look_up(self, ids: Tensor) -> Tensor:
        count, world = len(ids), self.ranks.world
        received = ids.new_empty(count if self.kind == "row_wise" else count * world)
        while_sorted = [torch.empty_like(ids) for _ in range(SORTING)]
        source = self.anchor if self.parameter is None else self.parameter
        rows = _Rows.apply(source, received, self.weight.shape[1], bool(self.fused))
        del while_sorted
        arrived = count if self.kind != "column_wise" else count * world
        order = received.new_empty(arrived)
        return _Exchanged.apply(rows, arrived).index_select(0, order).view(count, self.size)

    def fill(self, rows) -> None:
        pass

    def draw(self, trained: Tensor | None) -> None:
        pass


class Summed(nn.Module):
    """Replace DDP: gradients are moved into persistent buckets, which are as large as all weights."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.buckets: dict[Tensor, Tensor] = {}
        for p in module.parameters():
            if p.requires_grad:
                self.buckets[p] = torch.empty_like(p, requires_grad=False)
                p.register_post_accumulate_grad_hook(self._move)

    def _move(self, p: Tensor) -> None:
        assert p.grad is not None
        p.grad = self.buckets[p].copy_(p.grad)

    def register_comm_hook(self, state, hook) -> None:
        pass

    def forward(self, *arguments):
        return self.module(*arguments)


def imagined_unique(num_items: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a replacement of `torch.unique(x, return_inverse=True)` for ids drawn uniformly from `num_items`."""

    def unique(x: Tensor, *, return_inverse: bool, **options) -> tuple[Tensor, Tensor]:
        while_sorted = [torch.empty_like(x) for _ in range(SORTING - 1)]
        del while_sorted
        return x.new_empty(distinct(num_items, len(x))), torch.empty_like(x)

    return unique
