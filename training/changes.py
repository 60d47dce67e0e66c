"""Define which options a resumed run, an update and an evaluation may change, and refuse other changes by name.

`config.yaml` is the configuration that a run's weights were trained with. Each option is in one class of RULES.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from data.errors import ConfigError
from data.explain import dotted
from data.types import shown
from training.checkpoints import Progress
from training.config import RunConfig
from training.saved import CheckpointError

NEW_RUN = "start a new run, with --init-from RUN to begin with these weights"
EVALUATE = "eval.py RUN evaluates with another value"
NO_EFFECT = "it has no effect on an evaluation"


class Rule(NamedTuple):
    """A class of options, listed by dotted names; a name includes its nested options unless a class lists these.

    resumed, evaluated: None if a resumed run, or an evaluation, may change these options; otherwise the reason for the
    error, or what to do instead.
    """

    options: str
    resumed: str | None
    evaluated: str | None


RULES = {
    # The data at new paths must have the same checksum, except with `eval.py --data NEW`.
    "places": Rule(
        "name run_dir data.path data.cache_dir data.partitions data.features.items.path data.features.users.path",
        None,
        None,
    ),
    "devices": Rule(
        "device threads eval.batch_size parallel.data parallel.embedding parallel.context parallel.context_by "
        "parallel.balance",
        None,
        None,
    ),
    "kernels": Rule("model.attention.backend train.compile train.cuda_graphs train.recompute", None, None),
    "saving": Rule("train.checkpoint_seconds train.tracking", None, NO_EFFECT),
    "length": Rule("train.epochs train.steps eval.patience", None, NO_EFFECT),
    "choice": Rule("eval.best_metric", None, None),  # for a resumed run see `training.best.best_by_metric`
    "figures": Rule("eval.filter_seen eval.same_time eval.metrics data.targets", EVALUATE, None),
    "schedule": Rule("eval.every eval.test", "eval.py RUN evaluates each split", NO_EFFECT),
    "precision": Rule("train.autocast train.residual train.matmul_precision", NEW_RUN, None),
    "attention": Rule("model.attention", NEW_RUN, None),  # the weights must fit
    "reading": Rule(
        "data.format data.columns data.separator data.encoding data.decimal data.where data.on_bad_row "
        "data.bad_rows_limit data.duplicates data.min_user_events data.min_item_events "
        + " ".join(
            f"data.features.{entity}.{option}"
            for entity in ("items", "users")
            for option in ("format", "id", "separator", "encoding", "decimal", "unknown", "on_bad_row")
        ),
        NEW_RUN,
        "it applies only to other data, given by --data or --history",
    ),
    "split": Rule(
        "data.protocol data.valid_fraction data.test_fraction data.train_on_valid",
        NEW_RUN,
        "the weights were trained on events that another split would evaluate them on",
    ),
    "model": Rule(
        "task model data.synthetic data.recall data.features data.time_zone parallel.fused",
        NEW_RUN,
        "the weights were trained with it",
    ),
    "training": Rule(
        "seed auto loss train.batch_size train.augment train.lr train.betas train.weight_decay train.warmup_steps "
        "train.decay train.ema_decay train.clip_norm train.group_by_length train.update",
        NEW_RUN,
        "the weights were trained with it",
    ),
}
VECTOR_FILE = re.compile(r"data\.features\.items\.columns\.[^.]+\.(path|ids)")
CLASSES = {option: name for name, rule in RULES.items() for option in rule.options.split()}
# Options that do not change a run's results: paths, devices, saving.
FREE = {option for option, name in CLASSES.items() if name in ("places", "devices", "saving")}


class Change(NamedTuple):
    """A change of an option; `option` is dotted."""

    option: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.option}: {shown(self.before)} -> {shown(self.after)}"

    @property
    def group(self) -> str:
        """The option's class in RULES; numbers of layers, as in `model.attention.0`, are ignored."""
        option = VECTOR_FILE.sub("data.features.items.path", self.option)
        return class_of(".".join(part for part in option.split(".") if not part.isdigit())) or "training"

    @property
    def free(self) -> bool:
        """Whether the option does not change the run's results."""
        return self.option in FREE or VECTOR_FILE.fullmatch(self.option) is not None


def class_of(option: str) -> str | None:
    """Return the class of an option, or of its nearest parent that has a class; None if there is none."""
    while option and option not in CLASSES:
        option = option.rpartition(".")[0]
    return CLASSES.get(option)


def changes(before: RunConfig, after: RunConfig) -> list[Change]:
    """Return all changes from one configuration to another."""
    return list(_changes(before.model_dump(mode="json"), after.model_dump(mode="json")))


def _changes(before: dict, after: dict, prefix: str = "") -> Iterable[Change]:
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            old, new = ({str(place): value for place, value in enumerate(values)} for values in (old, new))
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changes(old, new, f"{prefix}{key}.")
        elif old != new:
            yield Change(f"{prefix}{key}", old, new)


def differences(before: dict, after: dict) -> list[str]:
    """Return the differences of two configurations (`model_dump`) that may change results: `train.lr: 0.1 -> 0.2`."""
    return [str(change) for change in _changes(before, after) if not change.free]


def stored_config(stored: object, source: Path) -> RunConfig:
    """Validate the configuration stored in `source`; CheckpointError if another version wrote it."""
    try:
        return RunConfig.model_validate(stored)
    except ValidationError as error:
        place = dotted(error.errors()[0]["loc"])
        raise CheckpointError(
            f"{source}: written by another version of this program, "
            f"whose configuration is different ({place or 'its form'})"
        ) from None


def moved_data(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the changed options that are paths of data; the data must then have the same checksum."""
    places = [change.option for change in changes(before, after) if change.group == "places"]
    return [option for option in places if ".path" in option or VECTOR_FILE.fullmatch(option)]


def check_resumed(progress: Progress, config: RunConfig, folder: Path, *, opened: bool) -> None:
    """Raise ConfigError, in one line, if the configuration changes options that a resumed run cannot change.

    opened: whether the data are open, so that the configuration has no `auto`; until then `auto` matches any value.
    """
    all_changes = changes(stored_config(progress.config, folder / "checkpoints"), config)
    refused = [(change, RULES[change.group].resumed) for change in all_changes if opened or change.after != "auto"]
    _refuse(folder, "a resumed run", refused)
    begun = progress.epoch + (progress.batch > 0)
    if config.train.epochs < begun:
        by = "" if config.train.steps is None else f" (by train.steps={config.train.steps})"
        raise ConfigError(
            f"{folder}: train.epochs={config.train.epochs}{by}: expected at least {begun}, the epochs that have begun"
        )


def check_updated(before: RunConfig, config: RunConfig, folder: Path) -> None:
    """Raise ConfigError, in one line, if an update of the run in `folder` would change the model."""
    refused = [(change, NEW_RUN) for change in changes(before, config) if change.group in ("model", "attention")]
    _refuse(folder, "an update", refused)


def check_evaluated(before: RunConfig, config: RunConfig, folder: Path, other_data: bool) -> None:
    """Raise ConfigError, in one line, if the configuration changes options that an evaluation cannot change.

    other_data: whether it uses other events than the run's.
    """
    refused = [
        (change, RULES[change.group].evaluated)
        for change in changes(before, config)
        if not (other_data and change.group == "reading")
    ]
    _refuse(folder, "an evaluation", refused)


def _refuse(folder: Path, what: str, advised: Iterable[tuple[Change, str | None]]) -> None:
    refused: dict[str, list[str]] = {}
    for change, advice in advised:
        if advice is not None:
            refused.setdefault(advice, []).append(str(change))
    if refused:
        lines = (f"{', '.join(lines)} ({advice})" for advice, lines in refused.items())
        raise ConfigError(f"{folder}: {what} cannot change {'; '.join(lines)}")


def evaluation_notes(before: RunConfig, config: RunConfig) -> list[str]:
    """Return a sentence for each option of the attention or precision that differs from training."""
    return [
        f"Evaluated with {change.option}={shown(change.after)}; trained with {shown(change.before)}."
        for change in changes(before, config)
        if change.group in ("attention", "precision")
    ]
