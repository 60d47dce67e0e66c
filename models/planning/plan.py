"""Compute the memory of each rank that a run needs before anything is allocated.

Weights and the optimiser's state are counted. For the memory of a step and of an evaluation, their own code runs on an
imitated GPU (imagined.py) with the run's largest batch, while a `Meter` counts allocations.

Letters: T tokens, B sequences, E embedding size, N longest sequence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch

from data.balance import Deal
from data.batch import Batch
from data.batches import Batches
from models.average import WeightAverage
from models.config import ParallelConfig, RunConfig
from models.data_parallel.step import token_work
from models.graph import padded_sequences, padded_tokens
from models.hstu import SequenceModel
from models.parallel.sharding import Sharded, data_ranks, shard
from models.planning.imagined import imagined_gpu
from models.planning.meter import Meter
from models.run import Data, build_model

MIB = 2**20
GPU_BYTES = 139 * 2**30  # for tensors on an H200
# cuBLAS allocates a workspace on Hopper for each thread and stream that multiplies: the forward pass, autograd's thread
# and, on a stream of its own, evaluation.
CUBLAS_BYTES = 32 * MIB
SCANNED = 2_000_000  # samples whose batches are searched for the largest one
LIST = 1e-3  # share of the peak below which a part is not listed


class _Enough(Exception):
    """Ends an evaluation after its first batch."""


@dataclass
class Plan:
    """Bytes on one rank, and their parts.

    persistent: bytes that stay between steps, by name. activations: bytes saved for the backward pass, by part. step,
    evaluation: the peak of further allocations during a step and an evaluation.
    """

    ranks: int
    sequences: int
    tokens: int
    persistent: dict[str, int]
    sharded: Sharded
    activations: dict[str, int] = field(default_factory=dict)
    step: int = 0
    evaluation: int = 0

    @property
    def training_peak(self) -> int:
        """The peak of allocated bytes while the run trains."""
        return sum(self.persistent.values()) + 2 * CUBLAS_BYTES + self.step + sum(self.sharded.buffers.values())

    @property
    def peak(self) -> int:
        """The peak of allocated bytes, evaluations included."""
        return max(self.training_peak, sum(self.persistent.values()) + 3 * CUBLAS_BYTES + self.evaluation)


def plan(config: RunConfig, data: Data, build_step: Callable) -> Plan:
    """Make the plan of a run on GPUs.

    data: opened, on a CPU. build_step: train.build_step.
    """
    phases = sorted({0}.union(*(attention.phase_ends() for attention in config.model.attention)))
    ranks, context = data_ranks(config), config.parallel.context
    world = ranks * context
    graphed = config.train.cuda_graphs and not config.train.compile and world == 1 and not config.parallel.engine
    counts = tokens_of_batches(config, data)
    tokens, sequences = largest_part(config, data, counts, ranks)
    tokens = -(-tokens // context)
    if graphed:
        tokens = padded_tokens(tokens)
        sequences = padded_sequences(config.train.batch_size, config.model.max_seq_len)
    template = next(_training(config, data).epoch(0))
    judged = next((name for name in ("valid", "test") if getattr(data.splits, name) is not None), None)
    evaluated = None if judged is None else most_tokens(data.eval_batches(judged))
    sharded = shard(config, len(data.vocabulary.item_ids), world, tokens, GPU_BYTES)
    # The step of one rank, uncaptured: capturing needs a GPU, and allocates the same.
    uncaptured = config.train.model_copy(update={"cuda_graphs": False})
    config = config.model_copy(update={"train": uncaptured, "parallel": ParallelConfig()})
    # If the table is sharded, a step works on the rows that it has looked up; with features of items, on all.
    features = data.vocabulary.features
    rows = None if features is not None and features.trained is not None else sharded.looked_up or None
    imagined = replace(data.vocabulary, item_ids=data.vocabulary.item_ids[:rows])
    with imagined_gpu(), patch.dict(os.environ), Meter() as meter:
        os.environ.pop("WORLD_SIZE", None)  # torchrun did not start this process
        meter.part = "weights"
        model = build_model(config, imagined, torch.device("cpu")).train()
        average = WeightAverage(model, config.train.ema_decay) if config.train.ema_decay else None
        optimizer, step = build_step(config, model, torch.device("cpu"), average)
        persistent = {"weights": _bytes(model.parameters()) + _bytes(model.buffers())}
        _follow(meter, model, config)
        result = Plan(world, sequences, tokens, persistent, sharded)
        for phase in phases:
            meter.part = "batch"
            batch = _shaped(template, tokens, sequences, {})
            _measure_step(meter, step, replace(batch, phase=phase), result, phase == phases[-1])
            del batch
        persistent["gradients"] = _bytes(p.grad for p in model.parameters())
        persistent["optimiser"] = _bytes(x for state in optimizer.state.values() for x in state.values())
        if average is not None:
            persistent["average of the weights"] = _bytes(average.averages)
        result.step -= sum(persistent.values())
        if evaluated is not None:
            result.evaluation = _measure_evaluation(meter, data, model, evaluated, phases[-1]) - sum(
                persistent.values()
            )
        if sharded.looked_up:
            table = _bytes([model.item_weight])
            persistent["weights"] += sharded.weights - table
            persistent["gradients"] += sharded.gradients - table
            persistent["optimiser"] += sharded.optimiser - 2 * table
    columns = _columns(data)
    if columns <= GPU_BYTES // 4:
        persistent["the data's columns"] = columns
    if graphed:
        sizes = {padded_tokens(int(count)) for count in np.unique(np.concatenate(counts))}
        batch_bytes = 8 * sum(math.prod(x.shape[1:]) for _, x, layout in template._tensors() if layout.kind == "token")
        persistent["batches of captured steps"] = batch_bytes * sum(sizes)
    result.persistent |= {name: size for name, size in persistent.items() if size}
    return result


def tokens_of_batches(config: RunConfig, data: Data) -> list[np.ndarray]:
    """Return T of each batch of training, an array for each epoch; with very many samples only for the first epochs."""
    batches = _training(config, data)
    epochs = min(config.train.epochs, max(1, SCANNED // max(1, len(batches.split))))
    return [_tokens(batches, epoch) for epoch in range(epochs)]


def largest_part(config: RunConfig, data: Data, counts: list[np.ndarray], ranks: int) -> tuple[int, int]:
    """Return (T, B) of the rank that gets most tokens of the largest batch; counts: `tokens_of_batches`."""
    epoch = int(np.argmax([one.max() for one in counts]))
    batches = _training(config, data)
    order, bounds = batches._plan(epoch)
    number = int(counts[epoch].argmax())
    part = order[bounds[number] : bounds[number + 1]]
    lengths = batches._tokens(batches.split.begin[part], batches.split.end[part])
    owners, _ = Deal(0, ranks, token_work(config.model), config.parallel.balance).owners(lengths)
    return int(np.bincount(owners, lengths, ranks).max()), int(np.bincount(owners).max())


def _training(config: RunConfig, data: Data) -> Batches:
    c = config.train
    return data.batches("train", batch_size=c.batch_size, seed=config.seed, group_by_length=c.group_by_length)


def most_tokens(batches: Batches) -> Batch:
    """Return the batch with the most tokens."""
    return next(batches.epoch(0, start=int(_tokens(batches, 0).argmax())))


def _tokens(batches: Batches, epoch: int) -> np.ndarray:
    """Return T of each batch of an epoch."""
    order, bounds = batches._plan(epoch)
    tokens = batches._tokens(batches.split.begin[order], batches.split.end[order])
    return np.add.reduceat(tokens, bounds[:-1])


def _bytes(tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))


def _shaped(batch: Batch, tokens: int, sequences: int, values: dict[str, int]) -> Batch:
    """Return a batch like this one, without values, of other sizes."""
    lengths = {"token": tokens, "sequence": sequences, "offsets": sequences + 1}
    fields: dict[str, Any] = {
        name: torch.empty(values[name] if layout.offsets else lengths[layout.kind], *x.shape[1:], dtype=x.dtype)
        for name, x, layout in batch._tensors()
    }
    return dataclasses.replace(batch, **fields)


def _follow(meter: Meter, model: SequenceModel, config: RunConfig) -> None:
    """Count by part: the embedding, each layer's attention by kind, the other parts of the layers, the head."""
    meter.follow(model.embedding, "embedding")
    for layer in cast(Iterable[Any], model.layers):
        meter.follow(layer, "layers without attention")
        meter.follow(layer.attention, f"attention {layer.attention.config.kind}, N = {config.model.max_seq_len:,}")


def _measure_step(meter: Meter, step: Callable, batch: Batch, result: Plan, last: bool) -> None:
    """Make two steps, of which the second one has the optimiser's state and gradients from the first."""
    activations: Counter[str] = Counter()
    backward = torch.Tensor.backward

    def noted(loss, *arguments, **options):
        activations.clear()
        activations.update(meter.by_part - before)
        meter.part = "backward"
        backward(loss, *arguments, **options)

    with patch.object(torch.Tensor, "backward", noted):
        for _ in range(2):
            meter.part, before = "loss", meter.by_part.copy()
            meter.reset_peak()
            step(batch)
    result.step = max(result.step, meter.peak)
    if last:
        result.activations = {name: size for name, size in activations.most_common() if size > LIST * meter.peak}


def _measure_evaluation(meter: Meter, data: Data, model: SequenceModel, largest: Batch, phase: int) -> int:
    """Return the peak of bytes during one batch of an evaluation, including the model's."""

    class One:
        def __getattr__(self, name: str):
            return getattr(data.eval_batches("test"), name)

        def epoch(self, epoch: int) -> Iterator[Batch]:
            yield batch
            raise _Enough

    values = {name: len(x) for name, x, layout in largest._tensors() if layout.offsets}
    meter.part = "batch"
    batch = _shaped(largest, largest.num_tokens, largest.num_sequences, values)
    meter.part = "evaluation"
    meter.reset_peak()

    def to_host(x: torch.Tensor):
        raise _Enough

    with contextlib.suppress(_Enough), patch.object(torch.Tensor, "numpy", to_host):
        data.task.evaluate(model, cast(Batches, One()), phase)
    return meter.peak


def _columns(data: Data) -> int:
    """Return the bytes of the data set's columns on a GPU."""
    d = data.dataset
    columns = (d.items, d.timestamps, d.actions, d.user_rows, d.event_rows)
    return sum(8 * column.size for column in columns if column is not None)


def describe(plan: Plan, config: RunConfig) -> list[str]:
    """Format the plan as lines of text."""

    def line(name: str, size: int) -> str:
        return f"  {name:<44}{size / MIB:>12,.1f}"

    return [
        f"{config.name}: a step of {plan.sequences:,} sequences and {plan.tokens:,} tokens on each of {plan.ranks:,} "
        f"rank{'s' if plan.ranks > 1 else ''}, the largest of the run; MiB on a GPU like the H200",
        *(line(name, size) for name, size in plan.persistent.items()),
        *(line(f"activations: {name}", size) for name, size in plan.activations.items()),
        line("step, in addition, activations included", plan.step),
        line("evaluation, in addition", plan.evaluation),
        *(line(f"communication: {name}", size) for name, size in plan.sharded.buffers.items()),
        line("most at a time in training", plan.training_peak),
        line("most at a time, evaluations included", plan.peak),
        *plan.sharded.lines,
    ]
