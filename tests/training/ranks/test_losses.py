"""Test the loss of ranks that share a batch."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.batch import Batch, Whole
from models.losses import Negatives, Share
from models.options import LossConfig
from tests.models.test_hstu import make_embedding
from tests.training.ranks.test_tables import Shard
from training.config import load_config
from training.ranks.losses import look_up, prepare
from training.ranks.processes import Ranks
from training.ranks.sharding import num_looked_up

CONFIG = Path(__file__).parents[3] / "configs/synthetic-hstu.yaml"


def test_ranks_look_up_the_items_that_one_process_looks_up():
    # Fused adam updates every row that is looked up, so an idle rank must not look up any other row.
    table, id_sets = Shard((0, 0), (101, 8)), []
    table.look_up = lambda ids: id_sets.append(set(ids.tolist())) or table.weight[ids]
    model = make_embedding(101, table)
    items, targets = torch.tensor([3, 7, 9, 4, 8]), torch.tensor([7, 9, 11, 8, -1])
    times, offsets, users = torch.zeros(5, dtype=torch.long), torch.tensor([0, 3, 5]), torch.tensor([0, 1])
    batch = Batch(items, times, targets, times, offsets, users)
    parts = [batch, batch.sequences(0, 1), batch.sequences(1, 2), batch.sequences(0, 1).as_padding()]
    for part, negatives in zip(parts, ([20, 21, 22, 23, 24], [20, 21, 22], [23, 24], [20, 21, 22])):
        drawn = Negatives(torch.tensor(negatives)[:, None])
        look_up(model, part, Share(part.target_ids, drawn, torch.tensor(4)))
    assert id_sets[0] == {3, 4, 7, 8, 9, 11, *range(20, 25)} == id_sets[1] | id_sets[2] and id_sets[3] < id_sets[0]


def test_a_rank_draws_the_negatives_of_its_blocks_in_the_whole_batch():
    model = SimpleNamespace(embedding=make_embedding(1000))
    config, ranks = LossConfig(negatives="block", num_negatives=4), Ranks(load_config(CONFIG, []))
    drawn = []
    for rows in (torch.arange(300), torch.tensor([256, 3, 127, 128])):
        zeros = torch.zeros(len(rows), dtype=torch.long)
        batch = Batch(zeros, zeros, zeros, zeros, torch.tensor([0, len(rows)]), torch.tensor([0]), rows=rows)
        batch.whole = Whole(step=5, tokens=300, imbalance=1.0)
        share = prepare(model, config, torch.tensor([11, 12]), batch, ranks).share
        assert share.drawn.ids.shape == (3, 4)  # looked up once
        drawn.append(share.drawn.per_position(len(rows)))
    assert torch.equal(drawn[1], drawn[0][[256, 3, 127, 128]])
    assert torch.equal(drawn[0][0], drawn[0][297]) and not torch.equal(drawn[0][0], drawn[0][1])


@pytest.mark.parametrize(("form", "rows"), [("per_position", 1000), ("shared", 1), ("block", 32)])
def test_number_of_items_to_look_up(form, rows):
    config = load_config(CONFIG, [f"loss.negatives={form}", "loss.num_negatives=7"])
    assert num_looked_up(config, tokens=1000, ranks=4) == 2000 + 7 * rows
