"""Run a function in several processes that are a process group of gloo, and collect what each returns."""

import datetime
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tests.operators.interpreter import checked_interpreter
from tests.support.forked import forkserver


def run_ranks(
    function: Callable, world: int, *arguments, hanging: int | None = None, seconds: float = 600.0, timeout: float = 300
) -> list:
    """Return function(rank, *arguments) of every rank; if a rank raises, its exception takes the place of the result.

    function: importable. hanging: a rank that does not return; it is killed once the others have returned, and its
    result is None. seconds: the time after which all remaining processes are killed. timeout: of the process group.
    """
    context = forkserver()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_start, args=(function, rank, world, folder, timeout, arguments), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + seconds
        for rank, process in enumerate(processes):
            if rank != hanging:
                process.join(max(0.0, end - time.monotonic()))
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        files = [Path(folder) / f"{rank}.pt" for rank in range(world)]
        return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def _start(function, rank, world, folder, timeout, arguments):
    torch.set_num_threads(1)
    # The group's timeout may be short: it is not for a process that starts late.
    _meet(Path(folder, "started"), rank, world)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout),
    )
    # No rank begins, and may end, while others still connect to it.
    _meet(Path(folder, "connected"), rank, world)
    try:
        with checked_interpreter():
            result = function(rank, *arguments)
    except Exception as error:
        result = RuntimeError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    torch.save(result, f"{folder}/{rank}.tmp")
    Path(f"{folder}/{rank}.tmp").rename(f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _meet(folder: Path, rank: int, world: int):
    """Return when every rank has called this; `run_ranks` ends ranks that wait for one that is gone."""
    folder.mkdir(exist_ok=True)
    (folder / str(rank)).touch()
    while len(list(folder.iterdir())) < world:
        time.sleep(0.01)
