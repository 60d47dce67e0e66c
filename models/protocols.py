"""Declare the interfaces of a run's configuration, of ranks and of a sharded item table that models and tasks use.

training/config.py and training/ranks implement them. Letters: I items, E embedding size, n ids, R rows.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from data.batch import Batch
from data.config import DataConfig
from evaluation.scores import CatalogueRanks


class TrainOptions(Protocol):
    """Declare options of training."""

    @property
    def autocast(self) -> str: ...
    @property
    def compile(self) -> bool: ...


class EvalOptions(Protocol):
    """Declare options of evaluation."""

    @property
    def every(self) -> int: ...
    @property
    def filter_seen(self) -> str: ...
    @property
    def metrics(self) -> list[str] | None: ...
    @property
    def same_time(self) -> str: ...
    @property
    def batch_size(self) -> int: ...


class ParallelOptions(Protocol):
    """Declare options of the distribution over ranks."""

    @property
    def context(self) -> int: ...
    @property
    def context_by(self) -> str: ...
    @property
    def sharded(self) -> bool: ...


class RunOptions(Protocol):
    """Declare a run's configuration as `check_run` reads it."""

    @property
    def data(self) -> DataConfig: ...
    @property
    def task(self) -> Any: ...
    @property
    def model(self) -> Any: ...
    @property
    def loss(self) -> Any: ...
    @property
    def train(self) -> TrainOptions: ...
    @property
    def eval(self) -> EvalOptions: ...
    @property
    def parallel(self) -> ParallelOptions: ...
    @property
    def best_metric(self) -> str: ...


class RankGroup(CatalogueRanks, Protocol):
    """The ranks that share a batch or a catalogue; all must call the same methods in the same order.

    world             the number of ranks
    rank              the number of this process
    distributed_step  whether a step distributes batches or tables over ranks, even over a single one
    """

    world: int
    rank: int
    distributed_step: bool

    @property
    def first(self) -> bool:
        """Whether this process writes the files of a run."""

    def sequences(self, batch: Batch) -> Batch:
        """Return this rank's share of the sequences of a batch."""


class ItemTable(Protocol):
    """A table of all items, [num_items, size], of which each rank has a shard of rows or columns.

    begin, end  (row, column) of the first element of this rank's shard, and after its last element
    """

    num_items: int
    size: int
    begin: tuple[int, int]
    end: tuple[int, int]

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows [n, E] of the items `ids` [n] int64; all ranks must call it together."""

    def local_rows(self) -> Tensor:
        """Return the shard [R, E] of a table that is sharded by rows, with its gradient."""

    def between(self, begin: int, end: int) -> Tensor:
        """Return the rows begin .. end - 1; all ranks must call it together, each with its range."""

    def fill(self, rows: Callable[[int, int], Tensor]) -> None:
        """Fill the shard; rows(begin, end): the rows begin .. end - 1 of the whole table."""

    def draw(self, trained: Tensor | None) -> None:
        """Initialise the shard at random; trained [I] bool: the items whose rows are not zero."""
