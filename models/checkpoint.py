"""Checkpoints: tensors in safetensors, the rest in JSON, each written whole or not at all.

A checkpoint is a folder `step-00001234` with model.safetensors, state.safetensors (optimizer and random state) and
state.json, which holds the progress and the checksum of the other two.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

KEEP = 2


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or another model's, in one line."""


def save_folder(folder: Path, tensors: dict[str, dict[str, Tensor]], facts: dict) -> None:
    """Writes `tensors` (one safetensors file for each entry) and `facts` as the folder, which appears all at once."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    sums = {}
    for name, entries in tensors.items():
        path = temporary / f"{name}.safetensors"
        save_file({key: value.detach().cpu().contiguous() for key, value in entries.items()}, path)
        sums[path.name] = _checksum(path)
    (temporary / "state.json").write_text(json.dumps({**facts, "sha256": sums}, indent=1), encoding="utf-8")
    for path in temporary.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if folder.exists():
        # A folder cannot be replaced in one move: the old one steps aside first, and is found there after a crash.
        aside = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        temporary.rename(folder)
        shutil.rmtree(aside)
    else:
        temporary.rename(folder)


def load_folder(folder: Path, *names: str) -> tuple[dict[str, dict[str, Tensor]], dict]:
    """The named tensor files and the facts of `folder`; CheckpointError when anything is missing or damaged."""
    if not folder.exists() and (aside := folder.with_name(f".{folder.name}.old")).exists():
        folder = aside
    try:
        facts = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        for name in names:
            path = folder / f"{name}.safetensors"
            if _checksum(path) != facts["sha256"][path.name]:
                raise CheckpointError(f"{path}: damaged (its checksum differs from the one it was written with)")
        return {name: load_file(folder / f"{name}.safetensors") for name in names}, facts
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename}: not found") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: damaged checkpoint ({error})") from None


def save_checkpoint(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict) -> None:
    """Saves everything that `load_checkpoint` needs to go on as if never stopped; keeps the last two."""
    folder = run / "checkpoints" / f"step-{progress['step']:08d}"
    if not folder.exists():
        state = {"random.cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["random.cuda"] = torch.cuda.get_rng_state()
        for index, entries in optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                state[f"optimizer.{index}.{key}"] = value
        save_folder(folder, {"model": model.state_dict(), "state": state}, progress)
    for old in checkpoints(run)[:-KEEP]:
        shutil.rmtree(old)


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def load_checkpoint(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Puts the last checkpoint of `run` into model, optimizer and torch's generators; returns the progress."""
    found = checkpoints(run)
    if not found:
        raise CheckpointError(f"{run}: no checkpoint to resume from")
    try:
        tensors, progress = load_folder(found[-1], "model", "state")
    except CheckpointError as error:
        older = f"; remove that folder to go on from {found[-2].name}" if len(found) > 1 else ""
        raise CheckpointError(f"{error}{older}") from None
    load_weights(model, tensors["model"], found[-1])
    state = tensors["state"]
    torch.set_rng_state(state.pop("random.cpu"))
    cuda = state.pop("random.cuda", None)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    entries: dict[int, dict[str, Tensor]] = {}
    for name, value in state.items():
        _, index, key = name.split(".")
        entries.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})
    return progress


def load_weights(model: nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    own = model.state_dict()
    wrong = sorted(
        name
        for name in own.keys() | weights.keys()
        if name not in own or name not in weights or own[name].shape != weights[name].shape
    )
    if wrong:
        raise CheckpointError(f"{source}: of another model, {wrong[0]} and {len(wrong) - 1} other tensors do not fit")
    model.load_state_dict(weights)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
