"""Read the weights to evaluate from best/ or from a checkpoint.

best/ has one safetensors file. A checkpoint is a folder of torch.distributed.checkpoint: any number of ranks can read
it, whatever number of ranks wrote it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from data.atomic import find_folder
from data.types import shown
from models.hstu import SequenceModel
from models.protocols import RankGroup
from training.ranks.tables import ShardedTable, sharded_table
from training.saved import CheckpointError, load_folder

TABLE = "embedding.tables.embeddings.item.weight"  # the item table's name in a state dict


def whole_weights(model: nn.Module, table: ShardedTable | None, first: bool) -> dict[str, Tensor]:
    """Return the model's state dict, with the whole item table, on the CPU of the first rank; {} on other ranks."""
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    if table is not None:
        whole = torch.empty(table.num_items if first else 0, table.size)
        for begin, rows in table.blocks():
            whole[begin : begin + len(rows)] = rows.cpu()
        weights[TABLE] = whole
    return weights if first else {}


def is_one_file(source: Path) -> bool:
    """Return whether the weights are in model.safetensors, as in best/ and in checkpoints of version 0.2.0."""
    return source.name == "best" or source.name.startswith(".best") or (source / "model.safetensors").exists()


def evaluated_names(source: Path) -> dict[str, tuple[str, torch.Size, torch.dtype]]:
    """Map each weight's name to (name in the checkpoint, shape, dtype) of its average or, without one, the weight."""
    from training import dcp

    saved = dcp.saved_tensors(source)
    names = {}
    for name in saved:
        kind, _, weight = name.partition(".")
        if kind == "model":
            names[weight] = f"average.{weight}" if f"average.{weight}" in saved else name, *saved[name]
    return names


def saved_weights(source: Path) -> tuple[dict[str, Tensor], dict]:
    """Return (the weights to evaluate, the facts) of best/ or of a checkpoint; the item table is whole."""
    source = find_folder(source)
    if is_one_file(source):
        tensors, facts = load_folder(source, "model")
        return tensors["model"], facts
    from training import dcp

    _, facts = load_folder(source, checked=slice(None))
    names = evaluated_names(source)
    weights = {name: torch.empty(size, dtype=dtype) for name, (_, size, dtype) in names.items()}
    dcp.read_tensors(source, {names[name][0]: weight for name, weight in weights.items()})
    return weights, facts


def checked_facts(source: Path, ranks: RankGroup) -> dict:
    """Check the files of best/ or of a checkpoint, each on one rank, and return the facts.

    If a check fails on any rank, all ranks raise its CheckpointError.
    """
    try:
        result: Any = load_folder(source, checked=slice(ranks.rank, None, ranks.world))[1]
    except CheckpointError as error:
        result = error
    for one in ranks.all_gather(result):
        if isinstance(one, CheckpointError):
            raise one
    return result


@contextmanager
def open_slices(
    source: Path, table: ShardedTable | None
) -> Iterator[tuple[dict[str, Tensor], list[int], Callable[[int, int], Tensor]]]:
    """Yield (weights without a sharded table, its shape, a function that reads its rows begin .. end - 1).

    The files of `source` must have been checked.
    """
    source = find_folder(source)
    if not is_one_file(source):
        state, _ = saved_weights(source)
        rows = torch.empty(0, 0) if table is None else state.pop(TABLE)
        yield state, list(rows.shape), lambda begin, end: rows[begin:end]
        return
    path = source / "model.safetensors"
    try:
        with safe_open(path, "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys() if table is None or name != TABLE}  # noqa: SIM118
            part: Any = None if table is None else file.get_slice(TABLE)
            yield state, [] if table is None else part.get_shape(), lambda begin, end: part[begin:end]
    except (OSError, SafetensorError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{path}: cannot be read ({shown(str(error), 300)})") from error


def load_slices(model: SequenceModel, source: Path, ranks: RankGroup) -> None:
    """Load the weights of `source` into a model, with only this rank's shard of a sharded table."""
    checked_facts(source, ranks)
    table, source = sharded_table(model), find_folder(source)
    if is_one_file(source):
        with open_slices(source, table) as (state, shape, rows):
            model.load_state_dict(state)
            if table is not None:
                if shape != [table.num_items, table.size]:
                    raise CheckpointError(f"{source}: belongs to another model, {TABLE} does not fit")
                table.fill(rows)
        return
    from training import dcp

    tensors, names = model.state_dict(), evaluated_names(source)
    mesh = None if table is None else init_device_mesh(table.device.type, (ranks.world,))
    if table is not None and mesh is not None and table.kernel is not None:
        tensors[TABLE] = dcp.sharded(table, mesh, table.weight)
    if wrong := sorted(name for name in tensors if name not in names or names[name][1] != tensors[name].size()):
        raise CheckpointError(f"{source}: belongs to another model, {wrong[0]} does not fit")
    dcp.read_tensors(source, {names[name][0]: value for name, value in tensors.items()})


def load_weights(model: nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    """Load all weights; CheckpointError unless they match the model's by name, shape and dtype, and are finite."""
    expected = model.state_dict()
    wrong = sorted(
        name
        for name in expected.keys() | weights.keys()
        if name not in expected or name not in weights or expected[name].shape != weights[name].shape
    )
    if wrong:
        raise CheckpointError(
            f"{source}: belongs to another model, {len(wrong):,} tensors do not fit or are missing, such as {wrong[0]}"
        )
    for name, weight in weights.items():
        if weight.dtype != expected[name].dtype:
            raise CheckpointError(f"{source}: {name} must be {expected[name].dtype}, got {weight.dtype}")
        if weight.is_floating_point() and not weight.isfinite().all():
            raise CheckpointError(f"{source}: {name} is not finite")
    model.load_state_dict(weights)
