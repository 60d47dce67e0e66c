"""Train the runs of a comparison, OUT/SETTING/seed-N, by processes of train.py. Each run can be resumed by itself."""

import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from cli.interrupt import Interrupts
from cli.terminal import terminal
from data.errors import ConfigError
from data.types import shown
from experiments.plan import Plan
from training.changes import FREE, differences
from training.config import RunConfig, as_yaml, load_config
from training.folder import FolderError, access, read_regular, wait_until_free, write_file

ROOT = Path(__file__).resolve().parents[1]
SETTING, RESULT, SPEED = "setting.yaml", "result.json", "speed.json"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LIBC = ctypes.CDLL(None)
PROGRESS_SECONDS = 60.0  # between two progress lines of a run
MOST_LOG = 2**16  # bytes to read from the end of a log


class Job(NamedTuple):
    """A process to start; command: the arguments of Python; log: the file of its output."""

    name: str
    command: list[str]
    log: Path


class Failed(NamedTuple):
    """A job that ended with an error; reason: the result of `last_line`."""

    name: str
    reason: str


def run_folder(out: Path, setting: str, seed: int) -> Path:
    """Return the folder of the run of a setting with a seed."""
    return out / setting / f"seed-{seed}"


def write_settings(plan: Plan, out: Path) -> None:
    """Write the settings' configurations into their folders.

    Raises ConfigError, before anything is written, if a folder has another configuration.
    """
    for name, config in plan.settings.items():
        path = out / name / SETTING
        if not os.path.lexists(path):
            continue
        changed = differences(load_config(path).model_dump(mode="json"), config.model_dump(mode="json"))
        if changed:
            raise ConfigError(
                f"{shown(out / name, 200)}: has runs of another configuration ({'; '.join(changed)}): give another "
                "--out, or remove that folder"
            )
    for name, config in plan.settings.items():
        with access(out / name, "written"):
            (out / name).mkdir(parents=True, exist_ok=True)
        write_file(out / name / SETTING, as_yaml(config))


def training_jobs(plan: Plan, out: Path) -> list[Job]:
    """Return a job for each run that is not finished; interrupted runs are resumed.

    The jobs are in the order of seeds, so that every setting has the same number of runs if time runs out.
    """
    jobs = []
    for seed in plan.seeds:
        for name in plan.settings:
            folder = run_folder(out, name, seed)
            if is_finished(folder):
                continue
            if (folder / "config.yaml").exists():
                wait_until_free(folder)
                command = ["--resume", str(folder)]
            else:
                if folder.exists():  # the run was killed before it had a configuration
                    shutil.rmtree(folder)
                command = [str(out / name / SETTING), f"seed={seed}", "--run", str(folder)]
            jobs.append(Job(f"{name}, seed {seed}", [str(ROOT / "train.py"), *command], folder.with_suffix(".log")))
    return jobs


def speed_jobs(configs: dict[str, Path], out: Path) -> list[Job]:
    """Return a job for each setting whose step is not measured; configs: setting -> the configuration of one run."""
    with access(out, "written"):
        for name in configs:
            (out / name).mkdir(parents=True, exist_ok=True)
    return [
        Job(
            f"{name}, speed",
            [str(ROOT / "benchmarks/train.py"), "--step", str(config), "--out", str(out / name / SPEED)],
            out / name / "speed.log",
        )
        for name, config in configs.items()
        if not (out / name / SPEED).exists()
    ]


def read_speed(out: Path, name: str) -> dict:
    """Return the measurement of a setting's step; empty if there is none."""
    path = out / name / SPEED
    return _read_json(path) if path.exists() else {}


def run_all(jobs: Iterable[Job], interrupts: Interrupts, parallel: int = 1) -> list[Failed]:
    """Run the jobs, `parallel` at a time; return those that failed. A signal ends all jobs after a checkpoint."""
    waiting, failed = list(jobs), []
    running: dict[Any, Any] = {}
    total, progress = len(waiting), ProgressLines()
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.pop(0)
                running[launch(job, parallel)] = job
                terminal.say(f"{job.name}: started, {total - len(waiting)} of {total}")
            progress.show(list(running.values()))
            for process in ended(list(running), PROGRESS_SECONDS):
                job = running.pop(process)
                if process.returncode:
                    failed.append(Failed(job.name, last_line(job.log, process.returncode)))
                    terminal.say(f"{job.name}: failed, the others continue: {failed[-1].reason} ({job.log})")
                else:
                    terminal.say(f"{job.name}: done")
    finally:
        interrupts.stage = "running. The state of all runs is saved. To continue, give the same command again"
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failed


class ProgressLines:
    """Print the last progress line of each run's log, at most every PROGRESS_SECONDS."""

    def __init__(self):
        self.shown = time.monotonic()

    def show(self, jobs: Iterable[Job]) -> None:
        """Print the progress of the jobs if it is time."""
        if time.monotonic() - self.shown < PROGRESS_SECONDS:
            return
        self.shown = time.monotonic()
        for job in jobs:
            if line := progress_of(job.log):
                terminal.say(f"{job.name}: {line}")


def progress_of(log: Path) -> str:
    """Return the last progress line of a run's log, with the time left; empty if there is none yet."""
    with access(log, "read"):
        text = read_regular(log)[-MOST_LOG:].decode("utf-8", "replace")
    lines = re.findall(r"^.+: [\d,]+ of [\d,]+ \w+ \(\d+%\), about .+? left\b", text, flags=re.MULTILINE)
    return lines[-1] if lines else ""


def launch(job: Job, parallel: int) -> subprocess.Popen:
    """Start the job's process, on 1 / `parallel` of the cores; it writes to the log, and ends if this process ends."""
    environment = dict(os.environ)
    environment.pop("FORCE_COLOR", None)  # notebooks set it: rich would draw bars into the log
    if parallel > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // parallel)))
    with access(job.log, "written"), job.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *job.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # only this process receives Ctrl-C, and forwards it once
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def ended(processes: list[subprocess.Popen], seconds: float | None = None) -> list[subprocess.Popen]:
    """Wait until one of the processes has ended, at most `seconds`; return all processes that have ended."""
    if not (finished_processes := [process for process in processes if process.poll() is not None]):
        handles = [os.pidfd_open(process.pid) for process in processes]
        try:
            select.select(handles, [], [], seconds)
        finally:
            for handle in handles:
                os.close(handle)
        finished_processes = [process for process in processes if process.poll() is not None]
    return finished_processes


def last_line(log: Path, status: int) -> str:
    """Return the last line of a log, or the signal that ended the process."""
    with access(log, "read"):
        lines = read_regular(log)[-MOST_LOG:].decode("utf-8", "replace").split("\n")
    message = next((line for line in reversed(lines) if line.strip()), "no output")
    return f"ended by {signal.Signals(-status).name}" if status < 0 else shown(message.strip(), 300)


def is_finished(folder: Path) -> bool:
    """Return whether a run is finished. An interrupted run has a result.json, too, with "finished": false."""
    return (folder / RESULT).exists() and _read_json(folder / RESULT).get("finished", True)


def read_result(folder: Path) -> dict:
    """Read result.json of a finished run; FolderError if it is missing or the run was not evaluated."""
    result = _read_json(folder / RESULT)
    if not result.get("finished", True):
        raise FolderError(f"{shown(folder / RESULT, 200)}: the run was interrupted")
    if "split" not in result:
        raise FolderError(
            f"{shown(folder / RESULT, 200)}: the run was not evaluated (data.protocol=all or eval.test=false)"
        )
    return result


def _read_json(path: Path) -> dict:
    with access(path, "read"):
        content = read_regular(path)
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise FolderError(f"{shown(path, 200)}: damaged, expected a JSON object")
    return values


def changed_options(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the options that differ, as `train.lr: 0.001 -> 0.01`, without seeds, paths and devices."""
    old, new = (config.model_dump(mode="json") for config in (before, after))
    return [line for line in differences(old, new) if line.partition(":")[0] not in FREE | {"seed"}]
