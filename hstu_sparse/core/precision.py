"""Define the dtype in which operators compute, and disable autocast inside them.

References convert 16-bit inputs to fp32 and round only the result (`widened`), since kernels sum in fp32, too: no
intermediate value overflows unless the result does. fp32 and fp64 stay unchanged.

`torch.autocast` has no effect inside an operator: its public function disables it (`without_autocast`). Linear layers
before an operator may run under autocast and pass 16-bit inputs to it. Call backward outside of autocast, as torch's
documentation requires: the parts of a reference that torch.autograd differentiates would run under autocast.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wrap `function` so that torch.autocast is disabled while it runs, for CPUs and GPUs, also under torch.compile.

    The context manager torch.autocast(enabled=False) would take ten times as long, as long as a short kernel.
    """

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        active = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        if not active:
            return function(*args, **kwargs)
        for device in active:
            torch.set_autocast_enabled(device, False)
        try:
            return function(*args, **kwargs)
        finally:
            for device in active:
                torch.set_autocast_enabled(device, True)

    return run


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which references compute: fp32 for 16-bit inputs, otherwise `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def widened(*tensors: torch.Tensor | None) -> list[Any]:
    """Convert each tensor to `working_dtype`; None stays None. Differentiable."""
    return [None if x is None else x.to(working_dtype(x.dtype)) for x in tensors]
