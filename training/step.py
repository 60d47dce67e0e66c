"""Build the batches, the optimiser and the training step of a run, and set the learning rate."""

import math
from typing import Any

import torch

from data.batch import Batch
from data.batches import Batches
from models.tasks.build import build_task
from training.average import WeightAverage
from training.config import RunConfig
from training.graph import GraphedStep, Losses, Step, captures
from training.optimizer import build_optimizer
from training.ranks.processes import Ranks
from training.ranks.step import build_shared_step, deal_of
from training.run import Data

# Names in metrics.jsonl that an auxiliary loss must not have.
TAKEN = {"epoch", "step", "loss", "split", "seconds", "grad_norm", "imbalance"}


def train_batches(config: RunConfig, data: Data, ranks: Ranks) -> Batches:
    """Return the training batches; with several ranks, this rank's parts of them."""
    c = config.train
    options: dict[str, Any] = {"batch_size": c.batch_size, "seed": config.seed, "group_by_length": c.group_by_length}
    if (deal := deal_of(config, ranks)) is not None:
        options["deal"] = deal
    if c.augment is not None:
        # An update has fixed windows, which contain its targets.
        fixed = {} if data.events is None else {"window": 0.0}
        options["augment"] = c.augment.model_copy(update=fixed)
    return data.batches("train", **options)


def build_step(
    config: RunConfig, model, device: torch.device, average: WeightAverage | None = None, ranks: Ranks | None = None
) -> tuple[torch.optim.Optimizer, Step]:
    """Return the optimiser and the step: a function batch -> losses, which does not wait for the device.

    The losses are 0-d tensors by name: `loss`, which the step minimises, the unweighted auxiliary losses, and
    `grad_norm` before clipping (in captured steps only with train.clip_norm).
    """
    c, ranks = config.train, ranks or Ranks(config)
    if ranks.distributed_step:
        return build_shared_step(config, model, device, average, ranks)
    graphed = device.type == "cuda" and captures(config, ranks.by_heads)
    optimizer = build_optimizer(c, model.parameters(), device, graphed)
    if c.compile:
        for layer in model.layers:
            layer.compile(dynamic=True)

    task, reserved_names = build_task(config), TAKEN.union(config.task.metric_names())

    def step(batch: Batch) -> Losses:
        batch = ranks.cut(batch, model.num_context)
        # In a captured step, autocast's cache of cast weights would outlive the step.
        with torch.autocast(device.type, torch.bfloat16, enabled=c.autocast == "bf16", cache_enabled=not graphed):
            out, aux = model.raw_output(batch, share=ranks.part_of_context if ranks.context > 1 else None)
        loss, task_losses = task.loss(model, out, batch, None)
        aux |= task_losses
        if wrong := aux.keys() & reserved_names:
            raise ValueError(
                f"an auxiliary loss cannot be named {', '.join(sorted(wrong))}, a reserved name in metrics.jsonl"
            )
        for extra in aux.values():
            loss = loss + extra.weighted
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        (loss,) = ranks.sum_gradients(model.parameters(), loss.detach()[None], padded=graphed)
        norm = {}
        if c.clip_norm is not None:
            norm = {"grad_norm": torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip_norm).detach()}
        elif not graphed:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = {"grad_norm": torch.nn.utils.get_total_norm(gradients).detach()}
        optimizer.step()
        if average is not None:
            average.update()
        return {"loss": loss} | {name: extra.value.detach() for name, extra in aux.items()} | norm

    if not graphed:
        return optimizer, step
    return optimizer, GraphedStep(step, batch_size=c.batch_size, longest=config.model.max_seq_len)


def phase_at(config: RunConfig, step: float) -> int:
    """Return the latest step, up to `step`, at which a phase of an attention layer has ended; 0 if none has."""
    ends = (end for attention in config.model.attention for end in attention.phase_ends())
    return max((end for end in ends if end <= step), default=0)


def set_lr(config: RunConfig, optimizer, step: int, steps: int) -> float:
    """Set and return the learning rate of a step: linear warm-up, then `train.decay`; steps: their total number."""
    c = config.train
    lr = c.lr * min(1.0, (step + 1) / max(1, c.warmup_steps))
    past = max(0, step - c.warmup_steps) / max(1, steps - c.warmup_steps)
    if c.decay == "linear":
        lr *= 1 - past
    elif c.decay == "cosine":
        lr *= 0.5 * (1 + math.cos(math.pi * past))
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    return lr
