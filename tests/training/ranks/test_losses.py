"""The loss of ranks that share a batch."""

import torch

from data.batch import Batch
from models import embedding
from models.losses import Negatives, Share
from tests.training.ranks.test_tables import Shard
from training.ranks.losses import looked_up


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
