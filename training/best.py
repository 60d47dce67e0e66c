"""Keep the weights of a run that are best on the validation split."""

import math
from pathlib import Path
from typing import Any

from training.checkpoint import Progress, exists, load_folder, save_folder
from training.config import RunConfig
from training.ranks.saving import Saver
from training.run import changes, check_of_this_run


def keep_best(
    config: RunConfig, folder: Path | None, model, progress: Progress, metrics: dict, saver: Saver | None = None
) -> None:
    """Save the model's weights to `best` if these metrics are better than all before; note in `progress` what is best.

    A metric that is not finite is never better. folder: the run's; None on ranks that do not write. saver: of several
    ranks.
    """
    value = metrics[config.best_metric]
    if math.isfinite(value) and (progress.best is None or value > progress.best):
        progress.best, progress.stale = value, 0
        facts: dict[str, Any] = {"run": progress.run, "config": progress.config, "fingerprint": progress.fingerprint}
        facts |= {"value": value, "epoch": progress.epoch}
        if saver is not None:
            saver.save_best(facts)
        elif folder is not None:
            save_folder(folder / "best", {"model": model.state_dict()}, facts)
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
