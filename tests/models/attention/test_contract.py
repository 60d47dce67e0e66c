"""Check that a new attention kind, a class and an entry in ATTENTION, trains, logs, resumes and is evaluated."""

import itertools
import json
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from pydantic import Field
from torch import nn

import eval as evaluation
import train
from cli import program
from cli.interrupt import Interrupts
from data.errors import ConfigError
from models.attention import ATTENTION
from models.attention.contract import AttentionKind, AuxLoss
from models.hstu import SequenceModel
from models.options import ModelConfig
from models.tasks.retrieval import Retrieval
from tests.models.test_hstu import CONFIG, make_batch
from training.config import load_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
PHASES = []  # batch.phase of every call of a layer


class ToyAttention(AttentionKind):
    """Every token attends to itself with one key/value head; after a warm-up, a gate of the layer's input is added."""

    class Config(AttentionKind.Config):
        kind: Literal["toy"]
        weight: float = Field(0.5, ge=0)
        warmup_steps: int = Field(20, ge=0)

        def check_model(self, sizes):
            if sizes.num_heads % 2:
                raise ValueError(f"kind=toy needs an even number of heads, got model.num_heads={sizes.num_heads}")

        def check_data(self, dataset):
            if dataset.num_items > 10**6:
                raise ValueError(f"kind=toy takes a million items, {dataset.name} has {dataset.num_items:,}")

        def phase_ends(self):
            return (self.warmup_steps,)

    def __init__(self, config, sizes):
        super().__init__(config, sizes)
        self.gate = nn.Linear(sizes.embedding_dim, sizes.num_heads)

    @classmethod
    def kv_heads(cls, config, num_heads):
        return 1

    def forward(self, x, q, k, v, batch):
        PHASES.append(batch.phase)
        out = (q * k).sum(-1, keepdim=True) * v
        gate = self.gate(x)
        if batch.phase >= self.config.warmup_steps:
            out = out * gate.sigmoid()[..., None]
        squares = torch.where(batch.real, gate.square().mean(1), 0)
        return out, {"gate_size": AuxLoss.of(squares.sum() / batch.real.sum().clamp(min=1), self.config.weight)}


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(ATTENTION, "toy", ToyAttention)
    PHASES.clear()


def make_model(block="hstu", **options):
    torch.manual_seed(0)
    feed_forward = {"feed_forward_dim": 8} if block == "transformer" else {}
    config = CONFIG | {"block": block, "attention": {"kind": "toy", **options}} | feed_forward
    return SequenceModel(ModelConfig.model_validate(config), 40)


@pytest.mark.parametrize("block", ["hstu", "transformer"])
def test_both_blocks_follow_the_number_of_key_heads(block):
    model, batch = make_model(block), make_batch([5, 1, 12])
    out, _ = model(batch)
    assert out.shape == (18, 8)
    layer = model.layers[0]
    if block == "hstu":
        assert layer.uvqk.shape == (8, 2 * 5 + 1 * 5 + 2 * 3 + 1 * 3)
    else:
        assert (layer.query.out_features, layer.key.out_features, layer.value.out_features) == (2 * 3, 3, 5)
        assert layer.output.in_features == 2 * 5


def test_auxiliary_losses_are_weighted_and_summed_over_layers():
    model, batch = make_model(weight=0.25), make_batch([5, 1, 12])
    _, aux = model(batch)
    x, total = model.embedding(batch), 0
    for layer in model.layers:
        gate = layer.attention.gate(torch.nn.functional.layer_norm(x, x.shape[1:], eps=1e-6))
        total += gate.square().mean()
        x, _ = layer(x, batch)
    torch.testing.assert_close(aux["gate_size"].value, total)
    torch.testing.assert_close(aux["gate_size"].weighted, 0.25 * total)


def test_padding_counts_in_no_auxiliary_loss():
    model, batch = make_model(), make_batch([5, 0, 12, 3])
    (_, aux), (_, padded) = model(batch), model(batch.padded(51, 9, 12))
    torch.testing.assert_close(padded["gate_size"], aux["gate_size"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.attention={kind: toy, weigt: 1.0}", "model.attention.weigt: unknown key, did you mean weight?"),
        ("model.attention=[{kind: dense}, {kind: toy, weight: -1.0}]", "model.attention.1.weight: input should be gre"),
        ("model.num_heads=1", "model.attention.kind=toy needs an even number of heads, got model.num_heads=1"),
    ],
)
def test_errors_in_its_options_have_their_path(override, message):
    with pytest.raises(ConfigError) as error:
        load_config(CONFIGS / "synthetic-hstu.yaml", ["model.attention.kind=toy", override])
    assert message in str(error.value)


def test_it_trains_logs_resumes_and_evaluates(tmp_path, monkeypatch):
    settings = ["data.synthetic={num_users: 200, num_items: 80, mean_length: 15}", "model.attention.kind=toy"]
    settings += ["model.attention.weight=2.0", "model.max_seq_len=20", "model.embedding_dim=16", "train.epochs=4"]
    settings += ["train.batch_size=16", "device=cpu", "threads=1", "train.checkpoint_seconds=1000"]
    arguments = [str(CONFIGS / "synthetic-hstu.yaml"), *settings, "--run", str(tmp_path / "run")]
    assert train.main(arguments) == 0
    history = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    sizes = [line["gate_size"] for line in history]
    # The weighted loss decreases.
    assert len(sizes) == 4 and 0 < sizes[-1] < 0.5 * sizes[0]
    assert load_config(tmp_path / "run" / "config.yaml").model.attention[0].weight == 2.0
    # 13 steps an epoch, 2 layers: training and the evaluation after the first epoch in the warm-up, then past it.
    assert [phase for phase, _ in itertools.groupby(PHASES)] == [0, 20, sys.maxsize]
    assert PHASES.index(20) == 2 * (20 + 1)
    assert evaluation.main([str(tmp_path / "run")]) == 0 and PHASES[-1] == sys.maxsize

    # A run that is stopped within an epoch (and the warm-up) and resumed has the same result.
    class StopAt(Interrupts):
        signal = property(lambda self: 15 if len(PHASES) == 2 * 6 else 0, lambda self, value: None)

    PHASES.clear()
    arguments[-1] = str(tmp_path / "other")
    with monkeypatch.context() as patch:
        patch.setattr(program, "Interrupts", StopAt)
        assert train.main(arguments) == 128 + 15
    assert train.main(["--resume", str(tmp_path / "other")]) == 0
    again = [json.loads(line) for line in (tmp_path / "other" / "metrics.jsonl").read_text().splitlines()]
    assert [line | {"seconds": 0} for line in again] == [line | {"seconds": 0} for line in history]


@pytest.mark.parametrize(("epochs", "weights", "epoch"), [(4, "best", 3), (1, "step-00000013", 1)])
def test_nothing_is_chosen_before_the_last_phase(tmp_path, monkeypatch, epochs, weights, epoch):
    """The best metric in the warm-up is ignored; the best one after it is in the third epoch."""
    figures = iter([0.9, 0.3, 0.5, 0.4])
    whole = Retrieval.evaluate
    monkeypatch.setattr(Retrieval, "evaluate", lambda *arguments: whole(*arguments) | {"NDCG@10": next(figures)})
    settings = ["data.synthetic={num_users: 200, num_items: 80, mean_length: 15}", "model.attention.kind=toy"]
    settings += ["model.max_seq_len=20", "model.embedding_dim=16", f"train.epochs={epochs}", "train.batch_size=16"]
    settings += ["device=cpu", "threads=1", "eval.patience=2"]
    assert train.main([str(CONFIGS / "synthetic-hstu.yaml"), *settings, "--run", str(tmp_path / "run")]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["weights"], result["epoch"]) == (weights, epoch)
