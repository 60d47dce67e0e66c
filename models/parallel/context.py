"""Training with sequences cut along their length over the ranks of the device mesh's dimension `context`.

Every rank reads the same batches, keeps its part of each sequence (zigzag, so that causal attention is even work) and
computes that part's share of the loss; the ring attention kind sees the other ranks' keys. The shares' gradients are
summed, so all ranks make the same step. Rank 0 alone writes the run's folder.

Letters: T tokens of a rank, W ranks.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from data.batch import Batch, Cut
from data.types import shown
from hstu_sparse.ring import cut_sequences, whole_plan
from models.config import ConfigError, RunConfig


class Context:
    """This process's place in the dimension `context` of the device mesh; W is 1 without torchrun."""

    def __init__(self, config: RunConfig):
        self.world, self.rank, self.group = config.parallel.context, 0, None
        if config.parallel.data != 1 or config.parallel.embedding != "replicated":
            raise ConfigError("parallel.data, parallel.embedding: training takes 1 and replicated so far")
        started = _told("WORLD_SIZE", 1, 2**31) if "WORLD_SIZE" in os.environ else 1
        if started != self.world:
            raise ConfigError(
                f"parallel.context: {self.world}, but {started} process(es) were started: "
                f"torchrun --nproc-per-node {self.world} train.py ..."
            )
        if self.world == 1:
            return
        _told("RANK", 0, self.world - 1)
        _told("LOCAL_RANK", 0, self.world - 1)
        _told("MASTER_PORT", 0, 65535)
        if not os.environ.get("MASTER_ADDR"):
            raise ConfigError("parallel.context: MASTER_ADDR is not in the environment: start it by torchrun")
        gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        if gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if not dist.is_initialized() and gpu:
            # Transfers come before attention kernels, which else would leave them no multiprocessor: docs/ring.md.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(minutes=10), pg_options=options)
        elif not dist.is_initialized():
            dist.init_process_group("gloo")
        mesh = init_device_mesh("cuda" if gpu else "cpu", (self.world,), mesh_dim_names=("context",))
        self.group, self.rank = mesh.get_group("context"), mesh.get_local_rank("context")

    @property
    def first(self) -> bool:
        """Whether this process writes what the run leaves."""
        return self.rank == 0

    def cut(self, batch: Batch) -> Batch:
        """This rank's part of a batch."""
        if self.world == 1:
            return batch
        index, offsets = cut_sequences(batch.seq_offsets, self.rank, self.world, zigzag=True)
        cut = Cut(
            index=index,
            positions=batch.positions.index_select(0, index),
            origins=batch.origins,
            plan=whole_plan(batch.seq_offsets, self.rank, self.world, zigzag=True),
            group=self.group,
        )
        return replace(batch.part(index, offsets), cut=cut)

    def sum_gradients(self, parameters: Iterable[Tensor], loss: Tensor) -> Tensor:
        """Sums the parameters' gradients over the ranks, in place, and returns the sum of the losses."""
        if self.world == 1:
            return loss
        parameters = [p for p in parameters if p.requires_grad]
        for p in parameters:
            if p.grad is None:  # a rank without tokens, say
                p.grad = torch.zeros_like(p)
        flat = torch.cat([*(p.grad.float().flatten() for p in parameters), loss.detach().float()[None]])
        dist.all_reduce(flat, group=self.group)
        for p, total in zip(parameters, flat[:-1].split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(total.view_as(p.grad))
        return flat[-1]

    def any(self, number: int) -> int:
        """The greatest `number` of all ranks: a signal that one of them got stops all in the same step."""
        if self.world == 1:
            return number
        greatest = torch.tensor(number)
        dist.all_reduce(greatest, dist.ReduceOp.MAX, self.group)
        return int(greatest)

    def of_first(self, value):
        """What rank 0 calls its own, on all ranks."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, dist.get_global_rank(self.group, 0), self.group)
        return box[0]


def _told(name: str, least: int, most: int) -> int:
    """A number that torchrun leaves in the environment; ConfigError where it is none."""
    text = os.environ.get(name, "")
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ConfigError(
            f"parallel.context: {name} in the environment must be {least} to {most}, got {shown(text) or 'nothing'}: "
            "start it by torchrun"
        )
    return int(text)


class NoLog:
    """In place of MetricsLog where another rank writes."""

    lost = False

    def __init__(self, records: list[dict]):
        self.records = list(records)

    def write(self, record: dict, seconds: float, trained: dict) -> None:
        self.records.append({**record, "seconds": round(seconds, 3)})

    def close(self, finished: bool) -> None:
        pass
