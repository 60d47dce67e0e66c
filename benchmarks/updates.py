"""Compare updates of a run with training anew, on data that are cut by time into parts.

    python benchmarks/updates.py prepare ml-1m ml-1m-half --out CUT       # CUT/1 to CUT/5: the first k parts of five
    python benchmarks/updates.py run CUT [key=value ...] --out DIR --settings 2:1,10:1 --seeds 1,2 --workers 12
    python benchmarks/updates.py table DIR

`run` trains on the first part, updates that run with each further part, and trains anew on the last three CUT/k. A
setting EPOCHS:REPLAY[:key=value...] is a chain of updates with these `train.update` options. Runs are evaluated
under leave_one_out on the parts up to then; DIR/updates.jsonl gets a line for each run that ends, with its metrics on
validation and test, the number of its steps and of those up to its best epoch. The folders CUT/k are prepared data:
`run` needs no polars. `table` chooses the setting by the validation split, over all seeds and the last three updates.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.trials import curve
from cli.command import Parser, run_main
from data.datasets import load_dataset
from data.frames import store
from hstu_sparse_checkout import ROOT, commit
from training.report import environment

JUDGED = 3  # the last updates, which are compared with training anew
RECORDS, METRIC = "updates.jsonl", "NDCG@10"
COMMON = ["data.format=parquet", "data.protocol=leave_one_out", "eval.patience=10", "train.checkpoint_seconds=1000"]


class Job(NamedTuple):
    """A run to train. kind: base, anew or update; setting: of an update."""

    kind: str
    seed: int
    part: int
    setting: str = ""

    @property
    def folder(self) -> str:
        return f"{self.kind}-{self.seed}-{self.setting.replace(':', '-')}-{self.part}"


def prepare(name: str, path: Path, parts: int, out: Path) -> None:
    """Write OUT/k, prepared data with the events of the first k of `parts` parts of equal size, by time."""
    import polars as pl

    dataset = load_dataset(name, path, cache_dir=None)
    users = np.repeat(dataset.user_ids, np.diff(dataset.user_offsets))
    times = np.sort(dataset.timestamps)
    for part in range(1, parts + 1):
        chosen = dataset.timestamps <= times[len(times) * part // parts - 1]
        columns = {"user": users, "item": dataset.item_ids[dataset.items], "timestamp": dataset.timestamps}
        frame = pl.DataFrame({column: values[chosen] for column, values in columns.items()})
        prepared = load_dataset("parquet", store(frame, "events", out / "work"), cache_dir=out / "work")
        shutil.rmtree(out / str(part), ignore_errors=True)
        (folder,) = (out / "work").glob("parquet-*/")
        folder.rename(out / str(part))
        shutil.rmtree(out / "work")
        print(f"{out / str(part)}: {prepared.num_users:,} users, {prepared.num_events:,} events")


def arguments(job: Job, options) -> list[str]:
    """Return the arguments of train.py."""
    data = options.cut / str(job.part)
    changes = [*COMMON, *options.overrides, f"seed={job.seed}", f"data.path={data.resolve()}"]
    if job.kind == "update":
        epochs, replay, *more = job.setting.split(":")
        before = job._replace(part=job.part - 1)
        if before.part == 1:
            before = Job("base", job.seed, 1)
        changes += [f"train.update.epochs={epochs}", f"train.update.replay={replay}", *more]
        first = ["--update", str(options.runs / before.folder)]
    else:
        first = [str(options.config)]
    return [*first, *changes, "--run", str(options.runs / job.folder), "--quiet"]


def work(job: Job, run: Path, arguments: list[str], log: Path) -> dict[str, Any]:
    """Train the run in this process, and return what its line in DIR/updates.jsonl says."""
    with log.open("a", buffering=1) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        import train

        torch.set_num_threads(1)
        began = time.monotonic()
        status = train.main(arguments)
    record: dict[str, Any] = job._asdict() | {"seconds": round(time.monotonic() - began, 1), "status": status}
    if status:
        return record
    result = json.loads((run / "result.json").read_text())
    points = curve(run, METRIC)
    epoch, value, *_ = max(points, key=lambda point: point[1])
    record |= {"steps": result["steps"], "epochs": len(points), "epoch": epoch, "valid": value}
    record |= {"best_steps": round(result["steps"] * epoch / points[-1][0])}
    return record | {"test": result["model"][result["filter_seen"]][METRIC]}


def run(options) -> int:
    """Train all runs, each as soon as the one it begins from has ended; return how many have not ended well."""
    options.out.mkdir(parents=True, exist_ok=True)
    options.runs = options.runs or options.out / "runs"
    parts = max(int(path.name) for path in options.cut.iterdir() if path.name.isdecimal())
    base = [Job("base", seed, 1) for seed in options.seeds]
    last = range(parts, max(1, parts - JUDGED), -1)
    first = [*base, *(Job("anew", seed, part) for part in last for seed in options.seeds)]
    total = len(first) + len(options.settings) * len(options.seeds) * (parts - 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts, began = {"commit": commit(), "environment": environment(device)}, time.monotonic()

    def following(job: Job) -> Iterator[Job]:
        """Yield the updates that begin from a run."""
        if job.kind == "base":
            yield from (Job("update", job.seed, 2, setting) for setting in options.settings)
        elif job.kind == "update" and job.part < parts:
            yield job._replace(part=job.part + 1)

    good = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, context) as pool, (options.out / RECORDS).open("a") as records:

        def submit(job: Job) -> Future:
            shutil.rmtree(options.runs / job.folder, ignore_errors=True)
            log = options.out / f"{job.folder}.log"
            return pool.submit(work, job, options.runs / job.folder, arguments(job, options), log)

        live = {submit(job): job for job in first}
        while live:
            for future in wait(live, return_when=FIRST_COMPLETED).done:
                job = live.pop(future)
                error = future.exception()
                record = job._asdict() | {"status": 1, "error": repr(error)} if error else future.result()
                records.write(json.dumps(record | facts) + "\n")
                records.flush()
                print(f"{time.monotonic() - began:6.1f} s  {record}", flush=True)
                if not record["status"]:
                    good += 1
                    live |= {submit(after): after for after in following(job)}
    return total - good


def table(out: Path) -> str:
    """Return each setting's metrics and steps over those of training anew, by update, and the setting that is chosen.

    Ratios are those of means over seeds; steps of training anew count up to its best epoch, those of updates all.
    """
    records = [json.loads(line) for line in (out / RECORDS).read_text().splitlines()]
    by_job = {Job(*(record[field] for field in Job._fields)): record for record in records if not record["status"]}
    anew = [job for job in by_job if job.kind == "anew"]
    settings = dict.fromkeys(job.setting for job in by_job if job.kind == "update")
    lines, choice = ["setting      part  seeds  valid  ratio   test  ratio  steps  of anew's  of all its steps"], {}
    for setting in settings:
        pairs = [(job, Job("update", job.seed, job.part, setting)) for job in anew]
        pairs = [(by_job[before], by_job[after]) for before, after in pairs if after in by_job]
        if len(pairs) == len(anew):
            choice[setting] = np.mean([after["valid"] for _, after in pairs])
        for part in sorted({before["part"] for before, _ in pairs}):
            these = [pair for pair in pairs if pair[0]["part"] == part]
            mean = {
                key: [np.mean([one[key] for one in column]) for column in zip(*these)]
                for key in ("valid", "test", "steps", "best_steps")
            }
            quality = "".join(f"{mean[key][1]:7.4f} {mean[key][1] / mean[key][0]:6.3f}" for key in ("valid", "test"))
            steps = mean["steps"][1]
            lines.append(
                f"{setting:12} {part:4} {len(these):6} {quality} {steps:6.0f} {steps / mean['best_steps'][0]:10.3f} "
                f"{steps / mean['steps'][0]:17.3f}"
            )
    if choice:
        lines.append(f"best on validation: {max(choice, key=lambda setting: choice[setting])}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("prepare", help="cut a data set by time").add_argument
    add("format")
    add("path", type=Path)
    add("--parts", type=int, default=5)
    add("--out", type=Path, required=True)
    running = commands.add_parser("run", help="train, update and train anew")
    add = running.add_argument
    add("cut", type=Path)
    add("overrides", nargs="*", metavar="key=value", help="options of all runs")
    add("--config", type=Path, default=ROOT / "configs" / "ml-1m-hstu-best.yaml")
    add("--out", type=Path, required=True)
    add("--runs", type=Path, help="where the runs' folders go; by default DIR/runs")
    add("--settings", type=lambda text: text.split(","), default=["2:1"], help="EPOCHS:REPLAY[:key=value...],...")
    add("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2])
    add("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    commands.add_parser("table", help="print the ratios").add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "prepare":
        prepare(options.format, options.path, options.parts, options.out)
        return 0
    left = run(options) if options.command == "run" else 0
    print(table(options.out))
    return 1 if left else 0


if __name__ == "__main__":
    run_main(main)
