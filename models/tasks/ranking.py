"""The task `ranking`: predict the actions that a user takes on an item, from earlier items and their actions.

Letters: T tokens, E embedding size, A kinds of action, K experts, M scored events.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from data.batch import Batch
from data.batches import Batches
from data.errors import ConfigError
from data.options import Options
from data.ranking import (
    RANKING_PROTOCOLS,
    Layout,
    RankingBatch,
    RankingBatches,
    TargetBatches,
    label_table,
    ranking_splits,
)
from data.splits import Split, Splits
from data.types import Dataset
from evaluation import binary_metrics, binary_report
from evaluation.binary_metrics import auc_difference, curves, mean_over_actions, metrics_by_history
from evaluation.ranking_baseline import predicted_by_history
from evaluation.ranking_metrics import LENGTH_EDGES
from evaluation.report import Table
from models.attention import ATTENTION_KINDS
from models.attention.contract import AuxLoss, AuxLosses
from models.hstu import SequenceModel
from models.losses import Share
from models.protocols import RunOptions
from models.tasks.contract import Served, Task


class ActionConfig(Options):
    """A kind of action: a flag of the data set, or values of the action column."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=60)
    """The action's name in reports; without `at_least`, it must be a flag of the data set or a text of its actions."""
    at_least: float | None = None
    """The least value of the action column that counts as the action, in units of the column (4 for 4 stars)."""
    weight: float = Field(1.0, gt=0)
    """The factor of the action's loss."""


class ActionHeads(nn.Module):
    """Compute a logit for each kind of action, [T, E] -> [T, A], by a head of one layer (hidden_dim=0) or two layers.

    experts: the number of hidden layers that all actions share, mixed by a gate of each action; with 0 each action has
    a separate one. Source: Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate
    Mixture-of-Experts, KDD 2018.
    """

    def __init__(self, count: int, hidden_dim: int, dropout: float, embedding_dim: int, experts: int = 0):
        super().__init__()
        self.norm = nn.LayerNorm(embedding_dim)
        self.hidden = self.gates = None
        size = embedding_dim
        if hidden_dim:
            size = hidden_dim
            self.hidden = nn.Parameter(torch.empty(experts or count, embedding_dim, size))
            for weight in self.hidden:
                nn.init.xavier_uniform_(weight)
        if experts:
            self.gates = nn.Parameter(torch.zeros(count, embedding_dim, experts))
        self.dropout = dropout
        self.weight = nn.Parameter(torch.empty(count, size))
        self.bias = nn.Parameter(torch.zeros(count))
        nn.init.normal_(self.weight, std=size**-0.5)

    def forward(self, out: Tensor) -> Tensor:
        x = self.norm(out)[:, None]  # [T, 1, E]
        if self.hidden is not None:
            hidden = F.silu(torch.einsum("toe,aeh->tah", x, self.hidden))
            if self.gates is not None:
                mix = torch.einsum("toe,aek->tak", x, self.gates).softmax(-1)
                hidden = torch.einsum("tak,tkh->tah", mix.to(hidden), hidden)
            x = hidden
        x = F.dropout(x, self.dropout, self.training)
        return (x * self.weight).sum(-1) + self.bias


@dataclass
class Predictions:
    """The scored events of a split in the data set's order.

    events         [M] int64, indices in the data set
    probabilities  [M, A] float32
    labels         [M, A] bool
    """

    events: np.ndarray
    probabilities: np.ndarray
    labels: np.ndarray


class Ranking(Task):
    """Predict the actions that the user takes on an item, from earlier items and their actions.

    Predictions are the outputs of tokens that do not include their actions; other tokens are only inputs.
    """

    class Config(Task.Config):
        protocols: ClassVar[tuple[str, ...]] = RANKING_PROTOCOLS
        unsupported: ClassVar[tuple[str, ...]] = (
            *("loss", "model.head", "model.action_embedding", "parallel.context", "train.augment"),
            *("eval.metrics", "eval.same_time", "data.targets"),
        )

        embeds_actions: ClassVar[bool] = True

        kind: Literal["ranking"]
        """The task."""
        actions: list[ActionConfig] = Field(min_length=1)
        """The actions to predict."""
        layout: Literal["interleaved", "targets"] = "interleaved"
        """`interleaved`: an event has a token for its item, which predicts, and one for its action. `targets`: an event
        is one token, and a sequence ends with candidates, which predict and do not attend to each other."""
        num_targets: int = Field(16, ge=1)
        """With `targets`, the number of candidates at the end of a training sequence, after at most
        max_seq_len - num_targets other events; evaluation has one candidate."""
        hidden_dim: int = Field(0, ge=0)
        """The hidden size of each action's head, a network of two layers; 0: one layer."""
        experts: int = Field(0, ge=0, le=1000)
        """The number of hidden layers that actions share, mixed by a gate for each action; 0: one per action."""
        dropout: float = Field(0.0, ge=0, lt=1)
        """The dropout of the heads' hidden layers."""

        @model_validator(mode="after")
        def _named_once(self):
            names = [action.name for action in self.actions]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"actions: expected each name once, got {', '.join(twice)} twice")
            if self.experts and not self.hidden_dim:
                raise ValueError("experts: needs hidden_dim, the size of the experts")
            if self.layout != "targets" and self.num_targets != type(self).model_fields["num_targets"].default:
                raise ValueError(f"num_targets is for layout=targets, got layout={self.layout}")
            return self

        def judged_by(self) -> dict[str, Any]:
            return {"kind": self.kind, "actions": [a.model_dump(exclude={"weight"}) for a in self.actions]}

        def metric_names(self) -> list[str]:
            """Return the means of metrics over actions; with several actions also `action/metric` for each action."""
            by_action = [f"{action.name}/{name}" for action in self.actions for name in binary_metrics.NAMES]
            return [*binary_metrics.NAMES, *(by_action if len(self.actions) > 1 else [])]

        def less_is_better(self, metric: str) -> bool:
            return metric.rpartition("/")[2] in ("log_loss", "normalized_entropy")

        def check_lists(self) -> None:
            raise ConfigError(
                f"task.kind={self.kind} scores given items: --predict, --recommend, --export-items and --sampled are "
                "for retrieval; Recommender.score and POST /scores score items (docs/serving.md)"
            )

        def served(self) -> Served:
            # Training also scores a user's first event, for which a service has no history.
            each, left = (1, self.num_targets) if self.layout == "targets" else (2, 1)
            return Served(each, left, splits=("valid", "test"))

        def check_run(self, run: RunOptions) -> None:
            super().check_run(run)
            if run.best_metric.rpartition("/")[2] == "calibration":
                raise ValueError(
                    f"eval.best_metric: {run.best_metric} is best at 1, not at its greatest or least value: set "
                    "another metric"
                )
            longest = run.model.max_seq_len
            if self.layout == "interleaved":
                if longest < 2:
                    raise ValueError("model.max_seq_len: expected at least 2, the tokens of an event, got 1")
                return
            if longest <= self.num_targets:
                raise ValueError(
                    f"model.max_seq_len={longest}: expected more than task.num_targets={self.num_targets}, the events "
                    "that are candidates"
                )
            for kind in (attention.kind for attention in run.model.attention):
                if not ATTENTION_KINDS.class_of(kind).candidates:
                    raise ValueError(
                        f"task.layout=targets: model.attention.kind={kind} does not support candidates: use dense, or "
                        "layout=interleaved"
                    )

    headline = ("auc", "gauc", "log_loss")
    plotted = ("auc", "gauc")

    @property
    def actions(self) -> list[ActionConfig]:
        return self.config.task.actions

    @property
    def names(self) -> list[str]:
        return [action.name for action in self.actions]

    @property
    def layout(self) -> Layout:  # type: ignore[override]  # depends on the configuration
        c = self.config
        if c.task.layout == "targets":
            return Layout(c.model.max_seq_len, c.task.num_targets)
        return Layout(c.model.max_seq_len // 2)

    def check_data(self, dataset: Dataset) -> None:
        if dataset.actions is None:
            raise ConfigError(f"task: ranking predicts actions, but {dataset.name} has none")
        self.label_table(dataset)

    def check_metric(self, dataset: Dataset, split: Split) -> None:
        # Whether a metric has a value depends on labels and users, not on predictions.
        assert split.scored is not None and dataset.actions is not None
        counts = split.end - split.scored
        events = np.repeat(split.end - np.cumsum(counts), counts) + np.arange(counts.sum())
        labels = self.label_table(dataset)[dataset.actions[events]].astype(bool)
        metric = self.config.best_metric
        if not np.isfinite(self.metrics(np.full(labels.shape, 0.5), labels, dataset.users_of(events))[metric]):
            raise ConfigError(
                f"eval.best_metric: {metric} has no value in the validation split: it needs events with and without "
                f"the action{', of the same user' if metric.endswith('gauc') else ''}"
            )

    def label_table(self, dataset: Dataset) -> np.ndarray:
        """Return [codes, A] int8, whether each action code of the data set counts as each kind of action."""
        return label_table(dataset, self.config.data.format, {action.name: action.at_least for action in self.actions})

    def splits(self, dataset: Dataset) -> Splits:
        c = self.config.data
        return ranking_splits(dataset, c.protocol, self.layout, train_on_valid=c.train_on_valid)

    def batches(self, dataset: Dataset, split: Split, **options) -> RankingBatches:
        options.pop("with_seen", None)  # ranking does not filter seen items
        batches = RankingBatches if self.layout.targets is None else TargetBatches
        return batches(dataset, split, label_table=self.label_table(dataset), **options)

    def head(self) -> ActionHeads:
        c = self.config.task
        return ActionHeads(len(c.actions), c.hidden_dim, c.dropout, self.config.model.embedding_dim, c.experts)

    def loss(self, model: SequenceModel, out: Tensor, batch: Batch, share: Share | None) -> tuple[Tensor, AuxLosses]:
        """Compute the binary cross-entropy: the mean over scored tokens, then the weighted sum over actions."""
        assert isinstance(batch, RankingBatch)
        labels = batch.labels
        scored = labels >= 0
        logits = model.task_head(out.float())
        losses = F.binary_cross_entropy_with_logits(logits, labels.clamp(min=0).to(logits), reduction="none")
        ranks = None if share is None else share.ranks
        count = scored.sum(0) if ranks is None else ranks.sum(scored.sum(0))
        means = torch.where(scored, losses, 0).sum(0) / count.clamp(min=1)
        # A tensor of weights would be copied from the host, which a CUDA graph cannot capture.
        loss = torch.stack([action.weight * mean for action, mean in zip(self.actions, means)]).sum()
        if len(self.actions) == 1:
            return loss, {}
        named = {f"loss/{action.name}": AuxLoss(mean, 0 * mean) for action, mean in zip(self.actions, means)}
        return loss, named

    def candidate_scores(self, model: SequenceModel, out: Tensor) -> Tensor:
        """Return the probabilities of the actions."""
        return model.task_head(out).sigmoid()

    @torch.no_grad()
    def predictions(self, model: SequenceModel, batches: Batches, phase: int = sys.maxsize) -> Predictions:
        """Compute the probabilities of the actions at every scored event of a split."""
        model.eval()
        device, autocast = batches.device.type, self.config.train.autocast == "bf16"
        parts: list[tuple[np.ndarray, ...]] = []
        for batch in batches.epoch(0):
            batch = batch if self.ranks is None else self.ranks.sequences(batch)
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                out, _ = model.raw_output(replace(batch, phase=phase))
            assert isinstance(batch, RankingBatch)
            scored = (batch.labels[:, 0] >= 0).nonzero()[:, 0]
            scores = self.candidate_scores(model, out[scored])
            tensors = (batch.events[scored], scores.float(), batch.labels[scored] > 0)
            parts.append(tuple(x.cpu().numpy() for x in tensors))
        if self.ranks is not None:
            parts = [part for gathered in self.ranks.all_gather(parts) for part in gathered]
        events, probabilities, labels = (np.concatenate(x) for x in zip(*parts))
        order = np.argsort(events)
        return Predictions(events[order], probabilities[order], labels[order])

    def evaluate(self, model: SequenceModel, batches: Batches, phase: int = sys.maxsize) -> dict[str, float]:
        predictions = self.predictions(model, batches, phase)
        return self.metrics(predictions.probabilities, predictions.labels, batches.dataset.users_of(predictions.events))

    def metrics(self, probabilities: np.ndarray, labels: np.ndarray, users: np.ndarray) -> dict[str, float]:
        """Compute `config.task.metric_names()` for probabilities [M, A] and labels [M, A]; users: [M]."""
        values = mean_over_actions(binary_metrics.binary_metrics, self.names, probabilities, labels, users)
        return {name: float(value) for name, value in values.items()}

    def judge(self, model: SequenceModel, dataset: Dataset, splits: Splits, split: str, batches: Batches) -> dict:
        """Compute metrics of the model and a baseline, their difference of AUCs, curves, and metrics by history."""
        predictions = self.predictions(model, batches)
        users = dataset.users_of(predictions.events)
        baseline = predicted_by_history(dataset, self.label_table(dataset), splits.train_end, predictions.events)
        history = predictions.events - dataset.user_offsets[users]
        result: dict[str, Any] = {
            "split": split,
            "users": len(np.unique(users)),
            "events": len(predictions.events),
            "model": self.metrics(predictions.probabilities, predictions.labels, users),
            "baseline": self.metrics(baseline, predictions.labels, users),
            "actions": {},
        }
        for a, action in enumerate(self.actions):
            p, q, y = predictions.probabilities[:, a], baseline[:, a], predictions.labels[:, a]
            result["actions"][action.name] = {
                "positive_share": float(y.mean()),
                "auc_over_baseline": dict(zip(("difference", "lower", "upper"), auc_difference(p, q, y, users))),
                "by_history": metrics_by_history(p, y, users, history, LENGTH_EDGES),
                "curves": {"model": curves(p, y), "baseline": curves(q, y)},
            }
        result["judged"] = {"users": users, **vars(predictions)}
        return result

    def user_values(self, judged: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        arrays = judged["probabilities"], judged["labels"], judged["users"]
        return np.unique(judged["users"]), mean_over_actions(binary_metrics.user_values, self.names, *arrays)

    def breakdowns(self, result: dict, judged: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
        action, _, metric = self.config.best_metric.rpartition("/")
        return {
            f"events before the scored one{f': {name}' if len(self.actions) > 1 else ''}": {
                row["history"]: row[metric] for row in values["by_history"]
            }
            for name, values in result["actions"].items()
            if action in ("", name)
        }

    def protocol_lines(self, result: dict) -> list[str]:
        return [
            f"Split {result['split']}, {result['users']:,} users, {result['events']:,} scored events. The baseline is "
            "a logistic regression on the item's training labels and the user's earlier labels.",
            *result["notes"],
        ]

    def tables(self, result: dict) -> list[Table]:
        return binary_report.tables(result, self.names)

    def plots(self, result: dict) -> dict[str, bytes]:
        return binary_report.plots(result)
