"""Define the task `retrieval`: predict the next item, evaluated by ranking the whole catalogue."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from data.batches import Batches
from data.cached_arrays import cached_arrays
from data.errors import ConfigError
from data.splits import Splits, first_of_time, repeats, target_events, train_item_counts
from data.types import Dataset, shown
from evaluation import ranking_report
from evaluation.baselines import VERSION, Baselines, fit
from evaluation.ranking_metrics import (
    NAMES,
    Rankings,
    cutoff,
    intervals,
    is_metric,
    metrics_by_length,
    metrics_by_popularity,
    ranking_metrics,
    user_metrics,
    weighted_ndcg,
)
from evaluation.report import Table
from evaluation.scores import FILTERS, Scores, best_items, popularity_scorer, rank_targets, seen_by
from models.attention.contract import AuxLosses
from models.hstu import SequenceModel
from models.losses import Share, head_loss
from models.protocols import RankGroup
from models.tasks.contract import Served, Task, TaskOptions
from models.tasks.scoring import model_scorer

BASELINE = "baseline "  # the prefix of the names of baselines in `judged`
# The number of validation samples and the metric by which settings of baselines are chosen.
TUNING_SAMPLES, TUNING_METRIC = 2_000, "NDCG@10"
# The number and the length of the recommendation lists that a report describes.
LISTED, LIST_LENGTH = 10_000, 10
ON_TERMINAL = ("HR@1", "HR@10", "HR@50", "NDCG@10", "MRR")


class Retrieval(Task):
    """Predict the next item: each token's output is scored against all items, and the target is the item after it."""

    class Config(Task.Config):
        unsupported: ClassVar[tuple[str, ...]] = ("data.train_on_valid",)

        kind: Literal["retrieval"] = "retrieval"
        """The task."""

        def metric_names(self) -> list[str]:
            return sorted(NAMES, key=lambda name: name != "NDCG@10")

        def has_metric(self, name: str) -> bool:
            return is_metric(name)

        def check_lists(self) -> None:
            pass

        def served(self) -> Served | None:
            return Served()

    plotted_baseline = "popularity"

    def __init__(self, config: TaskOptions, ranks: RankGroup | None = None):
        super().__init__(config, ranks)
        metrics, best = config.eval.metrics, config.best_metric
        self.names = tuple(dict.fromkeys([*(NAMES if metrics is None else metrics), best]))
        shown_names = ("HR@10", "NDCG@10", "MRR") if metrics is None else self.names[:3]
        self.plotted = tuple(dict.fromkeys([*shown_names, best]))
        self.headline = tuple(dict.fromkeys([*shown_names[:2], best]))
        self.on_terminal = ON_TERMINAL if metrics is None else self.names

    def check_data(self, dataset: Dataset) -> None:
        if dataset.num_items == 1:
            raise ConfigError(f"{shown(dataset.name, 200)}: expected at least two items to rank, got one")
        best = self.config.best_metric
        if best.startswith(("HR@", "Recall@")) and cutoff(best) >= dataset.num_items and self.config.eval.every:
            raise ConfigError(f"eval.best_metric: {best} is 1 for any model of {dataset.num_items} items")

    def loss(self, model: SequenceModel, out: Tensor, batch: Batch, share: Share | None) -> tuple[Tensor, AuxLosses]:
        dtype = torch.bfloat16 if self.config.train.autocast == "bf16" else None
        return head_loss(model, self.config.loss, out, batch, share, dtype)

    def _judged(
        self, score: Callable[[Batch], Scores], batches: Batches, names: Sequence[str] | None = None
    ) -> tuple[dict[str, float], np.ndarray]:
        """Return (metrics, ranks) of the targets of a split with eval.filter_seen."""
        (ranks,) = rank_targets(score, batches.epoch(0), filters=[self.config.eval.filter_seen])
        return ranking_metrics(ranks, names or self.names, Rankings.of(batches.split)), ranks

    def evaluate(self, model: SequenceModel, batches: Batches, phase: int = sys.maxsize) -> dict[str, float]:
        score = model_scorer(model, self.config.train.autocast == "bf16", self.ranks)
        return self._judged(lambda batch: score(replace(batch, phase=phase)), batches)[0]

    def baseline(self, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict[str, float]:
        return self._judged(popularity_scorer(train_item_counts(dataset, splits), batches.device), batches)[0]

    def baselines(self, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict[str, dict[str, Any]]:
        known = [splits.train_end, dataset.user_offsets, dataset.item_ids]
        arrays = cached_arrays(self.config.data, dataset, f"baselines-{VERSION}", known, lambda: fit(dataset, splits))
        models = Baselines(arrays, again=self.config.eval.filter_seen != "history")
        if splits.valid is not None:
            tuned_on = np.unique(np.linspace(0, len(splits.valid) - 1, TUNING_SAMPLES).astype(np.int64))
            options = {"batch_size": self.config.eval.batch_size, "shuffle": False, "with_seen": True}
            samples = self.batches(dataset, splits.valid.select(tuned_on), device=batches.device, **options)
            models.choose(lambda score: self._judged(score, samples, [TUNING_METRIC])[0][TUNING_METRIC])
        results = {}
        for name in models.names:
            metrics, ranks = self._judged(models.scorer(name), batches)
            results[name] = {"metrics": metrics, "settings": models.settings.get(name, {}), "judged": ranks}
        return results

    def judge(self, model: SequenceModel, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict:
        """Compute metrics of the model and of popularity with and without seen items, and metrics by groups.

        The result also describes the model's recommendation lists: their share of the catalogue, the popularity of
        their items, and some lists in original ids.
        """
        config, chosen = self.config, getattr(splits, split)
        counts, main = train_item_counts(dataset, splits), self.config.eval.filter_seen
        events, rankings = target_events(chosen), Rankings.of(chosen)
        result: dict[str, Any] = {"split": split, "users": len(np.unique(chosen.users)), "items": dataset.num_items}
        result |= {"filter_seen": main, "repeated": float(repeats(dataset, events).mean())}
        result |= {"targets": len(events), "rankings": len(chosen)}
        if dataset.has_timestamps:
            result["same_time"] = float((first_of_time(dataset)[events] < events).mean())
        scorer = model_scorer(model, config.train.autocast == "bf16", self.ranks)
        lists: list[np.ndarray] = []

        def listed(batch: Batch) -> Scores:
            scores = scorer(batch)
            if sum(len(part) for part in lists) < LISTED:
                values, items = best_items(scores, LIST_LENGTH, None if main == "none" else seen_by(main, batch))
                lists.append(items.masked_fill(values.isinf(), -1).cpu().numpy())  # -1: no item remains
            return scores

        for name, score in (("model", listed), ("popularity", popularity_scorer(counts, batches.device))):
            ranks = dict(zip(FILTERS, rank_targets(score, batches.epoch(0), filters=FILTERS)))
            result[name] = {how: ranking_metrics(ranks[how], self.names, rankings) for how in FILTERS}
            if name == "model":
                history = chosen.end - 1 - dataset.user_offsets[chosen.users]
                result["by_history"] = metrics_by_length(ranks[main], history, self.names, rankings)
                result["intervals"] = intervals(ranks[main], self.plotted, rankings)
                targets = counts[dataset.items[events]]
                result["by_popularity"] = metrics_by_popularity(ranks[main], targets, self.names, rankings)
                weighted = weighted_ndcg(ranks[main], targets, LIST_LENGTH)
                arrays = {"users": chosen.users, "events": events, "events_before": history}
                result["judged"] = arrays | {"ranking": rankings.ranking, "target_count": targets} | ranks
        result["baselines"] = self.baselines(dataset, splits, split, batches)
        for name, baseline in result["baselines"].items():
            result["judged"][f"{BASELINE}{name}"] = baseline.pop("judged")
        described = ranking_report.described_lists(dataset, chosen, np.concatenate(lists), counts)
        described["lists"]["weighted_ndcg"] = weighted
        return result | described

    def user_values(self, judged: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        rankings = Rankings.from_judged(judged)
        return np.unique(rankings.users), user_metrics(judged[self.config.eval.filter_seen], self.names, rankings)

    def baseline_values(self, judged: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        main, metric = self.config.eval.filter_seen, self.config.best_metric
        return {
            key.removeprefix(BASELINE): self.user_values(judged | {main: ranks})[1][metric]
            for key, ranks in judged.items()
            if key.startswith(BASELINE)
        }

    def breakdowns(self, result: dict, judged: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
        ranks, rankings = judged[self.config.eval.filter_seen], Rankings.from_judged(judged)
        best = [self.config.best_metric]
        by_length = metrics_by_length(ranks, judged["events_before"], best, rankings)
        by_popularity = metrics_by_popularity(ranks, judged["target_count"], best, rankings)
        return {
            "events before the target": {row["history"]: row[best[0]] for row in by_length},
            "training events of the target": {row["events"]: row[best[0]] for row in by_popularity},
        }

    def protocol_lines(self, result: dict) -> list[str]:
        return ranking_report.protocol_lines(result, self.config.eval.filter_seen, self.config.eval.same_time)

    def tables(self, result: dict) -> list[Table]:
        return ranking_report.tables(result, self.names, self.on_terminal, self.config.eval.filter_seen)
