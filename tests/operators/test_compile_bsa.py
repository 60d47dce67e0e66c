"""Every kernel of bsa compiles for sm_80 and sm_90; for the later architectures: the file beside this one."""

from tests.operators.compiling import compile_test

test_every_kernel_compiles = compile_test("bsa", architectures=(80, 90))
