"""What training and evaluation of a run share: its data, its model, the weights it is judged by, the verdict."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from data.batches import Batches
from data.datasets import Dataset, load_dataset
from data.splits import Splits
from data.types import shown
from hstu_sparse.ring.flash.cute import check_available
from hstu_sparse.validation import choose_backend
from models.checkpoint import CheckpointError, Progress, checkpoints, exists, load_folder
from models.config import ConfigError, RunConfig, differences
from models.folder import read_manifest
from models.hstu import SequenceModel
from models.tasks.build import build_task
from models.tasks.contract import Task


@dataclass
class Data:
    dataset: Dataset
    splits: Splits
    device: torch.device
    config: RunConfig
    task: Task

    def batches(self, split: str, **options) -> Batches:
        return self.task.batches(self.dataset, getattr(self.splits, split), device=self.device, **options)

    def eval_batches(self, split: str) -> Batches:
        return self.batches(split, batch_size=self.config.eval.batch_size, shuffle=False, with_seen=True)


def open_data(config: RunConfig, tell: Callable[[str], None] | None = None) -> Data:
    """The run's data set, prepared or from the cache, its splits, the device they go to, and the configuration as these
    data decide it: what is built and stored is `Data.config`.

    tell: gets a line now and then about a long preparation.
    """
    kind = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch finds no GPU (make doctor says why)")
    if config.threads:
        torch.set_num_threads(config.threads)
    if kind == "cuda":
        set_matmul_precision(config.train.matmul_precision)
    check_backends(config, torch.device(kind))
    c = config.data
    dataset = load_dataset(
        c.format,
        c.path,
        cache_dir=c.cache_dir,
        min_user_events=c.min_user_events,
        min_item_events=c.min_item_events,
        columns=c.columns,
        synthetic=c.synthetic,
        separator=c.separator,
        on_bad_row=c.on_bad_row,
        duplicates=c.duplicates,
        tell=tell,
    )
    config = for_data(config, dataset)
    task = build_task(config)
    task.check_data(dataset)
    return Data(dataset, task.splits(dataset), torch.device(kind), config, task)


def set_matmul_precision(precision: str) -> None:
    """`train.matmul_precision`, for all of the process: torch's products of fp32, and those of the kernels."""
    if precision != "default":
        torch.set_float32_matmul_precision(precision)


def check_backends(config: RunConfig, device: torch.device) -> None:
    """Whether the kernels that the configuration insists on can run on the device; ConfigError."""
    option = "model.attention.backend"
    for layer in config.model.attention:
        backend = getattr(layer, "backend", "auto")
        try:
            if backend != "cute":
                choose_backend(backend, torch.empty(0, device=device), option)
                continue
            check_available(option, device)
            if config.train.autocast != "bf16":
                raise ValueError(f"{option}=cute takes 16 bits: set train.autocast to bf16, or use backend=triton")
            if config.parallel.context > 1 and getattr(layer, "window_size", 0):
                raise ValueError(f"{option}=cute has no window_size with parallel.context: use backend=triton")
        except ValueError as error:
            raise ConfigError(str(error)) from None


def for_data(config: RunConfig, dataset: Dataset) -> RunConfig:
    """The configuration with what the data set decides; ConfigError where it lacks what the model's options need."""
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


def build_model(data: Data) -> SequenceModel:
    dataset, model = data.dataset, data.config.model
    embedded = model.action_embedding or data.config.task.kind == "ranking"
    num_actions = int(dataset.actions.max()) + 1 if embedded else 0
    return SequenceModel(model, dataset.num_items, num_actions, data.task.head()).to(data.device)


def final_weights(folder: Path) -> tuple[dict, dict, Path]:
    """The weights that a run is judged by: the best on the validation split if it had one, else the last."""
    found = [folder / "best"] if exists(folder / "best") else checkpoints(folder)[-1:]
    if not found:
        raise CheckpointError(f"{folder}: no weights in this run folder yet")
    tensors, facts = load_folder(found[0], "model")
    check_of_this_run(facts.get("run"), folder, found[0])
    if type(facts.get("epoch")) is not int or facts["epoch"] < 0:
        raise CheckpointError(f"{found[0]}: damaged, epoch cannot be {facts.get('epoch')!r}")
    return tensors["model"], facts, found[0]


def check_of_this_run(run: object, folder: Path, source: Path) -> None:
    """CheckpointError unless what `source` holds is of the run whose id is `run`."""
    if not isinstance(run, str):
        raise CheckpointError(f"{source}: of another version of this program, it does not say of which run it is")
    if run != (here := read_manifest(folder)["run"]):
        raise CheckpointError(f"{source}: of another run ({shown(run)}), run.json says that this one is {shown(here)}")


def check_config(facts: dict, config: RunConfig, folder: Path, source: Path) -> None:
    """CheckpointError unless the weights `source` were made with the run's config.yaml; options of eval may differ."""
    if changed := changes(facts.get("config"), config, source, ("eval.",)):
        raise CheckpointError(
            f"{folder}: config.yaml is not what {source.name} was trained with ({'; '.join(changed)}); undo that, or "
            "say on the command line what is to be another than in training (key=value)"
        )


def changes(before: object, config: RunConfig, source: Path, free: tuple[str, ...] = ()) -> list[str]:
    """What a configuration that `source` remembers has other than `config`, options that begin with `free` aside."""
    try:
        known = RunConfig.model_validate(before).model_dump(mode="json")
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise CheckpointError(
            f"{source}: of another version of this program, its configuration has another {shown(place) or 'form'}"
        ) from None
    return [line for line in differences(known, config.model_dump(mode="json")) if not line.startswith(free)]


def check_fingerprint(fingerprint: object, data: Data, folder: Path) -> None:
    if fingerprint != data.dataset.fingerprint:
        raise CheckpointError(
            f"{folder}: was trained on other data (fingerprint {fingerprint}, "
            f"{data.config.data.path or data.dataset.name} has {data.dataset.fingerprint})"
        )


def check_same_run(progress: Progress, config: RunConfig, steps: int, folder: Path) -> None:
    """CheckpointError unless the checkpoint was made with this configuration, of `steps` steps an epoch."""
    if changed := changes(progress.config, config, folder / "checkpoints"):
        raise CheckpointError(
            f"{folder}: config.yaml was changed since the checkpoint was made ({'; '.join(changed)}); undo that, or "
            "take it over with --override"
        )
    whole = progress.epoch * steps + progress.batch
    if progress.step != whole or progress.batch > steps or progress.epoch > config.train.epochs:
        raise CheckpointError(
            f"{folder}: the checkpoint is damaged, step {progress.step} is not batch {progress.batch} of epoch "
            f"{progress.epoch + 1}"
        )


def judge(model, data: Data, split: str) -> dict:
    """Everything that a report says of one split; see `Task.judge`."""
    return data.task.judge(model, data.dataset, data.splits, split, data.eval_batches(split))
