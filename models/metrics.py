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
