"""Train the runs of compare.py's plans until a deadline, in processes that import torch once.

    python benchmarks/grid.py PLAN.yaml [PLAN.yaml ...] --out DIR --seconds 300 --workers 12 [--valid 1] [key=value ...]
    python compare.py PLAN.yaml --out DIR/PLAN --no-speed [key=value ...]

Use it for many short runs on one large GPU, where `nvidia-cuda-mps-control -d` lets kernels of several processes run
together. The runs of a plan are written to DIR/PLAN, where compare.py finds them and reports on them. Both commands
skip finished runs. The first seed of every setting is trained before the second of any.

With `--valid`, every setting is also trained under leave_one_out with these seeds and evaluated on the validation split
alone, so that settings can be chosen without the test split. DIR/valid.jsonl gets these metrics; `--table` prints them.
"""

import itertools
import json
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.trials import curve, work
from cli.command import Parser, run_main
from experiments.plan import Plan, load_plan
from experiments.runs import SETTING, last_line, training_jobs, write_settings
from hstu_sparse_checkout import commit

VALID = "valid.jsonl"
ATTEMPTS = 2  # a run that fails is tried once more, in a new process
GRACE = 5.0  # seconds in which runs save their state at the deadline


class Job(NamedTuple):
    """A run to train: title, arguments of train.py, and the names in its line of DIR/valid.jsonl, if it has one."""

    title: str
    arguments: list[str]
    valid: dict[str, Any] | None = None


@dataclass
class Worker:
    """A process that trains one run after another; job: its run at present, since `began`."""

    process: Any
    jobs: Any
    job: Job | None = None
    began: float = 0.0


def remaining_jobs(plans: dict[str, Plan], out: Path, valid: Sequence[int], chosen: Sequence[str]) -> list[Job]:
    """Return the runs that remain, by seed; for each seed, first the plans' runs, then those for validation.

    valid: the seeds of the runs for validation. chosen: the settings to train, in any plan; if empty, all.
    """
    jobs: list[Job] = []
    known = {(line["plan"], line["setting"], line["seed"]) for line in valid_lines(out)}
    for seed in sorted({seed for plan in plans.values() for seed in plan.seeds} | set(valid)):
        to_train = {
            name: {setting: config for setting, config in plan.settings.items() if not chosen or setting in chosen}
            for name, plan in plans.items()
        }
        for name, plan in plans.items():
            part = replace(plan, settings=to_train[name], seeds=[seed] if seed in plan.seeds else [])
            jobs += [Job(f"{name}: {job.name}", job.command[1:]) for job in training_jobs(part, out / name)]
        for name, settings in to_train.items() if seed in valid else ():
            for setting, config in settings.items():
                if (name, setting, seed) in known:
                    continue
                run = out / "valid" / f"{name}-{setting}-{seed}"
                shutil.rmtree(run, ignore_errors=True)
                changes = [f"seed={seed}", "data.protocol=leave_one_out", "eval.test=false"]
                changes += [f"eval.every={config.train.epochs}", "--run", str(run)]
                facts = {"plan": name, "setting": setting, "seed": seed, "metric": config.best_metric}
                arguments = [str(out / name / setting / SETTING), *changes]
                jobs.append(Job(f"{name}: {setting}, seed {seed}, validation", arguments, facts))
    return jobs


def valid_lines(out: Path) -> list[dict[str, Any]]:
    path = out / VALID
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def record(job: Job, out: Path) -> None:
    """Append a run's metric on the validation split to DIR/valid.jsonl, and remove the run."""
    if job.valid is None:
        return
    run = Path(job.arguments[-1])
    *_, (epoch, value, *_) = curve(run, job.valid["metric"])
    with (out / VALID).open("a") as file:
        file.write(json.dumps(job.valid | {"epoch": epoch, "value": value, "commit": commit()}) + "\n")
    shutil.rmtree(run)


def run(jobs: list[Job], options) -> int:
    """Train the runs until the deadline; return how many are not finished."""
    began, context = time.monotonic(), multiprocessing.get_context("spawn")
    logs = options.out / "workers"
    logs.mkdir(parents=True, exist_ok=True)
    waiting, attempts = list(jobs), Counter()
    done, numbers, workers = context.Queue(), itertools.count(), {}
    finished = 0

    def start() -> None:
        number, lane = next(numbers), context.Queue()
        workers[number] = Worker(context.Process(target=work, args=(number, logs, lane, done), daemon=True), lane)
        workers[number].process.start()

    def left() -> float:
        return options.seconds - (time.monotonic() - began)

    def give(worker: Worker, key: int) -> None:
        if waiting:
            worker.job, worker.began = waiting.pop(0), time.monotonic()
            worker.jobs.put((key, worker.job.arguments))

    def dismiss(number: int) -> None:
        """Let a worker end by itself: a process killed while it holds the lock of `done` would silence the others."""
        workers.pop(number).jobs.put(None)

    def end(number: int, status: int | str | None) -> None:
        """Handle the end of a worker's run; after an error, which may have spoilt the process, another one starts."""
        nonlocal finished
        worker = workers[number]
        job, worker.job = worker.job, None
        if job is not None:
            seconds = time.monotonic() - worker.began
            print(f"{options.seconds - left():6.1f} s  {job.title}: {seconds:.1f} s, status {status}", flush=True)
            if status == 0:
                record(job, options.out)
                finished += 1
        if status == 0:
            return
        if job is not None and left() > 0:
            attempts[job.title] += 1
            print(f"    {last_line(logs / f'worker-{number}.log', 1)}", flush=True)
            if attempts[job.title] < ATTEMPTS:
                waiting.append(job)
        dismiss(number)
        if left() > 0 and waiting:
            start()

    for _ in range(min(options.workers, len(jobs))):
        start()
    stopping = False
    while workers and left() > -GRACE:
        if left() <= 0 and not stopping:
            stopping, waiting = True, []
            for worker in workers.values():
                if worker.job is not None and worker.process.is_alive():
                    os.kill(worker.process.pid, signal.SIGINT)
        for number, worker in list(workers.items()):
            if not worker.process.is_alive():
                end(number, "died")
        try:
            number, key, status, _ = done.get(timeout=0.5)
        except queue.Empty:
            continue
        if number not in workers:
            continue
        if key is not None:
            end(number, status)
        if number in workers:
            give(workers[number], number)
            if workers[number].job is None:
                dismiss(number)
    for worker in workers.values():
        worker.process.kill()
    return len(jobs) - finished


def print_table(out: Path) -> None:
    """Print each setting's mean metric on the validation split, its ratio to the first setting, and its seeds."""
    lines = valid_lines(out)
    for plan in dict.fromkeys(line["plan"] for line in lines):
        values: dict[str, list[float]] = {}
        for line in lines:
            if line["plan"] == plan:
                values.setdefault(line["setting"], []).append(line["value"])
        first = np.mean(next(iter(values.values())))
        print(f"{plan}, validation split of leave_one_out")
        for setting, by_seed in values.items():
            mean = np.mean(by_seed)
            print(f"  {setting:20} {mean:.4f}  {mean / first:.3f}  {len(by_seed)} seeds")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("plans", nargs="*", metavar="PLAN.yaml or key=value", help="plans, and overrides for all of their settings")
    add("--out", type=Path, required=True)
    add("--seconds", type=float, default=300.0)
    add("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    add("--seeds", type=seeds, help="the seeds, instead of the plans'; '' for none")
    add("--valid", type=seeds, default=[], help="the seeds of runs judged by the validation split of leave_one_out")
    add("--settings", type=lambda text: text.split(","), default=[], help="the settings to train; by default all")
    add("--table", action="store_true", help="print the metrics on the validation split")
    options = parser.parse_intermixed_args(arguments)
    if options.table:
        print_table(options.out)
        return 0
    overrides = [text for text in options.plans if "=" in text]
    paths = [Path(text) for text in options.plans if "=" not in text]
    if not paths:
        parser.error("give a plan, or --table")
    plans = {path.stem: load_plan(path, seeds=options.seeds, overrides=overrides) for path in paths}
    for name, plan in plans.items():
        write_settings(plan, options.out / name)
    jobs = remaining_jobs(plans, options.out, options.valid, options.settings)
    remain = run(jobs, options)
    print(f"{len(jobs) - remain} runs finished, {remain} remain")
    return 1 if remain else 0


def seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",") if seed]


if __name__ == "__main__":
    run_main(main)
