"""Define the interface of tasks, which all programs use.

Letters: T tokens, E embedding size, M users or candidates, A actions.
"""

import sys
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
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
from models.attention.contract import AuxLosses
from models.hstu import SequenceModel
from models.losses import Share
from models.options import LossConfig, ModelConfig
from models.protocols import RankGroup, RunOptions


class Served(NamedTuple):
    """The tokens and results of a task that is served (serving/).

    tokens_per_event  1 token for an event (including its action if there are candidates), or 2, for item and action
    candidates        the number of tokens at the end of a sequence for items to score; 0 if all items are ranked by the
                      output of the last token
    splits            the splits in which every target has an earlier event, which a service requires
    """

    tokens_per_event: int = 1
    candidates: int = 0
    splits: tuple[str, ...] = ("train", "valid", "test")


class TaskOptions(RunOptions, Protocol):
    """Declare a run's configuration as tasks read it."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def loss(self) -> LossConfig: ...


class Task:
    """Base of the tasks. A task is built from a run's configuration and has no state that changes between calls.

    headline          the metrics that training prints after an evaluation
    plotted           the metrics that a report plots over the epochs
    plotted_baseline  the name of the baseline in these plots
    ranks             the ranks that evaluate together and call the same methods; None for a single process
    layout            the layout of a sequence's tokens in ranking; None for other tasks
    """

    layout: Layout | None = None
    headline: tuple[str, ...]
    plotted: tuple[str, ...]
    plotted_baseline: str = "baseline"

    class Config(Options):
        """The task's options, `task:` in a configuration, and which options and programs its runs support.

        formats         the supported values of data.format
        protocols       the supported values of data.protocol
        unsupported     the dotted names of options that must have their default
        embeds_actions  whether the model has an action table even without model.action_embedding
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
        """The task: one of the table below, or the path of your class, `module:Class`."""

        @property
        def has_item_loss(self) -> bool:
            """Whether the training loss is that of `loss:`, over items."""
            return "loss" not in self.unsupported

        def check_lists(self) -> None:
            """Raise ConfigError unless a user's last output ranks all items, which programs need to write lists."""
            raise ConfigError(
                f"task.kind={self.kind} does not rank items: --predict, --recommend, --export-items and --sampled are "
                "for tasks that do, such as retrieval"
            )

        def served(self) -> Served | None:
            """Return how the task is served; None if it cannot be served."""
            return None

        def judged_by(self) -> dict[str, Any]:
            """Return the options that must be equal to compare runs; by default all."""
            return self.model_dump(mode="json")

        def metric_names(self) -> list[str]:
            """Return the metrics of an evaluation; by default the first one selects the best weights."""
            raise NotImplementedError

        def has_metric(self, name: str) -> bool:
            """Return whether `eval.best_metric` may be `name`."""
            return name in self.metric_names()

        def less_is_better(self, metric: str) -> bool:
            """Return whether a lower value of the metric is better."""
            return False

        def check_run(self, run: RunOptions) -> None:
            data = run.data
            if data.format in FORMATS and data.format not in self.formats:
                raise ValueError(
                    f"task.kind={self.kind} does not support data.format={data.format}: both must be recall, or neither"
                )
            if data.protocol not in self.protocols:
                expected = ", ".join(self.protocols)
                raise ValueError(f"data.protocol={data.protocol}: task.kind={self.kind} expects one of {expected}")
            for name in self.unsupported:
                parent, _, option = name.rpartition(".")
                part: Any = attrgetter(parent)(run) if parent else run
                if getattr(part, option) != type(part).model_fields[option].get_default(call_default_factory=True):
                    raise ValueError(f"{name}: not supported by task.kind={self.kind}, leave it out")

    def __init__(self, config: TaskOptions, ranks: RankGroup | None = None):
        self.config = config
        self.ranks = ranks if ranks is not None and ranks.distributed_step else None

    def check_data(self, dataset: Dataset) -> None:
        """Raise ConfigError if the data set does not fit the task."""

    def check_metric(self, dataset: Dataset, split: Split) -> None:
        """Raise ConfigError unless `config.best_metric` has a value on the split, which selects the best weights."""

    def splits(self, dataset: Dataset) -> Splits:
        """Return the samples of training and evaluation by the run's protocol."""
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
        """Return the batches of a split; options: those of `Batches`."""
        return Batches(dataset, split, **options)

    def head(self) -> nn.Module | None:
        """Return the module `model.task_head`, or None."""
        return None

    def loss(self, model: SequenceModel, out: Tensor, batch: Batch, share: Share | None) -> tuple[Tensor, AuxLosses]:
        """Return (training loss, auxiliary losses) of the outputs `out` [T, E] of `SequenceModel.raw_output`.

        The computation must not wait for the device. share: given if ranks share the batch; the results are then this
        rank's shares of the sums.
        """
        raise NotImplementedError

    def candidate_scores(self, model: SequenceModel, out: Tensor) -> Tensor:
        """Return the scores [M, A] of candidates with outputs [M, E], for a service (`Served.candidates`)."""
        raise NotImplementedError

    def evaluate(self, model: SequenceModel, batches: Batches, phase: int = sys.maxsize) -> dict[str, float]:
        """Put the model into evaluation mode and compute metrics on a split's batches.

        These include `config.best_metric` and the metrics of `headline` and `plotted`.
        """
        raise NotImplementedError

    def baseline(self, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict[str, float]:
        """Compute the metrics of the task's baseline on a split, for the plots of a report."""
        return {}

    def baselines(self, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict[str, dict[str, Any]]:
        """Compute the results of models without a network on a split, by name.

        A result has `metrics`, `settings` by name, and `judged`, an array that `judge` adds to the arrays `judged` of
        its own result.
        """
        return {}

    def judge(self, model: SequenceModel, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict:
        """Compute the JSON content of a report on a split: metrics of the model and a baseline, and metrics by groups.

        The result also has `judged`, the arrays by name that `user_values` and `breakdowns` read: the model's results
        for each user or event, and `events`, the indices of the evaluated events in the data set.
        """
        raise NotImplementedError

    def user_values(self, judged: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return (users [M], metric -> values [M]) from the arrays `judged` of `judge`.

        A metric is the mean of its values. `config.best_metric` is included; metrics that are not such means are not.
        """
        raise NotImplementedError

    def baseline_values(self, judged: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the values [M] of `config.best_metric` of each baseline, for the users of `user_values`."""
        return {}

    def breakdowns(self, result: dict, judged: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
        """Return `config.best_metric` by groups of users or events: title -> name of the group -> value."""
        return {}

    def protocol_lines(self, result: dict) -> list[str]:
        """Return sentences that describe the data and the protocol of the result of `judge`."""
        raise NotImplementedError

    def tables(self, result: dict) -> list[Table]:
        """Return the tables of a report on the result of `judge`, the main table first."""
        raise NotImplementedError

    def plots(self, result: dict) -> dict[str, bytes]:
        """Return more plots of the result of `judge`, PNG images by file name."""
        return {}
