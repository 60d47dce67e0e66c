"""What the tests of all operators know of each: one module an operator, found by its name.

A module has
    draw(random, small) -> dict       a random case as literals: the keywords of `check` but `device`. small: for the
                                      interpreter (fp32, about a hundred tokens), else for a GPU, every dtype and size.
    check(device, **case) -> None     asserts that kernels and reference agree on it, forward and every gradient.
    launches() -> list[Launches]      calls whose kernels test_compile_*.py compile ahead of time.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

NAMES = sorted(module.name for module in pkgutil.iter_modules(__path__))


class Launches(NamedTuple):
    """A call with CPU tensors that launches kernels, of registered operators or launchers."""

    label: str
    call: Callable[[], object]
    # Bytes of stack and spills a thread may have; of a kernel (by name), where only that one has any.
    local_bytes: int | dict[str, int] = 0
    architectures: tuple[int, ...] = (80, 90, 100, 120)


def operator(name: str):
    return importlib.import_module(f"tests.operators.{name}")
