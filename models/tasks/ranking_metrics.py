"""Compute ranking metrics from ranks: HR and NDCG at k, MRR, also by history length."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

KS = (1, 5, 10, 50, 100, 200)
REMOVED = np.iinfo(np.int64).max  # the rank of a target that a filter removes from the ranking: a miss in every metric
# Upper bounds of the history-length groups, in events before the target.
LENGTH_EDGES = (5, 10, 20, 50, 100, 200)
# Upper bounds of the groups by an item's number of training events.
COUNT_EDGES = (0, 5, 10, 30, 100, 300, 1000)


def user_metrics(ranks: np.ndarray, ks: tuple[int, ...] = KS) -> dict[str, np.ndarray]:
    """Compute the metrics of each user, who has one relevant item: name -> [M] float64.

    ranks: [M] int, from 1. HR@k = 1 where the rank is <= k, else 0; NDCG@k = HR@k / log2(rank + 1); MRR = 1 / rank. All
    are 0 where the rank is REMOVED.
    """
    gain = 1 / np.log2(ranks + 1.0)
    values = {}
    for k in ks:
        values[f"HR@{k}"] = (ranks <= k).astype(np.float64)
        values[f"NDCG@{k}"] = gain * (ranks <= k)
    return values | {"MRR": np.where(ranks == REMOVED, 0.0, 1.0 / ranks)}


def ranking_metrics(ranks: np.ndarray, ks: tuple[int, ...] = KS) -> dict[str, float]:
    """Return the means of `user_metrics` over the users, for ranks [M] over the whole catalogue; NaN for no ranks.

    Examples:
        >>> import numpy as np
        >>> ranking_metrics(np.array([1, 3, 20]), ks=(10,))
        {'HR@10': 0.6666666666666666, 'NDCG@10': 0.5, 'MRR': 0.4611111111111111}
    """
    if len(ranks) == 0:
        return {name: float("nan") for name in metric_names(ks)}
    return {name: float(values.mean()) for name, values in user_metrics(ranks, ks).items()}


def metric_names(ks: tuple[int, ...] = KS) -> list[str]:
    """Return the names of the metrics at these k."""
    return [f"{name}@{k}" for k in ks for name in ("HR", "NDCG")] + ["MRR"]


def names_for(num_items: int, ks: tuple[int, ...] = KS) -> list[str]:
    """Return the names of metrics that are informative for so many items: HR@k is 1 for any model if k >= num_items."""
    return [name for k in ks if k < num_items for name in (f"HR@{k}", f"NDCG@{k}")] + ["MRR"]


def intervals(ranks: np.ndarray, ks: tuple[int, ...] = (10,)) -> dict[str, list[float]]:
    """Return 95% intervals of HR@k, NDCG@k and MRR: the mean over users, plus and minus 1.96 standard errors.

    They include the variation between users, not that between seeds. ranks: [M]; empty for fewer than two users.
    """
    if len(ranks) < 2:
        return {}
    by_metric = {}
    for name, value in user_metrics(ranks, ks).items():
        mean, error = value.mean(), 1.96 * value.std(ddof=1) / len(value) ** 0.5
        by_metric[name] = [float(max(0.0, mean - error)), float(min(1.0, mean + error))]
    return by_metric


def describe_lists(lists: np.ndarray, counts: np.ndarray) -> dict:
    """Describe recommendation lists [M, k], given the number of training events of each item, counts [I].

    coverage: the share of the catalogue that is in any of them. novelty: the mean over their items of -log2 of the
    item's share of all training events (one event added to each), in bits. Entries of -1 do not count.
    """
    share, items = (counts + 1) / (counts + 1).sum(), lists[lists >= 0]
    return {
        "users": len(lists),
        "length": lists.shape[1],
        "coverage": len(np.unique(items)) / len(counts),
        "novelty": float(-np.log2(share)[items].mean()) if len(items) else float("nan"),
    }


def metrics_by_length(ranks: np.ndarray, lengths: np.ndarray) -> list[dict]:
    """Compute metrics of the users in each group of history length: dicts with `history`, `users` and the metrics.

    ranks, lengths: [M]. Groups end at LENGTH_EDGES; empty groups are left out.
    """
    return _by_group(ranks, "history", groups_of(lengths, LENGTH_EDGES, 1))


def metrics_by_popularity(ranks: np.ndarray, counts: np.ndarray) -> list[dict]:
    """Compute metrics of the users by the training events of their targets: dicts with `events`, `users` and the
    metrics.

    ranks, counts: [M]. Targets without training events are a group of their own.
    """
    return _by_group(ranks, "events", groups_of(counts, COUNT_EDGES, 0))


def _by_group(ranks: np.ndarray, key: str, groups: Iterable[tuple[str, np.ndarray]]) -> list[dict]:
    return [{key: name, "users": int(inside.sum()), **ranking_metrics(ranks[inside])} for name, inside in groups]


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
