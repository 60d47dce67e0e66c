"""Read the search space of tune.py: a strict YAML file with the range of each option of a run.

space:                                        dotted keys of the run's configuration
  train.lr: {low: 3e-4, high: 1e-2, log: true}   a number; log: uniform in the logarithm
  model.num_layers: {low: 1, high: 4}            an integer, since both ends are integers; step: 2 tries 1 and 3
  loss.num_negatives: {choices: [64, 128, 256]}  one of any YAML values, also mappings
fixed: {train.epochs: 6}                      options of every trial and of the best configuration
pruning: {startup_trials: 5, warmup_epochs: 1}   the default; false: every trial trains to its end
seed: 0                                       the seed of the sampler; runs use the configuration's seed
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from optuna import Trial
from pydantic import Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import ErrorDetails

from data.errors import ConfigError
from data.explain import explain
from data.options import Options
from training.config import RunConfig, load_config
from training.strict_yaml import parse_yaml, read_config

# Options that cannot be searched: they decide how trials are evaluated and where they are stored.
NOT_SEARCHED = ("data.", "task", "eval.", "parallel", "seed", "name", "run_dir", "device", "threads")
# Protocols without a validation split.
WITHOUT_VALIDATION = ("published", "all")


class Range(Options):
    """Numbers from `low` to `high`, inclusive: integers if both are integers, else floats."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _possible(self):
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log: true needs low above 0, and cannot be combined with step")
        return self

    @property
    def integers(self) -> bool:
        """Whether the range has integers only."""
        return isinstance(self.low, int) and isinstance(self.high, int) and not isinstance(self.step, float)

    def ends(self) -> list:
        """Return the values to check before the search: the two ends."""
        return [self.low, self.high]

    def has(self, value: object) -> bool:
        """Return whether the value is of the range's type and between its ends."""
        if isinstance(value, bool) or not isinstance(value, int if self.integers else (int, float)):
            return False
        return self.low <= value <= self.high

    def encoded(self, value: Any) -> Any:
        """Encode a value for Optuna."""
        return value if self.integers else float(value)

    def draw(self, trial: Trial, key: str) -> int | float:
        """Draw a value of a trial."""
        if self.integers:
            return trial.suggest_int(key, int(self.low), int(self.high), step=int(self.step or 1), log=self.log)
        return trial.suggest_float(key, self.low, self.high, step=self.step, log=self.log)


class Choices(Options):
    """One of a list of values; Optuna stores them as JSON."""

    choices: list[Any] = Field(min_length=1)

    def ends(self) -> list:
        """Return the values to check before the search: all choices."""
        return self.choices

    def encoded(self, value: Any) -> str:
        """Encode a value for Optuna."""
        return json.dumps(value, sort_keys=True)

    def draw(self, trial: Trial, key: str) -> Any:
        """Draw a value of a trial."""
        return json.loads(trial.suggest_categorical(key, [self.encoded(value) for value in self.choices]))


def _kind(value: Any) -> str:
    return "choices" if isinstance(value, Choices) or (isinstance(value, dict) and "choices" in value) else "range"


Source = Annotated[Annotated[Range, Tag("range")] | Annotated[Choices, Tag("choices")], Discriminator(_kind)]


class Pruning(Options):
    """Rules for ending a trial early: at an epoch at which its best metric is worse than the median of earlier trials.

    The first `startup_trials` trials, and the first `warmup_epochs` epochs of a trial, are never pruned.
    """

    startup_trials: int = Field(5, ge=1)
    warmup_epochs: int = Field(1, ge=0)


class Space(Options):
    """The content of a search space's YAML file, as described at the top of this module."""

    space: dict[str, Source] = Field(min_length=1)
    fixed: dict[str, Any] = Field(default_factory=dict)
    pruning: Pruning | Literal[False] = Pruning()
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0

    def draw(self, trial: Trial) -> dict[str, Any]:
        """Draw values for all keys; a trial that already has values gets the same values."""
        return {key: source.draw(trial, key) for key, source in self.space.items()}


def assignments(values: dict[str, Any]) -> list[str]:
    """Format values by dotted key as the overrides of `load_config`."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def default_values(path: str | Path, space: Space, overrides: list[str]) -> dict[str, Any] | None:
    """Return the configuration's values as Optuna stores them; None if one of them is not in the space."""
    fixed = [*overrides, *assignments(space.fixed)]
    config = load_config(path, fixed)
    values = {}
    for key, source in space.space.items():
        if isinstance(source, Choices):
            same = [x for x in source.choices if load_config(path, [*fixed, *assignments({key: x})]) == config]
        else:
            same = [x for x in [_value_at(config, key)] if source.has(x)]
        if not same:
            return None
        values[key] = source.encoded(same[0])
    return values


def _value_at(config: RunConfig, key: str) -> Any:
    """Return the value at a dotted key; for a list of mappings the value that they all share, else None."""
    nodes: list[Any] = [config.model_dump(mode="json")]
    for part in key.split("."):
        if all(isinstance(node, list) for node in nodes):
            if part.isdigit():
                nodes = [node[int(part)] for node in nodes if int(part) < len(node)]
                continue
            nodes = [one for node in nodes for one in node]
        nodes = [node[part] for node in nodes if isinstance(node, dict) and part in node]
    return nodes[0] if nodes and all(node == nodes[0] for node in nodes) else None


def load_space(path: Path) -> Space:
    """Load a search space from a file; ConfigError has a line for each error."""
    tree = parse_yaml(read_config(path), str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping with the key space")
    try:
        space = Space.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {_explain(item)}" for item in error.errors())) from None
    errors = [
        f"{path}: space.{key}: cannot be searched: it changes how trials are evaluated or stored"
        for key in space.space
        if key.startswith(NOT_SEARCHED)
    ]
    if doubled := sorted(space.space.keys() & space.fixed.keys()):
        errors.append(f"{path}: fixed.{doubled[0]}: is also in space; give it once")
    if errors:
        raise ConfigError("\n".join(errors))
    return space


def _explain(item: ErrorDetails) -> str:
    """Format one pydantic error without the tags of the union's members."""
    *_, above, _ = [None, None, *item["loc"]]
    kinds: dict[Any, type[Options]] = {"range": Range, "choices": Choices, "pruning": Pruning}
    fields = kinds.get(above, Space).model_fields
    return explain(item, lambda _: fields, [x for x in item["loc"] if x not in ("range", "choices", "Pruning")])


def tuned_config(path: str | Path, space: Space, overrides: list[str]) -> RunConfig:
    """Return the configuration that trials vary: the file with `overrides` and the space's `fixed` values.

    Raises ConfigError, with a line for each error, if the configuration or a value in the space is invalid, or if there
    is no validation split.
    """
    fixed = [*overrides, *assignments(space.fixed)]
    config = load_config(path, fixed)
    errors = []
    for key, source in space.space.items():
        for value in source.ends():
            try:
                load_config(path, [*fixed, *assignments({key: value})])
            except ConfigError as error:
                # Other errors may depend on values of other keys: a trial with an invalid combination fails later.
                errors += [line for line in str(error).split("\n") if f"{key}:" in line or "unknown key" in line]
    if errors:
        raise ConfigError("\n".join(dict.fromkeys(errors)))
    data = config.data
    if data.protocol in WITHOUT_VALIDATION:
        why = f"data.protocol={data.protocol}"
    elif data.train_on_valid:
        why = "data.train_on_valid=true"
    elif data.protocol == "temporal" and not data.valid_fraction:
        why = "data.valid_fraction=0"
    else:
        if not config.eval.every:
            raise ConfigError(f"{path}: eval.every=0: trials are compared by their evaluations, expected at least 1")
        return config
    raise ConfigError(f"{path}: {why} leaves no validation split, and options must not be chosen on the test split")
