"""Define the dtype of an operator's computation: that of the inputs, fp32 for 16-bit ones, and no autocast.

References compute with 16-bit inputs in fp32 and round only the result (`widened`), as kernels sum in fp32, so that no
intermediate overflows if the result does not. fp32 and fp64 stay unchanged.

`torch.autocast` changes nothing about an operator: every public function switches it off while it runs
(`without_autocast`), so that products, choices and the dtype of the result are as documented. Linear layers around an
operator stay under autocast and pass 16-bit inputs to it. backward belongs outside of autocast, as torch's
documentation says: the parts of a reference that torch's autograd differentiates use the autocast setting of that
moment.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wrap `function` so that torch.autocast is off while it runs, on CPUs and GPUs, in eager mode and torch.compile.

    It sets the switch itself: torch.autocast as a context takes ten times as long, as long as a short kernel's call.
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
    """Return the dtype in which references compute for inputs of this dtype: fp32 for 16-bit ones, else the same."""
    return torch.promote_types(dtype, torch.float32)


def widened(*tensors: torch.Tensor | None) -> list[Any]:
    """Convert each floating point tensor to the dtype in which references compute; None stays None. Differentiable."""
    return [None if x is None else x.to(working_dtype(x.dtype)) for x in tensors]
