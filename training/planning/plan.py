"""Predict the memory that a run needs on each rank, without a GPU.

Weights and the optimiser's state are counted. A step and an evaluation run on an imitated GPU (imagined.py) with the
run's largest batch, while a `Meter` counts allocations; with several ranks, the first one is imitated (ranks.py).

Letters: T tokens, B sequences, E embedding size, N longest sequence.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch

from data.balance import Deal
from data.batch import Batch
from data.batches import Batches
from models.attention.spread import context_by
from models.hstu import SequenceModel
from models.tasks.build import build_task
from models.tasks.contract import Task
from training.average import WeightAverage
from training.config import ParallelConfig, RunConfig
from training.graph import captures, padded_sequences, padded_tokens
from training.planning.imagined import ImaginedGpu, NoValues, imagined_gpu
from training.planning.meter import Meter
from training.planning.ranks import ImaginedRanks, ImaginedTable, imagined_unique, part_of_a_step, resized
from training.ranks.processes import Ranks
from training.ranks.sharding import Sharded, data_ranks, distinct, num_looked_up, shard
from training.ranks.step import token_work
from training.run import Data, build_model

MIB = 2**20
GPU_BYTES = 139 * 2**30  # the memory of an H200, used on a machine without a GPU
# On Hopper, cuBLAS allocates a workspace for each pair of thread and stream: the forward pass, autograd's thread, and
# evaluation, which has another stream.
CUBLAS_BYTES = 32 * MIB
SCANNED = 2_000_000  # samples whose batches are searched for the largest one
LISTED = 1e-3  # smaller shares of the peak are not listed


@dataclass
class Plan:
    """The bytes that a run needs on one rank.

    sequences, tokens: sizes of the largest batch. persistent: bytes that are allocated throughout, by name.
    activations: bytes saved for the backward pass, by part. step, evaluation: the peak of further allocations during a
    step and during an evaluation.
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
        """The peak of allocated bytes during training steps."""
        return sum(self.persistent.values()) + 2 * CUBLAS_BYTES + self.step

    @property
    def peak(self) -> int:
        """The peak of allocated bytes, including evaluations."""
        return max(self.training_peak, sum(self.persistent.values()) + 3 * CUBLAS_BYTES + self.evaluation)


def plan(config: RunConfig, data: Data, build_step: Callable, gpu_bytes: int) -> Plan:
    """Predict the memory of a run on GPUs.

    data: the data of the run, on the CPU. build_step: the function of training/step.py. gpu_bytes: the memory of a GPU.
    """
    ranks, context = data_ranks(config), config.parallel.context
    by_heads = context > 1 and context_by(config) == "heads"
    graphed = captures(config, by_heads)
    counts = tokens_of_batches(config, data)
    tokens, sequences = largest_part(config, data, counts, ranks)
    if graphed:
        tokens = padded_tokens(tokens)
        sequences = padded_sequences(config.train.batch_size, config.model.max_seq_len)
    tokens = -(-tokens // context)
    template = next(_training(config, data).epoch(0))
    judged = next((name for name in ("valid", "test") if getattr(data.splits, name) is not None), None)
    result = plan_step(
        config,
        len(data.vocabulary.item_ids),
        lambda config, ranks: build_model(config, data.vocabulary, torch.device("cpu"), ranks, ImaginedTable),
        build_step,
        (template, tokens, sequences),
        gpu_bytes,
        None if judged is None else data.eval_batches(judged),
    )
    columns = _columns(data)
    if columns <= gpu_bytes // 4:
        result.persistent["the data's columns"] = columns
    if graphed:
        sizes = {padded_tokens(int(count)) for count in np.unique(np.concatenate(counts))}
        batch_bytes = 8 * sum(math.prod(x.shape[1:]) for _, x, layout in template._tensors() if layout.kind == "token")
        result.persistent["batches of captured steps"] = batch_bytes * sum(sizes)
        if config.parallel.sharded:  # and their gradient
            rows = padded_tokens(distinct(len(data.vocabulary.item_ids), num_looked_up(config, tokens, ranks)))
            result.persistent["rows of captured steps"] = 2 * rows * config.model.embedding_dim * 4
    return result


def plan_step(
    config: RunConfig,
    num_items: int,
    make_model: Callable[[RunConfig, Ranks | None], SequenceModel],
    build_step: Callable,
    largest: tuple[Batch, int, int],
    gpu_bytes: int,
    evaluated: Batches | None = None,
) -> Plan:
    """Predict the memory of a model, its optimiser, a step and an evaluation, without the columns of the data.

    make_model: a function (config, ranks) -> model. largest: (a batch with the same fields as the run's, T and B of a
    rank's largest batch). evaluated: batches to evaluate.
    """
    template, tokens, sequences = largest
    phases = sorted({0}.union(*(attention.phase_ends() for attention in config.model.attention)))
    world = data_ranks(config) * config.parallel.context
    sharded = shard(config, num_items, world, tokens, gpu_bytes)
    ranks, parallel = None, ParallelConfig()
    if config.parallel.distributed_step:
        ranks, parallel = ImaginedRanks(data_ranks(config), world), config.parallel
        parallel = parallel.model_copy(update={"embedding": sharded.kind, "context": 1})
    # Without capturing, which needs a GPU and makes the same allocations.
    uncaptured = config.train.model_copy(update={"cuda_graphs": False})
    config = config.model_copy(update={"train": uncaptured, "parallel": parallel})
    judged = None if evaluated is None else most_tokens(evaluated)
    with imagined_gpu() as gpu, Meter() as meter:
        gpu.replaced[torch.unique] = imagined_unique(num_items)
        meter.part = "weights"
        model = make_model(config, ranks).train()
        table = cast(ImaginedTable | None, model.embedding.sharded)
        others = [] if table is None else [table.weight]
        average = WeightAverage(model, config.train.ema_decay, others) if config.train.ema_decay else None
        step_ranks = ranks or ImaginedRanks(1, 1, distributed_step=False)
        optimizer, step = build_step(config, model, torch.device("cpu"), average, step_ranks)
        weights = [*model.parameters(), *([] if table is None or table.parameter is None else [table.parameter])]
        persistent = {"weights": _bytes(model.parameters()) + _bytes(model.buffers()) + _bytes(others)}
        _follow(meter, model, config)
        result = Plan(world, sequences, tokens, persistent, sharded)
        for phase in phases:
            meter.part = "batch"
            batch = resized(template, tokens, sequences)
            batch = batch if ranks is None else part_of_a_step(batch, ranks)
            _measure_step(gpu, meter, step, replace(batch, phase=phase), result, phase == phases[-1])
            del batch
        persistent["gradients"] = _bytes(p.grad for p in weights)
        persistent["optimiser"] = _bytes(x for state in optimizer.state.values() for x in state.values())
        if table is not None and table.parameter is None:
            persistent["optimiser"] += _bytes([table.state])
        if average is not None:
            persistent["average of the weights"] = _bytes(average.averages)
        result.step -= sum(persistent.values())
        if evaluated is not None and judged is not None:
            task = build_task(config, ranks)
            with contextlib.nullcontext() if average is None else average.in_the_model():
                peak = _measure_evaluation(meter, task, evaluated, model, judged, phases[-1])
            result.evaluation = peak - sum(persistent.values())
    result.persistent = {name: size for name, size in persistent.items() if size}
    return result


def memory_of_a_gpu() -> int:
    """Return the bytes of this machine's first GPU, or GPU_BYTES if there is none."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else GPU_BYTES


def tokens_of_batches(config: RunConfig, data: Data) -> list[np.ndarray]:
    """Return T of each training batch, an array for each epoch; only for the first epochs if there are many samples."""
    batches = _training(config, data)
    epochs = min(config.train.epochs, max(1, SCANNED // max(1, len(batches.split))))
    return [_tokens(batches, epoch) for epoch in range(epochs)]


def largest_part(config: RunConfig, data: Data, counts: list[np.ndarray], ranks: int) -> tuple[int, int]:
    """Return the largest T and the largest B of a rank, for the largest batch; counts: from `tokens_of_batches`."""
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


def _follow(meter: Meter, model: SequenceModel, config: RunConfig) -> None:
    """Count the embedding, attention by kind, and the rest of the layers as separate parts."""
    meter.follow(model.embedding, "embedding")
    for layer in cast(Iterable[Any], model.layers):
        meter.follow(layer, "layers without attention")
        meter.follow(layer.attention, f"attention {layer.attention.config.kind}, N = {config.model.max_seq_len:,}")


def _measure_step(gpu: ImaginedGpu, meter: Meter, step: Callable, batch: Batch, result: Plan, last: bool) -> None:
    """Measure a step; two are made, since the second one also has the gradients and the state made by the first."""
    activations: Counter[str] = Counter()

    def note_activations() -> None:
        activations.clear()
        activations.update(meter.by_part - before)
        meter.part = "backward"

    gpu.before_backward = note_activations
    for _ in range(2):
        meter.part, before = "loss", meter.by_part.copy()
        meter.reset_peak()
        step(batch)
    result.step = max(result.step, meter.peak)
    if last:
        result.activations = {name: size for name, size in activations.most_common() if size > LISTED * meter.peak}


def _measure_evaluation(
    meter: Meter, task: Task, batches: Batches, model: SequenceModel, largest: Batch, phase: int
) -> int:
    """Return the peak of allocated bytes, including the model, during the evaluation of one batch."""

    class One:
        def __getattr__(self, name: str):
            return getattr(batches, name)

        def epoch(self, epoch: int) -> Iterator[Batch]:
            yield batch
            raise NoValues  # one batch is enough

    values = {name: len(x) for name, x, layout in largest._tensors() if layout.offsets}
    meter.part = "batch"
    batch = resized(largest, largest.num_tokens, largest.num_sequences, values)
    meter.part = "evaluation"
    meter.reset_peak()

    with contextlib.suppress(NoValues):
        task.evaluate(model, cast(Batches, One()), phase)
    return meter.peak


def _columns(data: Data) -> int:
    """Return the bytes of the data set's columns on a GPU."""
    d = data.dataset
    columns = (d.items, d.timestamps, d.actions, d.user_rows, d.event_rows)
    return sum(8 * column.size for column in columns if column is not None)


def describe(plan: Plan, config: RunConfig, gpu_bytes: int) -> list[str]:
    """Format a plan as lines of text; gpu_bytes: the memory of a GPU."""

    def line(name: str, size: int) -> str:
        return f"  {name:<44}{size / MIB:>12,.1f}"

    return [
        f"{config.name}: a step of {plan.sequences:,} sequences and {plan.tokens:,} tokens on each of {plan.ranks:,} "
        f"rank{'s' if plan.ranks > 1 else ''}, the largest of the run; MiB, of {gpu_bytes / MIB:,.0f} MiB on a GPU",
        *(line(name, size) for name, size in plan.persistent.items()),
        *(line(f"activations: {name}", size) for name, size in plan.activations.items()),
        line("a step, in addition, with activations", plan.step),
        line("an evaluation, in addition", plan.evaluation),
        *(line(f"buffers in a step: {name}", size) for name, size in plan.sharded.buffers.items()),
        line("peak during training", plan.training_peak),
        line("peak, including evaluations", plan.peak),
        *plan.sharded.lines,
    ]
