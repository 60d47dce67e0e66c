"""Define the interface of tasks, through which train.py, eval.py and reports handle what a run predicts.

Letters: T tokens, E embedding size.
"""

import sys
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from data.batch import Batch
from data.batches import Batches
from data.errors import ConfigError
from data.options import Options
from data.ranking import Layout
from data.reading.formats import FORMATS
from data.splits import Split, Splits, make_splits
from data.types import Dataset
from evaluation.report import Table
from models.attention.contract import AuxLoss
from models.hstu import SequenceModel
from models.losses import Share
from models.options import LossConfig, ModelConfig
from models.protocols import RankGroup, RunOptions


class Served(NamedTuple):
    """The form in which a service has a user's events as tokens, and what it answers (serving/).

    tokens_per_event  1, the event's (with its action where there are candidates), or 2, the item's and the action's
    candidates        tokens of a sequence that are left for the items that a request names and whose scores it gets,
                      each a token behind the user's; with 0 all items are ranked by the last token's output
    splits            the splits whose targets all have an earlier event, which a service needs to answer
    """

    tokens_per_event: int = 1
    candidates: int = 0
    splits: tuple[str, ...] = ("train", "valid", "test")


class TaskOptions(RunOptions, Protocol):
    """Declare a run's configuration as a task reads it."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def loss(self) -> LossConfig: ...


class Task:
    """Base of the tasks. A task is built from a run's configuration and has no state that changes between calls.

    `Config` has its options, `task:` in a configuration.

    headline  the metrics that training prints after an evaluation
    plotted   the metrics that a report plots over the epochs
    plotted_baseline  what `baseline` is called in these plots
    ranks     the ranks that evaluate together, each calling the same methods; None for a single process
    layout    how the tokens of ranking are laid out; None for other tasks
    """

    layout: Layout | None = None
    headline: tuple[str, ...]
    plotted: tuple[str, ...]
    plotted_baseline: str = "baseline"

    class Config(Options):
        """The task's options, and what holds of its runs: which options, programs and services they have.

        formats         the formats of raw data; all but that of the memory task
        protocols       the protocols by which `splits` can divide the data
        unsupported     options, by their dotted names, that a run of this task leaves at their default
        embeds_actions  whether the model has a table of actions, without model.action_embedding too
        """

        formats: ClassVar[frozenset[str]] = frozenset(FORMATS) - {"recall"}
        protocols: ClassVar[tuple[str, ...]] = ("leave_one_out", "published", "temporal", "all")
        unsupported: ClassVar[tuple[str, ...]] = (
            *("loss", "model.head", "train.augment", "data.train_on_valid"),
            *("parallel.data", "parallel.embedding", "parallel.context"),
            *("eval.metrics", "eval.same_time", "data.targets"),
        )

        embeds_actions: ClassVar[bool] = False

        kind: str
        """The task: one of the table below, or a class of your own as `module:Class`."""

        @property
        def has_item_loss(self) -> bool:
            """Whether the training loss is that of `loss:`, over items: what ranks then draw and look up."""
            return "loss" not in self.unsupported

        def check_lists(self) -> None:
            """Raise ConfigError unless a user's last output ranks all items, of which programs then write lists."""
            raise ConfigError(
                f"task.kind={self.kind} ranks no items: --predict, --recommend, --export-items and --sampled are for "
                "tasks that do, such as retrieval"
            )

        def served(self) -> Served | None:
            """Return how the task is served; None if it cannot be."""
            return None

        def judged_by(self) -> dict[str, Any]:
            """Return the options that must agree where runs are compared, those of what is learned left out."""
            return self.model_dump(mode="json")

        def metric_names(self) -> list[str]:
            """Return the metrics of an evaluation; the first one chooses the best weights by default."""
            raise NotImplementedError

        def has_metric(self, name: str) -> bool:
            """Return whether `eval.best_metric` may be `name`."""
            return name in self.metric_names()

        def less_is_better(self, metric: str) -> bool:
            """Return whether the best value of the metric is the least one."""
            return False

        def check_run(self, run: RunOptions) -> None:
            data = run.data
            if data.format in FORMATS and data.format not in self.formats:
                raise ValueError(
                    f"task.kind={self.kind} on data.format={data.format}: task and format recall belong together"
                )
            if data.protocol not in self.protocols:
                raise ValueError(
                    f"data.protocol={data.protocol} is not for task.kind={self.kind}, which takes "
                    + ", ".join(self.protocols)
                )
            for name in self.unsupported:
                parent, _, option = name.rpartition(".")
                part: Any = attrgetter(parent)(run) if parent else run
                if getattr(part, option) != type(part).model_fields[option].get_default(call_default_factory=True):
                    raise ValueError(f"{name}: not supported by task.kind={self.kind}, leave it out")

    def __init__(self, config: TaskOptions, ranks: RankGroup | None = None):
        self.config = config
        self.ranks = ranks if ranks is not None and ranks.engine else None

    def check_data(self, dataset: Dataset) -> None:
        """Raise ConfigError unless the data set has what the task needs."""

    def check_metric(self, dataset: Dataset, split: Split) -> None:
        """Raise ConfigError unless `config.best_metric` has a value on the split, by which weights will be chosen."""

    def splits(self, dataset: Dataset) -> Splits:
        """Return the samples of training and evaluation under the run's protocol."""
        c = self.config.data
        return make_splits(
            dataset,
            c.protocol,
            max_seq_len=self.config.model.max_seq_len,
            valid_fraction=c.valid_fraction,
            test_fraction=c.test_fraction,
            targets=c.targets,
            same_time=self.config.eval.same_time,
        )

    def batches(self, dataset: Dataset, split: Split, **options) -> Batches:
        """Return the batches of a split; options as `Batches` takes them."""
        return Batches(dataset, split, **options)

    def head(self) -> nn.Module | None:
        """Return the task's own module of the model, `model.task_head`, or None."""
        return None

    def loss(
        self,
        model: SequenceModel,
        out: Tensor,
        batch: Batch,
        whole: Batch,
        dtype: torch.dtype | None,
        share: Share | None = None,
    ) -> tuple[Tensor, dict[str, AuxLoss]]:
        """Return (training loss, auxiliary losses by name) of the outputs `out` [T, E] of `SequenceModel.raw_output`.

        batch: the batch that gave the outputs; whole: the same, or the whole batch if `batch` is a rank's part of it.
        dtype: the type of matrix products on a GPU; None for that of the weights. share: for a rank that shares the
        batch with others, whose results are then its shares of the sums. The computation must not wait for the device.
        """
        raise NotImplementedError

    def candidate_scores(self, model: SequenceModel, out: Tensor) -> Tensor:
        """Return what a service answers for candidates with the outputs `out` [M, E]: [M, A]; see `Served`."""
        raise NotImplementedError

    def evaluate(self, model: SequenceModel, batches: Batches, phase: int = sys.maxsize) -> dict[str, float]:
        """Compute the metrics on a split's batches, `config.best_metric` and those of `headline` and `plotted` among
        them; puts the model into evaluation mode.
        """
        raise NotImplementedError

    def baseline(self, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict[str, float]:
        """Compute the metrics of the task's baseline on a split, which a report plots beside the model's over the
        epochs.
        """
        return {}

    def baselines(self, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict[str, dict[str, Any]]:
        """Compute the results of models without a network on a split: name -> `metrics`, `settings` by name, and
        `judged`, an array that `judge` adds to its own.
        """
        return {}

    def judge(self, model: SequenceModel, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict:
        """Compute the JSON content of a report on one split: the model beside a baseline, and metrics by groups.

        The result also has `judged`, arrays by name that `user_values` and `breakdowns` need: the model's result for
        each user or event, and `events`, the indices in the data set of the evaluated events.
        """
        raise NotImplementedError

    def user_values(self, judged: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return (users [M], metric -> values [M]) from the arrays `judged` of `judge`: a metric is the mean of its
        values.

        The main metric, `config.best_metric`, is included. Metrics that are no ratios of means over users are left out.
        """
        raise NotImplementedError

    def baseline_values(self, judged: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the main metric's values [M] of each baseline, for the users of `user_values`."""
        return {}

    def breakdowns(self, result: dict, judged: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
        """Return the main metric by groups of users or events: title -> name of the group -> value."""
        return {}

    def protocol_lines(self, result: dict) -> list[str]:
        """Return sentences that say which data and protocol the figures of `judge` come from."""
        raise NotImplementedError

    def tables(self, result: dict) -> list[Table]:
        """Return the tables of a report on the result of `judge`, the main one first."""
        raise NotImplementedError

    def plots(self, result: dict) -> dict[str, bytes]:
        """Return the task's own plots of the result of `judge`, PNG images by the name of their file."""
        return {}
