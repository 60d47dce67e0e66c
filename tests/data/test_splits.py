"""Test split protocols on cases computed by hand."""

from pathlib import Path

import numpy as np
import pytest

from data.datasets import DataError, Dataset, load_dataset
from data.splits import make_splits, train_item_counts

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def dataset_of(users, num_items=100, has_timestamps=True):
    """Build a data set; users: a list of (item, timestamp) pairs for each user."""
    flat = [event for user in users for event in user]
    return Dataset(
        name="tiny",
        items=np.array([i for i, _ in flat], np.int32),
        timestamps=np.array([t for _, t in flat], np.int64),
        actions=None,
        user_offsets=np.cumsum([0] + [len(u) for u in users]),
        user_ids=np.arange(len(users)),
        item_ids=np.arange(num_items),
        has_timestamps=has_timestamps,
        fingerprint="tiny",
    )


def rows(split):
    return list(zip(split.users.tolist(), split.begin.tolist(), split.end.tolist()))


# Events 0-4 are user 0's, 5 is user 1's, 6-7 user 2's, 8-10 user 3's.
FOUR = dataset_of(
    [
        [(1, 10), (2, 20), (3, 30), (4, 40), (5, 50)],
        [(1, 5)],
        [(2, 12), (3, 95)],
        [(7, 80), (8, 85), (9, 100)],
    ]
)


def test_leave_one_out():
    splits = make_splits(FOUR, "leave_one_out", max_seq_len=2)
    assert rows(splits.train) == [(0, 0, 3)]
    assert rows(splits.valid) == [(0, 1, 4), (3, 8, 10)]
    assert rows(splits.test) == [(0, 2, 5), (2, 6, 8), (3, 8, 11)]
    assert splits.train_end.tolist() == [3, 5, 6, 9]
    assert splits.skipped == {
        "train: fewer than two events left": 3,
        "valid: fewer than three events": 2,
        "test: fewer than two events": 1,
    }
    assert "other users' events" in " ".join(splits.notes)


def test_published():
    splits = make_splits(FOUR, "published", max_seq_len=3)
    assert rows(splits.train) == [(0, 0, 4), (3, 8, 10)]
    assert splits.valid is None
    assert rows(splits.test) == [(0, 1, 5), (2, 6, 8), (3, 8, 11)]
    assert splits.train_end.tolist() == [4, 5, 7, 10]
    assert splits.skipped == {"train: fewer than two events left": 2, "test: fewer than two events": 1}
    assert "no validation" in " ".join(splits.notes) and "other users' events" in " ".join(splits.notes)


def test_all():
    splits = make_splits(FOUR, "all", max_seq_len=3)
    assert rows(splits.train) == [(0, 1, 5), (2, 6, 8), (3, 8, 11)]
    assert splits.valid is None and splits.test is None
    assert splits.train_end.tolist() == FOUR.user_offsets[1:].tolist()
    assert splits.skipped == {"train: fewer than two events": 1}
    assert train_item_counts(FOUR, splits).tolist() == np.bincount(FOUR.items, minlength=100).tolist()
    with pytest.raises(DataError, match="gives no train sample"):
        make_splits(dataset_of([[(1, 1)], [(2, 2)]]), "all", max_seq_len=3)


def test_temporal():
    # Sorted times: 5 10 12 20 30 40 50 80 85 95 100. With 3 and 2 of 11 events in the windows the validation window
    # is [50, 95) and the test window [95, ...].
    splits = make_splits(FOUR, "temporal", max_seq_len=3, valid_fraction=3 / 11, test_fraction=2 / 11)
    assert rows(splits.train) == [(0, 0, 4)]
    # User 3's first event, 8, is in the validation window: it has no history.
    assert rows(splits.valid) == [(0, 1, 5)]
    assert rows(splits.test) == [(2, 6, 8), (3, 8, 11)]
    assert splits.train_end.tolist() == [4, 6, 7, 8]
    assert splits.skipped == {
        "train: no event before the first window": 1,
        "train: only one event": 2,
        "valid: no event in the window": 2,
        "valid: the first event in the window has no history": 1,
        "test: no event in the window": 2,
    }
    assert "before 50" in splits.notes[0] and "before 95" in splits.notes[0]


def test_temporal_without_validation():
    splits = make_splits(FOUR, "temporal", max_seq_len=3, valid_fraction=0, test_fraction=2 / 11)
    assert splits.valid is None
    assert rows(splits.train) == [(0, 1, 5), (3, 8, 10)]
    assert splits.train_end.tolist() == [5, 6, 7, 10]
    assert "validation" not in splits.notes[0]


def test_temporal_ties_stay_in_the_later_window():
    tied = dataset_of([[(1, 10), (2, 10), (3, 50), (4, 50)], [(1, 50), (2, 50)]])
    splits = make_splits(tied, "temporal", max_seq_len=9, valid_fraction=0, test_fraction=0.2)
    assert rows(splits.train) == [(0, 0, 2)] and rows(splits.test) == [(0, 0, 3)]


@pytest.mark.parametrize("protocol", ["leave_one_out", "published", "temporal"])
@pytest.mark.parametrize("seed", range(3))
def test_against_a_loop(protocol, seed):
    rng = np.random.default_rng(seed)
    users = [
        [(int(rng.integers(30)), t) for t in sorted(rng.integers(0, 300, rng.integers(1, 15)).tolist())]
        for _ in range(60)
    ]
    dataset = dataset_of(users, num_items=30)
    splits = make_splits(dataset, protocol, max_seq_len=6, valid_fraction=0.15, test_fraction=0.2)
    times = sorted(t for user in users for _, t in user)
    n = len(times)
    cut_valid, cut_test = times[round(n * (1 - 0.2 - 0.15))], times[round(n * (1 - 0.2))]
    expected = {"train": [], "valid": [], "test": []}
    counts = np.zeros(30, np.int64)
    for u, user in enumerate(users):
        if protocol == "temporal":
            train = sum(t < cut_valid for _, t in user)
            in_valid = [i for i, (_, t) in enumerate(user) if cut_valid <= t < cut_test]
            in_test = [i for i, (_, t) in enumerate(user) if t >= cut_test]
            ends = {"train": train, "valid": in_valid[0] + 1 if in_valid else 0}
            ends["test"] = in_test[0] + 1 if in_test else 0
        elif protocol == "published":
            ends = {"train": len(user) - 1, "test": len(user)}
        else:
            ends = {"train": len(user) - 2, "valid": len(user) - 1, "test": len(user)}
        for item, _ in user[: max(0, ends["train"])]:
            counts[item] += 1
        first = int(dataset.user_offsets[u])
        for name, end in ends.items():
            if end >= 2:
                expected[name].append((u, first + max(0, end - 7), first + end))
    assert rows(splits.train) == expected["train"]
    assert rows(splits.test) == expected["test"]
    assert (rows(splits.valid) if splits.valid else []) == expected["valid"]
    assert np.array_equal(train_item_counts(dataset, splits), counts)


def test_train_item_counts():
    splits = make_splits(FOUR, "leave_one_out", max_seq_len=1)
    # Whole histories up to train_end, also events before the window of one input.
    expected = {1: 1, 2: 1, 3: 1, 7: 1}
    counts = train_item_counts(FOUR, splits)
    assert counts.dtype == np.int64 and counts.shape == (100,)
    assert {i: c for i, c in enumerate(counts.tolist()) if c} == expected


@pytest.mark.parametrize(
    "users, protocol, options, complaint",
    [
        ([[(1, 1)]], "leave_one_out", {}, "no train sample"),
        ([[(1, 1)], [(1, 1), (2, 2)]], "published", {}, "no train sample"),
        ([[(1, 1), (2, 2)], [(1, 9)]], "temporal", {"valid_fraction": 0.0, "test_fraction": 0.3}, "no test sample"),
        ([[(1, 1), (2, 2)]], "leave_one", {}, "did you mean leave_one_out?"),
        ([[(1, 1), (2, 2)]], "temporal", {"test_fraction": 1.5}, "expected fractions"),
        ([[(1, 1), (2, 2)]], "temporal", {"test_fraction": 0.0}, "expected fractions"),
        ([[(1, 1), (2, 2)]], "temporal", {"valid_fraction": 0.6, "test_fraction": 0.4}, "expected fractions"),
        ([[(1, 1), (2, 2)]], "published", {"max_seq_len": 0}, "model.max_seq_len: expected at least 1"),
    ],
)
def test_errors(users, protocol, options, complaint):
    with pytest.raises(DataError) as caught:
        make_splits(dataset_of(users), protocol, **({"max_seq_len": 5} | options))
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_temporal_needs_timestamps():
    with pytest.raises(DataError, match="needs timestamps"):
        make_splits(dataset_of([[(1, 0), (2, 0)]], has_timestamps=False), "temporal", max_seq_len=5)


@pytest.mark.skipif(not (REAL / "ml-100k" / "u.data").exists(), reason="no MovieLens 100K here")
def test_real_ml_100k(tmp_path):
    dataset = load_dataset("ml-100k", str(REAL / "ml-100k"), cache_dir=tmp_path)
    splits = make_splits(dataset, "published", max_seq_len=200)
    assert len(splits.train) == len(splits.test) == 943 and not splits.skipped
    assert train_item_counts(dataset, splits).sum() == 100_000 - 943
    temporal = make_splits(dataset, "temporal", max_seq_len=200)
    latest = dataset.timestamps[temporal.train.end - 1].max()
    assert latest < dataset.timestamps[temporal.valid.end - 1].min()
    assert dataset.timestamps[temporal.valid.end - 1].max() < dataset.timestamps[temporal.test.end - 1].min()
