"""What a run writes down on its way, metrics.jsonl and its tracker's curves; what an unexpected exception says."""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from models.folder import access, read_regular, write_file
from models.tracking import Tracker


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
    """metrics.jsonl, brought to what the checkpoint knew of it, and the same to a tracker; FolderError on a full disk.

    records: the lines so far. lost: whether they were not all there any more.
    """

    def __init__(self, folder: Path, records: list[dict], tracker: Tracker):
        self.path, self.records = folder / "metrics.jsonl", list(records)
        known = "".join(json.dumps(record) + "\n" for record in records)
        with access(self.path, "read"):
            found = read_regular(self.path) if self.path.exists() else b""
        # What stands behind the known lines comes from steps that will be made again.
        self.lost = not found.startswith(known.encode())
        write_file(self.path, known)
        with access(self.path, "written"):
            self.file = self.path.open("a", encoding="utf-8")
        self.tracker = tracker

    def write(self, record: dict, seconds: float, trained: dict[str, float]) -> None:
        """A line of metrics.jsonl; the tracker has what is in `trained` below train/, the rest below its split.

        trained: losses and rates of training; those that `record` does not have go to the tracker alone.
        """
        record, step = {**record, "seconds": round(seconds, 3)}, record["step"]
        with access(self.path, "written"):
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        curves = {
            f"{'train' if name in trained else record['split']}/{name}": value
            for name, value in {**record, **trained}.items()
            if isinstance(value, float) and name != "seconds"
        }
        self.tracker.log(curves, step)
        self.records.append(record)

    def close(self, finished: bool) -> None:
        with access(self.path, "written"):
            self.file.close()
        self.tracker.close(finished)


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
