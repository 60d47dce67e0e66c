"""Test AUC, grouped AUC, log loss, calibration and the interval of a difference against plain loops."""

import numpy as np
import pytest

from evaluation.binary_metrics import (
    auc,
    auc_difference,
    binary_metrics,
    gauc,
    log_loss,
    metrics_by_history,
    user_values,
)

RNG = np.random.default_rng(0)
SCORES = RNG.integers(0, 8, 60) / 8  # many ties
LABELS = RNG.random(60) < 0.4
USERS = np.sort(RNG.integers(0, 7, 60)) * 3  # numbers with gaps


def plain_auc(scores, labels):
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[labels] for n in scores[~labels]]
    return sum(pairs) / len(pairs) if pairs else float("nan")


def test_auc_counts_pairs():
    assert auc(SCORES, LABELS) == pytest.approx(plain_auc(SCORES, LABELS))
    assert auc(np.array([0.1, 0.2, 0.9]), np.array([False, False, True])) == 1.0
    assert np.isnan(auc(SCORES, np.ones(60, bool))) and np.isnan(auc(SCORES[:0], LABELS[:0]))


def test_auc_with_weights_is_that_of_repeated_events():
    weights = RNG.integers(0, 4, 60)
    again = np.repeat(np.arange(60), weights)
    assert auc(SCORES, LABELS, weights) == pytest.approx(auc(SCORES[again], LABELS[again]))


def test_gauc_is_the_mean_of_users_with_both_labels_by_events():
    values, weights = [], []
    for user in np.unique(USERS):
        mask = user == USERS
        value = plain_auc(SCORES[mask], LABELS[mask])
        if not np.isnan(value):
            values.append(value)
            weights.append(mask.sum())
    order = RNG.permutation(60)
    assert gauc(SCORES[order], LABELS[order], USERS[order]) == pytest.approx(np.average(values, weights=weights))
    assert np.isnan(gauc(SCORES, np.ones(60, bool), USERS))


def test_log_loss_entropy_and_calibration():
    p, y = np.array([0.9, 0.2, 0.6]), np.array([True, False, True])
    expected = -(np.log(0.9) + np.log(0.8) + np.log(0.6)) / 3
    assert log_loss(p, y) == pytest.approx(expected)
    metrics = binary_metrics(p, y, np.zeros(3, int))
    entropy = -(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3))
    assert metrics["normalized_entropy"] == pytest.approx(expected / entropy)
    assert metrics["calibration"] == pytest.approx((1.7 / 3) / (2 / 3))
    assert np.isfinite(log_loss(np.array([0.0, 1.0]), np.array([True, False])))


def test_groups_of_history_have_every_event_once():
    history = np.arange(60)
    rows = metrics_by_history(SCORES, LABELS, USERS, history, (5, 20))
    assert [(row["history"], row["events"]) for row in rows] == [("0-5", 6), ("6-20", 15), ("21+", 39)]
    assert rows[1]["auc"] == pytest.approx(plain_auc(SCORES[6:21], LABELS[6:21]))


def test_an_interval_is_zero_for_equal_scores_and_excludes_zero_for_a_clear_difference():
    assert auc_difference(SCORES, SCORES, LABELS, USERS, draws=50) == (0.0, 0.0, 0.0)
    difference, lower, upper = auc_difference(LABELS + 0.1 * SCORES, SCORES, LABELS, USERS, draws=200)
    assert 0 < lower <= difference <= upper


def test_means_of_user_values_are_the_metrics_and_vary_as_they_do():
    rng = np.random.default_rng(1)
    users = np.sort(rng.integers(0, 300, 3000)) * 2
    skill = rng.normal(size=601)[users]
    scores, labels = rng.random(3000).round(2), np.zeros(3000, bool)
    labels[:] = rng.random(3000) < 0.2 + 0.4 * scores + 0.1 * (skill > 0)
    values, whole = user_values(scores, labels, users), binary_metrics(scores, labels, users)
    for name, value in values.items():
        assert value.shape == np.unique(users).shape and value.mean() == pytest.approx(whole[name], rel=1e-12)
    # If users are resampled, the means of the values change as the metrics do, to first order.
    names, place = np.unique(users, return_inverse=True)
    moved, shift = [], []
    for _ in range(30):
        weight = rng.multinomial(len(names), np.full(len(names), 1 / len(names)))
        again = np.repeat(np.arange(3000), weight[place])
        drawn = binary_metrics(scores[again], labels[again], users[again])
        moved.append([np.average(values[name], weights=weight) - whole[name] for name in ("auc", "gauc", "log_loss")])
        shift.append([drawn[name] - whole[name] for name in ("auc", "gauc", "log_loss")])
    for one, other in zip(np.transpose(moved), np.transpose(shift)):
        assert np.corrcoef(one, other)[0, 1] > 0.98 and one.std() == pytest.approx(other.std(), rel=0.1)
