"""Trials of a recipe on several data sets of one machine until a deadline, judged by the validation split alone.

    python benchmarks/trials.py configs/tune/recipes.yaml --seconds 240 --workers 15 --out DIR beauty:data.path=...

For minutes on a large GPU: each process imports torch once and makes one trial after another, where tune.py starts a
process for each. A plan (`Plan` below) has a search for each data set. It begins with the first value of each option
that `start` names and, where `drawn` says so, with settings that change all options at once. Then it changes one option
by one step at a time, and goes on from what was better by half a percent. The best few and the first settings are then
tried with other seeds.

DIR/trials.jsonl gets a line for each trial with its settings, best validation metric and curve; those that the deadline
cuts off too. `--table` prints what DIR holds, with the mean effect of each value.
"""

import argparse
import gc
import json
import multiprocessing
import os
import queue
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.config import ConfigError, load_config
from models.contract import Strict
from models.folder import commit
from models.report import environment
from models.strict_yaml import parse_yaml, read_config

BETTER = 1.005  # how many times as good as the settings so far a trial has to be for the search to go on from it
ON_THE_WAY = 20.0  # seconds that a trial under way counts when time is shared among data sets


class Search(Strict):
    """The trials on one data set. Values of an option stand in an order: neighbours are tried first."""

    config: str
    """The run's configuration."""
    fixed: dict[str, Any] = Field(default_factory=dict)
    """Options that every trial has, by dotted key."""
    options: dict[str, list[Any]] = Field(min_length=1)
    """The values of each option; where a value is a mapping, it sets these keys and the option's name is a title."""
    start: dict[str, int] = Field(default_factory=dict)
    """The place of the value that the search begins with, for each option whose first value it is not."""
    beside: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings that are tried once, on top of the first ones, by title."""
    drawn: int = Field(0, ge=0)
    """The number of settings with a value of every option at random, each value as often as the others. `--table` tells
    the effect of each value by all of them, so that little noise is left."""
    share: float = Field(1.0, gt=0)
    """The share of the time, relative to the other searches."""
    least: float = Field(20.0, ge=0)
    """The seconds that must be left for a trial to begin."""


class Plan(Strict):
    """A search for each data set, and when their best few are repeated."""

    searches: dict[str, Search] = Field(min_length=1)
    repeat_after: float = Field(0.7, gt=0, le=1)
    """The share of the time after which the best are tried with other seeds."""
    repeat_best: int = Field(3, ge=0)
    repeat_seeds: list[int] = Field(default_factory=lambda: [2, 3])


class Trial(NamedTuple):
    """title: the option that was changed, or what `beside` calls it; point: the places of all options' values."""

    title: str
    point: dict[str, int]
    more: dict[str, Any]


def drawn_points(search: Search) -> list[dict[str, int]]:
    """`search.drawn` points; over them the numbers of an option's values differ by one at most."""
    rng = np.random.default_rng(0)
    columns = {o: rng.permutation(search.drawn) % len(values) for o, values in search.options.items()}
    return [{o: int(places[number]) for o, places in columns.items()} for number in range(search.drawn)]


class State:
    """What a search has tried and goes on from."""

    def __init__(self, name: str, search: Search):
        self.name, self.search = name, search
        self.first = {option: search.start.get(option, 0) for option in search.options}
        self.best, self.value = dict(self.first), 0.0
        self.waiting = [Trial("first", self.first, {})]
        self.waiting += [Trial(title, self.first, more) for title, more in search.beside.items()]
        self.waiting += [Trial("drawn", point, {}) for point in drawn_points(search)]
        self.tried = [self.first, *(trial.point for trial in self.waiting if trial.title == "drawn")]
        self.moves: dict[tuple[str, int], int] = {}  # how often an option was changed to a value
        self.results: list[tuple[float, Trial]] = []
        self.seconds, self.running = 0.0, 0

    def next(self) -> Trial | None:
        """The trial to begin now: what waits, else the step from the best settings that was made least often."""
        if self.waiting:
            return self.waiting.pop(0)
        steps = [
            (self.moves.get((option, place), 0), number, option, place)
            for number, (option, values) in enumerate(self.search.options.items())
            for place in (self.best[option] + 1, self.best[option] - 1)
            if 0 <= place < len(values) and self.best | {option: place} not in self.tried
        ]
        if not steps:
            return None
        *_, option, place = min(steps, key=lambda step: step[:2])
        self.moves[option, place] = self.moves.get((option, place), 0) + 1
        self.tried.append(self.best | {option: place})
        return Trial(option, self.tried[-1], {})

    def tell(self, trial: Trial, value: float, whole: bool) -> None:
        """What came of a trial; whole: it was not cut off. Settings with other seeds or `beside` lead nowhere."""
        self.results.append((value, trial))
        if trial.more or not whole or value <= self.value * BETTER:
            return
        if trial.title in trial.point and self.value:
            # Others may have been found better meanwhile: both together are next.
            both = self.best | {trial.title: trial.point[trial.title]}
            if both not in self.tried:
                self.tried.append(both)
                self.waiting.insert(0, Trial(trial.title, both, {}))
        self.best, self.value = trial.point, value

    def repeat(self, count: int, seeds: list[int]) -> None:
        """Puts the best few and the first settings, each once, with other seeds before what waits."""
        ranked = [trial for _, trial in sorted(self.results, key=lambda result: -result[0])]
        chosen: list[Trial] = []
        for trial in [*ranked[:count], *(trial for trial in ranked if trial.title == "first")]:
            if trial not in chosen:
                chosen.append(trial)
        again = [trial._replace(more=trial.more | {"seed": seed}) for seed in seeds for trial in chosen]
        self.waiting = again + self.waiting

    def settings(self, trial: Trial) -> dict[str, Any]:
        """All that a trial changes of the configuration, by dotted key, in the order in which it is taken."""
        given = {"seed": 1, "eval.test": False} | self.search.fixed
        for option, place in trial.point.items():
            value = self.search.options[option][place]
            given |= value if isinstance(value, dict) else {option: value}
        return given | trial.more


def assignments(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def load_plan(path: Path, given: list[str]) -> tuple[Plan, dict[str, State]]:
    """A plan and its searches, `given` being `search:key=value`; ConfigError names the first setting that cannot be."""
    plan = Plan.model_validate(parse_yaml(read_config(path), str(path)))
    for text in given:
        name, colon, assignment = text.partition(":")
        key, equals, value = assignment.partition("=")
        if name not in plan.searches or not (colon and equals):
            raise ConfigError(f"{text}: expected SEARCH:key=value with one of {', '.join(plan.searches)}")
        plan.searches[name].fixed[key] = parse_yaml(value, text)
    return plan, {name: State(name, search) for name, search in plan.searches.items()}


def check(states: dict[str, State]) -> int:
    """How many settings are drawn or one change from the first ones; ConfigError where one is no configuration."""
    count = 0
    for state in states.values():
        points = [
            state.first | {o: place} for o, values in state.search.options.items() for place in range(len(values))
        ]
        trials = [Trial(state.name, point, {}) for point in points]
        for trial in [*trials, *state.waiting]:
            config = load_config(state.search.config, assignments(state.settings(trial)))
            if config.eval.test or not config.eval.every or config.data.protocol in ("published", "all"):
                raise ConfigError(f"{state.name}: trials are judged on validation: see eval and data.protocol")
            count += 1
    return count


def work(number: int, folder: Path, jobs, done) -> None:
    """A process: trains what comes through `jobs`, and tells through `done` when it is ready and what has ended."""
    log = os.open(folder / f"worker-{number}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import train

    torch.set_num_threads(1)
    done.put((number, None, 0, 0.0))
    for key, arguments in iter(jobs.get, None):
        began = time.monotonic()
        print("trial", *arguments, flush=True)
        try:
            status = train.main([*arguments, "--quiet"])
        except SystemExit as left:
            status = left.code
        except Exception as error:
            print("error:", repr(error), flush=True)
            status = 1
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        done.put((number, key, status, time.monotonic() - began))


def curve(folder: Path, metric: str) -> list[list[float]]:
    """[epoch, validation metric, training loss] of each evaluation so far."""
    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return []
    return [[x["epoch"], round(x[metric], 5), round(x["loss"], 4)] for x in lines if metric in x]


def run(plan: Plan, states: dict[str, State], options) -> None:
    """Trials until the deadline, or until there have been `options.trials`."""
    began = time.monotonic()
    folder = options.runs / f"trials-{os.getpid()}"
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("spawn")
    done, lanes = context.Queue(), [context.Queue() for _ in range(options.workers)]
    workers = [
        context.Process(target=work, args=(number, folder, lane, done), daemon=True)
        for number, lane in enumerate(lanes)
    ]
    for worker in workers:
        worker.start()
    live: dict[int, tuple[State, Trial, float]] = {}
    idle: set[int] = set()
    count, repeated = 0, False
    out = (options.out / "trials.jsonl").open("a", buffering=1)
    where, version = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")), commit()

    def left() -> float:
        return options.seconds - (time.monotonic() - began)

    def begin(lane: int) -> bool:
        """Gives a worker the next trial of the search that has had least of its share."""
        nonlocal count
        if options.trials is not None and count >= options.trials:
            return False
        for state in sorted(states.values(), key=lambda s: (s.seconds + ON_THE_WAY * s.running) / s.search.share):
            if left() < state.search.least or (trial := state.next()) is None:
                continue
            given = [state.search.config, *assignments(state.settings(trial)), "--run", str(folder / str(count))]
            live[count] = state, trial, time.monotonic()
            lanes[lane].put((count, given))
            state.running, count = state.running + 1, count + 1
            return True
        return False

    def end(key: int, status: int | str) -> None:
        state, trial, since = live.pop(key)
        settings, seconds = state.settings(trial), time.monotonic() - since
        metric = load_config(state.search.config, assignments(settings)).best_metric
        points = curve(folder / str(key), metric)
        best = max(points, key=lambda point: point[1], default=[0, 0.0, 0.0])
        state.running, state.seconds = state.running - 1, state.seconds + seconds
        state.tell(trial, best[1], status == 0)
        record = {"search": state.name, "title": trial.title, "config": state.search.config, "settings": settings}
        record |= {
            "environment": where,
            "commit": version,
            "metric": metric,
            "value": best[1],
            "epoch": best[0],
            "status": status,
            "seconds": round(seconds, 1),
        }
        out.write(json.dumps(record | {"curve": points}) + "\n")
        changed = {o: state.search.options[o][p] for o, p in trial.point.items() if p != state.first[o]} | trial.more
        print(
            f"{options.seconds - left():6.1f} s  {state.name}  {best[1]:.5f} at {best[0]}  {changed}  {status}",
            flush=True,
        )
        shutil.rmtree(folder / str(key), ignore_errors=True)

    while left() > 0 and any(worker.is_alive() for worker in workers):
        if not repeated and left() < options.seconds * (1 - plan.repeat_after):
            repeated = True
            for state in states.values():
                state.repeat(plan.repeat_best, plan.repeat_seeds)
        idle -= {lane for lane in sorted(idle) if begin(lane)}
        if len(idle) == options.workers and not live:
            break
        try:
            lane, key, status, _ = done.get(timeout=min(1.0, max(0.01, left())))
        except queue.Empty:
            continue
        idle.add(lane)
        if key is not None:
            end(key, status)
    for key in list(live):
        end(key, "cut off")
    for worker in workers:
        worker.kill()
    for log in sorted(folder.glob("worker-*.log")):
        errors = [line for line in log.read_text(errors="replace").splitlines() if "error" in line.lower()]
        print(*(f"{log.name}: {line}" for line in errors[-2:]), sep="\n", end="\n" if errors else "")
    shutil.rmtree(folder, ignore_errors=True)


def table(out: Path) -> None:
    """The best trials of each search, and the mean effect of each value by least squares over the logarithms."""
    records = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    for name in dict.fromkeys(record["search"] for record in records):
        own = [record for record in records if record["search"] == name and record["value"] > 0]
        texts = [{key: json.dumps(value) for key, value in record["settings"].items()} for record in own]
        keys = sorted({key for text in texts for key in text if len({t.get(key) for t in texts}) > 1} - {"seed"})
        print(f"\n{name}: {len(own)} trials")
        for record, text in sorted(zip(own, texts), key=lambda pair: -pair[0]["value"])[:8]:
            changed = {key: text.get(key) for key in [*keys, "seed"] if text.get(key) != texts[0].get(key)}
            print(f"  {record['value']:.5f} at {record['epoch']} ({record['status']})  {changed}")
        whole = [(record, text) for record, text in zip(own, texts) if record["status"] == 0]
        columns = [(k, v) for k in keys for v in sorted({str(t.get(k)) for _, t in whole}) if v != str(texts[0].get(k))]
        if len(whole) < 3 or not columns:
            continue
        design = np.array([[1.0, *(str(text.get(k)) == v for k, v in columns)] for _, text in whole])
        logs = np.log([record["value"] for record, _ in whole])
        found = np.linalg.lstsq(design, logs)[0]
        for (key, value), effect, tried in zip(columns, found[1:], design[:, 1:].sum(0)):
            print(f"    {key}={value}: {100 * np.expm1(effect):+.1f}% ({int(tried)} trials)")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, nargs="?")
    parser.add_argument("given", nargs="*", metavar="SEARCH:key=value")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--trials", type=int, help="at most so many, also where time is left")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--runs", type=Path, default=Path("/dev/shm"), help="where run folders are while a trial lasts")
    parser.add_argument("--table", action="store_true", help="print what --out holds")
    options = parser.parse_intermixed_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.table:
        table(options.out)
        return
    try:
        plan, states = load_plan(options.plan, options.given)
        print(f"{check(states)} settings are drawn or one change from the first ones", flush=True)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    run(plan, states, options)


if __name__ == "__main__":
    main()
