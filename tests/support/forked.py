"""Start functions as processes forked from one process that has imported what they need, since imports take seconds.

This is the forkserver of multiprocessing, one for each process of tests. Tests of what a new Python process does, such
as reading the environment when it imports torch, need `subprocess`.
"""

import multiprocessing
import os
import resource
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

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
