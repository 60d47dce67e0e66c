"""Compute ranking metrics from the ranks of relevant items, also by history length and popularity.

Letters: N targets (relevant items), M rankings, U users, I items, k length of a list.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np

from data.splits import Split, target_samples

NAMES = (*(f"{kind}@{k}" for k in (1, 5, 10, 50, 100, 200) for kind in ("HR", "NDCG")), "MRR")
METRIC = re.compile(r"MRR|MAP|(?:HR|NDCG|Recall|Precision|MRR|MAP)@[1-9][0-9]{0,8}")
REMOVED = np.iinfo(np.int64).max  # the rank of a target that a filter has removed: a miss in every metric
# Upper bounds of groups by history length, the number of events before the target.
LENGTH_EDGES = (5, 10, 20, 50, 100, 200)
# Upper bounds of groups by the number of an item's training events.
COUNT_EDGES = (0, 5, 10, 30, 100, 300, 1000)


class Rankings(NamedTuple):
    """The rankings of targets and their users. A ranking may have several targets, a user several rankings.

    ranking  [N] int64, the ranking of each target, ascending
    users    [M] int64, the user of each ranking
    """

    ranking: np.ndarray
    users: np.ndarray

    @classmethod
    def of(cls, split: Split) -> Self:
        """Return the rankings of a split's targets: one for each sample."""
        return cls(target_samples(split), split.users)

    @classmethod
    def from_judged(cls, judged: dict[str, np.ndarray]) -> Self:
        """Return the rankings in a run's arrays `judged`; runs of earlier versions have one ranking for each user."""
        return cls(judged.get("ranking", np.arange(len(judged["users"]))), judged["users"])

    @classmethod
    def single(cls, count: int) -> Self:
        """Return `count` rankings with one target each, of different users."""
        return cls(np.arange(count), np.arange(count))

    def by_user(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of values [M] over the rankings of each user, in the order of np.unique(users)."""
        _, user, counts = np.unique(self.users, return_inverse=True, return_counts=True)
        return np.bincount(user, values, minlength=len(counts)) / counts

    def part(self, inside: np.ndarray) -> tuple[np.ndarray, Self]:
        """Return (the mask [N] of the chosen rankings' targets, these rankings); inside: [M], the mask of rankings."""
        place = np.cumsum(inside) - 1
        targets = inside[self.ranking]
        return targets, type(self)(place[self.ranking[targets]], self.users[inside])

    def targets(self) -> Self:
        """Return a separate ranking for each target."""
        return type(self)(np.arange(len(self.ranking)), self.users[self.ranking])


def is_metric(name: str) -> bool:
    """Return whether `name` is a metric, such as HR@10 or MRR."""
    return METRIC.fullmatch(name) is not None


def cutoff(name: str) -> int:
    """Return the k of a metric's name; without one, a number above any rank but REMOVED."""
    _, at, k = name.partition("@")
    return int(k) if at else int(REMOVED) - 1


def ranking_values(ranks: np.ndarray, name: str, rankings: Rankings) -> np.ndarray:
    """Compute a metric of each ranking: [M] float64. ranks: [N] int, the ranks of relevant items, from 1.

    For a ranking with R relevant items, h of which are among the first k:

    HR@k         1 if h > 0, else 0
    Recall@k     h / R
    Precision@k  h / k
    MRR@k        1 / (the least rank), 0 if it is above k
    NDCG@k       the sum of 1 / log2(rank + 1) over the h items, divided by the greatest possible sum of R items
    MAP@k        the sum of (the number of relevant items up to this rank) / rank over the h items, divided by R

    A rank of REMOVED is a miss for any k.
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
    """Compute the metrics of each user, means of `ranking_values` over the user's rankings: name -> [U] float64.

    ranks: [N] int; rankings: by default one ranking with one target for each of N users, in this order. Otherwise users
    are in the order of np.unique(rankings.users).
    """
    rankings = rankings or Rankings.single(len(ranks))
    values = {name: ranking_values(ranks, name, rankings) for name in names}
    return {name: rankings.by_user(value) for name, value in values.items()}


def ranking_metrics(
    ranks: np.ndarray, names: Sequence[str] = NAMES, rankings: Rankings | None = None
) -> dict[str, float]:
    """Return the means of `user_metrics` over users; NaN without users. ranks: [N] int.

    Examples:
        >>> import numpy as np
        >>> ranking_metrics(np.array([1, 3, 20]), ["HR@10", "NDCG@10", "MRR"])
        {'HR@10': 0.6666666666666666, 'NDCG@10': 0.5, 'MRR': 0.4611111111111111}
    """
    if len(ranks) == 0:
        return {name: float("nan") for name in names}
    return {name: float(values.mean()) for name, values in user_metrics(ranks, names, rankings).items()}


def informative(names: Sequence[str], num_items: int) -> list[str]:
    """Return the metrics whose k is below `num_items`: for a greater k, HR@k is 1 for any model."""
    return [name for name in names if "@" not in name or cutoff(name) < num_items]


def intervals(
    ranks: np.ndarray, names: Sequence[str] = ("HR@10", "NDCG@10", "MRR"), rankings: Rankings | None = None
) -> dict[str, list[float]]:
    """Return 95% intervals of metrics: the mean over users plus and minus 1.96 standard errors; none for one user.

    They include the variation between users, but not between seeds. ranks: [N] int.
    """
    by_metric = {}
    for name, value in user_metrics(ranks, names, rankings).items():
        if len(value) < 2:
            return {}
        mean, error = value.mean(), 1.96 * value.std(ddof=1) / len(value) ** 0.5
        by_metric[name] = [float(max(0.0, mean - error)), float(min(1.0, mean + error))]
    return by_metric


def describe_lists(lists: np.ndarray, counts: np.ndarray) -> dict:
    """Describe recommendation lists [M, k], with -1 for no item; counts: [I], the training events of each item.

    coverage: the share of the catalogue's items that are in a list. gini: the Gini coefficient of the items' numbers of
    lists, 0 if all items are equally frequent, almost 1 if the lists have always the same items. novelty: the mean over
    the lists' items of -log2(share of training events), in bits, with one event added to each item.
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
    """Return the mean NDCG@k of targets weighted by 1 / (counts + 1), so that unpopular items count more.

    ranks: [N]; counts: [N], the number of training events of each target.
    """
    values = ranking_values(ranks, f"NDCG@{k}", Rankings.single(len(ranks)))
    return float(np.average(values, weights=1 / (counts + 1))) if len(ranks) else float("nan")


def metrics_by_length(
    ranks: np.ndarray, lengths: np.ndarray, names: Sequence[str] = NAMES, rankings: Rankings | None = None
) -> list[dict]:
    """Compute metrics by history length: dicts with `history` (the group), `users` and the metrics.

    ranks: [N]; lengths: [M], events before each ranking. Groups end at LENGTH_EDGES; empty groups are left out.
    """
    rankings = rankings or Rankings.single(len(ranks))
    return _by_group(ranks, "history", groups_of(lengths, LENGTH_EDGES, 1), names, rankings)


def metrics_by_popularity(
    ranks: np.ndarray, counts: np.ndarray, names: Sequence[str] = NAMES, rankings: Rankings | None = None
) -> list[dict]:
    """Compute metrics by the popularity of targets: dicts with `events` (the group), `users` and the metrics.

    ranks: [N]; counts: [N], the number of training events of each target. Each target counts as a separate ranking.
    Groups end at COUNT_EDGES, so that items without training events are one group.
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
    """Yield (name like `6-10`, mask [M]) of groups of counts [M] that end at `edges`; the last one has no end.

    least: the beginning of the first group. Empty groups are left out.
    """
    groups = np.searchsorted(edges, counts)
    for group in range(len(edges) + 1):
        inside = groups == group
        if inside.any():
            low = least if group == 0 else edges[group - 1] + 1
            high = None if group == len(edges) else edges[group]
            yield f"{low}+" if high is None else f"{low}" if low == high else f"{low}-{high}", inside
