"""Build the task that a configuration names."""

from models.protocols import RankGroup
from models.tasks.contract import RunOptions, Task
from models.tasks.ranking import Ranking
from models.tasks.recall import Recall
from models.tasks.retrieval import Retrieval

TASKS: dict[str, type[Task]] = {"retrieval": Retrieval, "ranking": Ranking, "recall": Recall}


def build_task(config: RunOptions, ranks: RankGroup | None = None) -> Task:
    """Build the task that `config.task.kind` names; ranks: those that evaluate the run together."""
    return TASKS[config.task.kind](config, ranks)
