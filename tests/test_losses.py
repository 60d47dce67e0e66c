"""Losses against sums written out, both ways to the logits, and their gradients."""

import math

import pytest
import torch
from torch.nn import functional as F

from models import losses
from models.config import LossConfig
from models.losses import training_loss

T, E, I = 37, 6, 23


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    out = F.normalize(torch.randn(T, E, generator=generator), dim=-1).requires_grad_()
    items = torch.randn(I, E, generator=generator).requires_grad_()
    return out, items, torch.randint(I, (T,), generator=generator)


def config(kind, **options):
    return LossConfig.model_validate({"kind": kind, "num_negatives": 5, **options})


def by_hand(kind, out, items, targets, temperature):
    """The loss one position at a time, from the same random numbers."""
    if kind == "in_batch":
        negatives = targets[torch.randint(2**62, (T, 5)) % T]
    else:
        negatives = torch.randint(I, (T, 5))
    items = items / items.norm(dim=1, keepdim=True)
    total = 0.0
    for t in range(T):
        logits = items @ out[t] / temperature
        positive = logits[targets[t]]
        if kind == "cross_entropy":
            total = total + logits.exp().sum().log() - positive
            continue
        rivals = logits[negatives[t][negatives[t] != targets[t]]]
        if kind == "bce":
            total = total - F.logsigmoid(positive) - F.logsigmoid(-rivals).sum() / max(1, len(rivals))
        else:
            total = total + torch.cat([positive[None], rivals]).exp().sum().log() - positive
    return total / T


@pytest.mark.parametrize("whole", [True, False], ids=["whole catalogue", "gathered rows"])
@pytest.mark.parametrize("chunk", [2**20, 300])
@pytest.mark.parametrize("kind", ["sampled_softmax", "in_batch", "bce", "cross_entropy"])
def test_loss_and_gradients(inputs, kind, chunk, whole, monkeypatch):
    out, items, targets = inputs
    monkeypatch.setitem(losses.CHUNK, "cpu", chunk)
    if not whole:
        if kind == "cross_entropy":
            pytest.skip("takes the whole catalogue always")
        monkeypatch.setattr(losses, "takes_whole_catalogue", lambda *_: False)
    torch.manual_seed(3)
    loss = training_loss(config(kind, temperature=0.5), out, items, targets)
    own = torch.autograd.grad(2 * loss, (out, items))
    torch.manual_seed(3)
    expected = by_hand(kind, out, items, targets, 0.5)
    gradients = torch.autograd.grad(2 * expected, (out, items))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name, a, b in zip(("out", "items"), own, gradients):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_negative_equal_to_the_positive_does_not_count():
    # One item only: every negative is the positive, and the positive alone has probability one.
    out, items = torch.ones(3, 1), torch.ones(1, 1)
    loss = training_loss(config("sampled_softmax"), out, items, torch.zeros(3, dtype=torch.long))
    assert loss.item() == 0


def test_untrained_loss_is_that_of_chance():
    out, items = F.normalize(torch.randn(200, 16), dim=-1), torch.randn(5000, 16)
    loss = training_loss(config("sampled_softmax", temperature=100.0), out, items, torch.randint(5000, (200,)))
    assert loss.item() == pytest.approx(math.log(6), rel=1e-2)


@pytest.mark.parametrize("kind", ["sampled_softmax", "in_batch", "bce", "cross_entropy"])
def test_padding_does_not_count(inputs, kind):
    out, items, targets = inputs
    rows = torch.cat([out, out[:9]])
    padded = F.pad(targets, (0, 9), value=-1)
    found = []
    for x, y in ((out, targets), (rows, padded)):
        torch.manual_seed(5)
        loss = training_loss(config(kind), x, items, y)
        found.append((loss, *torch.autograd.grad(loss, (out, items), retain_graph=True)))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b)


def test_no_position_gives_zero():
    items = torch.randn(I, E, requires_grad=True)
    loss = training_loss(config("sampled_softmax"), torch.empty(0, E), items, torch.empty(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0 and items.grad.abs().sum() == 0
