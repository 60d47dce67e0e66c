"""Train and compare from Python: `fit` and `compare` take data frames and return a `Run` and a `Comparison`."""

import hstu_sparse_checkout  # noqa: F401  # raises ImportError if another module hides one of these packages
from experiments.comparing import Comparison, compare
from experiments.fitting import Run, fit

__all__ = ["Comparison", "Run", "compare", "fit"]
