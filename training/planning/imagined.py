"""Imitate a GPU: training code runs as on one, on tensors without values.

Tensors are fakes (torch's FakeTensorMode) on the CPU that report a GPU as their device; launchers choose and prepare
kernels but do not launch them. All allocations of the launchers happen, and nothing is computed. Tables that operators
cache for later calls (`functools.cache`) become fakes too: the process must not train afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from data.errors import ConfigError
from hstu_sparse.core import launch

H200_MULTIPROCESSORS = 132


class NoValues(Exception):
    """A tensor's values were copied to the host: there is nothing to copy, and what follows allocates nothing."""


def _to_host(x: Tensor, *arguments, **options):
    raise NoValues


# What torch's functions do inside that need a GPU or values; all others work on fakes.
_WITHOUT_VALUES: dict[Any, Callable] = {
    Tensor.is_cuda.__get__: lambda x, *arguments: True,  # type: ignore[attr-defined]
    Tensor.data_ptr: lambda x: 0,
    Tensor.item: lambda x: 0,
    Tensor.__bool__: lambda x: False,
    # The number of nonzero numbers is not known: assume all.
    Tensor.nonzero: lambda x: x.new_empty((x.numel(), x.dim()), dtype=torch.int64),
    Tensor.numpy: _to_host,
}


class ImaginedGpu(TorchFunctionMode):
    """Replace the torch functions inside that need a GPU or values.

    replaced: what they do, by function. Entries may be added.
    """

    def __init__(self):
        super().__init__()
        self.replaced = _WITHOUT_VALUES | {Tensor.backward: self._backward}
        self.before_backward: Callable[[], None] = lambda: None

    def __torch_function__(self, function, types, arguments=(), options=None):
        return self.replaced.get(function, function)(*arguments, **(options or {}))

    def _backward(self, loss: Tensor, **options) -> None:
        """Compute gradients as `Tensor.backward(loss)` does, but inside this mode, which torch leaves in functions."""
        self.before_backward()
        with self:
            engine = torch.autograd.Variable._execution_engine
            ones = torch.ones_like(loss)
            engine.run_backward((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)


@contextmanager
def imagined_gpu() -> Iterator[ImaginedGpu]:
    """Make tensors inside fakes that pass for an H200's; ConfigError in a process with Triton's interpreter."""
    if launch.INTERPRET:
        raise ConfigError("--plan needs a process without TRITON_INTERPRET=1")
    with launch.imagined(H200_MULTIPROCESSORS), FakeTensorMode(), ImaginedGpu() as gpu:
        yield gpu
