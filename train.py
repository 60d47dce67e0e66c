"""Trains the run that a YAML file describes, evaluates it and writes a report.

    python train.py configs/synthetic-hstu.yaml [key=value ...]   a new run, under run_dir/name/
    python train.py --resume RUN [--override]                     go on after an interruption or a kill

On the CPU a resumed run ends bit-identical to one that was never stopped, at the same number of threads.
"""

import argparse
import json
import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from data.batch import Batch
from data.datasets import DataError
from models.average import WeightAverage
from models.checkpoint import (
    CheckpointError,
    Progress,
    checkpoints,
    exists,
    load_checkpoint,
    load_folder,
    load_weights,
    save_checkpoint,
    save_folder,
)
from models.config import ConfigError, RunConfig, as_yaml, load_config
from models.folder import MANIFEST, FolderError, access, check_run, claimed, new_manifest, write_file
from models.graph import GraphedStep, Losses, Step
from models.monitor import Means, MetricsLog, ProgressBar, StopSignal, explain_faults, memory_fault
from models.parallel.context import Context, NoLog
from models.report import environment, print_result, write_report
from models.run import (
    Data,
    build_model,
    changes,
    check_fingerprint,
    check_of_this_run,
    check_same_run,
    final_weights,
    judge,
    open_data,
)
from models.tasks.build import build_task

console = Console()
# The other names in a line of metrics.jsonl, which an auxiliary loss cannot have.
TAKEN = {"epoch", "step", "loss", "split", "seconds"}


class TrainingError(ValueError):
    """Training cannot go on, in one line."""


def train(config: RunConfig, folder: Path, resume: bool, override: bool = False) -> int:
    """The whole run, in `folder`, which is ours alone meanwhile; returns the exit status.

    resume: go on with the run that is there. override: also with a configuration that is not the checkpoint's.
    """
    context = Context(config)
    folder = context.of_first(folder)
    if not context.first:
        return train_claimed(config, folder, resume, override, context)
    with claimed(folder, new=not resume):
        return train_claimed(config, folder, resume, override, context)


def train_claimed(config: RunConfig, folder: Path, resume: bool, override: bool, context: Context) -> int:
    """Several processes, of which the first writes: see models/parallel/context.py."""
    console.quiet = not context.first
    data = open_data(config, tell)
    config = data.config
    torch.manual_seed(config.seed)
    model = build_model(data)
    average = WeightAverage(model, config.train.ema_decay) if config.train.ema_decay else None
    optimizer, step = build_step(config, model, data.device, average, context)
    batches = data.batches(
        "train",
        batch_size=config.train.batch_size,
        seed=config.seed,
        group_by_length=config.train.group_by_length,
    )
    watched = next((name for name in ("valid", "test") if getattr(data.splits, name) is not None), None)
    eval_batches = data.eval_batches(watched) if watched else None
    progress = Progress(run="", fingerprint=data.dataset.fingerprint)
    if resume and was_saved(folder):
        progress = load_checkpoint(folder, model, optimizer, average)
        check_of_this_run(progress.run, folder, folder / "checkpoints")
        check_fingerprint(progress.fingerprint, data, folder)
        if not override:
            check_same_run(progress, config, len(batches), folder)
    elif context.first:
        manifest = new_manifest()
        write_file(folder / MANIFEST, json.dumps(manifest, indent=1))
        if not resume:
            write_file(folder / "config.yaml", as_yaml(config))
        progress.run = manifest["run"]
    progress.config = config.model_dump(mode="json")
    context.of_first(None)  # all have read before the first one writes
    log = MetricsLog(folder, progress.records, progress.step) if context.first else NoLog(progress.records)
    if log.lost:
        console.print("metrics.jsonl had been changed: its lines are restored from the checkpoint")

    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"{data.dataset.name}: {data.dataset.num_users:,} users, {data.dataset.num_items:,} items, "
        f"{data.dataset.num_events:,} events; {parameters:,} parameters; {data.device}; run folder {folder}"
    )
    for note in data.dataset.notes:
        tell(f"data: {note}")
    stop = StopSignal()
    started, saved_at = time.monotonic() - progress.seconds, time.monotonic()
    means = Means(data.device, progress.losses)

    def save(again: bool = False) -> None:
        if not context.first:
            return
        progress.losses, progress.seconds, progress.records = means.state(), time.monotonic() - started, log.records
        with judged(average):
            save_checkpoint(folder, model, optimizer, progress, average, again=again)

    # A run that has lines of metrics has a checkpoint: without one they, or it, were lost.
    save(again=override)
    if context.first:
        take_over_best(config, folder, progress)
    with ProgressBar(console, config.train.epochs, len(batches), progress.step) as bar:
        while progress.epoch < config.train.epochs:
            if config.eval.patience and progress.stale >= config.eval.patience:
                break
            model.train()
            for batch in batches.epoch(progress.epoch, start=progress.batch):
                set_lr(config, optimizer, progress.step, config.train.epochs * len(batches))
                means.add(step(replace(batch, phase=phase_at(config, progress.step))))
                progress.step += 1
                progress.batch += 1
                progress.events += batch.num_tokens
                bar.step(means, progress)
                if signal := context.any(stop.signal):
                    save()
                    bar.stop()
                    console.print(f"Stopped at step {progress.step}. To go on: python train.py --resume {folder}")
                    return 128 + signal
            losses = means.values()
            if not math.isfinite(losses["loss"]):
                raise TrainingError(
                    f"the loss is {losses['loss']} in epoch {progress.epoch + 1}: try a lower train.lr or "
                    f"train.clip_norm; {folder} keeps the checkpoints from before"
                )
            progress.epoch, progress.batch, means = progress.epoch + 1, 0, Means(data.device, {})
            record = {"epoch": progress.epoch, "step": progress.step, **losses, "split": watched}
            if watched and config.eval.every and progress.epoch % config.eval.every == 0:
                phase = phase_at(config, progress.step)
                with judged(average):
                    metrics = context.of_first(data.task.evaluate(model, eval_batches, phase))
                    # An earlier phase is another model than the one that is judged: nothing is chosen in it.
                    if watched == "valid" and phase == phase_at(config, math.inf):
                        keep_best(config, folder if context.first else None, model, progress, metrics)
                record |= metrics
                bar.print(
                    f"epoch {progress.epoch:>4}  {shown(losses)}  {watched} "
                    + shown({name: metrics[name] for name in data.task.headline})
                )
            log.write(record, time.monotonic() - started)
            last = progress.epoch == config.train.epochs
            if last or time.monotonic() - saved_at >= config.train.checkpoint_seconds:
                save()
                saved_at = time.monotonic()
    save()
    log.close()
    if data.splits.test is None:
        console.print(f"Protocol {config.data.protocol}: nothing is held out, so that the run is not judged")
    elif context.first:
        finish(config, folder, model, data, progress)
    return 0


def tell(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def build_step(
    config: RunConfig, model, device: torch.device, average: WeightAverage | None = None, context: Context | None = None
) -> tuple[torch.optim.Optimizer, Step]:
    """The optimiser, and the function that makes one step of it: batch -> losses, without waiting for the device.

    The losses by name, 0-d: `loss`, what the step minimises, and the auxiliary losses before their weights.
    """
    c, context = config.train, context or Context(config)
    graphed = device.type == "cuda" and c.cuda_graphs and not c.compile and context.world == 1
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=torch.tensor(c.lr, device=device) if graphed else c.lr,
        betas=c.betas,
        weight_decay=c.weight_decay,
        fused=True,
        capturable=graphed,
    )
    if c.compile:
        for layer in model.layers:
            layer.compile(dynamic=True)

    dtype = torch.bfloat16 if c.autocast == "bf16" else None
    task, taken = build_task(config), TAKEN.union(config.task.metric_names())

    def step(batch: Batch) -> Losses:
        whole, batch = batch, context.cut(batch)
        # A cache of cast weights would outlive the step that a graph captures.
        with torch.autocast(device.type, torch.bfloat16, enabled=c.autocast == "bf16", cache_enabled=not graphed):
            out, aux = model.raw_output(batch)
        loss, of_task = task.loss(model, out, batch, whole, dtype)
        aux |= of_task
        if wrong := aux.keys() & taken:
            raise ValueError(
                f"an auxiliary loss cannot be named {', '.join(sorted(wrong))}: metrics.jsonl has that name"
            )
        for extra in aux.values():
            loss = loss + extra.weighted
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        loss = context.sum_gradients(model.parameters(), loss.detach())
        if c.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip_norm)
        optimizer.step()
        if average is not None:
            average.update()
        return {"loss": loss} | {name: extra.value.detach() for name, extra in aux.items()}

    if not graphed:
        return optimizer, step
    return optimizer, GraphedStep(step, batch_size=c.batch_size, longest=config.model.max_seq_len)


def was_saved(folder: Path) -> bool:
    """Whether the run came as far as its first checkpoint; CheckpointError when it did and there is none any more."""
    found = bool(checkpoints(folder))
    metrics = folder / "metrics.jsonl"
    with access(metrics, "read"):
        if not found and metrics.exists() and metrics.stat().st_size:
            raise CheckpointError(f"{folder}: no checkpoint to resume from, though metrics.jsonl tells of one")
    return found


def phase_at(config: RunConfig, step: float) -> int:
    """The greatest end of a phase that this step has reached, over all attention layers; 0 before the first."""
    ends = (end for attention in config.model.attention for end in attention.phase_ends())
    return max((end for end in ends if end <= step), default=0)


def judged(average: WeightAverage | None):
    """Inside, the model has the weights that the run is judged by."""
    return nullcontext() if average is None else average.in_the_model()


def set_lr(config: RunConfig, optimizer, step: int, steps: int) -> None:
    """The learning rate of this step, of `steps` in all: rising over the warm-up, then as `train.decay` says."""
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


def keep_best(config: RunConfig, folder: Path | None, model, progress: Progress, metrics: dict) -> None:
    value = metrics[config.best_metric]
    if progress.best is None or value > progress.best:
        progress.best, progress.stale = value, 0
        facts = {"run": progress.run, "config": progress.config, "fingerprint": progress.fingerprint}
        facts |= {"value": value, "epoch": progress.epoch}
        if folder is not None:
            save_folder(folder / "best", {"model": model.state_dict()}, facts)
    else:
        progress.stale += 1


def take_over_best(config: RunConfig, folder: Path, progress: Progress) -> None:
    """The best weights so far as those of a configuration that was taken over; CheckpointError when of another run."""
    best = folder / "best"
    if not exists(best):
        return
    _, facts = load_folder(best)
    check_of_this_run(facts.get("run"), folder, best)
    if changes(facts.get("config"), config, best):
        tensors, facts = load_folder(best, "model")
        save_folder(best, tensors, facts | {"config": progress.config})


def shown(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())


def finish(config: RunConfig, folder: Path, model, data: Data, progress: Progress) -> None:
    weights, facts, source = final_weights(folder)
    load_weights(model, weights, source)
    result = judge(model, data, "test")
    result |= {
        "weights": source.name,
        "epoch": facts["epoch"],
        "steps": progress.step,
        "seconds": progress.seconds,
        "events_per_second": progress.events / max(progress.seconds, 1e-9),
        "notes": data.splits.notes,
        "skipped": data.splits.skipped,
        "environment": environment(data.device),
    }
    if data.device.type == "cuda":
        result["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    write_file(folder / "result.json", json.dumps(result, indent=1))
    write_report(folder, data.task, result, progress.records, data.dataset)
    print_result(console, data.task, result)
    console.print(f"Report: {folder / 'report.md'}")


def new_folder(config: RunConfig) -> Path:
    base = Path(config.run_dir) / config.name / time.strftime("%Y%m%d-%H%M%S")
    folder, count = base, 1
    while os.path.lexists(folder):
        count += 1
        folder = base.with_name(f"{base.name}-{count}")
    return folder


def absolute_paths(config: RunConfig) -> RunConfig:
    """The same run with its paths absolute, so that its folder can be used from anywhere."""
    paths = {"cache_dir": os.path.abspath(os.path.expanduser(config.data.cache_dir))}
    if config.data.path:
        paths["path"] = os.path.abspath(os.path.expanduser(config.data.path))
    return config.model_copy(update={"data": config.data.model_copy(update=paths)})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, like train.lr=3e-4")
    parser.add_argument("--run", type=Path, help="the run's folder, instead of a new one under run_dir/name")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run folder")
    parser.add_argument(
        "--override", action="store_true", help="with --resume: take over a config.yaml that was changed"
    )
    options = parser.parse_intermixed_args(arguments)
    if (options.config is None) == (options.resume is None):
        parser.error("give either a config or --resume RUN")
    if options.run and options.resume:
        parser.error("--run is for a new run: --resume names its folder")
    if options.override and not options.resume:
        parser.error("--override belongs to --resume")
    try:
        if options.resume:
            check_run(options.resume)
            config, folder = load_config(options.resume / "config.yaml"), options.resume
        else:
            config = absolute_paths(load_config(options.config, options.overrides))
            folder = options.run or new_folder(config)
        return train(config, folder, bool(options.resume), options.override)
    except (ConfigError, DataError, CheckpointError, FolderError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if (line := memory_fault(error)) is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    explain_faults()
    sys.exit(main())
