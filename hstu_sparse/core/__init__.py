"""Launch kernels, register operators, check arguments and convert jagged tensors: host code that operators share."""
