import hstu_sparse_checkout  # noqa: F401  # raises ImportError if another module hides one of these packages
