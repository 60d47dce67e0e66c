"""Score items by a trained model: each user's last output with the whole catalogue.

Letters: B users, I items, E embedding size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from data.batch import Batch
from data.earlier import Earlier
from evaluation import scores
from evaluation.scores import Scores
from models.hstu import SequenceModel
from models.protocols import RankGroup
from models.repeats import add_terms


def normalized_items(item_weight: Tensor) -> Tensor:
    """Normalise each row to length one: [I, E] -> [I, E]."""
    return F.normalize(item_weight.float(), dim=-1, eps=1e-6)


@torch.no_grad()
def repeat_terms(model: SequenceModel, out: Tensor, batch: Batch) -> tuple[Tensor, Tensor] | None:
    """Return (items [B, N], what is added to their scores [B, N]) of the outputs [B, E] of length one at the last
    tokens of a batch whose sequences have up to N tokens; None if the model has no such term.
    """
    if model.repeats is None:
        return None
    # On a GPU the limit saves the host from waiting for the batch's longest length.
    longest = len(model.embedding.position)
    if not batch.seq_offsets.is_cuda:
        longest = int(batch.seq_offsets.diff().max()) if batch.num_sequences else 0
    return model.repeats(out, batch.seq_offsets[1:] - 1, Earlier.of(batch, longest))


def output_scorer(model: SequenceModel, ranks: RankGroup | None = None) -> Callable[..., Scores]:
    """Return a function that scores outputs [B, E] of length one with every item, fp32: the cosine, or the head's
    score. Its second argument is the batch at whose last tokens the outputs are, for a model with a term of repeats.

    ranks: set if each of them, given the same outputs, computes the scores of its share of the items.
    """
    with torch.no_grad():
        if ranks is None:
            table = model.item_table.detach()
            first, num_items = 0, len(table)
        else:
            num_items = model.embedding.num_items
            first, last = ranks.share(num_items)
            of_all = model.embedding.items_between if model.targets is None else lambda a, b: model.item_table[a:b]
            table = of_all(first, last).detach()

    @torch.no_grad()
    def prepared(rows: Tensor) -> Any:
        return normalized_items(rows) if model.head is None else model.head.items(rows)

    # A small catalogue is prepared once, a large one tile by tile: prepared, it would be a second table.
    all_prepared = prepared(table) if table.numel() <= 4 * scores.TILE else None

    def score(out: Tensor, batch: Batch | None = None) -> Scores:
        terms = None if batch is None else repeat_terms(model, out, batch)

        @torch.no_grad()
        def tile(begin: int, end: int) -> Tensor:
            begin, end = begin - first, end - first
            if model.head is not None:
                items = model.head.items(table[begin:end]) if all_prepared is None else all_prepared.rows(begin, end)
                return model.head.scores_of_all(out, items)
            cosines = out @ (prepared(table[begin:end]) if all_prepared is None else all_prepared[begin:end]).T
            return cosines if terms is None else add_terms(cosines, *terms, first + begin)

        return Scores(len(out), num_items, tile, ranks)

    return score


def model_scorer(
    model: SequenceModel, autocast: bool = False, ranks: RankGroup | None = None
) -> Callable[[Batch], Scores]:
    """Return a function that scores each sequence's last output with every item. Puts the model into eval mode.

    ranks: the ranks that are given the same batches; each computes the outputs of its share of the sequences.
    """
    model.eval()
    scores_of = output_scorer(model, ranks)

    @torch.no_grad()
    def score(batch: Batch) -> Scores:
        begin, end = (0, batch.num_sequences) if ranks is None else ranks.share(batch.num_sequences)
        own_part = batch if ranks is None else ranks.sequences(batch)
        with torch.autocast(batch.item_ids.device.type, torch.bfloat16, enabled=autocast):
            out, _ = model(own_part)
        out = out[own_part.seq_offsets[1:] - 1]
        if ranks is not None:
            all_outputs = out.new_zeros(batch.num_sequences, out.shape[1])
            all_outputs[begin:end] = out[: end - begin]
            out = ranks.sum(all_outputs)
        return scores_of(out, batch)

    return score
