"""Check the task `recall`: its metric, and a run from YAML to report."""

import json

import pytest
import torch
import yaml
from torch.nn import functional as F

import train
from benchmarks import memory
from data.errors import ConfigError
from data.recall import generate_recall
from experiments.results import load_run
from models.hstu import SequenceModel
from models.tasks.build import build_task
from training.config import RunConfig, load_config

RECALL = {
    "num_sequences": 40, "length": 60, "distances": [4, 16], "pairs": 3, "num_keys": 12, "num_values": 8,
    "num_fillers": 6,
}  # fmt: skip
CONFIG = {
    "name": "t",
    "device": "cpu",
    "threads": 1,
    "data": {"format": "recall", "protocol": "held_out_users", "recall": RECALL},
    "task": {"kind": "recall"},
    "model": {
        "block": "hstu", "max_seq_len": 59, "embedding_dim": 16, "num_layers": 2,
        "attention": [{"kind": "ring", "inner": "softmax", "window_size": 2}, {"kind": "softmax"}],
    },
    "train": {"epochs": 2, "batch_size": 20, "lr": 3e-3},
}  # fmt: skip


class Oracle(torch.nn.Module):
    """Predict the targets of recalls at distances up to 4 or, with `everything`, of all recalls."""

    def __init__(self, dataset, everything, tied=False):
        super().__init__()
        self.item_weight = torch.eye(dataset.num_items)
        self.codes, self.everything, self.tied = torch.from_numpy(dataset.actions), everything, tied

    def forward(self, batch):
        known = (self.codes[batch.events] == 1) | self.everything
        out = F.one_hot(torch.where(known, batch.target_ids, 0).clamp(min=0), len(self.item_weight)).float()
        return torch.ones_like(out) if self.tied else out, {}


def test_accuracy_of_an_oracle():
    config = RunConfig.model_validate(CONFIG)
    task, dataset = build_task(config), generate_recall(**RECALL)
    splits = task.splits(dataset)
    batches = task.batches(dataset, splits.test, batch_size=3, shuffle=False)
    assert task.evaluate(Oracle(dataset, True), batches) == {"accuracy": 1, "worst": 1}
    assert task.evaluate(Oracle(dataset, False), batches) == {"accuracy": 0.5, "worst": 0}
    assert task.evaluate(Oracle(dataset, True, tied=True), batches) == {"accuracy": 0, "worst": 0}
    result = task.judge(Oracle(dataset, False), dataset, splits, "test", batches)
    assert result["by_distance"] == {"3-4": 1, "9-16": 0} and result["guess"]["worst"] == 1 / 8
    users, values = task.user_values(result["judged"])
    assert users.tolist() == splits.test.users.tolist() and (values["accuracy"] == 0.5).all()


def test_a_run_trains_on_recalls_alone_and_reports_each_distance(tmp_path, monkeypatch, capsys):
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    folder = tmp_path / "memory/softmax/seed-1"
    assert train.main([str(path), "--run", str(folder), "--quiet"]) == 0
    result = json.loads((folder / "result.json").read_text())
    assert result["recalls"] == 4 * 6 and set(result["by_distance"]) == {"3-4", "9-16"}
    assert "| 9-16 |" in (folder / "report.md").read_text()
    run = load_run(folder)
    assert run.values["accuracy"].mean() == pytest.approx(result["model"]["accuracy"])
    assert run.breakdowns == {"distance, in events": result["by_distance"]}
    monkeypatch.setattr(memory, "VARIANTS", {"softmax": [{"dropout": 0.5}]})
    (tmp_path / "memory/interrupted").mkdir()
    memory.main([str(tmp_path / "memory"), "--out", str(tmp_path / "memory.jsonl")])
    without_dropout, other = (json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines())
    assert without_dropout["by_distance"] == result["by_distance"] == other["by_distance"]  # no dropout in evaluation
    assert (
        other["attention"]["dropout"] == 0.5
        and without_dropout["attention"]["dropout"] == 0
        and without_dropout["environment"]["torch"]
    )
    capsys.readouterr()
    memory.main(["--table", "--out", str(tmp_path / "memory.jsonl")])
    assert "| softmax judged with dropout=0.5 | " in capsys.readouterr().out
    # Only recalls are targets of training: outputs of other tokens have no gradient.
    config = RunConfig.model_validate(CONFIG)
    task, dataset = build_task(config), generate_recall(**RECALL)
    batch = next(task.batches(dataset, task.splits(dataset).train, batch_size=4).epoch(0))
    out = torch.randn(batch.num_tokens, 16, requires_grad=True)
    task.loss(SequenceModel(config.model, dataset.num_items), out, batch, None)[0].backward()
    assert torch.equal(out.grad.abs().sum(1) > 0, batch.target_ids >= 0)


@pytest.mark.parametrize(
    "override, complaint",
    [
        ("task={kind: retrieval}", "task.kind=retrieval does not support data.format=recall"),
        ("data.protocol=published", "data.protocol=published: task.kind=recall expects one of held_out_users"),
        ("model.action_embedding=true", "not supported by task.kind=recall"),
    ],
)
def test_invalid_configurations_raise(tmp_path, override, complaint):
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    with pytest.raises(ConfigError, match=complaint):
        load_config(path, [override])


def test_too_small_max_seq_len_raises(tmp_path):
    config = RunConfig.model_validate(CONFIG | {"model": CONFIG["model"] | {"max_seq_len": 58}})
    with pytest.raises(ConfigError, match=r"model\.max_seq_len=58: expected at least 59"):
        build_task(config).check_data(generate_recall(**RECALL))
