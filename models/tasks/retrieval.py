"""The task `retrieval`: predict the next item among all items, judged by full ranking over the catalogue."""

import sys
from dataclasses import replace

import torch
from torch import Tensor, nn

from data.batch import Batch
from data.batches import Batches
from data.splits import Split, Splits, make_splits, train_item_counts
from data.types import Dataset
from models.contract import AuxLoss
from models.losses import head_loss
from models.metrics import metric_names, metrics_by_length, ranking_metrics
from models.retrieval import FILTERS, model_scorer, popularity_scorer, rank_targets
from models.tasks.contract import Table, Task, cells

# The values of eval.filter_seen, as a report says them.
FILTERED = {
    "history": "all items of a user's history are taken out of the ranking",
    "window": "the items of the model's window (the last max_seq_len events) are taken out of the ranking, "
    "as in the published figures",
    "none": "nothing is taken out of the ranking",
}
SHORT = {"history": "seen filtered", "window": "window filtered", "none": "unfiltered"}
ON_TERMINAL = ("HR@1", "HR@10", "HR@50", "NDCG@10", "MRR")


class Retrieval(Task):
    """Every token's output is scored against the items; the target of a token is the item of the next event."""

    headline = ("HR@10", "NDCG@10")
    plotted = ("HR@10", "NDCG@10", "MRR")

    def splits(self, dataset: Dataset) -> Splits:
        c = self.config.data
        return make_splits(
            dataset,
            c.protocol,
            max_seq_len=self.config.model.max_seq_len,
            valid_fraction=c.valid_fraction,
            test_fraction=c.test_fraction,
        )

    def batches(self, dataset: Dataset, split: Split, **options) -> Batches:
        return Batches(dataset, split, **options)

    def loss(
        self, model: nn.Module, out: Tensor, batch: Batch, whole: Batch, dtype: torch.dtype | None
    ) -> tuple[Tensor, dict[str, AuxLoss]]:
        part = None if batch.cut is None else batch.cut.index
        return head_loss(model, self.config.loss, out, whole.target_ids, dtype, part)

    def evaluate(self, model: nn.Module, batches: Batches, phase: int = sys.maxsize) -> dict[str, float]:
        score = model_scorer(model, self.config.train.autocast == "bf16")
        at_phase = (replace(batch, phase=phase) for batch in batches.epoch(0))
        (ranks,) = rank_targets(score, at_phase, filters=[self.config.eval.filter_seen])
        return ranking_metrics(ranks)

    def judge(self, model: nn.Module, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict:
        """Metrics with and without what users saw taken out, popularity beside the model, and by history length."""
        config, chosen = self.config, getattr(splits, split)
        counts = train_item_counts(dataset, splits)
        result = {"split": split, "users": len(chosen.users), "filter_seen": config.eval.filter_seen}
        for name, score in (
            ("model", model_scorer(model, config.train.autocast == "bf16")),
            ("popularity", popularity_scorer(counts, batches.device)),
        ):
            ranks = dict(zip(FILTERS, rank_targets(score, batches.epoch(0), filters=FILTERS)))
            result[name] = {how: ranking_metrics(ranks[how]) for how in FILTERS}
            if name == "model":
                history = chosen.end - 1 - dataset.user_offsets[chosen.users]
                result["by_history"] = metrics_by_length(ranks[config.eval.filter_seen], history)
        return result

    def protocol_lines(self, result: dict) -> list[str]:
        return [
            f"Split {result['split']}, {result['users']:,} users, full ranking over the catalogue. "
            f"Main figures: {FILTERED[self.config.eval.filter_seen]}.",
            *result["notes"],
        ]

    def tables(self, result: dict) -> list[Table]:
        names = metric_names()
        order = sorted(FILTERED, key=lambda how: how != self.config.eval.filter_seen)
        rows = [(f"{who}, {SHORT[how]}", result[who][how]) for how in order for who in ("model", "popularity")]
        if "sampled" in result:
            rows.append((result["sampled"]["label"], result["sampled"]))
        short = [0, *(1 + names.index(name) for name in ON_TERMINAL)]
        return [
            Table("Full ranking", ["", *names], [[label, *cells(values, names)] for label, values in rows], short),
            Table(
                "By length of the history",
                ["events", "users", *names],
                [[row["history"], f"{row['users']:,}", *cells(row, names)] for row in result["by_history"]],
                [],
            ),
        ]
