"""Add the speed of a training step to the comparison of attention kinds, rebuild its page and draw its figure.

    python benchmarks/kinds.py --speeds SPEEDS.jsonl    add measurements to benchmarks/results/ml-1m-kinds.json, then
                                                        write docs/reports/ml-1m-kinds.html and docs/kinds.png
    python benchmarks/kinds.py                          write both from the results as they are
    python benchmarks/kinds.py --table                  print them as a table for docs/comparing.md

A line of SPEEDS.jsonl has `speed`, the name of a setting, and what `benchmarks.train.measure_step` returns;
`compare.py` measures each setting in a process by itself. Where one process measures all of them, `before` is the
memory that the earlier ones hold, which is subtracted. If a setting has several lines, the median speed counts.
"""

import json
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.figures import RESULTS, save
from cli.command import Parser, run_main
from experiments.report import as_html
from experiments.results import COSTS, FinishedRun, Results, Setting

DOCS = Path(__file__).resolve().parents[1] / "docs"


def merge(comparison: dict, lines: Iterable[str]) -> None:
    """Write the measurements into the settings of a comparison (the JSON of compare.py) that they name."""
    settings = {setting["name"]: setting for setting in comparison["settings"]}
    rates: dict[str, list[float]] = {}
    for record in map(json.loads, lines):
        if record["speed"] not in settings:
            sys.exit(f"error: speed={record['speed']}: expected one of {', '.join(settings)}")
        rates.setdefault(record["speed"], []).append(record["events_per_second"])
        settings[record["speed"]] |= {
            "events_per_second": statistics.median(rates[record["speed"]]),
            "peak_memory_bytes": record["peak_memory_bytes"] - record.get("before", 0),
            "environment": record["environment"],
        }
    if len({setting["environment"]["device"] for setting in settings.values() if "environment" in setting}) > 1:
        sys.exit("error: the settings were measured on different devices")


def restore(comparison: dict) -> Results:
    """Return a comparison from its JSON, which has no users' values and no curves: only the runs' folders have them."""
    settings = []
    for entry in comparison["settings"]:
        parameters = {"parameters": entry["parameters"]}
        runs = [
            FinishedRun(Path(run["folder"]), None, parameters, np.empty(0), ("", b""), {}, {}, {}, [])
            for run in entry["runs"]
        ]
        speed = {name: entry[name] for name in (*COSTS[1:], "environment") if entry.get(name) is not None}
        settings.append(Setting(entry["name"], runs, entry["metrics"], entry["by_group"], entry["changes"], speed))
    seeds = "seeds" in comparison["interval"]
    return Results(comparison["metric"], comparison["users"], seeds, settings, comparison["failed"])


def page(results: Results, earlier: str) -> str:
    """Build the report, with the learning curves of an earlier one, since JSON does not have them."""
    curves = re.search(r"<section><h2>[^<]* of the evaluations on the way.*?</section>\n", earlier, re.DOTALL)
    before, by_group, rest = as_html(results).partition(f"<section><h2>{results.metric} by ")
    return before + (curves[0] if curves else "") + by_group + rest


def plot(results: Results, target: Path) -> None:
    """Plot each setting's quality over the baseline's, with its interval, against the training time of an event."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for setting in results.settings:
        row, rate = setting.metrics[results.metric], setting.costs["events_per_second"]
        if rate is None:
            sys.exit(f"error: {setting.name} has no measurement of a step: give --speeds")
        ratio, low, high = row["ratio"], row["low"] or 1, row["high"] or 1
        axis.errorbar(1e6 / rate, ratio, [[ratio - low], [high - ratio]], marker="o", capsize=3, alpha=0.8)
        left = setting is results.baseline  # a label beside another point of nearly the same quality
        place = {"xytext": (-6, -4), "ha": "right"} if left else {"xytext": (6, 4)}
        axis.annotate(setting.name, (1e6 / rate, ratio), textcoords="offset points", **place)
    axis.axhline(1, color="gray", linewidth=0.8, linestyle=":")
    axis.set_xscale("log")
    axis.margins(x=0.14)
    for which in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        which(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "1235" else "")
    axis.set(
        xlabel="training time of an event, microseconds", ylabel=f"{results.metric} over {results.baseline.name}'s"
    )
    axis.grid(alpha=0.3)
    device = results.settings[0].speed["environment"]["device"]
    figure.suptitle(
        f"Half of MovieLens 1M, {len(results.settings[0].runs)} seeds, 95% intervals; {device}", fontsize=10
    )
    save(figure, target)


def table(results: Results) -> list[str]:
    """Return the settings as lines of a Markdown table."""
    lines = [f"| kind | {results.metric} | of `{results.baseline.name}`, 95% | events/s | memory |"]
    lines.append("| --- | ---: | --- | ---: | ---: |")
    for setting in results.settings:
        row, costs = setting.metrics[results.metric], setting.costs
        ratio = "" if row["low"] is None else f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        rate, memory = costs["events_per_second"], costs["peak_memory_bytes"]
        speed = " | | " if rate is None else f" | {rate:,.0f} | {memory / 2**20:,.0f} MiB "
        lines.append(f"| `{setting.name}` | {row['mean']:.4f} | {ratio}{speed}|")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--speeds", type=Path, help="JSON lines with measurements of steps")
    add("--results", type=Path, default=RESULTS / "ml-1m-kinds.json", help="the comparison.json of compare.py")
    add("--report", type=Path, default=DOCS / "reports" / "ml-1m-kinds.html", help="the page, which is rebuilt")
    add("--figure", type=Path, default=DOCS / "kinds.png", help="the figure, which is drawn anew")
    add("--table", action="store_true", help="print the results as a table, write nothing")
    options = parser.parse_args(arguments)
    comparison = json.loads(options.results.read_text())
    if options.speeds:
        merge(comparison, options.speeds.read_text().splitlines())
    results = restore(comparison)
    if options.table:
        return print("\n".join(table(results)))
    plot(results, options.figure)
    options.report.write_text(page(results, options.report.read_text()))
    options.results.write_text(json.dumps(comparison) + "\n")


if __name__ == "__main__":
    run_main(main)
