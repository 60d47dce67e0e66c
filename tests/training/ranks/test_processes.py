"""Check the basis of ranks that share a batch: even parts, equal random numbers, refusals."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from data.balance import Deal
from data.batch import Batch
from data.batches import Batches
from data.errors import ConfigError
from data.splits import make_splits
from data.synthetic import generate
from models import embedding
from models.losses import Negatives, Share
from training.config import load_config
from training.ranks import tables
from training.ranks.draws import Draws, mixed, seed_of
from training.ranks.losses import looked_up

ROOT = Path(__file__).resolve().parents[3]
SYNTHETIC = ROOT / "configs/synthetic-hstu.yaml"
FUSED = ["parallel.embedding=row_wise", "parallel.fused=adam"]


@pytest.mark.parametrize("world", [1, 2, 4, 7])
def test_every_sequence_has_one_rank(world):
    lengths = np.random.default_rng(0).integers(1, 200, 128)
    parts = [Deal(rank, world, 10.0).mine(lengths)[0] for rank in range(world)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(128))


def test_balanced_batches_are_even():
    """Predicted work on lengths of many users at the window's end and few below, as ml-1m has them: must-hold 4."""
    rng = np.random.default_rng(0)
    even, plain = [], []
    for _ in range(50):
        lengths = np.minimum(200, rng.lognormal(4.6, 1.0, 8 * 128).astype(int) + 5)
        even.append(Deal(0, 8, 100.0).owners(lengths)[1])
        plain.append(Deal(0, 8, 100.0, even=False).owners(lengths)[1])
    assert max(even) < 1.01 < 1.03 < np.mean(plain)


def test_parts_of_a_batch_are_the_batch():
    """The ranks' tokens at their rows make the batch of one process; a rank without sequences has padding alone."""
    dataset = generate(num_users=13, num_items=60, num_clusters=5, mean_length=12)
    split = make_splits(dataset, "leave_one_out", max_seq_len=10).train
    whole = list(Batches(dataset, split, batch_size=4, seed=3, with_seen=True).epoch(2, start=1))
    parts = [
        list(Batches(dataset, split, batch_size=4, seed=3, with_seen=True, deal=Deal(rank, 3, 5.0)).epoch(2, start=1))
        for rank in range(3)
    ]
    for number, batch in enumerate(whole):
        items, targets = torch.full((2, batch.num_tokens), -2)
        for part in (of_rank[number] for of_rank in parts):
            assert part.whole.tokens == batch.num_tokens and part.whole.step == 2 * (len(whole) + 1) + 1 + number
            if not part.real.any():
                assert (part.target_ids == -1).all() and batch.num_sequences < 3
                continue
            assert (items[part.rows] == -2).all()
            items[part.rows], targets[part.rows] = part.item_ids, part.target_ids
        assert torch.equal(items, batch.item_ids) and torch.equal(targets, batch.target_ids)
    assert whole[-1].num_sequences == 1


def test_some_sequences_of_a_batch():
    dataset = generate(num_users=7, num_items=60, num_clusters=5, mean_length=12)
    split = make_splits(dataset, "leave_one_out", max_seq_len=10).train
    options = dict(shuffle=False, with_seen=True)
    (batch,) = Batches(dataset, split, batch_size=7, **options).epoch(0)
    parts = list(Batches(dataset, split, batch_size=2, **options).epoch(0))
    for number, part in enumerate(parts):
        mine = batch.sequences(2 * number, min(7, 2 * number + 2))
        for name in ("item_ids", "target_ids", "seq_offsets", "users", "seen_items", "seen_offsets", "real"):
            assert torch.equal(getattr(mine, name), getattr(part, name)), name


def test_draws_depend_on_the_row_alone():
    rows = torch.randperm(1000)
    whole = Draws(7, 3, torch.arange(1000)).below(97, (1000, 16))
    part = Draws(7, 3, rows[:300]).below(97, (300, 16))
    assert torch.equal(part, whole[rows[:300]]) and whole.min() == 0 and whole.max() == 96
    shared = [Draws(7, 3, rows[:count]).below(10**9, (50,)) for count in (1, 300)]
    assert torch.equal(*shared) and shared[0].unique().numel() == 50
    other = [Draws(8, 3, rows), Draws(7, 4, rows)]
    assert all((one.below(10**9, (1000, 16)) == Draws(7, 3, rows).below(10**9, (1000, 16))).sum() < 3 for one in other)
    draws = Draws(7, 3, rows)
    assert (draws.below(10**9, (1000, 2)) == draws.below(10**9, (1000, 2))).sum() < 3
    # Uniform: chi-square of 97 bins over 16,000 numbers, five deviations of it.
    counts = torch.bincount(whole.flatten(), minlength=97).double()
    assert ((counts - 16000 / 97) ** 2 / (16000 / 97)).sum() < 96 + 5 * (2 * 96) ** 0.5


def test_mixed_is_splitmix64():
    """Its first numbers from the seed 1234567, as published with the reference implementation."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    state = [1234567 + step * 0x9E3779B97F4A7C15 for step in range(3)]
    actual = mixed(torch.tensor([(x + 2**63) % 2**64 - 2**63 for x in state]))
    assert [x % 2**64 for x in actual.tolist()] == expected
    assert 0 <= seed_of(2**63 - 1, 5, 0) < 2**63


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.data=0"], "expected auto or an integer of at least 1"),
        (["parallel.embedding=column_wise", "loss.kind=cross_entropy"], "takes replicated or row_wise"),
        (["parallel.fused=adam"], "parallel.fused: needs a sharded table"),
        (
            ["parallel.embedding=row_wise", "parallel.fused=adam", "loss.kind=cross_entropy"],
            "parallel.fused: does not apply",
        ),
        (["parallel.embedding=row_wise", "parallel.fused=adam", "train.clip_norm=1"], "train.clip_norm"),
        (
            ["parallel.embedding=row_wise", "loss.kind=cross_entropy", "loss.label_smoothing=.1"],
            "label_smoothing takes",
        ),
        (["parallel.embedding=row_wise", "model.table_dtype=bfloat16"], "model.table_dtype must be float32"),
    ],
)
def test_what_ranks_cannot_have_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(SYNTHETIC, overrides)


class Shard(tables.ShardedTable):
    """A shard alone, without torchrec."""

    def __init__(self, begin, end):
        self.num_items, self.size, self.begin, self.end = 101, 8, begin, end
        self.weight = torch.zeros(end[0] - begin[0], end[1] - begin[1])


@pytest.mark.parametrize("drawn_whole", [10**6, 0])
def test_a_shard_begins_as_its_part_of_the_table(drawn_whole, monkeypatch):
    monkeypatch.setattr(tables, "BLOCK", 256)
    monkeypatch.setattr(embedding, "DRAWN_WHOLE", drawn_whole)
    shards = [Shard((0, 0), (101, 8)), Shard((40, 2), (90, 6)), Shard((90, 0), (101, 8))]
    positions = []
    for shard in shards:
        torch.manual_seed(3)
        positions.append(embedding.InputEmbedding(101, 0, 8, 5, 0.0, table=shard).position)
    whole = shards[0].weight
    assert torch.equal(shards[1].weight, whole[40:90, 2:6]) and torch.equal(shards[2].weight, whole[90:])
    assert torch.equal(positions[0], positions[1]) and whole.std() > 0.01 and whole.unique().numel() > 800
    if drawn_whole:
        torch.manual_seed(3)
        plain = embedding.InputEmbedding(101, 0, 8, 5, 0.0)
        assert torch.equal(plain.item_weight, whole) and torch.equal(plain.position, positions[0])


def test_ranks_look_up_the_items_that_one_process_looks_up():
    # Fused adam moves every row that is looked up, so an idle rank must not ask for any other.
    table, id_sets = Shard((0, 0), (101, 8)), []
    table.look_up = lambda ids: id_sets.append(set(ids.tolist())) or table.weight[ids]
    model = embedding.InputEmbedding(101, 0, 8, 5, 0.0, table=table)
    items, targets = torch.tensor([3, 7, 9, 4, 8]), torch.tensor([7, 9, 11, 8, -1])
    times, offsets, users = torch.zeros(5, dtype=torch.long), torch.tensor([0, 3, 5]), torch.tensor([0, 1])
    batch = Batch(items, times, targets, times, offsets, users)
    parts = [batch, batch.sequences(0, 1), batch.sequences(1, 2), batch.sequences(0, 1).as_padding()]
    for part, negatives in zip(parts, ([20, 21, 22, 23, 24], [20, 21, 22], [23, 24], [20, 21, 22])):
        drawn = Negatives(torch.tensor(negatives)[:, None])
        looked_up(model, part, Share(None, part.target_ids, drawn, torch.tensor(4)))
    assert id_sets[0] == {3, 4, 7, 8, 9, 11, *range(20, 25)} == id_sets[1] | id_sets[2] and id_sets[3] < id_sets[0]


def test_look_ups_of_evaluation_are_no_steps_of_a_fused_optimiser():
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
