"""Find the earlier tokens of a sequence that have the same item, and what followed them.

Letters: T tokens, N greatest number of tokens of a sequence.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from data.batch import Batch
from hstu_sparse.core.jagged import sequence_ids


class Earlier(NamedTuple):
    """Facts about the tokens of a batch, [T] each.

    items        the items, as ids or as other numbers (see `of`)
    times, query_times  as in the batch
    begins       the first token of the token's sequence
    counts       the number of tokens of the same item in the sequence up to this one
    following    the next token of the same item in the sequence; T if there is none
    successors   [T, 2]: the items that came next after the latest two earlier tokens of the same item, -1 for none
    longest      N
    """

    items: Tensor
    times: Tensor
    query_times: Tensor
    begins: Tensor
    counts: Tensor
    following: Tensor
    successors: Tensor
    longest: int

    @classmethod
    def of(cls, batch: Batch, longest: int, items: Tensor | None = None) -> "Earlier":
        """Return the facts of a batch whose sequences have at most `longest` tokens, without waiting for the
        device. items: [T], numbers to use in place of `batch.item_ids`, equal if and only if the ids are equal.
        """
        items, total = batch.item_ids if items is None else items, batch.num_tokens
        tokens = torch.arange(total, device=items.device)
        sequence = sequence_ids(batch.seq_offsets, total)
        order = items.argsort(stable=True)
        order = order[sequence[order].argsort(stable=True)]
        same = torch.zeros_like(order, dtype=torch.bool)  # same item and sequence as the token before in this order
        same[1:] = (items[order].diff() == 0) & (sequence[order].diff() == 0)
        before = torch.where(same, order.roll(1), -1)
        start = torch.where(same, 0, tokens).cummax(0).values if total else tokens
        following = torch.where(same.roll(-1), order.roll(-1), total)
        previous, counts, next_tokens = (
            torch.empty_like(order).scatter_(0, order, x) for x in (before, tokens - start + 1, following)
        )
        second = torch.where(previous < 0, -1, previous[previous.clamp(min=0)])
        last = torch.sym_max(total - 1, 0)  # max() and len() would tie torch.export to one length
        successors = [torch.where(p < 0, -1, items[(p + 1).clamp(max=last)]) for p in (previous, second)]
        begins = batch.seq_offsets[sequence].long()
        times = batch.timestamps, batch.query_timestamps
        return cls(items, *times, begins, counts, next_tokens, torch.stack(successors, 1), longest)
