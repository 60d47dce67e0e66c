"""Train the run that a YAML file describes, evaluate it and write a report.

    python train.py configs/synthetic-hstu.yaml [key=value ...]   a new run, under run_dir/name/
    python train.py --resume RUN [key=value ...]                  continue after an interruption, or with more epochs
    python train.py CONFIG --init-from RUN [key=value ...]        begin with the weights of another run
    python train.py --update RUN [data.path=NEW]                  learn new events, as a new run that knows all of RUN
    python train.py CONFIG --dry-run                              measure time and memory of a run
    python train.py --keys [PREFIX]                               the keys of a configuration
    python train.py CONFIG --plan                                 predict the memory of each GPU, without a GPU

On the CPU a resumed run ends bit-identical to one that was never stopped, at the same number of threads.
"""

import argparse
import shutil

from cli.command import answer_early, train_options


def check_early(options: argparse.Namespace) -> str | None:
    """Check the configuration; return the text that --keys prints."""
    if options.keys is not None:
        from training.keys import as_text

        return as_text(options.keys, min(100, shutil.get_terminal_size().columns))
    if options.config is not None:
        from training.config import load_config  # takes half of the time of all imports

        load_config(options.config, options.overrides)
    return None


if __name__ == "__main__":
    answer_early(train_options, __doc__, check_early)

import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

from cli.interrupt import Interrupts, Stopped
from cli.program import guarded
from cli.terminal import Bar, terminal
from data.batches import Batches
from training.best import keep_best
from training.checkpoints import judged
from training.config import RunConfig, load_config
from training.ending import finish, leave
from training.folder import check_run
from training.monitor import Means, explain_faults
from training.run import Tracked, absolute_paths
from training.setup import Run, open_or_resume
from training.step import set_lr
from training.update import updated_config


def train(
    config: RunConfig,
    folder: Path | None,
    resume: bool | None,
    init_from: Path | None = None,
    interrupts: Interrupts | None = None,
    update: Path | None = None,
) -> None:
    """Do the whole run in `folder`, which this process claims; None: in a new folder below run_dir.

    resume: continue the run in the folder, with changes that training/changes.py allows; None: if there is one, from
    its newest intact checkpoint. init_from: another run's folder, whose weights a new run starts with; update: one
    that a new run updates. Raises Stopped when a signal arrived; everything is saved then.
    """
    interrupts = interrupts or Interrupts()
    with open_or_resume(config, folder, resume, init_from, interrupts, update) as run:
        with interrupts.noted(), terminal.bar(run.steps, run.progress.step, unit="steps") as bar:
            run.begin()
            while not run.finished:
                train_epoch(run, bar)
                record(run, evaluate(run))
                run.save_when_due()
            run.checkpoints.wait()
            interrupts.stage = f"evaluating; all epochs are saved. To evaluate: python train.py --resume {run.folder}"
        finish(run)


def train_epoch(run: Run, bar: Bar) -> None:
    """Train to the end of the epoch, and save whenever it is due; after a signal save, and raise Stopped."""
    config, progress = run.config, run.progress
    run.model.train()
    began, before, lr = time.monotonic(), progress.events, 0.0
    for batch in run.batches.epoch(progress.epoch, start=progress.batch):
        lr = set_lr(config, run.optimizer, progress.step, run.steps)
        run.means.add(run.step(replace(batch, phase=run.phase)))
        progress.step += 1
        progress.batch += 1
        progress.events += batch.num_tokens if batch.whole is None else batch.whole.tokens
        show(run, bar, (progress.events - before) / (time.monotonic() - began))
        run.checkpoints.poll()
        due, signal = run.agree()
        if signal:
            raise stopped(run, signal)
        if due and progress.batch < len(run.batches):  # after the last one the evaluation is saved, too
            run.save()
    run.losses = run.means.values()
    for name in run.ranks.of_first([name for name, value in run.losses.items() if not math.isfinite(value)]):
        raise run.diverged(f"the {name} is {run.losses[name]} in epoch {progress.epoch + 1}")
    run.rates = {"lr": lr, "events_per_second": (progress.events - before) / (time.monotonic() - began)}


def evaluate(run: Run) -> dict[str, float] | None:
    """Return the metrics of the split that is watched, if this epoch is one after which it is evaluated."""
    if not run.evaluates or run.watched is None:
        return None
    run.check_finite()
    # Several processes must reach the end of an evaluation together.
    check = run.interrupts.check if run.ranks.world == 1 else lambda: None
    batches = Tracked(run.data.eval_batches(run.watched), f"evaluating on {run.watched}", check)
    try:
        with judged(run.average):
            metrics = run.data.task.evaluate(run.model, cast(Batches, batches), run.phase)
    except Stopped as stop:
        # Saved in the state before the evaluation, which a resumed run repeats.
        raise stopped(run, stop.number) from None
    return run.ranks.of_first(metrics)


def record(run: Run, metrics: dict[str, float] | None) -> None:
    """End the epoch: keep the weights if they are the best, and write a line of metrics.jsonl and of the terminal."""
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


def stopped(run: Run, number: int) -> Stopped:
    """Save and report a run that the signal `number` stops; return the exception to raise."""
    progress = run.progress
    run.save()
    run.checkpoints.wait()
    run.log.close(finished=False)
    leave(run)
    best = "" if progress.best is None else f"; best {run.config.best_metric} so far {progress.best:.4f}"
    run.interrupts.stage = (
        f"training. Saved at step {progress.step:,} of {run.steps:,}{best}. To continue: "
        f"python train.py --resume {run.folder}"
    )
    return Stopped(number)


def show(run: Run, bar: Bar, rate: float) -> None:
    """Show the progress; the losses, whose reading waits for the device, are read only if they are shown."""
    if bar.due():
        epoch = f"epoch {run.progress.epoch + 1}/{run.config.train.epochs}"
        bar.show(run.progress.step, epoch, f"{shown(run.means.values())}  {rate:,.0f} events/s")


def shown(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items() if name != "grad_norm")


def work(options, interrupts: Interrupts) -> None:
    if options.resume:
        check_run(options.resume)
        config = load_config(options.resume / "config.yaml", options.overrides)
        train(absolute_paths(config), options.resume, True, interrupts=interrupts)
        return
    if options.update:
        config = absolute_paths(updated_config(options.update, options.overrides))
        train(config, options.run, False, interrupts=interrupts, update=options.update)
        return
    config = absolute_paths(load_config(options.config, options.overrides))
    if options.auto:
        train(config, options.run, None, interrupts=interrupts)
    elif options.plan:
        from training.planning.rehearsal import tell_plan

        tell_plan(config, options.gpu_memory, interrupts)
    elif options.dry_run:
        from training.planning.rehearsal import rehearse

        rehearse(config, interrupts)
    else:
        train(config, options.run, False, options.init_from, interrupts)


def main(arguments: list[str] | None = None) -> int:
    options = train_options(__doc__, arguments)
    return guarded(lambda interrupts: work(options, interrupts), options.quiet)


if __name__ == "__main__":
    explain_faults()
    sys.exit(main())
