"""Keep the weights of a run that are best on the validation split."""

import math
from pathlib import Path

from training.checkpoints import Checkpoints, Progress
from training.config import RunConfig
from training.run import changes, check_of_this_run
from training.saved import exists, load_folder, save_folder


def keep_best(config: RunConfig, checkpoints: Checkpoints, progress: Progress, metrics: dict) -> None:
    """Save the weights to evaluate to `best` if these metrics are better than all before; note in `progress` what is
    best.

    A metric that is not finite is never better.
    """
    value = metrics[config.best_metric]
    if math.isfinite(value) and (progress.best is None or value > progress.best):
        progress.best, progress.stale = value, 0
        facts = {"run": progress.run, "config": progress.config, "fingerprint": progress.fingerprint}
        checkpoints.save_best(facts | {"value": value, "epoch": progress.epoch})
    else:
        progress.stale += 1


def take_over_best(config: RunConfig, folder: Path, progress: Progress) -> None:
    """Accept the best weights so far for a changed configuration; CheckpointError when they belong to another run."""
    best = folder / "best"
    if not exists(best):
        return
    _, facts = load_folder(best, checked=slice(None))
    check_of_this_run(facts.get("run"), folder, best)
    if changes(facts.get("config"), config, best):
        tensors, facts = load_folder(best, "model")
        save_folder(best, tensors, facts | {"config": progress.config})
