"""What a search ends with: best.yaml, report.md, trials.csv and a table on the terminal."""

import csv
import io
import json
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich import box
from rich.table import Table

from models.config import RunConfig, as_yaml
from models.experiments.tuning import ENDED, Search
from models.folder import write_file
from models.program import TrainingError
from models.report import markdown_table
from models.terminal import terminal

LEAST_TRIALS = 5  # completed ones, below which nothing is said of what mattered
LISTED = 10


def conclude(found: Search, config: RunConfig) -> None:
    """Writes what a search has come to; TrainingError where no trial has come to its end."""
    trials = found.trials(*ENDED)
    write_file(found.out / "trials.csv", as_csv(found, trials))
    best = found.best()
    if best is None:
        why = "; ".join(sorted({trial.user_attrs["reason"] for trial in trials if "reason" in trial.user_attrs}))
        raise TrainingError(f"none of {len(trials)} trials came to its end{f': {why}' if why else ''}")
    chosen = found.configured(found.values(best))
    write_file(found.out / "best.yaml", as_yaml(chosen))
    default = next((trial for trial in trials if trial.user_attrs.get("default")), None)
    rows = option_rows(found, best, default)
    write_file(found.out / "report.md", "\n".join(report(found, config, trials, best, default, rows)) + "\n")
    table = Table(title=f"{found.metric} {best.values[0]:.4f}, validation", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    terminal.table(table)
    terminal.say(summary(found, trials, best, default))
    terminal.say(f"Written: {found.out}/best.yaml, report.md, trials.csv")


HEADINGS = ["option", "importance", "default", "best"]


def importances(found: Search) -> dict[str, float]:
    """The share of each option in what made trials good (PED-ANOVA, Watanabe et al., IJCAI 2023), empty if unknown."""
    values = {trial.values[0] for trial in found.trials(TrialState.COMPLETE)}
    if len(values) < LEAST_TRIALS:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return optuna.importance.get_param_importances(found.study, evaluator=evaluator)


def option_rows(found: Search, best: FrozenTrial, default: FrozenTrial | None) -> list[list[str]]:
    """HEADINGS of each option, the one that mattered most first."""
    shares = importances(found)
    chosen, before = found.values(best), found.values(default) if default else {}
    order = sorted(chosen, key=lambda key: -shares.get(key, 0))
    return [
        [
            key,
            f"{shares[key]:.2f}" if key in shares else "-",
            _shown(before[key]) if key in before else "-",
            _shown(chosen[key]),
        ]
        for key in order
    ]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def summary(found: Search, trials: list[FrozenTrial], best: FrozenTrial, default: FrozenTrial | None) -> str:
    counts = [f"{sum(trial.state is state for trial in trials)} {word}" for state, word in STATES.items()]
    against = ""
    if default is not None and default.state is TrialState.COMPLETE:
        against = f", {best.values[0] / default.values[0]:.3f} of the default's {default.values[0]:.4f}"
    return f"{len(trials)} trials ({', '.join(counts)}); the best is trial {best.number}{against}."


STATES = {TrialState.COMPLETE: "completed", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


def report(
    found: Search,
    config: RunConfig,
    trials: list[FrozenTrial],
    best: FrozenTrial,
    default: FrozenTrial | None,
    rows: list[list[str]],
) -> list[str]:
    """The lines of report.md."""
    done = sorted((trial for trial in trials if trial.state is TrialState.COMPLETE), key=lambda x: -x.values[0])
    keys = list(found.space.space)
    listed = [
        [str(trial.number), f"{trial.values[0]:.4f}", *(_shown(found.values(trial)[key]) for key in keys)]
        for trial in done[:LISTED]
    ]
    failed = [
        f"- trial {trial.number}: {trial.user_attrs['reason']}" for trial in trials if "reason" in trial.user_attrs
    ]
    return [
        f"# {config.name}: a search",
        "",
        f"Validation split of protocol {config.data.protocol}, {found.metric} of the best epoch, seed {config.seed}. "
        + summary(found, trials, best, default),
        "",
        "The best of many trials with one seed is good partly by luck: before a figure of it is told, compare it with "
        "the default over other seeds, on the test split (`compare.py`, docs/comparing.md).",
        "",
        "## What mattered",
        "",
        *markdown_table(HEADINGS, rows),
        "",
        "Importance: the share of each option in what tells the better trials from all (PED-ANOVA), over completed "
        f"trials; at least {LEAST_TRIALS} are needed.",
        "",
        f"## The best {len(listed)} trials",
        "",
        *markdown_table(["trial", found.metric, *keys], listed),
        "",
        *(["## Failed", "", *failed, ""] if failed else []),
        f"Train the best one: `python train.py {found.out / 'best.yaml'}`",
    ]


def as_csv(found: Search, trials: list[FrozenTrial]) -> str:
    """A row for each trial that has ended."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = list(found.space.space)
    writer.writerow(["trial", "state", found.metric, "epochs", "reason", *keys])
    for trial in trials:
        last = trial.intermediate_values.get(max(trial.intermediate_values, default=0))
        value = trial.values[0] if trial.state is TrialState.COMPLETE else last
        drawn = found.values(trial) if trial.params.keys() >= set(keys) else {}
        facts = [trial.number, trial.state.name.lower(), value, len(trial.intermediate_values)]
        writer.writerow([*facts, trial.user_attrs.get("reason", ""), *(_plain(drawn.get(key)) for key in keys)])
    return text.getvalue()


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value
