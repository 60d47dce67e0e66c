"""Define the task `recall`: when an item is repeated, predict the item that followed it before (data/recall.py).

Letters: T tokens, E embedding size, I items, M recalls of a split.
"""

import sys
from dataclasses import replace
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch

from data.batches import Batches
from data.errors import ConfigError
from data.options import RecallOptions
from data.recall import RECALL_PROTOCOL, RecallBatch, RecallBatches, recall_splits
from data.splits import Split, Splits
from data.types import Dataset
from evaluation.report import Table, cells
from models.hstu import SequenceModel
from models.protocols import RankGroup
from models.tasks.contract import Task, TaskOptions
from models.tasks.retrieval import Retrieval
from models.tasks.scoring import normalized_items

CHUNK = 2**24  # scores computed at a time


class Recalls(NamedTuple):
    """The recalls of a split.

    events  [M] int64, indices in the data set
    codes   [M], the number of each recall's distance group, from 1
    right   [M] bool, whether the target has the highest score
    """

    events: np.ndarray
    codes: np.ndarray
    right: np.ndarray


class Recall(Retrieval):
    """Predict the item that followed an earlier occurrence of the current item, on generated data (data/recall.py).

    This is retrieval with recalls as the only targets; the metric is the share of targets with the highest score.
    """

    class Config(Retrieval.Config):
        formats: ClassVar[frozenset[str]] = frozenset({"recall"})
        protocols: ClassVar[tuple[str, ...]] = (RECALL_PROTOCOL,)
        unsupported: ClassVar[tuple[str, ...]] = (
            *("data.features", "data.train_on_valid", "model.action_embedding", "model.head", "train.augment"),
            *("parallel.data", "parallel.embedding", "parallel.context"),
            *("eval.metrics", "eval.same_time", "data.targets"),
        )

        kind: Literal["recall"]  # type: ignore[assignment]  # not retrieval's
        """The task."""

        def metric_names(self) -> list[str]:
            return ["accuracy", "worst"]

        def has_metric(self, name: str) -> bool:
            return name in self.metric_names()

        def check_lists(self) -> None:
            Task.Config.check_lists(self)

        def served(self) -> None:
            return None

    def __init__(self, config: TaskOptions, ranks: RankGroup | None = None):
        Task.__init__(self, config, ranks)  # Retrieval's sets the metrics of retrieval
        self.headline = self.plotted = ("accuracy", "worst")

    def check_data(self, dataset: Dataset) -> None:
        longest = int(np.diff(dataset.user_offsets).max()) - 1
        if self.config.model.max_seq_len < longest:
            raise ConfigError(
                f"model.max_seq_len={self.config.model.max_seq_len}: expected at least {longest}, the inputs of a "
                "sequence, since the item to recall may be the first one"
            )

    def splits(self, dataset: Dataset) -> Splits:
        return recall_splits(dataset, self.config.data.valid_fraction, self.config.data.test_fraction)

    def batches(self, dataset: Dataset, split: Split, **options) -> RecallBatches:
        options.pop("with_seen", None)  # recall does not filter seen items
        return RecallBatches(dataset, split, **options)

    @torch.no_grad()
    def recalls(self, model: SequenceModel, batches: Batches, phase: int = sys.maxsize) -> Recalls:
        """Evaluate each recall of a split: it is right if the target's score is above those of all other items."""
        model.eval()
        device, autocast = batches.device.type, self.config.train.autocast == "bf16"
        items = normalized_items(model.item_weight.detach())
        events, right = [], []
        for batch in batches.epoch(0):
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                out, _ = model(replace(batch, phase=phase))
            recalls = (batch.target_ids >= 0).nonzero()[:, 0]
            for part in recalls.split(max(1, CHUNK // len(items))):
                scores, targets = out[part] @ items.T, batch.target_ids[part][:, None]
                target_scores = scores.gather(1, targets)
                assert isinstance(batch, RecallBatch)
                events.append(batch.events[part])
                # Neither a tie nor NaN is right.
                right.append((scores >= target_scores).sum(1) == 1)
        where = torch.cat(events).cpu().numpy()
        assert batches.dataset.actions is not None
        return Recalls(where, batches.dataset.actions[where], torch.cat(right).cpu().numpy())

    def evaluate(self, model: SequenceModel, batches: Batches, phase: int = sys.maxsize) -> dict[str, float]:
        return metrics(self.recalls(model, batches, phase))

    def baseline(self, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict[str, float]:
        level = 1 / (self.config.data.recall or RecallOptions()).num_values  # the accuracy of a random guess
        return {"accuracy": level, "worst": level}

    def judge(self, model: SequenceModel, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict:
        """Compute the accuracy over all recalls, at the worst and at each distance, and that of a random guess."""
        recalls = self.recalls(model, batches)
        distances = {name: place for place, name in enumerate(dataset.action_names or ()) if place}
        users = dataset.users_of(recalls.events)
        return {
            "split": split,
            "users": len(getattr(splits, split).users),
            "recalls": len(recalls.events),
            "model": metrics(recalls),
            "guess": self.baseline(dataset, splits, split, batches),
            "by_distance": {
                name: float(recalls.right[recalls.codes == code].mean()) for name, code in distances.items()
            },
            "judged": {"users": users, "events": recalls.events, "right": recalls.right},
        }

    def user_values(self, judged: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        users, place, counts = np.unique(judged["users"], return_inverse=True, return_counts=True)
        return users, {"accuracy": np.bincount(place, judged["right"]) / counts}

    def breakdowns(self, result: dict, judged: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
        return {"distance, in events": result["by_distance"]}

    def protocol_lines(self, result: dict) -> list[str]:
        return [
            f"Split {result['split']}, {result['users']:,} sequences, {result['recalls']:,} recalls (values of "
            "returning keys). Accuracy is the share of recalls whose target scores highest of all items.",
            *result["notes"],
        ]

    def tables(self, result: dict) -> list[Table]:
        names = self.config.task.metric_names()
        rows = [[who, *cells(result[who], names)] for who in ("model", "guess")]
        by_distance = [[name, f"{value:.4f}"] for name, value in result["by_distance"].items()]
        return [
            Table("Recall", ["", *names], rows, [0, 1, 2]),
            Table("By distance", ["events ago", "accuracy"], by_distance),
        ]


def metrics(recalls: Recalls) -> dict[str, float]:
    """Return the accuracy over all recalls, and `worst`, the lowest accuracy at any distance."""
    right, counts = (np.bincount(recalls.codes, weights)[1:] for weights in (recalls.right, None))
    return {"accuracy": float(right.sum() / counts.sum()), "worst": float((right / counts).min())}
