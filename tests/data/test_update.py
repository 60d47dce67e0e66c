"""Test the events of an update for ranking, whose labels count."""

from dataclasses import replace

import numpy as np
import pytest

from data.ranking import Layout, RankingBatches, TargetBatches, ranking_splits
from data.update import judging_splits, new_events, update_split
from tests.data.test_ranking import dataset

LABELS = np.eye(3, dtype=np.int8)


def labelled(data, split, layout):
    """Return the events whose labels count."""
    kind = TargetBatches if layout.targets else RankingBatches
    (batch,) = kind(data, split, label_table=LABELS, batch_size=100, shuffle=False).epoch(0)
    return sorted(batch.events[batch.labels[:, 0] >= 0].tolist())


@pytest.mark.parametrize("layout", [Layout(6), Layout(12, 4)])
@pytest.mark.parametrize("replay", [0, 0.5, 100])
def test_ranking_labels_of_new_and_replayed_events_count(replay, layout):
    data = dataset([12, 9, 30])
    data = replace(data, timestamps=np.concatenate([np.arange(length) for length in (12, 9, 30)]))
    old = np.flatnonzero((data.timestamps < 10) & (np.arange(51) != 3))  # event 3 is late
    before = replace(data, items=data.items[old], timestamps=data.timestamps[old], actions=data.actions[old],
                     user_offsets=np.searchsorted(old, data.user_offsets))  # fmt: skip
    events = new_events(data, before, before.user_offsets[1:])
    new = np.flatnonzero(data.timestamps >= 10).tolist()
    assert events.after == 9 and events.late.tolist() == [3] and events.new.tolist() == new
    splits = ranking_splits(data, "all", layout)
    options = {"max_seq_len": 12, "layout": layout}
    split = update_split(data, splits, events, replay=replay, seed=1, **options)
    counted = labelled(data, split, layout)
    older = set(counted) - set(new)
    assert set(new) <= set(counted) and len(set(counted)) == len(counted) and 3 not in counted
    assert len(older) == min(replay * len(new), 51 - len(new) - 1)
    judged = judging_splits(data, splits, events, targets="first", same_time="seen", **options)
    assert labelled(data, judged.test, layout) == new and judged.train_end.tolist() == [10, 21, 31]
