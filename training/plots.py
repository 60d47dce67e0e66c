"""Draw plots with matplotlib as inline SVG; text and axes have the colours of the page, in light and dark mode.

A plot is 288 units wide with text of size 11, which is readable on a phone, where it is 350 pixels wide.
"""

import html
import io
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

if not os.environ.get("MPLBACKEND", "").startswith("module://"):  # a notebook's backend, which is not changed
    os.environ["MPLBACKEND"] = "agg"  # the variable may be an invalid backend, with which the import would fail
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import blended_transform_factory

WIDTH, HEIGHT, ROW = 4.0, 2.8, 0.4  # inches; ROW: the height of a row of `strip`
EDGE, BELOW, DIGIT = 0.1, 0.5, 0.1  # inches; margins around and below the axes, and the width of a digit
# Colours that are distinct on white and on black, also with red-green colour blindness.
COLORS = ("#3b82c4", "#d55e00", "#1a9e77", "#c964a5", "#c99a00", "#7c6ee0", "#5bb3d9", "#8a8a8a")
LINE, SOFT = "#010101", "#020202"  # placeholders for the page's colours --line and --soft
STYLE: dict[Any, Any] = {
    "axes.edgecolor": LINE,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",  # for the layout; the page sets its font
    "font.size": 11,
    "grid.color": LINE,
    "svg.fonttype": "none",  # keep text as text
    "svg.hashsalt": "hstu_sparse",  # fixed, so that equal results give equal pages
    "text.parse_math": False,
    "xtick.color": LINE,
    "xtick.labelcolor": "black",
    "ytick.color": LINE,
    "ytick.labelcolor": "black",
}


class Series(NamedTuple):
    """The points (x, y) of a setting, in data units, and the index of its colour."""

    color: int
    points: list[tuple[float, float]]


class Row(NamedTuple):
    """A row of `strip`: its name, the index of its colour, dots, a mean and an interval around the mean."""

    name: str
    color: int
    dots: list[float]
    mean: float | None
    interval: tuple[float, float] | None = None


def scatter(series: Sequence[Series], x: str, y: str) -> str:
    """Plot a mark for each point; x, y: names of the axes, of which y is only in the title."""
    with rc_context(STYLE):
        figure, axes = _axes(HEIGHT, x)
        for color, points in series:
            axes.plot(*zip(*points), "o", color=COLORS[color], markersize=8, alpha=0.8)
        return _svg(figure, f"{y} by {x}")


def curves(series: Sequence[Series], x: str, y: str) -> str:
    """Plot a line for each series; x has integer ticks."""
    with rc_context(STYLE):
        figure, axes = _axes(HEIGHT, x)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        for color, points in series:
            axes.plot(*zip(*points), "o-" if len(points) < 20 else "-", color=COLORS[color], markersize=4)
        return _svg(figure, f"{y} by {x}")


def groups(series: Sequence[tuple[int, dict[str, float | None]]], x: str, y: str) -> str:
    """Plot a line for each (colour, group -> value or None); all series have the same groups in the same order."""
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
    """Plot rows on a common axis, each with its name above; at: the position of a vertical line for comparison."""
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


def standalone(svg: str) -> str:
    """Return a plot as the text of an SVG file, on white."""
    for variable, color in (("var(--line)", "#b0b0b0"), ("var(--soft)", "#767676")):
        svg = svg.replace(variable, color)
    return svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg" style="background: white"', 1)


def _axes(height: float, x: str) -> tuple[Figure, Axes]:
    """Return a figure and its axes, with at most six ticks on each axis."""
    figure = Figure((WIDTH, height))
    axes = figure.add_subplot(xlabel=x)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    return figure, axes


def _fit(figure: Figure) -> None:
    """Set margins for the tick labels; this is faster than matplotlib's layouts, which draw everything twice."""
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
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # these ids are equal in all plots of a page
    # Inline SVG needs no namespaces, and no clip paths since nothing is outside of the axes.
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| clip-path="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r"\n\s*", "\n", svg)
    svg = svg.replace(LINE, "var(--line)").replace(SOFT, "var(--soft)")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title, quote=True)}"', 1)
