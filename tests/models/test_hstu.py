"""Check the HSTU and transformer models against padded implementations, their causality and their padding."""

import dataclasses
import math
import re

import pytest
import torch
from torch.nn import functional as F

from data.batch import Batch
from models.attention.bsa import warn_if_too_short
from models.embedding import InputEmbedding
from models.hstu import SequenceModel
from models.options import ModelConfig

NUM_ITEMS = 40
CONFIG = {
    "block": "hstu",
    "max_seq_len": 12,
    "embedding_dim": 8,
    "num_layers": 2,
    "num_heads": 2,
    "attention_dim": 3,
    "linear_dim": 5,
}
KINDS = {
    "dense": CONFIG | {"attention": {"kind": "dense"}},
    "dense with rotary and SwiGLU": CONFIG
    | {
        "attention": {"kind": "dense", "position_bias": False, "time_bias": False},
        "rotary": {"position": True, "time": True},
        "feed_forward_dim": 6,
    },
    "bsa": CONFIG | {"attention": {"kind": "bsa", "block_size": 2, "block_counts": 2, "window_size": 3}},
    "htree": CONFIG
    | {
        "attention": {"kind": "htree", "compression_rate": 2, "top_k": 1, "num_kv_heads": 1},
        "attention_dim": 4,
        "rotary": {"time": True},
    },
    "softmax with biases": CONFIG
    | {"attention": {"kind": "softmax", "position_bias": True, "time_bias": True, "num_kv_heads": 1}},
    "indexer": CONFIG | {"attention": {"kind": "indexer", "top_k": 3, "num_index_heads": 2, "index_dim": 5}},
    "softmax": CONFIG | {"block": "transformer", "feed_forward_dim": 8, "attention": {"kind": "softmax"}},
    "pre_norm": CONFIG | {"block": "pre_norm", "feed_forward_dim": 8, "attention": {"kind": "softmax"}},
}


def make_embedding(num_items, table=None, **options):
    return InputEmbedding(ModelConfig.model_validate(KINDS["dense"] | options), num_items, table=table)


def make_batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    events = [torch.randint(10**6, (n + 1,), generator=generator).cumsum(0) for n in lengths]
    return Batch(
        item_ids=torch.randint(NUM_ITEMS, (total,), generator=generator),
        timestamps=torch.cat([times[:-1] for times in events]),
        target_ids=torch.randint(NUM_ITEMS, (total,), generator=generator),
        query_timestamps=torch.cat([times[1:] for times in events]),
        seq_offsets=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        users=torch.arange(len(lengths)),
    )


def make_model(kind, **changes):
    torch.manual_seed(0)
    return SequenceModel(ModelConfig.model_validate(KINDS[kind] | changes), NUM_ITEMS).double().eval()


def run_layers(model, x, batch):
    for layer in model.layers:
        x, _ = layer(x, batch)
    return x


def padded_layers(model, x, batch, heads, normalizer):
    """Compute HSTU layers on x [T, E], one sequence and one pair of positions at a time, as in the paper."""
    outputs = []
    for begin, end in zip(batch.seq_offsets[:-1], batch.seq_offsets[1:]):
        n, row = int(end - begin), x[begin:end]
        times, query_times = batch.timestamps[begin:end], batch.query_timestamps[begin:end]
        for layer in model.layers:
            bias = torch.zeros(n, n, dtype=x.dtype)
            for t in range(n):
                for s in range(t + 1):
                    gap = max(abs(int(query_times[t] - times[s])), 1)
                    bucket = min(int(math.log(gap) / 0.301), 128)
                    bias[t, s] = layer.attention.position_bias[t - s] + layer.attention.time_bias[bucket]
            u, v, q, k = F.silu(F.layer_norm(row, row.shape[1:], eps=1e-6) @ layer.uvqk).split(layer.sizes, dim=1)
            q, k, v = (part.view(n, heads, -1).transpose(0, 1) for part in (q, k, v))
            weights = F.silu(q @ k.transpose(1, 2) + bias) * torch.ones(n, n, dtype=x.dtype).tril() / normalizer
            attended = (weights @ v).transpose(0, 1).reshape(n, -1)
            row = row + layer.output(F.layer_norm(attended, attended.shape[1:], eps=1e-6) * u)
        outputs.append(row)
    return torch.cat(outputs)


def test_hstu_layers_equal_padded_implementation():
    model, batch = make_model("dense"), make_batch([5, 1, 12, 7])
    x = torch.randn(25, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weight = torch.randn(25, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    parameters = dict(model.layers.named_parameters()) | {"x": x}
    actual = run_layers(model, x, batch)
    expected = padded_layers(model, x, batch, heads=2, normalizer=12 + 11)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    gradients = [torch.autograd.grad((y * weight).sum(), parameters.values()) for y in (actual, expected)]
    for name, a, b in zip(parameters, *gradients):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", ["dense", "softmax"])
def test_rotary_depends_on_differences_of_times_only(kind):
    changes = {"position_bias": False, "time_bias": False} if kind == "dense" else {}
    attention = KINDS[kind]["attention"] | changes
    model = make_model(kind, attention=attention, rotary={"position": False, "time": True})
    blind = make_model(kind, attention=attention)
    batch = make_batch([9, 6])
    later = dataclasses.replace(
        batch, timestamps=batch.timestamps + 10**9, query_timestamps=batch.query_timestamps + 10**9
    )
    # A later query of the last token may change only its output.
    query_times = batch.query_timestamps.clone()
    query_times[8] += 10**6
    x = torch.randn(15, 8, generator=torch.Generator().manual_seed(1)).double()
    out = run_layers(model, x, batch)
    torch.testing.assert_close(run_layers(model, x, later), out, rtol=0, atol=1e-12)
    changed = run_layers(model, x, dataclasses.replace(batch, query_timestamps=query_times))
    different = (changed != out).any(1)
    assert different.tolist() == [t == 8 for t in range(15)]
    assert not torch.allclose(run_layers(blind, x, batch), out, atol=1e-4)


def test_swiglu_after_an_hstu_layer():
    model, batch = make_model("dense", feed_forward_dim=6), make_batch([5])
    x, layer = torch.randn(5, 8).double(), model.layers[0]
    added = layer.feed_forward
    layer.feed_forward = None
    y, _ = layer(x, batch)
    layer.feed_forward = added
    gate, value = added.expand(F.layer_norm(y, (8,), eps=1e-6)).split(6, dim=1)
    expected = y + (gate * torch.sigmoid(gate) * value) @ added.contract.weight.T + added.contract.bias
    torch.testing.assert_close(layer(x, batch)[0], expected)


def test_model_is_embedding_layers_and_normalisation():
    model, batch = make_model("dense"), make_batch([5, 1, 12])
    positions = torch.cat([torch.arange(n) for n in (5, 1, 12)])
    x = model.item_weight[batch.item_ids] * 8**0.5 + model.embedding.position[positions]
    expected = F.normalize(run_layers(model, x, batch), dim=-1)
    torch.testing.assert_close(model(batch)[0].double(), expected, rtol=0, atol=1e-6)  # torchrec looks up in fp32


def test_transformer_equals_torch_attention():
    model, batch = make_model("softmax"), make_batch([4, 9])
    out, _ = model(batch)
    for begin, end in ((0, 4), (4, 13)):
        n = end - begin
        x = model.item_weight[batch.item_ids[begin:end]] * 8**0.5 + model.embedding.position[:n]
        for layer in model.layers:
            normed = layer.attention_norm(x)
            q, k, v = (
                linear(source).view(n, 2, -1).transpose(0, 1)
                for linear, source in ((layer.query, normed), (layer.key, x), (layer.value, x))
            )
            logits = q @ k.transpose(1, 2) / 3**0.5 + torch.full((n, n), float("-inf")).triu(1)
            attended = (logits.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
            x = layer.feed_forward_norm(normed + layer.output(attended))
            x = x + layer.contract(F.relu(layer.expand(x)))
        torch.testing.assert_close(out[begin:end].double(), F.normalize(x, dim=-1), rtol=0, atol=1e-6)


def test_pre_norm_equals_torch_attention():
    model, batch = make_model("pre_norm", num_layers=1), make_batch([4, 9])
    x, layer = torch.randn(13, 8).double(), model.layers[0]
    actual, _ = layer(x, batch)
    for begin, end in ((0, 4), (4, 13)):
        normed = F.layer_norm(x[begin:end], (8,), eps=1e-6)
        q, k, v = (y(normed).unflatten(1, (2, -1)).transpose(0, 1)[None] for y in (layer.query, layer.key, layer.value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1)
        expected = layer.feed_forward(x[begin:end] + layer.output(attended))
        torch.testing.assert_close(actual[begin:end], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_after_t_reaches_t(kind):
    """Change every event after t except the time of event t + 1, which is the time of the query."""
    model, batch = make_model(kind), make_batch([9, 6])
    before, _ = model(batch)
    for t in (0, 4, 7):
        changed = dataclasses.replace(
            batch,
            item_ids=batch.item_ids.clone(),
            timestamps=batch.timestamps.clone(),
            query_timestamps=batch.query_timestamps.clone(),
        )
        changed.item_ids[t + 1 : 9] = (changed.item_ids[t + 1 : 9] + 7) % NUM_ITEMS
        changed.timestamps[t + 2 : 9] += 12345
        changed.query_timestamps[t + 1 : 9] += 12345
        after, _ = model(changed)
        torch.testing.assert_close(after[: t + 1], before[: t + 1], rtol=0, atol=0)
        torch.testing.assert_close(after[9:], before[9:], rtol=0, atol=1e-6)  # nor the other sequence
        if t < 8:
            assert not torch.allclose(after[t + 1 : 9], before[t + 1 : 9], atol=1e-4)


def test_targets_do_not_reach_the_output():
    model, batch = make_model("dense"), make_batch([9])
    before, _ = model(batch)
    after, _ = model(dataclasses.replace(batch, target_ids=batch.target_ids.roll(1)))
    assert torch.equal(before, after)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize(
    ("attention", "changes", "passes"),
    [
        ({"kind": "dense"}, ({"window_size": 2}, {"num_time_buckets": 30}), 2),
        ({"kind": "bsa", "block_size": 16}, ({"block_size": 32}, {"num_time_buckets": 30}), 1),
    ],
    ids=["dense", "bsa"],
)
def test_layers_share_the_plans_that_fit_them(attention, changes, passes, monkeypatch):
    """Four layers with three different values of options that plans depend on make three plans in every pass."""
    pytest.importorskip("triton")
    keys, once = [], Batch.once
    monkeypatch.setattr(Batch, "once", lambda self, key, make: once(self, key, lambda: keys.append(key) or make()))
    layers = [attention | {"backend": "triton", "num_time_buckets": 16} | change for change in ({}, *changes, {})]
    torch.manual_seed(0)
    model = SequenceModel(ModelConfig.model_validate(CONFIG | {"num_layers": 4, "attention": layers}), NUM_ITEMS)
    batch = make_batch([5])
    for _ in range(passes):  # plans are not kept for the next pass
        keys.clear()
        actual, _ = model.raw_output(batch)
        assert len(keys) == 3
    for layer in model.layers:
        layer.attention.config = layer.attention.config.model_copy(update={"backend": "reference"})
    torch.testing.assert_close(actual, model.raw_output(batch)[0], rtol=1e-4, atol=1e-5)


INDEXER = ("index_query.weight", "index_key.weight", "index_weight.weight", "tables.position", "tables.time")
# A softmax over one key does not depend on the query, and no softmax depends on a term that all keys have.
FLAT = {
    ("softmax", "[1]"): ("query.weight", "query.bias", "key.weight", "key.bias"),
    ("softmax", "[3, 12, 1]"): ("key.bias",),
    ("pre_norm", "[1]"): ("query.weight", "key.weight"),
    ("softmax with biases", "[1]"): ("position_bias", "time_bias"),
    ("indexer", "[1]"): ("position_bias", "time_bias", *INDEXER),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[1], [3, 12, 1]], ids=str)
def test_batches_of_any_shape_reach_every_parameter(kind, lengths):
    model, batch = make_model(kind).train(), make_batch(lengths)
    out, aux = model(batch)
    assert out.shape == (sum(lengths), 8) and set(aux) == ({"indexer_loss"} if kind == "indexer" else set())
    loss = (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum()
    sum((part.weighted for part in aux.values()), loss).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert (parameter.grad.abs().max() > 1e-9) != name.endswith(FLAT.get((kind, str(lengths)), ())), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequences", [0, 2])
def test_batches_without_tokens_train(kind, sequences):
    none = torch.zeros(0, dtype=torch.long)
    offsets, users = torch.zeros(sequences + 1, dtype=torch.long), torch.arange(sequences)
    model = make_model(kind).train()
    out, _ = model(Batch(none, none, none, none, offsets, users))
    assert out.shape == (0, 8)
    out.sum().backward()
    assert model.item_weight.grad.abs().sum() == 0


@pytest.mark.parametrize(
    ("group", "biased", "length", "expected"),
    [
        (1, False, 7456, "about 7,457 on an H200.* dense attention is faster"),
        (4, False, 200, "about 6,900"),
        (64, False, 2710, None),
        (64, True, 2710, "about 2,901.* both biases.* dense attention is faster"),
        (2, True, 200, "about 9,908"),
        (2, True, 16384, None),
    ],
)
def test_bsa_warns_where_dense_is_faster(group, biased, length, expected, monkeypatch):
    """Check the warning, which has measured lengths only if there is a GPU."""
    warnings = []
    monkeypatch.setattr("models.attention.bsa.log.warning", lambda text, *values: warnings.append(text % values))
    for gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        warn_if_too_short.cache_clear()
        for _layer in range(2):
            warn_if_too_short(length, group, biased)
    assert len(warnings) == 2 * (expected is not None)
    if warnings:
        assert (
            re.search(expected, warnings[0])
            and "H200" not in warnings[1]
            and "dense attention is faster" in warnings[1]
        )


@pytest.mark.parametrize("tables", [(False, False), (True, False), (False, True)], ids=str)
def test_bsa_warns_by_the_crossover_of_its_biases(tables, monkeypatch):
    calls = []
    monkeypatch.setattr("models.attention.bsa.warn_if_too_short", lambda *arguments: calls.append(arguments))
    attention = KINDS["bsa"]["attention"] | dict(zip(("position_bias", "time_bias"), tables))
    make_model("bsa", num_layers=1, attention=attention)
    assert calls == [(CONFIG["max_seq_len"], 1, any(tables))]


def test_layers_of_different_kinds_mix():
    attention = [KINDS["bsa"]["attention"], {"kind": "dense", "window_size": 4}]
    model, batch = make_model("dense", attention=attention), make_batch([8, 3])
    assert [layer.attention.config.kind for layer in model.layers] == ["bsa", "dense"]
    out, _ = model(batch)
    assert torch.allclose(out.norm(dim=-1), torch.ones(11), atol=1e-5)


def test_action_embedding_changes_the_output():
    torch.manual_seed(0)
    config = ModelConfig.model_validate(KINDS["dense"] | {"action_embedding": True})
    model, batch = SequenceModel(config, NUM_ITEMS, num_actions=3).eval(), make_batch([6])
    batch.actions = torch.tensor([0, 1, 2, 0, 1, 2])
    before, _ = model(batch)
    after, _ = model(dataclasses.replace(batch, actions=batch.actions.flip(0)))
    assert not torch.allclose(before, after)
    assert model.embedding.tables.embeddings["action"].weight.shape == (3, 8)


def test_input_dropout():
    """Check the input's dropout without that of layers, and the reverse."""
    batch = make_batch([5, 3])
    for options, inputs, layers in (
        ({"dropout": 0.5}, 0.5, 0.5),
        ({"dropout": 0.5, "input_dropout": 0.0}, 0.0, 0.5),
        ({"dropout": 0.0, "input_dropout": 0.25}, 0.25, 0.0),
    ):
        model = make_model("dense", **options)
        assert (model.embedding.dropout, model.layers[0].dropout) == (inputs, layers)
        zeros = (model.train().embedding(batch) == 0).float().mean().item()
        assert abs(zeros - inputs) < 0.15 and (zeros > 0) == (inputs > 0)


def test_initialisation_is_the_published_one():
    torch.manual_seed(0)
    config = CONFIG | {"embedding_dim": 64, "max_seq_len": 200, "attention": {"kind": "dense"}}
    model = SequenceModel(ModelConfig.model_validate(config), 5000)
    spread = {name: p.std().item() for name, p in model.named_parameters()}
    assert spread["embedding.tables.embeddings.item.weight"] == pytest.approx(0.88 * 0.02, rel=0.03)
    assert model.item_weight.abs().max() <= 0.04
    assert spread["embedding.position"] == pytest.approx(0.88 * 64**-0.5, rel=0.05)
    assert spread["layers.0.uvqk"] == pytest.approx(0.02, rel=0.1)
    assert spread["layers.0.attention.position_bias"] == pytest.approx(0.02, rel=0.2)
    bound = (6 / (10 + 64)) ** 0.5
    assert model.layers[0].output.weight.abs().max() <= bound
    assert spread["layers.0.output.weight"] == pytest.approx(bound / 3**0.5, rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_real_position(kind):
    model, batch = make_model(kind), make_batch([5, 0, 12, 3])
    padded = batch.padded(51, 9, 12)
    assert padded.seq_offsets.tolist() == [0, 5, 5, 17, 20, 32, 44, 51, 51, 51]
    assert padded.target_ids[20:].unique().tolist() == [-1] and padded.num_sequences == 9
    assert padded.real.tolist() == 20 * [True] + 31 * [False]
    torch.testing.assert_close(model(padded)[0][:20], model(batch)[0])
    with pytest.raises(ValueError, match="cannot pad 20 tokens in 4 sequences to 51 in 6"):
        batch.padded(51, 6, 12)


@pytest.mark.parametrize("actions", [False, True])
def test_a_padded_batch_is_overwritten_as_another_would_be_padded(actions):
    torch.manual_seed(0)
    first, second = make_batch([7, 0, 12]), make_batch([3, 12, 1, 6])
    if actions:
        first.actions, second.actions = (torch.arange(batch.num_tokens) for batch in (first, second))
    second.phase = 5
    for tokens, sequences in ((40, 7), (22, 4)):
        padded, expected = first.padded(40, 7, 12), second.padded(tokens, sequences, 12)
        if tokens == 22:
            padded = expected._map(torch.zeros_like)
        padded.overwrite(second, 12)
        assert padded.phase == 5
        for name, x in vars(expected).items():
            if isinstance(x, torch.Tensor):
                assert torch.equal(getattr(padded, name), x), name


def test_softmax_with_biases_and_a_shared_key_head_by_hand():
    model, batch = make_model("softmax with biases"), make_batch([5, 3])
    attention, generator = model.layers[0].attention, torch.Generator().manual_seed(3)
    q = torch.randn(8, 2, 4, generator=generator).double()
    k, v = (torch.randn(8, 1, 4, generator=generator).double() for _ in range(2))
    out, aux = attention(q.flatten(1), q, k, v, batch)
    assert not aux
    for begin, end in ((0, 5), (5, 8)):
        for t in range(begin, end):
            for head in range(2):
                scores = []
                for s in range(begin, t + 1):
                    gap = max(abs(int(batch.query_timestamps[t] - batch.timestamps[s])), 1)
                    bias = attention.position_bias[t - s] + attention.time_bias[min(int(math.log(gap) / 0.301), 128)]
                    scores.append(q[t, head] @ k[s, 0] / 2 + bias)
                expected = torch.stack(scores).softmax(0) @ v[begin : t + 1, 0]
                torch.testing.assert_close(out[t, head], expected)


@pytest.mark.parametrize("block", ["hstu", "pre_norm", "transformer"])
def test_a_residual_in_bf16(block):
    """In training under autocast the sum that layers add to is rounded, and gradients are near those without rounding.

    Evaluation does not change.
    """
    config = KINDS["softmax"] | {"block": block, "feed_forward_dim": 12, "dropout": 0.0}
    batch, results = make_batch([5, 1, 12]), []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        model = SequenceModel(ModelConfig.model_validate(config), NUM_ITEMS)
        model.residual_dtype = dtype
        with torch.autocast("cpu", torch.bfloat16):
            evaluated = model.eval()(batch)[0]
            out = model.train().raw_output(batch)[0]
        assert out.dtype == (dtype or torch.float32)
        out.float().square().sum().backward()
        results.append((evaluated, out.float(), model.item_weight.grad))
    assert torch.equal(results[0][0], results[1][0])
    for a, b in list(zip(*results))[1:]:
        assert 0 < (a - b).norm() < 0.03 * a.norm()
