"""Draw plots as inline SVG that takes its colours from the page, so that they follow its light or dark mode.

Text stays readable at 350 pixels, the width that a phone leaves: a plot is drawn 400 wide with text of size 14.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 400, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 46
ROW = 40  # height of a row of `strip`


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


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers at most, from low to high."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _span(values: Iterable[float]) -> tuple[float, float]:
    """Return a range that holds the values, with a margin at both ends."""
    values = list(values)
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _scale(span: tuple[float, float], begin: float, end: float) -> Callable[[float], float]:
    return lambda value: begin + (value - span[0]) / (span[1] - span[0]) * (end - begin)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{html.escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _svg(parts: list[str], height: float, title: str) -> str:
    label = html.escape(title, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _x_axis(
    span: tuple[float, float], scale: Callable, bottom: float, label: str, top: float, whole: bool = False
) -> list[str]:
    parts = []
    for value in ticks(*span):
        if whole and value % 1:
            continue
        parts += [
            _line(scale(value), top, scale(value), bottom, "grid"),
            _text(scale(value), bottom + 18, _number(value)),
        ]
    return [*parts, _text((LEFT + WIDTH - RIGHT) / 2, bottom + 38, label)]


def _y_axis(span: tuple[float, float], scale: Callable) -> list[str]:
    parts = []
    for value in ticks(*span):
        parts.append(_line(LEFT, scale(value), WIDTH - RIGHT, scale(value), "grid"))
        parts.append(_text(LEFT - 6, scale(value) + 5, _number(value), "end"))
    return parts


def scatter(series: Sequence[Series], x: str, y: str) -> str:
    """Plot a mark for each point; x and y name the axes, y in the title only."""
    return _chart(series, x, y, lines=False)


def curves(series: Sequence[Series], x: str, y: str) -> str:
    """Plot a line for each series."""
    return _chart(series, x, y, lines=True)


def _chart(series: Sequence[Series], x: str, y: str, lines: bool, names: Sequence[str] = ()) -> str:
    points = [point for line in series for point in line.points]
    bottom = HEIGHT - BOTTOM
    across, up = _span(point[0] for point in points), _span(point[1] for point in points)
    place_x, place_y = _scale(across, LEFT, WIDTH - RIGHT), _scale(up, bottom, TOP)
    parts = _y_axis(up, place_y)
    if names:
        shown = range(0, len(names), -(-len(names) // 6))
        parts += [_text(place_x(i), bottom + 18, names[i]) for i in shown]
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 38, x))
    else:
        # Epochs are whole numbers: no tick lies between two.
        whole = lines and all(point[0] % 1 == 0 for point in points)
        parts += _x_axis(across, place_x, bottom, x, TOP, whole)
    for color, data in series:
        placed = [(place_x(a), place_y(b)) for a, b in data]
        if lines and len(placed) > 1:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in placed)
            parts.append(f'<polyline points="{path}" class="curve s{color}"/>')
        if not lines or len(placed) < 20:
            parts += [
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{3 if lines else 6}" class="dot s{color}"/>' for a, b in placed
            ]
    return _svg(parts, HEIGHT, f"{y} by {x}")


def groups(series: Sequence[tuple[int, dict[str, float | None]]], x: str, y: str) -> str:
    """Plot a line for each (colour, group -> value or None); all have the same groups, in their order."""
    names = list(series[0][1])
    lines = [
        Series(color, [(place, value) for place, value in enumerate(values.values()) if value is not None])
        for color, values in series
    ]
    return _chart(lines, x, y, lines=True, names=names)


def strip(rows: Sequence[Row], label: str, at: float | None = None) -> str:
    """Plot rows below each other on one axis, each with its name above: dots, a mean or an interval; at: a line for
    comparison.
    """
    values = [x for row in rows for x in (*row.dots, *(row.interval or ()), row.mean) if x is not None]
    span = _span(values if at is None else [*values, at])
    place, bottom = _scale(span, RIGHT, WIDTH - RIGHT), TOP + ROW * len(rows)
    parts = _x_axis(span, place, bottom, label, TOP)
    if at is not None:
        parts.append(_line(place(at), TOP, place(at), bottom, "mark"))
    for number, row in enumerate(rows):
        y = TOP + ROW * number + 28
        parts.append(_text(RIGHT, y - 13, row.name if len(row.name) < 50 else row.name[:49] + "…", "start"))
        if row.interval:
            parts.append(_line(place(row.interval[0]), y, place(row.interval[1]), y, f"interval s{row.color}"))
        parts += [f'<circle cx="{place(x):.1f}" cy="{y}" r="5" class="dot s{row.color}"/>' for x in row.dots]
        if row.mean is not None:
            parts.append(_line(place(row.mean), y - 9, place(row.mean), y + 9, f"mean s{row.color}"))
    return _svg(parts, bottom + BOTTOM, label)
