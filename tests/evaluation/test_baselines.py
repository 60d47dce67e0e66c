"""Test the baselines against plain loops over events, and that they use training events only."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from data.batches import Batches
from data.cached_arrays import cached_arrays
from data.splits import make_splits
from data.synthetic import generate
from evaluation.baselines import EASE_PENALTY, SMOOTHING, Baselines, fit


@pytest.fixture(scope="module")
def place():
    """Return (a generated data set with repeats, its splits, fitted arrays, one batch of the test split)."""
    dataset = generate(num_users=40, num_items=30, num_clusters=4, mean_length=15, seed=3)
    splits = make_splits(dataset, "leave_one_out", max_seq_len=8)
    (batch,) = Batches(dataset, splits.test, batch_size=100, shuffle=False, with_seen=True).epoch(0)
    return dataset, splits, fit(dataset, splits), batch


def scores(models, name, batch):
    computed = models.scorer(name)(batch)
    whole = computed.tile(0, computed.num_items)
    assert torch.equal(whole[:, 7:11], computed.tile(7, 11))  # a tile has the same values
    return whole.numpy()


def histories(dataset, users, held_out):
    return [dataset.items[dataset.user_offsets[u] : dataset.user_offsets[u + 1] - held_out] for u in np.asarray(users)]


def trained(dataset):
    return histories(dataset, range(dataset.num_users), 2)


def test_popularity_and_again(place):
    dataset, _, arrays, batch = place
    models = Baselines(arrays, again=True)
    counts = np.bincount(np.concatenate(trained(dataset)), minlength=dataset.num_items)
    assert np.array_equal(scores(models, "popularity", batch)[0], counts)
    for row, history in zip(scores(models, "again", batch), histories(dataset, batch.users, 1)):
        latest_first = list(dict.fromkeys(history[::-1].tolist()))
        assert np.argsort(-row, kind="stable")[: len(latest_first)].tolist() == latest_first
    assert "again" not in Baselines(arrays, again=False).names


def test_markov_equals_a_loop_over_events(place):
    dataset, _, arrays, batch = place
    follows = np.zeros((dataset.num_items, dataset.num_items))
    for history in trained(dataset):
        for item, successor in pairwise(history):
            follows[item, successor] += 1
    share = np.bincount(np.concatenate(trained(dataset)), minlength=dataset.num_items)
    smoothed = (follows + SMOOTHING * share / share.sum()) / (follows.sum(1, keepdims=True) + SMOOTHING)
    for row, history in zip(scores(Baselines(arrays, True), "markov", batch), histories(dataset, batch.users, 1)):
        expected = sum(0.5**age * smoothed[item] for age, item in enumerate(history[::-1]))
        np.testing.assert_allclose(row, expected, atol=1e-3, rtol=1e-3)  # weights below FADED are left out


def test_neighbours_and_ease_equal_dense_matrices(place):
    dataset, _, arrays, batch = place
    events = np.zeros((dataset.num_users, dataset.num_items))
    for user, history in enumerate(trained(dataset)):
        np.add.at(events[user], history, 1)
    weighted = np.sqrt(events) * (np.log(dataset.num_items) - np.log1p((events > 0).sum(1)))[:, None]
    similar = weighted.T @ weighted
    length = np.sqrt(np.maximum(similar.diagonal(), 1e-24))
    similar = np.clip(similar / length / length[:, None], 0, None)
    once = (events > 0).astype(np.float64)
    inverse = np.linalg.inv(once.T @ once + EASE_PENALTY * np.eye(dataset.num_items))
    ease = -inverse / inverse.diagonal()
    np.fill_diagonal(ease, 0)
    models = Baselines(arrays, again=True)
    models.settings["item-kNN"] = {"decay": 1.0, "neighbours": 200}
    seen = histories(dataset, batch.users, 1)
    for name, expected in (
        ("item-kNN", [np.bincount(h, minlength=dataset.num_items) @ similar for h in seen]),
        ("EASE", [(np.bincount(h, minlength=dataset.num_items) > 0) @ ease for h in seen]),
    ):
        np.testing.assert_allclose(scores(models, name, batch), expected, rtol=1e-4, atol=1e-5)


def test_held_out_events_change_nothing(place):
    dataset, splits, arrays, _ = place
    items = dataset.items.copy()
    held_out = np.concatenate([np.arange(end - 2, end) for end in dataset.user_offsets[1:]])
    items[held_out] = (items[held_out] + 1) % dataset.num_items
    changed = fit(replace(dataset, items=items), splits)
    assert changed.keys() == arrays.keys()
    assert all(np.array_equal(changed[name], arrays[name]) for name in arrays)


def test_arrays_are_kept_by_split(tmp_path):
    from data.config import DataConfig
    from data.datasets import load_dataset

    file, calls = tmp_path / "events.csv", []
    file.write_text("user,item,timestamp\n" + "".join(f"{u},{i},{i}\n" for u in range(5) for i in range(6)))
    config = DataConfig(format="csv", path=str(file), protocol="leave_one_out", cache_dir=str(tmp_path / "cache"))
    dataset = load_dataset(format="csv", path=str(file), cache_dir=config.cache_dir)

    def compute():
        calls.append(1)
        return {"a": np.arange(4)}

    def stored(split):
        return cached_arrays(config, dataset, "some", [split], compute)["a"].tolist()

    first, second = np.array([1]), np.array([2])
    assert stored(first) == stored(first) == stored(second) == [0, 1, 2, 3] and len(calls) == 2
    for path in (tmp_path / "cache").glob("*some*.npz"):
        path.write_bytes(path.read_bytes()[:-20])
    assert stored(first) == [0, 1, 2, 3] and len(calls) == 3  # a damaged file is replaced
    assert stored(first) == [0, 1, 2, 3] and len(calls) == 3
