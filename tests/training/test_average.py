"""Test the moving average of the weights and the decay of the learning rate, also in a resumed run."""

import json
import shutil

import pytest
import torch
from torch import nn

from tests.programs.test_train import ROOT, fails, final, run, start
from training.average import WeightAverage
from training.checkpoints import checkpoints
from training.config import load_config
from training.dcp import read_tensors, saved_tensors
from training.step import set_lr

OPTIONS = ["train.ema_decay=0.9", "train.decay=cosine", "train.warmup_steps=7", "data.protocol=published"]


def test_the_average_follows_its_formula():
    model = nn.Linear(2, 1, bias=False)
    average, expected = WeightAverage(model, 0.75), model.weight.detach().clone()
    for step in range(3):
        nn.init.constant_(model.weight, float(step))
        average.update()
        expected = 0.75 * expected + 0.25 * step
    with average.in_the_model():
        torch.testing.assert_close(model.weight.detach(), expected)
        torch.testing.assert_close(average.raw()["weight"], torch.full((1, 2), 2.0))
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), 2.0))


def test_the_average_of_16_bit_weights_converges():
    model = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 0.5)
    average = WeightAverage(model, 0.999)
    nn.init.constant_(model.weight, 1.0)
    for _ in range(20_000):
        average.update()
    torch.testing.assert_close(average.averages[0], torch.ones(1, 2), atol=1e-4, rtol=0)
    nn.init.constant_(model.weight, 3.0)
    for _ in range(3):
        average.update()
    exact = average.averages[0].clone()
    for _ in range(2):
        with average.in_the_model():
            assert torch.equal(model.weight, exact.to(torch.bfloat16)) and not torch.equal(exact, model.weight.float())
            assert torch.equal(average.raw()["weight"], torch.full((1, 2), 3.0, dtype=torch.bfloat16))
    assert torch.equal(model.weight, torch.full((1, 2), 3.0, dtype=torch.bfloat16))
    assert torch.equal(average.averages[0], exact)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("none", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, None, 0.5, None]),
    ],
)
def test_learning_rate(decay, expected):
    config = load_config(
        ROOT / "configs/synthetic-hstu.yaml", ["train.lr=1.0", "train.warmup_steps=2", f"train.decay={decay}"]
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    for step, rate in enumerate(expected):
        set_lr(config, optimizer, step, 6)
        if rate is not None:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_a_resumed_run_continues_its_average(tmp_path):
    folder, broken = tmp_path / "whole", tmp_path / "broken"
    done = start(folder, *OPTIONS)
    assert done.returncode == 0, done.stderr
    shutil.copytree(folder, broken)
    shutil.rmtree(checkpoints(broken)[-1])
    (broken / "result.json").unlink()
    assert run("train.py", "--resume", broken).returncode == 0
    assert final(broken) == final(folder)
    last = checkpoints(folder)[-1]
    names = ("model.embedding.position", "average.embedding.position")
    tensors = {name: torch.empty(saved_tensors(last)[name][0]) for name in names}
    read_tensors(last, tensors)
    assert not torch.equal(*tensors.values())
    # The average is evaluated: eval.py has the metrics that training reported last.
    assert run("eval.py", folder).returncode == 0
    result = json.loads((folder / "eval-test.json").read_text())
    metrics = result["model"][result["filter_seen"]]
    last = final(folder)[1][-1]
    assert metrics["NDCG@10"] == last["NDCG@10"]


def test_a_run_without_an_average_is_not_resumed_with_one(tmp_path):
    folder = tmp_path / "run"
    assert start(folder, "train.epochs=1").returncode == 0
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("ema_decay: null", "ema_decay: 0.9").replace("epochs: 1", "epochs: 2"))
    fails(run("train.py", "--resume", folder), "a resumed run cannot change train.ema_decay: None -> 0.9")
