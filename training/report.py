"""Print the results of a run, and write report.html and report.md with plots."""

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich import box
from rich.table import Table

from cli.terminal import duration, terminal
from data.types import Dataset, shown
from models.tasks.contract import Task
from training.config import RunConfig
from training.folder import write_file

if TYPE_CHECKING:  # its module imports matplotlib, which takes a second
    from training.page import Plot


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
    """Print sentences about the results and a table that compares the model with the baselines; name: the run's."""
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
    from training.page import as_html, learning
    from training.plots import standalone

    run, judged = result["run"], "split" in result
    plots, images = learning(task, result, history), task.plots(result) if judged else {}
    files = dict(zip(("loss.svg", "metric.svg"), plots))
    for name, plot in files.items():
        write_file(folder / name, standalone(str(plot.svg)))  # Markup would escape what is inserted
    for name, image in images.items():
        write_file(folder / name, image)
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
    write_file(folder / "report.html", as_html(config.name, task, result, plots, sentences, facts))
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
        *(f"![{_caption(plot)}]({name})\n\n{_caption(plot)}\n" for name, plot in files.items()),
        *(f"![{name}]({name})\n" for name in images),
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


def _caption(plot: "Plot") -> str:
    return ", ".join([plot.title, *(f"horizontal line: {name}" for name in list(plot.legend)[1:])])


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
