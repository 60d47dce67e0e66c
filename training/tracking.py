"""Log a run's curves to TensorBoard, MLflow or Weights & Biases (`train.tracking`), in addition to metrics.jsonl.

A resumed run continues its curves: MLflow and W&B identify it by the id in run.json. Libraries are imported when they
are needed.
"""

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from cli.terminal import terminal
from data.errors import ConfigError
from data.types import shown
from training.config import RunConfig
from training.folder import access

# train.tracking -> (module, extra of this package that installs it)
NEEDED = {"mlflow": ("mlflow", "mlflow"), "wandb": ("wandb", "wandb")}
MOST_PARAMETERS = 100  # MLflow's limit for one call


class Tracker(Protocol):
    """The interface of trackers."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Add a point to the curve of each name."""

    def close(self, finished: bool) -> None:
        """End the curves; an unfinished run may continue them later."""


def check_tracking(config: RunConfig) -> None:
    """Raise ConfigError unless the library that `train.tracking` needs is installed."""
    if needed := NEEDED.get(config.train.tracking):
        _imported(*needed)


def _imported(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"train.tracking: {module} cannot be imported ({shown(error, 200)}): pip install 'hstu_sparse[{extra}]'"
        ) from None


def open_tracker(config: RunConfig, folder: Path, run: str, step: int) -> Tracker:
    """Open the tracker of the run with the id `run`, which continues after `step`; ConfigError if it cannot start."""
    kind = config.train.tracking
    if kind == "tensorboard":
        return TensorBoard(folder, step)
    check_tracking(config)
    make: dict[str, Callable[[RunConfig, Path, str], Tracker]] = {"mlflow": MLflow, "wandb": WandB}
    try:
        return Lenient(kind, make[kind](config, folder, run))
    except Exception as error:
        raise ConfigError(f"train.tracking: {kind} cannot start: {_line(error)}") from error


def _line(error: Exception) -> str:
    return shown(" ".join(f"{type(error).__name__}: {error}".split()), 300)


class TensorBoard:
    """Write event files into the run's folder; FolderError if they cannot be written."""

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter  # half a second of import, only for training

        self.folder = folder / "tensorboard"
        with access(self.folder, "written"):
            self.board = SummaryWriter(str(self.folder), purge_step=step)

    def log(self, values: dict[str, float], step: int) -> None:
        with access(self.folder, "written"):
            for name, value in values.items():
                self.board.add_scalar(name, value, step)

    def close(self, finished: bool) -> None:
        with access(self.folder, "written"):
            self.board.close()


class Lenient:
    """Wrap a tracker: its first error is printed, and later calls do nothing; metrics.jsonl has all values."""

    def __init__(self, name: str, tracker: Tracker):
        self.name = name
        self.tracker: Tracker | None = tracker

    def _try(self, call: Callable[[Tracker], None]) -> None:
        if self.tracker is None:
            return
        try:
            call(self.tracker)
        except Exception as error:
            terminal.say(f"train.tracking: {self.name} failed, training continues without it: {_line(error)}")
            self.tracker = None

    def log(self, values: dict[str, float], step: int) -> None:
        self._try(lambda tracker: tracker.log(values, step))

    def close(self, finished: bool) -> None:
        self._try(lambda tracker: tracker.close(finished))


class MLflow:
    """A run of MLflow in the experiment `config.name`, in the store MLFLOW_TRACKING_URI or MLflow's default.

    MLflow allows no @ in names: NDCG@10 is logged as NDCG_at_10.
    """

    def __init__(self, config: RunConfig, folder: Path, run: str):
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient()
        experiment = self.client.get_experiment_by_name(config.name)
        number = experiment.experiment_id if experiment else self.client.create_experiment(config.name)
        earlier_runs = self.client.search_runs([number], f"tags.hstu_sparse_run = '{run}'", max_results=1)
        if earlier_runs:
            self.run = earlier_runs[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            return
        tags = {"hstu_sparse_run": run, "folder": os.path.abspath(folder)}
        self.run = self.client.create_run(number, run_name=folder.name, tags=tags).info.run_id
        parameters = [Param(name, str(value)) for name, value in flat(config.model_dump(mode="json")).items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self.client.log_batch(self.run, params=parameters[first : first + MOST_PARAMETERS])

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.client.log_metric(self.run, name.replace("@", "_at_"), value, step=step)

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.run, "FINISHED" if finished else "KILLED")


class WandB:
    """A run of Weights & Biases in the project WANDB_PROJECT, by default hstu_sparse."""

    def __init__(self, config: RunConfig, folder: Path, run: str):
        wandb = importlib.import_module("wandb")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "hstu_sparse"),
            name=f"{config.name}/{folder.name}",
            id=run,
            resume="allow",
            dir=str(folder),
            config=config.model_dump(mode="json"),
        )
        # W&B's step cannot decrease, but a resumed run repeats the steps after its checkpoint.
        self.run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log({**values, "step": step})

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings and lists of mappings: dotted key -> value."""
    if isinstance(tree, list) and any(isinstance(value, (dict, list)) for value in tree):
        tree = {str(place): value for place, value in enumerate(tree)}
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves
