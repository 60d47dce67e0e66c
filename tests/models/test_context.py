"""Check features of users as tokens at the front of a sequence: which outputs they change."""

import dataclasses

import numpy as np
import pytest
import torch

from data.features.vocabulary import FeatureVocabulary, KnownFeature
from models.hstu import SequenceModel
from models.options import ModelConfig
from tests.models.test_hstu import CONFIG, NUM_ITEMS, make_batch

DENSE = {"kind": "dense", "normalizer": 9}
KINDS = {
    "dense": CONFIG | {"attention": DENSE},
    "dense with a window": CONFIG | {"attention": DENSE | {"window_size": 2}},
    "dense with rotary": CONFIG
    | {"attention": DENSE | {"position_bias": False, "time_bias": False}, "rotary": {"position": True, "time": True}},
    "softmax": CONFIG | {"block": "transformer", "feed_forward_dim": 8, "attention": {"kind": "softmax"}},
    "softmax with biases": CONFIG
    | {"attention": {"kind": "softmax", "position_bias": True, "time_bias": True, "num_kv_heads": 1}},
}
LENGTHS = [5, 0, 12, 7]
VALUES = np.array(["a", "b", "c"])
USERS = FeatureVocabulary(tuple(KnownFeature("users", name, "category", VALUES) for name in ("age", "country")))


def make_model(kind, known: FeatureVocabulary | None = USERS, **changes):
    torch.manual_seed(0)
    config = ModelConfig.model_validate(KINDS[kind] | {"num_layers": 1} | changes)
    return SequenceModel(config, NUM_ITEMS, features=known, user_tokens=True).double().eval()


SHARED_KEYS = {"kind": "softmax", "num_kv_heads": 1}


def batch_of(features=((1, 2), (3, 1), (2, 2), (0, 3)), **fields):
    rows = torch.tensor(features)[:, :, None]
    return dataclasses.replace(make_batch(LENGTHS), user_features=rows, **fields)


def changed(x, value, *index):
    x = x.clone()
    x[index] = value
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_a_users_features_change_each_of_their_outputs_and_no_others(kind):
    """Check each feature in one layer, also with a window."""
    model, batch = make_model(kind), batch_of()
    out = model(batch)[0]
    for feature in (0, 1):
        other = dataclasses.replace(batch, user_features=changed(batch.user_features, 1, 2, feature))
        moved = (model(other)[0] != out).any(1)
        assert moved.tolist() == [False] * 5 + [True] * 12 + [False] * 7


@pytest.mark.parametrize("kind", KINDS)
def test_no_later_event_changes_an_output(kind):
    """An event changes no output before its own; context tokens do not attend to it."""
    model, batch = make_model(kind, num_layers=2), batch_of()
    out = model(batch)[0]
    for field, value in (("item_ids", 39), ("query_timestamps", 10**9)):
        other = dataclasses.replace(batch, **{field: changed(getattr(batch, field), value, 5 + 4)})
        assert torch.equal(model(other)[0][: 5 + 4], out[: 5 + 4])
        assert torch.equal(model(other)[0][17:], out[17:])


def test_softmax_of_jagged_sequences_is_that_of_padded_ones():
    one, other = (make_model("softmax", attention=SHARED_KEYS | more) for more in ({}, {"backend": "reference"}))
    torch.testing.assert_close(other(batch_of())[0], one(batch_of())[0])


@pytest.mark.gpu
def test_softmax_on_a_gpu():
    """The jagged GPU kernel and padded attention on the CPU have the same outputs and gradients."""
    model, batch = make_model("softmax", attention=SHARED_KEYS, num_layers=2).float(), batch_of()
    outputs, grads = [], []
    for device in ("cpu", "cuda"):
        model.zero_grad()
        out = model.to(device)(batch.to(device))[0]
        out[:, 0].sum().backward()
        outputs.append(out.detach().cpu())
        grads.append([p.grad.cpu() for p in model.layers.parameters()])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "dense with a window", "dense with rotary"])
def test_users_without_values_add_nothing_to_a_sum(kind):
    """Tokens of users without values are zeros; biases of events are as without context tokens."""
    model, batch = make_model(kind), batch_of(features=[(-1, -1)] * 4)
    alone = make_model(kind, None)
    weights = {name: x for name, x in model.state_dict().items() if not name.startswith("embedding.context")}
    for name in weights:
        if name.endswith("position_bias"):
            weights[name] = weights[name][: len(alone.state_dict()[name])]
    alone.load_state_dict(weights)
    torch.testing.assert_close(model(batch)[0], alone(batch)[0])


def test_the_tables_learn_and_padding_changes_nothing():
    model, batch = make_model("dense").train(), batch_of()
    model(batch)[0].sum().backward()
    tables = model.embedding.context.users.tables.embedding_bags
    learned = {name: (table.weight.grad[1:] != 0).any(1).tolist() for name, table in tables.items()}
    # Rows 1, 2 and 3; the second user has no event.
    assert learned == {"users_age": [True, True, False], "users_country": [False, True, True]}
    padded = batch.padded(32, 6, 12)
    torch.testing.assert_close(model.eval()(padded)[0][:24], model(batch)[0])


def test_positions_begin_after_the_context():
    wider, places = batch_of().with_context(2)
    assert wider.positions[:9].tolist() == [0, 0, 1, 2, 3, 4, 5, 0, 0]
    assert wider.seq_offsets.tolist() == [0, 7, 9, 23, 32] and wider.context_counts.tolist() == [2] * 4
    assert places.tolist() == [*range(2, 7), *range(11, 23), *range(25, 32)]
    assert torch.equal(wider.timestamps[:3], wider.timestamps[2].expand(3))
