"""Test that the generated data set is reproducible and has its documented structure."""

import sys

import numpy as np
import pytest

from data.datasets import DataError, load_dataset
from data.splits import make_splits, train_item_counts
from data.synthetic import DAY, generate


@pytest.fixture(scope="module")
def default():
    return generate()


def test_default_size_and_shape(default):
    assert (default.num_users, default.num_items) == (2000, 1000)
    assert 60_000 <= default.num_events <= 100_000
    assert default.items.dtype == np.int32 and default.timestamps.dtype == np.int64 and default.actions is None
    assert default.items.min() >= 0 and default.items.max() < 1000
    lengths = np.diff(default.user_offsets)
    assert lengths.min() >= 5 and lengths.sum() == default.num_events == len(default.timestamps)


def test_same_options_same_data(default):
    again, other = generate(), generate(seed=1)
    assert np.array_equal(default.items, again.items) and np.array_equal(default.timestamps, again.timestamps)
    assert default.fingerprint == again.fingerprint != other.fingerprint
    assert not np.array_equal(default.items[:100], other.items[:100])


def within_user(dataset):
    """Return the mask [E-1] of events e for which e and e+1 are of the same user."""
    same = np.ones(dataset.num_events - 1, bool)
    same[dataset.user_offsets[1:-1] - 1] = False
    return same


def test_time_is_in_order_with_two_kinds_of_gap(default):
    gaps = np.diff(default.timestamps)[within_user(default)]
    assert gaps.min() > 0
    short, long = np.mean(gaps < DAY / 12), np.mean(gaps >= DAY)
    assert short > 0.8 and 0.05 < long < 0.2 and short + long > 0.99


def test_popularity_is_skewed_and_independent_of_ids(default):
    counts = np.bincount(default.items, minlength=1000)
    top = np.sort(counts)[::-1]
    assert top[:100].sum() > 0.3 * default.num_events and counts.min() > 0
    assert abs(np.corrcoef(np.arange(1000), counts)[0, 1]) < 0.1


def test_hardly_any_repeats(default):
    pairs = np.repeat(np.arange(2000), np.diff(default.user_offsets)) * 1000 + default.items
    assert len(np.unique(pairs)) > 0.99 * default.num_events


def test_the_last_item_predicts_far_better_than_popularity(default):
    """Compare HR@10 over unseen items by first-order transition counts and by popularity."""
    splits = make_splits(default, "leave_one_out", max_seq_len=500)
    popularity = train_item_counts(default, splits).astype(np.float64)
    at = np.flatnonzero(within_user(default))
    user_of = np.repeat(np.arange(default.num_users), np.diff(default.user_offsets))
    at = at[at + 1 < splits.train_end[user_of[at]]]
    transitions = np.zeros((1000, 1000))
    np.add.at(transitions, (default.items[at], default.items[at + 1]), 1)

    def hit_rate(scores):
        for row, (user, end) in enumerate(zip(splits.test.users, splits.test.end)):
            scores[row, default.items[default.user_offsets[user] : end - 1]] = -1
        targets = default.items[splits.test.end - 1]
        target_scores = scores[np.arange(len(targets)), targets]
        return np.mean(((scores > target_scores[:, None]).sum(1) < 10) & (target_scores >= 0))

    last = default.items[splits.test.end - 2]
    by_popularity = hit_rate(np.tile(popularity, (len(last), 1)))
    by_transition = hit_rate(transitions[last] + 1e-6 * popularity)
    assert by_transition > 5 * by_popularity
    # After a long gap, in a new session, the last item predicts worse: the gap is informative.
    gaps = default.timestamps[splits.test.end - 1] - default.timestamps[splits.test.end - 2]
    scores = transitions[last] + 1e-6 * popularity
    targets = default.items[splits.test.end - 1]
    hits = (scores > scores[np.arange(len(targets)), targets][:, None]).sum(1) < 10
    assert hits[gaps < DAY / 12].mean() > 4 * hits[gaps >= DAY].mean()


def test_load_dataset_with_options_filter_and_no_polars(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "polars", None)
    options = {"num_users": 50, "num_items": 40, "num_clusters": 4, "mean_length": 12, "seed": 5}
    dataset = load_dataset("synthetic", None, cache_dir=tmp_path / "none", synthetic=options)
    assert (dataset.num_users, dataset.num_items) == (50, 40)
    filtered = load_dataset("synthetic", None, cache_dir=tmp_path / "none", min_user_events=10, synthetic=options)
    assert np.diff(filtered.user_offsets).min() >= 10 and filtered.num_users < 50
    assert filtered.fingerprint != dataset.fingerprint
    assert not (tmp_path / "none").exists()


def test_more_events_than_items():
    dataset = generate(num_users=4, num_items=6, num_clusters=2, mean_length=50, min_length=20)
    assert np.diff(dataset.user_offsets).min() >= 20 and dataset.items.max() < 6


def test_many_users_in_chunks(monkeypatch):
    monkeypatch.setattr("data.synthetic.CHUNK_CELLS", 5000)
    dataset = generate(num_users=100, num_items=200, num_clusters=10)
    assert len(np.unique(np.repeat(np.arange(100), np.diff(dataset.user_offsets)))) == 100
    assert (np.diff(dataset.timestamps)[within_user(dataset)] > 0).all()


def test_steps_are_vectorised_over_the_users(monkeypatch):
    """Check that 40 times as many users need no more calls of the random generator, as a loop over users would."""
    calls = []

    class Counting:
        def __init__(self, seed):
            self.rng = np.random.Generator(np.random.PCG64(seed))

        def __getattr__(self, name):
            calls.append(name)
            return getattr(self.rng, name)

    monkeypatch.setattr(np.random, "default_rng", Counting)
    counts = []
    for users in (50, 2000):
        calls.clear()
        dataset = generate(num_users=users, min_length=20, mean_length=20, max_length=20)
        assert dataset.num_users == users
        counts.append(len(calls))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"num_user": 3}, "data.synthetic.num_user: unknown key, did you mean num_users?"),
        ({"num_users": 0}, "data.synthetic.num_users: input should be greater than or equal to 1, got 0"),
        ({"num_users": 2.5}, "data.synthetic.num_users: input should be a valid integer, got 2.5"),
        ({"mean_length": "long"}, "data.synthetic.mean_length: input should be a valid number, got 'long'"),
        ({"mean_length": 2}, "data.synthetic: mean_length=2 must lie between min_length=5 and max_length=400"),
        ({"mean_length": float("nan")}, "data.synthetic.mean_length: input should be a finite number, got nan"),
        ({"mean_length": float("inf")}, "data.synthetic.mean_length: input should be a finite number, got inf"),
        ({"num_items": 20}, "data.synthetic: num_clusters=50 is more than num_items=20"),
        ({"noise": 1.5}, "data.synthetic.noise: input should be less than or equal to 1, got 1.5"),
        ({"zipf": float("inf")}, "data.synthetic.zipf: input should be a finite number, got inf"),
        ({"seed": -1}, "data.synthetic.seed: input should be greater than or equal to 0, got -1"),
        (
            {"num_users": 10**9},
            "data.synthetic: num_users=1000000000 of mean_length=40 are more than 2,000,000,000 events",
        ),
    ],
)
def test_errors(options, complaint):
    with pytest.raises(DataError) as caught:
        generate(**options)
    assert str(caught.value) == complaint
