"""Every kernel of catalogue_loss compiles for sm_100 and sm_120."""

from tests.operators.compiling import compile_test

test_every_kernel_compiles = compile_test("catalogue_loss", architectures=(100, 120))
