"""Choose the values of options that are `auto` from the data.

The sizes are those of the recipes that were best on data with long histories, with short histories, and with users who
repeat items (docs/recipes.md).
"""

from typing import Any, NamedTuple

import numpy as np

from data.types import Dataset
from training.config import RunConfig, at_path, checked

SMALL = 50_000  # data with fewer events have the sizes FEW_EVENTS
OFTEN = 0.5  # data in which a larger share of the events repeat an item of their user have the sizes REPEATING
COVERED = 0.99  # the share of users whose whole history fits into max_seq_len, up to `Sizes.longest`
HEAD = 64  # the size of a head
OUTSIDE = 0.5  # if a larger share of events is outside of the latest windows, training also uses earlier windows
STEPS = 100  # the minimum number of steps between evaluations
PATTERNS = 8  # the value of model.head.repeats if seen items are ranked (eval.filter_seen: none)


class Sizes(NamedTuple):
    """Values of options; longest: the maximum of max_seq_len; drop: `train.augment.drop`."""

    embedding_dim: int
    num_layers: int
    longest: int
    dropout: float
    temperature: float
    batch_size: int
    drop: float


FEW_EVENTS = Sizes(64, 2, 200, 0.4, 0.1, 32, 0.1)
REPEATING = Sizes(256, 3, 400, 0.4, 0.1, 32, 0.05)
# The mean number of events of a user, up to which the sizes are used -> sizes.
BY_HISTORY = {
    20.0: Sizes(512, 2, 200, 0.6, 0.07, 256, 0.1),
    64.0: Sizes(256, 3, 200, 0.5, 0.07, 128, 0.1),
    np.inf: Sizes(128, 4, 200, 0.4, 0.06, 32, 0.2),
}


def sizes_of(dataset: Dataset) -> Sizes:
    """Return the sizes for a data set."""
    if dataset.num_events < SMALL:
        return FEW_EVENTS
    users = np.repeat(np.arange(dataset.num_users), np.diff(dataset.user_offsets))
    distinct = len(np.unique(users * dataset.num_items + dataset.items))
    if dataset.num_events - distinct > OFTEN * dataset.num_events:
        return REPEATING
    mean = dataset.num_events / max(1, dataset.num_users)
    return next(sizes for most, sizes in BY_HISTORY.items() if mean <= most)


def longest_of(dataset: Dataset, most: int) -> int:
    """Return max_seq_len: the COVERED quantile of the histories, rounded up to a multiple of 10, at most `most`."""
    lengths = np.diff(dataset.user_offsets)
    covered = np.quantile(lengths, COVERED, method="inverted_cdf") if len(lengths) else 1
    return int(min(most, 10 * np.ceil(covered / 10)))


def resolve_auto(config: RunConfig, dataset: Dataset) -> RunConfig:
    """Choose the values of the options in `RunConfig.auto` for a data set, and empty that list."""
    if not config.auto:
        return config
    tree, sizes, auto = config.model_dump(mode="json"), sizes_of(dataset), config.auto
    length = longest_of(dataset, sizes.longest) if "model.max_seq_len" in auto else config.model.max_seq_len
    batch_size = sizes.batch_size if "train.batch_size" in auto else config.train.batch_size
    inside = np.minimum(np.diff(dataset.user_offsets), length).sum()
    width = sizes.embedding_dim if "model.embedding_dim" in auto else config.model.embedding_dim
    values: dict[str, Any] = {
        "model.max_seq_len": length,
        "model.embedding_dim": width,
        "model.num_layers": sizes.num_layers,
        "model.num_heads": next(heads for heads in range(max(1, width // HEAD), 0, -1) if width % heads == 0),
        "model.feed_forward_dim": min(512, 2 * width),
        "model.dropout": sizes.dropout,
        "loss.temperature": sizes.temperature,
        "train.batch_size": batch_size,
        "train.augment.drop": sizes.drop,
        "train.augment.window": 0.5 if inside < (1 - OUTSIDE) * dataset.num_events else 0.0,
        "eval.every": max(2, -(-STEPS * batch_size // max(1, dataset.num_users))),
    }
    for path in auto:
        parent, last = at_path(tree, path)
        parent[last] = values[path]
    return checked(tree | {"auto": []}, config.name)


def with_repeats(config: RunConfig) -> RunConfig:
    """Choose `model.head.repeats` and `loss.exclude`, if they are `auto`, according to `eval.filter_seen`."""
    model, loss, allowed = config.model, config.loss, config.eval.filter_seen == "none"
    if model.head.repeats == "auto":
        head = model.head.model_copy(update={"repeats": PATTERNS if allowed else 0})
        model = model.model_copy(update={"head": head})
    if loss.exclude == "auto":
        loss = loss.model_copy(update={"exclude": "none" if allowed else "history"})
    return config.model_copy(update={"model": model, "loss": loss})


def chosen_lines(before: RunConfig, after: RunConfig) -> list[str]:
    """Return a line with the values that were chosen from the data, or no line."""
    paths = list(before.auto)
    paths += ["model.head.repeats"] if before.model.head.repeats == "auto" else []
    paths += ["loss.exclude"] if before.loss.exclude == "auto" else []
    tree = after.model_dump(mode="json")
    values = [f"{path}={parent[last]}" for path in paths for parent, last in [at_path(tree, path)]]
    return [f"from the data: {', '.join(values)}"] if values else []
