"""Ranking metrics from ranks: HR and NDCG at k, MRR, also by history length."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

KS = (1, 5, 10, 50, 100, 200)
# Upper ends of the history-length groups, in events before the target.
LENGTH_EDGES = (5, 10, 20, 50, 100, 200)
# Likewise of an item's training events.
COUNT_EDGES = (0, 5, 10, 30, 100, 300, 1000)


def user_metrics(ranks: np.ndarray, ks: tuple[int, ...] = KS) -> dict[str, np.ndarray]:
    """Metrics of each user, of one relevant item: name -> [M] float64.

    ranks: [M] int, from 1. HR@k = 1 where the rank is <= k, else 0; NDCG@k = 1 / log2(rank + 1) there; MRR = 1 / rank.
    """
    gain = 1 / np.log2(ranks + 1.0)
    values = {}
    for k in ks:
        values[f"HR@{k}"] = (ranks <= k).astype(np.float64)
        values[f"NDCG@{k}"] = gain * (ranks <= k)
    return values | {"MRR": 1.0 / ranks}


def ranking_metrics(ranks: np.ndarray, ks: tuple[int, ...] = KS) -> dict[str, float]:
    """Means of `user_metrics` over the users, of ranks [M] over the whole catalogue. An empty array gives NaN.

    Examples:
        >>> import numpy as np
        >>> ranking_metrics(np.array([1, 3, 20]), ks=(10,))
        {'HR@10': 0.6666666666666666, 'NDCG@10': 0.5, 'MRR': 0.4611111111111111}
    """
    if len(ranks) == 0:
        return {name: float("nan") for name in metric_names(ks)}
    return {name: float(values.mean()) for name, values in user_metrics(ranks, ks).items()}


def metric_names(ks: tuple[int, ...] = KS) -> list[str]:
    return [f"{name}@{k}" for k in ks for name in ("HR", "NDCG")] + ["MRR"]


def names_for(num_items: int, ks: tuple[int, ...] = KS) -> list[str]:
    """The names of the metrics that say something of so many items: HR@k is 1 for any model where k is not less."""
    return [name for k in ks if k < num_items for name in (f"HR@{k}", f"NDCG@{k}")] + ["MRR"]


def intervals(ranks: np.ndarray, ks: tuple[int, ...] = (10,)) -> dict[str, list[float]]:
    """95% intervals of HR@k, NDCG@k and MRR: the mean over users, 1.96 of its standard errors to either side.

    They hold the users' chance alone, not that of the seed. ranks: [M]; empty for fewer than two users.
    """
    if len(ranks) < 2:
        return {}
    found = {}
    for name, value in user_metrics(ranks, ks).items():
        mean, error = value.mean(), 1.96 * value.std(ddof=1) / len(value) ** 0.5
        found[name] = [float(max(0.0, mean - error)), float(min(1.0, mean + error))]
    return found


def describe_lists(lists: np.ndarray, counts: np.ndarray) -> dict:
    """What the lists [M, k] of items are like, given how often training saw each item, counts [I].

    coverage: the share of the catalogue that is in any of them. novelty: the mean over their items of -log2 of the
    item's share of all training events (one event added to each), in bits. An item of -1 does not count.
    """
    share, items = (counts + 1) / (counts + 1).sum(), lists[lists >= 0]
    return {
        "users": len(lists),
        "length": lists.shape[1],
        "coverage": len(np.unique(items)) / len(counts),
        "novelty": float(-np.log2(share)[items].mean()) if len(items) else float("nan"),
    }


def metrics_by_length(ranks: np.ndarray, lengths: np.ndarray) -> list[dict]:
    """Metrics of the users in each group of history length: dicts with `history`, `users` and the metrics.

    ranks, lengths: [M]. Groups end at LENGTH_EDGES; empty groups are left out.
    """
    return _by_group(ranks, "history", groups_of(lengths, LENGTH_EDGES, 1))


def metrics_by_popularity(ranks: np.ndarray, counts: np.ndarray) -> list[dict]:
    """Metrics of the users by the training events of their targets: dicts with `events`, `users` and the metrics.

    ranks, counts: [M]. Targets that training never saw, of 0 events, are a group of their own.
    """
    return _by_group(ranks, "events", groups_of(counts, COUNT_EDGES, 0))


def _by_group(ranks: np.ndarray, key: str, groups: Iterable[tuple[str, np.ndarray]]) -> list[dict]:
    return [{key: name, "users": int(inside.sum()), **ranking_metrics(ranks[inside])} for name, inside in groups]


def groups_of(counts: np.ndarray, edges: Sequence[int], least: int) -> Iterator[tuple[str, np.ndarray]]:
    """(name like `6-10`, which of counts [M] are in it) of the groups that end at `edges`, the last having no end.

    least: what the first group begins with. Empty groups are left out.
    """
    groups = np.searchsorted(edges, counts)
    for group in range(len(edges) + 1):
        inside = groups == group
        if inside.any():
            low = least if group == 0 else edges[group - 1] + 1
            high = None if group == len(edges) else edges[group]
            yield f"{low}+" if high is None else f"{low}" if low == high else f"{low}-{high}", inside
