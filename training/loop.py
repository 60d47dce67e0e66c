"""Train a run: epochs, evaluations and checkpoints, until it is finished or stopped by a signal."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

from cli.interrupt import Interrupts, Stopped
from cli.terminal import Bar, terminal
from data.batches import Batches
from training.best import keep_best
from training.checkpoints import evaluated_weights
from training.config import RunConfig
from training.ending import finish, write_interrupted
from training.monitor import Means
from training.run import ProgressBatches
from training.setup import TrainingRun, open_or_resume
from training.step import set_lr


def train(
    config: RunConfig,
    folder: Path | None,
    resume: bool | None,
    init_from: Path | None = None,
    interrupts: Interrupts | None = None,
    update: Path | None = None,
) -> Path:
    """Train a run until it is finished, evaluate it and write its report; return the run's folder.

    folder: the run's folder, which only one process can use at a time; None: a new folder in run_dir. resume: whether
    to continue the run in the folder, with changes that training/changes.py allows; None: continue from the newest
    intact checkpoint if there is one. init_from: the folder of a run whose weights a new run starts with. update: the
    folder of a run that a new run updates. Raises Stopped after a signal, when a checkpoint is saved.

    Examples:
        >>> from pathlib import Path
        >>> sizes = ["data.synthetic={num_users: 20, num_items: 10, num_clusters: 5}", "model.max_seq_len=16"]
        >>> short = ["device=cpu", "train.epochs=1", "model.embedding_dim=16", "train.batch_size=8"]
        >>> folder = train(load_config("configs/synthetic-hstu.yaml", [*sizes, *short]), Path("new"), resume=None)
        >>> (folder / "report.md").is_file(), (folder / "best").is_dir()
        (True, True)
    """
    interrupts = interrupts or Interrupts()
    with open_or_resume(config, folder, resume, init_from, interrupts, update) as run:
        with interrupts.deferred(), terminal.bar(run.steps, run.progress.step, unit="steps") as bar:
            run.begin()
            while not run.finished:
                train_epoch(run, bar)
                record(run, evaluate(run))
                run.save_when_due()
            run.checkpoints.wait()
            interrupts.stage = f"evaluating; all epochs are saved. To evaluate: python train.py --resume {run.folder}"
        finish(run)
        return run.folder


def train_epoch(run: TrainingRun, bar: Bar) -> None:
    """Train to the end of the epoch, saving checkpoints when they are due; after a signal, save and raise Stopped."""
    config, progress = run.config, run.progress
    run.model.train()
    began, before, lr = time.monotonic(), progress.events, 0.0
    served = config.task.served()
    tokens_per_event = 1 if served is None else served.tokens_per_event
    for batch in run.batches.epoch(progress.epoch, start=progress.batch):
        lr = set_lr(config, run.optimizer, progress.step, run.steps)
        run.means.add(run.step(replace(batch, phase=run.phase)))
        progress.step += 1
        progress.batch += 1
        tokens = batch.num_tokens if batch.whole is None else batch.whole.tokens
        progress.events += tokens // tokens_per_event
        show(run, bar, (progress.events - before) / (time.monotonic() - began))
        run.checkpoints.poll()
        due, signal = run.agree()
        if signal:
            raise stop(run, signal)
        if due and progress.batch < len(run.batches):  # after the last batch, `save_when_due` saves
            run.save()
    run.losses = run.means.values()
    for name in run.ranks.broadcast([name for name, value in run.losses.items() if not math.isfinite(value)]):
        raise run.diverged(f"the {name} is {run.losses[name]} in epoch {progress.epoch + 1}")
    run.rates = {"lr": lr, "events_per_second": (progress.events - before) / (time.monotonic() - began)}


def evaluate(run: TrainingRun) -> dict[str, float] | None:
    """Return the metrics of the watched split, or None if it is not evaluated after this epoch."""
    if not run.evaluates or run.watched is None:
        return None
    run.check_finite()
    # Several ranks do not stop during an evaluation, in which they wait for one another.
    check = run.interrupts.check if run.ranks.world == 1 else lambda: None
    batches = ProgressBatches(run.data.eval_batches(run.watched), f"evaluating on {run.watched}", check)
    try:
        with evaluated_weights(run.average):
            metrics = run.data.task.evaluate(run.model, cast(Batches, batches), run.phase)
    except Stopped as stopped:
        # The state before the evaluation is saved; a resumed run repeats the evaluation.
        raise stop(run, stopped.number) from None
    return run.ranks.broadcast(metrics)


def record(run: TrainingRun, metrics: dict[str, float] | None) -> None:
    """End the epoch: save the weights if they are the best, print the metrics and write them to metrics.jsonl."""
    config, progress, losses = run.config, run.progress, run.losses
    line = {"epoch": progress.epoch + 1, "step": progress.step, **losses, "split": run.watched, **(metrics or {})}
    progress.epoch, progress.batch, run.means = progress.epoch + 1, 0, Means(run.data.device, {})
    summary = f"epoch {progress.epoch:>4}  {shown(losses)}"
    if metrics is not None:
        if run.watched == "valid" and run.last_phase:
            keep_best(config, run.checkpoints, progress, metrics)
        summary += f"  {run.watched} " + shown({name: metrics[name] for name in run.data.task.headline})
    terminal.say(summary)
    run.log.write(line, run.seconds, losses | run.rates)


def stop(run: TrainingRun, number: int) -> Stopped:
    """Save a run after the signal `number` and write its report; return the exception to raise."""
    progress = run.progress
    run.save()
    run.checkpoints.wait()
    run.log.close(finished=False)
    write_interrupted(run)
    best = "" if progress.best is None else f"; best {run.config.best_metric} so far {progress.best:.4f}"
    run.interrupts.stage = (
        f"training. Saved at step {progress.step:,} of {run.steps:,}{best}. To continue: "
        f"python train.py --resume {run.folder}"
    )
    return Stopped(number)


def show(run: TrainingRun, bar: Bar, rate: float) -> None:
    """Update the progress bar if it is due; only then are the losses read, which waits for the device."""
    if bar.due():
        epoch = f"epoch {run.progress.epoch + 1}/{run.config.train.epochs}"
        bar.show(run.progress.step, epoch, f"{shown(run.means.values())}  {rate:,.0f} events/s")


def shown(values: dict[str, float]) -> str:
    """Format losses and metrics as text."""
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items() if name != "grad_norm")
