"""Set up a run: open its data, build its model, optimiser, step and batches, and begin or resume it in its folder."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch

from cli.interrupt import Interrupts
from cli.terminal import terminal
from data.batches import Batches
from data.errors import ConfigError
from models.hstu import SequenceModel
from training import advice
from training.average import WeightAverage
from training.changes import changes, check_resumed, moved_data, stored_config
from training.checkpoints import Checkpoints, Progress, checkpoints, last_progress
from training.config import RunConfig
from training.graph import Step
from training.monitor import Means, MetricsLog
from training.optimizer import bytes_in_training
from training.ranks.processes import NoLog, Ranks
from training.ranks.tables import sharded_table
from training.run import (
    Data,
    TrainingError,
    build_model,
    check_of_this_run,
    check_place,
    open_data,
    was_saved,
)
from training.saved import CheckpointError, not_finite
from training.step import build_step, phase_at, train_batches
from training.tracking import check_tracking
from training.update import Update, begin_update, inherit
from training.vocabulary import Known, load_vocabulary
from training.warm_start import warm_start
from training.writer import NoWriter, Writer


@dataclass
class Parts:
    """The objects that training needs, also for a dry run; config: with all values that depend on the data."""

    config: RunConfig
    data: Data
    model: SequenceModel
    optimizer: torch.optim.Optimizer
    step: Step
    average: WeightAverage | None
    batches: Batches


def set_up(
    config: RunConfig,
    ranks: Ranks,
    trained_on: Known | None = None,
    init_from: Path | None = None,
    moved: Sequence[str] = (),
    update: Update | None = None,
) -> Parts:
    """Open the data and build the model, the step and the batches.

    trained_on, moved: see `open_data`. init_from: the folder of a run whose weights to start with. update: the update
    to continue; its data are already open.
    """
    data = open_data(config, trained_on=trained_on, moved=moved, ranks=ranks) if update is None else update.data
    config = data.config
    for line in advice.data_warnings(config, data.dataset):
        terminal.say(f"warning: {line}")
    torch.manual_seed(config.seed)
    model = build_model(config, data.vocabulary, data.device, ranks)
    if init_from is not None:
        warm_start(model, config, data.vocabulary, init_from)
    table = sharded_table(model)
    others = [] if table is None else [table.weight]
    average = WeightAverage(model, config.train.ema_decay, others) if config.train.ema_decay else None
    optimizer, step = build_step(config, model, data.device, average, ranks)
    if update is not None:
        inherit(update, model, optimizer, average)
    batches = train_batches(config, data, ranks)
    return Parts(within_budget(config, len(batches)), data, model, optimizer, step, average, batches)


@dataclass
class TrainingRun(Parts):
    """The state of a run in training; every rank has one and makes the same calls.

    watched      the split to evaluate after epochs, or None
    means        mean losses of the current epoch
    losses       mean losses of the last epoch
    rates        learning rate and speed of the last epoch
    saved_place  (epoch, batch) of the last checkpoint
    changed      whether the checkpoint and the best weights have another configuration than this run
    """

    folder: Path
    ranks: Ranks
    interrupts: Interrupts
    progress: Progress
    checkpoints: Checkpoints
    writer: Writer
    log: MetricsLog | NoLog
    means: Means
    watched: str | None
    started: float
    saved_place: tuple[int, int] | None
    changed: bool
    losses: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return self.config.train.epochs * len(self.batches)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def last_phase(self) -> bool:
        """Whether the last phase of training has begun; the best weights are chosen only among those of this phase."""
        return self.phase == phase_at(self.config, math.inf)

    @property
    def phase(self) -> int:
        """The training phase of the next step; an update is in the last phase throughout."""
        return phase_at(self.config, self.progress.step if self.data.events is None else math.inf)

    @property
    def finished(self) -> bool:
        patience = self.config.eval.patience
        return self.progress.epoch >= self.config.train.epochs or bool(patience and self.progress.stale >= patience)

    @property
    def evaluates(self) -> bool:
        """Whether the weights are evaluated after this epoch."""
        every = self.config.eval.every
        return self.watched is not None and bool(every) and (self.progress.epoch + 1) % every == 0

    def begin(self) -> None:
        """Save the first checkpoint: every run with metrics has one, so a missing checkpoint can be noticed."""
        self.save(again=self.changed)
        self.writer.update_best_facts(self.config, self.progress)
        self.writer.write_config(self.config)  # an update writes it only now, see Writer.begin_update

    def agree(self) -> tuple[int, int]:
        """Return (whether a checkpoint is due, the number of the received signal or 0), the same on all ranks."""
        due, signal = self.ranks.greatest(int(self.checkpoints.due), self.interrupts.signal)
        return due, signal

    def save(self, again: bool = False) -> None:
        """Save a checkpoint unless the last one has the same epoch and batch; again: save it anyway."""
        place = self.progress.epoch, self.progress.batch
        if place == self.saved_place and not again:
            return
        self.check_finite()
        self.saved_place, progress = place, self.progress
        progress.losses, progress.seconds, progress.records = self.means.state(), self.seconds, self.log.records
        self.checkpoints.save(progress)

    def save_when_due(self) -> None:
        """Save a checkpoint at the end of an epoch if it is due or training is finished."""
        if self.finished or self.agree()[0]:
            self.save()

    def check_finite(self) -> None:
        """Raise TrainingError if a tensor to be saved is not finite."""
        losses = ((f"the mean of {name}", total) for name, total in self.means.sums.items())
        for name in filter(None, self.ranks.all_gather(not_finite(chain(self.checkpoints.tensors(), losses)))):
            raise self.diverged(f"{name} is not finite after step {self.progress.step:,}")

    def diverged(self, what: str) -> TrainingError:
        self.checkpoints.wait()
        ending = self.ranks.broadcast([f"; {last} is kept" for last in checkpoints(self.folder)[-1:]])
        return TrainingError(f"{what}: try a lower train.lr, or set train.clip_norm{''.join(ending)}")


@contextmanager
def open_or_resume(
    config: RunConfig,
    folder: Path | None,
    resume: bool | None,
    init_from: Path | None,
    interrupts: Interrupts,
    update: Path | None = None,
) -> Iterator[TrainingRun]:
    """Claim the folder and yield a new or resumed run in it; see `training.loop.train` for the options."""
    ranks = Ranks(config)
    terminal.quiet |= not ranks.first
    writer = Writer() if ranks.first else NoWriter()
    folder, auto, unnamed = ranks.broadcast(folder or new_folder(config)), resume is None, folder is None
    if resume is None:
        resume = ranks.broadcast(folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()))
    with writer.claim(folder, new=not resume, another=unnamed) as folder:
        for damaged in writer.set_aside_damaged() if auto else []:
            terminal.say(f"{damaged}: damaged checkpoint, renamed to damaged-*")
        yield _opened(config, ranks.broadcast(folder), resume, init_from, ranks, interrupts, writer, update)


def _opened(
    config: RunConfig,
    folder: Path,
    resume: bool,
    init_from: Path | None,
    ranks: Ranks,
    interrupts: Interrupts,
    writer: Writer,
    update: Path | None,
) -> TrainingRun:
    interrupts.stage = f"preparing the data. To {'continue' if resume else 'start'}, give the same command again"
    trained_on, moved, before = None, [], None
    if saved := resume and was_saved(folder):
        last = last_progress(folder)
        check_resumed(last, config, folder, opened=False)
        trained_on, before = load_vocabulary(folder), stored_config(last.config, folder / "checkpoints")
        if trained_on.fingerprint != last.fingerprint:
            raise CheckpointError(f"{folder}: the checkpoint and vocabulary/ have different training data")
        moved = moved_data(before, config)
    check_tracking(config)
    begun = None if update is None else begin_update(update, config)
    parts = set_up(config, ranks, trained_on, init_from, moved, begun)
    config, data, batches = parts.config, parts.data, parts.batches
    watched = next((name for name in ("valid", "test") if getattr(data.splits, name) is not None), None)
    if watched == "valid" and config.eval.every and data.splits.valid is not None:
        data.task.check_metric(data.dataset, data.splits.valid)
    if config.eval.patience and watched != "valid":
        raise ConfigError("eval.patience: there is no validation split for these data")
    table, seconds = sharded_table(parts.model), config.train.checkpoint_seconds
    saver = Checkpoints(folder, parts.model, parts.optimizer, parts.average, ranks, table, seconds)
    progress = Progress(run="", fingerprint=data.dataset.fingerprint)
    if saved:
        progress = saver.load(config.seed)
        check_of_this_run(progress.run, folder, folder / "checkpoints")
        check_resumed(progress, config, folder, opened=True)
        check_place(progress, len(batches), folder)
        progress.best, progress.stale = ranks.broadcast(writer.best_by_metric(config, progress))
    progress.config = config.model_dump(mode="json")
    ranks.broadcast(None)  # the first rank writes only after all ranks have read
    if begun is None:
        writer.begin(config, data, progress, new=not saved)
    else:
        writer.begin_update(data, progress, begun.lineage)
    log = writer.open_log(config, progress)
    if log.lost:
        terminal.say("metrics.jsonl was changed; its lines are restored from the checkpoint")
    print_summary(config, data, parts.model, len(batches), folder)
    return TrainingRun(
        **vars(parts),
        folder=folder,
        ranks=ranks,
        interrupts=interrupts,
        progress=progress,
        checkpoints=saver,
        writer=writer,
        log=log,
        means=Means(data.device, progress.losses),
        watched=watched,
        started=time.monotonic() - progress.seconds,
        saved_place=(progress.epoch, progress.batch) if saved else None,
        changed=before is not None and any(not change.free for change in changes(before, config)),
    )


def print_summary(config: RunConfig, data: Data, model, steps: int, folder: Path | str) -> None:
    """Print the sizes of the data, the model and the run before training begins."""
    for note in data.dataset.notes:
        terminal.say(f"data: {note}")
    table = sharded_table(model)
    weights = [*model.parameters(), *([] if table is None else [table.weight])]
    averaged = config.train.ema_decay is not None
    size = sum(bytes_in_training(weight, averaged=averaged) for weight in weights)
    tensors = "weights, gradients, moments and averages" if averaged else "weights, gradients and moments"
    epochs = config.train.epochs
    terminal.say(
        f"{data.dataset.name}: {data.dataset.num_users:,} users, {data.dataset.num_items:,} items, "
        f"{data.dataset.num_events:,} events; {model.num_parameters:,} parameters; {data.device}; run folder {folder}"
    )
    terminal.say(
        f"{epochs:,} epoch{'s'[: epochs > 1]} of {steps:,} step{'s'[: steps > 1]}; {tensors} take "
        f"{size / 2**20:,.1f} MiB, plus the tensors of a step"
    )
    for line in advice.step_advice(config, epochs * steps) if data.events is None else []:
        terminal.say(f"warning: {line}")


def new_folder(config: RunConfig) -> Path:
    """Return the path of a new run's folder in run_dir/name, named by the current time; it may exist already."""
    return Path(config.run_dir) / config.name / time.strftime("%Y%m%d-%H%M%S")


def within_budget(config: RunConfig, steps: int) -> RunConfig:
    """Limit train.epochs, of `steps` steps each, to the number of epochs that train.steps allows."""
    c = config.train
    if c.steps is None:
        return config
    return config.model_copy(update={"train": c.model_copy(update={"epochs": min(c.epochs, -(-c.steps // steps))})})
