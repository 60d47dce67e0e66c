"""Scores over the catalogue, ranks of the targets and the top-k lists.

Letters: B users, I items, E embedding size.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.batches import Batch
from hstu_sparse.jagged import sequence_ids

# Which of a user's earlier items leave the ranking, each a superset of the one before.
FILTERS = ("none", "window", "history")
RANK_CHUNK = 2**22  # scores


def normalized_items(item_weight: Tensor) -> Tensor:
    """[I, E] -> [I, E], each row of length one."""
    return F.normalize(item_weight.float(), dim=-1, eps=1e-6)


def mask_seen(scores: Tensor, seen_items: Tensor, seen_offsets: Tensor, keep: Tensor | None = None) -> Tensor:
    """Scores [B, I] with the items of each user's history at -inf, in place.

    seen_items: [S] int64, jagged by seen_offsets [B+1]. keep: [B] item whose score stays (a target that repeats
    an earlier event is still to be found).
    """
    kept = None if keep is None else scores.gather(1, keep[:, None])
    scores[sequence_ids(seen_offsets, len(seen_items)), seen_items] = float("-inf")
    return scores if kept is None else scores.scatter_(1, keep[:, None], kept)


def target_ranks(scores: Tensor, targets: Tensor) -> Tensor:
    """Rank of each target among all items, from 1: [B] int64. Ties go to the smaller item id; NaN ranks last.

    scores: [B, I]; targets: [B] int64.
    """
    ids = torch.arange(scores.shape[1], device=scores.device)
    # On a CPU, few rows at a time: what is written then stays in its cache.
    rows = len(scores) if scores.is_cuda else max(1, RANK_CHUNK // scores.shape[1])
    ranks = []
    for part, chosen in zip(scores.split(max(1, rows)), targets.split(max(1, rows))):
        own = part.gather(1, chosen[:, None])
        before = (part > own) | ((part == own) & (ids < chosen[:, None]))
        ranks.append(torch.where(own[:, 0].isnan(), scores.shape[1], 1 + before.sum(1)))
    return torch.cat(ranks)


def top_items(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best items of each user, best first, ties by smaller id, NaN last: (scores [B, k], items [B, k]).

    A NaN comes back as -inf.
    """
    k = min(k, scores.shape[1])
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    values, items = scores.topk(k, dim=1)
    # Of the items that tie with the k-th, topk takes any: the smallest ids fill the places behind the better ones.
    least = values[:, -1:]
    ids = torch.arange(scores.shape[1], device=scores.device, dtype=torch.int32)
    tied = torch.where(scores == least, ids, scores.shape[1]).topk(k, dim=1, largest=False, sorted=True).values
    place = torch.arange(k, device=scores.device) - (values > least).sum(1, keepdim=True)
    items = torch.where(place < 0, items, tied.long().gather(1, place.clamp(min=0)))
    # topk leaves the order among equals open: sort by id, then stably by score.
    items, order = items.sort(dim=1)
    values, by_score = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, items.gather(1, by_score)


@torch.no_grad()
def rank_targets(
    score: Callable[[Batch], Tensor],
    batches: Iterable[Batch],
    *,
    filters: Sequence[str] = ("history",),
    candidates: Callable[[Batch, Tensor], Tensor] | None = None,
) -> list[np.ndarray]:
    """Ranks of every sequence's last target among the whole catalogue, one array [M] for each entry of `filters`.

    score: batch -> [B, I]. filters: which earlier items of the user leave the ranking, of FILTERS; `history` needs
    batches with seen items. candidates: (batch, scores) -> bool [B, I], which items compete; absent, all.
    """
    ranks: list[list[Tensor]] = [[] for _ in filters]
    for batch in batches:
        targets = last_targets(batch)
        scores = score(batch)
        if candidates is not None:
            own = scores.gather(1, targets[:, None])
            scores = scores.masked_fill(~candidates(batch, scores), float("-inf")).scatter_(1, targets[:, None], own)
        # In the order of FILTERS: each takes out what the one before did, and writes into the scores.
        for place in sorted(range(len(filters)), key=lambda place: FILTERS.index(filters[place])):
            if filters[place] != "none":
                scores = mask_seen(scores, *seen_by(filters[place], batch), keep=targets)
            ranks[place].append(target_ranks(scores, targets))
    return [torch.cat(parts).cpu().numpy() if parts else np.empty(0, np.int64) for parts in ranks]


def seen_by(which: str, batch: Batch) -> tuple[Tensor, Tensor]:
    """The items that a filter takes out, and their offsets: of the whole history or of the model's window."""
    if which == "history":
        return batch.seen_items, batch.seen_offsets
    return batch.item_ids, batch.seq_offsets


def last_targets(batch: Batch) -> Tensor:
    """The item that follows each sequence's last token: [B] int64."""
    return batch.target_ids[batch.seq_offsets[1:] - 1]


def model_scorer(model: nn.Module, autocast: bool = False) -> Callable[[Batch], Tensor]:
    """Score of each sequence's last output with every item: batch -> [B, I] fp32. Puts the model into eval mode.

    The cosine, or what the model's head makes of the two.
    """
    model.eval()
    table = model.item_weight.detach()
    with torch.no_grad():
        items = normalized_items(table) if model.head is None else model.head.items(table)

    @torch.no_grad()
    def score(batch: Batch) -> Tensor:
        with torch.autocast(table.device.type, torch.bfloat16, enabled=autocast):
            out, _ = model(batch)
        last = out[batch.seq_offsets[1:] - 1]
        return last @ items.T if model.head is None else model.head.scores_of_all(last, items)

    return score


def popularity_scorer(counts: np.ndarray, device: torch.device) -> Callable[[Batch], Tensor]:
    """The same score for every user: how often training saw the item (counts: [I])."""
    scores = torch.from_numpy(counts).to(device, torch.float32)
    return lambda batch: scores.repeat(batch.num_sequences, 1)


def sampled_candidates(count: int, seed: int) -> Callable[[Batch, Tensor], Tensor]:
    """`count` items drawn uniformly, with replacement, for each user, for metrics over sampled candidates."""
    generator = torch.Generator().manual_seed(seed)

    def choose(batch: Batch, scores: Tensor) -> Tensor:
        drawn = torch.randint(scores.shape[1], (len(scores), count), generator=generator).to(scores.device)
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, drawn, True)

    return choose
