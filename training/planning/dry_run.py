"""Measure the time and memory of a run (`train.py --dry-run`) or predict its memory (`--plan`), without saving it."""

import resource
import time
from dataclasses import replace

import torch

from cli.interrupt import Interrupts
from cli.terminal import duration, terminal
from training.config import RunConfig
from training.ranks.processes import Ranks
from training.run import open_data
from training.setup import print_summary, set_up
from training.step import build_step, phase_at

TIMED_STEPS = 3


def dry_run(config: RunConfig, interrupts: Interrupts) -> None:
    """Prepare the data, and print the time and memory of a few steps."""
    interrupts.stage = "dry run; only prepared data were written"
    ranks = Ranks(config)
    terminal.quiet |= not ranks.first
    parts = set_up(config, ranks)
    config, data = parts.config, parts.data
    print_summary(config, data, parts.model, len(parts.batches), "none, this is a dry run")
    seconds = []
    for number, batch in enumerate(parts.batches.epoch(0)):
        if number > TIMED_STEPS:
            break
        began = time.monotonic()
        parts.step(replace(batch, phase=phase_at(config, 0)))["loss"].item()
        seconds.append(time.monotonic() - began)
    typical = sum(seconds[1:] or seconds) / len(seconds[1:] or seconds)  # the first one also compiles
    if data.device.type == "cuda":
        memory = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB of GPU memory"
    else:
        memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of memory, including Python's"
    terminal.say(
        f"A step takes about {duration(typical)}, an epoch {duration(typical * len(parts.batches))}, the run "
        f"{duration(typical * len(parts.batches) * config.train.epochs)} without evaluations, and at most {memory}"
    )


def print_plan(config: RunConfig, gpu_gib: float | None, interrupts: Interrupts) -> None:
    """Prepare the data, and print the predicted memory of each GPU.

    gpu_gib: GiB of a GPU's memory; None: that of this machine's first GPU.
    """
    # Importing torchrec's planner takes a second.
    from training.planning.plan import describe, memory_of_a_gpu, plan

    interrupts.stage = "planning; only prepared data were written"
    data = open_data(config, device=torch.device("cpu"))
    gpu_bytes = memory_of_a_gpu() if gpu_gib is None else int(gpu_gib * 2**30)
    if gpu_gib is None and not torch.cuda.is_available():
        terminal.say(f"no GPU here: the plan is for an H200 with {gpu_bytes / 2**30:.0f} GiB (--gpu-memory)")
    for line in describe(plan(data.config, data, build_step, gpu_bytes), data.config, gpu_bytes):
        terminal.say(line)
