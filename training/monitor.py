"""Write a run's metrics.jsonl and the curves of its tracker; add advice to unexpected exceptions."""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from training.folder import access, read_regular, with_nulls, write_file
from training.tracking import Tracker


class Means:
    """Average losses over the steps of an epoch on the device, which is only waited for when the means are read."""

    def __init__(self, device: torch.device, state: dict[str, list]):
        self.sums = {
            name: torch.tensor(total, dtype=torch.float64, device=device) for name, (total, _) in state.items()
        }
        self.steps = {name: steps for name, (_, steps) in state.items()}

    def add(self, losses: dict[str, Tensor]) -> None:
        """Add 0-d losses by name; a name that is missing in some steps is averaged over the others."""
        for name, loss in losses.items():
            if name not in self.sums:
                self.sums[name], self.steps[name] = torch.zeros((), dtype=torch.float64, device=loss.device), 0
            self.sums[name] += loss
            self.steps[name] += 1

    def state(self) -> dict[str, list]:
        """Return name -> [sum, steps], from which the averaging can be continued with the same bits."""
        return {name: [total.item(), self.steps[name]] for name, total in self.sums.items()}

    def values(self) -> dict[str, float]:
        return {name: total / steps for name, (total, steps) in self.state().items()}


class MetricsLog:
    """Write metrics.jsonl and the tracker's curves; FolderError if the file cannot be written.

    records: the checkpoint's lines, to which the file is reset. lost: whether the file did not start with these lines.
    """

    def __init__(self, folder: Path, records: list[dict], tracker: Tracker):
        self.path, self.records = folder / "metrics.jsonl", list(records)
        saved_lines = "".join(json.dumps(record) + "\n" for record in records)
        with access(self.path, "read"):
            content = read_regular(self.path) if self.path.exists() else b""
        # Further lines in the file are of steps after the checkpoint, which will be repeated.
        self.lost = not content.startswith(saved_lines.encode())
        write_file(self.path, saved_lines)
        with access(self.path, "written"):
            self.file = self.path.open("a", encoding="utf-8")
        self.tracker = tracker

    def write(self, record: dict, seconds: float, trained: dict[str, float]) -> None:
        """Write `record` as a line of metrics.jsonl, with null for a metric that has no value, and log curves.

        trained: losses and rates of training by name. Their curves are named train/NAME; the curves of other values
        of `record` are named SPLIT/NAME. Values of `trained` that are not in `record` are only logged as curves.
        """
        record, step = with_nulls({**record, "seconds": round(seconds, 3)}), record["step"]
        with access(self.path, "written"):
            self.file.write(json.dumps(record, allow_nan=False) + "\n")
            self.file.flush()
        curves = {
            f"{'train' if name in trained else record['split']}/{name}": value
            for name, value in {**record, **with_nulls(trained)}.items()
            if isinstance(value, float) and name != "seconds"
        }
        self.tracker.log(curves, step)
        self.records.append(record)

    def close(self, finished: bool) -> None:
        with access(self.path, "written"):
            self.file.close()
        self.tracker.close(finished)


def explain_faults() -> None:
    """Print advice after the traceback of an unexpected exception."""

    def hook(kind, error, trace) -> None:
        sys.__excepthook__(kind, error, trace)
        if issubclass(kind, KeyboardInterrupt):
            return
        print(
            "\nThis is a bug of the program, not an error in your input. Please report it with the lines above, the "
            "command and the output of `make doctor`: see CONTRIBUTING.md.",
            file=sys.stderr,
        )

    sys.excepthook = hook
