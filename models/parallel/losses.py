"""What a rank needs of the whole batch for its share of a loss, drawn and looked up before the forward pass.

Letters: T tokens of a rank, K negatives of a token, R rows that a rank looked up, E embedding size.
"""

from typing import NamedTuple

from torch import Tensor

from data.batch import Batch
from models.config import LossConfig
from models.hstu import SequenceModel
from models.losses import Share, draw_negatives, places_of
from models.parallel.draws import Draws
from models.parallel.ranks import Ranks


class Prepared(NamedTuple):
    """A rank's share of the loss, and the representations [T, E] of the batch's items where the table is sharded."""

    share: Share
    inputs: Tensor | None = None


def prepare(model: SequenceModel, config: LossConfig | None, seed: int, batch: Batch, ranks: Ranks) -> Prepared:
    """What a rank's part of a batch needs of the others; config: of a retrieval loss, None of another task's."""
    if config is None:
        return Prepared(Share(ranks, batch.target_ids, None, batch.target_ids.new_ones(())))
    features = model.embedding.items
    num_items = len(model.item_weight) if features is None else len(features.trained)
    targets = places_of(features, batch.target_ids)
    pool = None
    if config.kind in ("in_batch", "mixed_negatives"):
        pool = of_the_whole(targets + 1, batch, ranks) - 1
    assert batch.whole is not None and batch.rows is not None
    draws = Draws(seed, batch.whole.step, batch.rows)
    drawn = draw_negatives(config, num_items, targets, pool, draws.below)
    count = ranks.sum((targets >= 0).sum()).clamp(min=1)
    return Prepared(Share(ranks, targets, drawn, count))


def of_the_whole(x: Tensor, batch: Batch, ranks: Ranks) -> Tensor:
    """`x` [T, ...] of all ranks' tokens, in the order of the whole batch; without a gradient."""
    assert batch.whole is not None and batch.rows is not None
    whole = x.new_zeros(batch.whole.tokens, *x.shape[1:])
    return ranks.sum(whole.index_add_(0, batch.rows, x.detach() * batch.real.view(-1, *[1] * (x.dim() - 1))))
