"""Update a run with new events: `train.py --update RUN` makes a new run, which continues from the weights of RUN.

Its tables have the rows and the optimiser's moments of all items and feature values of RUN, and new rows for new items
and values. Before training, RUN is evaluated on the new events. lineage.jsonl has a line for each generation.
"""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cli.terminal import terminal
from data.errors import ConfigError, UserError
from data.types import DataError, Dataset
from data.update import NewEvents, judging_splits, missing_events, new_events, with_left_out
from data.vocabulary import index_of
from models.hstu import SequenceModel
from training.average import WeightAverage
from training.changes import check_updated
from training.checkpoints import Progress, checkpoints
from training.config import RunConfig, load_config
from training.folder import LINEAGE, access, check_run, read_manifest, read_regular, with_nulls
from training.optimizer import state_dtype
from training.ranks.processes import Ranks
from training.run import Data, confined, load_data, open_data, open_weights, trained_model
from training.saved import CheckpointError, load_folder
from training.vocabulary import Known
from training.warm_start import Places
from training.weights import TABLE, load_weights


@dataclass
class Update:
    """An update whose previous run has been opened and evaluated on the new events.

    folder, known, weights, source: the previous run. before: its data. data: those of the update. lines: the
    lines of lineage.jsonl; the last one describes the update and has no run id yet.
    """

    folder: Path
    known: Known
    weights: dict[str, torch.Tensor]
    source: Path
    before: Data
    data: Data
    lines: list[dict]

    def lineage(self, run: str) -> str:
        """Return the content of lineage.jsonl; run: the id of the updated run."""
        return "".join(json.dumps(line) + "\n" for line in [*self.lines[:-1], self.lines[-1] | {"run": run}])


def updated_config(folder: Path, overrides: list[str]) -> RunConfig:
    """Return the configuration of an update of the run in `folder`; ConfigError if it changes the model."""
    check_run(folder)
    before, config = (load_config(folder / "config.yaml", options) for options in ([], overrides))
    check_updated(before, config, folder)
    if config.parallel.distributed_step or config.parallel.context > 1:
        raise ConfigError(
            "--update runs in one process: parallel.data=1 parallel.context=1 parallel.embedding=replicated"
        )
    length = {"epochs": config.train.update.epochs, "steps": None}
    return config.model_copy(update={"train": config.train.model_copy(update=length)})


def begin_update(folder: Path, config: RunConfig) -> Update:
    """Open the run in `folder` and the data of its update, and evaluate the run on the new events.

    DataError unless the data have new events and all events of the run, except those of removed users and items, and
    those that `data.where` leaves out.
    """
    config_before, known, weights, source, _ = open_weights(folder, [])
    # Devices and options of evaluation are those of the update.
    options: dict[str, Any] = {name: getattr(config, name) for name in ("device", "threads", "eval", "parallel")}
    config_before = config_before.model_copy(update=options)
    # Without `events`: the previous run, if it is an update too, is opened with all of its data.
    before = open_data(config_before, trained_on=replace(known, events=None), rest=True)
    data, events = open_all_events(config, before, extends=known.vocabulary)
    dataset, events_before = data.dataset, before.dataset.num_events
    data = confined(data, events)
    for note in events.notes():
        terminal.say(note)
    first = {"generation": 0, "run": read_manifest(folder)["run"], "events": events_before}
    lines = read_lineage(folder) or [first | {"fingerprint": known.fingerprint}]
    new = dataset.items[events.new]
    line = {
        "generation": lines[-1]["generation"] + 1,
        "run": None,
        "events": dataset.num_events,
        "fingerprint": dataset.fingerprint,
        "after": events.after,
        "new_events": len(events.new),
        "new_events_of_new_items": int((index_of(dataset.item_ids, known.vocabulary.item_ids) < 0)[new].sum()),
        "late_events": len(events.late),
        "new_items": dataset.num_items - len(known.vocabulary.item_ids),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    judged = new_data(config_before.model_copy(update={"data": config.data}), known, before)
    line["judged"] = None  # if no user has a new event with a history
    if judged.splits.test is not None:
        model = trained_model(judged.config, known, weights, source)
        metrics = line["judged"] = judged.task.evaluate(model, judged.eval_batches("test"))
        headline = "  ".join(f"{name} {metrics[name]:.4f}" for name in judged.task.headline)
        terminal.say(f"{folder} on the {len(events.new):,} new events, before training: {headline}")
    return Update(folder, known, weights, source, before, data, [*lines, with_nulls(line)])


def open_all_events(config: RunConfig, before: Data, **options: Any) -> tuple[Data, NewEvents]:
    """Open data that have all events of a run and new ones; return the data and their new events.

    before: the data of the run. options: further arguments of `open_data`. If events of the run are missing, the error
    is a DataError that says so, even if `open_data` raises another error, which may be a consequence: that items of a
    features file are in no event, or that no user has two events. `data.where` may leave out some events of the run,
    but not all.
    """
    run_events = before.dataset, before.splits.train_end

    def compared(dataset: Dataset) -> NewEvents:
        events = new_events(dataset, *run_events)
        error = missing_events(events, dataset, before.dataset)
        if error is not None and config.data.where is not None:
            all_rows = new_events(load_all_rows(config, error, options.get("ranks")), *run_events)
            if all_rows.num_present and not events.num_present:
                raise DataError(f"{dataset.name}: data.where leaves out all events of the run that the source has")
            events = with_left_out(events, all_rows)
            error = missing_events(events, dataset, before.dataset)
        if error is not None:
            raise error
        return events

    try:
        data = open_data(config, **options)
    except UserError as error:
        plain = {"features": None, "min_user_events": 1, "min_item_events": 1}
        try:
            dataset = load_data(config, cache_dir=None, partitions=None, **plain)
        except UserError:
            raise error from None
        compared(dataset)
        raise
    return data, compared(data.dataset)


def load_all_rows(config: RunConfig, missing: DataError, ranks: Ranks | None) -> Dataset:
    """Return users, items and times of all good rows of the source, also of those that `data.where` leaves out.

    ranks: the ranks that load them together. If the rows cannot be read, the error is `missing` with the reason.
    """
    columns = config.data.columns
    others: dict[str, Any] = {"where": None, "features": None, "min_user_events": 1, "min_item_events": 1}
    others |= {"on_bad_row": "drop", "bad_rows_limit": 1.0, "duplicates": "keep"}
    others["columns"] = columns and columns.model_copy(update={"action": None, "action_codes": None})
    if ranks is not None and not ranks.first:
        ranks.broadcast(None)
    try:
        return load_data(config, **others)
    except DataError as error:
        raise DataError(
            f"{missing}; perhaps data.where leaves them out: that can be checked only in raw files, and reading them "
            f"without data.where failed: {error}"
        ) from None
    finally:
        if ranks is not None and ranks.first:
            ranks.broadcast(None)


def new_data(config: RunConfig, known: Known, before: Data, ranks: Ranks | None = None) -> Data:
    """Return the data of `config` with a run's vocabulary; the test split has the events that are new to the run.

    before: the data of the run. ranks: the ranks that evaluate together.
    """
    data, events = open_all_events(config, before, vocabulary=known.vocabulary, ranks=ranks)
    options: dict[str, Any] = {"targets": config.data.targets, "same_time": config.eval.same_time}
    options |= {"max_seq_len": config.model.max_seq_len, "layout": data.task.layout}
    splits = judging_splits(data.dataset, data.splits, events, **options)
    return replace(data, splits=splits)


@torch.no_grad()
def inherit(
    update: Update, model: SequenceModel, optimizer: torch.optim.Optimizer, average: WeightAverage | None
) -> None:
    """Copy the final weights, averages and optimiser's moments of the previous run into the new model and optimiser.

    Rows of new items keep their initial values or, if items have features, are zero, so that these items start with
    the representation of their features.
    """
    from training import dcp

    last = checkpoints(update.folder)[-1:]
    if not last:
        raise CheckpointError(f"{update.folder}: no checkpoint with the optimiser's moments")
    Progress.of(load_folder(last[0], checked=slice(None))[1], last[0])  # raises for checkpoints of other versions
    vocabulary = update.data.vocabulary
    places = Places.of(vocabulary, update.known.vocabulary)
    forms = {name: form for name, form in dcp.saved_tensors(last[0]).items() if not name.startswith("random.")}
    saved = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in forms.items()}
    dcp.read_tensors(last[0], saved)
    weights = averages = update.weights
    if update.source.name != "best":  # `averages` are from the last checkpoint, which also has the weights of training
        weights = {name: saved[f"model.{name}"] for name in averages}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if vocabulary.features is not None and vocabulary.features.trained is not None and TABLE in state:
        state[TABLE].zero_()

    def fill(name: str, new: torch.Tensor, old: torch.Tensor | None) -> None:
        if old is None or not places.fill(name, new, old):
            raise CheckpointError(f"{update.source}: belongs to another model, {name} does not fit")

    for name, value in state.items():
        fill(name, value, weights.get(name))
    load_weights(model, state, update.source)
    if average is not None:
        average.take_from_model()
    names = {id(p): name for name, p in model.named_parameters()}
    for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        name = names[id(p)]
        if average is not None:
            fill(name, average.averages[number], averages[name])
        if f"optimizer.{name}.step" in saved:
            moments = {key: torch.zeros_like(p, dtype=state_dtype(p)) for key in ("exp_avg", "exp_avg_sq")}
            for key, moment in moments.items():
                fill(name, moment, saved.get(f"optimizer.{name}.{key}"))
            optimizer.state[p] = {"step": saved[f"optimizer.{name}.step"].to(p.device), **moments}
    known, total = len(places.items[0]), len(vocabulary.item_ids)
    new_items = int((index_of(vocabulary.item_ids, update.known.vocabulary.item_ids) < 0).sum())
    idle = total - known - new_items  # known items of a file of features, with rows of zeros in both runs
    without = f", {idle:,} have no training event yet" if idle else ""
    terminal.say(f"{update.source}: {known:,} of {total:,} items keep their rows, {new_items:,} are new{without}")


def read_lineage(folder: Path) -> list[dict]:
    """Read a run's lineage.jsonl, or return [] if there is none; CheckpointError if it is damaged."""
    path = folder / LINEAGE
    if not path.exists():
        return []
    with access(path, "read"):
        text = read_regular(path)
    try:
        lines = [json.loads(line) for line in text.splitlines()]
        if not lines or not all(isinstance(line["generation"], int) and isinstance(line["run"], str) for line in lines):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{path}: damaged, expected a line of JSON for each generation") from None
    return lines
