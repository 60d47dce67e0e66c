"""Device functions that the operators' kernels share."""
