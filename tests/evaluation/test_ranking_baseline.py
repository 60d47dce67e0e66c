"""Test the baseline of ranking: its features use no later labels, and its fit."""

import numpy as np

from evaluation.ranking_baseline import fit_logistic, history_features, predict_logistic

RNG = np.random.default_rng(0)


def test_features_depend_on_no_label_of_the_event_or_later_ones():
    offsets = np.array([0, 12, 30])
    items, labels = RNG.integers(0, 4, 30), RNG.random(30) < 0.5
    training = np.arange(30) % 3 != 2
    before = history_features(items, labels, offsets, training, 4)
    for event in np.flatnonzero(~training):  # a training label changes the global mean, which is in all features
        flipped = labels.copy()
        flipped[event] ^= True
        after = history_features(items, flipped, offsets, training, 4)
        assert (after[: event + 1] == before[: event + 1]).all()
        end = offsets[np.searchsorted(offsets, event, side="right")]
        assert (after[event + 1 : end, 1] != before[event + 1 : end, 1]).all() and (after[end:] == before[end:]).all()


def test_features_of_a_tiny_history_by_hand():
    # One user, one item, labels 1, 0, 1, all in training: the mean is 2/3.
    actual = history_features(np.zeros(3, int), np.array([True, False, True]), np.array([0, 3]), np.ones(3, bool), 1)

    def log_odds(p):
        return np.log(p / (1 - p))

    mean = 2 / 3
    expected = [
        [log_odds((1 + 5 * mean) / 7), log_odds(mean), log_odds(mean), np.log(4)],
        [log_odds((2 + 5 * mean) / 7), log_odds((1 + 5 * mean) / 6), log_odds((1 + 2 * mean) / 3), np.log(4)],
        [log_odds((1 + 5 * mean) / 7), log_odds((1 + 5 * mean) / 7), log_odds((1 + 2 * mean) / 4), np.log(4)],
    ]
    np.testing.assert_allclose(actual, expected)


def test_logistic_regression_finds_the_true_coefficients():
    x = RNG.normal(size=(20_000, 2))
    labels = RNG.random(20_000) < 1 / (1 + np.exp(-(1.5 * x[:, 0] - 0.5 * x[:, 1] + 0.3)))
    coefficients = fit_logistic(x, labels)
    np.testing.assert_allclose(coefficients, [1.5, -0.5, 0.3], atol=0.1)
    p = predict_logistic(coefficients, x)
    assert abs(p.mean() - labels.mean()) < 1e-6  # the score equation of the intercept
    assert np.isfinite(fit_logistic(x[:4], np.array([True, False, True, False]))).all()
