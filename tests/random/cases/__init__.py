"""Define the cases of each operator for the tests of all: one module for each operator, named after it.

A module has
    draw(random, small) -> dict       a random case as literals: the keywords of `check` but `device`. small: for the
                                      interpreter (fp32, about a hundred tokens), else for a GPU, every dtype and size.
    reference_bytes(**case) -> int    about the memory of the reference in fp64 with its gradients. A case with more
                                      than MOST_BYTES is skipped, since the campaign's processes share a GPU.
    check(device, **case) -> None     asserts that kernels and reference agree on it, forward and every gradient.
    launches() -> list[Launches]      calls whose kernels tests/operators/test_compile.py compiles ahead of time.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

MOST_BYTES = 2 * 1024**3
# Keywords of a case that need no other kernel: the lengths and contents of sequences.
BATCH = {"lengths", "key_lengths", "query_lengths", "max_seq_len", "longer", "spare", "gap", "seed"}
NAMES = sorted(module.name for module in pkgutil.iter_modules(__path__))


class Launches(NamedTuple):
    """A call with CPU tensors that launches kernels, of registered operators or launchers."""

    label: str
    call: Callable[[], object]
    # The bytes of stack and spills that a thread may have: of all kernels, or by name if only some have any.
    local_bytes: int | dict[str, int] = 0
    architectures: tuple[int, ...] = (80, 90, 100, 120)


def draw(module, random, small: bool, like: dict | None = None) -> dict:
    """Draw a case of an operator's module that fits into memory; like: draw another batch for that case's kernels."""
    while True:
        case = module.draw(random, small)
        if like:
            case = like | {name: value for name, value in case.items() if name in BATCH}
        if module.reference_bytes(**case) <= MOST_BYTES:
            return case


def operator(name: str):
    return importlib.import_module(f"tests.random.cases.{name}")
