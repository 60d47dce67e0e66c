"""Train the run that a YAML file describes, evaluate it and write a report.

    python train.py configs/synthetic-hstu.yaml [key=value ...]   a new run, under run_dir/name/
    python train.py --resume RUN [key=value ...] [--override]     continue after an interruption, or with more epochs
    python train.py CONFIG --init-from RUN [key=value ...]        begin with the weights of another run
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

import json
import math
import resource
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import cast

import torch

from cli.interrupt import Interrupts, Stopped
from cli.program import guarded
from cli.terminal import Bar, duration, terminal
from data.batches import Batches
from data.errors import ConfigError
from training.average import WeightAverage
from training.best import keep_best, take_over_best
from training.checkpoint import (
    Progress,
    checkpoints,
    last_facts,
    load_checkpoint,
    not_finite,
    save_checkpoint,
    set_aside_damaged,
    training_state,
)
from training.config import RunConfig, as_yaml, load_config
from training.ending import finish, leave
from training.folder import MANIFEST, check_run, claimed, new_manifest, write_file
from training.monitor import Means, MetricsLog, explain_faults
from training.optimizer import bytes_in_training
from training.ranks.processes import NoLog, Ranks
from training.ranks.saving import Saver
from training.ranks.tables import sharded_table
from training.run import (
    Data,
    Tracked,
    TrainingError,
    absolute_paths,
    build_model,
    changes,
    check_of_this_run,
    check_same_run,
    new_folder,
    only_these_change,
    open_data,
    warm_start,
    was_saved,
    within_budget,
)
from training.step import build_step, phase_at, set_lr, train_batches
from training.tracking import check_tracking, open_tracker
from training.vocabulary import save_vocabulary

REHEARSED = 3  # steps of a dry run that are timed


def train(
    config: RunConfig,
    folder: Path | None,
    resume: bool | None,
    override: bool = False,
    init_from: Path | None = None,
    interrupts: Interrupts | None = None,
    named: tuple[str, ...] = (),
) -> None:
    """Do the whole run in `folder`, which this process claims; None: in a new folder below run_dir.

    resume: continue the run in the folder; None: if there is one, from its newest intact checkpoint. override: even
    with a configuration that is not the checkpoint's.
    named: keys that the command line changes, which are accepted. init_from: another run's folder, whose weights a new
    run starts with. Raises Stopped when a signal arrived; everything is saved then.
    """
    ranks, interrupts = Ranks(config), interrupts or Interrupts()
    folder, auto, unnamed = ranks.of_first(folder or new_folder(config)), resume is None, folder is None
    if resume is None:
        resume = ranks.of_first(folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()))
    with claimed(folder, new=not resume, another=unnamed) if ranks.first else nullcontext(folder) as folder:
        if auto and ranks.first:
            for damaged in set_aside_damaged(folder):
                terminal.say(f"{damaged}: not whole, set aside")
        folder = ranks.of_first(folder)
        train_claimed(config, folder, resume, override, init_from, ranks, interrupts, named)


def train_claimed(
    config: RunConfig,
    folder: Path,
    resume: bool,
    override: bool,
    init_from: Path | None,
    ranks: Ranks,
    interrupts: Interrupts,
    named: tuple[str, ...],
) -> None:
    """Train in a claimed folder with one or several processes, of which the first writes."""
    terminal.quiet |= not ranks.first
    interrupts.stage = f"preparing the data. To {'go on' if resume else 'begin'}: the same command again"
    saved = resume and was_saved(folder)
    check_tracking(config)
    trained_on = str(last_facts(folder)[0].get("fingerprint")) if saved else None
    data = open_data(config, trained_on=trained_on, ranks=ranks)
    config = data.config
    torch.manual_seed(config.seed)
    model = build_model(config, data.vocabulary, data.device, ranks)
    if init_from is not None:
        warm_start(model, config, data.vocabulary, init_from)
    table = sharded_table(model)
    others = [] if table is None else [table.weight]
    average = WeightAverage(model, config.train.ema_decay, others) if config.train.ema_decay else None
    optimizer, step = build_step(config, model, data.device, average, ranks)
    batches = train_batches(config, data, ranks)
    config = within_budget(config, len(batches))
    steps = config.train.epochs * len(batches)
    watched = next((name for name in ("valid", "test") if getattr(data.splits, name) is not None), None)
    if config.eval.patience and watched != "valid":
        raise ConfigError("eval.patience: there is no validation split to stop by in these data")
    progress = Progress(run="", fingerprint=data.dataset.fingerprint)
    saver = Saver(folder, model, optimizer, average, ranks) if ranks.engine else None
    if saved:
        if saver is None:
            progress = load_checkpoint(folder, model, optimizer, average)
        else:
            progress = saver.load(checkpoints(folder)[-1])
        check_of_this_run(progress.run, folder, folder / "checkpoints")
        if changed := changes(progress.config, config, folder / "checkpoints") if named else []:
            override = override or all(line.startswith(named) for line in changed)
        if not override:
            check_same_run(progress, config, len(batches), folder)
    progress.config = config.model_dump(mode="json")
    ranks.of_first(None)  # all have read before the first one writes
    # The configuration comes first: a run that is killed behind it can be resumed.
    if ranks.first and (not resume or override or not (folder / "config.yaml").exists()):
        write_file(folder / "config.yaml", as_yaml(config))
    if ranks.first and not saved:
        manifest = new_manifest()
        write_file(folder / MANIFEST, json.dumps(manifest, indent=1))
        save_vocabulary(folder, data.dataset, data.vocabulary)
        progress.run = manifest["run"]
    log: MetricsLog | NoLog = NoLog(progress.records)
    if ranks.first:
        tracker = open_tracker(config, folder, progress.run, progress.step)
        log = MetricsLog(folder, progress.records, tracker)
    if log.lost:
        terminal.say("metrics.jsonl had been changed: its lines are restored from the checkpoint")
    introduce(config, data, model, len(batches), folder)
    started, saved_at = time.monotonic() - progress.seconds, time.monotonic()
    saved_place = (progress.epoch, progress.batch) if saved else None
    means = Means(data.device, progress.losses)

    def diverged(what: str) -> TrainingError:
        if saver is not None:
            saver.wait()
        newest = ranks.of_first([f"; {last} is kept" for last in checkpoints(folder)[-1:]] if ranks.first else None)
        return TrainingError(f"{what}: try a lower train.lr or train.clip_norm{''.join(newest)}")

    def check_finite() -> None:
        state = training_state(model, optimizer, average) if saver is None else saver.tensors()
        losses = ((f"the mean of {name}", total) for name, total in means.sums.items())
        wrong = ranks.of_all(not_finite(chain(state, losses)))
        for name in filter(None, wrong):
            raise diverged(f"{name} is not finite after step {progress.step:,}")

    def save(again: bool = False, final: bool = False) -> None:
        nonlocal saved_place, saved_at
        place = progress.epoch, progress.batch
        if place == saved_place and not again and not (final and saver is not None):
            return
        check_finite()
        saved_place = place
        progress.losses, progress.seconds, progress.records = means.state(), time.monotonic() - started, log.records
        if saver is not None:
            saver.save(progress, final=final)
        elif ranks.first:
            with judged(average):
                save_checkpoint(folder, model, optimizer, progress, average)
        saved_at = time.monotonic()

    def agreed() -> list[int]:
        due = ranks.first and time.monotonic() - saved_at >= config.train.checkpoint_seconds
        return ranks.greatest(int(due), interrupts.signal)

    def check() -> None:
        if ranks.world == 1:  # several processes must reach the end of an evaluation together
            interrupts.check()

    def stopped(number: int) -> Stopped:
        save()
        if saver is not None:
            saver.wait()
        log.close(finished=False)
        if ranks.first:
            leave(config, folder, model, data, progress)
        best = "" if progress.best is None else f"; best {config.best_metric} so far {progress.best:.4f}"
        interrupts.stage = (
            f"training. Saved at step {progress.step:,} of {steps:,}{best}. To continue: "
            f"python train.py --resume {folder}"
        )
        return Stopped(number)

    with interrupts.noted(), terminal.bar(steps, progress.step, unit="steps") as bar:
        # A run with lines of metrics has a checkpoint; if there is none, it or the lines were lost.
        save(again=override)
        if ranks.first:
            take_over_best(config, folder, progress)
        while progress.epoch < config.train.epochs:
            if config.eval.patience and progress.stale >= config.eval.patience:
                break
            model.train()
            began, before, lr = time.monotonic(), progress.events, 0.0
            for batch in batches.epoch(progress.epoch, start=progress.batch):
                lr = set_lr(config, optimizer, progress.step, steps)
                means.add(step(replace(batch, phase=phase_at(config, progress.step))))
                progress.step += 1
                progress.batch += 1
                progress.events += batch.num_tokens if batch.whole is None else batch.whole.tokens
                show(bar, config, progress, means, (progress.events - before) / (time.monotonic() - began))
                if saver is not None:
                    saver.poll()
                due, signal = agreed()
                if signal:
                    raise stopped(signal)
                if due and progress.batch < len(batches):  # after the last one the evaluation is saved, too
                    save()
            losses = means.values()
            for name in ranks.of_first([name for name, value in losses.items() if not math.isfinite(value)]):
                raise diverged(f"the {name} is {losses[name]} in epoch {progress.epoch + 1}")
            rates = {"lr": lr, "events_per_second": (progress.events - before) / (time.monotonic() - began)}
            record = {"epoch": progress.epoch + 1, "step": progress.step, **losses, "split": watched}
            evaluated = watched and config.eval.every and (progress.epoch + 1) % config.eval.every == 0
            if evaluated and watched is not None:
                check_finite()
                phase = phase_at(config, progress.step)
                try:
                    with judged(average):
                        batches_shown = Tracked(data.eval_batches(watched), f"evaluating on {watched}", check)
                        metrics = data.task.evaluate(model, cast(Batches, batches_shown), phase)
                except Stopped as stop:
                    # Saved in the state before the evaluation, which a resumed run repeats.
                    raise stopped(stop.number) from None
                metrics = ranks.of_first(metrics)
            progress.epoch, progress.batch, means = progress.epoch + 1, 0, Means(data.device, {})
            summary = f"epoch {progress.epoch:>4}  {shown(losses)}"
            if evaluated:
                # An earlier phase trains another model than the one that is judged: nothing is chosen in it.
                if watched == "valid" and phase == phase_at(config, math.inf):
                    with judged(average):
                        keep_best(config, folder if ranks.first else None, model, progress, metrics, saver)
                record |= metrics
                summary += f"  {watched} " + shown({name: metrics[name] for name in data.task.headline})
            terminal.say(summary)
            log.write(record, time.monotonic() - started, losses | rates)
            last = progress.epoch == config.train.epochs
            if last or agreed()[0]:
                save()
        save(final=True)
        interrupts.stage = f"evaluating; all epochs are saved. To evaluate: python train.py --resume {folder}"
    log.close(finished=True)
    ranks.of_first(None)  # the first process has written its files
    if ranks.first or ranks.engine:
        finish(config, folder, model, data, progress, watched)


def introduce(config: RunConfig, data: Data, model, steps: int, folder: Path | str) -> None:
    """Print the data, the model and the known sizes before training begins."""
    for note in data.dataset.notes:
        terminal.say(f"data: {note}")
    table = sharded_table(model)
    weights = [*model.parameters(), *([] if table is None else [table.weight])]
    size = sum(bytes_in_training(weight, averaged=config.train.ema_decay is not None) for weight in weights)
    epochs = config.train.epochs
    terminal.say(
        f"{data.dataset.name}: {data.dataset.num_users:,} users, {data.dataset.num_items:,} items, "
        f"{data.dataset.num_events:,} events; {model.num_parameters:,} parameters; {data.device}; run folder {folder}"
    )
    terminal.say(
        f"{epochs:,} epoch{'s'[: epochs > 1]} of {steps:,} step{'s'[: steps > 1]}; weights, gradients and moments take "
        f"{size / 2**20:,.1f} MiB, plus the tensors of a step (--dry-run measures these and the time)"
    )


def show(bar: Bar, config: RunConfig, progress: Progress, means: Means, rate: float) -> None:
    """Show the progress; the losses, whose reading waits for the device, are read only if they are shown."""
    if bar.due():
        epoch = f"epoch {progress.epoch + 1}/{config.train.epochs}"
        bar.show(progress.step, epoch, f"{shown(means.values())}  {rate:,.0f} events/s")


def rehearse(config: RunConfig, interrupts: Interrupts) -> None:
    """Do a dry run: prepare the data, make and measure a few steps, save nothing."""
    interrupts.stage = "rehearsing; nothing was written but prepared data"
    ranks = Ranks(config)
    terminal.quiet |= not ranks.first
    data = open_data(config)
    config = data.config
    torch.manual_seed(config.seed)
    model = build_model(config, data.vocabulary, data.device, ranks)
    _, step = build_step(config, model, data.device, ranks=ranks)
    batches = train_batches(config, data, ranks)
    config = within_budget(config, len(batches))
    introduce(config, data, model, len(batches), "none, this is a dry run")
    seconds = []
    for number, batch in enumerate(batches.epoch(0)):
        if number > REHEARSED:
            break
        began = time.monotonic()
        step(replace(batch, phase=phase_at(config, 0)))["loss"].item()
        seconds.append(time.monotonic() - began)
    typical = sum(seconds[1:] or seconds) / len(seconds[1:] or seconds)  # the first one also compiles
    if data.device.type == "cuda":
        memory = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB of GPU memory"
    else:
        memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of memory, including Python's"
    terminal.say(
        f"A step takes about {duration(typical)}, an epoch {duration(typical * len(batches))}, the run "
        f"{duration(typical * len(batches) * config.train.epochs)} without evaluations, and at most {memory}"
    )


def tell_plan(config: RunConfig, gpu_gib: float | None, interrupts: Interrupts) -> None:
    """Print the predicted memory of each GPU; only the data are prepared.

    gpu_gib: GiB of a GPU's memory; absent, that of this machine's first GPU.
    """
    # Importing torchrec's planner takes a second.
    from training.planning.plan import describe, memory_of_a_gpu, plan

    interrupts.stage = "planning; nothing was written but prepared data"
    data = open_data(config, device=torch.device("cpu"))
    gpu_bytes = memory_of_a_gpu() if gpu_gib is None else int(gpu_gib * 2**30)
    for line in describe(plan(data.config, data, build_step, gpu_bytes), data.config, gpu_bytes):
        terminal.say(line)


def judged(average: WeightAverage | None):
    """Give the model the weights that the run is judged with, inside."""
    return nullcontext() if average is None else average.in_the_model()


def shown(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items() if name != "grad_norm")


def work(options, interrupts: Interrupts) -> None:
    if options.resume:
        check_run(options.resume)
        config = load_config(options.resume / "config.yaml", options.overrides)
        # Changes on the command line are accepted; changes only in config.yaml need --override.
        override = options.override or only_these_change(options.resume, options.overrides)
        train(absolute_paths(config), options.resume, True, override, interrupts=interrupts)
        return
    config = absolute_paths(load_config(options.config, options.overrides))
    if options.auto:
        named = tuple(override.partition("=")[0] for override in options.overrides)
        train(config, options.run, None, interrupts=interrupts, named=named)
    elif options.plan:
        tell_plan(config, options.gpu_memory, interrupts)
    elif options.dry_run:
        rehearse(config, interrupts)
    else:
        train(config, options.run, False, False, options.init_from, interrupts)


def main(arguments: list[str] | None = None) -> int:
    options = train_options(__doc__, arguments)
    return guarded(lambda interrupts: work(options, interrupts), options.quiet)


if __name__ == "__main__":
    explain_faults()
    sys.exit(main())
