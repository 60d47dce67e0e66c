"""Run the programs: report errors without a traceback, handle signals, return the exit status."""

import gc
import os
import re
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from cli.interrupt import Interrupts, Stopped
from cli.terminal import terminal
from data.errors import UserError
from data.types import shown


def run_program(work: Callable[[Interrupts], None], quiet: bool = False) -> int:
    """Run `work` and return the exit status: 0, 2 after an error (without a traceback), 128 + n after signal n."""
    if not gc.isenabled():  # see parse_early: collections of imported objects take a quarter of a start and an exit
        gc.freeze()
        gc.enable()
    terminal.begin(quiet)
    with Interrupts() as interrupts:
        try:
            work(interrupts)
            return terminal.end(0)
        except Stopped as stop:
            terminal.say(f"Stopped while {interrupts.stage}")
            return terminal.end(128 + stop.number)
        except UserError as error:
            fail(error)
        except (MemoryError, RuntimeError) as error:
            if (line := memory_fault(error)) is not None:
                fail(line)
            elif "WORLD_SIZE" in os.environ and lost_rank(error):
                reason = shown(str(error).partition("\n")[0], 200)
                fail(f"communication with another process failed ({reason}): torchrun ends the others, or restarts all")
            elif first_to_fail():
                raise
    return terminal.end(2)


def fail(message: object) -> None:
    """Print an error. If several ranks fail, only the first of them prints."""
    if first_to_fail():
        terminal.fail(message)


def first_to_fail() -> bool:
    """Return whether this process is the first of torchrun's processes to report an error."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
        return store.add(f"hstu_sparse/failed/{attempt}", 1) == 1
    except (KeyError, ValueError, RuntimeError):
        return True  # the store is unreachable: better printed twice than never


def lost_rank(error: Exception) -> bool:
    """Return whether an error is a failed communication with another process."""
    text = str(error)
    signs = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Broken pipe")
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)


def memory_fault(error: Exception) -> str | None:
    """Return the message for an out-of-memory error, of the host or a device; None for any other error."""
    text = str(error)
    on_host = any(sign in text for sign in ("DefaultCPUAllocator: can't allocate memory", "Storage size calculation"))
    if not (on_host or isinstance(error, (MemoryError, torch.OutOfMemoryError))):
        return None
    request = re.search(r"allocate (\d+) bytes|allocate ([\d.]+ [KMGT]iB)", text)
    size = f" ({request[1] + ' bytes' if request[1] else request[2]} requested at once)" if request else ""
    return f"not enough memory{size}: lower the model's sizes, the batch sizes or loss.num_negatives"
