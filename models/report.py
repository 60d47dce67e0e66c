"""The table at the end of a run, and its report.md with plots."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from models.config import RunConfig
from models.folder import write_file
from models.metrics import metric_names

# The values of eval.filter_seen, as a report says them.
FILTERED = {
    "history": "all items of a user's history are taken out of the ranking",
    "window": "the items of the model's window (the last max_seq_len events) are taken out of the ranking, "
    "as in the published figures",
    "none": "nothing is taken out of the ranking",
}
SHORT = {"history": "seen filtered", "window": "window filtered", "none": "unfiltered"}
SHOWN = ("HR@1", "HR@10", "HR@50", "NDCG@10", "MRR")


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


def protocol_lines(config: RunConfig, result: dict) -> list[str]:
    return [
        f"Split {result['split']}, {result['users']:,} users, full ranking over the catalogue. "
        f"Main figures: {FILTERED[config.eval.filter_seen]}.",
        *result["notes"],
    ]


def print_result(console: Console, config: RunConfig, result: dict) -> None:
    """The terminal's table: the model next to popularity, under the same protocol."""
    for line in protocol_lines(config, result):
        console.print(line, highlight=False)
    table = Table(title=f"{config.name}: {result['split']}")
    for heading in ("", *SHOWN):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for label, values in _rows(config, result):
        table.add_row(label, *(f"{values[name]:.4f}" for name in SHOWN))
    console.print(table)


def _rows(config: RunConfig, result: dict) -> list[tuple[str, dict]]:
    order = sorted(FILTERED, key=lambda how: how != config.eval.filter_seen)
    rows = [(f"{who}, {SHORT[how]}", result[who][how]) for how in order for who in ("model", "popularity")]
    if "sampled" in result:
        rows.append((result["sampled"]["label"], result["sampled"]))
    return rows


def write_report(folder: Path, config: RunConfig, result: dict, history: list[dict], dataset) -> None:
    """report.md in the run's folder, with loss.png and, if the run evaluated on the way, metrics.png.

    history: the lines of metrics.jsonl.
    """
    plots = _plot(folder, history)
    minutes = result["seconds"] / 60
    lines = [
        f"# {config.name}",
        "",
        f"Data: {dataset.name}, {dataset.num_users:,} users, {dataset.num_items:,} items, "
        f"{dataset.num_events:,} events.",
        *protocol_lines(config, result),
        "",
        f"Weights: {result['weights']} (epoch {result['epoch']}). {result['steps']:,} steps in {minutes:.1f} minutes, "
        f"{result['events_per_second']:,.0f} events a second. Seed {config.seed}.",
        *(_left_out(split, count) for split, count in result["skipped"].items()),
        "",
        "## Full ranking",
        "",
        *_markdown(["", *metric_names()], [[label, *_cells(values)] for label, values in _rows(config, result)]),
        "",
        "## By length of the history",
        "",
        *_markdown(
            ["events", "users", *metric_names()],
            [[row["history"], f"{row['users']:,}", *_cells(row)] for row in result["by_history"]],
        ),
        "",
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


def _cells(values: dict) -> list[str]:
    return [f"{values[name]:.4f}" for name in metric_names()]


def _markdown(headings: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(headings) + " |",
        "|" + " --- |" * len(headings),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _plot(folder: Path, history: list[dict]) -> list[str]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    evaluated = [row for row in history if "HR@10" in row]
    split = evaluated[0]["split"] if evaluated else ""
    figures = {"loss.png": (history, ("loss",), "training loss")}
    if evaluated:
        figures["metrics.png"] = (evaluated, ("HR@10", "NDCG@10", "MRR"), f"{split} metrics")
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
