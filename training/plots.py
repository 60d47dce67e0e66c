"""Draw plots by matplotlib as inline SVG whose text and axes have the colours of the page, in light and dark mode.

Text stays readable at 350 pixels, the width that a phone leaves: a plot is 288 units wide with text of size 11.
"""

import html
import io
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

if not os.environ.get("MPLBACKEND", "").startswith("module://"):  # of a notebook, which shows the user's figures
    os.environ["MPLBACKEND"] = "agg"  # the environment may name an invalid backend, and matplotlib reads it once
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import blended_transform_factory

WIDTH, HEIGHT, ROW = 4.0, 2.8, 0.4  # inches; ROW: of a row of `strip`
EDGE, BELOW, DIGIT = 0.1, 0.5, 0.1  # inches around the axes; DIGIT: of one of an axis's numbers
# Colours that are distinct on white and on black, also for red-green colour blindness; more settings reuse them.
COLORS = ("#3b82c4", "#d55e00", "#1a9e77", "#c964a5", "#c99a00", "#7c6ee0", "#5bb3d9", "#8a8a8a")
LINE, SOFT = "#010101", "#020202"  # drawn in the page's colours of lines and of soft text
STYLE: dict[Any, Any] = {
    "axes.edgecolor": LINE,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",  # its widths are known here; the page names its own
    "font.size": 11,
    "grid.color": LINE,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hstu_sparse",  # the same results give the same page
    "text.parse_math": False,
    "xtick.color": LINE,
    "xtick.labelcolor": "black",
    "ytick.color": LINE,
    "ytick.labelcolor": "black",
}


class Series(NamedTuple):
    """Points of one setting: the index of its colour, and (x, y) in data units."""

    color: int
    points: list[tuple[float, float]]


class Row(NamedTuple):
    """A row of `strip`: its name and colour, dots, and either a mean or an interval about it."""

    name: str
    color: int
    dots: list[float]
    mean: float | None
    interval: tuple[float, float] | None = None


def scatter(series: Sequence[Series], x: str, y: str) -> str:
    """Plot a mark for each point; x and y name the axes, y in the title only."""
    with rc_context(STYLE):
        figure, axes = _axes(HEIGHT, x)
        for color, points in series:
            axes.plot(*zip(*points), "o", color=COLORS[color], markersize=8, alpha=0.8)
        return _svg(figure, f"{y} by {x}")


def curves(series: Sequence[Series], x: str, y: str) -> str:
    """Plot a line for each series; x counts, so that no tick lies between two integers."""
    with rc_context(STYLE):
        figure, axes = _axes(HEIGHT, x)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        for color, points in series:
            axes.plot(*zip(*points), "o-" if len(points) < 20 else "-", color=COLORS[color], markersize=4)
        return _svg(figure, f"{y} by {x}")


def groups(series: Sequence[tuple[int, dict[str, float | None]]], x: str, y: str) -> str:
    """Plot a line for each (colour, group -> value or None); all have the same groups, in their order."""
    with rc_context(STYLE):
        figure, axes = _axes(HEIGHT, x)
        names = list(series[0][1])
        ticks = range(0, len(names), -(-len(names) // 6))
        axes.set_xticks(ticks, [names[place] for place in ticks])
        for color, values in series:
            points = [(place, value) for place, value in enumerate(values.values()) if value is not None]
            if points:
                axes.plot(*zip(*points), "o-", color=COLORS[color], markersize=4)
        return _svg(figure, f"{y} by {x}")


def strip(rows: Sequence[Row], label: str, at: float | None = None) -> str:
    """Plot rows below each other on one axis, each with its name above: dots, a mean or an interval; at: a line for
    comparison.
    """
    with rc_context(STYLE | {"axes.spines.left": False}):
        figure, axes = _axes(0.6 + ROW * len(rows), label)
        axes.set_ylim(len(rows), 0)
        axes.yaxis.set_visible(False)
        if at is not None:
            axes.axvline(at, color=SOFT, linestyle="--", linewidth=1)
        left = blended_transform_factory(axes.transAxes, axes.transData)
        for place, row in enumerate(rows):
            y, color = place + 0.7, COLORS[row.color]
            name = row.name if len(row.name) < 44 else row.name[:43] + "…"
            axes.text(0, place + 0.35, name, transform=left).set_in_layout(False)
            if row.interval:
                axes.hlines(y, *row.interval, color=color, linewidth=3.5, alpha=0.55)
            axes.plot(row.dots, [y] * len(row.dots), "o", color=color, markersize=6, alpha=0.8)
            if row.mean is not None:
                axes.plot(row.mean, y, "|", color=color, markersize=14, markeredgewidth=2)
        return _svg(figure, label)


def _axes(height: float, x: str) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, at most six numbers on each."""
    figure = Figure((WIDTH, height))
    axes = figure.add_subplot(xlabel=x)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    return figure, axes


def _fit(figure: Figure) -> None:
    """Leave room for the numbers beside the axes; matplotlib's own layouts draw everything twice to measure them."""
    (axes,) = figure.axes
    left = EDGE
    if axes.yaxis.get_visible():
        longest = max(len(axes.yaxis.get_major_formatter()(number)) for number in axes.get_yticks())
        left += DIGIT * longest
    edges = {"left": left / WIDTH, "right": 1 - 3 * EDGE / WIDTH}
    height = figure.get_figheight()
    figure.subplots_adjust(**edges, bottom=BELOW / height, top=1 - EDGE / height)


def _svg(figure: Figure, title: str) -> str:
    """Return the figure as an SVG element for a page that has the variables --line and --soft."""
    _fit(figure)
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same ones in every plot
    # Inside HTML an SVG needs no addresses of namespaces; nothing lies outside of the axes, so that nothing is cut.
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| clip-path="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r"\n\s*", "\n", svg)
    svg = svg.replace(LINE, "var(--line)").replace(SOFT, "var(--soft)")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title, quote=True)}"', 1)
