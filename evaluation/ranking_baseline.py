"""Compute the baseline of ranking reports: logistic regression on the labels of items and the earlier ones of users.

Letters: E events, F features, U users, M some of the events, A kinds of action.
"""

import numpy as np

from data.types import Dataset

# The number of labels, each equal to the global mean, that are added before a mean is computed.
ITEM_SMOOTHING, USER_SMOOTHING, RECENT_SMOOTHING = 5, 5, 2
RECENT = 10  # latest labels of a user that are a feature
CLIP = 0.01  # means are clipped to [CLIP, 1 - CLIP] before their log-odds are taken
STEPS, TOLERANCE = 50, 1e-10


def history_features(
    items: np.ndarray, labels: np.ndarray, user_offsets: np.ndarray, training: np.ndarray, num_items: int
) -> np.ndarray:
    """Return features [E, 4] of each event, from its item's training labels and its user's earlier labels.

    They are the log-odds of (a) the item's mean training label, without that of the event, (b) the mean of the user's
    earlier labels and (c) the mean of the last RECENT of them, each smoothed towards the global mean; and (d) ln(1 +
    the number of the item's training events).

    items: [E] int, jagged by user_offsets [U + 1], each user's in time order; labels: [E] bool; training: [E] bool, the
    training events.
    """
    labels = labels.astype(np.float64)
    mean = labels[training].mean() if training.any() else 0.5
    counts = np.bincount(items[training], minlength=num_items)
    sums = np.bincount(items[training], labels[training], minlength=num_items)
    item_sum, item_count = sums[items] - labels * training, counts[items] - training

    totals = np.concatenate([[0.0], np.cumsum(labels)])
    event = np.arange(len(items))
    first = np.repeat(user_offsets[:-1], np.diff(user_offsets))
    recent = np.maximum(first, event - RECENT)

    def log_odds(total: np.ndarray, count: np.ndarray, smoothing: int) -> np.ndarray:
        p = np.clip((total + smoothing * mean) / (count + smoothing), CLIP, 1 - CLIP)
        return np.log(p / (1 - p))

    return np.stack(
        [
            log_odds(item_sum, item_count, ITEM_SMOOTHING),
            log_odds(totals[event] - totals[first], event - first, USER_SMOOTHING),
            log_odds(totals[event] - totals[recent], event - recent, RECENT_SMOOTHING),
            np.log1p(counts[items]),
        ],
        axis=1,
    )


def fit_logistic(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Fit a logistic regression by Newton's method; return its coefficients [F + 1], the last one the intercept.

    features: [M, F]; labels: [M] bool. An L2 penalty of 1e-6 keeps the coefficients finite for separable labels.
    """
    x = np.column_stack([features, np.ones(len(features))])
    coefficients = np.zeros(x.shape[1])
    for _ in range(STEPS):
        p = 1 / (1 + np.exp(-np.clip(x @ coefficients, -30, 30)))
        gradient = x.T @ (p - labels) + 1e-6 * coefficients
        step = np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + 1e-6 * np.eye(x.shape[1]), gradient)
        coefficients -= step
        if np.abs(step).max() < TOLERANCE:
            break
    return coefficients


def predict_logistic(coefficients: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Predict probabilities [M] of the positive label from features [M, F]."""
    return 1 / (1 + np.exp(-(features @ coefficients[:-1] + coefficients[-1])))


def predicted_by_history(
    dataset: Dataset, label_table: np.ndarray, train_end: np.ndarray, events: np.ndarray
) -> np.ndarray:
    """Predict probabilities [M, A] of the events [M] by logistic regression on labels of items and users.

    label_table: [codes, A], as in `data.ranking`; train_end: [U], where each user's training events end.
    """
    starts, lengths = dataset.user_offsets[:-1], np.diff(dataset.user_offsets)
    place = np.arange(dataset.num_events) - np.repeat(starts, lengths)
    training = place < np.repeat(train_end - starts, lengths)
    columns = []
    for labels in label_table.T.astype(bool)[:, dataset.actions]:
        features = history_features(dataset.items, labels, dataset.user_offsets, training, dataset.num_items)
        coefficients = fit_logistic(features[training], labels[training])
        columns.append(predict_logistic(coefficients, features[events]))
    return np.stack(columns, 1)
