"""Print the results of a run, and write report.html and report.md with plots."""

import functools
import math
import os
import platform
import re
from importlib import metadata
from pathlib import Path

import torch
from rich import box
from rich.table import Table

from cli.terminal import duration, terminal
from data.types import Dataset, shown
from models.tasks.contract import Task
from training.config import RunConfig
from training.folder import write_file


def environment(device: torch.device) -> dict[str, str]:
    """Return the hardware and versions that the figures of a run depend on."""
    facts = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores",
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
    }
    for name in ("torch", "triton", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"):
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return facts


def protocol_lines(task: Task, result: dict) -> list[str]:
    """Return sentences about the verdict, the data and the protocol; for a run without evaluation, its notes."""
    advice = result.get("advice", [])
    if "split" not in result:
        return [*advice, *result["notes"]]
    verdict = [result["against_baseline"]["sentence"]] if "against_baseline" in result else []
    return [*verdict, *advice, *task.protocol_lines(result)]


def print_result(name: str, task: Task, result: dict) -> None:
    """Print sentences about the results and a table that compares the model with the baselines; name: of the run."""
    for line in protocol_lines(task, result):
        terminal.say(line)
    if "split" not in result:
        return
    main = task.tables(result)[0]
    table = Table(title=f"{name}: {result['split']}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in main.short:
        heading = main.headings[column]
        # Only words may wrap, not numbers.
        table.add_column(heading, justify="right" if heading else "left", no_wrap=bool(heading), overflow="fold")
    for row in main.rows:
        table.add_row(*(row[column] for column in main.short))
    terminal.table(table)


def write_report(
    folder: Path, config: RunConfig, task: Task, result: dict, history: list[dict], dataset: Dataset
) -> None:
    """Write report.html, report.md and their plots into the run's folder; history: the lines of metrics.jsonl."""
    from training.page import as_html  # imports matplotlib, which takes a second

    run, judged = result["run"], "split" in result
    plots = _plot(folder, history, task.plotted, result.get("plotted_baseline", {}))
    for name, image in task.plots(result).items() if judged else ():
        write_file(folder / name, image)
        plots.append(name)
    data_line = (
        f"Data: {shown(dataset.name, 200)}, {dataset.num_users:,} users, {dataset.num_items:,} items, "
        f"{dataset.num_events:,} events."
    )
    run_lines = [
        f"Weights: {result['weights']} (epoch {result['epoch']}). {result['steps']:,} steps in "
        f"{duration(result['seconds'])}, {result['events_per_second']:,.0f} events a second. Seed {config.seed}.",
        *(_left_out(split, count) for split, count in result["skipped"].items()),
    ]
    facts = {
        "begun": run.get("created"),
        "command": " ".join(map(str, run.get("command", []))),
        "commit": run.get("commit"),
        **result["environment"],
        "reproduce": f"python train.py {shown(folder / 'config.yaml', 1000)}",
    }
    sentences = [data_line, *(task.protocol_lines(result) if judged else result["notes"]), *run_lines]
    write_file(folder / "report.html", as_html(config.name, task, result, history, sentences, facts))
    lines = [
        f"# {config.name}",
        "",
        data_line,
        *protocol_lines(task, result),
        "",
        *run_lines,
        "",
        *(
            line
            for table in (task.tables(result) if judged else [])
            for line in (
                f"## {table.title}\n",
                *([f"{table.note}\n"] if table.note else []),
                *markdown_table(table.headings, table.rows),
                "",
            )
        ),
        *(f"![{plot}]({plot})\n" for plot in plots),
        "## Environment",
        "",
        f"- begun: {run.get('created')}",
        f"- command: `{' '.join(map(str, run.get('command', [])))}`",
        f"- commit: {run.get('commit')}",
        *(f"- {name}: {value}" for name, value in result["environment"].items()),
        "",
        f"Reproduce: `python train.py {shown(folder / 'config.yaml', 1000)}`",
    ]
    write_file(folder / "report.md", "\n".join(lines) + "\n")


def _number(value: float | None) -> float:
    """Replace null of metrics.jsonl by NaN, which matplotlib does not draw."""
    return math.nan if value is None else value


def _left_out(split_and_reason: str, count: int) -> str:
    split, reason = split_and_reason.split(": ", 1)
    return f"Left out of {split}: {count:,} {'user' if count == 1 else 'users'}, {reason}."


def markdown_table(headings: list[str], rows: list[list[str]]) -> list[str]:
    """Format a table as lines of Markdown."""
    return [
        "| " + " | ".join(headings) + " |",
        "|" + " --- |" * len(headings),
        *("| " + " | ".join(re.sub(r"([\\|`*_\[\]<>])", r"\\\1", cell) for cell in row) + " |" for row in rows),
    ]


def _plot(folder: Path, history: list[dict], plotted: tuple[str, ...], baseline: dict[str, float]) -> list[str]:
    """Plot the curves, with the baseline's metrics as horizontal lines; return the names of the files."""
    from training.plots import Figure, MaxNLocator  # this module sets a valid backend of matplotlib

    evaluated = [row for row in history if plotted[0] in row]
    split = evaluated[0]["split"] if evaluated else ""
    figures: dict[str, tuple[list[dict], tuple[str, ...], str]] = {"loss.png": (history, ("loss",), "training loss")}
    if evaluated:
        figures["metrics.png"] = (evaluated, plotted, f"{split} metrics")
    for file, (rows, names, title) in figures.items():
        figure = Figure(figsize=(7, 4))  # not by pyplot, which would show it in a notebook
        axes = figure.add_subplot()
        # Fixed, since a layout of matplotlib would draw everything twice.
        figure.subplots_adjust(left=0.1, right=0.97, bottom=0.14, top=0.92)
        for name in names:
            (line,) = axes.plot(
                [row["epoch"] for row in rows], [_number(row[name]) for row in rows], marker=".", label=name
            )
            if name in baseline:
                label = "baseline" if name == names[0] else None
                axes.axhline(baseline[name], color=line.get_color(), linestyle=":", label=label)
        axes.set(xlabel="epoch")
        axes.set_title(title, y=1)  # fixed for the same reason
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend()
        write_file(folder / file, functools.partial(figure.savefig, dpi=120, format="png"))
    return list(figures)
