"""AdamW: torch's bits for fp32 parameters, moments in fp32 for 16-bit ones, through checkpoints too."""

import pytest
import torch
from torch import nn

from training import optimizer as optimizers
from training.average import WeightAverage
from training.checkpoint import (
    CheckpointError,
    Progress,
    checkpoints,
    load_checkpoint,
    load_folder,
    save_checkpoint,
    save_folder,
)
from training.optimizer import AdamW, bytes_in_training

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1}


class Model(nn.Module):
    """A table in bfloat16 and a map in fp32."""

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
    """Gradients of 1, then of .01: a second moment in bfloat16 would stay where the first ones left it."""
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
    train(model, optimizer, average)
    with average.in_the_model():
        save_checkpoint(tmp_path, model, optimizer, Progress(run="r", fingerprint="x", step=5), average)
    loaded_optimizer, loaded_average = AdamW(other.parameters(), **OPTIONS), WeightAverage(other, 0.9)
    load_checkpoint(tmp_path, other, loaded_optimizer, loaded_average)
    train(model, optimizer, average, seed=1)
    train(other, loaded_optimizer, loaded_average, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(average.averages, loaded_average.averages, strict=True))

    # Checkpoints of earlier versions have both in 16 bits; they are read.
    folder = checkpoints(tmp_path)[0]
    tensors, facts = load_folder(folder, "model", "state")
    exact, state = tensors["state"].pop("average.table.weight"), tensors["state"]
    for key in ("optimizer.0.exp_avg", "optimizer.0.exp_avg_sq"):
        assert state[key].dtype == torch.float32
        state[key] = state[key].bfloat16()
    save_folder(folder, tensors, facts)
    load_checkpoint(tmp_path, other, loaded_optimizer, loaded_average)
    assert torch.equal(loaded_average.averages[0], exact.bfloat16().float())
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(loaded_optimizer.state[other.table.weight][key], state[f"optimizer.0.{key}"].float())

    state["average.table.weight"] = exact[:3]
    save_folder(folder, tensors, facts)
    with pytest.raises(CheckpointError, match=r"damaged, average\.table\.weight does not fit"):
        load_checkpoint(tmp_path, other, loaded_optimizer, loaded_average)


def test_bytes_in_training():
    assert bytes_in_training(torch.zeros(10), averaged=False) == 160
    assert bytes_in_training(torch.zeros(10, dtype=torch.bfloat16), averaged=False) == 120
    assert bytes_in_training(torch.zeros(10, dtype=torch.bfloat16), averaged=True) == 160
