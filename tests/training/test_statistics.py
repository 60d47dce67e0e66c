"""Test the statistics of a comparison: intervals contain the true ratio, p values are corrected."""

import numpy as np
import pytest

from training.statistics import Error, compare, holm, log_ratio, seed_variance, user_draws

SEEDS, SIMULATED = 5, 1000


def simulated(rng, users, shares):
    """Yield (ours, theirs) [100, S, M] with the true ratio 1.1 for each share of the variance that is due to seeds.

    Users differ strongly in a way common to both settings, and less by setting and by run.
    """
    spread = np.array([0.9, 0.15, 0.35], np.float32)  # of logarithms: user, user by setting, user by run
    user, setting, run = np.exp(spread**2) - 1  # squared coefficients of variation
    users_variance = 2 * (1 + user) * (setting + (1 + setting) * run / SEEDS) / users

    def lognormal(spread, *shape):
        return np.exp(spread * rng.standard_normal(shape, np.float32) - spread**2 / 2)

    common = lognormal(spread[0], 100, 1, users)
    parts = [
        (
            mean * common * lognormal(spread[1], 100, 1, users) * lognormal(spread[2], 100, SEEDS, users),
            rng.standard_normal((100, SEEDS, 1), np.float32),
        )
        for mean in (1.1, 1.0)
    ]
    for share in shares:
        seed_spread = np.sqrt(share / (1 - share) * users_variance * SEEDS / 2)
        yield [user_part * (1 + seed_spread * seed) for user_part, seed in parts]


@pytest.mark.parametrize("users", [200, 3000])
def test_interval_contains_the_true_ratio(users):
    """Seeds have 5%, 50% and 95% of the variance, for the same users."""
    shares, rng = (0.05, 0.5, 0.95), np.random.default_rng(users)
    num_covered = dict.fromkeys(shares, 0)
    for _ in range(SIMULATED // 100):
        for share, (ours, theirs) in zip(shares, simulated(rng, users, shares)):
            center, error = log_ratio(ours, theirs, draws=250)
            num_covered[share] += (np.abs(center - np.log(1.1)) <= error.half_width()).sum()
    for share, number in num_covered.items():
        assert 0.93 * SIMULATED <= number <= 0.97 * SIMULATED, share


def test_setting_against_itself_is_exactly_one():
    values = np.random.default_rng(0).random((3, 50)) ** 3
    assert compare(values, values, same_runs=True) == (1.0, 1.0, 1.0, 1.0, True)
    again = compare(values, values.copy())
    assert again.ratio == 1.0 and again.low < 1 < again.high and again.p == 1.0


def test_interval_of_a_single_seed_and_of_a_mean_of_zero():
    rng = np.random.default_rng(0)
    ours, theirs = rng.random((1, 400)) + 0.5, rng.random((1, 400)) + 0.5
    comparison = compare(ours, theirs)
    assert not comparison.seeds and comparison.low < comparison.ratio < comparison.high
    # The delta method's standard error of a ratio of means over the same users.
    difference = (ours / ours.mean() - theirs / theirs.mean()).std() / 20
    assert np.log(comparison.high / comparison.ratio) == pytest.approx(1.966 * difference, rel=0.1)
    nothing = compare(np.zeros((1, 400)), theirs)
    assert nothing.ratio == 0 and np.isnan([nothing.low, nothing.high, nothing.p]).all()


def test_p_value_is_the_level_at_which_the_interval_excludes_one():
    error = Error(np.array(0.01), 999, np.array(0.02), np.array(4.0), True)
    half = error.half_width()
    assert error.p_value(half) == pytest.approx(0.05, abs=1e-8)
    assert error.p_value(-half) == pytest.approx(0.05, abs=1e-8)
    # With one part the quantile is Student's t: 2.776 for 4 degrees of freedom, 1.962 for 999.
    only_seeds = Error(np.array(0.0), 999, np.array(1.0), np.array(4.0), True)
    only_users = Error(np.array(1.0), 999, np.array(0.0), np.array(1.0), True)
    assert only_seeds.half_width() == pytest.approx(2.776445, abs=1e-5)
    assert only_users.half_width() == pytest.approx(1.962341, abs=1e-5)


def test_seed_variance_excludes_the_sampling_of_users():
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((400, 5, 50))
    rows = noise + rng.standard_normal((400, 1, 50)) + 0.3 * rng.standard_normal((400, 5, 1))
    assert seed_variance(rows).mean() == pytest.approx(0.09 / 5, rel=0.15)
    # Without differences between seeds, the variance of runs is still 1/50, and that of a mean over five runs 1/250.
    assert seed_variance(noise).mean() < 0.4 / 250


def test_draws_of_many_users_are_draws_of_groups(monkeypatch):
    values = np.random.default_rng(0).random((2, 1501))
    whole = user_draws(values, 300)
    monkeypatch.setattr("training.statistics.MOST_DRAWN", 200)
    groups = user_draws(values, 300)
    assert groups.mean(-1) == pytest.approx(values.mean(-1), abs=0.003)
    assert groups.std(-1) == pytest.approx(whole.std(-1), rel=0.2)
    # All rows have the same draws of users, so that common differences between users cancel out.
    pair = user_draws(np.stack([values[0], 2 * values[0]]), 50)
    assert pair[0].std() > 0 and pair[1] / pair[0] == pytest.approx(np.full(50, 2.0))


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    corrected = holm([0.02, float("nan"), 0.03])
    assert corrected[0] == pytest.approx(0.04) and np.isnan(corrected[1]) and corrected[2] == pytest.approx(0.04)
    assert holm([]) == []
