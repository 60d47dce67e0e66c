"""Check scores of a model over the catalogue in tiles."""

import torch
from torch.nn import functional as F

from evaluation import scores as scores_module
from models.tasks.scoring import model_scorer
from tests.evaluation.test_scores import batch_of


def test_a_tile_of_the_model_is_a_part_of_its_scores(monkeypatch):
    """A tile has the same width wherever it begins: a duplicated item has one score."""
    table = torch.randn(90, 16, generator=torch.Generator().manual_seed(0))
    table[70] = table[10]
    out = F.normalize(torch.randn(4, 16, generator=torch.Generator().manual_seed(1)), dim=1)

    class Model(torch.nn.Module):
        item_weight, item_table, head, repeats = table, table, None, None

        def forward(self, batch):
            return out, {}

    scorer = model_scorer(Model())
    batch = batch_of([[1]] * 4, [[2]] * 4, [3] * 4)
    monkeypatch.setattr(scores_module, "TILE", 4 * 32)
    scores = scorer(batch)
    tiles = list(scores.tiles())
    assert [(begin, start, tile.shape[1]) for begin, start, tile in tiles] == [(0, 0, 32), (32, 32, 32), (64, 58, 32)]
    torch.testing.assert_close(tiles[2][2], out @ F.normalize(table, dim=1)[58:].T)
    assert torch.equal(tiles[0][2][:, 10], tiles[2][2][:, 70 - 58])
