"""Write report.html of a comparison: one file that needs no network, for any width, in light and dark mode."""

import html
import re
from collections.abc import Sequence

import numpy as np

from models.experiments.plots import Row, Series, curves, groups, scatter, strip
from models.experiments.results import Results, Setting
from models.experiments.table import ABSENT, p_value, shown_costs

# Colours that are distinct on white and on black, also for red-green colour blindness; more settings reuse them.
COLORS = ("#3b82c4", "#d55e00", "#1a9e77", "#c964a5", "#c99a00", "#7c6ee0", "#5bb3d9", "#8a8a8a")
STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1c1e21; --soft: #5d646e; --line: #d9dde3; --box: #f6f7f9 }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171a; --text: #e4e7eb; --soft: #9aa3ae; --line: #363c44; --box: #1d2126 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: .5rem 0 } h2 { font-size: 1.1rem; margin: 0 0 .5rem }
p { margin: .4rem 0; color: var(--soft) } code { overflow-wrap: anywhere }
section { background: var(--box); border: 1px solid var(--line); border-radius: 8px; padding: 1rem; min-width: 0 }
main { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)) }
.wide { grid-column: 1 / -1 } .scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 7rem; overflow-wrap: anywhere }
th { color: var(--soft); font-weight: 600 }
svg { display: block; width: 100%; height: auto; max-width: 29rem; margin: auto }
svg text { fill: var(--text); font-size: 14px }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin-top: .5rem; overflow-wrap: anywhere }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .4em;
  background: currentColor }
.grid { stroke: var(--line) } .mark { stroke: var(--soft); stroke-dasharray: 5 4 }
.curve, .mean, .interval { fill: none; stroke: currentColor; stroke-width: 2.5 }
.interval { stroke-width: 4; opacity: .55 }
.dot { fill: currentColor; fill-opacity: .8 }
dt { font-weight: 600; margin-top: .5rem } dd { margin: 0 }
""" + "\n".join(f".s{place} {{ color: {color} }}" for place, color in enumerate(COLORS))


def as_html(results: Results) -> str:
    """Build the page."""
    metric, base = results.metric, results.baseline.name
    colors = {setting.name: place % len(COLORS) for place, setting in enumerate(results.settings)}
    legend = "".join(
        f'<span><span class="key s{color}"></span>{html.escape(name)}</span>' for name, color in colors.items()
    )
    boxes = [_box("Settings", _summary(results), wide=True), *_quality(results, colors)]
    for title, plot in [*_costs(results, colors), *_learning(results, colors), *_by_group(results, colors)]:
        boxes.append(_box(title, f'{plot}<div class="legend">{legend}</div>'))
    boxes.append(_box(f"Options that differ from {base}", _changes(results.settings), wide=True))
    if results.failed:
        lines = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(why)}</dd>" for name, why in results.failed)
        boxes.append(_box("Failed", f"<dl>{lines}</dl>", wide=True))
    title = html.escape(f"{metric}: {len(results.settings)} settings compared with {base}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><h1>{title}</h1>{_explanation(results)}"
        f"<main>{''.join(boxes)}</main></body></html>\n"
    )


def _box(title: str, content: str, wide: bool = False) -> str:
    return f"<section{' class=wide' if wide else ''}><h2>{html.escape(title)}</h2>{content}</section>\n"


def _explanation(results: Results) -> str:
    """Return sentences that say which data and tests the figures come from."""
    chance = (
        "users and seeds" if results.seeds else "users alone (one seed says nothing about the variation between seeds)"
    )
    lines = [
        f"{results.users:,} users. Ratios of means to {results.baseline.name}, with 95% intervals over {chance}; "
        "p values are two-sided and corrected by Holm for the number of settings."
    ]
    if environment := next((x.speed["environment"] for x in results.settings if "environment" in x.speed), None):
        versions = ", ".join(f"{name} {value}" for name, value in environment.items() if name != "device")
        lines.append(f"Steps were measured alone on {environment['device']}; {versions}.")
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _summary(results: Results) -> str:
    headings = [
        "setting",
        "seeds",
        results.metric,
        "sd",
        "ratio",
        "95% interval",
        "p",
        "parameters",
        "events/s",
        "memory",
    ]
    rows = []
    for setting in results.settings:
        row = setting.metrics[results.metric]
        interval = ABSENT if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
        sd, ratio = (
            ABSENT if row[key] is None else form.format(row[key])
            for key, form in (("sd", "{:.4f}"), ("ratio", "{:.3f}"))
        )
        cells = [
            setting.name,
            str(len(setting.runs)),
            f"{row['mean']:.4f}",
            sd,
            ratio,
            interval,
            p_value(row["p_holm"]),
        ]
        rows.append([*cells, *shown_costs(setting.costs)])
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in headings)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _quality(results: Results, colors: dict[str, int]) -> list[str]:
    metric, base = results.metric, results.baseline.name
    rows = {setting.name: setting.metrics[metric] for setting in results.settings}
    seeds = [Row(name, colors[name], row["by_seed"], row["mean"]) for name, row in rows.items()]
    ratios = [
        Row(name, colors[name], [], row["ratio"], None if row["low"] is None else (row["low"], row["high"]))
        for name, row in rows.items()
        if name != base and row["ratio"] is not None
    ]
    boxes = [_box("Each seed, and the mean", strip(seeds, metric))]
    if ratios:
        boxes.append(_box(f"Ratio to {base}, 95% interval", strip(ratios, f"{metric} over {base}'s", at=1.0)))
    return boxes


def _costs(results: Results, colors: dict[str, int]) -> list[tuple[str, str]]:
    """Plot quality against the measured costs of a step."""
    plots = []
    for key, title, label, shown in (
        ("events_per_second", "time", "milliseconds for 1,000 events of training", lambda rate: 1e6 / rate),
        ("peak_memory_bytes", "memory", "MiB at the most", lambda size: size / 2**20),
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
    """Plot the metric over the epochs, the mean of the runs that reached each."""
    series = []
    for setting in results.settings:
        values: dict[int, list[float]] = {}
        for run in setting.runs:
            for epoch, value in run.curve:
                values.setdefault(epoch, []).append(value)
        if values:
            series.append(Series(colors[setting.name], [(x, float(np.mean(values[x]))) for x in sorted(values)]))
    label = f"{results.metric} of the evaluations on the way, mean over seeds"
    return [(label, curves(series, "epoch", results.metric))] if series else []


def _by_group(results: Results, colors: dict[str, int]) -> list[tuple[str, str]]:
    plots = []
    for title in results.baseline.breakdowns:
        series = [(colors[setting.name], setting.breakdowns[title]) for setting in results.settings]
        plots.append((f"{results.metric} by {title}", groups(series, title, results.metric)))
    return plots


def _changes(settings: Sequence[Setting]) -> str:
    items = []
    for setting in settings[1:]:
        lines = readable_changes(setting.changes) or ["nothing"]
        texts = "".join(f"<dd><code>{html.escape(line)}</code></dd>" for line in lines)
        items.append(f"<dt>{html.escape(setting.name)}</dt>{texts}")
    return f"<dl>{''.join(items)}</dl>"


def readable_changes(changes: Sequence[str]) -> list[str]:
    """Return lines of `settings_differ` without options that only the baseline's kind has; None is shown as absent."""
    mappings = tuple(line.partition("kind: ")[0] for line in changes if ".kind: " in line)
    lines = [line for line in changes if not (line.endswith(" -> None") and line.startswith(mappings))]
    lines = [line.replace(": None -> ", ": " if line.startswith(mappings) else ": absent -> ", 1) for line in lines]
    return [re.sub(" -> None$", " -> absent", line) for line in lines]
