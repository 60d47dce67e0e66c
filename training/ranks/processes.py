"""The processes that train one model together: a device mesh of the dimensions `data` and `context`.

`context` ranks share each sequence, by a ring or by heads (models/attention/spread.py). In a ring a rank holds a part
of each (zigzag, so that causal attention is even work), and sees the other ranks' keys. By heads it holds consecutive
tokens of the batch, and has all tokens of some heads while attention is computed. `data` ranks have different
sequences of a batch. Rank 0 alone writes the run's folder.

A training step's loss is a sum of shares, one of each rank: a rank's sums over its own tokens, divided by counts of the
whole batch. The gradient of the loss is the sum of the shares' gradients.

Letters: T tokens of a rank, W ranks.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from data.batch import Batch, Cut
from data.errors import ConfigError
from data.types import shown
from hstu_sparse.ring.plan import cut_sequences, whole_plan
from models.attention.contract import AuxLoss
from models.attention.spread import context_by
from training.config import RunConfig


class Ranks:
    """This process's place among those that torchrun started; one alone without torchrun.

    world, rank    of all processes
    data           how many ranks share each batch; place: which of them this one is
    context        how many ranks share each sequence
    by_heads       whether they share it by heads, else by a ring
    engine         whether batches or tables are spread over ranks (training/ranks/step.py), be it over one alone
    """

    by_heads = False

    def __init__(self, config: RunConfig):
        p = config.parallel
        self.engine, self.context = p.engine, p.context
        self.by_heads = p.context > 1 and context_by(config) == "heads"
        self.rank = self.place = self.context_rank = 0
        self.group = self.context_group = None
        started = _environment_number("WORLD_SIZE", 1, 2**31) if "WORLD_SIZE" in os.environ else 1
        self.data = max(1, started // self.context) if p.data == "auto" else p.data
        self.world = self.data * self.context
        if started != self.world:
            raise ConfigError(
                f"{'parallel' if self.engine else 'parallel.context'}: {self.world}, but {started} process(es) were "
                f"started: torchrun --nproc-per-node {self.world} train.py ..."
            )
        if self.world == 1 and not self.engine:
            return
        gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        if not dist.is_initialized():
            self._meet(gpu)
        mesh = init_device_mesh("cuda" if gpu else "cpu", (self.data, self.context), mesh_dim_names=("data", "context"))
        self.group, self.context_group = dist.group.WORLD, mesh.get_group("context")
        self.rank, self.place = dist.get_rank(), mesh.get_local_rank("data")
        self.context_rank = mesh.get_local_rank("context")

    def data_parallel(self, module: nn.Module, **options) -> Any:
        """Wrap a module in DDP, with its `options`, so that a backward pass sums the gradients of all ranks."""
        return DistributedDataParallel(module, process_group=self.group, **options)

    def _meet(self, gpu: bool) -> None:
        """Make the process group."""
        options: dict[str, Any] = {}
        if "WORLD_SIZE" in os.environ:
            _environment_number("RANK", 0, self.world - 1)
            _environment_number("LOCAL_RANK", 0, self.world - 1)
            _environment_number("MASTER_PORT", 0, 65535)
            if not os.environ.get("MASTER_ADDR"):
                raise ConfigError("parallel: MASTER_ADDR is not in the environment: start it by torchrun")
            options |= _own_store(self.world)
        else:
            options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        if gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            # Transfers come before attention kernels, which else would leave them no multiprocessor: docs/ring.md.
            options["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options["timeout"] = timedelta(minutes=10)
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", **options)

    @property
    def first(self) -> bool:
        """Whether this process writes what the run leaves."""
        return self.rank == 0

    def share(self, count: int) -> tuple[int, int]:
        """Return (begin, end) of this rank's part of `count` things: equal consecutive parts, the last one shorter."""
        size = -(-count // self.world)
        return min(count, self.rank * size), min(count, (self.rank + 1) * size)

    def sequences(self, batch: Batch) -> Batch:
        """Return this rank's share of the sequences of a batch, or one of them as padding if it has none."""
        begin, end = self.share(batch.num_sequences)
        return batch.sequences(begin, end) if begin < end else batch.sequences(0, 1).as_padding()

    def cut(self, batch: Batch, num_context: int = 0) -> Batch:
        """Return this rank's part of a batch; num_context: how many context tokens the model puts in front of each
        sequence, which by heads the part has.
        """
        if self.context == 1:
            return batch
        rank, group = self.context_rank, self.context_group
        if self.by_heads:
            return consecutive(batch, rank, self.context, group, num_context)
        index, offsets = cut_sequences(batch.seq_offsets, rank, self.context, zigzag=True)
        cut = Cut(
            index=index,
            positions=batch.positions.index_select(0, index),
            origins=batch.origins,
            plan=whole_plan(batch.seq_offsets, rank, self.context, zigzag=True),
            group=group,
        )
        return replace(batch.part(index, offsets), cut=cut)

    def part_of_context(self, loss: AuxLoss) -> AuxLoss:
        """Return a loss that each rank of a context group has whole, with a part of its weight for each."""
        return loss._replace(weighted=loss.weighted / self.context)

    def sum_gradients(self, parameters: Iterable[Tensor], loss: Tensor) -> Tensor:
        """Sum the parameters' gradients over the ranks, in place, and return the sum of the losses."""
        if self.world == 1:
            return loss
        gradients = []
        for p in parameters:
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # a rank without tokens, say
                gradients.append(p.grad)
        flat = torch.cat([*(gradient.float().flatten() for gradient in gradients), loss.detach().float()[None]])
        dist.all_reduce(flat, group=self.group)
        for gradient, total in zip(gradients, flat[:-1].split([x.numel() for x in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))
        return flat[-1]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' `x`, without a gradient: a new tensor."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        """Return the maximum of the ranks' `x`, without a gradient: a new tensor."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def _reduced(self, x: Tensor, how) -> Tensor:
        x = x.detach().clone()
        if self.world > 1:
            dist.all_reduce(x, how, self.group)
        return x

    def greatest(self, *numbers: int) -> list[int]:
        """Return the greatest of all ranks' numbers at each place, by one exchange: ranks act in the same step."""
        return list(numbers) if self.world == 1 else self.max(torch.tensor(numbers)).tolist()

    def broadcast(self, value):
        """Return rank 0's value on all ranks."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, self.group)
        return box[0]

    def all_gather(self, value) -> list:
        """Return the list of all ranks' values on all ranks."""
        if self.world == 1:
            return [value]
        values: list = [None] * self.world
        dist.all_gather_object(values, value, self.group)
        return values


def consecutive(batch: Batch, rank: int, world: int, group: Any, num_context: int = 0) -> Batch:
    """Return a rank's tokens of a batch by heads: the rank-th of equal consecutive parts.

    Its sizes do not depend on the lengths of sequences, so that nothing waits for the device.
    """
    if num_context:
        items, (batch, places) = batch.item_ids, batch.with_context(num_context)
        if len(items):  # context tokens look up an item beside them: a fused optimiser steps every row of a look-up
            following = torch.bucketize(torch.arange(batch.num_tokens, device=places.device), places)
            batch.item_ids = items[following.clamp(max=len(items) - 1)]
    bounds = [part * batch.num_tokens // world for part in range(world + 1)]
    begin, end = bounds[rank], bounds[rank + 1]
    index = torch.arange(begin, end, device=batch.item_ids.device)
    cut = Cut(
        index=index,
        positions=batch.positions[begin:end],
        origins=batch.origins,
        plan=None,
        group=group,
        uncut=replace(batch, heads=group),
        tokens=tuple(after - before for before, after in pairwise(bounds)),
    )
    return replace(batch.part(index, (batch.seq_offsets - begin).clamp(0, end - begin)), cut=cut)


def _environment_number(name: str, least: int, most: int) -> int:
    """Return a number from torchrun's environment; ConfigError if it is none."""
    text = os.environ.get(name, "")
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ConfigError(
            f"parallel.context: {name} in the environment must be {least} to {most}, got {shown(text) or 'nothing'}: "
            "start it by torchrun"
        )
    return int(text)


def _own_store(world: int) -> dict[str, Any]:
    """Return arguments for the process group, so that it meets under a name that no earlier start of these ranks had.

    On one machine torchrun keeps its store when it starts ranks again, and with it the addresses at which those of
    before listened: a rank that is late would be looked for there (torch 2.13).
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not agent or os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return {}
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefixed = dist.PrefixStore(f"hstu_sparse/{attempt}", store)
    return {"store": prefixed, "rank": int(os.environ["RANK"]), "world_size": world}


class NoLog:
    """In place of MetricsLog where another rank writes."""

    lost = False

    def __init__(self, records: list[dict]):
        self.records = list(records)

    def write(self, record: dict, seconds: float, trained: dict) -> None:
        self.records.append({**record, "seconds": round(seconds, 3)})

    def close(self, finished: bool) -> None:
        pass
