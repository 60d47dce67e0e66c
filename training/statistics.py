"""Compute ratios of means over users and seeds, with intervals and tests.

A run has one value for each user (see `Task.user_values`), and a setting has one run for each seed. Users and seeds are
samples: others would give other means. The variance of the logarithm of a ratio is the sum of two parts:

- users: estimated by a bootstrap. All settings are evaluated on the same users. Each draw uses the same users for all
  settings, so that differences between users that are common to all settings cancel out.
- seeds: five seeds are too few for a bootstrap. The part is estimated by the variance of a setting's runs around their
  mean, minus its part due to the sampling of users, which the bootstrap includes already. It has S - 1 degrees of
  freedom.

The interval is computed for the logarithm. The square of its half width is the sum of t^2 * variance over both parts,
with Student's t for the degrees of freedom of each. (With a single t, for Satterthwaite's degrees of freedom of the sum
of both variances, the interval contained the true ratio in 93.5% of the cases in which both parts are equal.)

Letters: S and R seeds, M users, K settings, D draws.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit  # the quantile of Student's t; scipy.stats takes a second to import

DRAWS = 2000
LEVEL = 0.95
MOST_DRAWN = 4000  # groups of users; more would not make the interval more exact with this number of draws
CHUNK = 2**23  # bootstrap weights drawn at a time


class Comparison(NamedTuple):
    """The ratio of two settings' means, its 95% interval, and the two-sided p value for a ratio of 1; NaN if unknown.

    seeds: whether the interval includes the variation between seeds, which needs at least two runs of each setting,
    unless both have the same runs.
    """

    ratio: float
    low: float
    high: float
    p: float
    seeds: bool


def compare(ours: np.ndarray, theirs: np.ndarray, *, same_runs: bool = False) -> Comparison:
    """Compare the values `ours` [S, M] with `theirs` [R, M] of the same users; see `log_ratio` for the options."""
    center, error = log_ratio(ours, theirs, same_runs=same_runs)
    if not np.isfinite(center + error.variance):
        nan = float("nan")
        return Comparison(float(np.exp(center)), nan, nan, nan, error.seeds)
    half, p = error.half_width(), error.p_value(center)
    ratio, low, high = (float(np.exp(x)) for x in (center, center - half, center + half))
    return Comparison(ratio, low, high, float(p), error.seeds)


@dataclass
class Error:
    """The variances [...] of an estimate due to users and to seeds, with the degrees of freedom of each.

    seeds: whether the variance due to seeds is known.
    """

    users: np.ndarray
    users_freedom: int
    seeds_variance: np.ndarray
    seeds_freedom: np.ndarray
    seeds: bool

    @property
    def variance(self) -> np.ndarray:
        return self.users + self.seeds_variance

    def half_width(self, level: float | np.ndarray = LEVEL) -> np.ndarray:
        """Return half the width of the interval with the confidence level `level`."""
        upper = (1 + level) / 2
        # The squares of the half widths are added, as variances are; this is exact if one part is 0.
        users = stdtrit(self.users_freedom, upper) ** 2 * self.users
        return np.sqrt(users + stdtrit(self.seeds_freedom, upper) ** 2 * self.seeds_variance)

    def p_value(self, estimate: np.ndarray) -> np.ndarray:
        """Return the smallest 1 - level for which the interval around `estimate` excludes 0."""
        low, high = np.zeros_like(self.users), np.ones_like(self.users)  # bounds of p
        for _ in range(32):
            middle = (low + high) / 2
            outside = np.abs(estimate) > self.half_width(1 - middle)
            low, high = np.where(outside, low, middle), np.where(outside, middle, high)
        return high


def log_ratio(
    ours: np.ndarray, theirs: np.ndarray, *, same_runs: bool = False, draws: int = DRAWS
) -> tuple[np.ndarray, Error]:
    """Return the logarithm of the ratio of the means of ours [..., S, M] and theirs [..., R, M], and its error.

    same_runs: whether row i of both is the same trained model, evaluated in two ways; the variance due to seeds is then
    that of the rows' differences, 0 for a single row.
    The result is infinite or NaN if a mean is 0, over all users or over a draw of them.
    """
    if ours.shape[:-2] != theirs.shape[:-2] or ours.shape[-1] != theirs.shape[-1]:
        raise ValueError(f"expected values [..., seeds, users] of the same users, got {ours.shape} and {theirs.shape}")
    if same_runs and ours.shape != theirs.shape:
        raise ValueError(f"same_runs: expected as many runs in both, got {ours.shape[-2]} and {theirs.shape[-2]}")
    with np.errstate(divide="ignore", invalid="ignore"):
        center = np.log(ours.mean((-2, -1)) / theirs.mean((-2, -1)))
        our_draws, their_draws = user_draws(np.stack([ours.mean(-2), theirs.mean(-2)]), draws)
        users = np.log(our_draws / their_draws).var(-1, ddof=1)
        rows = [x / x.mean((-2, -1), keepdims=True) for x in (ours, theirs)]
        rows = [rows[0] - rows[1]] if same_runs else rows
        seeds = same_runs or min(x.shape[-2] for x in rows) > 1
        parts = [(seed_variance(x), x.shape[-2] - 1) for x in rows if seeds and x.shape[-2] > 1]
        variance = sum((part for part, _ in parts), np.zeros_like(users))
        # The degrees of freedom of a sum of variances by Welch and Satterthwaite.
        freedom = variance**2 / sum((part**2 / degrees for part, degrees in parts), np.zeros_like(users))
    return center, Error(users, max(1, ours.shape[-1] - 1), variance, np.where(variance > 0, freedom, 1.0), seeds)


def seed_variance(rows: np.ndarray) -> np.ndarray:
    """Estimate the variance [...] due to seeds of the mean of rows [..., S, M] over seeds and users, at least 0.

    The means of runs vary with the seed and with the sample of users. The variance due to users is included in the
    bootstrap over users, and is subtracted here (two-way analysis of variance).
    """
    seeds, users = rows.shape[-2:]
    means = rows.mean(-1)
    # The sum of squares of the residuals, rows minus the means of seeds and of users, without a copy of rows.
    residuals = (rows**2).sum((-2, -1)) - seeds * (rows.mean(-2) ** 2).sum(-1) - users * (means**2).sum(-1)
    residuals = residuals + seeds * users * rows.mean((-2, -1)) ** 2
    by_chance = residuals / ((seeds - 1) * max(1, users - 1))
    return np.maximum(0, means.var(-1, ddof=1) - by_chance / users) / seeds


def user_draws(values: np.ndarray, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """Return means of values [..., M] over `draws` bootstrap samples of the users: [..., D].

    The samples are the same for the same seed and M. A user's weight in a sample is Poisson distributed with mean 1, so
    that users can be processed in parts. If there are more than MOST_DRAWN users, they are randomly divided into groups
    whose sizes differ by at most one, and groups are sampled instead.
    """
    rng = np.random.default_rng(seed)
    flat, sizes = values.reshape(-1, values.shape[-1]), np.ones(values.shape[-1])
    if flat.shape[1] > MOST_DRAWN:
        starts = np.linspace(0, flat.shape[1], MOST_DRAWN, endpoint=False).astype(np.int64)
        flat = np.add.reduceat(flat[:, rng.permutation(flat.shape[1])], starts, axis=1)
        sizes = np.diff(starts, append=values.shape[-1])
    total, count = np.zeros((len(flat), draws)), np.zeros(draws)
    parts = -(-flat.shape[1] * draws // CHUNK)
    for part, size in zip(np.array_split(flat, parts, axis=1), np.array_split(sizes, parts)):
        weights = rng.poisson(1.0, (part.shape[1], draws)).astype(np.float64)
        total += part @ weights
        count += size @ weights
    return (total / count).reshape(*values.shape[:-1], draws)


def holm(p_values: list[float]) -> list[float]:
    """Correct p values for multiple tests (Holm, Scandinavian Journal of Statistics 6, 1979); NaN is ignored."""
    p = np.asarray(p_values, np.float64)
    finite = np.flatnonzero(~np.isnan(p))
    order = finite[np.argsort(p[finite], kind="stable")]
    corrected = np.full(len(p), np.nan)
    corrected[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return corrected.tolist()
