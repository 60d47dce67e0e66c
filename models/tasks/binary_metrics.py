"""Metrics of predicted probabilities against binary labels: AUC, grouped AUC, log loss, entropy, calibration.

Letters: M scored events, U users, R bootstrap draws.
"""

from collections.abc import Sequence

import numpy as np

NAMES = ("auc", "gauc", "log_loss", "normalized_entropy", "calibration")
LEAST_PROBABILITY = 1e-7  # predictions are clipped to it and to 1 less it before a logarithm is taken


def auc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Area under the ROC curve: how often a positive scores above a negative, ties counting a half.

    scores: [M] float; labels: [M] bool; weights: [M], how often each event counts (once by default). NaN without a
    positive or without a negative.
    """
    order = np.argsort(scores, kind="stable")
    return _sorted_auc(scores[order], labels[order], None if weights is None else weights[order])


def _sorted_auc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None) -> float:
    weights = np.ones(len(scores)) if weights is None else weights.astype(np.float64)
    positive, negative = weights * labels, weights * ~labels
    # One group for each distinct score.
    starts = np.flatnonzero(np.diff(scores, prepend=np.nan) != 0) if len(scores) else np.empty(0, np.int64)
    if not positive.sum() or not negative.sum():
        return float("nan")
    positives, negatives = (np.add.reduceat(x, starts) for x in (positive, negative))
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / (positives.sum() * negatives.sum()))


def gauc(scores: np.ndarray, labels: np.ndarray, users: np.ndarray) -> float:
    """Mean of the users' own AUCs over the users with both labels, weighted by their number of events.

    scores: [M] float; labels: [M] bool; users: [M] int. NaN where no user has both labels.
    """
    order = np.lexsort((scores, users))
    scores, labels, users = scores[order], labels[order], users[order]
    new_user = np.diff(users, prepend=-1) != 0
    group = np.cumsum(new_user | (np.diff(scores, prepend=np.nan) != 0)) - 1  # a user's events of one score
    user = np.cumsum(new_user) - 1
    positives, negatives = np.bincount(group, labels), np.bincount(group, ~labels)
    owner = np.empty(len(positives), np.int64)
    owner[group] = user
    before = np.cumsum(negatives) - negatives
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    below = before - before[first][owner]  # negatives of the same user with a smaller score
    won = np.bincount(owner, positives * (below + negatives / 2))
    pairs = np.bincount(owner, positives) * np.bincount(owner, negatives)
    both = pairs > 0
    if not both.any():
        return float("nan")
    return float(np.average(won[both] / pairs[both], weights=np.bincount(user)[both]))


def log_loss(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Mean cross-entropy in nats: [M] probabilities against [M] bool labels."""
    p = np.clip(probabilities.astype(np.float64), LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    return float(-np.log(np.where(labels, p, 1 - p)).mean()) if len(p) else float("nan")


def binary_metrics(probabilities: np.ndarray, labels: np.ndarray, users: np.ndarray) -> dict[str, float]:
    """All of NAMES.

    normalized_entropy is the log loss divided by that of always predicting the events' own share of positives (He et
    al., Practical Lessons from Predicting Clicks on Ads at Facebook, ADKDD 2014); calibration is the mean prediction
    divided by that share. NaN where a metric has no value.

    probabilities: [M] float; labels: [M] bool; users: [M] int.
    """
    share = labels.mean() if len(labels) else np.nan
    loss = log_loss(probabilities, labels)
    entropy = -(share * np.log(share) + (1 - share) * np.log(1 - share)) if 0 < share < 1 else np.nan
    return {
        "auc": auc(probabilities, labels),
        "gauc": gauc(probabilities, labels, users),
        "log_loss": loss,
        "normalized_entropy": float(loss / entropy),
        "calibration": float(probabilities.astype(np.float64).mean() / share) if share > 0 else float("nan"),
    }


def metrics_by_history(
    probabilities: np.ndarray, labels: np.ndarray, users: np.ndarray, history: np.ndarray, edges: Sequence[int]
) -> list[dict]:
    """`binary_metrics` of the events in each group of history length (events before the scored one): [M] each.

    Groups end at `edges`, the last has no end; groups without an event are left out.
    """
    rows = []
    groups = np.searchsorted(edges, history)
    for group in range(len(edges) + 1):
        inside = groups == group
        if not inside.any():
            continue
        low = 0 if group == 0 else edges[group - 1] + 1
        name = f"{low}-{edges[group]}" if group < len(edges) else f"{low}+"
        values = binary_metrics(probabilities[inside], labels[inside], users[inside])
        rows.append({"history": name, "events": int(inside.sum()), **values})
    return rows


def auc_difference(
    first: np.ndarray, second: np.ndarray, labels: np.ndarray, users: np.ndarray, *, draws: int = 1000, seed: int = 0
) -> tuple[float, float, float]:
    """(difference, lower, upper): AUC of `first` less that of `second`, with a 95% interval by bootstrap over users.

    Users are drawn with replacement, all events of a user together. first, second: [M] scores; labels: [M] bool;
    users: [M] int. draws: R.
    """
    order = [np.argsort(scores, kind="stable") for scores in (first, second)]
    given = [(scores[o], labels[o], users[o]) for scores, o in zip((first, second), order)]
    rng, count = np.random.default_rng(seed), int(users.max()) + 1
    present = np.unique(users)
    found = []
    for _ in range(draws):
        weight = np.bincount(rng.choice(present, len(present)), minlength=count)
        one, other = (_sorted_auc(scores, truth, weight[who]) for scores, truth, who in given)
        found.append(one - other)
    lower, upper = np.nanpercentile(found, (2.5, 97.5))
    return auc(first, labels) - auc(second, labels), float(lower), float(upper)
