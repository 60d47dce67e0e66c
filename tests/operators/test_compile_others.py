"""Every kernel of the operators without a file of their own here compiles for every architecture."""

from tests.operators.compiling import compile_test
from tests.random.cases import NAMES

APART = ("bsa", "catalogue_loss", "dense", "flash", "htree", "indexer", "rotatekv")
test_every_kernel_compiles = compile_test(*(name for name in NAMES if name not in APART))
