"""Save and load the checkpoints of a run, in the same format for one process and for many ranks.

A checkpoint is a folder `step-00001234` of torch.distributed.checkpoint. It has the weights of training, their averages
and the optimiser's state, and the state of torch's generators unless each step sets the seeds
(`Ranks.distributed_step`, training/ranks/step.py). Tensors are stored whole by name: any number of ranks can read them,
with any sharding of the item table. state.json has the progress and the checksum of every file. The folder is written
atomically; several ranks write it in the background.
"""

import re
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from data.atomic import find_folder, replace_folder
from data.explain import explain
from data.types import shown
from training.average import WeightAverage
from training.optimizer import state_dtype
from training.ranks.draws import seed_of
from training.ranks.processes import Ranks
from training.ranks.tables import ShardedTable
from training.saved import (
    CheckpointError,
    DamagedError,
    checksum,
    load_folder,
    not_finite,
    read_facts,
    save_folder,
    write_facts,
)
from training.weights import TABLE, checked_facts, whole_weights

KEEP = 2
STEP = re.compile(r"step-\d{8,}")  # the name of a checkpoint


class Progress(BaseModel):
    """The progress of a run: the state that a resumed run needs in addition to tensors.

    run          the run's id, see training/folder.py
    fingerprint  the fingerprint of the data
    config       the run's configuration when the checkpoint was saved
    step         training steps done
    epoch        epochs finished
    batch        finished batches of the current epoch
    events       events trained on, to compute events per second
    seconds      time spent in training
    records      the lines of metrics.jsonl
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
        """Return the progress in the facts of the checkpoint `source`; CheckpointError if they are not valid."""
        if "batch" in facts and "tensors" not in facts:
            raise CheckpointError(
                f"{source}: was saved by version 0.2.0, whose runs cannot be resumed; eval.py RUN evaluates it, "
                "train.py CONFIG --init-from RUN starts a run with its weights"
            )
        facts = {name: value for name, value in facts.items() if name != "tensors"}
        if wrong := sorted(cls.model_fields.keys() ^ facts.keys()):
            raise CheckpointError(
                f"{source}: written by another version of this program "
                f"(only one of the versions has {', '.join(map(shown, wrong))})"
            )
        try:
            progress = cls.model_validate(facts)
        except ValidationError as error:
            line = explain(error.errors()[0], lambda _: cls.model_fields)
            raise CheckpointError(f"{source}: not valid, {line}") from None
        if source.name != f"step-{progress.step:08d}":
            raise CheckpointError(f"{source}: not valid, expected the step in its name, got step {progress.step}")
        return progress


class Checkpoints:
    """Save and load the checkpoints of a run; all ranks must call the same methods in the same steps.

    table: the sharded item table, if any. seconds: the time between checkpoints.
    """

    def __init__(
        self,
        run: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: WeightAverage | None,
        ranks: Ranks,
        table: ShardedTable | None = None,
        seconds: float = 0.0,
    ):
        self.run, self.model, self.optimizer, self.average = run, model, optimizer, average
        self.ranks, self.table, self.seconds, self.saved_at = ranks, table, seconds, time.monotonic()
        self.pending: tuple[Future, Any, Path, dict] | None = None
        self.group = self.mesh = None
        if ranks.distributed_step or ranks.world > 1:
            self.mesh = init_device_mesh("cpu" if table is None else table.device.type, (ranks.world,))
            # A process group of its own, so that collectives in the background cannot mix with those of training.
            self.group = dist.new_group(backend="gloo")
            self.background = ThreadPoolExecutor(1)

    @property
    def due(self) -> bool:
        """Whether the last checkpoint is at least `seconds` old, by this process's clock."""
        return time.monotonic() - self.saved_at >= self.seconds

    def save(self, progress: Progress) -> None:
        """Save a checkpoint, with several ranks in the background, and remove all but the last two.

        A checkpoint of the same step is replaced.
        """
        from training import dcp

        self.wait()
        folder, state = self.run / "checkpoints" / f"step-{progress.step:08d}", dict(self._state())
        place: Any = replace_folder(folder) if self.ranks.first else nullcontext()
        with _writing(folder, place):
            temporary = self.ranks.broadcast(place.__enter__())
            saved = dcp.write_tensors(temporary, state, self.group)
            if saved is None:
                written: Future = Future()
                written.set_result({path.name: checksum(path) for path in temporary.iterdir()})
            else:
                written = self.background.submit(self._checksums, saved, temporary)
        self.pending = written, place, temporary, {**progress.model_dump(), "tensors": sorted(state)}
        if self.group is None:
            self.wait()
        self.saved_at = time.monotonic()

    def poll(self) -> None:
        """Finish the pending checkpoint if its files are written."""
        if self.pending is not None and self.pending[0].done():
            self.wait()

    def wait(self) -> None:
        """Wait until the pending checkpoint, if any, is complete."""
        if self.pending is None:
            return
        (written, place, temporary, facts), self.pending = self.pending, None
        with _writing(temporary, place):
            sums = written.result()
            if self.ranks.first:
                write_facts(temporary, facts, sums)
            place.__exit__(None, None, None)
        if self.ranks.first:
            prune(self.run, facts["run"])

    def save_best(self, facts: dict) -> None:
        """Save the weights to evaluate in the run's folder `best`, in one safetensors file."""
        with evaluated_weights(self.average):
            weights = whole_weights(self.model, self.table, self.ranks.first)
            if self.ranks.first:
                save_folder(self.run / "best", {"model": weights}, facts)

    def _checksums(self, written: Future, folder: Path) -> dict[str, str]:
        """Wait until all ranks have written a checkpoint; return the checksums of its files by name on the first rank.

        Each rank computes the checksums of the files that it wrote, in the background.
        """
        written.result()
        files = [path for path in folder.iterdir() if path.name.startswith(f"__{self.ranks.rank}_")]
        if self.ranks.first:
            files += [path for path in folder.iterdir() if path.suffix != ".distcp"]
        sums = {path.name: checksum(path) for path in files}
        gathered = [sums] * self.ranks.world
        dist.gather_object(sums, gathered if self.ranks.first else None, group=self.group)
        return {name: value for part in gathered for name, value in part.items()}

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parameter) for each parameter of the optimiser."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        for p in (p for group in self.optimizer.param_groups for p in group["params"]):
            yield names.get(id(p), TABLE), p

    def _state(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor) for each tensor of a checkpoint, without copies."""
        from training import dcp

        names, table = {id(p): name for name, p in self.model.named_parameters()}, self.table

        def cut(value: Tensor) -> Any:
            return value if table is None or self.mesh is None else dcp.sharded(table, self.mesh, value)

        for name, value in self.model.state_dict().items():
            yield f"model.{name}", value
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
        for name, p in self._parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                if table is not None and name == TABLE and value.dim():
                    value = cut(value.view_as(table.weight))
                yield f"optimizer.{name}.{key}", value
        if not self.ranks.distributed_step:
            yield from random_state().items()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for each tensor or shard of a checkpoint that this rank has."""
        from training import dcp

        for name, value in self._state():
            yield name, dcp.local(value)

    def load(self, seed: int = 0) -> Progress:
        """Load the last checkpoint into model, table, optimiser, average and torch's generators; return its progress.

        If the checkpoint has no state of the generators, since each step set the seeds, they are seeded by `seed` and
        the step. CheckpointError if the checkpoint is missing, damaged, not valid or of another model.
        """
        folders = checkpoints(self.run)
        if not folders:
            raise CheckpointError(f"{self.run}: no checkpoint to resume from")
        source = folders[-1]
        with _or_older(folders):
            facts = checked_facts(source, self.ranks)
            names, progress = facts.get("tensors", []), Progress.of(facts, source)
            if progress.best is not None and not find_folder(self.run / "best").is_dir():
                raise CheckpointError(f"{self.run / 'best'}: missing, though the checkpoint refers to best weights")
            self._load(source, names, seed, progress.step)
        return progress

    def _load(self, source: Path, names: object, seed: int, step: int) -> None:
        from training import dcp

        saved = dcp.saved_tensors(source)
        if names != sorted(saved):
            raise CheckpointError(f"{source}: not complete, its tensors differ from those in state.json")
        if (averaged := any(name.startswith("average.") for name in saved)) != (self.average is not None):
            raise CheckpointError(f"{source}: was saved {'with' if averaged else 'without'} train.ema_decay")
        for name, p in self._parameters():
            self.optimizer.state.pop(p, None)
            if f"optimizer.{name}.step" in saved:
                zeros = {key: torch.zeros_like(p, dtype=state_dtype(p)) for key in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[p] = {"step": torch.zeros((), device=p.device), **zeros}
        state = {name: value for name, value in self._state() if name in saved or not name.startswith("random.")}
        known = state.keys() | {name for name in saved if name.startswith("random.")}
        if self.table is not None and self.table.kernel is None:  # this rank has no shard of it
            known |= {name for name in saved if TABLE in name}
        wrong = known ^ saved.keys() | {
            name for name in state.keys() & saved.keys() if saved[name] != _form(state[name])
        }
        if wrong:
            raise CheckpointError(
                f"{source}: belongs to another model, optimiser or sharding, {len(wrong):,} of its tensors do not fit "
                f"or are missing, such as {min(wrong)}"
            )
        # The tensors of `state` share memory with the model, the table, the optimiser and the average.
        dcp.read_tensors(source, state)
        if (bad := not_finite(self.tensors())) is not None:
            raise CheckpointError(f"{source}: {bad} is not finite")
        for entries in self.optimizer.state.values():
            if any((value < 0).any() for key, value in entries.items() if key != "exp_avg"):
                raise CheckpointError(f"{source}: not valid, a second moment is below 0")
        if "random.cpu" in state:
            with dcp.reading(source):
                set_random_state(state)
        elif not self.ranks.distributed_step:
            torch.manual_seed(seed_of(seed, step))


@contextmanager
def _writing(folder: Path, place: Any) -> Iterator[None]:
    """After an error in the block, remove the incomplete folder and raise CheckpointError for `folder`."""
    from training import dcp

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about writing by a single process, which is intended
            yield
    except BaseException as error:
        place.__exit__(type(error), error, error.__traceback__)
        if isinstance(error, (Exception, dcp.CheckpointException)):
            raise CheckpointError(
                f"{folder}: cannot be written: {dcp.reason(error)}; earlier checkpoints are unchanged"
            ) from error
        raise


def _form(value: Any) -> tuple[torch.Size, torch.dtype]:
    return value.size(), value.dtype


def random_state() -> dict[str, Tensor]:
    """Return the states of torch's generators by their names in checkpoints."""
    state = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Set the states of torch's generators to what `random_state` returned."""
    torch.set_rng_state(state["random.cpu"])
    if "random.cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["random.cuda"])


def evaluated_weights(average: WeightAverage | None):
    """Return a context in which the model has the weights to evaluate: their averages, if there are any."""
    return nullcontext() if average is None else average.in_the_model()


def prune(run: Path, run_id: str) -> None:
    """Remove all checkpoints in a run's folder but the last two; keep those that do not belong to the run `run_id`."""
    for old in checkpoints(run)[:-KEEP]:
        _remove(old, run_id)


def checkpoints(run: Path) -> list[Path]:
    """Return the run's checkpoint folders, ordered by step."""
    folder = run / "checkpoints"
    try:
        entries = list(folder.iterdir()) if folder.is_dir() else []
        named = [path for path in entries if STEP.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]
    except OSError as error:
        raise CheckpointError(f"{shown(folder, 200)}: cannot be read: {error.strerror or error}") from error
    return sorted(named, key=lambda path: int(path.name[5:]))


def set_aside_damaged(run: Path) -> list[Path]:
    """Rename damaged checkpoints that are newer than the last intact one; return their original paths."""
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
    """Remove the files that the folder's state.json lists, and the folder if it is then empty.

    Nothing is removed if state.json is damaged, belongs to another run or has another step than the folder's name.
    """
    try:
        facts = read_facts(folder / "state.json")
        belongs = facts["run"] == run and folder.name == f"step-{facts['step']:08d}"
        files = [*filter(_plain, facts["sizes"]), "state.json"]  # state.json last, to continue an interrupted removal
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    if not belongs:
        return
    for name in files:
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # the folder has other files, which are not removed
        folder.rmdir()


def _plain(name: str) -> bool:
    return Path(name).name == name


@contextmanager
def _or_older(folders: list[Path]) -> Iterator[None]:
    """Add to a CheckpointError about the last checkpoint how to resume from the one before it, if there is one."""
    try:
        yield
    except CheckpointError as error:
        older = f"; remove that folder to resume from {folders[-2].name}" if len(folders) > 1 else ""
        raise type(error)(f"{error}{older}") from None


def last_progress(run: Path) -> Progress:
    """Return the progress in the last checkpoint, which must exist; CheckpointError if it is damaged."""
    folders = checkpoints(run)
    with _or_older(folders):
        return Progress.of(load_folder(folders[-1])[1], folders[-1])
