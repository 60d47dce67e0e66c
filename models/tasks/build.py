"""Build the task that a configuration names."""

from models.tasks.contract import Task
from models.tasks.ranking import Ranking
from models.tasks.recall import Recall
from models.tasks.retrieval import Retrieval
from training.config import RunConfig
from training.ranks.processes import Ranks

TASKS: dict[str, type[Task]] = {"retrieval": Retrieval, "ranking": Ranking, "recall": Recall}


def build_task(config: RunConfig, ranks: Ranks | None = None) -> Task:
    """Build the task that `config.task.kind` names; ranks: those that evaluate the run together."""
    return TASKS[config.task.kind](config, ranks)
