"""Test the advice about a run's sizes and its result."""

from types import SimpleNamespace

import numpy as np
import pytest

from data.errors import ConfigError
from models.tasks.retrieval import Retrieval
from training import advice
from training.config import load_config
from training.strict_yaml import SHIPPED


def config(steps=None, length=50, patience=None):
    train = SimpleNamespace(epochs=5, steps=steps, batch_size=128)
    model = SimpleNamespace(max_seq_len=length, embedding_dim=128, num_layers=4)
    options = SimpleNamespace(patience=patience, every=1)
    return SimpleNamespace(train=train, model=model, eval=options, best_metric="NDCG@10")


def data(*lengths, items=9):
    offsets = np.append(0, np.cumsum(lengths))
    return SimpleNamespace(user_offsets=offsets, num_users=len(lengths), num_items=items, name="shop")


def test_advice_for_few_steps():
    (line,) = advice.step_advice(config(), 55)
    assert "55 steps" in line and "train.epochs" in line and "train.batch_size" in line
    assert not advice.step_advice(config(), 100)


def test_sizes_that_do_not_fit_the_data():
    assert not advice.data_warnings(config(), data(20, 30))
    assert "model.max_seq_len=1,000,000" in advice.data_warnings(config(length=1_000_000), data(20, 30))[0]
    assert "a single user" in advice.data_warnings(config(), data(20))[0]
    with pytest.raises(ConfigError, match="shop: expected at least two items to rank, got one"):
        Retrieval.check_data(SimpleNamespace(config=config()), data(20, 30, items=1))


def test_a_model_below_a_baseline():
    below = {"baseline": "again", "behind": True}
    result = {"steps": 500, "epoch": 5, "against_baseline": below}
    (line,) = advice.result_advice(config(), result)
    assert "worse than again. Try more steps" in line and "configs/small.yaml" in line
    (line,) = advice.result_advice(config(patience=3), result | {"epoch": 2})
    assert "worse than again. Try a smaller model (configs/small.yaml)" in line
    assert not advice.result_advice(config(), result | {"against_baseline": below | {"behind": False}})
    (line,) = advice.result_advice(config(), result | {"steps": 9}, update=True)
    assert "Try more steps (train.update.epochs), " in line


@pytest.mark.parametrize(("name", "named"), [("small", False), ("ml-1m-hstu-large", True)])
def test_the_small_configuration_is_advised_only_to_larger_models(name, named):
    settings = load_config(SHIPPED[name])
    verdict = {"baseline": "again", "behind": True}
    (line,) = advice.result_advice(settings, {"steps": 500, "epoch": 7, "against_baseline": verdict})
    assert ("configs/small.yaml" in line) == named and "train.lr or a search with tune.py" in line
