"""Evaluate a finished run, and write result.json and the report of a finished or interrupted run."""

from typing import cast

import torch

from cli.interrupt import Stopped
from cli.terminal import terminal
from data.batches import Batches
from training import advice
from training.folder import read_manifest
from training.report import environment, print_result
from training.run import ProgressBatches, final_facts, final_weights, judge
from training.setup import TrainingRun
from training.weights import load_slices, load_weights


def finish(run: TrainingRun) -> None:
    """Evaluate a finished run on its test split, if it has one, and write result.json and the report.

    If the task evaluates on a single rank, the others return at once.
    """
    run.log.close(finished=True)
    run.ranks.broadcast(None)  # wait until the first rank has written its files
    config, data, model, folder = run.config, run.data, run.model, run.folder
    ranks = data.task.ranks
    if ranks is None and not run.ranks.first:
        return
    if ranks is None:
        weights, facts, source = final_weights(folder)
        load_weights(model, weights, source)
    else:
        facts, source = final_facts(folder)
        load_slices(model, source, ranks)
    result = known_facts(run) | {"weights": source.name, "epoch": facts["epoch"]}
    if "value" in facts:
        result["best"] = facts["value"]
    try:
        if data.splits.test is not None and run.watched is not None and config.eval.test:
            result |= judge(model, data, "test", run.writer.write_judged)
            batches = ProgressBatches(data.eval_batches(run.watched), f"evaluating the baseline on {run.watched}")
            baseline = data.task.baseline(data.dataset, data.splits, run.watched, cast(Batches, batches))
            result["plotted_baseline"] = baseline
    except Stopped:
        write_interrupted(run)
        raise
    if data.device.type == "cuda":
        result["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    result["advice"] = advice.result_advice(config, result, update=data.events is not None)
    run.writer.write_result(config, data, result, run.progress)
    print_result(config.name, data.task, result)
    terminal.say(f"Report: {folder / 'report.html'}, report.md")


def write_interrupted(run: TrainingRun) -> None:
    """Write result.json and the report of an interrupted run, without evaluating it."""
    config, progress = run.config, run.progress
    result = known_facts(run) | {"finished": False, "epoch": progress.epoch}
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
        f"report has the state at that time, without results on the test split.{best} To continue: "
        f"python train.py --resume {run.folder}",
        *result["notes"],
    ]
    run.writer.write_result(config, run.data, result, progress)


def known_facts(run: TrainingRun) -> dict:
    """Return the facts about a run that do not depend on its evaluation."""
    data, progress = run.data, run.progress
    return {
        "finished": True,
        "steps": progress.step,
        "seconds": progress.seconds,
        "events_per_second": progress.events / max(progress.seconds, 1e-9),
        "notes": [*data.dataset.notes, *data.splits.notes],
        "skipped": data.splits.skipped,
        "environment": environment(data.device),
        "run": read_manifest(run.folder),
        "parameters": run.model.num_parameters,
    }
