"""Rank targets and find top-k items by scores of the whole catalogue.

Scores of a large catalogue are computed a tile of items at a time, without a [B, I] tensor.

Letters: B users, I items, W items of a tile, N targets, S seen items of all users, F masks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from evaluation.ranking_metrics import REMOVED
from hstu_sparse.core.jagged import sequence_ids

# The user's earlier items that are removed from a ranking; each filter also removes what the previous one removes.
FILTERS = ("none", "window", "history")
RANK_CHUNK = 2**22  # scores compared at a time on a CPU
TILE = 2**25  # scores computed at a time


class CatalogueRanks(Protocol):
    """The ranks over which a catalogue is sharded; all of them call the same methods in the same order."""

    def share(self, count: int) -> tuple[int, int]:
        """Return this rank's range (begin, end) of `count` items."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks, without a gradient."""

    def all_gather(self, value: Any) -> list:
        """Return the list of all ranks' values, on every rank."""


@dataclass
class Scores:
    """Scores [B, I] of a batch, computed on demand.

    tile: (begin, end) -> the scores [B, end - begin] of items begin to end - 1, a new tensor at each call; ranks: the
    ranks over which the items are sharded, or None.
    """

    num_users: int
    num_items: int
    tile: Callable[[int, int], Tensor]
    ranks: CatalogueRanks | None = None

    @property
    def items(self) -> tuple[int, int]:
        """The range (begin, end) of items whose scores this rank has."""
        return (0, self.num_items) if self.ranks is None else self.ranks.share(self.num_items)

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks."""
        return x if self.ranks is None else self.ranks.sum(x)

    @classmethod
    def of(cls, scores: "Scores | Tensor") -> "Scores":
        """Wrap a [B, I] tensor, which is not changed; return Scores as they are."""
        if isinstance(scores, Scores):
            return scores
        table = scores
        return cls(table.shape[0], table.shape[1], lambda begin, end: table[:, begin:end].clone())

    def tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (first new item, first item of the tile, tile).

        All tiles have the same width; the last one begins earlier and repeats items of the tile before. So equal items
        get equal scores in all tiles, from the same kernel.
        """
        first, last = self.items
        width = min(last - first, max(1, TILE // max(1, self.num_users)))
        for begin in range(first, last, max(1, width)):
            start = min(begin, last - width)
            yield begin, start, self.tile(start, start + width)


def mask_seen(scores: Tensor, seen_items: Tensor, seen_offsets: Tensor, start: int = 0) -> Tensor:
    """Set the scores [B, W] of items in each user's history to -inf, in place.

    seen_items: [S] int64, jagged by seen_offsets [B + 1]; start: the item of the first column.
    """
    rows, columns = sequence_ids(seen_offsets, len(seen_items)), seen_items - start
    users, width = scores.shape
    hidden = (columns >= 0) & (columns < width)
    if not scores.is_cuda:
        scores[rows[hidden], columns[hidden].long()] = float("-inf")
        return scores
    # Items of other tiles mark an extra last column: dropping them would synchronise with the device.
    mask = torch.zeros(users, width + 1, dtype=torch.bool, device=scores.device)
    mask.view(-1).index_fill_(0, rows * (width + 1) + torch.where(hidden, columns, width), True)
    return scores.masked_fill_(mask[:, :width], float("-inf"))


def mask_items(scores: Tensor, masks: Tensor, which: Tensor, start: int = 0) -> Tensor:
    """Set the scores [B, W] of items that do not pass the user's mask to -inf, in place.

    masks: [F, ceil(I / 8)] uint8, see `ItemFilter`; which: [B] int64, the index of each user's mask; start: the item of
    the first column.
    """
    masks, which = masks.to(scores.device), which.to(scores.device)
    width, first = scores.shape[1], start // 8
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=masks.device)
    hidden = (masks[:, first : -(-(start + width) // 8), None] & bits == 0).flatten(1)[:, start - 8 * first :][
        :, :width
    ]
    return scores.masked_fill_(hidden if len(masks) == 1 else hidden[which], float("-inf"))


def target_ranks(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the rank of each target among all items, from 1: [B] int64. Ties go to the smaller id; NaN ranks last.

    scores: [B, I]; targets: [B] int64.
    """
    target_scores = scores.gather(1, targets[:, None])
    return torch.where(target_scores[:, 0].isnan(), scores.shape[1], 1 + count_before(scores, target_scores, targets))


def count_before(scores: Tensor, target_scores: Tensor, targets: Tensor, start: int = 0) -> Tensor:
    """Return the number of items with scores [B, W] that rank before each target: [B] int64.

    target_scores: [B, 1]; targets: [B]; start: the item of the first column.
    """
    ids = start + torch.arange(scores.shape[1], device=scores.device)
    # On a CPU, few rows at a time, so that intermediate results stay in the cache.
    rows = len(scores) if scores.is_cuda else max(1, RANK_CHUNK // max(1, scores.shape[1]))
    counts = []
    for part, part_scores, part_targets in zip(*(x.split(max(1, rows)) for x in (scores, target_scores, targets))):
        counts.append(((part > part_scores) | ((part == part_scores) & (ids < part_targets[:, None]))).sum(1))
    return torch.cat(counts)


def top_items(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best items of each user, best first, ties by smaller id, NaN last: (scores [B, k], items [B, k]).

    A NaN is returned as -inf.
    """
    k = min(k, scores.shape[1])
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    values, items = scores.topk(k, dim=1)
    # topk returns any of the items that tie with the k-th: fill the last positions with the smallest ids.
    least = values[:, -1:]
    ids = torch.arange(scores.shape[1], device=scores.device, dtype=torch.int32)
    tied = torch.where(scores == least, ids, scores.shape[1]).topk(k, dim=1, largest=False, sorted=True).values
    place = torch.arange(k, device=scores.device) - (values > least).sum(1, keepdim=True)
    items = torch.where(place < 0, items, tied.long().gather(1, place.clamp(min=0)))
    # topk returns equal scores in any order: sort by id, then stably by score.
    items, order = items.sort(dim=1)
    values, by_score = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, items.gather(1, by_score)


@torch.no_grad()
def best_items(
    scores: Scores | Tensor,
    k: int,
    seen: tuple[Tensor, Tensor] | None = None,
    passing: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `top_items` of scores that are computed by tiles: (scores [B, k], items [B, k]).

    seen: the items to exclude, (items, offsets) as in `mask_seen`; passing: the items to choose from, (masks, which) as
    in `mask_items`. ValueError if there are no items.
    """
    scores = Scores.of(scores)
    best: tuple[Tensor, Tensor] | None = None
    for begin, start, tile in scores.tiles():
        if seen is not None:
            tile = mask_seen(tile, *seen, start=start)
        if passing is not None:
            tile = mask_items(tile, *passing, start=start)
        values, items = top_items(tile[:, begin - start :], k)
        items = items + begin
        if best is not None:
            # Among equal scores those of earlier tiles come first, and their ids are smaller.
            values, items = (torch.cat(pair, 1) for pair in zip(best, (values, items)))
            values, order = values.sort(dim=1, descending=True, stable=True)
            values, items = values[:, :k], items.gather(1, order[:, :k])
        best = values, items
    if not scores.num_items:
        raise ValueError("there are no items to choose from")
    return cast(tuple[Tensor, Tensor], best) if scores.ranks is None else _merged(best, scores, k)


def _merged(best: tuple[Tensor, Tensor] | None, scores: Scores, k: int) -> tuple[Tensor, Tensor]:
    """Merge the lists of all ranks into lists of k; best: None on a rank without items."""
    host = None if best is None else tuple(x.cpu() for x in best)
    assert scores.ranks is not None
    lists = [rank_list for rank_list in scores.ranks.all_gather(host) if rank_list is not None]
    # Lists are ordered by rank, and therefore by id where scores are equal.
    values, items = (torch.cat(parts, 1) for parts in zip(*lists))
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values[:, :k], items.gather(1, order[:, :k])


@torch.no_grad()
def rank_targets(
    score: Callable[[Batch], Scores | Tensor],
    batches: Iterable[Batch],
    *,
    filters: Sequence[str] = ("history",),
    candidates: Callable[[Batch, int], Tensor] | None = None,
) -> list[np.ndarray]:
    """Rank the targets of all sequences among the whole catalogue; return an array [N] for each of `filters`.

    A target that a filter removes has the rank REMOVED.

    Args:
        score: batch -> Scores or a tensor [B, I].
        filters: names in FILTERS; `history` needs batches with seen items.
        candidates: (batch, I) -> the items [B, C] to rank the targets among, -1 for none; by default all items.
    """
    ranks: list[list[Tensor]] = [[] for _ in filters]
    for batch in batches:
        batch_ranks = _ranks(Scores.of(score(batch)), batch, filters, candidates)
        for place, filter_ranks in enumerate(batch_ranks):
            ranks[place].append(filter_ranks)
    return [torch.cat(parts).cpu().numpy() if parts else np.empty(0, np.int64) for parts in ranks]


def _ranks(scores: Scores, batch: Batch, filters: Sequence[str], candidates) -> list[Tensor]:
    """Compute the ranks [N] of a batch's targets, for each filter."""
    targets, rows = ranked_targets(batch)
    tiles = list(scores.tiles()) if scores.num_users * scores.num_items <= TILE else None
    target_scores = torch.zeros(len(targets), 1, device=targets.device)
    for begin, start, tile in tiles or scores.tiles():
        new = (targets >= begin) & (targets < start + tile.shape[1])
        tile_scores = tile[rows, (targets - start).clamp(0, tile.shape[1] - 1)][:, None]
        target_scores = torch.where(new[:, None], tile_scores, target_scores)
    target_scores = scores.summed(target_scores)
    chosen = None if candidates is None else candidates(batch, scores.num_items).to(targets.device)
    before = [torch.zeros_like(targets) for _ in filters]
    slots = _slots(batch, rows)
    for begin, start, tile in tiles or scores.tiles():
        if chosen is not None:
            columns = chosen - start
            inside = (columns >= 0) & (columns < tile.shape[1])
            competes = torch.zeros_like(tile).scatter_add_(
                1, columns.clamp(0, tile.shape[1] - 1), inside.to(tile.dtype)
            )
            tile = tile.masked_fill(competes == 0, float("-inf"))
        # Filters change the tile in place, so they are applied in the order of FILTERS.
        for place in sorted(range(len(filters)), key=lambda place: FILTERS.index(filters[place])):
            if filters[place] != "none":
                mask_seen(tile, *seen_by(filters[place], batch), start=start)
            for slot in slots:
                part = tile[:, begin - start :] if len(slots) == 1 else tile[rows[slot], begin - start :]
                before[place][slot] += count_before(part, target_scores[slot], targets[slot], begin)
    ranks = []
    for filter_name, count in zip(filters, before):
        rank = torch.where(target_scores[:, 0].isnan(), scores.num_items, 1 + scores.summed(count))
        if filter_name != "none":
            rank = rank.masked_fill(repeated(targets, rows, *seen_by(filter_name, batch)), REMOVED)
        ranks.append(rank)
    return ranks


def ranked_targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return (the targets of a batch [N], the row of each target [N])."""
    if batch.relevant_items is None or batch.relevant_offsets is None:
        return last_targets(batch), torch.arange(batch.num_sequences, device=batch.users.device)
    return batch.relevant_items, sequence_ids(batch.relevant_offsets, len(batch.relevant_items))


def _slots(batch: Batch, rows: Tensor) -> list[Tensor | slice]:
    """Divide the targets [N] of a batch into groups with at most one target of each row."""
    if batch.relevant_offsets is None:
        return [slice(None)]
    place = torch.arange(len(rows), device=rows.device) - batch.relevant_offsets[rows]
    return [(place == slot).nonzero()[:, 0] for slot in range(int(place.max()) + 1)] if len(rows) else []


def repeated(targets: Tensor, rows: Tensor, seen_items: Tensor, seen_offsets: Tensor) -> Tensor:
    """Return whether each of targets [N] is among the seen items [S] of its row: [N] bool; rows: [N]."""
    seen_rows = sequence_ids(seen_offsets, len(seen_items))
    most = 1 + torch.maximum(targets.max(), seen_items.max()) if len(targets) and len(seen_items) else 1
    return torch.isin(rows * most + targets, seen_rows * most + seen_items)


def seen_by(filter_name: str, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return (items, offsets) that a filter removes: those of the whole history, or of the model's window."""
    if filter_name == "history":
        assert batch.seen_items is not None and batch.seen_offsets is not None
        return batch.seen_items, batch.seen_offsets
    return batch.item_ids, batch.seq_offsets


def last_targets(batch: Batch) -> Tensor:
    """Return the target of each sequence's last token: [B] int64."""
    return batch.target_ids[batch.seq_offsets[1:] - 1]


def popularity_scorer(counts: np.ndarray, device: torch.device) -> Callable[[Batch], Scores]:
    """Return a function that scores items by popularity, equally for all users; counts: [I], training events."""
    scores = torch.from_numpy(counts).to(device, torch.float32)

    def score(batch: Batch) -> Scores:
        users = batch.num_sequences
        return Scores(users, len(scores), lambda begin, end: scores[begin:end].repeat(users, 1))

    return score


class SampledCandidates:
    """Draw distinct items for each user, neither the target nor from the user's history.

    Args:
        count: the number of items for a user; a user with fewer such items gets all of them.
        seed: the seed of the draws.

    Attributes:
        short: the number of users so far who had fewer items.
    """

    def __init__(self, count: int, seed: int):
        self.count, self.short, self._rng = count, 0, np.random.default_rng(seed)

    def __call__(self, batch: Batch, num_items: int) -> Tensor:
        """Return the items drawn for a batch with seen items: [B, count] int64, padded with -1."""
        drawn = np.full((batch.num_sequences, self.count), -1, np.int64)
        seen, offsets = (x.cpu().numpy() for x in seen_by("history", batch))
        targets, rows = (x.cpu().numpy() for x in ranked_targets(batch))
        for row in range(batch.num_sequences):
            excluded = np.unique(np.append(seen[offsets[row] : offsets[row + 1]], targets[rows == row]))
            left = num_items - len(excluded)
            places = self._rng.choice(left, min(self.count, left), replace=False, shuffle=False)
            # The p-th of the other items is p plus the number of excluded items before it.
            before = np.searchsorted(excluded - np.arange(len(excluded)), places, side="right")
            drawn[row, : len(places)] = places + before
            self.short += left < self.count
        return torch.from_numpy(drawn)
