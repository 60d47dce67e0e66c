"""Device functions: shared by the operators' kernels."""
