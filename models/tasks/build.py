"""Define TASKS, the tasks by their names in `task.kind`.

A task that is defined outside this package is named by its path, `my_package.my_module:MyTask`.
"""

from typing import Annotated

from pydantic import BeforeValidator, SerializeAsAny

from data.kinds import Kinds
from models.protocols import RankGroup
from models.tasks.contract import Task, TaskOptions
from models.tasks.ranking import Ranking
from models.tasks.recall import Recall
from models.tasks.retrieval import Retrieval

TASKS: dict[str, type[Task]] = {"retrieval": Retrieval, "ranking": Ranking, "recall": Recall}
TASK_KINDS = Kinds("task", "task", Task, TASKS)
TaskConfig = Annotated[SerializeAsAny[Task.Config], BeforeValidator(TASK_KINDS.read)]


def build_task(config: TaskOptions, ranks: RankGroup | None = None) -> Task:
    """Build the task `config.task.kind`; ranks: the ranks that evaluate the run together."""
    return TASK_KINDS.class_of(config.task.kind)(config, ranks)
