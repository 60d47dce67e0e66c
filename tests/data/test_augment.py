"""Test the augmentation of training sequences, drawn again in every epoch."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from data.augment import Augment, augmented
from data.batches import Batches
from data.splits import make_splits
from tests.data.test_batches import make_dataset

WINDOW = 6


@pytest.fixture(scope="module")
def prepared():
    dataset = make_dataset(num_users=300)
    split = make_splits(dataset, "leave_one_out", max_seq_len=WINDOW).train
    return dataset, split, dataset.user_offsets[split.users]


def draw(options, prepared, seed=0):
    """Return the lists (events, times) of each sample."""
    _, split, first = prepared
    events, times, offsets = augmented(Augment(**options), np.random.default_rng(seed), first, split.begin, split.end)
    return [(events[a:b].tolist(), times[a:b].tolist()) for a, b in itertools.pairwise(offsets)]


def test_default_options_change_nothing(prepared):
    _, split, _ = prepared
    expected = [list(range(a, b)) for a, b in zip(split.begin, split.end)]
    assert draw({}, prepared) == [(x, x) for x in expected] == draw({"shuffle": 1.0}, prepared)


def test_windows_have_the_user_s_training_events_and_all_are_drawn(prepared):
    _, split, first = prepared
    begins = {}
    for seed in range(40):
        for place, (events, times) in enumerate(draw({"window": 1.0}, prepared, seed)):
            assert events == times == list(range(events[0], events[0] + split.end[place] - split.begin[place]))
            begins.setdefault(place, set()).add(events[0])
    assert all(begins[i] <= set(range(first[i], split.begin[i] + 1)) for i in begins)
    moved = [i for i in begins if split.begin[i] - first[i] == 2]
    assert moved and all(begins[i] == {first[i], first[i] + 1, first[i] + 2} for i in moved)


def test_half_of_the_windows_are_the_latest(prepared):
    _, split, first = prepared
    longer = np.flatnonzero(split.begin - first >= 10)
    latest = [draw({"window": 0.5}, prepared, seed)[i][0][0] == split.begin[i] for seed in range(15) for i in longer]
    assert len(latest) > 500 and 0.5 < np.mean(latest) < 0.6  # half are kept, the others are uniform over all windows


def test_dropping_keeps_the_order_and_the_last_two_events(prepared):
    _, split, _ = prepared
    drawn = draw({"drop": 0.3}, prepared)
    left_out = 0
    for place, (events, times) in enumerate(drawn):
        assert events == times == sorted(set(events)) and events[-2:] == [split.end[place] - 2, split.end[place] - 1]
        left_out += split.end[place] - split.begin[place] - len(events)
    could = (split.end - split.begin - 2).sum()
    assert abs(left_out / could - 0.3) < 0.05


def test_shuffled_events_change_places_and_times_do_not(prepared):
    nearby, far = (draw({"shuffle": reach}, prepared) for reach in (2.0, 1000.0))
    swaps = {"nearby": [], "far": []}
    for name, drawn in (("nearby", nearby), ("far", far)):
        for events, times in drawn:
            assert sorted(events) == times == sorted(times)
            swaps[name] += [a > b for a, b in itertools.pairwise(events)]
            if name == "nearby":
                assert all(abs(a - b) < 2 for a, b in zip(events, times))
    assert 0.08 < np.mean(swaps["nearby"]) < 0.17 and 0.45 < np.mean(swaps["far"]) < 0.55


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_batches_have_the_drawn_events(prepared, device):
    dataset, split, first = prepared
    rng = np.random.default_rng(0)
    dataset = dataclasses.replace(dataset, event_rows=rng.integers(-1, 5, (dataset.num_events, 2, 3), np.int32))
    options = Augment(window=0.5, drop=0.2, shuffle=20.0)
    batches = Batches(dataset, split, batch_size=7, seed=3, device=device, augment=options)
    order, _ = batches._plan(2)
    drawn = augmented(options, np.random.default_rng([3, 2, 1]), first[order], split.begin[order], split.end[order])
    events, times, offsets = map(torch.from_numpy, drawn)
    place = 0
    for batch in batches.epoch(2):
        batch = batch.to("cpu")
        for number, user in enumerate(batch.users.tolist()):
            assert user == split.users[order[place]]
            items, at = (x[offsets[place] : offsets[place + 1]] for x in (events, times))
            part = slice(batch.seq_offsets[number], batch.seq_offsets[number + 1])
            for name, column, rows in (
                ("item_ids", dataset.items, items[:-1]),
                ("target_ids", dataset.items, items[1:]),
                ("actions", dataset.actions, items[:-1]),
                ("event_features", dataset.event_rows, items[:-1]),
                ("timestamps", dataset.timestamps, at[:-1]),
                ("query_timestamps", dataset.timestamps, at[1:]),
            ):
                assert getattr(batch, name)[part].tolist() == torch.from_numpy(column)[rows].tolist(), name
            place += 1
    assert place == len(split)


def test_epochs_differ_and_can_be_repeated(prepared):
    dataset, split, _ = prepared

    def items(epoch, start=0):
        batches = Batches(dataset, split, batch_size=50, augment=Augment(shuffle=20.0))
        return [batch.item_ids.tolist() for batch in batches.epoch(epoch, start)]

    assert items(0) == items(0) and items(0)[2:] == items(0, start=2) and items(0) != items(1)
