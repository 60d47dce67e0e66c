"""Every kernel of htree compiles for every architecture."""

from tests.operators.compiling import compile_test

test_every_kernel_compiles = compile_test("htree")
