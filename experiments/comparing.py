"""Compare settings, in Python and for compare.py: train the runs that are not finished, and write the result."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cli.interrupt import Interrupts, keyboard_interrupts
from cli.terminal import terminal
from experiments.fitting import Page, configured, read_text
from experiments.plan import DEFAULT_SEEDS, Plan, load_plan
from experiments.report import as_html
from experiments.results import Results, as_csv, collect, comparison_json, finished
from experiments.runs import run_all, speed_jobs, training_jobs, write_settings
from experiments.table import print_results
from training.config import merge
from training.folder import claimed, write_file
from training.run import TrainingError


def compare_plan(plan: Plan, out: Path, interrupts: Interrupts, parallel: int = 1, speed: bool = True) -> Results:
    """Train and measure the runs that are not finished; write comparison.json, comparison.csv, report.html into `out`.

    Raises TrainingError, after the result is written, if runs failed.
    """
    with claimed(out, new=False):
        write_settings(plan, out)
        failed = run_all(training_jobs(plan, out), interrupts, parallel)
        if speed:
            configs = {name: folders[0] / "config.yaml" for name, folders in finished(plan, out).items()}
            failed += run_all(speed_jobs(configs, out), interrupts)  # one process at a time
        interrupts.stage = "comparing; all runs are finished"
        results = collect(plan, out, failed)
        write_file(out / "comparison.json", comparison_json(results))
        write_file(out / "comparison.csv", as_csv(results))
        write_file(out / "report.html", as_html(results))
        print_results(results)
        terminal.say(f"Written: {out}/comparison.json, comparison.csv, report.html")
    if failed:
        raise TrainingError(f"{len(failed)} failed: " + "; ".join(f"{name}: {why}" for name, why in failed))
    return results


class Comparison(Page):
    """The result of `compare`, read from its folder; a notebook shows its page.

    Attributes:
        folder: an absolute path, with a folder for each run, SETTING/seed-N.

    Examples:
        >>> comparison.result["baseline"], comparison.result["metric"]  # of the example of `compare`
        ('narrow', 'NDCG@10')
        >>> str(comparison).splitlines()[0].partition(" 0.")[0], comparison.page == comparison.folder / "report.html"
        ('narrow: NDCG@10', True)
    """

    def __init__(self, folder: Path, results: Results):
        super().__init__(folder / "report.html", "\n".join(lines_of(results)))
        self.folder = folder

    @property
    def result(self) -> dict[str, Any]:
        """The content of comparison.json: the means, ratios, intervals and costs of each setting."""
        return json.loads(read_text(self.folder / "comparison.json"))


def lines_of(results: Results) -> list[str]:
    """Return a line for each setting: its mean, and its ratio to the baseline with the 95% interval."""
    lines = []
    for setting in results.settings:
        row = setting.metrics[results.metric]
        ratio = "" if row["ratio"] is None else f", {row['ratio']:.3f} of {results.baseline.name}"
        interval = "" if row["low"] is None else f" ({row['low']:.3f} to {row['high']:.3f})"
        seeds = f"{len(setting.runs)} seed{'s'[: len(setting.runs) > 1]}"
        lines.append(f"{setting.name}: {results.metric} {row['mean']:.4f}, {seeds}{ratio}{interval}")
    return lines


def compare(
    events: Any,
    settings: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int] = DEFAULT_SEEDS,
    *,
    config: str | Path | Mapping[str, Any] = "default",
    items: Any = None,
    users: Any = None,
    baseline: str | None = None,
    out: str | Path | None = None,
    parallel: int = 1,
    speed: bool = False,
    quiet: bool = False,
    **overrides: Any,
) -> Comparison:
    """Train every setting with every seed, each run in a separate process, and compare them over users and seeds.

    Args:
        events, config, items, users, quiet, overrides: as in `fit`.
        settings: the options that each setting changes, by the setting's name:
            `{"dense": {}, "softmax": {"model.attention.kind": "softmax"}}`.
        seeds: integers; with a single seed, intervals do not include the variation between seeds.
        baseline: the setting that the others are compared with; by default the first one.
        out: the folder of the comparison, by default a new one below `run_dir`. In a folder with a comparison of the
            same settings, only runs that are not finished are trained.
        parallel: the number of runs at a time, which share the cores.
        speed: measure the time and memory of a step of each setting.

    Raises the errors of `fit`, and TrainingError if runs failed, after the result of the others is written.

    Examples:
        >>> pairs = [(user, (user + step) % 5, 60 * step) for user in range(30) for step in range(6)]
        >>> events = {name: list(column) for name, column in zip(("user", "item", "timestamp"), zip(*pairs))}
        >>> settings = {"narrow": {"model.embedding_dim": 16}, "wide": {}}
        >>> comparison = compare(events, settings, seeds=[1], config="small", quiet=True, train={"epochs": 1})
        >>> [setting["name"] for setting in comparison.result["settings"]]
        ['narrow', 'wide']
    """
    terminal.begin(quiet)
    tree, run = configured(events, config, items, users, overrides)
    merge(tree, {"data": {"cache_dir": run.data.cache_dir}})
    changed: dict[str, dict[str, Any]] = {}
    for name, options in settings.items():
        changed[name] = {key: value for key, value in options.items() if not isinstance(value, Mapping)}
        changed[name]["base"] = copy.deepcopy(tree)
        merge(changed[name]["base"], {key: value for key, value in options.items() if isinstance(value, Mapping)})
    plan = load_plan({"settings": changed}, seeds=seeds, baseline=baseline)
    place = Path(run.run_dir, "compared", time.strftime("%Y%m%d-%H%M%S")) if out is None else Path(out).expanduser()
    with keyboard_interrupts() as interrupts:
        results = compare_plan(plan, place.absolute(), interrupts, parallel, speed)
    return Comparison(place.absolute(), results)
