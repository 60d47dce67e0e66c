"""Compute ranking metrics from the ranks of relevant items, also by history length and popularity.

Letters: N targets (relevant items), M rankings, U users.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np

from data.splits import Split, target_samples

NAMES = (*(f"{kind}@{k}" for k in (1, 5, 10, 50, 100, 200) for kind in ("HR", "NDCG")), "MRR")
METRIC = re.compile(r"MRR|MAP|(?:HR|NDCG|Recall|Precision|MRR|MAP)@[1-9][0-9]{0,8}")
REMOVED = np.iinfo(np.int64).max  # the rank of a target that a filter removes from the ranking: a miss in every metric
# Upper bounds of the history-length groups, in events before the target.
LENGTH_EDGES = (5, 10, 20, 50, 100, 200)
# Upper bounds of the groups by an item's number of training events.
COUNT_EDGES = (0, 5, 10, 30, 100, 300, 1000)


class Rankings(NamedTuple):
    """The rankings that ranks of targets belong to; a ranking may have several targets, and a user several rankings.

    ranking [N] int64, the ranking of each target, ascending; users [M] int64, the user of each ranking
    """

    ranking: np.ndarray
    users: np.ndarray

    @classmethod
    def of(cls, split: Split) -> Self:
        """Return the rankings of a split's targets: one for each sample."""
        return cls(target_samples(split), split.users)

    @classmethod
    def of_judged(cls, judged: dict[str, np.ndarray]) -> Self:
        """Return the rankings of the arrays `judged` of a run; those of earlier versions have one for each user."""
        return cls(judged.get("ranking", np.arange(len(judged["users"]))), judged["users"])

    @classmethod
    def single(cls, count: int) -> Self:
        """Return `count` rankings with a target each, each of another user."""
        return cls(np.arange(count), np.arange(count))

    def by_user(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of values [M] over the rankings of each user, in the order of np.unique(users)."""
        _, user, counts = np.unique(self.users, return_inverse=True, return_counts=True)
        return np.bincount(user, values, minlength=len(counts)) / counts

    def part(self, inside: np.ndarray) -> tuple[np.ndarray, Self]:
        """Return (mask of the targets [N], rankings) of only the rankings in `inside`, [M] bool."""
        place = np.cumsum(inside) - 1
        targets = inside[self.ranking]
        return targets, type(self)(place[self.ranking[targets]], self.users[inside])

    def targets(self) -> Self:
        """Return a ranking of its own for each target."""
        return type(self)(np.arange(len(self.ranking)), self.users[self.ranking])


def is_metric(name: str) -> bool:
    """Return whether there is a metric of this name."""
    return METRIC.fullmatch(name) is not None


def cutoff(name: str) -> int:
    """Return the k of a metric's name; for a metric of the whole ranking a number above any rank."""
    _, at, k = name.partition("@")
    return int(k) if at else int(REMOVED) - 1


def ranking_values(ranks: np.ndarray, name: str, rankings: Rankings) -> np.ndarray:
    """Compute a metric of each ranking, [M] float64. ranks: [N] int, from 1, of the relevant items of the rankings.

    For a ranking with R relevant items, h of them among its first k, HR@k is 1 if h > 0; Recall@k is h / R; Precision@k
    is h / k; MRR@k is 1 / the least rank <= k; NDCG@k is the sum of 1 / log2(rank + 1) over the h items, over the
    greatest that R items can have; MAP@k is the sum of (relevant items up to the rank) / rank over the h items, over R.
    A rank of REMOVED is in no first k.
    """
    kind, k, count = name.partition("@")[0], cutoff(name), len(rankings.users)
    hit = ranks <= k
    if kind == "MAP":
        order = np.lexsort((ranks, rankings.ranking))
        ranks, hit = ranks[order], hit[order]
    relevant = np.bincount(rankings.ranking, minlength=count)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(rankings.ranking, np.where(hit, values, 0.0), minlength=count)

    if kind == "NDCG":
        ideal = np.cumsum(1 / np.log2(np.arange(2, 2 + relevant.max(initial=1))))
        return total(1 / np.log2(ranks + 1.0)) / ideal[np.minimum(relevant, k) - 1]
    if kind == "MRR":
        least = np.full(count, REMOVED)
        np.minimum.at(least, rankings.ranking, ranks)
        return np.where(least <= k, 1.0 / least, 0.0)
    if kind == "MAP":
        place = np.arange(len(ranks)) - (np.cumsum(relevant) - relevant)[rankings.ranking]
        return total((place + 1) / ranks) / relevant
    hits = total(np.ones(len(ranks)))
    if kind == "HR":
        return (hits > 0).astype(np.float64)
    return hits / (relevant if kind == "Recall" else k)


def user_metrics(
    ranks: np.ndarray, names: Sequence[str] = NAMES, rankings: Rankings | None = None
) -> dict[str, np.ndarray]:
    """Compute the metrics of each user, the means of `ranking_values` over the user's rankings: name -> [U] float64.

    ranks: [N] int. rankings: by default one with a single target for each of N users, whose order is kept; else users
    are in the order of np.unique(rankings.users).
    """
    rankings = rankings or Rankings.single(len(ranks))
    values = {name: ranking_values(ranks, name, rankings) for name in names}
    return {name: rankings.by_user(of_rankings) for name, of_rankings in values.items()}


def ranking_metrics(
    ranks: np.ndarray, names: Sequence[str] = NAMES, rankings: Rankings | None = None
) -> dict[str, float]:
    """Return the means of `user_metrics` over the users, for ranks [N] over the whole catalogue; NaN for no ranks.

    Examples:
        >>> import numpy as np
        >>> ranking_metrics(np.array([1, 3, 20]), ["HR@10", "NDCG@10", "MRR"])
        {'HR@10': 0.6666666666666666, 'NDCG@10': 0.5, 'MRR': 0.4611111111111111}
    """
    if len(ranks) == 0:
        return {name: float("nan") for name in names}
    return {name: float(values.mean()) for name, values in user_metrics(ranks, names, rankings).items()}


def informative(names: Sequence[str], num_items: int) -> list[str]:
    """Return the metrics whose first k are not all of `num_items` items: HR@k is 1 then for any model."""
    return [name for name in names if "@" not in name or cutoff(name) < num_items]


def intervals(
    ranks: np.ndarray, names: Sequence[str] = ("HR@10", "NDCG@10", "MRR"), rankings: Rankings | None = None
) -> dict[str, list[float]]:
    """Return 95% intervals of metrics: the mean over users, plus and minus 1.96 standard errors.

    They include the variation between users, not that between seeds. ranks: [N]; empty for fewer than two users.
    """
    by_metric = {}
    for name, value in user_metrics(ranks, names, rankings).items():
        if len(value) < 2:
            return {}
        mean, error = value.mean(), 1.96 * value.std(ddof=1) / len(value) ** 0.5
        by_metric[name] = [float(max(0.0, mean - error)), float(min(1.0, mean + error))]
    return by_metric


def describe_lists(lists: np.ndarray, counts: np.ndarray) -> dict:
    """Describe recommendation lists [M, k], given the number of training events of each item, counts [I].

    coverage: the share of the catalogue that is in any of them. gini: how unequally they show the items of the
    catalogue, from 0 (all equally often) to almost 1 (always the same ones). novelty: the mean over their items of
    -log2 of the item's share of all training events (one event added to each), in bits. Entries of -1 do not count.
    """
    share, items = (counts + 1) / (counts + 1).sum(), lists[lists >= 0]
    shows = np.sort(np.bincount(items, minlength=len(counts)))
    order = 2 * np.arange(1, len(counts) + 1) - len(counts) - 1
    return {
        "users": len(lists),
        "length": lists.shape[1],
        "coverage": len(np.unique(items)) / len(counts),
        "gini": float((order * shows).sum() / (len(counts) * shows.sum())) if len(items) else float("nan"),
        "novelty": float(-np.log2(share)[items].mean()) if len(items) else float("nan"),
    }


def weighted_ndcg(ranks: np.ndarray, counts: np.ndarray, k: int) -> float:
    """Return the mean of NDCG@k over targets, each weighted by 1 / (the training events of its item + 1): how well
    items are found that are not popular. ranks, counts: [N].
    """
    values = ranking_values(ranks, f"NDCG@{k}", Rankings.single(len(ranks)))
    return float(np.average(values, weights=1 / (counts + 1))) if len(ranks) else float("nan")


def metrics_by_length(
    ranks: np.ndarray, lengths: np.ndarray, names: Sequence[str] = NAMES, rankings: Rankings | None = None
) -> list[dict]:
    """Compute metrics of the rankings in each group of history length: dicts with `history`, `users` and the metrics.

    ranks: [N]; lengths: [M]. Groups end at LENGTH_EDGES; empty groups are left out.
    """
    rankings = rankings or Rankings.single(len(ranks))
    return _by_group(ranks, "history", groups_of(lengths, LENGTH_EDGES, 1), names, rankings)


def metrics_by_popularity(
    ranks: np.ndarray, counts: np.ndarray, names: Sequence[str] = NAMES, rankings: Rankings | None = None
) -> list[dict]:
    """Compute metrics by the training events of the targets, each ranked for itself: dicts with `events`, `users` and
    the metrics.

    ranks, counts: [N]. Targets without training events are a group of their own.
    """
    rankings = (rankings or Rankings.single(len(ranks))).targets()
    return _by_group(ranks, "events", groups_of(counts, COUNT_EDGES, 0), names, rankings)


def _by_group(
    ranks: np.ndarray,
    key: str,
    groups: Iterable[tuple[str, np.ndarray]],
    names: Sequence[str],
    rankings: Rankings,
) -> list[dict]:
    rows = []
    for group, inside in groups:
        targets, part = rankings.part(inside)
        users = len(np.unique(part.users))
        rows.append({key: group, "users": users, **ranking_metrics(ranks[targets], names, part)})
    return rows


def groups_of(counts: np.ndarray, edges: Sequence[int], least: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name like `6-10`, mask of counts [M]) of the groups that end at `edges`, the last having no end.

    least: where the first group begins. Empty groups are left out.
    """
    groups = np.searchsorted(edges, counts)
    for group in range(len(edges) + 1):
        inside = groups == group
        if inside.any():
            low = least if group == 0 else edges[group - 1] + 1
            high = None if group == len(edges) else edges[group]
            yield f"{low}+" if high is None else f"{low}" if low == high else f"{low}-{high}", inside
