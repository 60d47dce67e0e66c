"""Save the weights of a run that are best on the validation split."""

from pathlib import Path

from cli.terminal import terminal
from data.errors import ConfigError
from training.changes import changes, stored_config
from training.checkpoints import Checkpoints, Progress
from training.config import RunConfig
from training.run import check_of_this_run
from training.saved import exists, load_folder, save_folder


def keep_best(config: RunConfig, checkpoints: Checkpoints, progress: Progress, metrics: dict) -> None:
    """Save the weights to `best` if these metrics are the best so far, and update `best` and `stale` of `progress`."""
    value = metrics[config.best_metric]
    if config.is_better(value, progress.best):
        progress.best, progress.stale = value, 0
        facts = {"run": progress.run, "config": progress.config, "fingerprint": progress.fingerprint}
        checkpoints.save_best(facts | {"value": value, "epoch": progress.epoch})
    else:
        progress.stale += 1


def best_by_metric(config: RunConfig, folder: Path, progress: Progress) -> tuple[float | None, int]:
    """Return `best` and `stale` of `progress` by the best_metric of `config`.

    If best_metric differs from the checkpoint's, the value of the weights in `best` is read from metrics.jsonl, which
    must have the metric for every evaluated epoch (otherwise ConfigError).
    """
    metric, before = config.best_metric, RunConfig.model_validate(progress.config).best_metric
    if metric == before or progress.best is None:
        return progress.best, progress.stale
    values = {
        line["epoch"]: line.get(metric) for line in progress.records if line["split"] == "valid" and before in line
    }
    if missing := [epoch for epoch, value in values.items() if value is None]:
        raise ConfigError(f"eval.best_metric: metrics.jsonl has no {metric} for epoch {missing[0]} of this run")
    chosen = load_folder(folder / "best")[1]["epoch"]
    best = values[chosen]
    if better := [epoch for epoch, value in values.items() if config.is_better(value, best)]:
        terminal.say(
            f"{metric} was better in epoch {', '.join(map(str, better))}, whose weights were not saved; best/ has the "
            f"weights of epoch {chosen}, the best by {before}, until {metric} improves"
        )
    return best, sum(epoch > chosen for epoch in values)


def update_best_facts(config: RunConfig, folder: Path, progress: Progress) -> None:
    """Store a changed configuration with the best weights; CheckpointError if these belong to another run."""
    best = folder / "best"
    if not exists(best):
        return
    _, facts = load_folder(best, checked=slice(None))
    check_of_this_run(facts.get("run"), folder, best)
    if any(not change.free for change in changes(stored_config(facts.get("config"), best), config)):
        tensors, facts = load_folder(best, "model")
        save_folder(best, tensors, facts | {"config": progress.config, "value": progress.best})
