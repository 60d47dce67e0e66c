"""What a task is: everything that train.py, eval.py and reports know of what a run predicts.

Letters: T tokens, E embedding size.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from data.batch import Batch
from data.batches import Batches
from data.splits import Split, Splits
from data.types import Dataset
from models.config import RunConfig
from models.contract import AuxLoss
from models.hstu import SequenceModel
from models.losses import Share
from models.parallel.ranks import Ranks


class Table(NamedTuple):
    """A table of a report: title, headings and rows of text; `short`: the columns that a terminal shows, or none."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    short: list[int]


class Task:
    """Base of the tasks. A task is built from a run's configuration and keeps nothing of one call for the next.

    headline  the metrics that training prints after an evaluation
    plotted   the metrics that a report plots over the epochs
    ranks     those that evaluate together, each calling the same methods; None for one process alone
    """

    headline: tuple[str, ...]
    plotted: tuple[str, ...]

    def __init__(self, config: RunConfig, ranks: Ranks | None = None):
        self.config = config
        self.ranks = ranks if ranks is not None and ranks.engine else None

    def check_data(self, dataset: Dataset) -> None:
        """ConfigError unless the data set has what the task needs."""

    def splits(self, dataset: Dataset) -> Splits:
        """The samples to train on and to be judged by, under the run's protocol."""
        raise NotImplementedError

    def batches(self, dataset: Dataset, split: Split, **options) -> Batches:
        """The batches of a split; options as `Batches` takes them."""
        raise NotImplementedError

    def head(self) -> nn.Module | None:
        """A module of the model that is the task's own, `model.task_head`; None where there is none."""
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
        """(training loss, auxiliary losses by name) of the outputs `out` [T, E] of `SequenceModel.raw_output`.

        batch: what the outputs are of; whole: the same, or the whole batch where `batch` is a rank's part of it. dtype:
        of the products on a GPU; None, that of the weights. Must not wait for the device. share: of a rank that shares
        the batch with others, of which the results are then its shares.
        """
        raise NotImplementedError

    def evaluate(self, model: SequenceModel, batches: Batches, phase: int = sys.maxsize) -> dict[str, float]:
        """Metrics of a split's batches, all of `config.task.metric_names()`; puts the model into evaluation mode."""
        raise NotImplementedError

    def baseline(self, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict[str, float]:
        """Metrics of the task's baseline on a split, which a report draws beside the model's over the epochs."""
        return {}

    def judge(self, model: SequenceModel, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict:
        """Everything that a report says of one split, as JSON has it: the model beside a baseline, and by groups.

        Beside that `judged`, arrays by name that `user_values` and `breakdowns` need: what the model said of each user
        or event, and `events`, the places in the data set of the events it was judged by.
        """
        raise NotImplementedError

    def user_values(self, judged: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(users [M], metric -> values [M]) of what `judge` gave as `judged`: a metric is the mean of its values.

        The main metric, `config.best_metric`, is one of them. Metrics that are no ratios of means over users have none.
        """
        raise NotImplementedError

    def breakdowns(self, result: dict, judged: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
        """The main metric by groups of users or events: title -> name of the group -> value."""
        return {}

    def protocol_lines(self, result: dict) -> list[str]:
        """What the figures of `judge` are figures of, in sentences."""
        raise NotImplementedError

    def tables(self, result: dict) -> list[Table]:
        """The tables of a report on what `judge` returned, the main one first."""
        raise NotImplementedError

    def plots(self, result: dict, folder: Path) -> list[str]:
        """Writes the task's own plots of what `judge` returned into the run's folder; returns their names."""
        return []


def cells(values: dict, names: list[str] | tuple[str, ...]) -> list[str]:
    """Metrics as the cells of a table's row."""
    return [f"{values[name]:.4f}" for name in names]
