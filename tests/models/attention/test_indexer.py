"""Check the attention kind `indexer`: its loss and gradients, its warm-up, its configuration, and its training."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from data.batch import Whole
from hstu_sparse import indexer_loss, lightning_indexer, sparse_attention
from models.attention import ATTENTION, IndexerAttention
from models.attention.contract import LayerSizes
from tests.models.test_hstu import CONFIG, make_batch


def make_layer(**options):
    torch.manual_seed(0)
    config = IndexerAttention.Config(kind="indexer", index_dim=8, num_index_heads=2, **options)
    return IndexerAttention(config, LayerSizes(2, 6, 5, 16, 40)).train()


def layer_inputs(batch):
    generator = torch.Generator().manual_seed(1)
    shapes = (16,), (2, 6), (1, 6), (1, 5)
    return [torch.randn(batch.num_tokens, *shape, generator=generator, requires_grad=True) for shape in shapes]


def test_indexer_and_model_have_separate_losses():
    layer, batch = make_layer(top_k=4), make_batch([9, 0, 17])
    layer_input = layer_inputs(batch)
    out, aux = layer(*layer_input, batch)
    parameters = dict(layer.named_parameters())
    index_names = {name for name in parameters if name.startswith("index_")}
    assert len(index_names) == 5 and index_names < set(parameters)
    aux["indexer_loss"].weighted.backward(retain_graph=True)
    assert all(x.grad is None for x in layer_input)
    assert {name for name, p in parameters.items() if p.grad is not None} == index_names
    layer.zero_grad()
    out.square().sum().backward()
    assert {name for name, p in parameters.items() if p.grad is not None} == set(parameters) - index_names
    assert layer_input[0].grad is None and all(x.grad.abs().max() > 0 for x in layer_input[1:])


def test_padding_and_weight_of_the_loss():
    layer, batch = make_layer(top_k=4, loss_weight=0.25), make_batch([9, 0, 17])
    padded = batch.padded(40, 6, 9)
    layer_input = layer_inputs(padded)
    with torch.no_grad():
        _, aux = layer(*layer_input, padded)
        _, plain = layer(*(x[:26] for x in layer_input), batch)
    torch.testing.assert_close(aux, plain)
    torch.testing.assert_close(aux["indexer_loss"].weighted, 0.25 * aux["indexer_loss"].value)


@pytest.mark.parametrize("phase", [0, 100])
@pytest.mark.parametrize("group", [1, 4])
def test_parts_of_a_batch_share_its_loss(group, phase):
    """The weight of a rank's loss is `num_terms` or, without it, its number of tokens."""
    layer, batch = make_layer(top_k=4, warmup_steps=100, selection_group=group), make_batch([9, 0, 1, 17, 6])
    batch = replace(batch, phase=phase)
    layer_input, split = layer_inputs(batch), 10
    shared = replace(batch, whole=Whole(0, 33, 1.0))
    parts = shared.sequences(0, 3), shared.sequences(3, 5).padded(30, 4, 9)
    padding = [x[:7] for x in layer_input]
    inputs = (
        [x[:split] for x in layer_input],
        [torch.cat([x[split:], more]) for x, more in zip(layer_input, padding)],
    )
    total = number = 0.0
    for rows, part in zip(inputs, parts):
        loss = layer(*rows, part)[1]["indexer_loss"]
        count = part.real.sum() if loss.num_terms is None else loss.num_terms
        total, number = total + count * loss.value, number + count
    torch.testing.assert_close(total / number, layer(*layer_input, batch)[1]["indexer_loss"].value)
    assert number == (33 if group == 1 else 2 + 4 + 1)  # a group chooses among earlier tokens


@pytest.mark.parametrize("group", [1, 4])
def test_the_warm_up_is_dense(group):
    layer, batch = make_layer(top_k=3, warmup_steps=100, selection_group=group), make_batch([9, 0, 17])
    assert layer.config.phase_ends() == (100,)
    layer_input = layer_inputs(batch)
    everything = make_layer(top_k=40, selection_group=group)
    everything.load_state_dict(layer.state_dict())
    dense, dense_aux = everything(*layer_input, batch)
    batch.phase = 0
    out, aux = layer(*layer_input, batch)
    torch.testing.assert_close(out, dense)
    torch.testing.assert_close(aux, dense_aux)
    batch.phase = 100
    assert not torch.allclose(layer(*layer_input, batch)[0], dense)
    alone = make_layer(top_k=40, selection_group=1)
    alone.load_state_dict(layer.state_dict())
    torch.testing.assert_close(alone(*layer_input, batch)[0], dense)  # each token attends to all before it


def test_too_large_warm_up_raises(monkeypatch):
    monkeypatch.setattr("models.attention.indexer.MOST_INDICES", 100)
    layer, batch = make_layer(top_k=3, warmup_steps=1, selection_group=2), make_batch([9, 17])
    batch.phase = 0
    with pytest.raises(ValueError, match=r"indexer: 15 groups of up to 17 tokens exceed 100 "):
        layer(*layer_inputs(batch), batch)


@pytest.mark.parametrize("group", [1, 4])
def test_key_heads(group):
    """Key heads are independent attention over the same chosen tokens; the loss is a mean over them."""
    torch.manual_seed(0)
    config = IndexerAttention.Config(kind="indexer", top_k=4, selection_group=group, num_kv_heads=2, index_dim=8)
    layer, batch = IndexerAttention(config, LayerSizes(6, 8, 5, 16, 40)).train().double(), make_batch([9, 0, 17])
    shapes = (16,), (6, 8), (2, 8), (2, 5)
    x, q, k, v = (torch.randn(26, *shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    out, aux = layer(x, q, k, v, batch)
    shared = {"selection_group": group}
    scores, indices = lightning_indexer(
        *layer.index(x.detach()), batch.seq_offsets, 4, bias=layer.index_tables(batch), **shared
    )
    shared |= {"bias": layer.bias(batch)}
    apart = [
        sparse_attention(q[:, 3 * n : 3 * n + 3], k[:, n], v[:, n], indices, batch.seq_offsets, **shared)
        for n in range(2)
    ]
    torch.testing.assert_close(out, torch.cat(apart, 1))
    weights = torch.randn_like(out)
    actual, expected = (torch.autograd.grad((y * weights).sum(), (q, k, v)) for y in (out, torch.cat(apart, 1)))
    torch.testing.assert_close(actual, expected)
    # The gradient pi - p of the loss is linear in p, the mean over heads, so it is the mean over key heads.
    losses = [
        indexer_loss(q[:, 3 * n : 3 * n + 3], k[:, n], scores, indices, batch.seq_offsets, **shared) for n in range(2)
    ]
    parameters = [p for name, p in layer.named_parameters() if name.startswith("index_")]
    actual, expected = (torch.autograd.grad(y, parameters) for y in (aux["indexer_loss"].value, sum(losses) / 2))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("heads", "size", "value_size", "expected"),
    [
        (4, 16, 16, (4, 4, 4)),
        (4, 64, 64, (4, 4, 1)),
        (4, 32, 40, (4, 4, 2)),
        (6, 25, 30, (6, 6, 3)),
        (1, 50, 50, (1, 1, 1)),
        (2, 8, 8, (2, 2, 2)),
        (3, 100, 60, (1, 3, 1)),
        (16, 64, 64, (4, 16, 1)),
        (8, 256, 256, (1, 8, 1)),
        (32, 8, 8, (16, 32, 8)),
    ],
)
def test_default_key_heads(heads, size, value_size, expected):
    """Check the indexer, a short and a long tree."""
    for kind, length, key_heads in zip(("indexer", "htree", "htree"), (200, 200, 4096), expected):
        sizes = LayerSizes(heads, size, value_size, 16, length)
        config = ATTENTION[kind].Config(kind=kind).for_model(sizes)
        assert config.num_kv_heads == key_heads and config.for_model(LayerSizes(1, 7, 7, 7, length)) == config
        assert ATTENTION[kind].kv_heads(config, heads) == key_heads
        if kind == "indexer":  # without groups, as for a long tree
            config.check_model(sizes)
            single = ATTENTION[kind].Config(kind=kind, selection_group=1).for_model(sizes)
            assert single.num_kv_heads == expected[2]
        one_each = ATTENTION[kind].Config(kind=kind, num_kv_heads=None).for_model(sizes)
        assert ATTENTION[kind].kv_heads(one_each, heads) == heads


@pytest.mark.parametrize(("length", "top_k", "group"), [(12, 8, 8), (200, 32, 8), (2048, 128, 8), (32_768, 128, 16)])
def test_defaults_follow_the_length(length, top_k, group):
    sizes = LayerSizes(2, 6, 5, 16, length)
    config = IndexerAttention.Config(kind="indexer").for_model(sizes)
    assert (config.top_k, config.selection_group) == (top_k, group)
    explicit = IndexerAttention.Config(kind="indexer", top_k=5, selection_group=3, num_kv_heads=1)
    assert explicit.for_model(sizes) == explicit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 3000}, "top_k=3000: the kernels choose up to 2,048 of model.max_seq_len=8000 tokens, or all"),
        ({"top_k": 8000}, None),
        ({"selection_group": 200}, "selection_group=200: the kernels take up to 128 tokens in a group"),
        ({"selection_group": 200, "backend": "reference"}, None),
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide model.num_heads=2"),
        ({"num_kv_heads": 2}, None),
        ({"top_k": 0}, "top_k\n.*expected auto or an integer of at least 1, got 0"),
        ({}, None),
        ({"top_k": 3000, "backend": "reference"}, None),
    ],
)
def test_configurations_beyond_the_kernels_limits_raise(change, message):
    from models.options import ModelConfig

    assert ATTENTION["indexer"] is IndexerAttention
    config = CONFIG | {"max_seq_len": 8000, "attention": {"kind": "indexer"} | change}
    if message is None:
        ModelConfig.model_validate(config)
    else:
        with pytest.raises(ValueError, match=message):
            ModelConfig.model_validate(config)


def test_too_wide_key_heads_raise():
    sizes = LayerSizes(4, 130, 64, 320, 100)
    config = IndexerAttention.Config(kind="indexer", num_kv_heads=4).for_model(sizes)
    with pytest.raises(
        ValueError, match=r"num_kv_heads=4: the kernels take up to 512 channels in all key heads, .* got 1024"
    ):
        config.check_model(sizes)
    config.model_copy(update={"backend": "reference"}).check_model(sizes)


@pytest.fixture
def one_thread():
    """Use one thread, which is faster for small tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_indexer_finds_tokens_of_the_same_topic(one_thread):
    """The first half of a sequence has 8 tokens of each topic, the second half has queries for a topic.

    These 8 are what the attention weighs most. The indexer sees random codes of topic and role, and has to learn which
    keys they mean.
    """
    torch.manual_seed(0)
    topics, top_k, size, sequences = 5, 8, 16, 3
    half = topics * top_k
    layer = IndexerAttention(
        IndexerAttention.Config(
            kind="indexer", top_k=top_k, selection_group=1, num_index_heads=4, index_dim=16, warmup_steps=40
        ),
        LayerSizes(2, size, 4, 32, 2 * half),
    ).train()
    codes, roles = torch.randn(topics, 32), torch.randn(2, 32)
    directions = 5 * F.normalize(torch.randn(topics, size), dim=1)
    optimizer = torch.optim.Adam([p for n, p in layer.named_parameters() if n.startswith("index_")], lr=1e-2)
    recalls = []
    for step in range(101):
        batch = make_batch([2 * half] * sequences, seed=step)
        batch.phase = 0 if step < 40 else 40
        planted = torch.arange(half) % topics
        topic = torch.stack(
            [torch.cat([planted[torch.randperm(half)], torch.randint(topics, (half,))]) for _ in range(3)]
        )
        is_query = (torch.arange(2 * half) >= half).expand(sequences, -1).flatten()
        topic = topic.flatten()
        x = codes[topic] + roles[is_query.long()] + 0.1 * torch.randn(len(topic), 32)
        q = directions[topic][:, None] + 0.2 * torch.randn(len(topic), 2, size)
        k = directions[topic] * ~is_query[:, None] + 0.2 * torch.randn(len(topic), size)
        _, aux = layer(x, q, k[:, None], torch.zeros(len(topic), 1, 4), batch)
        optimizer.zero_grad()
        aux["indexer_loss"].weighted.backward()
        optimizer.step()
        if step % 100 == 0:
            with torch.no_grad():
                _, chosen = lightning_indexer(*layer.index(x), batch.seq_offsets, top_k, bias=layer.index_tables(batch))
            weights = (q.view(sequences, -1, 2, size).transpose(1, 2) @ k.view(sequences, 1, -1, size).mT) * size**-0.5
            weights = weights.masked_fill(~torch.ones(2 * half, 2 * half).tril().bool(), -math.inf)
            best = weights.softmax(-1).mean(1).topk(top_k).indices.flatten(0, 1)
            hits = (best[:, :, None] == chosen[:, None, :]).any(-1).float().mean(1)
            recalls.append(hits[is_query].mean().item())
    assert recalls[0] < 0.8 and recalls[1] > 0.9, recalls
