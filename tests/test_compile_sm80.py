"""Every kernel compiles for compute capability 8.0."""

from tests.compiling import compile_test

test_every_kernel_compiles = compile_test(80)
