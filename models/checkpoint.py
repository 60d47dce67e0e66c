"""Checkpoints: tensors in safetensors, the rest in JSON, each written whole or not at all.

A checkpoint is a folder `step-00001234` with model.safetensors, state.safetensors (optimizer and random state) and
state.json, which holds the progress and the checksum of the other two.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.average import WeightAverage

KEEP = 2


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or another model's, in one line."""


@dataclass
class Progress:
    """Where a run stands: what a resumed run needs beside tensors and the state of the random numbers.

    step       training steps done
    epoch      epochs finished
    batch      batches done of the epoch that is under way
    events     tokens trained on, for the events per second
    seconds    of training
    lines      of metrics.jsonl
    best       eval.best_metric of the weights in best/, or None
    stale      evaluations since then
    losses     name -> [sum, steps] of the losses in the epoch that is under way
    """

    fingerprint: str
    step: int = 0
    epoch: int = 0
    batch: int = 0
    events: int = 0
    seconds: float = 0.0
    lines: int = 0
    best: float | None = None
    stale: int = 0
    losses: dict[str, list] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: dict, source: Path) -> "Progress":
        """The progress that `facts` (of the checkpoint `source`) hold; CheckpointError when they are not all there."""
        wrong = sorted({f.name for f in fields(cls)} ^ facts.keys())
        if wrong:
            raise CheckpointError(
                f"{source}: of another version of this program ({', '.join(wrong)} in only one of them)"
            )
        return cls(**facts)


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
        shutil.rmtree(_aside(folder), ignore_errors=True)
        folder.rename(_aside(folder))
    temporary.rename(folder)
    shutil.rmtree(_aside(folder), ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def exists(folder: Path) -> bool:
    """Whether `load_folder` finds something there: the folder, or the old one after a crash while it was replaced."""
    return folder.exists() or _aside(folder).exists()


def load_folder(folder: Path, *names: str) -> tuple[dict[str, dict[str, Tensor]], dict]:
    """The named tensor files and the facts of `folder`; CheckpointError when anything is missing or damaged."""
    if not folder.exists() and exists(folder):
        folder = _aside(folder)
    try:
        facts = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        for name in names:
            path = folder / f"{name}.safetensors"
            if _checksum(path) != facts["sha256"][path.name]:
                raise CheckpointError(f"{path}: damaged (its checksum differs from the one it was written with)")
        del facts["sha256"]
        return {name: load_file(folder / f"{name}.safetensors") for name in names}, facts
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename}: not found") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: damaged checkpoint ({error})") from None


def save_checkpoint(
    run: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    average: WeightAverage | None = None,
) -> None:
    """Saves everything that `load_checkpoint` needs to go on as if never stopped; keeps the last two.

    The model has the weights that the run is judged by; with an `average` these are the averages.
    """
    folder = run / "checkpoints" / f"step-{progress.step:08d}"
    if not folder.exists():
        state = {"random.cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["random.cuda"] = torch.cuda.get_rng_state()
        for index, entries in optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                state[f"optimizer.{index}.{key}"] = value
        if average is not None:
            state |= {f"raw.{name}": weight for name, weight in average.raw().items()}
        save_folder(folder, {"model": model.state_dict(), "state": state}, asdict(progress))
    for old in checkpoints(run)[:-KEEP]:
        shutil.rmtree(old)


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def load_checkpoint(
    run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None = None
) -> Progress:
    """Puts the last checkpoint of `run` into model, optimizer, average and torch's generators; returns the progress."""
    found = checkpoints(run)
    if not found:
        raise CheckpointError(f"{run}: no checkpoint to resume from")
    try:
        tensors, facts = load_folder(found[-1], "model", "state")
        progress = Progress.of(facts, found[-1])
    except CheckpointError as error:
        older = f"; remove that folder to go on from {found[-2].name}" if len(found) > 1 else ""
        raise CheckpointError(f"{error}{older}") from None
    load_weights(model, tensors["model"], found[-1])
    state = tensors["state"]
    torch.set_rng_state(state.pop("random.cpu"))
    cuda = state.pop("random.cuda", None)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    raw = {name.removeprefix("raw."): state.pop(name) for name in list(state) if name.startswith("raw.")}
    if bool(raw) != (average is not None):
        raise CheckpointError(f"{found[-1]}: was saved {'with' if raw else 'without'} train.ema_decay")
    if average is not None:
        average.take_from_model()
        load_weights(model, model.state_dict() | raw, found[-1])
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
