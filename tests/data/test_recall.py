"""Test the memory task: each recalled pair was shown once, at the distance that its action names."""

from itertools import pairwise

import numpy as np
import pytest

from data.datasets import load_dataset
from data.recall import RecallBatches, generate_recall, recall_splits
from data.types import DataError

SMALL = {
    "num_sequences": 20, "length": 120, "distances": [4, 16, 64], "pairs": 3, "num_keys": 30, "num_values": 10,
    "num_fillers": 7,
}  # fmt: skip


@pytest.fixture(scope="module")
def small():
    return generate_recall(**SMALL)


def test_each_recall_was_shown_once_at_its_distance(small):
    assert small.action_names == ("shown", "3-4", "9-16", "33-64")
    assert small.num_events == 20 * 120 and small.num_items == 47 and not small.has_timestamps
    items, codes = (x.reshape(20, 120) for x in (small.items, small.actions))
    assert (codes[:, :3] == 0).all()
    for row, code in zip(items, codes):
        assert np.bincount(code, minlength=4)[1:].tolist() == [3, 3, 3]
        keys, counts = np.unique(row[row < 30], return_counts=True)
        assert len(keys) == 9 and (counts == 2).all()
        for key in keys:
            shown, recalled = np.flatnonzero(row == key)
            group = code[recalled + 1]
            longest = SMALL["distances"][group - 1]
            assert group > 0 and longest // 2 < recalled - shown <= longest
            assert row[shown + 1] == row[recalled + 1] and 30 <= row[shown + 1] < 40
    # A key has another value in another sequence, so that a table of items cannot learn it.
    pairs = {(a, b) for row in items for a, b in pairwise(row) if a < 30}
    assert len(pairs) > 2 * 30


def test_the_same_options_give_the_same_data(small):
    again = load_dataset("recall", None, cache_dir=None, recall=SMALL)
    other = generate_recall(**SMALL, seed=1)
    assert np.array_equal(small.items, again.items) and small.fingerprint == again.fingerprint != other.fingerprint
    assert not np.array_equal(small.items, other.items)


def test_short_sequences_come_first(small):
    both = generate_recall(**SMALL, short={"num_sequences": 50, "length": 40, "pairs": 2})
    assert np.array_equal(both.items[50 * 40 :], small.items) and both.fingerprint != small.fingerprint
    assert np.diff(both.user_offsets).tolist() == [40] * 50 + [120] * 20
    codes = both.actions[: 50 * 40].reshape(50, 40)
    assert all(np.bincount(code, minlength=4)[1:].tolist() == [2, 2, 0] for code in codes)  # 64 does not fit


def test_targets_of_batches_are_recalls_only(small):
    splits = recall_splits(small, 0.1, 0.2)
    assert [len(part) for part in (splits.train, splits.valid, splits.test)] == [14, 2, 4]
    assert splits.test.users.tolist() == [16, 17, 18, 19]
    events = []
    for batch in RecallBatches(small, splits.test, batch_size=3, shuffle=False).epoch(0):
        assert batch.actions is None and batch.real.all()
        targets = batch.target_ids >= 0
        assert targets.sum() == 9 * batch.num_sequences
        assert (small.items[batch.events] == np.where(targets, batch.target_ids, small.items[batch.events])).all()
        assert (small.actions[batch.events[targets]] > 0).all()
        events += batch.events.tolist()
    begin = small.user_offsets[16:-1]
    assert events == [e for first in begin for e in range(first + 1, first + 120)]
    with pytest.raises(DataError, match="give an empty training, validation or test part"):
        recall_splits(small, 0.5, 0.5)


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"distances": [4, 4]}, "data.recall: distances: expected distinct numbers, got [4, 4]"),
        ({"distances": [119]}, "data.recall: distances: 119 needs a length of at least 121"),
        ({"pairs": 11}, "data.recall: num_keys=30 is less than the 33 pairs of a sequence"),
        (
            {"pairs": 10},
            "data.recall: length=120 is too short for pairs=10 of each of 3 distances: take fewer pairs or longer "
            "sequences",
        ),
        (
            {"distances": [16, 32], "short": {"num_sequences": 3, "length": 30}},
            "data.recall: distances: expected one of at most half of short.length=30, got [16, 32]",
        ),
        (
            {"distances": [16, 4], "short": {"num_sequences": 3}},
            "data.recall: distances: with short sequences, expected ascending numbers, got [16, 4]",
        ),
        ({"lenght": 1}, "data.recall.lenght: unknown key, did you mean length?"),
    ],
)
def test_errors(options, complaint):
    with pytest.raises(DataError) as caught:
        generate_recall(**SMALL | options)
    assert str(caught.value) == complaint


def test_options_of_another_format():
    with pytest.raises(DataError, match=r"data\.recall: these options are for format recall, not synthetic"):
        load_dataset("synthetic", None, cache_dir=None, recall=SMALL)
