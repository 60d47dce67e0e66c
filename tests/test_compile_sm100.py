"""Every kernel compiles for compute capability 10.0."""

from tests.compiling import compile_test

test_every_kernel_compiles = compile_test(100)
