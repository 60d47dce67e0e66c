"""A configuration that trains in a second, and jobs that run in this process, for tests of programs that start runs."""

import contextlib
import os
from pathlib import Path

import train
from benchmarks import train as benchmark

ROOT = Path(__file__).resolve().parents[2]
MAIN = {"train.py": train.main, "benchmarks/train.py": benchmark.main}


def tiny(*, epochs: int = 2, lr: float = 1e-2) -> str:
    return f"""
name: tiny
seed: 0
device: cpu
threads: 1
data:
  format: synthetic
  protocol: leave_one_out
  synthetic: {{num_users: 60, num_items: 60, num_clusters: 6, mean_length: 12}}
model: {{block: hstu, max_seq_len: 16, embedding_dim: 8, num_layers: 1, attention: {{kind: dense}}}}
train: {{epochs: {epochs}, batch_size: 16, lr: {lr}, checkpoint_seconds: 1000}}
"""


class Ended:
    """The part of subprocess.Popen that a program uses, for a run in this process."""

    def __init__(self, status: int):
        self.returncode = status

    def poll(self) -> int:
        return self.returncode

    wait = poll

    def terminate(self) -> None:
        pass


def run_here(job, parallel=1) -> Ended:
    """Run the job of a comparison or search in this process, since each start of Python takes seconds."""
    script, *arguments = job.command
    with job.log.open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        return Ended(MAIN[os.path.relpath(script, ROOT)](arguments) or 0)
