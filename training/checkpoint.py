"""Save and load checkpoints: tensors in safetensors, everything else in JSON, each written whole or not at all.

A checkpoint is a folder `step-00001234` with model.safetensors, state.safetensors (optimizer and random state) and
state.json, which holds the progress, the checksums of the other two and its own, and the run's id and configuration.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data.atomic import find_folder, replace_folder
from data.errors import UserError
from data.explain import explain
from data.types import shown
from training.average import WeightAverage
from training.folder import check_regular, read_regular

KEEP = 2
STEP = re.compile(r"step-\d{8,}")  # the name of a checkpoint
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of a parameter


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or belongs to another model; the message is one line."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, or is not what was written."""


class Progress(BaseModel):
    """The progress of a run: what a resumed run needs beside tensors and the state of the random numbers.

    run          the run's id, see training/folder.py
    fingerprint  the fingerprint of the data
    config       the run's configuration when the checkpoint was made
    step         training steps done
    epoch        epochs finished
    batch        finished batches of the current epoch
    events       tokens trained on, for the events per second
    seconds      time of training
    records      the number of lines of metrics.jsonl
    best         eval.best_metric of the weights in best/, or None
    stale        evaluations since the best one
    losses       name -> [sum, steps] of the losses in the current epoch
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    run: str
    fingerprint: str
    config: dict = {}
    step: int = Field(0, ge=0)
    epoch: int = Field(0, ge=0)
    batch: int = Field(0, ge=0)
    events: int = Field(0, ge=0)
    seconds: float = Field(0.0, ge=0)
    records: list[dict] = []
    best: float | None = None
    stale: int = Field(0, ge=0)
    losses: dict[str, Annotated[list[float], Field(min_length=2, max_length=2)]] = {}

    @classmethod
    def of(cls, facts: dict, source: Path) -> "Progress":
        """Return the progress in `facts` (of the checkpoint `source`); CheckpointError if they are incomplete or
        wrong.
        """
        if wrong := sorted(cls.model_fields.keys() ^ facts.keys()):
            raise CheckpointError(
                f"{source}: written by another version of this program "
                f"({', '.join(map(shown, wrong))} in only one of them)"
            )
        try:
            return cls.model_validate(facts)
        except ValidationError as error:
            line = explain(error.errors()[0], lambda _: cls.model_fields)
            raise CheckpointError(f"{source}: damaged, {line}") from None


def save_folder(folder: Path, tensors: dict[str, dict[str, Tensor]], facts: dict) -> None:
    """Write `tensors` (one safetensors file for each entry) and `facts` as a folder, which appears all at once.

    CheckpointError when it cannot be written, or if a tensor is not finite; an existing folder is then unchanged.
    """
    if name := not_finite((key, value) for entries in tensors.values() for key, value in entries.items()):
        raise CheckpointError(f"{folder}: not written, {shown(name)} is not finite; the previous content is unchanged")
    try:
        with replace_folder(folder) as temporary:
            facts_file = temporary / "state.json"
            facts_file.touch()
            sums, sizes = {}, {}
            for name, entries in tensors.items():
                path = temporary / f"{name}.safetensors"
                save_file({key: value.detach().cpu().contiguous() for key, value in entries.items()}, path)
                path.chmod(
                    facts_file.stat().st_mode
                )  # the mode of the umask: safetensors makes files that only the owner reads
                sums[path.name], sizes[path.name] = _checksum(path), path.stat().st_size
            facts = {**facts, "sha256": sums, "sizes": sizes}
            text = json.dumps({**facts, "checksum": _facts_checksum(facts)}, indent=1)
            facts_file.write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{folder}: cannot be written: {reason}; the previous content is unchanged") from error


def exists(folder: Path) -> bool:
    """Return whether `load_folder` finds the folder, or the old one after a crash while it was replaced."""
    return find_folder(folder).exists()


def load_folder(folder: Path, *names: str, checked: slice | None = None) -> tuple[dict[str, dict[str, Tensor]], dict]:
    """Load the named tensor files and the facts of `folder`; CheckpointError when one of them cannot be read,
    DamagedError when it is missing or is not what was written.

    checked: which of the folder's files, ordered by name, to check too: slice(None) is all of them.
    """
    folder = find_folder(folder)
    path = folder / "state.json"
    try:
        facts = _read_facts(path)
        sums, lengths = facts.pop("sha256"), facts.pop("sizes")
        files = {f"{name}.safetensors" for name in names}
        for name in sorted(files.union(sorted(lengths)[checked] if checked else ())):
            path = folder / name
            if name not in sums:
                raise CheckpointError(f"{path}: written by another version of this program, it has no checksum")
            check_regular(path, lengths[name])
            if _checksum(path) != sums[name]:
                raise DamagedError(f"{path}: damaged (its checksum differs from the one it was written with)")
        return {name: load_file(folder / f"{name}.safetensors") for name in names}, facts
    except FileNotFoundError as error:
        raise DamagedError(f"{error.filename}: not found") from None
    except OSError as error:  # without a number: not a regular file, or a longer one
        kind = CheckpointError if error.errno else DamagedError
        raise kind(f"{path}: cannot be read: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedError(f"{path}: damaged ({type(error).__name__}: {shown(error, 200)})") from None


def _read_facts(path: Path) -> dict:
    """Read a state.json; CheckpointError when its checksum is wrong."""
    facts = json.loads(read_regular(path).decode())
    if not isinstance(facts, dict) or facts.pop("checksum", None) != _facts_checksum(facts):
        raise DamagedError(f"{path}: damaged (its checksum differs from the one it was written with)")
    return facts


def save_checkpoint(
    run: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    average: WeightAverage | None = None,
) -> None:
    """Save everything that `load_checkpoint` needs to continue exactly; the last two checkpoints stay.

    The model has the weights that the run is evaluated with; with an `average` these are the averages. A checkpoint of
    the same step is replaced.
    """
    folder = run / "checkpoints" / f"step-{progress.step:08d}"
    state = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    entries = optimizer.state_dict()["state"]
    moments = {f"optimizer.{index}.{key}": value for index, of in entries.items() for key, value in of.items()}
    if average is not None:
        state |= {f"raw.{name}": weight for name, weight in average.raw().items()}
        state |= {f"average.{name}": value for name, value in average.exact().items()}
    facts = {**progress.model_dump(), "optimizer": sorted(moments)}
    save_folder(folder, {"model": model.state_dict(), "state": state | moments}, facts)
    prune(run, progress.run)


def prune(run: Path, run_id: str) -> None:
    """Remove all checkpoints in the folder `run` but the last two, if they belong to the run whose id is `run_id`."""
    for old in checkpoints(run)[:-KEEP]:
        _remove(old, run_id)


def checkpoints(run: Path) -> list[Path]:
    """Return the folders that have a checkpoint's name, ordered by step."""
    folder = run / "checkpoints"
    try:
        entries = list(folder.iterdir()) if folder.is_dir() else []
        named = [path for path in entries if STEP.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]
    except OSError as error:
        raise CheckpointError(f"{shown(folder, 200)}: cannot be read: {error.strerror or error}") from error
    return sorted(named, key=lambda path: int(path.name[5:]))


def set_aside_damaged(run: Path) -> list[Path]:
    """Rename the last checkpoints of a run that are damaged, so that an intact one is resumed; return them."""
    damaged = []
    for folder in reversed(checkpoints(run)):
        try:
            load_folder(folder, checked=slice(None))
            break
        except DamagedError:
            damaged.append(folder)
            folder.rename(folder.with_name(f"damaged-{folder.name}-{time.time_ns()}"))
    return damaged


def _remove(folder: Path, run: str) -> None:
    """Remove the files that the folder's state.json lists, and the folder once it is empty.

    Nothing is removed if that file is damaged, of another run, or of another step than the folder's name says.
    """
    try:
        facts = _read_facts(folder / "state.json")
        belongs = facts["run"] == run and folder.name == f"step-{facts['step']:08d}"
        files = [
            *filter(_plain, facts["sizes"]),
            "state.json",
        ]  # state.json last, so that an interrupted removal can be continued
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    if not belongs:
        return
    for name in files:
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # the folder has other files, which stay
        folder.rmdir()


def _plain(name: str) -> bool:
    return Path(name).name == name


@contextmanager
def _or_older(folders: list[Path]) -> Iterator[None]:
    """Add to an error about the last of these checkpoints whether an older one can be resumed."""
    try:
        yield
    except CheckpointError as error:
        older = f"; remove that folder to go on from {folders[-2].name}" if len(folders) > 1 else ""
        raise type(error)(f"{error}{older}") from None


def last_facts(run: Path) -> tuple[dict, Path]:
    """Return (facts, folder) of the last checkpoint, which must exist; CheckpointError when it is damaged."""
    folders = checkpoints(run)
    with _or_older(folders):
        return load_folder(folders[-1])[1], folders[-1]


def load_checkpoint(
    run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None = None
) -> Progress:
    """Load the last checkpoint of `run` into model, optimizer, average and torch's generators; return the progress.

    CheckpointError when it is missing, damaged, implausible or belongs to another model.
    """
    folders = checkpoints(run)
    if not folders:
        raise CheckpointError(f"{run}: no checkpoint to resume from")
    source = folders[-1]
    with _or_older(folders):
        if (source / ".metadata").is_file():
            raise CheckpointError(
                f"{source}: was saved by several ranks: resume it with parallel.data=auto, for example"
            )
        tensors, facts = load_folder(source, "model", "state")
        moments = facts.pop("optimizer", None)
        progress = Progress.of(facts, source)
        if source.name != f"step-{progress.step:08d}":
            raise CheckpointError(f"{source}: damaged, it holds step {progress.step}")
        if model.state_dict().keys() == tensors["model"].keys():  # otherwise load_weights reports another model
            _check_state(tensors["state"], optimizer, moments, source)
    if progress.best is not None and not find_folder(run / "best").is_dir():
        raise CheckpointError(f"{run / 'best'}: missing, though the checkpoint refers to best weights")
    load_weights(model, tensors["model"], source)
    state = tensors["state"]
    try:
        torch.set_rng_state(state["random.cpu"])
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(f"{source}: damaged, no state of random numbers ({shown(error, 100)})") from None
    if "random.cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["random.cuda"])
    raw = {name.removeprefix("raw."): value for name, value in state.items() if name.startswith("raw.")}
    if bool(raw) != (average is not None):
        raise CheckpointError(f"{source}: was saved {'with' if raw else 'without'} train.ema_decay")
    if average is not None:
        if missing := sorted({name for name, _ in model.named_parameters()} - raw.keys()):
            raise CheckpointError(f"{source}: damaged, no raw.{missing[0]} and {len(missing) - 1} others")
        average.take_from_model()
        _load_exact(average, state, source)
        load_weights(model, model.state_dict() | raw, source)
    entries: dict[int, dict[str, Tensor]] = {}
    for name, value in state.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            entries.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})
    return progress


def _load_exact(average: WeightAverage, state: dict[str, Tensor], source: Path) -> None:
    """Load the averages that the model can hold only rounded; older checkpoints have only what the model holds."""
    exact = average.exact()
    saved = {name.removeprefix("average."): value for name, value in state.items() if name.startswith("average.")}
    if not saved:
        return
    for name in sorted(exact.keys() | saved.keys()):
        if name not in exact or name not in saved or saved[name].shape != exact[name].shape:
            raise CheckpointError(f"{source}: damaged, average.{name} does not fit")
        if saved[name].dtype != exact[name].dtype or not saved[name].isfinite().all():
            raise CheckpointError(f"{source}: damaged, average.{name} is not {exact[name].dtype} or not finite")
        exact[name].copy_(saved[name])


def _check_state(state: dict[str, Tensor], optimizer, moments: object, source: Path) -> None:
    """Raise CheckpointError unless all of the optimizer's entries `moments` exist, with the right shapes, and are
    finite.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, value in state.items():
        if name.startswith(("random.", "raw.", "average.")):
            continue
        kind, index, key, *_ = f"{name}...".split(".")
        known = kind == "optimizer" and index.isdecimal() and int(index) < len(parameters) and key in MOMENTS
        if not known:
            raise CheckpointError(f"{source}: damaged, tensor {shown(name)} belongs to nothing")
        shape = () if key == "step" else parameters[int(index)].shape
        if value.shape != shape or not value.is_floating_point():
            raise CheckpointError(f"{source}: damaged, {name} is {value.dtype} of shape {list(value.shape)}")
        if not value.isfinite().all():
            raise CheckpointError(f"{source}: {name} is not finite")
        if key != "exp_avg" and (value < 0).any():
            raise CheckpointError(f"{source}: damaged, {name} is below 0")
    if "random.cpu" not in state:
        raise CheckpointError(f"{source}: damaged, no state of random numbers")
    if moments != sorted(name for name in state if name.startswith("optimizer.")):
        raise CheckpointError(f"{source}: damaged, the optimizer's state is not complete")


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
            f"{source}: belongs to another model, {wrong[0]} and {len(wrong) - 1} other tensors do not fit"
        )
    for name, weight in weights.items():
        if weight.dtype != expected[name].dtype:
            raise CheckpointError(f"{source}: {name} must be {expected[name].dtype}, got {weight.dtype}")
        if weight.is_floating_point() and not weight.isfinite().all():
            raise CheckpointError(f"{source}: {name} is not finite")
    model.load_state_dict(weights)


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of a tensor that is not finite, or None. No copy of a tensor is made."""
    for name, value in tensors:
        if value.is_floating_point() and value.numel() and not torch.stack(value.aminmax()).isfinite().all():
            return name
    return None


def training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the weights, the averages and the optimiser's state."""
    names = {id(p): name for name, p in model.named_parameters()}
    yield from model.state_dict().items()
    for p, value in zip(average.weights, average.averages, strict=True) if average is not None else ():
        yield f"average.{names[id(p)]}", value
    for p, entries in optimizer.state.items():
        for key, value in entries.items():
            yield f"optimizer.{names[id(p)]}.{key}", value


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _facts_checksum(facts: dict) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
