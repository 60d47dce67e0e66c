"""The processes that train a model together: a device mesh with the dimensions `data` and `context`.

`data` ranks have different sequences of a batch. `context` ranks share each sequence, by a ring or by heads
(models/attention/spread.py). In a ring each rank has a part of every sequence (zigzag, which balances the work of
causal attention) and receives the other ranks' keys and values. By heads each rank has consecutive tokens of the batch,
but computes attention for all tokens and some of the heads. Only rank 0 writes the run's folder.

The loss of a training step is the sum of the ranks' shares. A share is the rank's sum over its tokens, divided by a
count over the whole batch. The gradient of the loss is the sum of the gradients of the shares.

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
    """The ranks that torchrun started, seen from this process; a single rank without torchrun.

    world, rank          the number of processes, and the rank of this one
    data, place          the number of ranks that share each batch, and this rank's index among them
    context              the number of ranks that share each sequence
    by_heads             whether sequences are shared by heads, otherwise by a ring
    distributed_step     whether a step distributes batches or tables over ranks (training/ranks/step.py), even over a
                         single one
    """

    by_heads = False

    def __init__(self, config: RunConfig):
        p = config.parallel
        self.distributed_step, self.context = p.distributed_step, p.context
        self.by_heads = p.context > 1 and context_by(config) == "heads"
        self.rank = self.place = self.context_rank = 0
        self.group = self.context_group = None
        started = _environment_number("WORLD_SIZE", 1, 2**31) if "WORLD_SIZE" in os.environ else 1
        self.data = max(1, started // self.context) if p.data == "auto" else p.data
        self.world = self.data * self.context
        if started != self.world:
            raise ConfigError(
                f"parallel.data={p.data}, parallel.context={p.context}: need {self.world} process(es), got {started}; "
                f"set parallel.data=auto, or start the run by torchrun --nproc-per-node {self.world} train.py ..."
            )
        if self.world == 1 and not self.distributed_step:
            return
        gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        if not dist.is_initialized():
            self._init_process_group(gpu)
        mesh = init_device_mesh("cuda" if gpu else "cpu", (self.data, self.context), mesh_dim_names=("data", "context"))
        self.group, self.context_group = dist.group.WORLD, mesh.get_group("context")
        self.rank, self.place = dist.get_rank(), mesh.get_local_rank("data")
        self.context_rank = mesh.get_local_rank("context")

    def data_parallel(self, module: nn.Module, **options) -> Any:
        """Wrap a module in DistributedDataParallel with these options."""
        return DistributedDataParallel(module, process_group=self.group, **options)

    def _init_process_group(self, gpu: bool) -> None:
        options: dict[str, Any] = {}
        if "WORLD_SIZE" in os.environ:
            _environment_number("RANK", 0, self.world - 1)
            _environment_number("LOCAL_RANK", 0, self.world - 1)
            _environment_number("MASTER_PORT", 0, 65535)
            if not os.environ.get("MASTER_ADDR"):
                raise ConfigError("parallel: MASTER_ADDR is not in the environment: start the run by torchrun")
            options |= _store_of_this_start(self.world)
        else:
            options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        if gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            # Transfers have priority over attention kernels, which could otherwise occupy all multiprocessors: see
            # docs/ring.md.
            options["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options["timeout"] = timedelta(minutes=10)
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", **options)

    @property
    def first(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    def share(self, count: int) -> tuple[int, int]:
        """Return (begin, end) of this rank's part of `count` elements, divided into consecutive parts."""
        size = -(-count // self.world)
        return min(count, self.rank * size), min(count, (self.rank + 1) * size)

    def sequences(self, batch: Batch) -> Batch:
        """Return this rank's share of the sequences of a batch; a rank without any gets the first one as padding."""
        begin, end = self.share(batch.num_sequences)
        return batch.sequences(begin, end) if begin < end else batch.sequences(0, 1).as_padding()

    def cut(self, batch: Batch, num_context: int = 0) -> Batch:
        """Return this rank's part of a batch of shared sequences.

        num_context: the number of context tokens that the model puts in front of each sequence; by heads, they are
        inserted here.
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
            targets=batch.target_ids,
        )
        return replace(batch.part(index, offsets), cut=cut)

    def part_of_context(self, loss: AuxLoss) -> AuxLoss:
        """Divide the weight of a loss by the number of ranks of a context group, each of which computes the loss."""
        return loss._replace(weighted=loss.weighted / self.context)

    def sum_gradients(self, parameters: Iterable[Tensor], losses: Tensor, padded: bool = False) -> Tensor:
        """Sum the parameters' gradients over the ranks, in place, and return the sum of the losses [n].

        padded: all ranks have tokens, so that a parameter without a gradient here has none on the other ranks either.
        """
        if self.world == 1:
            return losses
        gradients = []
        for p in parameters:
            if p.requires_grad and not (padded and p.grad is None):
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                gradients.append(p.grad)
        flat = torch.cat([*(gradient.float().flatten() for gradient in gradients), losses.detach().float()])
        dist.all_reduce(flat, group=self.group)
        *totals, losses = flat.split([*(gradient.numel() for gradient in gradients), len(losses)])
        for gradient, total in zip(gradients, totals, strict=True):
            gradient.copy_(total.view_as(gradient))
        return losses

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks, a new tensor without a gradient."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        """Return the maximum of `x` over the ranks, a new tensor without a gradient."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def _reduced(self, x: Tensor, how) -> Tensor:
        x = x.detach().clone()
        if self.world > 1:
            dist.all_reduce(x, how, self.group)
        return x

    def greatest(self, *numbers: int) -> list[int]:
        """Return the maximum of each number over the ranks, with a single all-reduce."""
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
    """Return the part of a batch for a rank that shares sequences by heads: one of equal consecutive parts.

    The size of the part does not depend on the lengths of sequences, so that this does not wait for the device.
    """
    if num_context:
        items, (batch, places) = batch.item_ids, batch.with_context(num_context)
        # A fused optimiser updates every row that is looked up: context tokens look up the item of the next event.
        if len(items):
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
        targets=batch.target_ids,
        uncut=replace(batch, heads=group),
        tokens=tuple(after - before for before, after in pairwise(bounds)),
    )
    return replace(batch.part(index, (batch.seq_offsets - begin).clamp(0, end - begin)), cut=cut)


def _environment_number(name: str, least: int, most: int) -> int:
    """Return a number from torchrun's environment; ConfigError if it is missing or out of range."""
    text = os.environ.get(name, "")
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ConfigError(
            f"parallel: {name} in the environment must be {least} to {most}, got {shown(text) or 'nothing'}: "
            "start the run by torchrun"
        )
    return int(text)


def _store_of_this_start(world: int) -> dict[str, Any]:
    """Return arguments of init_process_group: a store with a prefix that differs from earlier starts of these ranks.

    On a single machine, torchrun keeps its store when it restarts ranks. Without a new prefix, a rank could read the
    address of a rank of the previous start and wait for it (torch 2.13).
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not agent or os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return {}
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefixed = dist.PrefixStore(f"hstu_sparse/{attempt}", store)
    return {"store": prefixed, "rank": int(os.environ["RANK"]), "world_size": world}


class NoLog:
    """A replacement of MetricsLog on ranks that do not write."""

    lost = False

    def __init__(self, records: list[dict]):
        self.records = list(records)

    def write(self, record: dict, seconds: float, trained: dict) -> None:
        self.records.append({**record, "seconds": round(seconds, 3)})

    def close(self, finished: bool) -> None:
        pass
