"""Score all items by the last output of each user.

Letters: B users, I items, E embedding size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from data.batch import Batch
from data.earlier import Earlier
from evaluation import scores
from evaluation.scores import Scores
from models.heads import normalized
from models.hstu import SequenceModel
from models.protocols import RankGroup
from models.repeats import add_terms


def normalized_items(item_weight: Tensor) -> Tensor:
    """Normalise each row to length one: [I, E] -> [I, E]."""
    return normalized(item_weight.float())


@torch.no_grad()
def repeat_terms(model: SequenceModel, out: Tensor, batch: Batch) -> tuple[Tensor, Tensor] | None:
    """Return (items [B, N], the terms of their scores [B, N]) as `RepeatTerm` does, or None if the model has none.

    out: [B, E] of length one, the outputs of the last tokens of the batch, whose sequences have up to N tokens.
    """
    if model.repeats is None:
        return None
    earlier = Earlier.of(batch, batch.longest(len(model.embedding.position)))
    return model.repeats(out, batch.seq_offsets[1:] - 1, earlier)


def output_scorer(model: SequenceModel, ranks: RankGroup | None = None) -> Callable[..., Scores]:
    """Return a function (outputs [B, E] of length one, batch) -> fp32 scores of all items, cosines or by the head.

    The batch, whose last tokens have the outputs, is needed for a model with a term of repeats. ranks: given if each
    rank computes the scores of its share of the items, for the same outputs.
    """
    with torch.no_grad():
        if ranks is None:
            table = model.item_table.detach()
            first, num_items = 0, len(table)
        else:
            num_items = model.embedding.num_items
            first, last = ranks.share(num_items)
            sharded = model.targets is None
            table = model.embedding.items_between(first, last) if sharded else model.item_table[first:last]
            table = table.detach()

    @torch.no_grad()
    def prepared(rows: Tensor) -> Any:
        return normalized_items(rows) if model.head is None else model.head.items(rows)

    # A large catalogue is prepared in tiles, since the result is as large as the table.
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
    """Put the model into eval mode and return a function batch -> scores of all items by each sequence's last output.

    ranks: the ranks that call the function with the same batches; each computes the outputs of its share of sequences.
    """
    model.eval()
    scores_of = output_scorer(model, ranks)

    @torch.no_grad()
    def score(batch: Batch) -> Scores:
        begin, end = (0, batch.num_sequences) if ranks is None else ranks.share(batch.num_sequences)
        local_batch = batch if ranks is None else ranks.sequences(batch)
        with torch.autocast(batch.item_ids.device.type, torch.bfloat16, enabled=autocast):
            out, _ = model(local_batch)
        out = out[local_batch.seq_offsets[1:] - 1]
        if ranks is not None:
            all_outputs = out.new_zeros(batch.num_sequences, out.shape[1])
            all_outputs[begin:end] = out[: end - begin]
            out = ranks.sum(all_outputs)
        return scores_of(out, batch)

    return score
