"""What a run shows and hears while it goes on: metrics.jsonl and TensorBoard, the progress bar, signals."""

import json
import re
import signal
import sys
import time
from pathlib import Path

import torch
from rich import progress as rich
from rich.console import Console
from torch import Tensor

from models.checkpoint import Progress
from models.folder import access, read_regular, write_file


class Means:
    """Means of named losses over the steps of an epoch, added up on the device: only reading them waits for it."""

    def __init__(self, device: torch.device, state: dict[str, list]):
        self.sums = {
            name: torch.tensor(total, dtype=torch.float64, device=device) for name, (total, _) in state.items()
        }
        self.steps = {name: steps for name, (_, steps) in state.items()}

    def add(self, losses: dict[str, Tensor]) -> None:
        """losses: 0-d each; a name may be missing in some steps and is then averaged over the others."""
        for name, loss in losses.items():
            if name not in self.sums:
                self.sums[name], self.steps[name] = torch.zeros((), dtype=torch.float64, device=loss.device), 0
            self.sums[name] += loss
            self.steps[name] += 1

    def state(self) -> dict[str, list]:
        """name -> [sum, steps], from which the same means can be gone on with, bit by bit."""
        return {name: [total.item(), self.steps[name]] for name, total in self.sums.items()}

    def values(self) -> dict[str, float]:
        return {name: total / steps for name, (total, steps) in self.state().items()}


class MetricsLog:
    """metrics.jsonl, brought to what the checkpoint knew of it, and TensorBoard beside it; FolderError on a full disk.

    records: the lines so far. lost: whether they were not all there any more.
    """

    def __init__(self, folder: Path, records: list[dict], step: int):
        from torch.utils.tensorboard import SummaryWriter  # half a second of import, only for training

        self.path, self.records = folder / "metrics.jsonl", list(records)
        known = "".join(json.dumps(record) + "\n" for record in records)
        with access(self.path, "read"):
            found = read_regular(self.path) if self.path.exists() else b""
        # What stands behind the known lines comes from steps that will be made again.
        self.lost = not found.startswith(known.encode())
        write_file(self.path, known)
        with access(self.path, "written"):
            self.file = self.path.open("a", encoding="utf-8")
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def write(self, record: dict, seconds: float) -> None:
        record = {**record, "seconds": round(seconds, 3)}
        with access(self.path, "written"):
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
            for name, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, record["step"])
        self.records.append(record)

    def close(self) -> None:
        with access(self.path, "written"):
            self.file.close()
            self.board.close()


def memory_fault(error: Exception) -> str | None:
    """The line for an error that says that memory is not enough, on the host or a device; None for any other."""
    text = str(error)
    on_host = any(sign in text for sign in ("DefaultCPUAllocator: can't allocate memory", "Storage size calculation"))
    if not (on_host or isinstance(error, (MemoryError, torch.OutOfMemoryError))):
        return None
    wanted = re.search(r"allocate (\d+) bytes|allocate ([\d.]+ [KMGT]iB)", text)
    asked = f" ({wanted[1] + ' bytes' if wanted[1] else wanted[2]} asked for at once)" if wanted else ""
    return f"not enough memory{asked}: lower the model's sizes, the batch sizes or loss.num_negatives"


class StopSignal:
    """Turns SIGINT and SIGTERM into a flag that the loop reads between steps; a second one ends at once."""

    def __init__(self):
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number, frame) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)


def explain_faults() -> None:
    """An exception that nobody expected shows its traceback and, behind it, what to do about it."""

    def hook(kind, error, trace) -> None:
        sys.__excepthook__(kind, error, trace)
        if issubclass(kind, KeyboardInterrupt):
            return
        print(
            "\nThis is a fault of the program, not of what you gave it. Please report it, with the lines above, the "
            "command and what `make doctor` prints: see CONTRIBUTING.md.",
            file=sys.stderr,
        )

    sys.excepthook = hook


class ProgressBar:
    """The bar with epoch, losses, events per second and remaining time; reads the device twice a second at most."""

    def __init__(self, console: Console, epochs: int, per_epoch: int, done: int):
        self.bar = rich.Progress(
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.TextColumn("{task.fields[losses]}"),
            rich.TextColumn("{task.fields[rate]:,.0f} events/s"),
            rich.TimeRemainingColumn(),
            console=console,
        )
        self.epochs = epochs
        self.task = self.bar.add_task("", total=per_epoch * self.epochs, completed=done, losses="", rate=0.0)
        self.shown = self.events = 0.0

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *error):
        self.stop()

    def stop(self) -> None:
        self.bar.stop()

    def print(self, line: str) -> None:
        self.bar.console.print(line, highlight=False)

    def step(self, means: Means, progress: Progress) -> None:
        now = time.monotonic()
        if now - self.shown < 0.5:
            return
        self.bar.update(
            self.task,
            description=f"epoch {progress.epoch + 1}/{self.epochs}",
            completed=progress.step,
            losses="  ".join(f"{name} {value:.4f}" for name, value in means.values().items()),
            rate=(progress.events - self.events) / (now - self.shown) if self.shown else 0.0,
        )
        self.shown, self.events = now, progress.events
