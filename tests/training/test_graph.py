"""Test that steps replayed as CUDA graphs have the same results as other steps."""

import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.batches import Batches
from data.errors import ConfigError
from data.features.vocabulary import fit_features, with_rows
from data.splits import make_splits
from data.synthetic import generate
from models.attention import ATTENTION
from models.hstu import SequenceModel
from tests.models.attention.test_contract import ToyAttention
from tests.models.test_features import FEATURES, with_made_up_features
from tests.models.test_hstu import make_batch
from training.config import RunConfig
from training.graph import GraphedStep, padded_tokens
from training.step import build_step, phase_at, set_lr

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "dense": {"block": "hstu", "attention": {"kind": "dense"}},
    "bsa": {"block": "hstu", "attention": {"kind": "bsa", "block_size": 16, "block_counts": 2, "window_size": 8}},
    "softmax": {"block": "transformer", "feed_forward_dim": 16, "attention": {"kind": "softmax"}},
    "toy": {"block": "hstu", "attention": {"kind": "toy", "warmup_steps": 12}},
}


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(ATTENTION, "toy", ToyAttention)


@pytest.fixture
def deterministic():
    # cuBLAS only warns: on a single stream its results are deterministic.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_few_sizes():
    sizes = {padded_tokens(n) for n in range(4096, 32768)}
    assert len(sizes) <= 25
    for n in (512, 513, 1000, 4095, 4096, 4097, 99999):
        assert n <= padded_tokens(n) <= 1.125 * n + 64


def run(kind, *, graphs, dropout=0.0, steps=24, loss="cross_entropy", features=False, recompute=False, autocast="none"):
    """Return (losses by name, weights, initial weights, step) of a few epochs.

    features: whether the model has features of items, users and events.

    Batches have different numbers of tokens; the last one of an epoch also has fewer sequences.
    """
    config = RunConfig.model_validate(
        {
            "name": "graph",
            "data": {"format": "synthetic", "protocol": "leave_one_out", "features": FEATURES if features else None},
            "model": {"max_seq_len": 60, "embedding_dim": 32, "num_layers": 2, "num_heads": 2, "dropout": dropout}
            | KINDS[kind],
            "loss": {"kind": loss},
            "train": {"epochs": 1, "batch_size": 32, "cuda_graphs": graphs, "warmup_steps": 5, "clip_norm": 1.0}
            | {"recompute": recompute, "autocast": autocast},
        }
    )
    dataset = generate(num_users=150, num_items=200, mean_length=40.0, max_length=80, seed=0)
    splits, known = make_splits(dataset, "published", max_seq_len=60), None
    if features:
        dataset = with_made_up_features(dataset)
        known = fit_features(dataset, splits.train_end, config.data.features)
        dataset = with_rows(dataset, known)
    torch.manual_seed(0)
    model = SequenceModel(config.model, dataset.num_items, features=known).cuda()
    model.recompute = recompute
    initial = {name: x.detach().clone() for name, x in model.named_parameters()}
    optimizer, step = build_step(config, model, torch.device("cuda"))
    batches = Batches(dataset, splits.train, batch_size=32, device="cuda")
    losses = []
    model.train()
    for number in range(steps // len(batches) + 1):
        for batch in batches.epoch(number):
            set_lr(config, optimizer, len(losses), 100)
            batch = replace(batch, phase=phase_at(config, len(losses)))
            losses.append({name: value.item() for name, value in step(batch).items()})
    losses = {name: torch.tensor([row[name] for row in losses]) for name in losses[0]}
    return losses, dict(model.named_parameters()), initial, step


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_graphed_steps_train_as_plain_ones(kind):
    losses, weights, initial, step = run(kind, graphs=True)
    expected, plain, _, _ = run(kind, graphs=False)
    assert losses.keys() == expected.keys()
    for name in losses:
        torch.testing.assert_close(losses[name], expected[name], rtol=1e-4, atol=1e-6)
    # Adam takes full steps even for entries whose gradient is only a rounding error. These are all entries of the key
    # bias in softmax, which is not compared, and some entries of the bias tables, which may differ more.
    with torch.no_grad():
        for name in weights:
            if kind == "softmax" and name.endswith("key.bias"):
                continue
            allowed = 0.1 if name.endswith(("position_bias", "time_bias")) else 0.02
            distance = (plain[name] - initial[name]).norm()
            assert distance > 0 and (weights[name] - plain[name]).norm() <= allowed * distance, name
    phases = {phase for _, phase in step.captured}
    assert phases == ({0, 12} if kind == "toy" else {0})


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ["cross_entropy", "sampled_softmax"])
def test_graphed_steps_train_features_as_plain_ones(loss):
    """With random negatives the two runs draw different ones, so that only the mean loss is compared."""
    losses, weights, initial, step = run("dense", graphs=True, features=True, loss=loss, steps=40)
    expected, _, _, _ = run("dense", graphs=False, features=True, loss=loss, steps=40)
    assert step.captured
    if loss == "cross_entropy":
        torch.testing.assert_close(losses["loss"], expected["loss"], rtol=1e-3, atol=1e-6)
    assert losses["loss"][-8:].mean() == pytest.approx(expected["loss"][-8:].mean().item(), rel=0.05)
    tables = [name for name in weights if "embedding_bags" in name]
    assert len(tables) == 6  # two of items, two of users and events, two of the calendar
    for name in tables:
        assert (weights[name] - initial[name]).norm() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["interleaved", "targets"])
def test_steps_of_ranking_are_captured(layout, tmp_path):
    changes = (f"task.layout={layout}", "train.cuda_graphs=true", "train.epochs=1", "data.synthetic.num_users=300")
    command = (sys.executable, "train.py", "configs/synthetic-ranking.yaml", *changes, "--out", str(tmp_path / "run"))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graphs", [True, False])
def test_recomputed_steps_have_the_same_bits(kind, graphs, deterministic):
    """The second forward pass has the same dropout masks, and adds up in the same order, also in bf16."""
    (losses, weights, *_), (expected, plain, *_) = (
        run(kind, graphs=graphs, dropout=0.3, steps=8, autocast="bf16", recompute=recompute)
        for recompute in (True, False)
    )
    assert all(torch.equal(losses[name], expected[name]) for name in expected)
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


@pytest.mark.gpu
def test_replays_draw_new_random_numbers():
    losses, expected = (
        run("dense", graphs=graphs, dropout=0.5, loss="sampled_softmax", steps=40)[0]["loss"]
        for graphs in (True, False)
    )
    assert len(set(losses.tolist())) == len(losses)
    assert losses[-8:].mean() == pytest.approx(expected[-8:].mean().item(), rel=0.05)


STEPS = {
    "waits": ("batch.item_ids.sum().item()", "ConfigError train.cuda_graphs: a step of this model cannot be captured"),
    "too large": ("torch.empty(2**46, device='cuda')", "OutOfMemoryError CUDA out of memory"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_the_error_of_a_failed_capture_has_its_cause(name):
    """A separate process is used, since a failed capture may leave it in any state."""
    line, expected = STEPS[name]
    script = f"""
import torch
from training.graph import GraphedStep
from tests.models.test_hstu import make_batch

calls = []
def step(batch):
    calls.append(batch)
    if len(calls) > 1:  # the first call is not captured
        {line}
    return {{"loss": batch.item_ids.float().mean()}}

graphed = GraphedStep(step, batch_size=2, longest=8)
try:
    for _ in range(2):
        graphed(make_batch([3, 4]).to("cuda"))
except Exception as error:
    print(type(error).__name__, error)
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert expected in done.stdout, done.stdout + done.stderr


@pytest.mark.gpu
def test_sizes_are_warmed_up_again_after_graphs_were_forgotten():
    """The sizes of other tensors have changed, and kernels for these cannot be compiled in a capture."""
    calls = []

    def step(batch):
        calls.append(torch.cuda.is_current_stream_capturing())
        return {"loss": batch.item_ids.float().mean()}

    graphed = GraphedStep(step, batch_size=2, longest=8)
    for _ in range(2):
        for _ in range(3):
            graphed(make_batch([3, 4]).to("cuda"))
        graphed.forget()
    assert calls == 2 * [False, True]


@pytest.mark.parametrize(
    ("message", "error_type"),
    [
        ("CUDA error: operation not permitted when stream is capturing", ConfigError),
        ("CUDA error: operation would make the legacy stream depend on a capturing blocking stream", ConfigError),
        ("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture", ConfigError),
        ("CUDA error: an illegal memory access was encountered", RuntimeError),
        ("Triton Error [CUDA]: out of resources", RuntimeError),
    ],
)
def test_only_errors_of_capturing_become_configuration_errors(monkeypatch, message, error_type):
    """After an error in a capture, its end fails as well, which must not hide the cause; simulated without a GPU."""

    @contextlib.contextmanager
    def failing_capture(*_, **__):
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def step(batch):
        raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", failing_capture)
    graphed = GraphedStep.__new__(GraphedStep)
    graphed.step, graphed.stream, graphed.pool = step, None, None
    with pytest.raises(error_type) as error:
        graphed._capture(make_batch([3]))
    assert message in str(error.value)
    assert ("cannot be captured" in str(error.value)) == (error_type is ConfigError)
