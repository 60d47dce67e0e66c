"""Check metrics that are better if lower, metrics without a value, and a changed best metric of a resumed run."""

import json

import numpy as np
import optuna
import pytest

import compare
from experiments.tuning import Search
from tests.programs.test_train import run
from training.folder import as_json, with_nulls

CONFIG = """
name: NAME
seed: 1
device: cpu
threads: 1
data:
  format: csv
  path: PATH/events.csv
  protocol: last_tenth
  cache_dir: PATH/cache
  columns: {action: stars}
task: {kind: ranking, actions: [{name: liked, at_least: 4}]}
model: {block: hstu, max_seq_len: 24, embedding_dim: 8, num_layers: 1, attention: {kind: dense}}
train: {epochs: 3, batch_size: 8, lr: 3e-3, checkpoint_seconds: 1000}
"""


def strict(text):
    """Parse JSON and refuse NaN and the infinities, which JSON does not have."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def lines_of(run_folder):
    return [strict(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with data of one validation event a user, so that GAUC has no value, and two runs on them."""
    place = tmp_path_factory.mktemp("directions")
    rng, rows = np.random.default_rng(0), ["user,item,timestamp,stars"]
    for user in range(40):
        taste = rng.integers(5)
        for place_in_time, item in enumerate(rng.permutation(30)[:12]):
            rows.append(f"u{user},i{item},{place_in_time},{5 if item % 5 == taste or rng.random() < 0.2 else 1}")
    (place / "events.csv").write_text("\n".join(rows) + "\n")
    for name in ("auc", "loss"):
        (place / f"{name}.yaml").write_text(CONFIG.replace("PATH", str(place)).replace("NAME", name))
        options = ["eval.best_metric=log_loss", "eval.patience=3"] if name == "loss" else []
        done = run("train.py", place / f"{name}.yaml", "--run", place / "runs" / name, *options)
        assert done.returncode == 0, done.stderr
    return place


def test_the_least_log_loss_is_the_best(place):
    folder = place / "runs" / "loss"
    losses = [line["log_loss"] for line in lines_of(folder)]
    assert losses[0] > min(losses)  # the greatest one is another epoch
    result = strict((folder / "result.json").read_text())
    assert result["best"] == min(losses) and result["epoch"] == 1 + losses.index(min(losses))
    best = strict((folder / "best" / "state.json").read_text())
    assert best["value"] == min(losses)


def test_metric_without_a_value_raises_before_training(place):
    done = run("train.py", place / "auc.yaml", "--run", place / "gauc", "eval.best_metric=gauc")
    assert done.returncode == 2 and not (place / "gauc" / "metrics.jsonl").exists()
    assert "eval.best_metric: gauc has no value in the validation split: it needs" in done.stderr
    done = run("train.py", place / "auc.yaml", "--run", place / "off", "eval.best_metric=calibration")
    assert done.returncode == 2 and "eval.best_metric: calibration is best at 1" in done.stderr


def test_files_are_json_and_a_run_without_a_value_resumes(place):
    folder = place / "runs" / "auc"
    assert all(line["gauc"] is None for line in lines_of(folder))
    assert strict((folder / "result.json").read_text())["model"]["gauc"] is None
    for state in folder.glob("**/state.json"):
        strict(state.read_text())
    done = run("train.py", "--resume", folder, "train.epochs=4")
    assert done.returncode == 0, done.stderr
    assert len(lines_of(folder)) == 4
    assert run("eval.py", folder).returncode == 0
    assert strict((folder / "eval-test.json").read_text())["model"]["gauc"] is None
    runs, out = place / "runs", place / "compared"
    assert compare.main(["--runs", f"auc={folder}", f"loss={runs / 'loss'}", "--no-speed", "--out", str(out)]) == 0
    comparison = strict((place / "compared" / "comparison.json").read_text())
    assert comparison["settings"][0]["metrics"]["gauc"]["mean"] is None


def test_another_best_metric_at_resume_is_compared_with_its_own_values(place):
    folder = place / "resumed"
    assert run("train.py", place / "auc.yaml", "--run", folder).returncode == 0
    before = strict((folder / "best" / "state.json").read_text())
    done = run("train.py", "--resume", folder, "eval.best_metric=gauc", "train.epochs=4")
    assert done.returncode == 2 and "gauc" in done.stderr
    done = run("train.py", "--resume", folder, "eval.best_metric=log_loss", "train.epochs=4")
    assert done.returncode == 0, done.stderr
    losses = {line["epoch"]: line["log_loss"] for line in lines_of(folder)}
    best = strict((folder / "best" / "state.json").read_text())
    # Only the weights of the best earlier epoch by AUC are stored.
    assert best["value"] == losses[best["epoch"]] == min(losses[before["epoch"]], losses[4])


def test_a_search_takes_the_least_loss():
    study = optuna.create_study(direction="minimize")
    for value in (0.7, 0.3, 0.5, 0.3):
        study.add_trial(optuna.trial.create_trial(value=value))
    search = Search(study, None, "log_loss", None, None, less_is_better=True)
    assert search.best().number == 1 and [trial.number for trial in search.ordered()] == [1, 3, 2, 0]
    search.less_is_better = False
    assert search.best().number == 0


def test_nulls_replace_numbers_that_json_does_not_have():
    assert with_nulls({"a": [1.5, float("nan"), (float("inf"),)], "b": "nan", "c": 2}) == {
        "a": [1.5, None, [None]], "b": "nan", "c": 2,
    }  # fmt: skip
    assert strict(as_json({"x": float("nan")})) == {"x": None}
