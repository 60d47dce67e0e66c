"""Define the task `retrieval`: predict the next item among all items, evaluated by full ranking over the catalogue."""

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
from models.attention.contract import AuxLoss
from models.hstu import SequenceModel
from models.losses import Share, head_loss, own_items, repeats_of
from models.protocols import RankGroup
from models.tasks.contract import Served, Task, TaskOptions
from models.tasks.scoring import model_scorer

BASELINE = "baseline "  # begins the names of the baselines' arrays in `judged`
JUDGES, CHOOSES = 2_000, "NDCG@10"  # how many validation samples choose the baselines' settings, and by which metric
LISTED, LIST_LENGTH = 10_000, 10  # the number of users whose recommendation lists a report describes, and their length
ON_TERMINAL = ("HR@1", "HR@10", "HR@50", "NDCG@10", "MRR")


class Retrieval(Task):
    """Predict the next item among all items: a token's output is scored against them, its target is the next one."""

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
            raise ConfigError(f"{shown(dataset.name, 200)}: has one item, so that there is nothing to rank")
        best = self.config.best_metric
        if best.startswith(("HR@", "Recall@")) and cutoff(best) >= dataset.num_items and self.config.eval.every:
            raise ConfigError(f"eval.best_metric: {best} is 1 for any model of {dataset.num_items} items")

    def loss(
        self,
        model: SequenceModel,
        out: Tensor,
        batch: Batch,
        whole: Batch,
        dtype: torch.dtype | None,
        share: Share | None = None,
    ) -> tuple[Tensor, dict[str, AuxLoss]]:
        part, c, longest = None if batch.cut is None else batch.cut.index, self.config, self.config.model.max_seq_len
        excluded, repeats = own_items(c.loss, batch, longest), repeats_of(model, batch, longest)
        return head_loss(model, c.loss, out, whole.target_ids, dtype, part, share, excluded, repeats)

    def _judged(
        self, score: Callable[[Batch], Scores], batches: Batches, names: Sequence[str] | None = None
    ) -> tuple[dict[str, float], np.ndarray]:
        """Return (metrics, ranks) of the targets of a split under eval.filter_seen."""
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
            some = np.unique(np.linspace(0, len(splits.valid) - 1, JUDGES).astype(np.int64))
            options = {"batch_size": self.config.eval.batch_size, "shuffle": False, "with_seen": True}
            judges = self.batches(dataset, splits.valid.select(some), device=batches.device, **options)
            models.choose(lambda score: self._judged(score, judges, [CHOOSES])[0][CHOOSES])
        results = {}
        for name in models.names:
            metrics, ranks = self._judged(models.scorer(name), batches)
            results[name] = {"metrics": metrics, "settings": models.settings.get(name, {}), "judged": ranks}
        return results

    def judge(self, model: SequenceModel, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict:
        """Compute metrics with and without filtering seen items, of the model and of popularity, and by history length.

        The result also describes the model's recommendation lists: the share of the catalogue in them, how rare their
        items are, and some lists in original ids.
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
                of_users = {"users": chosen.users, "events": events, "events_before": history}
                result["judged"] = of_users | {"ranking": rankings.ranking, "target_count": targets} | ranks
        result["baselines"] = self.baselines(dataset, splits, split, batches)
        for name, of_baseline in result["baselines"].items():
            result["judged"][f"{BASELINE}{name}"] = of_baseline.pop("judged")
        described = ranking_report.described_lists(dataset, chosen, np.concatenate(lists), counts)
        described["lists"]["weighted_ndcg"] = weighted
        return result | described

    def user_values(self, judged: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        rankings = Rankings.from_judged(judged)
        return np.unique(rankings.users), user_metrics(judged[self.config.eval.filter_seen], self.names, rankings)

    def baseline_values(self, judged: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        main, metric = self.config.eval.filter_seen, self.config.best_metric
        of_baselines = {
            key.removeprefix(BASELINE): judged | {main: ranks}
            for key, ranks in judged.items()
            if key.startswith(BASELINE)
        }
        return {name: self.user_values(ranks)[1][metric] for name, ranks in of_baselines.items()}

    def breakdowns(self, result: dict, judged: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
        ranks, best, rankings = (
            judged[self.config.eval.filter_seen],
            [self.config.best_metric],
            Rankings.from_judged(judged),
        )
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
