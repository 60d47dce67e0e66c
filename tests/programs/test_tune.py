"""Test tune.py as a user runs it: interrupted and continued, pruned and failing trials, results, invalid input."""

import contextlib
import csv
import fcntl
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import train
import tune
from cli.interrupt import Stopped
from data.errors import ConfigError
from tests.programs.tiny import run_here, tiny
from training import loop
from training.folder import wait_until_free
from training.run import TrainingError

pytest.importorskip("optuna")
from experiments import tuning
from experiments.space import load_space

SPACE = """
space:
  train.lr: {low: 1e-4, high: 1e-1, log: true}
  model.dropout: {choices: [0.0, 0.2]}
  model.attention: {choices: [{kind: dense}, {kind: softmax}]}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a folder with tiny.yaml and space.yaml; trials run in this process, with arguments `place.commands`."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(tiny(lr=1e-3))
    Path("space.yaml").write_text(SPACE)
    commands = []

    def launch(job, parallel):
        commands.append(job.command[1:])
        return run_here(job)

    monkeypatch.setattr(tuning, "launch", launch)
    return SimpleNamespace(commands=commands)


def run(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = tune.main([str(argument) for argument in arguments])
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def rows(out):
    return list(csv.DictReader(io.StringIO(Path(out, "trials.csv").read_text())))


def test_an_interrupted_and_continued_search_gives_the_same_result(place, monkeypatch):
    whole = run("tiny.yaml", "space.yaml", "--trials", "4", "--out", "whole")
    assert whole.returncode == 0, whole.stderr
    commands = len(place.commands)

    set_lr, launch = loop.set_lr, tuning.launch

    def stopped_in_the_second_epoch(config, optimizer, step, steps):
        if len(place.commands) == commands + 3 and step >= steps // 2:
            raise Stopped(signal.SIGTERM)
        return set_lr(config, optimizer, step, steps)

    def killed(job, parallel):
        process = launch(job, parallel)
        if process.returncode:
            raise Stopped(signal.SIGTERM)
        return process

    with monkeypatch.context() as patch:
        patch.setattr(loop, "set_lr", stopped_in_the_second_epoch)
        patch.setattr(tuning, "launch", killed)
        first = run("tiny.yaml", "space.yaml", "--trials", "4", "--out", "parts")
    assert first.returncode == 143 and "To continue, give the same command again" in first.stdout
    assert len(place.commands) == commands + 3
    second = run("tiny.yaml", "space.yaml", "--trials", "4", "--out", "parts")
    assert second.returncode == 0, second.stderr
    assert place.commands[commands + 3] == ["--resume", "parts/trial-2"] and len(place.commands) == commands + 5
    assert rows("parts") == rows("whole") and len(rows("parts")) == 4
    third = run("tiny.yaml", "space.yaml", "--trials", "4", "--out", "parts")
    assert third.returncode == 0 and len(place.commands) == commands + 5
    check_results(rows("whole"))


def check_results(table):
    """Check that the default is the first trial, and that the best configuration trains to its reported value."""
    default, best = table[0], max(table, key=lambda row: float(row["NDCG@10"]))
    assert float(default["train.lr"]) == 1e-3 and json.loads(default["model.attention"]) == {"kind": "dense"}
    assert float(best["NDCG@10"]) > float(default["NDCG@10"])
    assert {path.name for path in Path("whole").glob("trial-*/best")} == {"best"}
    assert [path.parent.name for path in Path("whole").glob("trial-*/checkpoints")] == [f"trial-{best['trial']}"]
    assert train.main(["whole/best.yaml", "--run", "again", "--quiet"]) == 0
    result = json.loads(Path("again/result.json").read_text())
    assert result["best"] == float(best["NDCG@10"]) and result["split"] == "test"
    trial = json.loads(Path(f"whole/trial-{best['trial']}/result.json").read_text())
    assert trial["best"] == result["best"] and "split" not in trial  # the test split was not used
    report = Path("whole/report.md").read_text()
    assert "| train.lr | " in report and f"the best is trial {best['trial']}, " in report


def test_a_bad_trial_is_pruned_and_a_failing_one_is_named(place):
    Path("space.yaml").write_text(
        "space: {train.lr: {choices: [3e-2, 1e-9, 1e30]}}\npruning: {startup_trials: 1, warmup_epochs: 0}\n"
    )
    done = run("tiny.yaml", "space.yaml", "--trials", "4", "--out", "out", "train.lr=3e-2")
    assert done.returncode == 0, done.stderr
    states = {(row["train.lr"], row["state"]) for row in rows("out")}
    assert {("0.03", "complete"), ("1e-09", "pruned"), ("1e+30", "fail")} == states
    pruned = next(row for row in rows("out") if row["state"] == "pruned")
    assert pruned["epochs"] == "1" and not Path(f"out/trial-{pruned['trial']}/checkpoints").exists()
    failed = next(row for row in rows("out") if row["state"] == "fail")
    assert failed["reason"].startswith("error: the loss is") and "## Failed" in Path("out/report.md").read_text()
    # A trial in its warm-up is not pruned.
    Path("space.yaml").write_text(
        "space: {train.lr: {choices: [3e-2, 1e-9]}}\npruning: {startup_trials: 1, warmup_epochs: 2}\n"
    )
    assert run("tiny.yaml", "space.yaml", "--trials", "2", "--out", "spared", "train.lr=3e-2").returncode == 0
    assert {row["state"] for row in rows("spared")} == {"complete"}
    # No trial finishes.
    Path("space.yaml").write_text("space: {train.lr: {choices: [1e30]}}")
    lost = run("tiny.yaml", "space.yaml", "--trials", "1", "--out", "lost")
    assert lost.returncode == 2 and "none of 1 trials was completed: error: the loss is" in lost.stderr


def test_another_search_in_the_same_folder_is_refused(place):
    assert run("tiny.yaml", "space.yaml", "--trials", "1", "--out", "out").returncode == 0
    other = run("tiny.yaml", "space.yaml", "--trials", "2", "--out", "out", "train.epochs=1")
    assert other.returncode == 2 and "out: has trials of another search (train.epochs: 2 -> 1)" in other.stderr
    Path("space.yaml").write_text(SPACE.replace("1e-1", "1"))
    other = run("tiny.yaml", "space.yaml", "--trials", "2", "--out", "out")
    assert other.returncode == 2 and "space.train.lr.high: 0.1 -> 1" in other.stderr


@pytest.mark.parametrize(
    "override, complaint",
    [
        ("data.protocol=published", "data.protocol=published leaves no validation split, and options must not be"),
        ("data.protocol=all", "data.protocol=all leaves no validation split"),
        ("eval.every=0", "eval.every=0: trials are compared by their evaluations"),
    ],
)
def test_without_a_validation_split(place, override, complaint):
    done = run("tiny.yaml", "space.yaml", "--trials", "1", "--out", "out", override)
    assert done.returncode == 2 and complaint in done.stderr and not place.commands


@pytest.mark.parametrize(
    "space, complaint",
    [
        ({"space": {"train.lr": {"low": 1, "hi": 2}}}, "space.train.lr.hi: unknown key, did you mean high?"),
        ({"space": {"train.lr": {"low": 2, "high": 1}}}, "space.train.lr: low=2 is above high=1"),
        (
            {"space": {"seed": {"choices": [1, 2]}}},
            "space.seed: cannot be searched: it changes how trials are",
        ),
        ({"space": {"data.path": {"choices": [1]}}}, "space.data.path: cannot be searched"),
        ({"space": {"train.lr": {"choices": [1]}}, "fixed": {"train.lr": 1}}, "fixed.train.lr: is also in space"),
        ({"spaces": {}}, "spaces: unknown key, did you mean space?"),
        ([], "expected a mapping with the key space"),
    ],
)
def test_invalid_spaces(tmp_path, space, complaint):
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(space))
    with pytest.raises(ConfigError) as caught:
        load_space(tmp_path / "space.yaml")
    assert complaint in str(caught.value)


def test_a_key_that_no_run_has(place):
    Path("space.yaml").write_text("space: {train.learning_rate: {low: 1, high: 2}, train.lr: {low: -1.0, high: 1.0}}")
    done = run("tiny.yaml", "space.yaml", "--trials", "1", "--out", "out")
    assert done.returncode == 2 and "train.learning_rate: unknown key" in done.stderr
    assert "train.lr: input should be greater than 0, got -1.0" in done.stderr


def test_evaluations_of_the_test_split_choose_nothing(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1, "split": "test", "NDCG@10": 0.5}\n{"epoch": 2, "spl')
    with pytest.raises(TrainingError, match="options must not be chosen on the test split"):
        tuning._evaluations(tmp_path, "NDCG@10")


def test_without_optuna(place, monkeypatch):
    monkeypatch.setattr(tune, "optuna", None)
    done = run("tiny.yaml", "space.yaml", "--trials", "1", "--out", "out")
    assert done.returncode == 2 and "tune.py needs Optuna" in done.stderr


def test_a_run_that_is_still_saving_is_waited_for(tmp_path, monkeypatch):
    """Check that a child whose parent was killed keeps its folder locked until it has saved."""
    (tmp_path / ".lock").touch()
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'rb'); fcntl.flock(file, fcntl.LOCK_EX); print(1, flush=True); "
        "sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"1\n"
    flock, locks = fcntl.flock, []

    def noticed(file, how):
        with pytest.raises(BlockingIOError):
            flock(file, how | fcntl.LOCK_NB)
        locks.append(how)
        holder.stdin.close()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", noticed)
    wait_until_free(tmp_path)
    assert locks == [fcntl.LOCK_SH]
    assert holder.wait() == 0
    holder.stdout.close()


def test_invalid_arguments(capsys):
    for arguments, message in (
        (["a.yaml", "b.yaml", "--out", "x"], "give --trials N, --hours H or both"),
        (["a.yaml", "b.yaml", "--out", "x", "--trials", "0"], "--trials: expected a whole number of at least 1"),
        (["a.yaml", "b.yaml", "--out", "x", "--hours", "nan"], "--hours: expected a number above 0"),
    ):
        with pytest.raises(SystemExit) as ended:
            tune.main(arguments)
        assert ended.value.code == 2 and message in capsys.readouterr().err
