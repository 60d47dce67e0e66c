"""Compute ratios of means over users and seeds, with intervals and tests.

A run gives one value for each user (see `Task.user_values`), a setting one run for each seed. Both are samples: another
seed or other users would have given other means. The variance of a ratio's logarithm is the sum of two parts:

- users: a bootstrap. All settings are judged by the same users, so that each draw takes the same users for all of them,
  and the difficulty of a user for all settings cancels out.
- seeds: five are too few to resample. The variance of a setting's runs about their mean, less the part due to the
  sampling of users, which the bootstrap includes already, is a variance component with S - 1 degrees of freedom.

The interval is one of the logarithm. The square of its half width is the sum of t^2 * variance over both parts, with
Student's t for the degrees of freedom of each. (A single t with Satterthwaite's degrees of freedom for the sum of the
variances contained the true ratio in 93.5% of the cases where both parts are equal.)

Letters: S and R seeds, M users, K settings, D draws.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit  # the quantile of Student's t; scipy.stats takes a second to import

DRAWS = 2000
LEVEL = 0.95
MOST_DRAWN = 4000  # more groups would make the interval no more exact than the number of draws allows
CHUNK = 2**23  # weights of a bootstrap computed at a time


class Comparison(NamedTuple):
    """The ratio of a setting's mean to another one's, its 95% interval, and the two-sided p value of a ratio of 1.

    seeds: whether the interval includes the variation between seeds, which needs two runs of each. NaN: unknown.
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
    """The error of an estimate: the variances [...] of the users' and the seeds' part, and the degrees of freedom that
    each is estimated with. seeds: whether the seeds' part is known.
    """

    users: np.ndarray
    users_freedom: int
    of_seeds: np.ndarray
    seeds_freedom: np.ndarray
    seeds: bool

    @property
    def variance(self) -> np.ndarray:
        return self.users + self.of_seeds

    def half_width(self, level: float | np.ndarray = LEVEL) -> np.ndarray:
        """Return half the width of the interval that contains the truth in `level` of all cases."""
        upper = (1 + level) / 2
        # The squares of both half widths add up, as variances do; this is exact if there is only one part.
        users = stdtrit(self.users_freedom, upper) ** 2 * self.users
        return np.sqrt(users + stdtrit(self.seeds_freedom, upper) ** 2 * self.of_seeds)

    def p_value(self, estimate: np.ndarray) -> np.ndarray:
        """Return the least 1 - level whose interval about `estimate` excludes 0."""
        low, high = np.zeros_like(self.users), np.ones_like(self.users)  # bounds of p
        for _ in range(32):
            middle = (low + high) / 2
            outside = np.abs(estimate) > self.half_width(1 - middle)
            low, high = np.where(outside, low, middle), np.where(outside, middle, high)
        return high


def log_ratio(
    ours: np.ndarray, theirs: np.ndarray, *, same_runs: bool = False, draws: int = DRAWS
) -> tuple[np.ndarray, Error]:
    """Return the logarithm of the ratio of two means, ours [..., S, M] to theirs [..., R, M], and its error.

    same_runs: row i of both is one trained model, evaluated in two ways, so that its seed adds no variation between
    them. The result is infinite or NaN if a mean, or that of a draw of users, is 0.
    """
    if ours.shape[:-2] != theirs.shape[:-2] or ours.shape[-1] != theirs.shape[-1]:
        raise ValueError(f"the values are {ours.shape} and {theirs.shape} ([..., seeds, users]): not of the same users")
    if same_runs and ours.shape != theirs.shape:
        raise ValueError(f"same_runs: the runs are {ours.shape[-2]} and {theirs.shape[-2]}")
    with np.errstate(divide="ignore", invalid="ignore"):
        center = np.log(ours.mean((-2, -1)) / theirs.mean((-2, -1)))
        of_ours, of_theirs = user_draws(np.stack([ours.mean(-2), theirs.mean(-2)]), draws)
        users = np.log(of_ours / of_theirs).var(-1, ddof=1)
        rows = [x / x.mean((-2, -1), keepdims=True) for x in (ours, theirs)]
        rows = [rows[0] - rows[1]] if same_runs else rows
        seeds = same_runs or min(x.shape[-2] for x in rows) > 1
        parts = [(seed_variance(x), x.shape[-2] - 1) for x in rows if seeds and x.shape[-2] > 1]
        of_seeds = sum((part for part, _ in parts), np.zeros_like(users))
        # Welch, Satterthwaite: degrees of freedom of a sum of variances.
        freedom = of_seeds**2 / sum((part**2 / degrees for part, degrees in parts), np.zeros_like(users))
    return center, Error(users, max(1, ours.shape[-1] - 1), of_seeds, np.where(of_seeds > 0, freedom, 1.0), seeds)


def seed_variance(rows: np.ndarray) -> np.ndarray:
    """Estimate the variance that the seeds give to the mean over all of rows [..., S, M]: [...], never below 0.

    The runs' means vary with their seeds and with the sample of users. The latter variance is part of the bootstrap
    over users, and is subtracted (two-way analysis of variance).
    """
    seeds, users = rows.shape[-2:]
    means = rows.mean(-1)
    # Residuals of rows less both means: their sum of squares, computed without a copy of rows.
    residuals = (rows**2).sum((-2, -1)) - seeds * (rows.mean(-2) ** 2).sum(-1) - users * (means**2).sum(-1)
    residuals = residuals + seeds * users * rows.mean((-2, -1)) ** 2
    by_chance = residuals / ((seeds - 1) * max(1, users - 1))
    return np.maximum(0, means.var(-1, ddof=1) - by_chance / users) / seeds


def user_draws(values: np.ndarray, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """Return means of values [..., M] over `draws` samples of the users: [..., D], equal for the same seed and M.

    A user's weight in a draw is Poisson with mean 1, so that users can be processed in parts. More than MOST_DRAWN
    users are randomly divided into groups of equal size, and groups are drawn.
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
    """Correct p values for their number (Holm, Scandinavian Journal of Statistics 6, 1979); NaN is left out."""
    p = np.asarray(p_values, np.float64)
    finite = np.flatnonzero(~np.isnan(p))
    order = finite[np.argsort(p[finite], kind="stable")]
    corrected = np.full(len(p), np.nan)
    corrected[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return corrected.tolist()
