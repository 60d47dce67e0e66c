"""Test ranking samples (training and scored events) and the tokens of a batch."""

import numpy as np
import pytest
import torch

from data.ranking import (
    Layout,
    RankingBatches,
    TargetBatches,
    ranking_splits,
    scoring_windows,
    target_windows,
    training_windows,
)
from data.splits import Split
from data.types import DataError, Dataset


def dataset(lengths):
    events = sum(lengths)
    return Dataset(
        name="made up",
        items=np.arange(events, dtype=np.int32) % 5,
        timestamps=100 + 10 * np.arange(events, dtype=np.int64),
        actions=(np.arange(events) % 3).astype(np.int32),
        user_offsets=np.append(0, np.cumsum(lengths)),
        user_ids=np.arange(len(lengths)),
        item_ids=np.arange(5),
        has_timestamps=True,
        fingerprint="x",
    )


def covered(split):
    return [e for a, b in zip(split.scored, split.end) for e in range(a, b)]


@pytest.mark.parametrize("capacity", [1, 2, 5, 8])
def test_every_event_is_scored_once_in_the_window_with_the_longest_history(capacity):
    rng = np.random.default_rng(capacity)
    for _ in range(30):
        lengths = rng.integers(1, 40, rng.integers(1, 6))
        offsets, users = np.append(0, np.cumsum(lengths)), np.arange(len(lengths))
        scored = offsets[1:] - rng.integers(0, lengths + 1)
        split = scoring_windows(users, offsets[:-1], scored, offsets[1:], capacity)
        assert sorted(covered(split)) == [e for a, b in zip(scored, offsets[1:]) for e in range(a, b)]
        assert (split.end - split.begin <= capacity).all()
        for user, begin, first, end in zip(split.users, split.begin, split.scored, split.end):
            starts = np.arange(offsets[user], offsets[user + 1], max(1, capacity // 2))
            for event in range(first, end):
                assert begin == min(s for s in starts if s <= event < s + capacity)
        training = training_windows(users, offsets[:-1], offsets[1:], capacity)
        assert sorted(covered(training)) == list(range(offsets[-1]))
        assert (training.end - training.begin <= capacity).all()


@pytest.mark.parametrize(("capacity", "targets"), [(2, 1), (5, 3), (8, 7)])
def test_every_event_is_a_candidate_once_after_as_many_earlier_events_as_fit(capacity, targets):
    rng = np.random.default_rng(capacity)
    for _ in range(30):
        lengths = rng.integers(1, 40, rng.integers(1, 6))
        offsets, users = np.append(0, np.cumsum(lengths)), np.arange(len(lengths))
        scored = offsets[1:] - rng.integers(0, lengths + 1)
        split = target_windows(users, offsets[:-1], scored, offsets[1:], capacity, targets)
        assert sorted(covered(split)) == [e for a, b in zip(scored, offsets[1:]) for e in range(a, b)]
        assert ((split.end - split.scored >= 1) & (split.end - split.scored <= targets)).all()
        assert split.begin.tolist() == np.maximum(offsets[split.users], split.end - capacity).tolist()


def test_last_tenth():
    data = dataset([9, 10, 35])
    splits = ranking_splits(data, "last_tenth", Layout(50))
    assert covered(splits.test) == [18, 51, 52, 53]
    assert covered(splits.valid) == [17, 48, 49, 50]
    assert sorted(covered(splits.train)) == [*range(17), *range(19, 48)]
    assert splits.skipped == {"test: fewer than ten events, all for training": 1}
    joined = ranking_splits(data, "last_tenth", Layout(50), train_on_valid=True)
    assert joined.valid is None and sorted(covered(joined.train)) == [*range(18), *range(19, 51)]
    single = ranking_splits(data, "last_tenth", Layout(50, 4))  # the same events, one in each sample
    assert sorted(covered(single.train)) == sorted(covered(splits.train))
    assert single.test.scored.tolist() == [18, 53, 52, 51] and (single.test.end == single.test.scored + 1).all()
    assert (single.test.end - single.test.begin).max() == 35
    everything = ranking_splits(data, "all", Layout(50))
    assert everything.test is None and sorted(covered(everything.train)) == list(range(54))
    with pytest.raises(DataError, match="expected last_tenth or all for ranking, got 'temporal'"):
        ranking_splits(data, "temporal", Layout(50))
    with pytest.raises(DataError, match="gives no test event"):
        ranking_splits(dataset([9]), "last_tenth", Layout(50))


def test_the_tokens_of_a_batch():
    data = dataset([3, 4])
    split = Split(np.array([0, 1]), np.array([0, 4]), np.array([3, 7]), np.array([1, 4]))
    table = np.array([[0, 0], [1, 0], [1, 1]])
    (batch,) = RankingBatches(data, split, label_table=table, batch_size=2, shuffle=False).epoch(0)
    assert batch.seq_offsets.tolist() == [0, 6, 12]
    assert batch.item_ids.tolist() == [0, 0, 1, 1, 2, 2, 4, 4, 0, 0, 1, 1]
    assert batch.actions.tolist() == [0, 0, 1, 1, 2, 2, 1, 1, 2, 2, 0, 0]
    assert batch.has_action.tolist() == [False, True] * 6
    assert batch.timestamps.tolist() == [100, 100, 110, 110, 120, 120, 140, 140, 150, 150, 160, 160]
    # The query time of an item token is its event's time, that of an action token the next event's, if there is one.
    assert batch.query_timestamps.tolist() == [100, 110, 110, 120, 120, 120, 140, 150, 150, 160, 160, 160]
    assert batch.labels[:, 0].tolist() == [-1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 0, -1]
    assert batch.labels[:, 1].tolist() == [-1, -1, 0, -1, 1, -1, 0, -1, 1, -1, 0, -1]
    assert batch.events.tolist() == [0, 0, 1, 1, 2, 2, 4, 4, 5, 5, 6, 6]
    assert (batch.target_ids == -1).all() and batch.real.all()
    padded = batch.padded(16, 4, 4)
    assert (padded.labels[12:] == -1).all() and (padded.events[12:] == -1).all() and not padded.real[12:].any()
    assert torch.equal(padded.labels[:12], batch.labels)


def test_the_tokens_of_a_batch_of_candidates():
    data = dataset([3, 4])
    split = Split(np.array([0, 1]), np.array([0, 4]), np.array([3, 7]), np.array([1, 4]))
    table = np.array([[0, 0], [1, 0], [1, 1]])
    (batch,) = TargetBatches(data, split, label_table=table, batch_size=2, shuffle=False).epoch(0)
    assert batch.seq_offsets.tolist() == [0, 3, 6] and batch.num_targets.tolist() == [2, 3]
    assert batch.item_ids.tolist() == [0, 1, 2, 4, 0, 1] and batch.actions.tolist() == [0, 1, 2, 1, 2, 0]
    assert batch.has_action.tolist() == [True, *[False] * 5]
    assert batch.positions.tolist() == [0, 1, 1, 0, 0, 0]
    # The query time of a candidate is its event's time, that of an event of the history the next event's.
    assert batch.query_timestamps.tolist() == [110, 110, 120, 140, 150, 160]
    assert batch.labels.T.tolist() == [[-1, 1, 1, 1, 1, 0], [-1, 0, 1, 0, 1, 0]]
    assert batch.events.tolist() == [0, 1, 2, 4, 5, 6]
    padded = batch.padded(8, 4, 4)
    assert padded.num_targets.tolist() == [2, 3, 0, 0] and padded.positions.tolist() == [0, 1, 1, 0, 0, 0, 0, 1]
