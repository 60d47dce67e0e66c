"""Print a comparison on the terminal: two tables that fit into 80 columns."""

from rich import box
from rich.table import Table

from cli.terminal import terminal
from experiments.results import Results

ABSENT = "-"


def print_results(results: Results) -> None:
    """Print the metrics and costs of each setting, and the runs that failed."""
    base, metric = results.baseline.name, results.metric
    quality = _table(f"{metric}, {results.users:,} users", ["setting", "seeds", metric, "sd", f"of {base}", "95%", "p"])
    costs = _table("Costs of a training step", ["setting", "parameters", "events/s", "memory"])
    for setting in results.settings:
        row = setting.metrics[metric]
        first = [setting.name, str(len(setting.runs)), f"{row['mean']:.4f}", _shown(row["sd"], "{:.4f}")]
        interval = ABSENT if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
        quality.add_row(*first, _shown(row["ratio"], "{:.3f}"), interval, p_value(row["p_holm"]))
        costs.add_row(setting.name, *shown_costs(setting.costs))
    for name, row in results.simple.items():
        interval = ABSENT if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
        quality.add_row(name, ABSENT, f"{row['mean']:.4f}", ABSENT, _shown(row["ratio"], "{:.3f}"), interval, ABSENT)
    terminal.table(quality)
    if results.simple:
        terminal.say("Below the settings: baselines (no neural networks), intervals over users only.")
    terminal.say(f"Ratios to {base} with 95% intervals over users{' and seeds' if results.seeds else ''}; p by Holm.")
    if not results.seeds:
        terminal.say("With one seed the variation between seeds is unknown: the intervals do not include it.")
    terminal.table(costs)
    for name, reason in results.failed:
        terminal.say(f"FAILED {name}: {reason}")


def _table(title: str, headings: list[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for place, heading in enumerate(headings):
        # Only names may wrap.
        table.add_column(heading, justify="right" if place else "left", no_wrap=place > 0, overflow="fold")
    return table


def _shown(value: float | None, form: str) -> str:
    return ABSENT if value is None else form.format(value)


def p_value(p: float | None) -> str:
    """Format a p value."""
    return ABSENT if p is None else "<.001" if p < 0.001 else f"{p:.3f}".removeprefix("0")


def shown_costs(costs: dict) -> list[str]:
    """Format the parameters, events a second and memory of a setting as text."""
    memory = costs["peak_memory_bytes"]
    return [
        _shown(costs["parameters"], "{:,}"),
        _shown(costs["events_per_second"], "{:,.0f}"),
        ABSENT if memory is None else f"{memory / 2**20:,.0f} MiB",
    ]
