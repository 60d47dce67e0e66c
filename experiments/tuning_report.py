"""Write the results of a search: best.yaml, report.md, trials.csv and a table on the terminal."""

import csv
import io
import json
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState
from rich import box
from rich.table import Table
from scipy.special import ndtri

from cli.terminal import terminal
from experiments.tuning import ENDED, Search
from training.config import RunConfig, as_yaml
from training.folder import write_file
from training.report import markdown_table
from training.run import TrainingError, open_data

LEAST_TRIALS = 5  # completed trials needed to estimate the importance of options
LISTED = 10


def conclude(tuning: Search, config: RunConfig) -> None:
    """Write and print the results of a search; TrainingError if no trial was completed."""
    trials = tuning.trials(*ENDED)
    write_file(tuning.out / "trials.csv", as_csv(tuning, trials))
    best = tuning.best()
    if best is None:
        reasons = "; ".join(sorted({trial.user_attrs["reason"] for trial in trials if "reason" in trial.user_attrs}))
        raise TrainingError(f"none of {len(trials)} trials was completed{f': {reasons}' if reasons else ''}")
    chosen = tuning.configured(tuning.values(best))
    write_file(tuning.out / "best.yaml", as_yaml(chosen))
    default = next((trial for trial in trials if trial.user_attrs.get("default")), None)
    rows = option_rows(tuning, best, default)
    users, baselines = on_validation(config)
    notes = [baselines_line(tuning, baselines)] if baselines else []
    notes += chance_lines(tuning, best, default, users)
    write_file(tuning.out / "report.md", "\n".join(report(tuning, config, trials, best, default, rows, notes)) + "\n")
    table = Table(title=f"{tuning.metric} {best.values[0]:.4f}, validation", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    terminal.table(table)
    for line in (summary(tuning, trials, best, default), *notes):
        terminal.say(line)
    terminal.say(f"Written: {tuning.out}/best.yaml, report.md, trials.csv")


HEADINGS = ["option", "importance", "default", "best"]


def importances(tuning: Search) -> dict[str, float]:
    """Return the importance of each option by PED-ANOVA (Watanabe et al., IJCAI 2023); empty with too few trials."""
    values = {trial.values[0] for trial in tuning.trials(TrialState.COMPLETE)}
    if len(values) < LEAST_TRIALS:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return optuna.importance.get_param_importances(tuning.study, evaluator=evaluator)


def on_validation(config: RunConfig) -> tuple[int, dict[str, float]]:
    """Return (the number of validation users, name of a baseline of the task -> its main metric on them)."""
    data = open_data(config)
    if data.splits.valid is None:
        return 0, {}
    results = data.task.baselines(data.dataset, data.splits, "valid", data.eval_batches("valid"))
    values = {name: result["metrics"].get(data.config.best_metric) for name, result in results.items()}
    return len(np.unique(data.splits.valid.users)), {name: value for name, value in values.items() if value is not None}


def baselines_line(tuning: Search, baselines: dict[str, float]) -> str:
    """Return a sentence about the baselines, best first."""
    order = sorted(baselines.items(), key=lambda item: item[1], reverse=not tuning.less_is_better)
    return f"Baselines, {tuning.metric} on validation: {', '.join(f'{name} {value:.4f}' for name, value in order)}."


def chance_lines(tuning: Search, best: FrozenTrial, default: FrozenTrial | None, users: int) -> list[str]:
    """Compare the gain of the best trial over the default with the gain that is expected by chance.

    A metric of which more is better is a mean over users of values from 0 to 1, so its standard error is at most
    sqrt(m (1 - m) / users). If all n trials were as good as the default, the best of them would exceed it by this
    standard error times the expected maximum of n normal values (Blom, 1958). Other metrics have no bound, and no line.
    """
    if tuning.less_is_better or default is None or default.state is not TrialState.COMPLETE or not users:
        return []
    count, mean = len(tuning.trials(TrialState.COMPLETE, TrialState.PRUNED)), default.values[0]
    if count < 2 or not 0 < mean < 1:
        return []
    chance = (mean * (1 - mean) / users) ** 0.5 * float(ndtri((count - 0.375) / (count + 0.25)))
    gain = best.values[0] - mean
    line = (
        f"The best trial gains {gain:.4f} over the default. If no option had an effect, the best of {count} trials "
        f"would still gain up to {chance:.4f} by chance on {users:,} validation users."
    )
    if gain > chance:
        return [line]
    return [f"WARNING: {line} So the gain may be chance: compare both over seeds on the test split (compare.py)."]


def option_rows(tuning: Search, best: FrozenTrial, default: FrozenTrial | None) -> list[list[str]]:
    """Return a row for each option, with a cell for each of HEADINGS; the most important option first."""
    shares = importances(tuning)
    chosen, before = tuning.values(best), tuning.values(default) if default else {}
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


def summary(tuning: Search, trials: list[FrozenTrial], best: FrozenTrial, default: FrozenTrial | None) -> str:
    """Return a sentence about the number of trials and the best one."""
    counts = [f"{sum(trial.state is state for trial in trials)} {word}" for state, word in STATES.items()]
    against = ""
    if default is not None and default.state is TrialState.COMPLETE:
        against = f", {best.values[0] / default.values[0]:.3f} of the default's {default.values[0]:.4f}"
    return f"{len(trials)} trials ({', '.join(counts)}); the best is trial {best.number}{against}."


STATES = {TrialState.COMPLETE: "completed", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


def report(
    tuning: Search,
    config: RunConfig,
    trials: list[FrozenTrial],
    best: FrozenTrial,
    default: FrozenTrial | None,
    rows: list[list[str]],
    notes: list[str],
) -> list[str]:
    """Return the lines of report.md."""
    completed = tuning.ordered()
    keys = list(tuning.space.space)
    listed = [
        [str(trial.number), f"{trial.values[0]:.4f}", *(_shown(tuning.values(trial)[key]) for key in keys)]
        for trial in completed[:LISTED]
    ]
    failed = [
        f"- trial {trial.number}: {trial.user_attrs['reason']}" for trial in trials if "reason" in trial.user_attrs
    ]
    return [
        f"# {config.name}: search for options",
        "",
        f"Validation split of protocol {config.data.protocol}, {tuning.metric} of the best epoch, seed {config.seed}. "
        + summary(tuning, trials, best, default),
        "",
        *(text for line in notes for text in (line, "")),
        "The best of many trials with one seed is good partly by chance: before reporting its metric, compare it with "
        "the default over other seeds, on the test split (`compare.py`, docs/comparing.md).",
        "",
        "## Importance of options",
        "",
        *markdown_table(HEADINGS, rows),
        "",
        "Importance (PED-ANOVA): each option's share of the difference between the better trials and all completed "
        f"trials, of which at least {LEAST_TRIALS} are needed.",
        "",
        f"## The best {len(listed)} trials",
        "",
        *markdown_table(["trial", tuning.metric, *keys], listed),
        "",
        *(["## Failed", "", *failed, ""] if failed else []),
        f"Train the best configuration: `python train.py {tuning.out / 'best.yaml'}`",
    ]


def as_csv(tuning: Search, trials: list[FrozenTrial]) -> str:
    """Format the trials that have ended as CSV, one row each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = list(tuning.space.space)
    writer.writerow(["trial", "state", tuning.metric, "epochs", "reason", *keys])
    for trial in trials:
        last = trial.intermediate_values.get(max(trial.intermediate_values, default=0))
        value = trial.values[0] if trial.state is TrialState.COMPLETE else last
        drawn = tuning.values(trial) if trial.params.keys() >= set(keys) else {}
        facts = [trial.number, trial.state.name.lower(), value, len(trial.intermediate_values)]
        writer.writerow([*facts, trial.user_attrs.get("reason", ""), *(_plain(drawn.get(key)) for key in keys)])
    return text.getvalue()


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value
