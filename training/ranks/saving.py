"""Checkpoints of several ranks by torch.distributed.checkpoint, and their weights as one safetensors file.

A checkpoint is a folder `step-00001234` with the ranks' shards of weights and of what the optimiser keeps, and
state.json with the progress. It is written in the background beside its place and takes that place when it is whole.
It can be read by any number of ranks, with the item table cut in any way. What a random generator of torch draws in a
step depends on the step alone (training/ranks/step.py): no generator's state is kept.
"""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from data.atomic import replace_folder
from data.types import shown
from models.hstu import SequenceModel
from models.protocols import RankGroup
from training.average import WeightAverage
from training.checkpoint import (
    CheckpointError,
    Progress,
    _checksum,
    _facts_checksum,
    load_folder,
    not_finite,
    prune,
    save_folder,
)
from training.optimizer import state_dtype
from training.ranks.processes import Ranks
from training.ranks.tables import ShardedTable, sharded_table

TABLE = "embedding.tables.embeddings.item.weight"  # the item table's name, as one process saves it


def sharded(table: ShardedTable, mesh: DeviceMesh, local: Tensor) -> Tensor:
    """Return `local`, [rows, columns] or [rows], as this rank's shard of a tensor that all ranks share.

    For [rows], one number for each row of a shard, the whole tensor has a column for each cut of the columns.
    """
    cells, world = local if local.dim() == 2 else local[:, None], table.ranks.world
    if table.kind == "table_wise":  # one rank has all
        return cells
    rows, columns = (table.num_items, cells.shape[1]), (table.num_items, cells.shape[1] * world)
    size, dimension = (rows, 0) if table.kind == "row_wise" else (columns, 1)
    stride = (size[1], 1)
    return DTensor.from_local(cells, mesh, [Shard(dimension)], run_check=False, shape=torch.Size(size), stride=stride)


class Saver:
    """Save and load what several ranks train; every rank calls the same methods in the same steps."""

    def __init__(self, folder: Path, model: SequenceModel, optimizer, average: WeightAverage | None, ranks: Ranks):
        self.folder, self.model, self.optimizer, self.average = folder / "checkpoints", model, optimizer, average
        self.run, self.ranks, self.table = folder, ranks, sharded_table(model)
        kind = "cpu" if self.table is None else self.table.device.type
        self.mesh = init_device_mesh(kind, (ranks.world,))
        # The background's messages must not meet those of training.
        self.group = dist.new_group(backend="gloo")
        self.background = ThreadPoolExecutor(1)
        self.pending: tuple[Future, Any, Path, dict] | None = None

    def save(self, progress: Progress, *, final: bool = False) -> None:
        """Begin to save; final: wait until the checkpoint is written, with the weights to evaluate beside it.

        A checkpoint of the same step is replaced.
        """
        self.wait()
        folder = self.folder / f"step-{progress.step:08d}"
        place = replace_folder(folder) if self.ranks.first else None
        temporary = self.ranks.of_first(place.__enter__() if place is not None else None)
        facts = progress.model_dump()
        if final:
            with nullcontext() if self.average is None else self.average.in_the_model():
                weights = self.whole_weights()
            if self.ranks.first:
                save_file(weights, temporary / "model.safetensors")
        try:
            future: Any = dcp.async_save(dict(self._state()), checkpoint_id=temporary, process_group=self.group)
        except Exception as error:
            raise self._failed(folder, error) from error
        self.pending = self.background.submit(self._checksums, future, temporary), place, temporary, facts
        if final:
            self.wait()

    def poll(self) -> None:
        """Move a checkpoint to its place if it has been written."""
        if self.pending is not None and self.pending[0].done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is written and in its place."""
        if self.pending is None:
            return
        (written, place, temporary, facts), self.pending = self.pending, None
        try:
            sums = written.result()
            if place is not None:
                facts |= {"sha256": sums, "sizes": {name: (temporary / name).stat().st_size for name in sums}}
                text = json.dumps({**facts, "checksum": _facts_checksum(facts)}, indent=1)
                (temporary / "state.json").write_text(text, encoding="utf-8")
                place.__exit__(None, None, None)
                prune(self.run, facts["run"])
        except Exception as error:
            raise self._failed(temporary, error) from error

    def _checksums(self, written: Future, folder: Path) -> dict[str, str]:
        """Wait until all ranks have written a checkpoint; return the checksums of its files by name on the first rank.

        Each rank reads what it wrote, in the background.
        """
        written.result()
        local = [path for path in folder.iterdir() if path.name.startswith(f"__{self.ranks.rank}_")]
        if self.ranks.first:
            local += [path for path in folder.iterdir() if path.suffix != ".distcp"]
        sums = {path.name: _checksum(path) for path in local}
        gathered = [sums] * self.ranks.world
        dist.gather_object(sums, gathered if self.ranks.first else None, group=self.group)
        return {name: value for part in gathered for name, value in part.items()}

    def _failed(self, folder: Path, error: Exception) -> CheckpointError:
        reason = getattr(error, "strerror", None) or str(error).strip().split("\n")[0]
        return CheckpointError(f"{folder}: cannot be written: {shown(reason, 300)}; what was saved before is as it was")

    def _state(self) -> Iterator[tuple[str, Any]]:
        """Return all tensors of a checkpoint by name, without copying them."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        for name, value in self.model.state_dict().items():
            yield f"model.{name}", value
        table = self.table

        def cut(value: Tensor) -> Tensor:
            return value if table is None or not value.dim() else sharded(table, self.mesh, value)

        if table is not None and table.kernel is not None:
            yield f"model.{TABLE}", cut(table.weight)
            for key, value in table.moments().items():
                yield f"optimizer.{TABLE}.{key}", cut(value)
        if self.average is not None:
            for weight, value in zip(self.average.weights, self.average.averages, strict=True):
                name = names.get(id(weight), TABLE)
                if table is None or name != TABLE:
                    yield f"average.{name}", value
                elif table.kernel is not None:
                    yield f"average.{name}", cut(value)
        for p in (p for group in self.optimizer.param_groups for p in group["params"]):
            name = names.get(id(p), TABLE)
            for key, value in self.optimizer.state.get(p, {}).items():
                if table is not None and name == TABLE and value.dim():
                    value = cut(value.view_as(table.weight))
                yield f"optimizer.{name}.{key}", value

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of what this rank holds of a checkpoint."""
        for name, value in self._state():
            yield name, value.to_local() if isinstance(value, DTensor) else value

    def load(self, source: Path) -> Progress:
        """Load a checkpoint into model, table, optimiser and average; return its progress.

        Raises CheckpointError if it is damaged, another model's, or one of a single process.
        """
        facts = checked_facts(source, self.ranks)
        progress = Progress.of(facts, source)
        if source.name != f"step-{progress.step:08d}":
            raise CheckpointError(f"{source}: damaged, it holds step {progress.step}")
        if not (source / ".metadata").is_file():
            raise CheckpointError(
                f"{source}: was saved by one process without `parallel`: resume it so, or begin with --init-from"
            )
        for p in (p for group in self.optimizer.param_groups for p in group["params"]):
            dtype = state_dtype(p)
            zeros = {key: torch.zeros_like(p, dtype=dtype, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[p] = {"step": torch.zeros((), device=p.device), **zeros}
        try:
            saved = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
            state = dict(self._state())
            missing = sorted(name for name in state.keys() - saved.keys() if not name.startswith("optimizer."))
            unknown = sorted(name for name in saved.keys() - state.keys())
            if self.table is not None and self.table.kernel is None:  # other ranks have it
                unknown = [name for name in unknown if TABLE not in name]
            if wrong := missing + unknown:
                raise CheckpointError(f"{source}: belongs to another model or optimiser, {wrong[0]} does not fit")
            for name, value in state.items():
                if name in saved and value.size() != getattr(saved[name], "size", None):
                    raise CheckpointError(f"{source}: belongs to another model or sharding, {name} does not fit")
            loaded = {name: value for name, value in state.items() if name in saved}
            # Copies into these tensors, which are those of the model, the table, the optimiser and the average.
            dcp.load(loaded, checkpoint_id=source, process_group=self.group)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{source}: cannot be read ({shown(str(error).strip(), 300)})") from error
        if (bad := not_finite(self.tensors())) is not None:
            raise CheckpointError(f"{source}: {bad} is not finite")
        for p in list(self.optimizer.state):
            name = next((n for n, q in self.model.named_parameters() if q is p), TABLE)
            if f"optimizer.{name}.step" not in saved:
                del self.optimizer.state[p]
        return progress

    def whole_weights(self) -> dict[str, Tensor]:
        """Return the model's state dict with the whole item table on the first rank's host; nothing on other ranks."""
        weights = {name: value.detach().cpu().contiguous() for name, value in self.model.state_dict().items()}
        if self.table is not None:
            weights |= {TABLE: whole_table(self.table)}
        return weights if self.ranks.first else {}

    def save_best(self, facts: dict) -> None:
        """Save the current weights to the run's folder `best`, in one safetensors file."""
        weights = self.whole_weights()
        if self.ranks.first:
            save_folder(self.run / "best", {"model": weights}, facts)


def whole_table(table: ShardedTable) -> Tensor:
    """Return the table [I, E] on the first rank's host, copied in blocks of rows; other ranks get one without rows."""
    whole = torch.empty(table.num_items if table.ranks.first else 0, table.size)
    for begin, rows in table.blocks():
        whole[begin : begin + len(rows)] = rows.cpu()
    return whole


def checked_facts(source: Path, ranks: RankGroup) -> dict:
    """Return the facts of a checkpoint or of best weights, each of whose files one rank checks.

    All ranks raise the CheckpointError that one of them found.
    """
    try:
        result: Any = load_folder(source, checked=slice(ranks.rank, None, ranks.world))[1]
    except CheckpointError as error:
        result = error
    for one in ranks.of_all(result):
        if isinstance(one, CheckpointError):
            raise one
    return result


@contextmanager
def open_slices(source: Path, table: ShardedTable | None) -> Iterator[tuple[dict[str, Tensor], Any]]:
    """Return (the weights of source/model.safetensors without a sharded table, that table as a slice).

    Its files must have been checked.
    """
    path = source / "model.safetensors"
    try:
        with safe_open(path, "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys() if table is None or name != TABLE}  # noqa: SIM118
            yield state, None if table is None else file.get_slice(TABLE)
    except (OSError, SafetensorError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{path}: cannot be read ({shown(str(error), 300)})") from error


def load_slices(model: SequenceModel, source: Path, ranks: RankGroup) -> None:
    """Load the weights of source/model.safetensors into a model, of its sharded table only this rank's shard."""
    checked_facts(source, ranks)
    table = sharded_table(model)
    with open_slices(source, table) as (state, rows):
        model.load_state_dict(state)
        if table is not None:
            if list(rows.get_shape()) != [table.num_items, table.size]:
                raise CheckpointError(f"{source}: belongs to another model, {TABLE} does not fit")
            table.fill(lambda begin, end: rows[begin:end])
