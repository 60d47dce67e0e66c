"""Check vectors in a model: their projection, its gradient, items without ids and without a training event."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import models.vectors
from data.features.features import VECTOR, Feature
from data.synthetic import generate
from models.vectors import ItemVectors
from tests.models.test_features import (
    CONFIG,
    LOSSES,
    RANKING,
    SIZES,
    configured,
    losses_of,
    model_of,
    prepared,
    with_cold_items,
    with_made_up_features,
)  # fmt: skip

COLUMNS = {"brand": "category", "title": {"kind": "vector", "path": "x.npy"}}
DATA = CONFIG["data"] | {"features": {"items": {"format": "csv", "path": "x", "columns": COLUMNS}}}


def vectors_of(count, seed=0, width=6, without=()):
    """Return a feature of `count` items; items in `without` have no vector."""
    values = np.random.default_rng(seed).normal(size=(count - len(without), width))
    has = ~np.isin(np.arange(count), without)
    values = (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float16)
    codes = np.arange(len(values), dtype=np.int32)
    return Feature("items", "title", VECTOR, values, codes, np.append(0, np.cumsum(has)).astype(np.int64))


def with_vectors(dataset, tables=True, **options):
    features = with_made_up_features(dataset).features[:1] if tables else ()
    return replace(dataset, features=(*features, vectors_of(dataset.num_items, **options)))


def with_cold_vectors(dataset, seed):
    """Return the data set of `with_cold_items`, with vectors of its two new items, drawn by `seed`."""
    title = dataset.features[-1]
    cold = with_cold_items(replace(dataset, features=dataset.features[:-1]), seed)
    new = vectors_of(2, seed).values
    count = cold.num_items
    values = np.concatenate([new[:1], title.values, new[1:]])
    title = replace(title, values=values, codes=np.arange(count, dtype=np.int32), offsets=np.arange(count + 1))
    return replace(cold, features=(*cold.features, title))


@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("id_dropout", [0.0, 1.0])
def test_an_item_is_its_row_its_features_and_its_projected_vector(tables, id_dropout):
    config = configured(data=DATA, model=CONFIG["model"] | {"id_dropout": id_dropout, "vector_correction": 2})
    dataset = with_vectors(generate(**SIZES), tables, without=[3, 7])
    _, _, known, _ = prepared(config, dataset)
    model = model_of(config, dataset, known).eval()
    (vectors,) = model.embedding.items.vectors
    assert isinstance(vectors, ItemVectors) and not any("table" in n and "title" in n for n in model.state_dict())
    torch.nn.init.normal_(vectors.correction)
    title, expected = dataset.features[-1], torch.zeros(dataset.num_items, 16)
    expected[np.diff(title.offsets) > 0] = torch.from_numpy(title.values).float() @ vectors.weight
    expected += vectors.correction @ vectors.correction_weight
    if tables:
        (table,) = (one.weight for one in model.embedding.items.tables.tables.embedding_bags.values())
        expected += table[known.item_rows[0][1]]
    if id_dropout < 1:
        expected += model.item_weight
    else:
        assert model.embedding.tables is None and not any("embeddings.item" in name for name in model.state_dict())
    torch.testing.assert_close(model.item_table, expected)
    for ids in (torch.tensor([5, 3, 5]), torch.arange(dataset.num_items).repeat(9)):  # few items, and all
        torch.testing.assert_close(model.embedding.item_rows(ids), expected[ids])
    model.train()
    torch.testing.assert_close(model.embedding.items(), (expected - with_ids(model))[known.trained])


def with_ids(model):
    return model.item_weight if model.embedding.has_ids else 0


@pytest.mark.parametrize("at_once", [models.vectors.AT_ONCE_ON_A_CPU, 1, 12])
def test_gradient_of_the_projection(monkeypatch, at_once):
    """Check chunks of all rows, of one row and of two rows."""
    monkeypatch.setattr(models.vectors, "AT_ONCE_ON_A_CPU", at_once)
    vectors = ItemVectors(vectors_of(4, without=[1]), 5)
    items, scale = torch.tensor([0, 3, 3, 1, 2]), torch.randn(5, 5)
    table = torch.zeros(4, 6)
    table[[0, 2, 3]] = vectors.table.float()
    out = vectors(items)
    torch.testing.assert_close(out, table[items] @ vectors.weight)
    assert not out[3].any()
    (out * scale).sum().backward()
    torch.testing.assert_close(vectors.weight.grad, table[items].T @ scale)


@pytest.mark.parametrize(
    ("loss", "id_dropout"),
    [("cross_entropy", 0.2), ("sampled_softmax", 0.2), ("mixed_negatives", 1.0), ("cross_entropy", 1.0)],
)
def test_vectors_of_items_without_a_training_event_change_no_training_loss(loss, id_dropout):
    """Losses must be bit-identical with and without these items."""
    model = CONFIG["model"] | {"dropout": 0.2, "id_dropout": id_dropout, "vector_correction": 2}
    config = configured(loss=LOSSES[loss], data=DATA, model=model)
    dataset = with_vectors(generate(**SIZES))
    expected, before, known_before = losses_of(config, dataset)
    for seed in (1, 2):
        actual, after, known = losses_of(config, with_cold_vectors(dataset, seed))
        assert actual == expected
        weights = dict(after.named_parameters())
        for name, weight in before.named_parameters():
            if name.endswith((".correction", "item.weight")):
                # SIMD instructions may round differently, and a row's place decides whether Adam uses them.
                rows = weights[name][known.trained], weight[known_before.trained]
                torch.testing.assert_close(*rows, rtol=1e-6, atol=1e-8)
            elif "brand" not in name:  # its table has a row for a value that only new items have
                assert torch.equal(weights[name], weight), name
        (vectors,) = after.embedding.items.vectors
        assert not vectors.correction[~known.trained].any() and vectors.correction[known.trained].any()


def test_training_with_vectors_alone():
    """Train without ids and other features; items without a vector are zero."""
    data = DATA | {"features": {"items": {"format": "npy", "path": "x", "columns": {"title": "vector"}}}}
    config = configured(loss=LOSSES["cross_entropy"], data=data, model=CONFIG["model"] | {"id_dropout": 1.0})
    dataset = with_vectors(generate(**SIZES), tables=False, without=[0])
    losses, model, _ = losses_of(config, dataset, steps=12)
    assert losses[-1] < losses[0] - 0.01 and np.isfinite(losses).all()
    assert not model.eval().item_table[0].any()


def test_ranking_with_vectors_alone():
    data = DATA | {"protocol": "last_tenth"}
    config = configured(**RANKING | {"data": data, "model": CONFIG["model"] | {"id_dropout": 1.0}})
    losses, model, _ = losses_of(config, with_vectors(generate(**SIZES, actions=True), tables=False))
    assert np.isfinite(losses).all() and model.embedding.tables is not None  # the table of actions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": CONFIG["model"] | {"id_dropout": 1.0}}, "model.id_dropout: needs data.features.items"),
        (
            {"model": CONFIG["model"] | {"vector_correction": 2}},
            "model.vector_correction: needs a column of kind vector",
        ),
        (
            {
                "data": DATA,
                "model": CONFIG["model"] | {"id_dropout": 1.0},
                "parallel": {"embedding": "row_wise", "data": 2},
            },
            "model.id_dropout=1: not supported with parallel.embedding",
        ),
    ],
)
def test_options_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        configured(**{"data": CONFIG["data"] | {"features": None}} | changes)
