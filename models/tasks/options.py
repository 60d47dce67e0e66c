"""Define the options of each task, `task:` in a run's configuration."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from data.options import Options
from models.tasks import binary_metrics
from models.tasks.ranking_metrics import metric_names


class RetrievalConfig(Options):
    """Predict the next item among all items."""

    kind: Literal["retrieval"] = "retrieval"
    """The task."""

    def metric_names(self) -> list[str]:
        """Return the metrics of an evaluation; the first one chooses the best weights by default."""
        return sorted(metric_names(), key=lambda name: name != "NDCG@10")


class ActionConfig(Options):
    """One kind of action: a flag of the data set by its name, or values of the action column."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=60)
    """The action's name in reports and, without `at_least`, the name of one of the data set's flags."""
    at_least: float | None = None
    """The least value of the action column that counts as the action, in the column's own units (4 stars)."""
    weight: float = Field(1.0, gt=0)
    """The factor of the action's loss."""


class RankingConfig(Options):
    """Predict the actions that the user takes on an item, from items and actions in turn."""

    kind: Literal["ranking"]
    """The task."""
    actions: list[ActionConfig] = Field(min_length=1)
    """The actions that are predicted."""
    hidden_dim: int = Field(0, ge=0)
    """The hidden size of each action's head, a network of two layers; 0 is one layer."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """The dropout of the heads' hidden layer."""

    @model_validator(mode="after")
    def _named_once(self):
        names = [action.name for action in self.actions]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"actions: {', '.join(twice)} named twice")
        return self

    def metric_names(self) -> list[str]:
        """Return the mean of each metric over the actions and, if there are several, each action's own
        `action/metric`.
        """
        by_action = [f"{action.name}/{name}" for action in self.actions for name in binary_metrics.NAMES]
        return [*binary_metrics.NAMES, *(by_action if len(self.actions) > 1 else [])]


class RecallConfig(Options):
    """Predict what followed an item when it was shown: the generated task of data/recall.py."""

    kind: Literal["recall"]
    """The task."""

    def metric_names(self) -> list[str]:
        """Return accuracy, the share of recalls whose target scores highest, and worst, that share at the worst
        distance.
        """
        return ["accuracy", "worst"]


TaskConfig = Annotated[RetrievalConfig | RankingConfig | RecallConfig, Field(discriminator="kind")]
