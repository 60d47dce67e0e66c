"""Test the progress lines of runs, and the report of gains that chance can explain."""

from types import SimpleNamespace

import pytest
from optuna.trial import TrialState

from cli.terminal import terminal
from experiments.runs import Job, ProgressLines, progress_of
from experiments.tuning_report import baselines_line, chance_lines, on_validation
from training.config import load_config
from training.run import open_data


def test_progress_is_the_last_line_of_the_log(tmp_path, monkeypatch, capsys):
    log = tmp_path / "seed-1.log"
    log.write_text("shop: 3 users\n")
    assert progress_of(log) == ""
    log.write_text(
        "epoch 2/9: 12 of 1,512 steps (1%), about 2:00 min left  loss 3.1\n"
        "epoch 3/9: 29 of 1,512 steps (2%), about 1:47 min left  loss 3.0\n"
        "epoch    3  loss 3.0\n"
    )
    assert progress_of(log) == "epoch 3/9: 29 of 1,512 steps (2%), about 1:47 min left"
    monkeypatch.setattr("experiments.runs.PROGRESS_SECONDS", 0.0)
    terminal.begin()
    ProgressLines().show([Job("dense, seed 1", [], log)])
    assert "dense, seed 1: epoch 3/9" in capsys.readouterr().out


def trial(value):
    return SimpleNamespace(values=[value], state=TrialState.COMPLETE)


@pytest.mark.parametrize(("best", "warns"), [(0.202, True), (0.3, False)])
def test_a_gain_that_chance_explains_is_a_warning(best, warns):
    search = SimpleNamespace(trials=lambda *states: [trial(0.2)] * 40, less_is_better=False)
    (line,) = chance_lines(search, trial(best), trial(0.2), 1000)
    assert line.startswith("WARNING") == warns and "1,000 validation users" in line
    assert not chance_lines(search, trial(best), None, 1000)


def test_a_metric_without_a_bound_has_no_gain_by_chance():
    search = SimpleNamespace(trials=lambda *states: [trial(0.6)] * 40, less_is_better=True)
    assert not chance_lines(search, trial(0.5), trial(0.6), 1000)


@pytest.mark.parametrize(
    ("less_is_better", "line"),
    [(False, "again 0.2000, popularity 0.1000."), (True, "popularity 0.1000, again 0.2000.")],
)
def test_the_best_baseline_comes_first(less_is_better, line):
    search = SimpleNamespace(metric="HR@10", less_is_better=less_is_better)
    assert line in baselines_line(search, {"popularity": 0.1, "again": 0.2})


def test_users_with_several_targets_count_once():
    sizes = "data.synthetic={num_users: 40, num_items: 60, min_length: 8, mean_length: 9, max_length: 12}"
    words = [sizes, "data.protocol=temporal", "data.targets=all", "data.valid_fraction=0.4", "device=cpu"]
    config = load_config("configs/synthetic-hstu.yaml", words)
    valid = open_data(config).splits.valid
    users, _ = on_validation(config)
    assert users == len(set(valid.users.tolist())) < len(valid)
