"""Train from Python: `fit` takes data frames and returns a `Run`."""

import hstu_sparse_checkout  # noqa: F401  # raises ImportError if another module hides one of our packages
from experiments.fitting import Run, fit

__all__ = ["Run", "fit"]
