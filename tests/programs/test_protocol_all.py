"""Test protocol all: every event is used for training, and none is held out for evaluation."""

import json

from tests.programs.test_train import run, start


def test_trains_on_all_events_without_evaluation(tmp_path):
    done = start(tmp_path / "run", "data.protocol=all", "train.epochs=1")
    assert done.returncode == 0, done.stderr
    assert "there is no evaluation" in done.stdout.replace("\n", " ")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["steps"] and not result.keys() & {"model", "popularity", "split"}
    assert "HR@10" not in (tmp_path / "run" / "report.md").read_text()
    judged = run("eval.py", tmp_path / "run")
    assert judged.returncode == 2 and "--split test: expected train, the splits of protocol all" in judged.stderr


def test_patience_needs_something_held_out(tmp_path):
    done = start(tmp_path / "run", "data.protocol=all", "eval.patience=1")
    assert done.returncode == 2
    assert "eval.patience: protocol all leaves no validation split; set eval.patience=null" in done.stderr
