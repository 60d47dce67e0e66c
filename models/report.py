"""The table at the end of a run, and its report.md with plots."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from models.folder import write_file
from models.tasks.contract import Task


def environment(device: torch.device) -> dict[str, str]:
    """What the figures of a run depend on: hardware and versions."""
    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores",
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
    }
    for name in ("torch", "triton", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def print_result(console: Console, task: Task, result: dict) -> None:
    """Prints the terminal's table: the model next to the task's baseline, under the same protocol."""
    for line in task.protocol_lines(result):
        console.print(line, highlight=False)
    main = task.tables(result)[0]
    table = Table(title=f"{task.config.name}: {result['split']}")
    for column in main.short:
        heading = main.headings[column]
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in main.rows:
        table.add_row(*(row[column] for column in main.short))
    console.print(table)


def write_report(folder: Path, task: Task, result: dict, history: list[dict], dataset) -> None:
    """report.md in the run's folder, with loss.png and, if the run evaluated on the way, metrics.png.

    history: the lines of metrics.jsonl.
    """
    config = task.config
    plots = _plot(folder, history, task.plotted) + task.plots(result, folder)
    minutes = result["seconds"] / 60
    lines = [
        f"# {config.name}",
        "",
        f"Data: {dataset.name}, {dataset.num_users:,} users, {dataset.num_items:,} items, "
        f"{dataset.num_events:,} events.",
        *task.protocol_lines(result),
        "",
        f"Weights: {result['weights']} (epoch {result['epoch']}). {result['steps']:,} steps in {minutes:.1f} minutes, "
        f"{result['events_per_second']:,.0f} events a second. Seed {config.seed}.",
        *(_left_out(split, count) for split, count in result["skipped"].items()),
        "",
        *(
            line
            for table in task.tables(result)
            for line in (f"## {table.title}", "", *_markdown(table.headings, table.rows), "")
        ),
        *(f"![{plot}]({plot})\n" for plot in plots),
        "## Environment",
        "",
        *(f"- {name}: {value}" for name, value in result["environment"].items()),
        "",
        f"Reproduce: `python train.py {folder / 'config.yaml'}`",
    ]
    write_file(folder / "report.md", "\n".join(lines) + "\n")


def _left_out(split_and_reason: str, count: int) -> str:
    split, reason = split_and_reason.split(": ", 1)
    return f"Left out of {split}: {count:,} {'user' if count == 1 else 'users'}, {reason}."


def _markdown(headings: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(headings) + " |",
        "|" + " --- |" * len(headings),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _plot(folder: Path, history: list[dict], plotted: tuple[str, ...]) -> list[str]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    evaluated = [row for row in history if plotted[0] in row]
    split = evaluated[0]["split"] if evaluated else ""
    figures = {"loss.png": (history, ("loss",), "training loss")}
    if evaluated:
        figures["metrics.png"] = (evaluated, plotted, f"{split} metrics")
    for file, (rows, names, title) in figures.items():
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for name in names:
            axes.plot([row["epoch"] for row in rows], [row[name] for row in rows], marker=".", label=name)
        axes.set(xlabel="epoch", title=title)
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend()
        write_file(folder / file, lambda path, figure=figure: figure.savefig(path, dpi=120, format="png"))
        plt.close(figure)
    return list(figures)
