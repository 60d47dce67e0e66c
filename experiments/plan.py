"""Read the plan of a comparison: a strict YAML file of settings, each a run's configuration with some changed options.

    base: configs/synthetic-hstu.yaml      the configuration that settings change
    baseline: dense                        by default the first setting
    seeds: [1, 2, 3, 4, 5]                 the default
    common: {model.num_layers: 4}          options of all settings; a setting may change them again
    settings:
      dense: {}
      bsa: {model.attention.kind: bsa, model.attention.block_size: 16}
      large: {base: configs/ml-1m-hstu-large.yaml}
    runs: {old: runs/ml-1m-hstu/20260101-120000}   finished runs: a folder of one run or several, or a list
    quick: {train.epochs: 2}               more options of all settings with --quick

Relative paths start at the working directory.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from data.errors import ConfigError
from data.explain import explain
from data.options import Options
from data.types import shown
from training.changes import differences
from training.config import RunConfig, load_config
from training.strict_yaml import parse_yaml, read_config

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=100)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
DEFAULT_SEEDS = [1, 2, 3, 4, 5]
TAKEN = {"comparison.json", "comparison.csv", "report.html"}  # names of files of the result


class PlanFile(Options):
    """The content of a plan's YAML file."""

    base: str | dict[str, Any] | None = None
    baseline: str | None = None
    seeds: list[Seed] = Field(default_factory=lambda: list(DEFAULT_SEEDS), min_length=1)
    common: dict[str, Any] = Field(default_factory=dict)
    settings: dict[Name, dict[str, Any] | None] = Field(default_factory=dict)
    runs: dict[Name, str | list[str]] = Field(default_factory=dict)
    quick: dict[str, Any] = Field(default_factory=dict)


@dataclass
class Plan:
    """A comparison.

    settings: name -> configuration, to be trained with each of the seeds; runs: name -> folders of existing runs;
    baseline: a name of `settings` or `runs`.
    """

    settings: dict[str, RunConfig]
    runs: dict[str, list[Path]]
    baseline: str
    seeds: list[int]

    @property
    def names(self) -> list[str]:
        """The names of settings and runs, the baseline first."""
        return sorted([*self.settings, *self.runs], key=lambda name: name != self.baseline)


def load_plan(
    plan: Path | Mapping[str, Any] | None,
    *,
    seeds: Sequence[int] | None = None,
    runs: dict[str, list[Path]] | None = None,
    baseline: str | None = None,
    quick: bool = False,
    overrides: Sequence[str] = (),
) -> Plan:
    """Load a plan from a file or its content; None: a plan of `runs` only. The other arguments replace or add values.

    overrides: `key=value` with dotted keys, applied to all settings after the file's options.

    Raises ConfigError with a line for each error of the file and of its settings' configurations.
    """
    where = "--runs" if plan is None else str(plan) if isinstance(plan, Path) else "plan"
    file = PlanFile() if plan is None else _read(plan, where)
    seeds = list(file.seeds if seeds is None else seeds)
    if twice := {seed for seed in seeds if seeds.count(seed) > 1}:
        raise ConfigError(f"{where}: seeds: {min(twice)} is given twice")
    existing_runs = {
        name: [Path(x) for x in ([paths] if isinstance(paths, str) else paths)] for name, paths in file.runs.items()
    }
    existing_runs |= runs or {}
    settings, errors = {}, []
    for name, changed in file.settings.items():
        try:
            settings[name] = _setting(file, name, dict(changed or {}), quick, overrides)
        except ConfigError as error:
            errors += [f"{where}: settings.{name}: {line}" for line in str(error).split("\n")]
    names = [*file.settings, *existing_runs]
    doubled = [name for name in file.settings if name in existing_runs]
    errors += [f"{where}: {name}: a setting and a run have this name, rename one" for name in doubled]
    errors += [f"{where}: settings.{name}: this name is reserved for a file" for name in names if name in TAKEN]
    chosen = baseline or file.baseline or next(iter(names), "")
    if len(names) < 2:
        errors.append(f"{where}: expected at least two settings or runs to compare, got {len(names)}")
    elif chosen not in names:
        errors.append(f"{where}: baseline: expected one of {', '.join(names)}, got {shown(chosen)}")
    if quick and file.settings and not file.quick:
        errors.append(f"{where}: --quick: the plan has no section quick, like quick: {{train.epochs: 2}}")
    errors = errors or [f"{where}: {line}" for line in _not_comparable(settings)]
    if errors:
        raise ConfigError("\n".join(errors))
    return Plan(settings, existing_runs, chosen, seeds)


def _read(plan: Path | Mapping[str, Any], where: str) -> PlanFile:
    tree = parse_yaml(read_config(plan), where) if isinstance(plan, Path) else plan
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where}: expected a mapping with base and settings")
    try:
        return PlanFile.model_validate(tree)
    except ValidationError as error:
        lines = [explain(item, lambda _: PlanFile.model_fields) for item in error.errors()]
        raise ConfigError("\n".join(f"{where}: {line}" for line in lines)) from None


def _setting(
    file: PlanFile, name: str, changed: dict[str, Any], quick: bool, overrides: Sequence[str] = ()
) -> RunConfig:
    """Return the configuration of a setting, with seed 0; its runs have the plan's seeds."""
    base = changed.pop("base", file.base)
    if base is None:
        raise ConfigError("base: missing; expected the YAML file of a run, in the setting or the plan")
    changed = file.common | changed | (file.quick if quick else {})
    if "seed" in changed or any(override.partition("=")[0] == "seed" for override in overrides):
        raise ConfigError("seed: a setting cannot have a seed; all settings use the plan's seeds")
    config = load_config(base, [*(f"{key}={json.dumps(value)}" for key, value in changed.items()), *overrides])
    return config.model_copy(update={"name": name, "seed": 0})


def _not_comparable(settings: dict[str, RunConfig]) -> list[str]:
    """Return errors for settings that are not evaluated on the same events in the same way."""
    lines: list[str] = []
    judged = {name: _judged_by(config) for name, config in settings.items()}
    first = next(iter(judged), "")
    for name, options in judged.items():
        if options["data"]["protocol"] == "all":
            lines.append(f"settings.{name}: data.protocol=all has no held-out events to compare settings on")
        if not settings[name].eval.test:
            lines.append(f"settings.{name}: eval.test=false skips the test split, on which settings are compared")
        lines += [
            f"settings.{name}: {line}: settings of a comparison must be evaluated on the same events in the same way"
            for line in differences(judged[first], options)
        ]
    return lines


def _judged_by(config: RunConfig) -> dict:
    tree = config.model_dump(mode="json")
    del tree["data"]["train_on_valid"], tree["data"]["cache_dir"], tree["data"]["features"]
    return {"task": config.task.judged_by(), "data": tree["data"], "eval": {"filter_seen": tree["eval"]["filter_seen"]}}
