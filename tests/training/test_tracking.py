"""Test train.tracking: MLflow and W&B have the curves, which a resumed run continues; files of a stopped run."""

import json
import signal
import sys
from types import ModuleType, SimpleNamespace

import pytest

import train
from cli.interrupt import Stopped
from experiments.runs import is_finished, read_result
from tests.programs.tiny import tiny
from training import loop, tracking
from training.config import load_config
from training.folder import FolderError


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(tiny(epochs=3))
    return tmp_path


def interrupt_in_epoch(monkeypatch, epoch):
    """Send SIGTERM in the middle of an epoch, counted from 0."""
    set_lr = loop.set_lr

    def signalled(config, optimizer, step, steps):
        if step == epoch * steps // 3 + 1:
            signal.raise_signal(signal.SIGTERM)
        return set_lr(config, optimizer, step, steps)

    monkeypatch.setattr(loop, "set_lr", signalled)


@pytest.mark.slow  # MLflow takes six seconds to import and to make a database; with W&B there is the same run below
def test_mlflow_has_the_curves_of_an_interrupted_and_resumed_run(place, monkeypatch, capsys):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}/store.db")
    arguments = ["tiny.yaml", "train.tracking=mlflow", "--run", "run", "--quiet"]
    with monkeypatch.context() as patch:
        interrupt_in_epoch(patch, 1)
        assert train.main(arguments) == 128 + signal.SIGTERM
    client = MlflowClient()
    (experiment,) = [one for one in client.search_experiments() if one.name == "tiny"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "KILLED" and run.data.params["train.lr"] == "0.01"
    assert run.data.params["model.attention.0.kind"] == "dense"

    assert train.main(["--resume", "run", "--quiet"]) == 0
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    records = [json.loads(line) for line in (place / "run/metrics.jsonl").read_text().splitlines()]
    for name, key in (("valid/NDCG_at_10", "NDCG@10"), ("train/loss", "loss")):
        points = client.get_metric_history(run.info.run_id, name)
        assert [(x.step, x.value) for x in points] == [(x["step"], pytest.approx(x[key])) for x in records]


def check_files_of_an_interrupted_run(folder):
    result, report = json.loads((folder / "result.json").read_text()), (folder / "report.md").read_text()
    (record,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert result["finished"] is False and result["epoch"] == 1 and result["best"] == record["NDCG@10"]
    assert result["parameters"] > 0 and result["environment"]["torch"] and "model" not in result
    assert f"INTERRUPTED after 1 of 3 epochs, saved at step {result['steps']}" in report and "loss.svg" in report
    assert (folder / "loss.svg").exists() and not is_finished(folder)
    with pytest.raises(FolderError, match="the run was interrupted"):
        read_result(folder)


def test_a_run_stopped_during_its_final_evaluation(place, monkeypatch):
    from training import ending

    def stopped(*arguments):
        raise Stopped(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(ending, "judge", stopped)
        assert train.main(["tiny.yaml", "--run", "run", "--quiet"]) == 128 + signal.SIGINT
    result = json.loads((place / "run/result.json").read_text())
    assert result["finished"] is False and result["epoch"] == 3
    assert train.main(["--resume", "run", "--quiet"]) == 0 and is_finished(place / "run")


class FakeRun:
    """A fake W&B run; log raises an error at the `broken`-th call."""

    def __init__(self, options, broken=None):
        self.options, self.points, self.ends, self.broken = options, [], [], broken

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, values):
        self.points.append(values)
        if len(self.points) == self.broken:
            raise ConnectionError("no network\nat all")

    def finish(self, exit_code):
        self.ends.append(exit_code)


def fake_wandb(monkeypatch, broken=None):
    runs = []
    module = ModuleType("wandb")
    module.init = lambda **options: runs.append(FakeRun(options, broken)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def test_wandb_continues_the_same_run(place, monkeypatch):
    runs = fake_wandb(monkeypatch)
    with monkeypatch.context() as patch:
        interrupt_in_epoch(patch, 1)
        assert train.main(["tiny.yaml", "train.tracking=wandb", "--run", "run", "--quiet"]) == 128 + signal.SIGTERM
    check_files_of_an_interrupted_run(place / "run")
    assert train.main(["--resume", "run", "--quiet"]) == 0
    assert is_finished(place / "run") and read_result(place / "run")["epoch"] in (1, 2, 3)
    assert "INTERRUPTED" not in (place / "run/report.md").read_text()
    assert not (place / "run/tensorboard").exists()
    first, second = runs
    assert first.options["id"] == second.options["id"] == json.loads((place / "run/run.json").read_text())["run"]
    assert first.options["resume"] == "allow" and first.options["config"]["train"]["lr"] == 0.01
    assert (first.ends, second.ends) == ([1], [0])
    steps = [json.loads(line)["step"] for line in (place / "run/metrics.jsonl").read_text().splitlines()]
    assert [point["step"] for point in first.points + second.points] == steps
    assert {"valid/NDCG@10", "train/loss", "train/lr", "train/events_per_second", "step"} <= first.points[0].keys()


def test_an_error_of_a_tracker_is_printed_once_and_training_continues(place, monkeypatch, capsys):
    (run,) = [fake_wandb(monkeypatch, broken=1)]
    assert train.main(["tiny.yaml", "train.tracking=wandb", "--run", "run"]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.count("train.tracking: wandb failed, training continues without it: ConnectionError: no network at")
        == 1
    )
    assert len(run[0].points) == 1 and run[0].ends == [] and is_finished(place / "run")


def test_a_tracker_that_is_not_installed_or_cannot_start(place, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    assert train.main(["tiny.yaml", "train.tracking=wandb", "--run", "run"]) == 2
    assert (
        "train.tracking: wandb cannot be imported" in (error := capsys.readouterr().err)
        and "hstu_sparse[wandb]" in error
    )
    assert not (place / "run").exists()

    def unreachable(**options):
        raise OSError("unreachable")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=unreachable))
    assert train.main(["tiny.yaml", "train.tracking=wandb", "--run", "run"]) == 2
    assert "train.tracking: wandb cannot start: OSError: unreachable" in capsys.readouterr().err


def test_parameters_are_leaves_by_dotted_keys(place):
    tree = load_config("tiny.yaml").model_dump(mode="json")
    leaves = tracking.flat(tree)
    assert leaves["model.attention.0.kind"] == "dense" and leaves["train.betas"] == [0.9, 0.98]
    assert all(not isinstance(value, dict) for value in leaves.values())
