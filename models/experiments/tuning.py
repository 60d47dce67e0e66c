"""A search for good options: Optuna proposes, train.py trains each trial, the validation split judges.

One process asks Optuna and watches the trials, each a train.py of its own, whose metrics.jsonl it reads. What Optuna
knows is in OUT/study.db. A trial that was interrupted is still RUNNING there, and its run, OUT/trial-N, is resumed.
"""

import json
import math
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.pool import NullPool

from models.config import ConfigError, RunConfig, as_yaml, differences, load_config
from models.experiments.runs import RESULT, ROOT, Job, ended, last_line, launch, wait_until_free
from models.experiments.space import Space, assignments, default_values
from models.folder import access, read_regular, write_file
from models.interrupt import Interrupts
from models.program import TrainingError
from models.terminal import terminal

CHECK_SECONDS = 0.5  # between two looks at what the trials have written
STARTUP_DRAWS = 6  # trials that are drawn at random before the sampler learns from them
ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


class Limits(NamedTuple):
    """trials: of the whole study, those that are there included; hours: after which none is started; either may be
    None. parallel: trials at a time."""

    trials: int | None
    hours: float | None
    parallel: int


@dataclass
class Search:
    """A study and what its trials are made of. configured: values by dotted key -> a trial's configuration."""

    study: optuna.Study
    space: Space
    metric: str
    out: Path
    configured: Callable[[dict[str, Any]], RunConfig]

    def folder(self, number: int) -> Path:
        return self.out / f"trial-{number}"

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    def best(self) -> FrozenTrial | None:
        """The completed trial with the greatest value, of equal ones the first."""
        done = self.trials(TrialState.COMPLETE)
        return max(done, key=lambda trial: (trial.values[0], -trial.number), default=None)

    def values(self, trial: FrozenTrial) -> dict[str, Any]:
        """What a trial drew, by dotted key."""
        return self.space.draw(cast(Any, optuna.trial.FixedTrial(trial.params)))


@dataclass
class Running:
    """A trial under way: its process, and the epochs that Optuna was told of."""

    trial: optuna.Trial
    process: subprocess.Popen
    told: set[int] = field(default_factory=set)


def open_search(out: Path, path: str, config: RunConfig, space: Space, overrides: list[str]) -> Search:
    """The study of a folder, begun or gone on with; ConfigError where it is of another configuration or space.

    The first trial of a new study has the configuration's own values, if the space has them.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    base, space_file = out / "base.yaml", out / "space.json"
    if base.exists():
        changed = differences(load_config(base).model_dump(mode="json"), config.model_dump(mode="json"))
        with access(space_file, "read"):
            changed += differences(json.loads(read_regular(space_file)), space.model_dump(mode="json"))
        if changed:
            raise ConfigError(f"{out}: has trials of another search ({'; '.join(changed)}): give another --out")
    else:
        write_file(space_file, json.dumps(space.model_dump(mode="json"), indent=1))
        write_file(base, as_yaml(config))
    threads = load_config(base).threads  # bits of a CPU's results depend on them

    def configured(values: dict[str, Any]) -> RunConfig:
        drawn = load_config(path, [*overrides, *assignments(space.fixed | values)])
        return drawn.model_copy(update={"threads": threads})

    storage = optuna.storages.RDBStorage(
        # Not by its URL, in which a path may mean something else.
        "sqlite://",
        engine_kwargs={"creator": lambda: sqlite3.connect(out / "study.db", timeout=60), "poolclass": NullPool},
    )
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if space.pruning:
        pruner = optuna.pruners.MedianPruner(space.pruning.startup_trials, space.pruning.warmup_epochs + 1)
    study = optuna.create_study(
        storage=storage, study_name="tune", direction="maximize", load_if_exists=True, pruner=pruner
    )
    if not study.get_trials(deepcopy=False) and (default := default_values(path, space, overrides)) is not None:
        study.enqueue_trial(default, user_attrs={"default": True})
    return Search(study, space, config.best_metric, out, configured)


def search(found: Search, interrupts: Interrupts, limits: Limits) -> None:
    """Runs trials until the limits are reached: first those that were interrupted, then new ones."""
    until = math.inf if limits.hours is None else time.monotonic() + 3600 * limits.hours
    waiting = [optuna.Trial(found.study, trial._trial_id) for trial in found.trials(TrialState.RUNNING)]
    running: list[Running] = []
    try:
        while True:
            while len(running) < limits.parallel and (waiting or _may_begin(found, limits, until)):
                trial = waiting.pop(0) if waiting else _ask(found)
                if (begun := _begin(found, trial, limits.parallel)) is not None:
                    running.append(begun)
            if not running:
                return
            done = ended([one.process for one in running], CHECK_SECONDS)
            running = [one for one in running if not _follow(found, one, one.process in done)]
    finally:
        interrupts.stage = "searching. What was under way is saved. To go on: the same command again"
        for one in running:
            one.process.terminate()
        for one in running:
            one.process.wait()


def _may_begin(found: Search, limits: Limits, until: float) -> bool:
    begun = len(found.trials(TrialState.RUNNING, *ENDED))
    return (limits.trials is None or begun < limits.trials) and time.monotonic() < until


def _sampler(found: Search, number: int) -> optuna.samplers.BaseSampler:
    """A sampler for one trial: what it draws depends on the trials before and not on where the search was stopped."""
    return optuna.samplers.TPESampler(
        seed=found.space.seed + number, n_startup_trials=STARTUP_DRAWS, multivariate=True, constant_liar=True
    )


def _ask(found: Search) -> optuna.Trial:
    found.study.sampler = _sampler(found, len(found.trials()))
    return found.study.ask()


def _begin(found: Search, trial: optuna.Trial, parallel: int) -> Running | None:
    """The trial's process, begun or gone on with; None where its values make no possible run."""
    folder = found.folder(trial.number)
    values = found.space.draw(trial)
    what = f"trial {trial.number} ({', '.join(f'{key}={value}' for key, value in values.items())})"
    try:
        config = found.configured(values)
    except ConfigError as error:
        _fail(found, trial, str(error).replace("\n", "; "))
        return None
    wait_until_free(folder)
    if (folder / "config.yaml").exists():
        command = ["--resume", str(folder)]
    else:
        if folder.exists():  # killed before it was a run
            shutil.rmtree(folder)
        settings = folder.with_suffix(".yaml")
        write_file(settings, as_yaml(without_test(config)))
        command = [str(settings), "--run", str(folder)]
    terminal.say(f"{what}: {'gone on with' if command[0] == '--resume' else 'started'}")
    job = Job(what, [str(ROOT / "train.py"), *command], folder.with_suffix(".log"))
    told = found.trials()[trial.number].intermediate_values
    return Running(trial, launch(job, parallel), set(told))


def without_test(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"eval": config.eval.model_copy(update={"test": False})})


def _follow(found: Search, one: Running, done: bool) -> bool:
    """Tells Optuna what a trial has written since; whether the trial is over, by its end or pruned."""
    folder = found.folder(one.trial.number)
    for epoch, value in _evaluations(folder, found.metric):
        if epoch in one.told:
            continue
        one.told.add(epoch)
        one.trial.report(value, epoch)
        if one.trial.should_prune():
            one.process.terminate()
            one.process.wait()
            found.study.tell(one.trial, state=TrialState.PRUNED)
            terminal.say(f"trial {one.trial.number}: pruned after epoch {epoch}, {found.metric} {value:.4f}")
            _drop_weights(folder)
            return True
    if not done:
        return False
    if one.process.returncode:
        _fail(found, one.trial, last_line(folder.with_suffix(".log"), one.process.returncode))
        return True
    with access(folder / RESULT, "read"):
        value = json.loads(read_regular(folder / RESULT)).get("best")
    if value is None:
        _fail(
            found, one.trial, "no evaluation on the validation split chose weights (warm-ups are longer than the run?)"
        )
        return True
    before = found.best()
    found.study.tell(one.trial, value)
    terminal.say(f"trial {one.trial.number}: {found.metric} {value:.4f}")
    best = found.best()
    assert best is not None  # this trial, if no other
    # Weights of the best trial alone are kept: its configuration trains them again, but that takes time.
    for number in {one.trial.number, before.number if before else one.trial.number} - {best.number}:
        _drop_weights(found.folder(number))
    return True


def _fail(found: Search, trial: optuna.Trial, reason: str) -> None:
    trial.set_user_attr("reason", reason)
    found.study.tell(trial, state=TrialState.FAIL)
    terminal.say(f"trial {trial.number}: failed, the others go on: {reason}")
    _drop_weights(found.folder(trial.number))


def _drop_weights(folder: Path) -> None:
    for name in ("checkpoints", "best"):
        shutil.rmtree(folder / name, ignore_errors=True)


def _evaluations(folder: Path, metric: str) -> list[tuple[int, float]]:
    """(epoch, metric) of the whole lines of metrics.jsonl; TrainingError where they are not of the validation split."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    with access(path, "read"):
        lines = read_regular(path).decode().split("\n")[:-1]
    records = [record for record in map(json.loads, lines) if metric in record]
    if records and records[0]["split"] != "valid":
        raise TrainingError("the data leave no validation split, and nothing may be chosen on the test split")
    return [(record["epoch"], record[metric]) for record in records]
