"""Declare what networks and tasks need of a run's configuration, of ranks and of an item table that is cut over them.

training/config.py and training/ranks have the classes that satisfy these. Letters: I items, E embedding size, n ids, R
rows.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from data.batch import Batch
from data.config import DataConfig
from evaluation.scores import CatalogueRanks


class TrainOptions(Protocol):
    """Declare the options of training that others read."""

    @property
    def autocast(self) -> str: ...
    @property
    def compile(self) -> bool: ...


class EvalOptions(Protocol):
    """Declare the options of evaluation that others read."""

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
    """Declare the options of the distribution over ranks that others read."""

    @property
    def context(self) -> int: ...
    @property
    def context_by(self) -> str: ...
    @property
    def sharded(self) -> bool: ...


class RunOptions(Protocol):
    """Declare the parts of a run's configuration that the rules of one another read (`check_run`)."""

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
    """The ranks that share a batch or a catalogue; each calls the same methods in the same order.

    world   their number; rank: the number of this process
    engine  whether batches or tables are spread over them, even over a single one
    """

    world: int
    rank: int
    engine: bool

    @property
    def first(self) -> bool:
        """Whether this process writes what a run leaves."""

    def sequences(self, batch: Batch) -> Batch:
        """Return this rank's share of the sequences of a batch."""


class ItemTable(Protocol):
    """The rows of all items, [num_items, size], of which each rank has some rows or some columns.

    begin, end  (first row, first column) and the ends of this rank's shard
    """

    num_items: int
    size: int
    begin: tuple[int, int]
    end: tuple[int, int]

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows [n, E] of the items `ids` [n] int64; all ranks call it together."""

    def local_rows(self) -> Tensor:
        """Return the shard [R, E] of a table that is cut by rows, with its gradient."""

    def between(self, begin: int, end: int) -> Tensor:
        """Return the rows begin .. end - 1; all ranks call it together, each with its range."""

    def fill(self, rows: Callable[[int, int], Tensor]) -> None:
        """Fill the shard; rows(begin, end): those rows of the whole table."""

    def draw(self, trained: Tensor | None) -> None:
        """Fill the shard at random; trained [I] bool: the items whose rows are not zero."""
