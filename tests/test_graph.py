"""Steps replayed as CUDA graphs train as steps that are not."""

import pytest
import torch

import train
from data.batches import Batches
from data.splits import make_splits
from data.synthetic import generate
from models.config import RunConfig
from models.graph import padded_tokens
from models.hstu import SequenceModel

KINDS = {
    "dense": {"block": "hstu", "attention": {"kind": "dense"}},
    "bsa": {"block": "hstu", "attention": {"kind": "bsa", "block_size": 16, "block_counts": 2, "window_size": 8}},
    "softmax": {"block": "transformer", "feed_forward_dim": 16, "attention": {"kind": "softmax"}},
}


def test_few_sizes():
    sizes = {padded_tokens(n) for n in range(4096, 32768)}
    assert len(sizes) <= 25
    for n in (512, 513, 1000, 4095, 4096, 4097, 99999):
        assert n <= padded_tokens(n) <= 1.125 * n + 64


def run(kind, *, graphs, dropout=0.0, steps=24, loss="cross_entropy"):
    """(losses, weights) of a few epochs; the batches differ in their number of tokens and, at the end, of sequences."""
    config = RunConfig.model_validate(
        {
            "name": "graph",
            "data": {"format": "synthetic", "protocol": "leave_one_out"},
            "model": {"max_seq_len": 60, "embedding_dim": 32, "num_layers": 2, "num_heads": 2, "dropout": dropout}
            | KINDS[kind],
            "loss": {"kind": loss},
            "train": {"epochs": 1, "batch_size": 32, "cuda_graphs": graphs, "warmup_steps": 5, "clip_norm": 1.0},
        }
    )
    dataset = generate(num_users=150, num_items=200, mean_length=40.0, max_length=80, seed=0)
    torch.manual_seed(0)
    model = SequenceModel(config.model, dataset.num_items).cuda()
    optimizer, step = train.build_step(config, model, torch.device("cuda"))
    batches = Batches(dataset, make_splits(dataset, "published", max_seq_len=60).train, batch_size=32, device="cuda")
    losses = []
    model.train()
    for number in range(steps // len(batches) + 1):
        for batch in batches.epoch(number):
            train.set_lr(config, optimizer, len(losses))
            losses.append(step(batch).item())
    if graphs:
        assert step.captured
    return torch.tensor(losses), {name: x.detach().clone() for name, x in model.named_parameters()}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_graphed_steps_train_as_plain_ones(kind):
    losses, weights = run(kind, graphs=True)
    expected, plain = run(kind, graphs=False)
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=2e-3)
    for name in weights:
        assert (weights[name] - plain[name]).norm() <= 0.05 * plain[name].norm() + 1e-3, name


@pytest.mark.gpu
def test_replays_draw_new_numbers():
    losses, _ = run("dense", graphs=True, dropout=0.5, loss="sampled_softmax", steps=40)
    expected, _ = run("dense", graphs=False, dropout=0.5, loss="sampled_softmax", steps=40)
    assert len(set(losses.tolist())) == len(losses)
    assert losses[-8:].mean() == pytest.approx(expected[-8:].mean().item(), rel=0.05)
