"""Search for good options: Optuna proposes values, train.py trains each trial, the validation split decides.

One process calls Optuna and starts a process of train.py for each trial, whose metrics.jsonl it reads. Optuna's state
is in OUT/study.db. An interrupted trial has the state RUNNING there, and its run, OUT/trial-N, is resumed.
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
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.pool import NullPool

from cli.interrupt import Interrupts
from cli.terminal import terminal
from data.errors import ConfigError
from experiments.runs import RESULT, ROOT, Job, ProgressLines, ended, last_line, launch, wait_until_free
from experiments.space import Space, assignments, default_values
from training.changes import differences
from training.config import RunConfig, as_yaml, load_config
from training.folder import access, read_regular, write_file
from training.run import TrainingError

CHECK_SECONDS = 0.5  # between two reads of the trials' metrics
STARTUP_DRAWS = 6  # trials with random values before the sampler uses their results
ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


class Limits(NamedTuple):
    """The limits of a search.

    trials: the number of trials of the whole study, including earlier ones, or None; hours: the time after which no
    trial is started, or None; parallel: the number of trials at a time.
    """

    trials: int | None
    hours: float | None
    parallel: int


@dataclass
class Search:
    """A study and the inputs of its trials.

    metric: the metric to optimise, lower is better if `less_is_better`; configured: maps values by dotted key to a
    trial's configuration.
    """

    study: optuna.Study
    space: Space
    metric: str
    out: Path
    configured: Callable[[dict[str, Any]], RunConfig]
    less_is_better: bool = False

    def folder(self, number: int) -> Path:
        """Return the folder of a trial's run."""
        return self.out / f"trial-{number}"

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials in these states, by default all."""
        return self.study.get_trials(deepcopy=False, states=states or None)

    def best(self) -> FrozenTrial | None:
        """Return the best completed trial, the earliest of equal ones; None if there is none."""
        return next(iter(self.ordered()), None)

    def ordered(self) -> list[FrozenTrial]:
        """Return the completed trials, best first, equal ones by number."""
        sign = 1 if self.less_is_better else -1
        return sorted(self.trials(TrialState.COMPLETE), key=lambda trial: (sign * trial.values[0], trial.number))

    def values(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return a trial's values by dotted key."""
        return self.space.draw(cast(Any, optuna.trial.FixedTrial(trial.params)))


@dataclass
class Running:
    """A running trial; reported: the epochs whose metric Optuna has."""

    trial: optuna.Trial
    process: subprocess.Popen
    job: Job
    reported: set[int] = field(default_factory=set)


def open_search(out: Path, path: str, config: RunConfig, space: Space, overrides: list[str]) -> Search:
    """Open or create the study in a folder; ConfigError if it belongs to another configuration or space.

    The first trial of a new study has the values of the configuration, if they are in the space.
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
    threads = load_config(base).threads  # the last bits of results on a CPU depend on them

    def configured(values: dict[str, Any]) -> RunConfig:
        drawn = load_config(path, [*overrides, *assignments(space.fixed | values)])
        return drawn.model_copy(update={"threads": threads})

    storage = optuna.storages.RDBStorage(
        # The path is passed to sqlite3, not in the URL, where some characters have a meaning.
        "sqlite://",
        engine_kwargs={"creator": lambda: sqlite3.connect(out / "study.db", timeout=60), "poolclass": NullPool},
    )
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if space.pruning:
        pruner = optuna.pruners.MedianPruner(space.pruning.startup_trials, space.pruning.warmup_epochs + 1)
    less_is_better = config.task.less_is_better(config.best_metric)
    direction = StudyDirection.MINIMIZE if less_is_better else StudyDirection.MAXIMIZE
    study = optuna.create_study(
        storage=storage, study_name="tune", direction=direction, load_if_exists=True, pruner=pruner
    )
    if study.direction is not direction:
        raise ConfigError(
            f"{out}: its search maximises {config.best_metric}, which is to be minimised: give another --out"
        )
    if not study.get_trials(deepcopy=False) and (default := default_values(path, space, overrides)) is not None:
        study.enqueue_trial(default, user_attrs={"default": True})
    return Search(study, space, config.best_metric, out, configured, less_is_better)


def search(tuning: Search, interrupts: Interrupts, limits: Limits) -> None:
    """Run trials until the limits are reached: first interrupted ones, then new ones."""
    until = math.inf if limits.hours is None else time.monotonic() + 3600 * limits.hours
    waiting = [optuna.Trial(tuning.study, trial._trial_id) for trial in tuning.trials(TrialState.RUNNING)]
    running: list[Running] = []
    progress = ProgressLines()
    try:
        while True:
            while len(running) < limits.parallel and (waiting or _may_begin(tuning, limits, until)):
                trial = waiting.pop(0) if waiting else _new_trial(tuning)
                if (begun := _begin(tuning, trial, limits.parallel)) is not None:
                    running.append(begun)
            if not running:
                return
            progress.show([run.job._replace(name=f"trial {run.trial.number}") for run in running])
            ended_processes = ended([run.process for run in running], CHECK_SECONDS)
            running = [run for run in running if not _follow(tuning, run, run.process in ended_processes)]
    finally:
        interrupts.stage = "searching. The state of all trials is saved. To continue, give the same command again"
        for run in running:
            run.process.terminate()
        for run in running:
            run.process.wait()


def _may_begin(tuning: Search, limits: Limits, until: float) -> bool:
    begun = len(tuning.trials(TrialState.RUNNING, *ENDED))
    return (limits.trials is None or begun < limits.trials) and time.monotonic() < until


def _sampler(tuning: Search, number: int) -> optuna.samplers.BaseSampler:
    """Return a sampler for one trial; its values depend on earlier trials, not on interruptions of the search."""
    return optuna.samplers.TPESampler(
        seed=tuning.space.seed + number, n_startup_trials=STARTUP_DRAWS, multivariate=True, constant_liar=True
    )


def _new_trial(tuning: Search) -> optuna.Trial:
    tuning.study.sampler = _sampler(tuning, len(tuning.trials()))
    return tuning.study.ask()


def _begin(tuning: Search, trial: optuna.Trial, parallel: int) -> Running | None:
    """Start or resume the trial's process; None if its values are invalid, so that the trial has failed."""
    folder = tuning.folder(trial.number)
    values = tuning.space.draw(trial)
    label = f"trial {trial.number} ({', '.join(f'{key}={value}' for key, value in values.items())})"
    try:
        config = tuning.configured(values)
    except ConfigError as error:
        _fail(tuning, trial, str(error).replace("\n", "; "))
        return None
    wait_until_free(folder)
    if (folder / "config.yaml").exists():
        command = ["--resume", str(folder)]
    else:
        if folder.exists():  # the run was killed before it had a configuration
            shutil.rmtree(folder)
        settings = folder.with_suffix(".yaml")
        write_file(settings, as_yaml(without_test(config)))
        command = [str(settings), "--run", str(folder)]
    terminal.say(f"{label}: {'resumed' if command[0] == '--resume' else 'started'}")
    job = Job(label, [str(ROOT / "train.py"), *command], folder.with_suffix(".log"))
    reported = tuning.trials()[trial.number].intermediate_values
    return Running(trial, launch(job, parallel), job, set(reported))


def without_test(config: RunConfig) -> RunConfig:
    """Return the configuration without evaluation on the test split."""
    return config.model_copy(update={"eval": config.eval.model_copy(update={"test": False})})


def _follow(tuning: Search, run: Running, has_ended: bool) -> bool:
    """Report a trial's new evaluations to Optuna; return whether the trial has ended or was pruned."""
    folder = tuning.folder(run.trial.number)
    for epoch, value in _evaluations(folder, tuning.metric):
        if epoch in run.reported:
            continue
        run.reported.add(epoch)
        run.trial.report(value, epoch)
        if run.trial.should_prune():
            run.process.terminate()
            run.process.wait()
            tuning.study.tell(run.trial, state=TrialState.PRUNED)
            terminal.say(f"trial {run.trial.number}: pruned after epoch {epoch}, {tuning.metric} {value:.4f}")
            _drop_weights(folder)
            return True
    if not has_ended:
        return False
    if run.process.returncode:
        _fail(tuning, run.trial, last_line(folder.with_suffix(".log"), run.process.returncode))
        return True
    with access(folder / RESULT, "read"):
        value = json.loads(read_regular(folder / RESULT)).get("best")
    if value is None:
        reason = f"{tuning.metric} has no value on validation: does the attention's warm-up last until the run's end?"
        _fail(tuning, run.trial, reason)
        return True
    before = tuning.best()
    tuning.study.tell(run.trial, value)
    terminal.say(f"trial {run.trial.number}: {tuning.metric} {value:.4f}")
    best = tuning.best()
    assert best is not None  # at least this trial
    # Only the best trial keeps its weights: those of others can be trained again from their configurations.
    for number in {run.trial.number, before.number if before else run.trial.number} - {best.number}:
        _drop_weights(tuning.folder(number))
    return True


def _fail(tuning: Search, trial: optuna.Trial, reason: str) -> None:
    trial.set_user_attr("reason", reason)
    tuning.study.tell(trial, state=TrialState.FAIL)
    terminal.say(f"trial {trial.number}: failed, the others continue: {reason}")
    _drop_weights(tuning.folder(trial.number))


def _drop_weights(folder: Path) -> None:
    for name in ("checkpoints", "best"):
        shutil.rmtree(folder / name, ignore_errors=True)


def _evaluations(folder: Path, metric: str) -> list[tuple[int, float]]:
    """Return (epoch, metric) of each complete line of metrics.jsonl; TrainingError if the split is not `valid`."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    with access(path, "read"):
        lines = read_regular(path).decode().split("\n")[:-1]
    records = [record for record in map(json.loads, lines) if metric in record]
    if records and records[0]["split"] != "valid":
        raise TrainingError("the data have no validation split, and options must not be chosen on the test split")
    return [(record["epoch"], record[metric]) for record in records if record[metric] is not None]
