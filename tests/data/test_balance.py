"""Test the division of batches among ranks: each sequence once, equal work."""

import numpy as np
import pytest
import torch

from data.balance import Deal
from data.batches import Batches
from data.splits import make_splits
from data.synthetic import generate


@pytest.mark.parametrize("world", [1, 2, 4, 7])
def test_every_sequence_has_one_rank(world):
    lengths = np.random.default_rng(0).integers(1, 200, 128)
    parts = [Deal(rank, world, 10.0).local(lengths)[0] for rank in range(world)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(128))


def test_balanced_batches_are_even():
    """Test the predicted work with lengths as in ml-1m: many users at the window's length, few below."""
    rng = np.random.default_rng(0)
    even, plain = [], []
    for _ in range(50):
        lengths = np.minimum(200, rng.lognormal(4.6, 1.0, 8 * 128).astype(int) + 5)
        even.append(Deal(0, 8, 100.0).owners(lengths)[1])
        plain.append(Deal(0, 8, 100.0, even=False).owners(lengths)[1])
    assert max(even) < 1.01 < 1.03 < np.mean(plain)


def test_parts_of_a_batch_are_the_batch():
    """Check that all ranks' tokens are the batch of one process; a rank without sequences has only padding."""
    dataset = generate(num_users=13, num_items=60, num_clusters=5, mean_length=12)
    split = make_splits(dataset, "leave_one_out", max_seq_len=10).train
    whole = list(Batches(dataset, split, batch_size=4, seed=3, with_seen=True).epoch(2, start=1))
    parts = [
        list(Batches(dataset, split, batch_size=4, seed=3, with_seen=True, deal=Deal(rank, 3, 5.0)).epoch(2, start=1))
        for rank in range(3)
    ]
    for number, batch in enumerate(whole):
        items, targets = torch.full((2, batch.num_tokens), -2)
        for part in (rank_batches[number] for rank_batches in parts):
            assert part.whole.tokens == batch.num_tokens and part.whole.step == 2 * (len(whole) + 1) + 1 + number
            if not part.real.any():
                assert (part.target_ids == -1).all() and batch.num_sequences < 3
                continue
            assert (items[part.rows] == -2).all()
            items[part.rows], targets[part.rows] = part.item_ids, part.target_ids
        assert torch.equal(items, batch.item_ids) and torch.equal(targets, batch.target_ids)
    assert whole[-1].num_sequences == 1
