"""Write what a run leaves: result.json and report.md, for a finished or an interrupted run."""

import json
from pathlib import Path
from typing import cast

import torch

from cli.interrupt import Stopped
from cli.terminal import terminal
from data.batches import Batches
from training.checkpoint import Progress, load_weights
from training.config import RunConfig
from training.folder import read_manifest, write_file
from training.ranks.saving import load_slices
from training.report import environment, print_result, write_report
from training.run import Data, Tracked, final_facts, final_weights, judge


def finish(config: RunConfig, folder: Path, model, data: Data, progress: Progress, watched: str | None) -> None:
    """Evaluate the run on its test split, if it has one, and write result.json and the report.

    If several ranks evaluate (`data.task.ranks`), each of them calls this, and the first one writes.
    """
    ranks = data.task.ranks
    first = ranks is None or ranks.first
    if ranks is None:
        weights, facts, source = final_weights(folder)
        load_weights(model, weights, source)
    else:
        facts, source = final_facts(folder)
        load_slices(model, source, ranks)
    result = known_facts(folder, model, data, progress) | {"weights": source.name, "epoch": facts["epoch"]}
    if "value" in facts:
        result["best"] = facts["value"]
    try:
        if data.splits.test is not None and watched is not None and config.eval.test:
            result |= judge(model, data, "test", folder if first else None)
            batches = Tracked(data.eval_batches(watched), f"judging the baseline on {watched}")
            result["plotted_baseline"] = data.task.baseline(data.dataset, data.splits, watched, cast(Batches, batches))
    except Stopped:
        if first:
            leave(config, folder, model, data, progress)
        raise
    if not first:
        return
    if data.device.type == "cuda":
        result["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    write_file(folder / "result.json", json.dumps(result, indent=1))
    write_report(folder, config, data.task, result, progress.records, data.dataset)
    print_result(config.name, data.task, result)
    terminal.say(f"Report: {folder / 'report.md'}")


def leave(config: RunConfig, folder: Path, model, data: Data, progress: Progress) -> None:
    """Write what is known of an interrupted run; nothing is evaluated for it."""
    result = known_facts(folder, model, data, progress) | {"finished": False, "epoch": progress.epoch}
    result["weights"] = "the last checkpoint" if progress.best is None else "best"
    if progress.best is not None:
        result["best"] = progress.best
    best = (
        ""
        if progress.best is None
        else f" The best {config.best_metric} on the validation split was {progress.best:.4f}."
    )
    result["notes"] = [
        f"INTERRUPTED after {progress.epoch} of {config.train.epochs} epochs, saved at step {progress.step:,}: this "
        f"report has the state at that time, and nothing was evaluated.{best} To continue: "
        f"python train.py --resume {folder}",
        *result["notes"],
    ]
    write_file(folder / "result.json", json.dumps(result, indent=1))
    write_report(folder, config, data.task, result, progress.records, data.dataset)


def known_facts(folder: Path, model, data: Data, progress: Progress) -> dict:
    """Return the facts about a run that are known at any time."""
    return {
        "finished": True,
        "steps": progress.step,
        "seconds": progress.seconds,
        "events_per_second": progress.events / max(progress.seconds, 1e-9),
        "notes": [*data.dataset.notes, *data.splits.notes],
        "skipped": data.splits.skipped,
        "environment": environment(data.device),
        "run": read_manifest(folder),
        "parameters": model.num_parameters,
    }
