"""What a run takes of each rank's memory, known before anything of it is allocated.

Weights and the optimiser's state are counted. What a step and an evaluation take beside them is what their own code
allocates: it runs on an imagined GPU (imagined.py), with the run's largest batch, and a `Meter` looks on.

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
from models.graph import padded_sequences, padded_tokens
from models.hstu import SequenceModel
from models.parallel.step import token_work
from models.planning.imagined import imagined_gpu
from models.planning.meter import Meter
from models.planning.sharding import Sharded, data_ranks, shard
from models.run import Data, build_model

MIB = 2**20
GPU_BYTES = 139 * 2**30  # that an H200 has for tensors
# cuBLAS takes a workspace on Hopper for each thread and stream that multiplies: the forward pass, autograd's thread
# and, on a stream of its own, evaluation.
CUBLAS_BYTES = 32 * MIB
SCANNED = 2_000_000  # samples whose batches are looked through for the largest one
LIST = 1e-3  # share of the peak below which a part is not listed


class _Enough(Exception):
    """Ends an evaluation behind its first batch."""


@dataclass
class Plan:
    """Bytes on one rank, and how they come about.

    kept: what stays between steps, by name. activations: what the forward pass keeps for the backward pass, by part.
    step, evaluation: the most that is allocated beside `kept` during either.
    """

    ranks: int
    sequences: int
    tokens: int
    kept: dict[str, int]
    sharded: Sharded
    activations: dict[str, int] = field(default_factory=dict)
    step: int = 0
    evaluation: int = 0

    @property
    def training_peak(self) -> int:
        """The most bytes that are allocated at a time while the run trains."""
        return sum(self.kept.values()) + 2 * CUBLAS_BYTES + self.step + sum(self.sharded.buffers.values())

    @property
    def peak(self) -> int:
        """The most bytes that are allocated at a time, evaluations included."""
        return max(self.training_peak, sum(self.kept.values()) + 3 * CUBLAS_BYTES + self.evaluation)


def plan(config: RunConfig, data: Data, build_step: Callable) -> Plan:
    """The plan of a run on GPUs.

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
    # One rank's step itself, not one that is captured: that needs a GPU, and allocates the same.
    uncaptured = config.train.model_copy(update={"cuda_graphs": False})
    config = config.model_copy(update={"train": uncaptured, "parallel": ParallelConfig()})
    # Where the table is sharded, a step works on the rows that it has looked up.
    imagined = replace(data.vocabulary, item_ids=data.vocabulary.item_ids[: sharded.looked_up or None])
    with imagined_gpu(), patch.dict(os.environ), Meter() as meter:
        os.environ.pop("WORLD_SIZE", None)  # this process is none of torchrun's
        meter.part = "weights"
        model = build_model(config, imagined, torch.device("cpu")).train()
        average = WeightAverage(model, config.train.ema_decay) if config.train.ema_decay else None
        optimizer, step = build_step(config, model, torch.device("cpu"), average)
        kept = {"weights": _bytes(model.parameters()) + _bytes(model.buffers())}
        _follow(meter, model, config)
        result = Plan(world, sequences, tokens, kept, sharded)
        for phase in phases:
            meter.part = "batch"
            batch = _shaped(template, tokens, sequences, {})
            _measure_step(meter, step, replace(batch, phase=phase), result, phase == phases[-1])
            del batch
        kept["gradients"] = _bytes(p.grad for p in model.parameters())
        kept["optimiser"] = _bytes(x for state in optimizer.state.values() for x in state.values())
        if average is not None:
            kept["average of the weights"] = _bytes(average.averages)
        result.step -= sum(kept.values())
        if evaluated is not None:
            result.evaluation = _measure_evaluation(meter, data, model, evaluated, phases[-1]) - sum(kept.values())
        if sharded.looked_up:
            rows = _bytes([model.item_weight])
            kept["weights"] += sharded.weights - rows
            kept["gradients"] += sharded.gradients - rows
            kept["optimiser"] += sharded.optimiser - 2 * rows
    columns = _columns(data)
    if columns <= GPU_BYTES // 4:
        kept["the data's columns"] = columns
    if graphed:
        sizes = {padded_tokens(int(count)) for count in np.unique(np.concatenate(counts))}
        each = 8 * sum(math.prod(x.shape[1:]) for _, x, layout in template._tensors() if layout.kind == "token")
        kept["batches of captured steps"] = each * sum(sizes)
    result.kept |= {name: size for name, size in kept.items() if size}
    return result


def tokens_of_batches(config: RunConfig, data: Data) -> list[np.ndarray]:
    """T of each batch of training, an array for each epoch; of very many samples the first epochs'."""
    batches = _training(config, data)
    epochs = min(config.train.epochs, max(1, SCANNED // max(1, len(batches.split))))
    return [_tokens(batches, epoch) for epoch in range(epochs)]


def largest_part(config: RunConfig, data: Data, counts: list[np.ndarray], ranks: int) -> tuple[int, int]:
    """(T, B) of the rank that gets most tokens of the largest batch; counts: `tokens_of_batches`."""
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
    """The batch with the most tokens."""
    return next(batches.epoch(0, start=int(_tokens(batches, 0).argmax())))


def _tokens(batches: Batches, epoch: int) -> np.ndarray:
    """T of each batch of an epoch."""
    order, bounds = batches._plan(epoch)
    tokens = batches._tokens(batches.split.begin[order], batches.split.end[order])
    return np.add.reduceat(tokens, bounds[:-1])


def _bytes(tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))


def _shaped(batch: Batch, tokens: int, sequences: int, values: dict[str, int]) -> Batch:
    """A batch without values like this one, of other sizes."""
    lengths = {"token": tokens, "sequence": sequences, "offsets": sequences + 1}
    fields: dict[str, Any] = {
        name: torch.empty(values[name] if layout.offsets else lengths[layout.kind], *x.shape[1:], dtype=x.dtype)
        for name, x, layout in batch._tensors()
    }
    return dataclasses.replace(batch, **fields)


def _follow(meter: Meter, model: SequenceModel, config: RunConfig) -> None:
    """Counts by part: the embedding, each layer's attention by kind, the rest of the layers, the head."""
    meter.follow(model.embedding, "embedding")
    for layer in cast(Iterable[Any], model.layers):
        meter.follow(layer, "layers without attention")
        meter.follow(layer.attention, f"attention {layer.attention.config.kind}, N = {config.model.max_seq_len:,}")


def _measure_step(meter: Meter, step: Callable, batch: Batch, result: Plan, last: bool) -> None:
    """Makes two steps, of which the second finds the optimiser's state and the first one's gradients."""
    activations: Counter[str] = Counter()
    backward = torch.Tensor.backward

    def noted(loss, *given, **options):
        activations.clear()
        activations.update(meter.by_part - before)
        meter.part = "backward"
        backward(loss, *given, **options)

    with patch.object(torch.Tensor, "backward", noted):
        for _ in range(2):
            meter.part, before = "loss", meter.by_part.copy()
            meter.reset_peak()
            step(batch)
    result.step = max(result.step, meter.peak)
    if last:
        result.activations = {name: size for name, size in activations.most_common() if size > LIST * meter.peak}


def _measure_evaluation(meter: Meter, data: Data, model: SequenceModel, largest: Batch, phase: int) -> int:
    """The most bytes that one batch of an evaluation takes, the model's included."""

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
    with contextlib.suppress(_Enough):
        data.task.evaluate(model, cast(Batches, One()), phase)
    return meter.peak


def _columns(data: Data) -> int:
    """Bytes of the data set's columns on a GPU."""
    d = data.dataset
    columns = (d.items, d.timestamps, d.actions, d.user_rows, d.event_rows)
    return sum(8 * column.size for column in columns if column is not None)


def describe(plan: Plan, config: RunConfig) -> list[str]:
    """The plan as lines of text."""

    def line(name: str, size: int) -> str:
        return f"  {name:<44}{size / MIB:>12,.1f}"

    return [
        f"{config.name}: a step of {plan.sequences:,} sequences and {plan.tokens:,} tokens on each of {plan.ranks:,} "
        f"rank{'s' if plan.ranks > 1 else ''}, the largest of the run; MiB on a GPU like the H200",
        *(line(name, size) for name, size in plan.kept.items()),
        *(line(f"activations: {name}", size) for name, size in plan.activations.items()),
        line("step beside the former, activations included", plan.step),
        line("evaluation beside the former", plan.evaluation),
        *(line(f"communication: {name}", size) for name, size in plan.sharded.buffers.items()),
        line("most at a time in training", plan.training_peak),
        line("most at a time, evaluations included", plan.peak),
        *plan.sharded.lines,
    ]
