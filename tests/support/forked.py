"""Start functions as processes forked from one process that has imported what they need, since imports take seconds.

This is the forkserver of multiprocessing, one for each process of tests. Tests of what a new Python process does, such
as reading the environment when it imports torch, need `subprocess`.
"""

import multiprocessing
import multiprocessing.connection
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def forkserver():
    """Return the context whose processes are forked from one that has imported `preloaded`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context


class Forked:
    """A process that calls function(*arguments), as far as tests need it like subprocess.Popen with pipes.

    function: importable; its status is what it returns, as a program's `main`. limits: of `resource.setrlimit`.
    """

    def __init__(self, function: Callable, *arguments, cwd: Path = ROOT, limits: tuple = (), **environment: str):
        context = forkserver()
        ends = [context.Pipe(duplex=False) for _ in range(2)]
        writers = [writer for _, writer in ends]
        self.process = context.Process(
            target=call, args=(function, arguments, cwd, limits, environment, *writers), daemon=True
        )
        self.process.start()
        for writer in writers:
            writer.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(reader.fileno())) for reader, _ in ends)
        self.pid, self.kill = self.process.pid, self.process.kill

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self) -> tuple[str, str]:
        """Return the rest of (standard output, standard error), each shorter than a pipe holds, after the end."""
        texts = self.stdout.read(), self.stderr.read()
        self.process.join()
        return texts

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode


def call(function: Callable, arguments, cwd: Path, limits, environment, out: Connection, err: Connection) -> None:
    os.environ.update(environment)
    os.chdir(cwd)
    for number, writer in ((1, out), (2, err)):
        os.dup2(writer.fileno(), number)
        writer.close()
    for kind, most in limits:
        resource.setrlimit(kind, (most, most))
    torch.set_num_threads(1)
    sys.exit(function(*arguments))


def forked_torchrun(
    world: int, function: Callable, *arguments, restarts: int = 0, **environment: str
) -> tuple[int, str]:
    """Call function(*arguments) in `world` processes with torchrun's environment; return (status, output of all ranks).

    restarts: the number of restarts of all processes after one has failed; environment: more variables.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    elastic = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    elastic |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "forked"}
    output = ""
    for attempt in range(restarts + 1):
        elastic["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        status, printed = _ranks_once(world, environment | (elastic if world > 1 else {}), function, arguments)
        output += printed
        if status == 0:
            break
    return status, output


def _ranks_once(world: int, environment: dict[str, str], function: Callable, arguments) -> tuple[int, str]:
    context = forkserver()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(world)]
        processes = []
        for rank, file in enumerate(files):
            its = environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {})
            processes.append(context.Process(target=_rank, args=(its, file, function, arguments), daemon=True))
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
            multiprocessing.connection.wait([process.sentinel for process in processes if process.is_alive()])
        for process in processes:  # end the other ranks of one that failed
            process.join(30 if any(process.exitcode for process in processes) else None)
            process.terminate()
            process.join()
        return int(any(process.exitcode for process in processes)), "".join(file.read_text() for file in files)


def _rank(environment: dict[str, str], file: Path, function: Callable, arguments) -> None:
    os.environ.update(environment)
    os.chdir(ROOT)
    with file.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    sys.exit(function(*arguments))
