"""Add a learned term to the scores of the items in a user's window.

Whether a user repeats an item depends on how long ago and how often the item occurred, which a cosine of two vectors
hardly expresses. For token t and an item with its latest event at token s <= t, the term is the inner product of
w(out[t]) and gap + age + count + order. Each of these four is a row of a table:

gap    by the number of events from s to t
age    by the time from s to the query
count  by the number of times that the item has occurred up to s
order  by whether the item came next after one of the last two earlier events with token t's item

Letters: T tokens, R tokens of a chunk, N greatest number of tokens of a sequence, E embedding size, K patterns.
"""

import math

import torch
from torch import Tensor, nn

from data.earlier import Earlier

# Buckets are half octaves, of numbers of events and of seconds.
EVENT_OCTAVES, TIME_OCTAVES, COUNT_OCTAVES = 16, 32, 12


class RepeatTerm(nn.Module):
    """Compute the term of the items in a token's window, initially zero. patterns: K."""

    events: Tensor
    seconds: Tensor
    occurrences: Tensor

    def __init__(self, embedding_dim: int, patterns: int):
        super().__init__()
        self.weights = nn.Linear(embedding_dim, patterns)
        nn.init.ones_(self.weights.bias)
        octaves = {"events": EVENT_OCTAVES, "seconds": TIME_OCTAVES, "occurrences": COUNT_OCTAVES}
        for name, count in octaves.items():
            edges = sorted({math.ceil(2 ** (half / 2)) for half in range(2 * count + 1)})
            self.register_buffer(name, torch.tensor(edges), persistent=False)

        def table(rows: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(rows, patterns))

        self.gap, self.age, self.count = (table(len(getattr(self, name)) + 1) for name in octaves)
        self.order = table(4)

    def forward(self, out: Tensor, tokens: Tensor, earlier: Earlier) -> tuple[Tensor, Tensor]:
        """Return (items [R, N], their terms [R, N] fp32) for outputs [R, E] of length one at the tokens [R].

        An item has its term in the column of its latest token; all other columns have item 0 and a term of 0.
        """
        t, last = tokens[:, None], torch.sym_max(earlier.items.shape[0] - 1, 0)
        places = earlier.begins[t] + torch.arange(earlier.longest, device=tokens.device)
        inside, places = places <= t, places.clamp(max=last)
        latest = inside & (earlier.following[places] > t)
        items = torch.where(latest, earlier.items[places], 0)
        first, second = (items == earlier.successors[t, rank] for rank in (0, 1))
        buckets = {
            self.gap: torch.bucketize(t - places, self.events, right=True),
            self.age: torch.bucketize(earlier.query_times[t] - earlier.times[places], self.seconds, right=True),
            self.count: torch.bucketize(earlier.counts[places], self.occurrences, right=True),
            self.order: first + 2 * second.long(),
        }
        weights = self.weights(out.float() * math.sqrt(out.shape[1]))
        gap, age, count, order = ((weights @ table.T).gather(1, bucket) for table, bucket in buckets.items())
        return items, torch.where(latest, gap + age + count + order, 0)


def add_terms(scores: Tensor, items: Tensor, terms: Tensor, begin: int = 0) -> Tensor:
    """Add the terms [R, N] of `items` [R, N] to scores [R, W] of the items begin .. begin + W - 1, in place."""
    columns = items - begin
    inside = (columns >= 0) & (columns < scores.shape[1])
    return scores.scatter_add_(1, torch.where(inside, columns, 0), torch.where(inside, terms, 0).to(scores.dtype))
