"""What a run shows and hears while it goes on: metrics.jsonl and TensorBoard, the progress bar, signals."""

import json
import signal
import time
from pathlib import Path

import torch
from rich import progress as rich
from rich.console import Console
from torch import Tensor

from models.checkpoint import Progress


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
    """metrics.jsonl, cut back to what the checkpoint knew, and TensorBoard beside it."""

    def __init__(self, folder: Path, lines: int, step: int):
        from torch.utils.tensorboard import SummaryWriter  # half a second of import, only for training

        path = folder / "metrics.jsonl"
        kept = path.read_text(encoding="utf-8").splitlines(keepends=True)[:lines] if path.exists() else []
        path.write_text("".join(kept), encoding="utf-8")
        self.lines = len(kept)
        self.file = path.open("a", encoding="utf-8")
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def write(self, record: dict, seconds: float) -> None:
        self.file.write(json.dumps({**record, "seconds": round(seconds, 3)}) + "\n")
        self.file.flush()
        self.lines += 1
        for name, value in record.items():
            if isinstance(value, float):
                self.board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.file.close()
        self.board.close()


class StopSignal:
    """Turns SIGINT and SIGTERM into a flag that the loop reads between steps; a second one ends at once."""

    def __init__(self):
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number, frame) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)


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
