"""Test shards of the item table: their initial values and their rows."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from models import embedding
from tests.models.test_hstu import make_embedding
from training.ranks import tables


class Shard(tables.ShardedTable):
    """A shard without torchrec."""

    def __init__(self, begin, end):
        self.num_items, self.size, self.begin, self.end = 101, 8, begin, end
        self.weight = torch.zeros(end[0] - begin[0], end[1] - begin[1])


@pytest.mark.parametrize("drawn_whole", [10**6, 0])
def test_a_shard_is_initialised_like_its_part_of_the_table(drawn_whole, monkeypatch):
    monkeypatch.setattr(tables, "BLOCK", 256)
    monkeypatch.setattr(embedding, "DRAWN_WHOLE", drawn_whole)
    shards = [Shard((0, 0), (101, 8)), Shard((40, 2), (90, 6)), Shard((90, 0), (101, 8))]
    positions = []
    for shard in shards:
        torch.manual_seed(3)
        positions.append(make_embedding(101, shard).position)
    whole = shards[0].weight
    assert torch.equal(shards[1].weight, whole[40:90, 2:6]) and torch.equal(shards[2].weight, whole[90:])
    assert torch.equal(positions[0], positions[1]) and whole.std() > 0.01 and whole.unique().numel() > 800
    if drawn_whole:
        torch.manual_seed(3)
        plain = make_embedding(101)
        assert torch.equal(plain.item_weight, whole) and torch.equal(plain.position, positions[0])


def test_look_ups_in_evaluation_are_not_steps_of_a_fused_optimiser():
    shard, ids = Shard((0, 0), (101, 8)), torch.tensor([3, 5])
    table = (101, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)
    shard.kernel = SplitTableBatchedEmbeddingBagsCodegen([table], optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    shard.fused = "adam"
    for step in (0, 1, 7):
        for _ in range(3):
            shard.kernel(ids, torch.tensor([0, 1, 2]))
        shard.begin_step(0.1, step)
        shard.kernel(ids, torch.tensor([0, 1, 2]))
        assert int(shard.kernel.iter_cpu) == int(shard.kernel.iter) == step + 1


def test_a_shard_takes_rows_of_another_table(monkeypatch):
    monkeypatch.setattr(tables, "BLOCK", 64)
    shards = [Shard((0, 0), (101, 8)), Shard((40, 2), (90, 6)), Shard((0, 0), (0, 0))]
    other, places = torch.randn(70, 8), torch.randperm(70)[:50]
    ids = torch.randperm(101)[:50].sort().values
    for shard in shards:
        shard.weight.fill_(7)
        shard.take(lambda begin, end: other[begin:end], ids, places)
    expected = torch.full((101, 8), 7.0)
    expected[ids] = other[places]
    assert torch.equal(shards[0].weight, expected) and torch.equal(shards[1].weight, expected[40:90, 2:6])
