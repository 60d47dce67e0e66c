"""Write report.html of a comparison: one file without network access, for any width, in light and dark mode."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from experiments.results import Results, Setting
from experiments.table import ABSENT, p_value, shown_costs
from training.page import pages
from training.plots import COLORS, Row, Series, curves, groups, scatter, strip

HEADINGS = ("setting", "seeds", "metric", "sd", "ratio", "95% interval", "p", "parameters", "events/s", "memory")


class Plot(NamedTuple):
    """A plot with its title; legend: whether it needs a legend of the colours."""

    title: str
    svg: Markup
    legend: bool


def as_html(results: Results) -> str:
    """Return the page of a comparison as HTML."""
    metric, base = results.metric, results.baseline.name
    colors = {setting.name: place % len(COLORS) for place, setting in enumerate(results.settings)}
    plots = [Plot(title, Markup(svg), False) for title, svg in _quality(results, colors)]
    for title, svg in [*_costs(results, colors), *_learning(results, colors), *_by_group(results, colors)]:
        plots.append(Plot(title, Markup(svg), True))
    return (
        pages(Path(__file__).parent)
        .get_template("report.html.j2")
        .render(
            title=f"{metric}: {len(results.settings)} settings compared with {base}",
            explanation=_explanation(results),
            headings=[metric if heading == "metric" else heading for heading in HEADINGS],
            rows=[*(_cells(setting, metric) for setting in results.settings), *_simple_rows(results)],
            plots=plots,
            colors={name: COLORS[color] for name, color in colors.items()},
            base=base,
            changes={x.name: readable_changes(x.changes) or ["nothing"] for x in results.settings[1:]},
            failed=results.failed,
        )
    )


def _explanation(results: Results) -> list[str]:
    """Return sentences about the users, the intervals and the measurements behind the figures."""
    unknown = "users only (with one seed, the variation between seeds is unknown)"
    chance = "users and seeds" if results.seeds else unknown
    lines = [
        f"{results.users:,} users. Ratios of means to {results.baseline.name}, with 95% intervals over {chance}; "
        "p values are two-sided and corrected by Holm for the number of settings."
        + (f" A lower {results.metric} is better: a ratio below 1 is a gain." if results.less_is_better else "")
    ]
    if results.simple:
        lines.append(f"{', '.join(results.simple)}: no neural networks; their intervals are over users only.")
    if environment := next((x.speed["environment"] for x in results.settings if "environment" in x.speed), None):
        versions = ", ".join(f"{name} {value}" for name, value in environment.items() if name != "device")
        lines.append(f"Training steps were measured on {environment['device']}, without other runs; {versions}.")
    return lines


def _cells(setting: Setting, metric: str) -> list[str]:
    """Return the cells of a setting's row, one for each of HEADINGS."""
    row = setting.metrics[metric]
    interval = ABSENT if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
    sd, ratio = (
        ABSENT if row[key] is None else form.format(row[key]) for key, form in (("sd", "{:.4f}"), ("ratio", "{:.3f}"))
    )
    cells = [setting.name, str(len(setting.runs)), f"{row['mean']:.4f}", sd, ratio, interval, p_value(row["p_holm"])]
    return [*cells, *shown_costs(setting.costs)]


def _simple_rows(results: Results) -> list[list[str]]:
    """Return the rows of the task's baselines (models without a network), a cell for each of HEADINGS."""
    rows = []
    for name, row in results.simple.items():
        interval = ABSENT if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
        ratio = ABSENT if row["ratio"] is None else f"{row['ratio']:.3f}"
        rows.append([name, ABSENT, f"{row['mean']:.4f}", ABSENT, ratio, interval, *[ABSENT] * 4])
    return rows


def _quality(results: Results, colors: dict[str, int]) -> list[tuple[str, str]]:
    metric, base = results.metric, results.baseline.name
    rows = {setting.name: setting.metrics[metric] for setting in results.settings}
    seeds = [Row(name, colors[name], row["by_seed"], row["mean"]) for name, row in rows.items()]
    ratios = [
        Row(name, colors[name], [], row["ratio"], None if row["low"] is None else (row["low"], row["high"]))
        for name, row in rows.items()
        if name != base and row["ratio"] is not None
    ]
    plots = [("Each seed, and the mean", strip(seeds, metric))]
    if ratios:
        plots.append((f"Ratio to {base}, 95% interval", strip(ratios, f"{metric}, ratio", at=1.0)))
    return plots


def _costs(results: Results, colors: dict[str, int]) -> list[tuple[str, str]]:
    """Plot quality against the measured costs of a step."""
    plots = []
    for key, title, label, shown in (
        ("events_per_second", "time", "training time of 1,000 events, ms", lambda rate: 1e6 / rate),
        ("peak_memory_bytes", "memory", "peak memory, MiB", lambda size: size / 2**20),
    ):
        series = [
            Series(colors[setting.name], [(shown(setting.costs[key]), setting.metrics[results.metric]["mean"])])
            for setting in results.settings
            if setting.costs[key]
        ]
        if series:
            plots.append((f"{results.metric} against {title}", scatter(series, label, results.metric)))
    return plots


def _learning(results: Results, colors: dict[str, int]) -> list[tuple[str, str]]:
    """Plot the metric over the epochs: the mean of the runs that reached an epoch."""
    series = []
    for setting in results.settings:
        values: dict[int, list[float]] = {}
        for run in setting.runs:
            for epoch, value in run.curve:
                values.setdefault(epoch, []).append(value)
        if values:
            series.append(Series(colors[setting.name], [(x, float(np.mean(values[x]))) for x in sorted(values)]))
    label = f"{results.metric} during training, mean over seeds"
    return [(label, curves(series, "epoch", results.metric))] if series else []


def _by_group(results: Results, colors: dict[str, int]) -> list[tuple[str, str]]:
    plots = []
    for title in results.baseline.breakdowns:
        series = [(colors[setting.name], setting.breakdowns[title]) for setting in results.settings]
        plots.append((f"{results.metric} by {title}", groups(series, title, results.metric)))
    return plots


def readable_changes(changes: Sequence[str]) -> list[str]:
    """Return the lines of `changed_options` for a page.

    If a kind differs, options that only the baseline's kind has are left out. None is written as `absent`.
    """
    mappings = tuple(line.partition("kind: ")[0] for line in changes if ".kind: " in line)
    lines = [line for line in changes if not (line.endswith(" -> None") and line.startswith(mappings))]
    lines = [line.replace(": None -> ", ": " if line.startswith(mappings) else ": absent -> ", 1) for line in lines]
    return [re.sub(" -> None$", " -> absent", line) for line in lines]
