"""Try variants of a recipe on several data sets of one machine until a deadline, by their metric on validation.

    python benchmarks/trials.py configs/tune/recipes.yaml --seconds 240 --workers 15 --out DIR beauty:data.path=...

Use it for minutes on a large GPU: each process imports torch once and makes one trial after another; tune.py starts a
process for each. A plan (`Plan` below) has a search for each data set, with these trials:

1. The first settings: of each option the first value, or the one that `start` names.
2. With `drawn`, that many settings that change all options at once, then one setting of all values with a better mean
   effect.
3. One option changed by one step at a time. The search continues from a trial that is better by half a percent.
4. The best few and the first settings with other seeds.

A search with `judged` has no trials: its config is evaluated on the test split with those seeds.

DIR/trials.jsonl gets a line for each trial with its settings, best validation metric and curve, also if the deadline
ends it early. `--table` prints the trials in DIR, with the mean effect of each value.
"""

import base64
import gc
import json
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cli.command import Parser, run_main
from data.errors import ConfigError
from data.options import Options
from hstu_sparse_checkout import commit
from training.config import load_config
from training.folder import FolderError, read_judged
from training.report import environment
from training.strict_yaml import parse_yaml, read_config

BETTER = 1.005  # the search moves to a trial whose metric is at least this many times that of its settings so far
WORTH = 0.002  # the mean effect, as a logarithm, from which on a value takes the place of the first one
ENDING = 8.0  # seconds that workers have to end at the deadline
RUNNING_SECONDS = 20.0  # the assumed time of a running trial, when time is shared among data sets


class Search(Options):
    """The trials on one data set. Values of an option stand in an order: neighbours are tried first."""

    config: str
    """The run's configuration."""
    fixed: dict[str, Any] = Field(default_factory=dict)
    """Options that every trial has, by dotted key."""
    options: dict[str, list[Any]] = Field(default_factory=dict)
    """The values of each option; where a value is a mapping, it sets these keys and the option's name is a title."""
    start: dict[str, int] = Field(default_factory=dict)
    """The place of the value that the search begins with, by option; 0 for an option that is not listed."""
    beside: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings that are tried once, on top of the first ones, by title."""
    drawn: int = Field(0, ge=0)
    """The number of settings with a random value of every option, each value as often as the others. `--table`
    estimates the effect of each value from all of them, which averages out noise."""
    judged: list[int] = Field(default_factory=list)
    """The seeds with which `config` with `fixed` is judged on the test split, in place of all trials."""
    like: str | None = None
    """The name of another search on the same data, for settings that are to suit several data sets: `--table` compares
    the trials with the best one of that search. Only the first, `beside` and drawn settings are tried."""
    share: float = Field(1.0, gt=0)
    """The share of the time, relative to the other searches."""
    least: float = Field(20.0, ge=0)
    """The seconds that must be left for a trial to begin."""


class Plan(Options):
    """A search for each data set, and when their best few are repeated."""

    searches: dict[str, Search] = Field(min_length=1)
    repeat_after: float = Field(0.7, gt=0, le=1)
    """The share of the time after which the best are tried with other seeds."""
    repeat_best: int = Field(3, ge=0)
    repeat_seeds: list[int] = Field(default_factory=lambda: [2, 3])


class Trial(NamedTuple):
    """A trial. title: the changed option, or its name in `beside`; point: the places of all options' values."""

    title: str
    point: dict[str, int]
    more: dict[str, Any]


def drawn_points(search: Search) -> list[dict[str, int]]:
    """Draw `search.drawn` points, in which the counts of an option's values differ by at most one.

    If every option has two values, and the number of points is a power of two above the number of options, the points
    are an orthogonal array: the effects of two options are not mixed. (Its columns are those of a Hadamard matrix,
    first the ones that are not products of two of the others.) With few options, the first half of the points also has
    each value equally often. The first settings are not among the points of an array.
    """
    count, first = search.drawn, {o: search.start.get(o, 0) for o in search.options}
    if count & (count - 1) == 0 and count > len(search.options) and {len(v) for v in search.options.values()} == {2}:
        chosen = sorted(range(1, count), key=lambda column: (column.bit_count() % 2 == 0, column.bit_count(), column))
        rows = sorted(range(count), key=lambda row: row.bit_count() % 2)
        points = [{o: (row & c).bit_count() % 2 for o, c in zip(search.options, chosen)} for row in rows]
        return [point for point in points if point != first]
    rng = np.random.default_rng(0)
    columns = {o: rng.permutation(search.drawn) % len(values) for o, values in search.options.items()}
    return [{o: int(places[number]) for o, places in columns.items()} for number in range(search.drawn)]


class State:
    """The state of a search: its trials so far and the point from which it continues."""

    def __init__(self, name: str, search: Search):
        self.name, self.search = name, search
        self.combined = not search.drawn or search.like is not None
        self.curves: list[tuple[Trial, list[list[float]], bool]] = []
        self.first = {option: search.start.get(option, 0) for option in search.options}
        self.best, self.value = dict(self.first), 0.0
        self.waiting = [Trial("first", self.first, {})]
        self.waiting += [Trial(title, self.first, more) for title, more in search.beside.items()]
        self.waiting += [Trial("drawn", point, {}) for point in drawn_points(search)]
        if search.judged:
            self.waiting = [Trial("final", {}, {"seed": seed, "eval.test": True}) for seed in search.judged]
        self.tried = [self.first, *(trial.point for trial in self.waiting if trial.title == "drawn")]
        self.moves: dict[tuple[str, int], int] = {}  # how often an option was changed to a value
        self.results: list[tuple[float, Trial]] = []
        self.seconds, self.running = 0.0, 0

    def next(self) -> Trial | None:
        """Return the next trial: a waiting one, else the step from the best settings that was made least often.

        After the drawn settings come their better values together, with two seeds.
        """
        if not self.waiting and not self.combined and not self.running:
            self.combined, self.value, self.best = True, 0.0, self.better_values()
            self.tried.append(self.best)
            self.waiting = [Trial("together", self.best, more) for more in ({}, {"seed": 2})]
        if self.waiting:
            return self.waiting.pop(0)
        if self.search.judged or self.search.like or not self.combined:
            return None
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

    def record(self, trial: Trial, value: float, whole: bool, points: Sequence[list[float]] = ()) -> None:
        """Record the result of a trial; whole: it was not ended early. Only whole trials move the search's point."""
        self.results.append((value, trial))
        self.curves.append((trial, list(points), whole))
        if trial.more or not whole or value <= self.value * BETTER:
            return
        if trial.title in trial.point and self.value:
            # If other values became better meanwhile, both changes together are tried next.
            both = self.best | {trial.title: trial.point[trial.title]}
            if both not in self.tried:
                self.tried.append(both)
                self.waiting.insert(0, Trial(trial.title, both, {}))
        self.best, self.value = trial.point, value

    def repeat(self, count: int, seeds: list[int]) -> None:
        """Queue the best few and the first settings, each once, with other seeds, before the waiting trials.

        Runs that are judged on the test split are not repeated.
        """
        if self.search.judged:
            return
        ranked = [trial for _, trial in sorted(self.results, key=lambda result: -result[0])]
        chosen: list[Trial] = []
        for trial in [*ranked[:count], *(trial for trial in ranked if trial.title == "first")]:
            if trial not in chosen:
                chosen.append(trial)
        again = [trial._replace(more=trial.more | {"seed": seed}) for seed in seeds for trial in chosen]
        self.waiting = again + self.waiting

    def better_values(self) -> dict[str, int]:
        """Return, for each option, the value with the best mean effect on the logarithm of the trials' metrics.

        Trials are compared at the last epoch that every trial ended by the deadline has reached. Trials that did not
        end by themselves do not count with less than half of the median number of epochs. A value replaces the first
        one if its effect is over WORTH.
        """
        curves = [(trial.point, points, whole) for trial, points, whole in self.curves if points and not trial.more]
        if not curves:
            return self.first
        middle = np.median([points[-1][0] for _, points, _ in curves])
        curves = [curve for curve in curves if curve[2] or curve[1][-1][0] >= middle / 2]
        last = min((points[-1][0] for _, points, whole in curves if not whole), default=np.inf)
        logs = np.log([max([1e-9, *(p[1] for p in points if p[0] <= last)]) for _, points, _ in curves])
        others = [
            (o, place) for o, values in self.search.options.items() for place in range(len(values))
            if place != self.first[o]
        ]  # fmt: skip
        design = np.array([[1.0, *(point[o] == place for o, place in others)] for point, *_ in curves])
        effects = np.linalg.lstsq(design, logs)[0][1:]
        best = dict(self.first)
        for option in best:
            candidates = [(effect, place) for (o, place), effect in zip(others, effects) if o == option]
            effect, place = max(candidates, default=(0.0, 0))
            if effect > WORTH:
                best[option] = place
        return best

    def settings(self, trial: Trial) -> dict[str, Any]:
        """Return all changes of a trial to the configuration, by dotted key, in the order in which they apply."""
        values = {"seed": 1, "eval.test": False} | self.search.fixed
        for option, place in trial.point.items():
            value = self.search.options[option][place]
            values |= value if isinstance(value, dict) else {option: value}
        return values | trial.more


def assignments(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def load_plan(path: Path, fixed_texts: list[str]) -> tuple[Plan, dict[str, State]]:
    """Return a plan and its searches; ConfigError names the first impossible setting.

    fixed_texts: settings of the form `search:key=value`.
    """
    plan = Plan.model_validate(parse_yaml(read_config(path), str(path)))
    for text in fixed_texts:
        name, colon, assignment = text.partition(":")
        key, equals, value = assignment.partition("=")
        if name not in plan.searches or not (colon and equals):
            raise ConfigError(f"{text}: expected SEARCH:key=value with one of {', '.join(plan.searches)}")
        plan.searches[name].fixed[key] = parse_yaml(value, text)
    return plan, {name: State(name, search) for name, search in plan.searches.items()}


def check(states: dict[str, State]) -> int:
    """Return the number of settings that were checked, some of them equal; ConfigError for an invalid one."""
    count = 0
    for state in states.values():
        points = [
            state.first | {o: place} for o, values in state.search.options.items() for place in range(len(values))
        ]
        trials = [Trial(state.name, point, {}) for point in points]
        for trial in [*trials, *state.waiting]:
            config = load_config(state.search.config, assignments(state.settings(trial)))
            if not state.search.judged and (
                config.eval.test or not config.eval.every or config.data.protocol in ("published", "all")
            ):
                raise ConfigError(f"{state.name}: trials are judged on validation: see eval and data.protocol")
            count += 1
    return count


def work(number: int, folder: Path, jobs, done) -> None:
    """Run a worker process: train the trials from `jobs`, and report to `done` when it is ready and when each trial
    ends.
    """
    log = os.open(folder / f"worker-{number}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A trial handles the signal; code between trials does not.
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
    """Return [epoch, validation metric, training loss, seconds since the run began] of each evaluation so far."""
    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return []
    return [
        [x["epoch"], round(x[metric], 5), round(x["loss"], 4), round(x["seconds"], 1)] for x in lines if metric in x
    ]


def run(plan: Plan, states: dict[str, State], options, began: float) -> None:
    """Run trials until `options.seconds` after `began`, or until `options.trials` of them have run."""
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
    lane_of: dict[int, int] = {}
    idle: set[int] = set()
    count, repeated = 0, False
    out = (options.out / "trials.jsonl").open("a", buffering=1)
    where, version = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")), commit()

    def left() -> float:
        return options.seconds - (time.monotonic() - began)

    def begin(lane: int) -> bool:
        """Give a worker the next trial of the search that has used the least of its share."""
        nonlocal count
        if options.trials is not None and count >= options.trials:
            return False
        for state in sorted(states.values(), key=lambda s: (s.seconds + RUNNING_SECONDS * s.running) / s.search.share):
            if left() < state.search.least or (trial := state.next()) is None:
                continue
            arguments = [state.search.config, *assignments(state.settings(trial)), "--run", str(folder / str(count))]
            live[count] = state, trial, time.monotonic()
            lane_of[count] = lane
            lanes[lane].put((count, arguments))
            state.running, count = state.running + 1, count + 1
            return True
        return False

    def end(key: int, status: int | str) -> None:
        state, trial, since = live.pop(key)
        settings, seconds = state.settings(trial), time.monotonic() - since
        metric = load_config(state.search.config, assignments(settings)).best_metric
        points = curve(folder / str(key), metric)
        best = max(points, key=lambda point: point[1], default=[0, 0.0, 0.0, 0.0])
        state.running, state.seconds = state.running - 1, state.seconds + seconds
        state.record(trial, best[1], status == 0, points)
        record = {"search": state.name, "title": trial.title, "config": state.search.config, "settings": settings}
        record["values"] = {option: state.search.options[option][place] for option, place in trial.point.items()}
        record |= {"beside": trial.more} if trial.more else {}
        record |= {"like": state.search.like} if state.search.like else {}
        record |= {
            "environment": where,
            "commit": version,
            "metric": metric,
            "value": best[1],
            "epoch": best[0],
            "status": status,
            "seconds": round(seconds, 1),
        }
        judged = test_result(folder / str(key)) if trial.title == "final" else {}
        out.write(json.dumps(record | {"curve": points} | judged) + "\n")
        changed = {o: state.search.options[o][p] for o, p in trial.point.items() if p != state.first[o]} | trial.more
        print(
            f"{options.seconds - left():6.1f} s  {state.name}  {best[1]:.5f} at {best[0]}  {changed}  {status}"
            + "".join(f"  {name} {value:.5f}" for name, value in judged.get("test", {}).items() if "@10" in name),
            flush=True,
        )
        shutil.rmtree(folder / str(key), ignore_errors=True)

    while left() > 0 and any(worker.is_alive() for worker in workers):
        if not repeated and left() < options.seconds * (1 - plan.repeat_after):
            repeated = True
            for state in states.values():
                state.repeat(plan.repeat_best, plan.repeat_seeds)
        idle -= {lane for lane in sorted(idle) if begin(lane)}
        if not live and len(idle) >= sum(worker.is_alive() for worker in workers):
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
    # A process that is killed while it computes may harm the others under MPS.
    for lane, worker in enumerate(workers):
        lanes[lane].put(None)
        if lane not in idle and worker.pid:
            os.kill(worker.pid, signal.SIGINT)
    ending = time.monotonic() + ENDING
    for worker in workers:
        worker.join(max(0.0, ending - time.monotonic()))
        worker.kill()
    for log in sorted(folder.glob("worker-*.log")):
        errors = [line for line in log.read_text(errors="replace").splitlines() if "error" in line.lower()]
        print(*(f"{log.name}: {line}" for line in errors[-2:]), sep="\n", end="\n" if errors else "")
    shutil.rmtree(folder, ignore_errors=True)


def test_result(run: Path) -> dict[str, Any]:
    """Return a finished run's metrics on the test split, its seconds, and each user's rank, at most 255, as text."""
    try:
        result = json.loads((run / "result.json").read_text())
        ranks = read_judged(run)[result["filter_seen"]]
    except (OSError, ValueError, KeyError, FolderError):
        return {}
    packed = zlib.compress(np.minimum(ranks, 255).astype(np.uint8).tobytes(), 9)
    named = {"filter": result["filter_seen"], "run_seconds": result["seconds"], "steps": result["steps"]}
    return named | {"test": result["model"][result["filter_seen"]], "ranks": base64.b64encode(packed).decode()}


def table(out: Path) -> None:
    """Print the best trials of each search, and the mean effect of each value by least squares over the logarithms.

    Effects are relative to the first settings, from the fit. Then come the mean effects of values that several searches
    tried, the settings meant for several data sets, and the mean and standard deviation over seeds on the test split.
    """
    records = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    finals = [record for record in records if record["title"] == "final"]
    records = [record for record in records if record["title"] != "final" and record["value"] > 0]
    common: dict[str, list[float]] = {}
    for name in dict.fromkeys(record["search"] for record in records):
        trials = [record for record in records if record["search"] == name]
        first, whole = named_values(trials[0]), [record for record in trials if record["status"] == 0]
        print(f"\n{name}: {len(trials)} trials, {len(whole)} of them whole")
        for record in sorted(trials, key=lambda record: -record["value"])[:8]:
            changed = named_values(record) - first
            print(f"  {record['value']:.5f} at {record['epoch']} ({record['status']})  {', '.join(sorted(changed))}")
        columns = sorted({text for record in whole for text in named_values(record) - first})
        design = np.array([[1.0, *(text in named_values(record) for text in columns)] for record in whole])
        if len(whole) < 3 or not columns:
            continue
        effects = np.linalg.lstsq(design, np.log([record["value"] for record in whole]))[0]
        if np.linalg.matrix_rank(design) < len(columns) + 1:
            print("    too few trials to tell all effects apart")
        for text, effect, tried in zip(columns, effects[1:], design[:, 1:].sum(0)):
            common.setdefault(text, []).append(effect)
            print(f"    {text}: {100 * np.expm1(effect):+.1f}% ({int(tried)} trials)")
    print(*(
        f"{'' if number else chr(10)}in {len(effects)} searches  {text}: {100 * np.expm1(np.mean(effects)):+.1f}%"
        for number, (text, effects) in enumerate((t, e) for t, e in sorted(common.items()) if len(e) > 1)
    ), sep="\n")  # fmt: skip
    shared_settings(records)
    for name in dict.fromkeys(record["search"] for record in finals):
        judged = [record["test"] for record in finals if record["search"] == name and "test" in record]
        print(f"\n{name} on the test split, {len(judged)} seeds:")
        for metric in ("NDCG@10", "HR@10"):
            values = np.array([test[metric] for test in judged])
            spread = values.std(ddof=1) if len(values) > 1 else float("nan")
            print(f"  {metric} {values.mean() if len(values) else float('nan'):.5f}, sd {spread:.5f}")


def named_values(record: dict[str, Any]) -> set[str]:
    """Return the texts `option=value` of a trial, and its title if it has settings beside those, other than a seed."""
    beside = {f"beside: {record['title']}"} if record.get("beside", {}).keys() - {"seed"} else set()
    return beside | {f"{option}={json.dumps(value)}" for option, value in record.get("values", {}).items()}


def shared_settings(records: list[dict[str, Any]]) -> None:
    """Print the settings that searches with `like` tried: the ratio to the best trial of each search that `like` names.

    The settings with the greatest least ratio come first.
    """
    best: dict[str, float] = {}
    for record in records:
        if record["status"] == 0:
            best[record["search"]] = max(best.get(record["search"], 0.0), record["value"])
    ratios: dict[str, dict[str, float]] = {}
    for record in records:
        if record["status"] == 0 and record.get("like") in best:
            settings = ratios.setdefault(", ".join(sorted(named_values(record))), {})
            settings[record["like"]] = max(settings.get(record["like"], 0.0), record["value"] / best[record["like"]])
    most = max((len(by_set) for by_set in ratios.values()), default=0)
    for text, by_set in sorted(ratios.items(), key=lambda item: -min(item[1].values())):
        if len(by_set) == most:
            print(f"  {min(by_set.values()):.3f}  { ({k: round(v, 3) for k, v in by_set.items()}) }  {text}")


def main(arguments: list[str] | None = None) -> None:
    began = time.monotonic()
    parser = Parser(description=__doc__)
    parser.add_argument("plan", type=Path, nargs="?")
    parser.add_argument("given", nargs="*", metavar="SEARCH:key=value")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--trials", type=int, help="stop after so many trials, even if time is left")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--runs", type=Path, default=Path("/dev/shm"), help="the folder of run folders during a trial")
    parser.add_argument("--table", action="store_true", help="print the trials in --out")
    options = parser.parse_intermixed_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.table:
        table(options.out)
        return
    if options.plan is None:
        parser.error("give a plan, or --table")
    plan, states = load_plan(options.plan, options.given)
    print(f"{check(states)} settings are valid", flush=True)
    run(plan, states, options, began)


if __name__ == "__main__":
    run_main(main)
