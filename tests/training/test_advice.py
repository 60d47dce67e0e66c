"""Test what a run says of its sizes and its result."""

from types import SimpleNamespace

import numpy as np
import pytest

from data.errors import ConfigError
from models.tasks.retrieval import Retrieval
from training import advice


def config(steps=None, length=50, patience=None):
    train = SimpleNamespace(epochs=5, steps=steps, batch_size=128)
    model, options = SimpleNamespace(max_seq_len=length), SimpleNamespace(patience=patience, every=1)
    return SimpleNamespace(train=train, model=model, eval=options, best_metric="NDCG@10")


def data(*lengths, items=9):
    offsets = np.append(0, np.cumsum(lengths))
    return SimpleNamespace(user_offsets=offsets, num_users=len(lengths), num_items=items, name="shop")


def test_few_steps_are_named_with_what_to_change():
    (line,) = advice.of_steps(config(), 55)
    assert "55 steps" in line and "train.epochs" in line and "train.batch_size" in line
    assert not advice.of_steps(config(), 100)


def test_sizes_that_do_not_fit_the_data():
    assert not advice.of_data(config(), data(20, 30))
    assert "model.max_seq_len=1,000,000" in advice.of_data(config(length=1_000_000), data(20, 30))[0]
    assert "a single user" in advice.of_data(config(), data(20))[0]
    with pytest.raises(ConfigError, match="shop: has one item"):
        Retrieval.check_data(SimpleNamespace(config=config()), data(20, 30, items=1))


def test_a_model_below_a_baseline():
    below = {"baseline": "again", "model": 0.1, "of_baseline": 0.2}
    result = {"steps": 500, "epoch": 5, "against_baseline": below}
    assert "below again" in advice.of_result(config(), result)[0]
    assert not advice.of_result(config(), result | {"against_baseline": below | {"model": 0.3}})
