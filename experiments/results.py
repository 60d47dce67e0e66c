"""Summarise the finished runs of a comparison: means, ratios to the baseline, breakdowns, curves; as JSON and CSV.

Letters: S seeds, M users.
"""

import csv
import io
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.errors import ConfigError
from data.types import shown
from experiments.plan import Plan
from experiments.runs import RESULT, Failed, changed_options, is_finished, read_result, read_speed, run_folder
from models.tasks.build import build_task
from training.config import RunConfig, load_config
from training.folder import FolderError, access, as_json, check_run, read_judged, read_regular
from training.statistics import compare, holm

COLUMNS = ("mean", "sd", "ratio", "low", "high", "p", "p_holm")
COSTS = ("parameters", "events_per_second", "peak_memory_bytes")


@dataclass
class FinishedRun:
    """A finished run.

    values: metric -> its values [M] of the users; baselines: name of a baseline -> its values [M] of the main metric;
    evaluated_on: the fingerprint of the data and the evaluated events; curve: (epoch, main metric) pairs.
    """

    folder: Path
    config: RunConfig
    result: dict
    users: np.ndarray
    evaluated_on: tuple[str, bytes]
    values: dict[str, np.ndarray]
    baselines: dict[str, np.ndarray]
    breakdowns: dict[str, dict[str, float]]
    curve: list[tuple[int, float]]


@dataclass
class Setting:
    """The results of a setting; metrics: name -> a dict with the keys COLUMNS, None for a missing value."""

    name: str
    runs: list[FinishedRun]
    metrics: dict[str, dict] = field(default_factory=dict)
    breakdowns: dict[str, dict[str, float | None]] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    speed: dict = field(default_factory=dict)

    @property
    def costs(self) -> dict[str, float | None]:
        """The COSTS: the last two are measured by benchmarks/train.py --step, None without a measurement."""
        return {"parameters": self.runs[0].result.get("parameters")} | {
            name: self.speed.get(name) for name in COSTS[1:]
        }


@dataclass
class Results:
    """The results of a comparison.

    settings: the baseline first; metric: the main metric, lower is better if `less_is_better`; seeds: whether intervals
    include the variation between seeds; simple: name of a baseline of the task (a model without a network) -> its
    `mean`, the `ratio` to the first setting, and the ratio's interval over users, `low` and `high`.
    """

    metric: str
    users: int
    seeds: bool
    settings: list[Setting]
    failed: list[Failed]
    less_is_better: bool = False
    simple: dict[str, dict[str, float | None]] = field(default_factory=dict)

    @property
    def baseline(self) -> Setting:
        """The setting that the others are compared with."""
        return self.settings[0]


def load_run(folder: Path) -> FinishedRun:
    """Load a finished run from its folder; FolderError or ConfigError."""
    check_run(folder)
    config, result, judged = load_config(folder / "config.yaml"), read_result(folder), read_judged(folder)
    task = build_task(config)
    try:
        users, values = task.user_values(judged)
        evaluated_on = str(judged["fingerprint"]), judged["events"].tobytes()
        breakdowns = task.breakdowns(result, judged)
        baselines = task.baseline_values(judged)
    except (KeyError, IndexError, ValueError) as error:
        raise FolderError(f"{shown(folder, 200)}: damaged ({shown(error)})") from None
    curve = _curve(folder, config.best_metric)
    return FinishedRun(folder, config, result, users, evaluated_on, values, baselines, breakdowns, curve)


def _curve(folder: Path, metric: str) -> list[tuple[int, float]]:
    """Return (epoch, main metric) of each evaluation during training."""
    path = folder / "metrics.jsonl"
    with access(path, "read"):
        lines = read_regular(path).decode("utf-8", "replace").splitlines()
    try:
        records = [json.loads(line) for line in lines]
        return [(int(record["epoch"]), float(record[metric])) for record in records if record.get(metric) is not None]
    except (ValueError, KeyError, TypeError):
        raise FolderError(f"{shown(path, 200)}: damaged, expected a JSON object in each line") from None


def runs_in(folder: Path) -> list[Path]:
    """Return the finished runs in a folder, which may be a run itself, by name; FolderError if there are none."""
    with access(folder, "read"):
        places = [folder, *sorted(path.parent for path in folder.glob(f"*/{RESULT}"))]
        places = [place for place in places if is_finished(place)]
    if not places:
        raise FolderError(f"{shown(folder, 200)}: no finished run in this folder or its subfolders")
    return places


def finished(plan: Plan, out: Path) -> dict[str, list[Path]]:
    """Map each name of a plan that has finished runs to their folders, the baseline first."""
    folders = {}
    for name in plan.names:
        if name in plan.runs:
            folders[name] = [place for folder in plan.runs[name] for place in runs_in(folder)]
        else:
            folders[name] = [run_folder(out, name, seed) for seed in plan.seeds]
            folders[name] = [folder for folder in folders[name] if is_finished(folder)]
    return {name: runs for name, runs in folders.items() if runs}


def collect(plan: Plan, out: Path, failed: list[Failed]) -> Results:
    """Compare the finished runs of a plan.

    Raises:
        ConfigError: the baseline has no finished run, or runs were not evaluated on the same events in the same way.
    """
    folders_by_name = finished(plan, out)
    if plan.baseline not in folders_by_name:
        cause = next((f": {job}: {reason}" for job, reason in failed if job.startswith(f"{plan.baseline},")), "")
        raise ConfigError(f"{plan.baseline}: the baseline has no finished run{cause}")
    settings = [
        Setting(name, [load_run(x) for x in folders], speed=read_speed(out, name))
        for name, folders in folders_by_name.items()
    ]
    first = settings[0].runs[0]
    for setting in settings:
        for run in setting.runs:
            _check_comparable(first, run)
    metric = first.config.best_metric
    seeds = _fill(settings)
    less = first.config.task.less_is_better(metric)
    return Results(metric, len(first.users), seeds, settings, failed, less, _simple(settings[0], metric))


def _simple(base: Setting, metric: str) -> dict[str, dict[str, float | None]]:
    """Compare the task's baselines with the first setting, over its users."""
    base_values = np.stack([run.values[metric] for run in base.runs])
    rows: dict[str, dict[str, float | None]] = {}
    for name, values in base.runs[0].baselines.items():
        comparison = compare(values[None], base_values)
        ratios = {key: _number(getattr(comparison, key)) for key in ("ratio", "low", "high")}
        rows[name] = {"mean": float(values.mean()), **ratios}
    return rows


def _check_comparable(first: FinishedRun, run: FinishedRun) -> None:
    if run.config.task.judged_by() != first.config.task.judged_by():
        raise ConfigError(f"{shown(run.folder, 200)}: expected the same task as in {shown(first.folder, 200)}")
    if run.config.eval.filter_seen != first.config.eval.filter_seen:
        raise ConfigError(
            f"{shown(run.folder, 200)}: eval.filter_seen={run.config.eval.filter_seen}, "
            f"{shown(first.folder, 200)} has {first.config.eval.filter_seen}"
        )
    if run.evaluated_on != first.evaluated_on:
        raise ConfigError(f"{shown(run.folder, 200)}: expected the same test events as in {shown(first.folder, 200)}")


def _fill(settings: list[Setting]) -> bool:
    """Compute the results of all settings in place; return whether intervals include the variation between seeds."""
    base, seeds = settings[0], True
    names = list(base.runs[0].values)
    for setting in settings:
        same_runs = [run.folder.resolve() for run in setting.runs] == [run.folder.resolve() for run in base.runs]
        for name in names:
            values, base_values = (np.stack([run.values[name] for run in x.runs]) for x in (setting, base))
            by_seed = values.mean(1)
            row = {"mean": float(by_seed.mean()), "by_seed": by_seed.tolist()}
            row["sd"] = float(by_seed.std(ddof=1)) if len(by_seed) > 1 else None
            if setting is base:
                row |= {"ratio": 1.0} | dict.fromkeys(COLUMNS[3:])
            else:
                comparison = compare(values, base_values, same_runs=same_runs)
                seeds &= comparison.seeds
                row |= {key: _number(getattr(comparison, key)) for key in ("ratio", "low", "high", "p")}
            setting.metrics[name] = row
        setting.changes = [] if setting is base else changed_options(base.runs[0].config, setting.runs[0].config)
        for title, groups in setting.runs[0].breakdowns.items():
            setting.breakdowns[title] = {
                group: _number(float(np.mean([_or_nan(run.breakdowns[title][group]) for run in setting.runs])))
                for group in groups
            }
    for name in names:
        rows = [setting.metrics[name] for setting in settings[1:]]
        for row, p in zip(rows, holm([math.nan if row["p"] is None else row["p"] for row in rows])):
            row["p_holm"] = _number(p)
    return seeds


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def comparison_json(results: Results) -> str:
    """Format a comparison as JSON."""
    return as_json(
        {
            "baseline": results.baseline.name,
            "metric": results.metric,
            "less_is_better": results.less_is_better,
            "users": results.users,
            "interval": "95%, users and seeds" if results.seeds else "95%, users only",
            "settings": [
                {
                    "name": setting.name,
                    "runs": [{"folder": str(run.folder), "seed": run.config.seed} for run in setting.runs],
                    "changes": setting.changes,
                    **setting.costs,
                    "metrics": setting.metrics,
                    "by_group": setting.breakdowns,
                }
                for setting in results.settings
            ],
            "baselines": results.simple,
            "failed": [{"run": name, "reason": reason} for name, reason in results.failed],
        }
    )


def as_csv(results: Results) -> str:
    """Format a comparison as CSV, with a row for each setting and metric."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["setting", "metric", "seeds", *COLUMNS, *COSTS])
    for setting in results.settings:
        for name, row in setting.metrics.items():
            costs = setting.costs.values()
            writer.writerow([setting.name, name, len(setting.runs), *(row[key] for key in COLUMNS), *costs])
    return text.getvalue()
