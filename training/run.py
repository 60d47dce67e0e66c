"""Open the data, the model and the final weights of a run, and evaluate it, for training and for eval.py."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from cli.terminal import terminal
from data.batch import Batch
from data.batches import Batches
from data.datasets import FORMATS, DataError, Dataset, OtherData, Vocabulary, load_dataset
from data.errors import ConfigError, UserError
from data.features.vocabulary import fit_features, grown, with_rows
from data.prepare import find_prepared, find_rest
from data.reading.remote import is_remote
from data.splits import Splits, repeats, target_events
from data.types import shown
from data.update import NewEvents, update_split
from data.vocabulary import index_of, united, vocabulary_of
from models.hstu import SequenceModel
from models.tasks.build import build_task
from models.tasks.contract import Task
from training.changes import RULES, changes, check_evaluated, stored_config
from training.checkpoints import Progress, checkpoints
from training.config import RunConfig, load_config
from training.folder import access, check_run, read_manifest
from training.ranks.processes import Ranks
from training.ranks.tables import ShardedTable
from training.saved import CheckpointError, exists, load_folder
from training.sizes import chosen_lines, resolve_auto, with_repeats
from training.verdict import against_baselines
from training.vocabulary import Known, load_vocabulary
from training.weights import load_slices, load_weights, saved_weights

MOST_REPEATS = 0.01  # if a larger share of targets repeat an item, eval.filter_seen=auto is `none`
MOST_THREADS = 16  # per core; more would not help, and many more cannot be started


class TrainingError(UserError):
    """Training cannot continue."""


class ProgressBatches:
    """Wrap `Batches` to show a progress bar during an epoch and to call `check` before each batch."""

    def __init__(self, batches: Batches, label: str, check: Callable[[], None] = lambda: None):
        self.batches, self.label, self.check = batches, label, check

    def __getattr__(self, name: str):
        return getattr(self.batches, name)

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        for batch in terminal.track(self.batches.epoch(epoch), len(self.batches), self.label):
            self.check()
            yield batch


@dataclass
class Data:
    """The data of a run.

    config: the configuration, with all values that depend on the data. events: the new events of an update, to which
    its training is restricted.
    """

    dataset: Dataset
    splits: Splits
    device: torch.device
    config: RunConfig
    task: Task
    vocabulary: Vocabulary
    events: NewEvents | None = None

    def batches(self, split: str, **options) -> Batches:
        return self.task.batches(self.dataset, getattr(self.splits, split), device=self.device, **options)

    def eval_batches(self, split: str) -> Batches:
        return self.batches(split, batch_size=self.config.eval.batch_size, shuffle=False, with_seen=True)


def open_device(config: RunConfig) -> torch.device:
    """Return the configured device, after setting threads and precision; ConfigError if it cannot be used."""
    kind = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch finds no GPU (make doctor reports the reason)")
    if config.threads:
        if config.threads > (most := MOST_THREADS * (os.cpu_count() or 1)):
            raise ConfigError(
                f"threads: {config.threads} on a machine of {os.cpu_count()} cores, expected at most {most}"
            )
        torch.set_num_threads(config.threads)
    if kind == "cuda":
        set_matmul_precision(config.train.matmul_precision)
    check_backends(config, torch.device(kind))
    return torch.device(kind)


def open_data(
    config: RunConfig,
    *,
    trained_on: Known | None = None,
    moved: Sequence[str] = (),
    vocabulary: Vocabulary | None = None,
    extends: Vocabulary | None = None,
    device: torch.device | None = None,
    ranks: Ranks | None = None,
    rest: bool = False,
) -> Data:
    """Open the data set of a run, its splits and its device, and replace `auto` in the configuration.

    Build and store the run with `Data.config`, which has all values that depend on the data.

    trained_on: the stored facts about the run's data; the opened data must have their fingerprint. If the source has
    changed or is missing, the prepared copy is used; with `moved` this is an error. moved: the options that name
    another source than the run's. vocabulary: the model's vocabulary, to translate other data into. extends: the
    vocabulary of an earlier run, to which these data add. device: by default that of the configuration. ranks: the
    ranks that open the data together; the first one prepares them. rest: see `find_data`.

    Examples:
        >>> sizes = ["data.synthetic={num_users: 20, num_items: 10, num_clusters: 5}", "device=cpu"]
        >>> data = open_data(load_config("configs/synthetic-hstu.yaml", sizes))
        >>> data.dataset.num_users, len(data.splits.test), data.device.type, data.config.eval.filter_seen
        (20, 20, 'cpu', 'none')
    """
    device = device or open_device(config)
    if ranks is not None and not ranks.first:
        ranks.broadcast(None)
    if vocabulary is None:
        dataset = find_data(config, trained_on, moved, rest)
    else:
        dataset = load_data(config, vocabulary=vocabulary)
    if extends is not None:
        dataset = united(dataset, extends)
    if ranks is not None and ranks.first:
        ranks.broadcast(None)
    before, config = config, for_data(resolve_auto(config, dataset), dataset)
    task = build_task(config, ranks)
    task.check_data(dataset)
    splits = task.splits(dataset)
    if config.eval.filter_seen == "auto":
        config = with_filter(config, dataset, splits)
    config = with_repeats(config)
    task = build_task(config, ranks)
    for line in chosen_lines(before, config):
        terminal.say(line)
    if trained_on is not None:
        vocabulary = trained_on.vocabulary
    if vocabulary is None:
        feature_vocabulary = (
            None
            if config.data.features is None
            else fit_features(dataset, splits.train_end, config.data.features, config.data.time_zone)
        )
        vocabulary = vocabulary_of(dataset, feature_vocabulary)
        vocabulary = vocabulary if extends is None else _extended(vocabulary, extends)
    if vocabulary.features is not None:
        dataset = with_rows(dataset, vocabulary.features)
    data = Data(dataset, splits, device, config, task, vocabulary)
    return data if trained_on is None or trained_on.events is None else confined(data, trained_on.events)


def _extended(vocabulary: Vocabulary, known: Vocabulary) -> Vocabulary:
    """Return the vocabulary of data that are `united` with `known`, with all features and actions of `known` added."""
    features, actions = vocabulary.features, vocabulary.num_actions
    if features is not None and known.features is not None:
        features = grown(features, known.features, index_of(vocabulary.item_ids, known.item_ids))
    if actions is not None and known.num_actions is not None:
        actions = max(actions, known.num_actions)
    return replace(vocabulary, num_actions=actions, features=features)


def confined(data: Data, events: NewEvents) -> Data:
    """Return the data of an update: training is restricted to the new events and the older ones that are replayed."""
    config = data.config
    replay, longest = config.train.update.replay, config.model.max_seq_len
    options: dict[str, Any] = {"max_seq_len": longest, "seed": config.seed, "layout": data.task.layout}
    train = update_split(data.dataset, data.splits, events, replay=replay, **options)
    assert train.counted is not None
    new = int(train.counted[events.new].sum())
    note = (
        f"Update: training has {new:,} new events and {int(train.counted.sum()) - new:,} older ones as targets; "
        f"{len(events.late):,} late events are in histories only."
    )
    splits = replace(data.splits, train=train, notes=[*data.splits.notes, note, *events.notes()])
    return replace(data, splits=splits, events=events)


def load_data(config: RunConfig, **others) -> Dataset:
    """Call `load_dataset` with the options of `config.data`, updated by `others`."""
    c = config.data
    options = {
        "format": c.format,
        "path": c.path,
        "cache_dir": c.cache_dir,
        "min_user_events": c.min_user_events,
        "min_item_events": c.min_item_events,
        "columns": c.columns,
        "synthetic": c.synthetic,
        "recall": c.recall,
        "separator": c.separator,
        "on_bad_row": c.on_bad_row,
        "duplicates": c.duplicates,
        "encoding": c.encoding,
        "decimal": c.decimal,
        "where": c.where,
        "bad_rows_limit": c.bad_rows_limit,
        "features": c.features,
        "partitions": c.partitions,
        "report": terminal.say,
    }
    return load_dataset(**options | others)


def find_data(config: RunConfig, trained_on: Known | None, moved: Sequence[str] = (), rest: bool = False) -> Dataset:
    """Return the data set of `config.data`.

    trained_on: the stored facts about a run's data: items get the run's indices; DataError if the fingerprints differ.
    moved: the options that name another source than the run's, which must have the same data. rest: whether to accept
    the data that remain after users were removed (`data/forget.py`).
    """
    if trained_on is None:
        return load_data(config)
    c, fingerprint = config.data, trained_on.fingerprint
    try:
        return united(load_data(config, fingerprint=fingerprint), trained_on.vocabulary)
    except OtherData:
        reason = f"the run was trained on other data than {shown(c.path or c.format, 200)} has now"
        if moved:
            raise DataError(
                f"{', '.join(moved)}: {reason}. Use train.py --update RUN data.path=NEW for new events, "
                "train.py CONFIG --init-from RUN for another run, or eval.py RUN --data NEW for an evaluation"
            ) from None
    except DataError as error:
        if moved:
            raise
        reason = str(error)
    generated = FORMATS[c.format].kind == "generated"
    prepared = None if generated else find_prepared(c.format, c.cache_dir, fingerprint)
    if prepared is not None:
        terminal.say(f"{reason}: using the prepared copy of the run's data in {c.cache_dir}")
        return united(prepared, trained_on.vocabulary)
    left = find_rest(c.path, c.cache_dir, fingerprint) if rest and not generated else None
    if left is not None:
        terminal.say(f"{reason}: using the data of the run that remain after users were removed")
        return united(left, trained_on.vocabulary)
    raise DataError(
        f"{reason}, and there is no prepared copy of the run's data in data.cache_dir={shown(c.cache_dir, 200)}. "
        "These commands work without it: eval.py RUN --recommend OUT --history FILE, eval.py RUN --export-items OUT, "
        "eval.py RUN --data NEW and train.py CONFIG --init-from RUN"
    )


def set_matmul_precision(precision: str) -> None:
    """Set `train.matmul_precision`, the precision of fp32 products of torch and of the kernels, for the process."""
    if precision != "default":
        torch.set_float32_matmul_precision(precision)


def check_backends(config: RunConfig, device: torch.device) -> None:
    """Raise ConfigError if a layer of the configuration cannot run on the device."""
    for attention in config.model.attention:
        try:
            attention.check_device(config, device)
        except ValueError as error:
            raise ConfigError(str(error)) from None


def for_data(config: RunConfig, dataset: Dataset) -> RunConfig:
    """Replace values that depend on the data; ConfigError if an option needs timestamps or actions that are missing."""
    layers = [attention.for_data(dataset) for attention in config.model.attention]
    for layer, attention in enumerate(layers):
        try:
            attention.check_data(dataset)
        except ValueError as error:
            raise ConfigError(f"model.attention.{f'{layer}.' if len(layers) > 1 else ''}{error}") from None
    if config.model.rotary and config.model.rotary.time and not dataset.has_timestamps:
        raise ConfigError(f"model.rotary.time: {dataset.name} has no timestamps, set it to false")
    if config.model.action_embedding and dataset.actions is None:
        raise ConfigError(f"model.action_embedding: {dataset.name} has no actions, set it to false")
    return config.model_copy(update={"model": config.model.model_copy(update={"attention": layers})})


def with_filter(config: RunConfig, dataset: Dataset, splits: Splits) -> RunConfig:
    """Choose `eval.filter_seen` for these data.

    It is `none` if more than MOST_REPEATS of the validation targets (without a validation split, of the users' last
    training events) repeat an earlier item of the user, otherwise `history`.
    """
    if splits.valid is not None:
        events = target_events(splits.valid)
    else:
        events = splits.train_end[splits.train_end - dataset.user_offsets[:-1] >= 2] - 1
    how = "none" if len(events) and repeats(dataset, events).mean() > MOST_REPEATS else "history"
    return config.model_copy(update={"eval": config.eval.model_copy(update={"filter_seen": how})})


def build_model(
    config: RunConfig,
    vocabulary: Vocabulary,
    device: torch.device,
    ranks: Ranks | None = None,
    table_class: type[ShardedTable] = ShardedTable,
) -> SequenceModel:
    """Build the model of a configuration for a vocabulary, on the device, with random weights.

    ranks: the ranks that parallel.embedding divides the item table among. table_class: the class of a divided table.
    """
    num_actions = vocabulary.num_actions or 0 if config.embeds_actions else 0
    head = build_task(config).head()
    num_items, table = len(vocabulary.item_ids), None
    if ranks is not None and config.parallel.sharded:
        table = table_class(config, num_items, ranks, device)
    as_tokens = config.data.features is not None and config.data.features.user_tokens
    model = SequenceModel(config.model, num_items, num_actions, head, vocabulary.features, table, as_tokens)
    model.recompute = config.train.recompute
    model.residual_dtype = torch.bfloat16 if config.train.residual == "bfloat16" else None
    return model if device.type == "cpu" else model.to(device)


def final_weights(folder: Path) -> tuple[dict, dict, Path]:
    """Return (weights, facts, folder) of a run's final weights: the best on the validation split, or else the last."""
    facts, source = final_facts(folder)
    return saved_weights(source)[0], facts, source


def final_facts(folder: Path) -> tuple[dict, Path]:
    """Return (the facts about a run's final weights, their folder)."""
    folders = [folder / "best"] if exists(folder / "best") else checkpoints(folder)[-1:]
    if not folders:
        raise CheckpointError(f"{folder}: no weights in this run folder yet")
    _, facts = load_folder(folders[0])
    check_of_this_run(facts.get("run"), folder, folders[0])
    if type(facts.get("epoch")) is not int or facts["epoch"] < 0:
        raise CheckpointError(f"{folders[0]}: not valid, epoch cannot be {facts.get('epoch')!r}")
    return facts, folders[0]


def open_weights(
    folder: Path, overrides: list[str], read: bool = True, other_data: bool = False
) -> tuple[RunConfig, Known, dict, Path, int]:
    """Return (config, the run's vocabulary, weights, their folder, their epoch) from a run's folder, without its data.

    overrides: dotted options; ConfigError for options that an evaluation cannot change. read: whether to read the
    weights, which are an empty dict otherwise. other_data: whether the evaluation uses other data than the run's.

    Examples:
        >>> config, known, weights, source, epoch = open_weights(run.folder, ["eval.batch_size=8"])
        >>> config.eval.batch_size, known.vocabulary.item_ids[:2].tolist(), source.name, epoch
        (8, ['s0', 's1'], 'best', 1)
        >>> open_weights(run.folder, ["model.embedding_dim=64"])
        Traceback (most recent call last):
        data.errors.ConfigError: ...
    """
    check_run(folder)
    config, run_config = (load_config(folder / "config.yaml", options) for options in (overrides, []))
    if config.eval.filter_seen == "auto":  # the value chosen for the run's data
        chosen = {"filter_seen": run_config.eval.filter_seen}
        config = config.model_copy(update={"eval": config.eval.model_copy(update=chosen)})
    check_evaluated(run_config, config, folder, other_data)
    weights: dict = {}
    if read:
        weights, facts, source = final_weights(folder)
    else:
        facts, source = final_facts(folder)
    check_config(facts, run_config, folder, source)
    known = load_vocabulary(folder)
    if known.fingerprint != facts.get("fingerprint"):
        raise CheckpointError(f"{source}: vocabulary/ belongs to other training data")
    return config, known, weights, source, facts["epoch"]


def trained_model(
    config: RunConfig, known: Known, weights: dict, source: Path, ranks: Ranks | None = None
) -> SequenceModel:
    """Build the model on its device, load these weights and set it to evaluation mode.

    ranks: the ranks that share the item table; each of them reads its part from `source` instead of `weights`.

    Examples:
        >>> config, known, weights, source, _ = open_weights(run.folder, [])
        >>> network = trained_model(config, known, weights, source)
        >>> network.item_table.shape, network.training
        (torch.Size([9, 8]), False)
    """
    model = build_model(config, known.vocabulary, open_device(config), ranks)
    if ranks is None:
        load_weights(model, weights, source)
    else:
        load_slices(model, source, ranks)
    return model.eval()


def check_of_this_run(run: object, folder: Path, source: Path) -> None:
    """Raise CheckpointError unless `run`, the id of the run in `source`, equals the id in the folder's run.json."""
    if not isinstance(run, str):
        raise CheckpointError(f"{source}: written by another version of this program, without the id of its run")
    if run != (folder_run := read_manifest(folder)["run"]):
        raise CheckpointError(
            f"{source}: belongs to another run: its id is {shown(run)}, the id in run.json is {shown(folder_run)}"
        )


def check_config(facts: dict, config: RunConfig, folder: Path, source: Path) -> None:
    """Raise CheckpointError if the weights `source` were trained with a configuration other than `config`.

    Options that a resumed run may change, and options of evaluation, may differ.
    """
    changed = [
        str(change)
        for change in changes(stored_config(facts.get("config"), source), config)
        if RULES[change.group].resumed and not change.option.startswith("eval.")
    ]
    if changed:
        raise CheckpointError(
            f"{folder}: config.yaml differs from the configuration of {source.name} ({'; '.join(changed)}); undo the "
            "change, or give options of an evaluation on the command line (key=value)"
        )


def check_place(progress: Progress, steps: int, folder: Path) -> None:
    """Raise CheckpointError unless a checkpoint's step matches its epoch and batch, with `steps` steps per epoch."""
    if progress.step != progress.epoch * steps + progress.batch or progress.batch > steps:
        raise CheckpointError(
            f"{folder}: the checkpoint is not valid: with {steps} steps an epoch, step {progress.step} is not batch "
            f"{progress.batch} of epoch {progress.epoch + 1}"
        )


def judge(
    model, data: Data, split: str, write: Callable[[dict[str, np.ndarray]], object] = lambda arrays: None
) -> dict:
    """Compute all results of a report for one split; see `Task.judge`.

    write: called with the arrays `judged` of the task by name, which compare.py reads to compare runs user by user.
    """
    batches = ProgressBatches(data.eval_batches(split), f"evaluating on {split}")
    result = data.task.judge(model, data.dataset, data.splits, split, cast(Batches, batches))
    judged = result.pop("judged", {})
    fingerprint = data.dataset.events_fingerprint or data.dataset.fingerprint
    write(judged | {"fingerprint": np.array(fingerprint)})
    return result | against_baselines(data.task, judged)


def absolute_paths(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths, so that the run can be used from any folder."""
    paths: dict[str, Any] = {"cache_dir": os.path.abspath(os.path.expanduser(config.data.cache_dir))}
    if config.data.path:
        paths["path"] = absolute_path(config.data.path)
    if (features := config.data.features) is not None:
        files = {entity: file.with_paths(absolute_path) for entity, file in features.files().items()}
        paths["features"] = features.model_copy(update=files)
    return config.model_copy(update={"data": config.data.model_copy(update=paths)})


def absolute_path(path: str) -> str:
    """Return an absolute path; an address such as s3:// is returned unchanged."""
    return path if is_remote(path) else os.path.abspath(os.path.expanduser(path))


def was_saved(folder: Path) -> bool:
    """Return whether the run has a checkpoint; CheckpointError if it has metrics but its checkpoints are missing."""
    has_checkpoint = bool(checkpoints(folder))
    metrics = folder / "metrics.jsonl"
    with access(metrics, "read"):
        if not has_checkpoint and metrics.exists() and metrics.stat().st_size:
            raise CheckpointError(f"{folder}: no checkpoint to resume from, though metrics.jsonl has lines")
    return has_checkpoint
