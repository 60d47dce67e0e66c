"""Define the task `retrieval`: predict the next item among all items, evaluated by full ranking over the catalogue."""

import sys
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from data.batches import Batches
from data.errors import ConfigError
from data.kept_arrays import kept_arrays
from data.splits import Split, Splits, first_of_time, repeats, target_events, target_samples, train_item_counts
from data.types import Dataset, shown
from evaluation.baselines import VERSION, Baselines, fit, left_out
from evaluation.ranking_metrics import (
    NAMES,
    Rankings,
    cutoff,
    describe_lists,
    informative,
    intervals,
    is_metric,
    metrics_by_length,
    metrics_by_popularity,
    ranking_metrics,
    user_metrics,
    weighted_ndcg,
)
from evaluation.scores import FILTERS, Scores, best_items, popularity_scorer, rank_targets, seen_by
from models.attention.contract import AuxLoss
from models.hstu import SequenceModel
from models.losses import Share, head_loss, own_items, repeats_of
from models.protocols import RankGroup
from models.tasks.contract import Served, Table, Task, TaskOptions, cells
from models.tasks.scoring import model_scorer

# Sentences of a report for the values of eval.filter_seen.
FILTERED = {
    "history": "all items of a user's history are removed from the ranking, so that a target that repeats one is a "
    "miss",
    "window": "the items of the model's window (the last max_seq_len events) are removed from the ranking, "
    "as in the published figures",
    "none": "nothing is removed from the ranking",
}
SHORT = {"history": "history removed", "window": "window removed", "none": "none removed"}
BASELINE = "baseline "  # begins the names of the baselines' arrays in `judged`
JUDGES, CHOOSES = (
    2_000,
    "NDCG@10",
)  # the number of validation samples and the metric that choose the baselines' settings
LISTED, LIST_LENGTH = 10_000, 10  # the number of users whose recommendation lists a report describes, and their length
SAMPLES, SAMPLE_LENGTH = 3, 5
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

    def evaluate(self, model: SequenceModel, batches: Batches, phase: int = sys.maxsize) -> dict[str, float]:
        score = model_scorer(model, self.config.train.autocast == "bf16", self.ranks)
        at_phase = (replace(batch, phase=phase) for batch in batches.epoch(0))
        (ranks,) = rank_targets(score, at_phase, filters=[self.config.eval.filter_seen])
        return ranking_metrics(ranks, self.names, rankings_of(batches.split))

    def baseline(self, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict[str, float]:
        score = popularity_scorer(train_item_counts(dataset, splits), batches.device)
        (ranks,) = rank_targets(score, batches.epoch(0), filters=[self.config.eval.filter_seen])
        return ranking_metrics(ranks, self.names, rankings_of(batches.split))

    def baselines(self, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict[str, dict[str, Any]]:
        filters, known = [self.config.eval.filter_seen], [splits.train_end, dataset.user_offsets, dataset.item_ids]
        arrays = kept_arrays(self.config.data, dataset, f"baselines-{VERSION}", known, lambda: fit(dataset, splits))
        models = Baselines(arrays, again=filters != ["history"])
        if splits.valid is not None:
            some = np.unique(np.linspace(0, len(splits.valid) - 1, JUDGES).astype(np.int64))
            judges = splits.valid.select(some)
            options = {"batch_size": self.config.eval.batch_size, "shuffle": False, "with_seen": True}
            of_valid = self.batches(dataset, judges, device=batches.device, **options)
            models.choose(
                lambda score: ranking_metrics(
                    rank_targets(score, of_valid.epoch(0), filters=filters)[0], [CHOOSES], rankings_of(judges)
                )[CHOOSES]
            )
        results = {}
        for name in models.names:
            (ranks,) = rank_targets(models.scorer(name), batches.epoch(0), filters=filters)
            results[name] = {
                "metrics": ranking_metrics(ranks, self.names, rankings_of(batches.split)),
                "settings": models.settings.get(name, {}),
                "judged": ranks,
            }
        return results

    def judge(self, model: SequenceModel, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict:
        """Compute metrics with and without filtering seen items, of the model and of popularity, and by history length.

        The result also describes the model's recommendation lists: the share of the catalogue in them, how rare their
        items are, and some lists in original ids.
        """
        config, chosen = self.config, getattr(splits, split)
        counts, main = train_item_counts(dataset, splits), self.config.eval.filter_seen
        events, rankings = target_events(chosen), rankings_of(chosen)
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
        described, cold = describe_lists(np.concatenate(lists), counts), counts == 0
        if dataset.features:
            shown_items = np.concatenate(lists)
            result["cold"] = {
                "items": int(cold.sum()),
                "targets": int(cold[dataset.items[events]].sum()),
                "in_lists": float(cold[shown_items[shown_items >= 0]].mean()),
            }
        result["lists"] = described | {"weighted_ndcg": weighted, "samples": samples(dataset, chosen, lists[0])}
        return result

    def user_values(self, judged: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        rankings = judged_rankings(judged)
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
        ranks, best, rankings = judged[self.config.eval.filter_seen], [self.config.best_metric], judged_rankings(judged)
        by_length = metrics_by_length(ranks, judged["events_before"], best, rankings)
        by_popularity = metrics_by_popularity(ranks, judged["target_count"], best, rankings)
        return {
            "events before the target": {row["history"]: row[best[0]] for row in by_length},
            "training events of the target": {row["events"]: row[best[0]] for row in by_popularity},
        }

    def protocol_lines(self, result: dict) -> list[str]:
        return [
            f"Split {result['split']}, {result['users']:,} users, full ranking over the catalogue. "
            f"Main metrics: {FILTERED[self.config.eval.filter_seen]} "
            f"(eval.filter_seen={self.config.eval.filter_seen}). The tables show the other choices, too.",
            f"{result['repeated']:.2%} of the targets repeat an earlier item of their user.",
            *self._time_lines(result),
            *self._cold_lines(result),
            *self._baseline_lines(result),
            *result["notes"],
        ]

    def _time_lines(self, result: dict) -> list[str]:
        lines = []
        if result["targets"] > result["users"]:
            lines.append(
                f"{result['targets']:,} targets in {result['rankings']:,} rankings; a user's are averaged first."
            )
        if share := result.get("same_time"):
            known = "hidden from" if self.config.eval.same_time == "hidden" else "part of"
            lines.append(
                f"{share:.2%} of the targets have the time of an earlier event of their user: such events are {known} "
                f"their history (eval.same_time={self.config.eval.same_time})."
            )
        return lines

    def _cold_lines(self, result: dict) -> list[str]:
        if "cold" not in result:
            return []
        cold = result["cold"]
        return [
            f"{cold['items']:,} items have no training event: the targets of {cold['targets']:,} users, and "
            f"{cold['in_lists']:.2%} of the entries of the model's lists."
        ]

    def _baseline_lines(self, result: dict) -> list[str]:
        """Return sentences about the settings of the baselines, and about those that these data are too large for."""
        settings = (
            f"{name} {', '.join(f'{option} {value}' for option, value in baseline['settings'].items())}"
            for name, baseline in result["baselines"].items()
            if baseline["settings"]
        )
        return [
            f"Settings of the baselines, chosen on the validation split if there is one: {'; '.join(settings)}.",
            *left_out(result["items"]),
        ]

    def tables(self, result: dict) -> list[Table]:
        names = informative(self.names, result["items"])
        order = sorted(FILTERED, key=lambda how: how != self.config.eval.filter_seen)
        rows = [(f"{who}, {SHORT[how]}", result[who][how]) for how in order for who in ("model", "popularity")]
        others = [item for item in result["baselines"].items() if item[0] != "popularity"]
        rows[2:2] = [(f"{name}, {SHORT[order[0]]}", baseline["metrics"]) for name, baseline in others]
        if "sampled" in result:
            rows.append((result["sampled"]["label"], result["sampled"]))
        short = [0, *(1 + names.index(name) for name in self.on_terminal if name in names)]
        lists = result["lists"]
        return [
            Table("Full ranking", ["", *names], [[label, *cells(values, names)] for label, values in rows], short),
            Table(
                "By length of the history",
                ["events", "users", *names],
                [[row["history"], f"{row['users']:,}", *cells(row, names)] for row in result["by_history"]],
                [],
            ),
            Table(
                "By popularity of the target (0 training events: a cold item)",
                ["training events", "users", *names],
                [[row["events"], f"{row['users']:,}", *cells(row, names)] for row in result["by_popularity"]],
                [],
            ),
            Table(
                "95% intervals over users (not over seeds)",
                ["", "from", "to"],
                [[name, f"{low:.4f}", f"{high:.4f}"] for name, (low, high) in result["intervals"].items()],
                [],
            ),
            Table(
                f"The model's lists of {lists['length']}: the share of the catalogue in any of them, how unequally "
                "they show items (Gini), the mean of -log2 of an item's share of the training events, and the NDCG "
                "with targets weighted by inverse popularity",
                ["users", "coverage", "Gini", "novelty", f"weighted NDCG@{lists['length']}"],
                [
                    [
                        *(f"{lists['users']:,}", f"{lists['coverage']:.1%}", f"{lists['gini']:.3f}"),
                        *(f"{lists['novelty']:.2f} bits", f"{lists['weighted_ndcg']:.4f}"),
                    ]
                ],
                [],
            ),
            Table(
                "Examples",
                ["user", "last events", "next event", "list"],
                [
                    [row["user"], ", ".join(row["history"]), row["target"], ", ".join(row["list"])]
                    for row in lists["samples"]
                ],
                [],
            ),
        ]


def rankings_of(split: Split) -> Rankings:
    """Return the rankings of a split's targets: one for each sample."""
    return Rankings(target_samples(split), split.users)


def judged_rankings(judged: dict[str, np.ndarray]) -> Rankings:
    """Return the rankings of the arrays `judged` of a run; those of earlier versions have one for each user."""
    return Rankings(judged.get("ranking", np.arange(len(judged["users"]))), judged["users"])


def samples(dataset: Dataset, split: Split, lists: np.ndarray) -> list[dict]:
    """Return, for a split's first users, the last events before the target, the target and the head of the list."""
    ids, examples = dataset.item_ids, []
    _, first = np.unique(target_samples(split), return_index=True)
    targets = target_events(split)[first]
    rows = zip(split.users, split.begin, split.end, targets, lists[:SAMPLES, :SAMPLE_LENGTH])
    for user, begin, end, target, items in rows:
        history = dataset.items[max(begin, end - 1 - SAMPLE_LENGTH) : end - 1]
        words = {"user": dataset.user_ids[user], "target": ids[dataset.items[target]]}
        shown_rows = {"history": history, "list": items[items >= 0]}
        examples.append(
            {key: shown(value) for key, value in words.items()}
            | {key: [shown(ids[item]) for item in row] for key, row in shown_rows.items()}
        )
    return examples
