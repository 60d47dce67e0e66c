"""Advise what to change in a run that has few steps, does not fit its data or ended below a baseline."""

from typing import Any

from data.types import Dataset
from training.config import RunConfig, load_config
from training.strict_yaml import SHIPPED

FEW_STEPS = 100


def data_warnings(config: RunConfig, dataset: Dataset) -> list[str]:
    """Return warnings about options that do not fit the data."""
    lines: list[str] = []
    length = config.model.max_seq_len
    longest = int((dataset.user_offsets[1:] - dataset.user_offsets[:-1]).max(initial=0))
    if length > 2 * max(longest, 50):
        lines.append(
            f"model.max_seq_len={length:,}, but the longest history has {longest:,} events: a smaller value saves "
            "memory without a loss of quality"
        )
    if dataset.num_users == 1:
        lines.append("there is a single user, whose metrics do not predict those of other users")
    return lines


def step_advice(config: RunConfig, steps: int) -> list[str]:
    """Return what to change in a run of fewer than FEW_STEPS steps."""
    if steps >= FEW_STEPS:
        return []
    c = config.train
    budget = "" if c.steps is None else f", a larger train.steps than {c.steps:,}"
    return [
        f"The run has {steps:,} step{'s'[: steps != 1]}, too few to learn much: try more train.epochs than "
        f"{c.epochs:,}{budget} or a smaller train.batch_size than {c.batch_size:,}."
    ]


def result_advice(config: RunConfig, result: dict[str, Any], update: bool = False) -> list[str]:
    """Return what to change if the run had few steps or ended below a baseline, for result.json and the report.

    update: whether the run is an update, whose few steps follow those of the previous run.
    """
    lines = [] if update else step_advice(config, result["steps"])
    verdict = result.get("against_baseline")
    if verdict and verdict["behind"]:
        ways = ["another train.lr", "a search with tune.py"]
        if larger_than_small(config):
            ways.insert(0, "a smaller model (configs/small.yaml)")
        if config.eval.patience is None or result["epoch"] + 1 >= config.train.epochs:  # patience did not end it
            ways.insert(0, f"more steps ({'train.update.epochs' if update else 'train.epochs, train.steps'})")
        lines.append(f"The model is worse than {verdict['baseline']}. Try {', '.join(ways[:-1])} or {ways[-1]}.")
    return lines


def larger_than_small(config: RunConfig) -> bool:
    """Return whether the model is wider or deeper than that of configs/small.yaml."""
    small = load_config(SHIPPED["small"]).model
    return config.model.embedding_dim > small.embedding_dim or config.model.num_layers > small.num_layers
