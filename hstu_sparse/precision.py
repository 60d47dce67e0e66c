"""Which dtype an operator computes in: inputs as they are, 16-bit ones in fp32, and no autocast.

References compute with 16-bit inputs in fp32 and round the result alone (`widened`), as kernels sum in fp32: what is
ordinary in the end overflows nowhere on the way. fp32 and fp64 stay what they are.

`torch.autocast` changes nothing about an operator: every public function switches it off for its own time
(`without_autocast`), so that products, choices and the dtype of the result are what its docstring says. Linear layers
around an operator stay under autocast and hand it 16-bit inputs. backward belongs outside of autocast, as torch's
documentation says: what a reference left to torch's autograd is differentiated under the autocast of that moment.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function` with torch.autocast off while it runs, on CPUs and GPUs, in eager mode and under torch.compile.

    Sets the switch itself: torch.autocast as a context takes ten times as long, as long as a short kernel's call.
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
    """What references compute in for inputs of this dtype: fp32 for 16-bit ones, else the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


def widened(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Each floating point tensor in the dtype that references compute in; None stays None. Differentiable."""
    return [None if x is None else x.to(working_dtype(x.dtype)) for x in tensors]
