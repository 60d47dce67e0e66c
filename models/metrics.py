"""Ranking metrics from ranks: HR and NDCG at k, MRR, also by history length."""

import numpy as np

KS = (1, 5, 10, 50, 100, 200)
# Upper ends of the history-length groups, in events before the target.
LENGTH_EDGES = (5, 10, 20, 50, 100, 200)


def ranking_metrics(ranks: np.ndarray, ks: tuple[int, ...] = KS) -> dict[str, float]:
    """Means over the users of one relevant item each.

    ranks: [M] int, from 1. HR@k = share of ranks <= k; NDCG@k = mean of 1 / log2(rank + 1) where rank <= k, else 0;
    MRR = mean of 1 / rank, over the whole catalogue. An empty array gives NaN.
    """
    if len(ranks) == 0:
        return {name: float("nan") for name in metric_names(ks)}
    gain = 1 / np.log2(ranks + 1.0)
    values = {}
    for k in ks:
        hit = ranks <= k
        values[f"HR@{k}"] = float(hit.mean())
        values[f"NDCG@{k}"] = float((gain * hit).mean())
    values["MRR"] = float((1.0 / ranks).mean())
    return values


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
    values = {}
    for k in ks:
        values[f"HR@{k}"] = (ranks <= k).astype(float)
        values[f"NDCG@{k}"] = (ranks <= k) / np.log2(ranks + 1.0)
    values["MRR"] = 1.0 / ranks
    found = {}
    for name, value in values.items():
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
    groups = np.searchsorted(LENGTH_EDGES, lengths)
    rows = []
    for group in range(len(LENGTH_EDGES) + 1):
        inside = groups == group
        if not inside.any():
            continue
        low = 1 if group == 0 else LENGTH_EDGES[group - 1] + 1
        name = f"{low}-{LENGTH_EDGES[group]}" if group < len(LENGTH_EDGES) else f"{low}+"
        rows.append({"history": name, "users": int(inside.sum()), **ranking_metrics(ranks[inside])})
    return rows
