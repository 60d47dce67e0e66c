"""What train.py and eval.py have around them: one line for each error, signals, the exit status."""

import re
from collections.abc import Callable

import torch

from data.types import DataError
from models.checkpoint import CheckpointError
from models.config import ConfigError
from models.folder import FolderError
from models.interrupt import Interrupts, Stopped
from models.serving.errors import ServingError
from models.terminal import terminal


class TrainingError(ValueError):
    """Training cannot go on, in one line."""


ERRORS = (ConfigError, DataError, CheckpointError, FolderError, ServingError, TrainingError)


def guarded(work: Callable[[Interrupts], None], quiet: bool = False) -> int:
    """The exit status of `work`: 0, 2 after an error that is told in one line, 128 + n after signal n."""
    terminal.begin(quiet)
    with Interrupts() as interrupts:
        try:
            work(interrupts)
            return terminal.end(0)
        except Stopped as stop:
            terminal.say(f"Stopped while {interrupts.stage}")
            return terminal.end(128 + stop.number)
        except ERRORS as error:
            terminal.fail(error)
        except (MemoryError, RuntimeError) as error:
            if (line := memory_fault(error)) is None:
                raise
            terminal.fail(line)
    return terminal.end(2)


def memory_fault(error: Exception) -> str | None:
    """The line for an error that says that memory is not enough, on the host or a device; None for any other."""
    text = str(error)
    on_host = any(sign in text for sign in ("DefaultCPUAllocator: can't allocate memory", "Storage size calculation"))
    if not (on_host or isinstance(error, (MemoryError, torch.OutOfMemoryError))):
        return None
    wanted = re.search(r"allocate (\d+) bytes|allocate ([\d.]+ [KMGT]iB)", text)
    asked = f" ({wanted[1] + ' bytes' if wanted[1] else wanted[2]} asked for at once)" if wanted else ""
    return f"not enough memory{asked}: lower the model's sizes, the batch sizes or loss.num_negatives"
