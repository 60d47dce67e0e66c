"""Every kernel of bsa compiles for sm_100 and sm_120."""

from tests.operators.compiling import compile_test

test_every_kernel_compiles = compile_test("bsa", architectures=(100, 120))
