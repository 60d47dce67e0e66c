"""Test Meta's weights in our models: with random weights, outputs equal those of Meta's formulas, written here."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from data.batch import Batch
from data.errors import ConfigError
from hstu_sparse.bias.relative import time_bucket
from models.hstu import SequenceModel
from training.config import RunConfig
from training.meta_weights import ITEMS as ITEMS_TABLE
from training.meta_weights import POSITIONS, load_meta_weights, read_meta_checkpoint
from training.saved import CheckpointError

ITEMS, E, N, H = 12, 8, 6, 2
EXTENDED = N + 11  # Meta's number of positions: the sequence, ten outputs and the next item


def make_model(**model) -> SequenceModel:
    sizes = {"max_seq_len": N, "embedding_dim": E, "num_layers": 2, "num_heads": H}
    tree = {
        "name": "meta",
        "data": {"format": "ml-1m", "protocol": "published"},
        "model": sizes | model,
        "train": {"epochs": 1},
    }
    torch.manual_seed(0)
    return SequenceModel(RunConfig.model_validate(tree).model, ITEMS).eval()


def hstu() -> SequenceModel:
    return make_model(block="hstu", attention_dim=3, linear_dim=5, attention={"kind": "dense"})


def sasrec() -> SequenceModel:
    return make_model(block="transformer", feed_forward_dim=10, attention={"kind": "softmax"})


def shared(generator) -> dict:
    return {
        "_embedding_module._item_emb.weight": torch.randn(ITEMS + 5, E, generator=generator),
        "_input_features_preproc._pos_emb.weight": torch.randn(EXTENDED, E, generator=generator),
        "_attn_mask": torch.ones(EXTENDED, EXTENDED, dtype=torch.bool).triu(1),
    }


def hstu_state() -> dict:
    generator, state = torch.Generator().manual_seed(1), {}
    for place in range(2):
        prefix = f"_hstu._attention_layers.{place}."
        for name, shape in (
            ("_uvqk", (E, 2 * H * 5 + 2 * H * 3)),
            ("_o.weight", (E, H * 5)),
            ("_o.bias", (E,)),
            ("_rel_attn_bias._ts_w", (129,)),
            ("_rel_attn_bias._pos_w", (2 * EXTENDED - 1,)),
        ):
            state[prefix + name] = torch.randn(shape, generator=generator)
    return state | shared(generator)


def sasrec_state() -> dict:
    generator, state = torch.Generator().manual_seed(1), {}
    for place in range(2):
        for name, shape in (
            ("attention_layers.{}.in_proj_weight", (3 * E, E)),
            ("attention_layers.{}.in_proj_bias", (3 * E,)),
            ("attention_layers.{}.out_proj.weight", (E, E)),
            ("attention_layers.{}.out_proj.bias", (E,)),
            ("forward_layers.{}._conv1d.0.weight", (10, E, 1)),
            ("forward_layers.{}._conv1d.0.bias", (10,)),
            ("forward_layers.{}._conv1d.3.weight", (E, 10, 1)),
            ("forward_layers.{}._conv1d.3.bias", (E,)),
        ):
            state[name.format(place)] = torch.randn(shape, generator=generator)
    return state | shared(generator)


def inputs(state, ids):
    return (
        state["_embedding_module._item_emb.weight"][ids] * math.sqrt(E)
        + state["_input_features_preproc._pos_emb.weight"][: len(ids)]
    )


def hstu_by_hand(state, ids, times, at):
    """Compute Meta's HSTU for one sequence, pair of tokens by pair of tokens."""
    x, following = inputs(state, ids), [*times[1:], at]
    for place in range(2):
        w = {name.split(f"layers.{place}.")[1]: value for name, value in state.items() if f"layers.{place}." in name}
        u, v, q, k = F.silu(F.layer_norm(x, (E,), eps=1e-6) @ w["_uvqk"]).split([H * 5, H * 5, H * 3, H * 3], 1)
        out = torch.zeros(len(ids), H, 5)
        for t in range(len(ids)):
            for s in range(t + 1):
                bucket = min(int(math.log(max(abs(following[t] - times[s]), 1)) / 0.301), 128)
                bias = w["_rel_attn_bias._ts_w"][bucket] + w["_rel_attn_bias._pos_w"][EXTENDED - 1 + s - t]
                for head in range(H):
                    score = q[t, head * 3 : head * 3 + 3] @ k[s, head * 3 : head * 3 + 3] + bias
                    out[t, head] += F.silu(score) / EXTENDED * v[s, head * 5 : head * 5 + 5]
        gated = u * F.layer_norm(out.flatten(1), (H * 5,), eps=1e-6)
        x = gated @ w["_o.weight"].T + w["_o.bias"] + x
    return F.normalize(x, dim=-1)


def sasrec_by_hand(state, ids, times, at):
    """Compute Meta's SASRec for one sequence with modules of torch."""
    x = inputs(state, ids)
    for place in range(2):
        attention = nn.MultiheadAttention(E, H, batch_first=True)
        forward = nn.ModuleDict({"_conv1d": nn.Sequential(
            nn.Conv1d(E, 10, 1), nn.ReLU(), nn.Identity(), nn.Conv1d(10, E, 1)
        )})  # fmt: skip
        for kind, module in (("attention", attention), ("forward", forward)):
            prefix = f"{kind}_layers.{place}."
            module.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
        queries = F.layer_norm(x, (E,), eps=1e-8)
        mask = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
        y = F.layer_norm(queries + attention(queries[None], x[None], x[None], attn_mask=mask)[0][0], (E,), eps=1e-8)
        x = forward["_conv1d"](y.T[None])[0].T + y
    return F.normalize(x, dim=-1)


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize(
    ("build", "draw", "by_hand"), [(hstu, hstu_state, hstu_by_hand), (sasrec, sasrec_state, sasrec_by_hand)]
)
def test_outputs_are_those_of_metas_formulas(tmp_path, build, draw, by_hand, prefix):
    model, state = build(), draw()
    named = {prefix + name: value for name, value in state.items()}
    torch.save({"epoch": 3, "model_state_dict": named}, tmp_path / "x")
    ids = np.random.default_rng(0).permutation(np.arange(1, ITEMS + 5))[:ITEMS]
    load_meta_weights(model, read_meta_checkpoint(tmp_path / "x"), ids)
    rows, times, at = torch.tensor([3, 0, 7, 7, 11]), [5, 90, 91, 4000, 900_000], 10**6
    following = torch.tensor([*times[1:], at])
    batch = Batch(rows, torch.tensor(times), torch.full((5,), -1), following, torch.tensor([0, 5]), torch.zeros(1))
    with torch.no_grad():
        out, _ = model(batch)
        expected = by_hand(state, torch.from_numpy(ids)[rows], times, at)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)
    assert torch.equal(model.item_table, state["_embedding_module._item_emb.weight"][ids])


def test_time_buckets_differ_only_just_below_an_edge():
    edges = torch.tensor([math.exp(0.301 * k) for k in range(1, 100)], dtype=torch.float64)
    seconds = (edges[:, None] * (1 + torch.linspace(-1e-5, 1e-5, 201, dtype=torch.float64))).round().long().flatten()
    seconds = seconds[seconds < 2**24]
    theirs = (torch.log(seconds.clamp(min=1)) / 0.301).long().clamp(0, 128)
    differ = theirs != time_bucket(seconds, 128)
    below = edges[theirs[differ] - 1] / seconds[differ] - 1
    assert differ.any() and seconds[differ].min() == 417_901
    assert below.min() > 0 and below.max() < 2e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({POSITIONS: None}, f"no {POSITIONS}"),
        ({"_ndp_module.w": torch.zeros(1)}, "the model has no place for _ndp_module.w"),
        ({"_hstu._attention_layers.1._uvqk": torch.zeros(E, 3)}, r"expected \[8, 32\], got \[8, 3\]"),
        ({ITEMS_TABLE: torch.zeros(ITEMS, E)}, "item_ids: expected 12 ids from 1 to 11, got 12 from 1 to 12"),
        ({POSITIONS: torch.zeros(3, E)}, "expected 6 positions .* got 3"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(change, message):
    model, state = hstu(), hstu_state()
    before = model.embedding.position.clone()
    state = {name: value for name, value in (state | change).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        load_meta_weights(model, state)
    assert torch.equal(model.embedding.position, before)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "x").write_text("text")
    torch.save([1], tmp_path / "y")
    for name in "xy":
        with pytest.raises(CheckpointError):
            read_meta_checkpoint(tmp_path / name)
