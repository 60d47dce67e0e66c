"""Read and write folders of torch.distributed.checkpoint.

torch.distributed.checkpoint is slow to import, so other modules import this module inside functions.
"""

import pickle
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from data.types import shown
from training.ranks.tables import ShardedTable
from training.saved import CheckpointError

# The (module, name) that a checkpoint's .metadata, a pickle, may refer to.
PICKLED = {(metadata.__name__, name) for name, value in vars(metadata).items() if isinstance(value, type)}
PICKLED = {(module, name) for module, name in PICKLED if getattr(metadata, name).__module__ == module}
PICKLED |= {("torch", str(x).removeprefix("torch.")) for x in vars(torch).values() if isinstance(x, torch.dtype)}
PICKLED |= {("torch", "Size"), ("torch.serialization", "_get_layout")}
PICKLED |= {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}
PICKLED |= {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PICKLED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """Read a checkpoint; a .metadata file that refers to other names than PICKLED is refused before it is unpickled."""

    def read_metadata(self, *args: Any, **options: Any) -> metadata.Metadata:
        with Path(self.path, ".metadata").open("rb") as file:
            _Unpickler(file).load()
        return super().read_metadata(*args, **options)


@contextmanager
def reading(source: Path) -> Iterator[None]:
    """Raise errors in the block as CheckpointError for `source`, whose checksums are correct."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about reading by a single process, which is intended
            yield
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{source}: cannot be read ({reason(error)})") from error


def reason(error: BaseException) -> str:
    """Return the cause of an error of torch.distributed.checkpoint, in one line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    text = getattr(error, "strerror", None) or str(error).strip().split("\n")[0]
    return shown(text or type(error).__name__, 300)


def saved_tensors(source: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shape and dtype of each tensor of a checkpoint by name."""
    with reading(source):
        entries: Any = Reader(source).read_metadata().state_dict_metadata
        return {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}


def read_tensors(source: Path, tensors: dict[str, Any]) -> None:
    """Load tensors, or this rank's shards of them, in place from a checkpoint by name."""
    with reading(source):
        dcp.load(tensors, storage_reader=Reader(source), no_dist=True)


def sharded(table: ShardedTable, mesh: DeviceMesh, local: Tensor) -> Tensor:
    """Return a DTensor with `local`, [rows, columns] or [rows], as this rank's shard; table_wise: `local` as a matrix.

    If `local` is [rows], one number for each row, a column-wise DTensor has one column for each rank.
    """
    cells, world = local if local.dim() == 2 else local[:, None], table.ranks.world
    if table.kind == "table_wise":  # one rank has the whole table
        return cells
    rows, columns = (table.num_items, cells.shape[1]), (table.num_items, cells.shape[1] * world)
    size, dimension = (rows, 0) if table.kind == "row_wise" else (columns, 1)
    stride = (size[1], 1)
    return DTensor.from_local(cells, mesh, [Shard(dimension)], run_check=False, shape=torch.Size(size), stride=stride)


def write_tensors(folder: Path, tensors: dict[str, Any], group: dist.ProcessGroup | None) -> Future | None:
    """Write tensors to a folder; with a group, return a future: each rank writes its shards in the background."""
    if group is None:
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)
        return None
    saved: Any = dcp.async_save(tensors, checkpoint_id=folder, process_group=group)
    return saved


def local(value: Any) -> Tensor:
    """Return this rank's shard of a DTensor, and other tensors unchanged."""
    return value.to_local() if isinstance(value, DTensor) else value
