"""Compute metrics of predicted probabilities against binary labels: AUC, grouped AUC, log loss, entropy, calibration.

Letters: M scored events, U users, R bootstrap draws.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

NAMES = ("auc", "gauc", "log_loss", "normalized_entropy", "calibration")
CURVE_POINTS, CALIBRATION_GROUPS = 101, 10
LEAST_PROBABILITY = 1e-7  # predictions are clipped to [LEAST_PROBABILITY, 1 - LEAST_PROBABILITY] before a logarithm


def auc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Return the area under the ROC curve: the share of (positive, negative) pairs in the right order, ties as a half.

    scores: [M] float; labels: [M] bool; weights: [M], the number of times that an event counts, by default 1. NaN if
    all labels are equal.
    """
    order = np.argsort(scores, kind="stable")
    return _sorted_auc(scores[order], labels[order], None if weights is None else weights[order])


def _sorted_auc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None) -> float:
    weights = np.ones(len(scores)) if weights is None else weights.astype(np.float64)
    positive, negative = weights * labels, weights * ~labels
    # Events with equal scores are one group.
    starts = np.flatnonzero(np.diff(scores, prepend=np.nan) != 0) if len(scores) else np.empty(0, np.int64)
    if not positive.sum() or not negative.sum():
        return float("nan")
    positives, negatives = (np.add.reduceat(x, starts) for x in (positive, negative))
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / (positives.sum() * negatives.sum()))


def gauc(scores: np.ndarray, labels: np.ndarray, users: np.ndarray) -> float:
    """Return the mean AUC of the users who have both labels, weighted by their numbers of events.

    scores: [M] float; labels: [M] bool; users: [M] int. NaN if no user has both labels.
    """
    values, events = user_aucs(scores, labels, users)
    has_both = ~np.isnan(values)
    return float(np.average(values[has_both], weights=events[has_both])) if has_both.any() else float("nan")


def user_aucs(scores: np.ndarray, labels: np.ndarray, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (AUC, number of events) of each user: [U] each, in the order of np.unique(users). NaN without both labels.

    scores: [M] float; labels: [M] bool; users: [M] int.
    """
    order = np.lexsort((scores, users))
    scores, labels, users = scores[order], labels[order], users[order]
    new_user = np.diff(users, prepend=-1) != 0
    group = (
        np.cumsum(new_user | (np.diff(scores, prepend=np.nan) != 0)) - 1
    )  # a group: a user's events with equal scores
    user = np.cumsum(new_user) - 1
    positives, negatives = np.bincount(group, labels), np.bincount(group, ~labels)
    owner = np.empty(len(positives), np.int64)
    owner[group] = user
    before = np.cumsum(negatives) - negatives
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    below = before - before[first][owner]  # negatives of the same user with a smaller score
    won = np.bincount(owner, positives * (below + negatives / 2))
    pairs = np.bincount(owner, positives) * np.bincount(owner, negatives)
    with np.errstate(invalid="ignore"):
        return won / pairs, np.bincount(user)


def user_values(probabilities: np.ndarray, labels: np.ndarray, users: np.ndarray) -> dict[str, np.ndarray]:
    """Return a value of each user, whose means are the metrics of `binary_metrics`: name -> [U], by np.unique(users).

    The AUC over all events is not a mean over users. A user's value is therefore the AUC plus U times the user's
    influence on it (Obuchowski, Nonparametric analysis of clustered ROC curve data, Biometrics 53, 1997): if users are
    resampled, the mean of the values changes as the AUC does, to first order. gauc and log_loss are ratios of sums
    over users and have values of the same kind; normalized_entropy has those of log_loss divided by the entropy of all
    labels. Calibration has none, since its best value is 1.
    """
    _, user = np.unique(users, return_inverse=True)
    count = int(user.max()) + 1

    def values(mean: float, contributions: np.ndarray) -> np.ndarray:
        return mean + count * np.bincount(user, contributions, minlength=count)

    p, q, area = labels.sum(), (~labels).sum(), auc(probabilities, labels)
    # above: the share of negatives with a lower score; below: the share of positives with a higher score.
    above, below = _share_under(probabilities, ~labels), 1 - _share_under(probabilities, labels)
    won = np.where(labels, above, below)
    aucs, events = user_aucs(probabilities, labels, users)
    has_both = ~np.isnan(aucs)
    grouped = gauc(probabilities, labels, users)
    share = np.where(has_both, events, 0) / max(1, events[has_both].sum())
    clipped = np.clip(probabilities.astype(np.float64), LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    losses = -np.log(np.where(labels, clipped, 1 - clipped))
    loss = losses.mean()
    loss_values = values(loss, (losses - loss) / len(losses))
    return {
        "auc": values(area, (won - area) / np.where(labels, p, q)),
        "gauc": grouped + count * share * (np.where(has_both, aucs, grouped) - grouped),
        "log_loss": loss_values,
        "normalized_entropy": loss_values / entropy(labels),
    }


def _share_under(scores: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return for each of scores [M] the share of scores in the mask `reference` [M] that are lower, ties as a half."""
    ordered = np.sort(scores[reference])
    places = np.searchsorted(ordered, scores) + np.searchsorted(ordered, scores, side="right")
    return places / 2 / max(1, len(ordered))


def log_loss(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean cross-entropy in nats of [M] probabilities against [M] bool labels."""
    p = np.clip(probabilities.astype(np.float64), LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    return float(-np.log(np.where(labels, p, 1 - p)).mean()) if len(p) else float("nan")


def entropy(labels: np.ndarray) -> float:
    """Return the log loss of predicting the share of positives for all labels [M]; NaN if all labels are equal."""
    share = labels.mean() if len(labels) else np.nan
    return float(-(share * np.log(share) + (1 - share) * np.log(1 - share))) if 0 < share < 1 else float("nan")


def binary_metrics(probabilities: np.ndarray, labels: np.ndarray, users: np.ndarray) -> dict[str, float]:
    """Return the metrics in NAMES; NaN for a metric without a value.

    normalized_entropy is the log loss divided by `entropy` (He et al., Practical Lessons from Predicting Clicks on Ads
    at Facebook, ADKDD 2014); calibration is the mean prediction divided by the share of positives.

    probabilities: [M] float; labels: [M] bool; users: [M] int.
    """
    share = labels.mean() if len(labels) else np.nan
    loss = log_loss(probabilities, labels)
    return {
        "auc": auc(probabilities, labels),
        "gauc": gauc(probabilities, labels, users),
        "log_loss": loss,
        "normalized_entropy": float(loss / entropy(labels)),
        "calibration": float(probabilities.astype(np.float64).mean() / share) if share > 0 else float("nan"),
    }


def mean_over_actions(
    compute: Callable[..., dict[str, Any]],
    names: Sequence[str],
    probabilities: np.ndarray,
    labels: np.ndarray,
    users: np.ndarray,
) -> dict[str, Any]:
    """Return the means of metrics over A actions; with several actions, also each action's as `action/metric`.

    compute: `binary_metrics` or `user_values`; names: the A actions; probabilities, labels: [M, A]; users: [M].
    """
    by_action = [compute(p, np.ascontiguousarray(y), users) for p, y in zip(probabilities.T, labels.T)]
    values = {name: np.mean([one[name] for one in by_action], axis=0) for name in by_action[0]}
    if len(names) > 1:
        values |= {f"{action}/{name}": one[name] for action, one in zip(names, by_action) for name in one}
    return values


def metrics_by_history(
    probabilities: np.ndarray, labels: np.ndarray, users: np.ndarray, history: np.ndarray, edges: Sequence[int]
) -> list[dict]:
    """Return `binary_metrics` of the events in each group of history length: dicts with `history`, `events`, metrics.

    All arrays are [M]; history: the number of events before the scored one. Groups end at `edges`, the last one has no
    end; groups without an event are left out.
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
    """Return (difference, lower, upper): the AUC of `first` minus that of `second`, with a 95% bootstrap interval.

    The bootstrap draws users with replacement, with all events of a user. first, second: [M] scores; labels: [M] bool;
    users: [M] int; draws: R.
    """
    order = [np.argsort(scores, kind="stable") for scores in (first, second)]
    by_user = [(scores[o], labels[o], users[o]) for scores, o in zip((first, second), order)]
    rng, count = np.random.default_rng(seed), int(users.max()) + 1
    present = np.unique(users)
    differences = []
    for _ in range(draws):
        weight = np.bincount(rng.choice(present, len(present)), minlength=count)
        first_auc, second_auc = (_sorted_auc(scores, truth, weight[who]) for scores, truth, who in by_user)
        differences.append(first_auc - second_auc)
    lower, upper = np.nanpercentile(differences, (2.5, 97.5))
    return auc(first, labels) - auc(second, labels), float(lower), float(upper)


def curves(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, list[list[float]]]:
    """Return the points of two curves: `roc`, (false positive rate, true positive rate), and `calibration`, (mean
    prediction, share of positives) of groups of events.
    """
    order = np.argsort(-probabilities, kind="stable")
    hits = np.concatenate([[0], np.cumsum(labels[order])])
    misses = np.arange(len(hits)) - hits
    at = np.linspace(0, len(labels), CURVE_POINTS).round().astype(int)
    roc = np.stack([misses[at] / max(1, misses[-1]), hits[at] / max(1, hits[-1])], 1)
    groups = [group for group in np.array_split(order[::-1], CALIBRATION_GROUPS) if len(group)]
    calibration = [[float(probabilities[group].mean()), float(labels[group].mean())] for group in groups]
    return {"roc": roc.round(5).tolist(), "calibration": calibration}
