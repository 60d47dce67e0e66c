"""Test batches against a construction row by row in plain Python."""

import dataclasses

import numpy as np
import pytest
import torch

from data.balance import Deal
from data.batches import Batches
from data.datasets import DataError, Dataset
from data.splits import Split, make_splits


def make_dataset(num_users=37, num_items=50, seed=0, actions=True, longest=30):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, num_users)
    offsets = np.append(0, np.cumsum(lengths))
    n = int(offsets[-1])
    return Dataset(
        name="random",
        items=rng.integers(0, num_items, n).astype(np.int32),
        timestamps=np.concatenate([np.sort(rng.integers(0, 1000, k)) for k in lengths]),
        actions=rng.integers(0, 5, n).astype(np.int32) if actions else None,
        user_offsets=offsets,
        user_ids=np.arange(num_users),
        item_ids=np.arange(num_items),
        has_timestamps=True,
        fingerprint="random",
    )


def with_features(dataset):
    """Return the data set with rows of features: two of users and two of events, up to three values each."""
    rows = {"user_rows": dataset.num_users, "event_rows": dataset.num_events}
    rng = np.random.default_rng(0)
    drawn = {name: rng.integers(-1, 5, (size, 2, 3), np.int32) for name, size in rows.items()}
    return dataclasses.replace(dataset, **drawn)


def naive(dataset, split, order, with_seen):
    """Build the fields of one batch row by row."""
    out = {name: [] for name in ("item_ids", "timestamps", "target_ids", "query_timestamps", "actions", "seen_items")}
    seq_offsets, seen_offsets, users = [0], [0], []
    for i in order:
        user, begin, end = (int(x[i]) for x in (split.users, split.begin, split.end))
        users.append(user)
        for at in range(begin, end - 1):
            out["item_ids"].append(int(dataset.items[at]))
            out["timestamps"].append(int(dataset.timestamps[at]))
            out["target_ids"].append(int(dataset.items[at + 1]))
            out["query_timestamps"].append(int(dataset.timestamps[at + 1]))
            out["actions"].append(None if dataset.actions is None else int(dataset.actions[at]))
        for at in range(int(dataset.user_offsets[user]), end - 1):
            out["seen_items"].append(int(dataset.items[at]))
        seq_offsets.append(len(out["item_ids"]))
        seen_offsets.append(len(out["seen_items"]))
    out |= {"seq_offsets": seq_offsets, "users": users, "seen_offsets": seen_offsets}
    if dataset.actions is None:
        out["actions"] = None
    features = dataset.user_rows is not None
    out["user_features"] = dataset.user_rows[users].tolist() if features else None
    places = [at for i in order for at in range(int(split.begin[i]), int(split.end[i]) - 1)]
    out["event_features"] = dataset.event_rows[places].tolist() if features else None
    if not with_seen:
        out["seen_items"] = out["seen_offsets"] = None
    out["has_action"] = out["num_targets"] = None  # only for ranking
    out["relevant_items"] = out["relevant_offsets"] = None  # only for splits with targets
    return out


def as_lists(batch):
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if "layout" in f.metadata}
    assert fields.pop("real").tolist() == [True] * batch.num_tokens and (fields.pop("rows") is None or batch.whole)
    for name, value in fields.items():
        if name == "has_action":
            continue
        assert value is None or (value.dtype == torch.int64 and value.ndim == (3 if "features" in name else 1)), name
    return {name: None if value is None else value.tolist() for name, value in fields.items()}


def check_epoch(batches, dataset, split, epoch=0):
    """Check that each sample is in one batch, and each batch equals the naive one; return the sizes of the batches."""
    position = {(int(u), int(e)): i for i, (u, e) in enumerate(zip(split.users, split.end))}
    visited, sizes = [], []
    for batch in batches.epoch(epoch):
        users = batch.users.tolist()
        order = [next(i for (u, _), i in position.items() if u == user) for user in users]
        assert as_lists(batch) == naive(dataset, split, order, batches.with_seen)
        assert batch.num_tokens == len(batch.item_ids) and batch.num_sequences == len(users)
        visited += users
        sizes.append(len(users))
    assert sorted(visited) == split.users.tolist()
    assert len(sizes) == len(batches)
    return sizes


@pytest.mark.parametrize("part", ["train", "valid", "test"])
@pytest.mark.parametrize("actions", [True, False])
@pytest.mark.parametrize("group_by_length", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_equals_naive(part, actions, group_by_length, shuffle):
    dataset = make_dataset(actions=actions)
    dataset = with_features(dataset) if actions else dataset
    split = getattr(make_splits(dataset, "leave_one_out", max_seq_len=8), part)
    batches = Batches(
        dataset, split, batch_size=5, shuffle=shuffle, group_by_length=group_by_length, with_seen=part == "test"
    )
    sizes = check_epoch(batches, dataset, split)
    assert sorted(sizes)[1:] == [5] * (len(sizes) - 1) and sum(sizes) == len(split)


def test_seen_items_include_those_before_the_window_but_not_the_target():
    dataset = make_dataset(num_users=3, longest=30, seed=1)
    split = make_splits(dataset, "published", max_seq_len=2).test
    (batch,) = Batches(dataset, split, batch_size=9, shuffle=False, with_seen=True).epoch(0)
    for row, user in enumerate(batch.users.tolist()):
        first, last = dataset.user_offsets[user], dataset.user_offsets[user + 1]
        seen = batch.seen_items[batch.seen_offsets[row] : batch.seen_offsets[row + 1]]
        assert seen.tolist() == dataset.items[first : last - 1].tolist()
        assert batch.target_ids[batch.seq_offsets[row + 1] - 1] == dataset.items[last - 1]


def all_users(batches, epoch, start=0):
    return [batch.users.tolist() for batch in batches.epoch(epoch, start)]


@pytest.mark.parametrize("group_by_length", [True, False])
def test_order_depends_only_on_seed_and_epoch(group_by_length):
    dataset = make_dataset(num_users=100)
    split = make_splits(dataset, "published", max_seq_len=10).train

    def batches(seed=3):
        return Batches(dataset, split, batch_size=7, seed=seed, group_by_length=group_by_length)

    one = batches()
    zeroth, first = all_users(one, 0), all_users(one, 1)
    assert zeroth != first
    assert all_users(batches(), 1) == first and all_users(one, 0) == zeroth
    assert all_users(batches(seed=4), 0) != zeroth
    for start in (1, 5, len(one) - 1, len(one), len(one) + 3):
        assert all_users(one, 0, start) == zeroth[start:]
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.rand(1), np.random.rand()
    torch.manual_seed(0)
    np.random.seed(0)
    all_users(one, 0)
    assert (torch.rand(1), np.random.rand()) == before  # the global generators are not used


def test_unshuffled_order_is_the_split_s():
    dataset = make_dataset()
    split = make_splits(dataset, "published", max_seq_len=10).test
    batches = Batches(dataset, split, batch_size=4, shuffle=False)
    for epoch in (0, 9):
        assert [user for users in all_users(batches, epoch) for user in users] == split.users.tolist()


def spread(batches):
    """Return the mean difference between the longest and the shortest sequence of a batch."""
    lengths = [batch.seq_offsets.diff() for batch in batches.epoch(0)]
    return float(np.mean([int(x.max() - x.min()) for x in lengths]))


def test_group_by_length_evens_out_the_batches():
    dataset = make_dataset(num_users=400)
    split = make_splits(dataset, "published", max_seq_len=30).train
    grouped = Batches(dataset, split, batch_size=16, group_by_length=True)
    assert spread(grouped) < 0.2 * spread(Batches(dataset, split, batch_size=16))
    # The batches are in random order, not sorted by length.
    means = [float(batch.seq_offsets.diff().double().mean()) for batch in grouped.epoch(0)]
    assert means != sorted(means) and means != sorted(means, reverse=True)


def test_group_by_length_over_several_chunks():
    dataset = make_dataset(num_users=300)
    split = make_splits(dataset, "published", max_seq_len=10).train
    check_epoch(Batches(dataset, split, batch_size=1, group_by_length=True), dataset, split)
    check_epoch(Batches(dataset, split, batch_size=2, group_by_length=True), dataset, split, epoch=3)


@pytest.mark.parametrize("group_by_length", [True, False])
def test_empty_split(group_by_length):
    none = np.zeros(0, np.int64)
    batches = Batches(
        make_dataset(), Split(none, none, none), batch_size=4, group_by_length=group_by_length, with_seen=True
    )
    assert len(batches) == 0 and list(batches.epoch(0)) == []


def test_one_sample_and_a_batch_larger_than_the_split():
    dataset = make_dataset()
    split = Split(np.array([1]), dataset.user_offsets[1:2], dataset.user_offsets[1:2] + 2)
    (batch,) = Batches(dataset, split, batch_size=100).epoch(0)
    assert batch.seq_offsets.tolist() == [0, 1]


def test_bad_batch_size():
    dataset = make_dataset()
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        Batches(dataset, make_splits(dataset, "published", max_seq_len=3).train, batch_size=0)


def test_to_moves_every_field():
    dataset = with_features(make_dataset())
    split = make_splits(dataset, "published", max_seq_len=3).test
    batch = next(Batches(dataset, split, batch_size=4, with_seen=True, deal=Deal(0, 1, 1.0)).epoch(0))
    relevant = {"relevant_items": batch.item_ids[:5], "relevant_offsets": torch.tensor([0, 2, 3, 4, 5])}
    batch = dataclasses.replace(batch, phase=7, has_action=batch.real, num_targets=batch.users, **relevant)
    moved = batch.to("meta")
    tensors = [getattr(moved, f.name) for f in dataclasses.fields(moved) if "layout" in f.metadata]
    assert all(x.device.type == "meta" for x in tensors)
    assert as_lists(batch.to("cpu")) == as_lists(batch)
    assert moved.phase == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("group_by_length", [True, False])
def test_cuda_equals_cpu_without_any_sync(monkeypatch, fits, group_by_length):
    dataset = make_dataset(num_users=200)
    split = make_splits(dataset, "published", max_seq_len=12).test
    if not fits:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    options = {"batch_size": 16, "group_by_length": group_by_length, "with_seen": True}
    on_gpu = Batches(dataset, split, device="cuda", **options)
    epoch = on_gpu.epoch(2)
    batches = [next(epoch)]  # the first batch uploads the order of the epoch, which may synchronise
    try:
        torch.cuda.set_sync_debug_mode("error")
        batches += list(epoch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(batch.item_ids.is_cuda for batch in batches)
    expected = [as_lists(batch) for batch in Batches(dataset, split, device="cpu", **options).epoch(2)]
    assert [as_lists(batch) for batch in batches] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_cuda_columns_are_shared_between_splits():
    dataset = make_dataset(num_users=200)
    splits = make_splits(dataset, "published", max_seq_len=12)
    train, test = (Batches(dataset, s, batch_size=8, device="cuda") for s in (splits.train, splits.test))
    assert train._columns["items"] is test._columns["items"]


@pytest.mark.parametrize("item", [-1, 50])
def test_item_beyond_the_catalogue_is_an_error(item):
    dataset = make_dataset(num_items=50)
    dataset.items[3] = item
    with pytest.raises(DataError, match=r"random: item ids must lie in 0\.\.49, got"):
        Batches(dataset, make_splits(dataset, "published", max_seq_len=10).train, batch_size=4)
