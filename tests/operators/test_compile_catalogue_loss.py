"""Every kernel of catalogue_loss compiles for sm_80 and sm_90; later architectures: the file beside this one."""

from tests.operators.compiling import compile_test

test_every_kernel_compiles = compile_test("catalogue_loss", architectures=(80, 90))
