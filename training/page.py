"""Build report.html of a run: a self-contained page for any width, in light and dark mode."""

from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from models.tasks.contract import Task
from training.plots import COLORS, Row, Series, curves, strip
from training.verdict import kind

MODEL, BASELINE = 0, len(COLORS) - 1  # indices of colours


class Plot(NamedTuple):
    """A plot with its title; legend: name -> colour, or empty."""

    title: str
    svg: Markup
    legend: dict[str, str]


def pages(folder: Path) -> Environment:
    """Return a Jinja environment with the templates of a folder, which can extend page.html.j2."""
    return Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def as_html(
    title: str, task: Task, result: dict[str, Any], plots: list[Plot], lines: list[str], facts: dict[str, object]
) -> str:
    """Build the page.

    plots: those of `learning`. lines: sentences about data and protocol. facts: the environment by name.
    """
    verdict = result.get("against_baseline")
    return (
        pages(Path(__file__).parent)
        .get_template("report.html.j2")
        .render(
            title=title,
            verdict=verdict and verdict | {"kind": kind(verdict)},
            advice=result.get("advice", []),
            lines=lines,
            tables=task.tables(result) if "split" in result else [],
            plots=[*_quality(task, result), *plots],
            facts=facts,
        )
    )


def _quality(task: Task, result: dict[str, Any]) -> list[Plot]:
    """Plot the main metric of the model and of the baselines."""
    if "against_baseline" not in result:
        return []
    verdict, metric = result["against_baseline"], task.config.best_metric
    interval = result.get("intervals", {}).get(metric)
    rows = [Row("the model" + (", 95% interval" if interval else ""), MODEL, [], verdict["model"], interval)]
    for name, baseline in result["baselines"].items():
        rows.append(Row(name, BASELINE, [], baseline["metrics"][metric]))
    svg = strip(rows, f"{metric} on {result['split']}", at=verdict["of_baseline"])
    return [Plot("The model and the baselines", Markup(svg), {})]


def learning(task: Task, result: dict[str, Any], history: list[dict]) -> list[Plot]:
    """Plot the loss and the metrics over the epochs, with the metric of the task's baseline.

    history: the lines of metrics.jsonl.
    """
    plots = []
    if history:
        losses = [(row["epoch"], row["loss"]) for row in history]
        plots.append(Plot("Training loss", Markup(curves([Series(MODEL, losses)], "epoch", "loss")), {}))
    for name in task.plotted:
        rows = [row for row in history if row.get(name) is not None]
        if not rows:
            continue
        series, legend = [Series(MODEL, [(row["epoch"], row[name]) for row in rows])], {}
        if (value := result.get("plotted_baseline", {}).get(name)) is not None:
            ends = rows[0]["epoch"], rows[-1]["epoch"]
            series.append(Series(BASELINE, [(epoch, value) for epoch in ends]))
            legend = {"the model": COLORS[MODEL], task.plotted_baseline: COLORS[BASELINE]}
        title = f"{name} on {rows[0]['split']}"
        plots.append(Plot(title, Markup(curves(series, "epoch", name)), legend))
    return plots
