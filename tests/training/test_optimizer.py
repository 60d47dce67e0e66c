"""Test AdamW: torch's bits for fp32 parameters; fp32 moments for 16-bit parameters, also in checkpoints."""

from pathlib import Path

import pytest
import torch
from torch import nn

from training import optimizer as optimizers
from training.average import WeightAverage
from training.checkpoints import Checkpoints, Progress, checkpoints
from training.config import load_config
from training.dcp import saved_tensors
from training.optimizer import AdamW, bytes_in_training
from training.ranks.processes import Ranks
from training.saved import CheckpointError

CONFIG = Path(__file__).parents[2] / "configs/synthetic-hstu.yaml"
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1}


class Model(nn.Module):
    """A bfloat16 table and an fp32 linear map."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.map = nn.Embedding(6, 4, dtype=torch.bfloat16), nn.Linear(4, 2)

    def forward(self, ids):
        return self.map(self.table(ids).float())


def train(model, optimizer, average=None, steps=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = model(torch.randint(6, (8,), generator=generator)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if average is not None:
            average.update()


def test_fp32_parameters_get_torch_s_bits():
    ours, theirs = Model().float(), Model().float()
    train(ours, AdamW(ours.parameters(), **OPTIONS))
    train(theirs, torch.optim.AdamW(theirs.parameters(), fused=True, **OPTIONS))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_moments_of_16_bit_parameters_are_those_of_fp32(monkeypatch):
    """After gradients of 1, those of 0.01 would not change a second moment in bfloat16."""
    monkeypatch.setattr(optimizers, "CHUNK", 16)
    narrow = nn.Parameter(torch.linspace(-1, 1, 40, dtype=torch.bfloat16).view(10, 4))
    wide = nn.Parameter(narrow.detach().float())
    ours, theirs = AdamW([narrow], **OPTIONS), torch.optim.AdamW([wide], fused=True, **OPTIONS)
    for step in range(600):
        narrow.grad = torch.full_like(narrow, 1.0 if step < 100 else 0.01)
        wide.grad, wide.data = narrow.grad.float(), narrow.detach().float()
        ours.step()
        theirs.step()
    assert torch.equal(narrow, wide.bfloat16())
    for name in ("step", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(ours.state[narrow][name], theirs.state[wide][name])
    assert ours.state[narrow]["exp_avg_sq"].max() < 0.7 * (1 - 0.999**100)


def test_a_checkpoint_keeps_moments_and_averages_of_16_bit_weights(tmp_path):
    model, other = Model(), Model(seed=1)
    optimizer, average = AdamW(model.parameters(), **OPTIONS), WeightAverage(model, 0.9)
    ranks = Ranks(load_config(CONFIG, []))
    train(model, optimizer, average)
    Checkpoints(tmp_path, model, optimizer, average, ranks).save(Progress(run="r", fingerprint="x", step=5))
    loaded_optimizer, loaded_average = AdamW(other.parameters(), **OPTIONS), WeightAverage(other, 0.9)
    Checkpoints(tmp_path, other, loaded_optimizer, loaded_average, ranks).load()
    train(model, optimizer, average, seed=1)
    train(other, loaded_optimizer, loaded_average, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(average.averages, loaded_average.averages, strict=True))
    tensors = saved_tensors(checkpoints(tmp_path)[0])
    assert tensors["model.table.weight"] == ((6, 4), torch.bfloat16)
    for name in ("average.table.weight", "optimizer.table.weight.exp_avg", "optimizer.table.weight.exp_avg_sq"):
        assert tensors[name] == ((6, 4), torch.float32)
    optimizer.state[model.table.weight]["exp_avg"] = optimizer.state[model.table.weight]["exp_avg"].bfloat16()
    Checkpoints(tmp_path, model, optimizer, average, ranks).save(Progress(run="r", fingerprint="x", step=6))
    with pytest.raises(CheckpointError, match=r"belongs to another .* optimizer\.table\.weight\.exp_avg;"):
        Checkpoints(tmp_path, other, loaded_optimizer, loaded_average, ranks).load()


def test_bytes_in_training():
    assert bytes_in_training(torch.zeros(10), averaged=False) == 160
    assert bytes_in_training(torch.zeros(10, dtype=torch.bfloat16), averaged=False) == 120
    assert bytes_in_training(torch.zeros(10, dtype=torch.bfloat16), averaged=True) == 160
