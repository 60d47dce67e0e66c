"""Imitate a GPU: run training code as on a GPU, with tensors that have no values.

Tensors are fake tensors (torch's FakeTensorMode) on the CPU whose `is_cuda` is true. Launchers choose and prepare
kernels and make all allocations, but launch nothing. Tensors that operators cache for later calls (`functools.cache`)
are fake too: the process must not train afterwards.
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
    """A fake tensor was to be copied to the host; the code after such a copy allocates nothing on a GPU."""


def _to_host(x: Tensor, *arguments, **options):
    raise NoValues


# Replacements of torch functions that need a GPU or values; the other functions work on fake tensors.
_WITHOUT_VALUES: dict[Any, Callable] = {
    Tensor.is_cuda.__get__: lambda x, *arguments: True,  # type: ignore[attr-defined]
    Tensor.data_ptr: lambda x: 0,
    Tensor.item: lambda x: 0,
    Tensor.__bool__: lambda x: False,
    # The number of nonzero elements is not known: assume all.
    Tensor.nonzero: lambda x: x.new_empty((x.numel(), x.dim()), dtype=torch.int64),
    Tensor.numpy: _to_host,
}


class ImaginedGpu(TorchFunctionMode):
    """Replace torch functions that need a GPU or values.

    replaced: function -> replacement; entries may be added. before_backward: called before each backward pass.
    """

    def __init__(self):
        super().__init__()
        self.replaced = _WITHOUT_VALUES | {Tensor.backward: self._backward}
        self.before_backward: Callable[[], None] = lambda: None

    def __torch_function__(self, function, types, arguments=(), options=None):
        return self.replaced.get(function, function)(*arguments, **(options or {}))

    def _backward(self, loss: Tensor, **options) -> None:
        """Compute gradients like `Tensor.backward`, with this mode enabled, which torch disables inside functions."""
        self.before_backward()
        with self:
            engine = torch.autograd.Variable._execution_engine
            ones = torch.ones_like(loss)
            engine.run_backward((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)


@contextmanager
def imagined_gpu() -> Iterator[ImaginedGpu]:
    """Imitate an H200 in the block; ConfigError in a process with Triton's interpreter."""
    if launch.INTERPRET:
        raise ConfigError("--plan needs a process without TRITON_INTERPRET=1")
    with launch.imagined(H200_MULTIPROCESSORS), FakeTensorMode(), ImaginedGpu() as gpu:
        yield gpu
