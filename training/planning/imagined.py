"""Imitate a GPU: training code runs as on one, on tensors without values.

Tensors are fakes (torch's FakeTensorMode) on the CPU that report a GPU as their device; launchers choose and prepare
kernels but do not launch them. All allocations of the launchers happen, and nothing is computed. Tables that operators
cache for later calls (`functools.cache`) become fakes too: the process must not train afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from data.errors import ConfigError
from hstu_sparse import launch, registration
from hstu_sparse.layer_norm_gate import api as norm_api
from models import chunks

H200_MULTIPROCESSORS = 132


def _converted(module: torch.nn.Module, target: torch.dtype | torch.device) -> torch.nn.Module:
    """Do the work of `nn.Module.to`, which cannot exchange fakes."""
    if isinstance(target, torch.dtype):
        for part in module.modules():
            for name, value in part.named_parameters(recurse=False):
                part.register_parameter(name, torch.nn.Parameter(value.detach().to(target)))
    return module


@contextmanager
def imagined_gpu() -> Iterator[None]:
    """Make tensors inside fakes that pass for an H200's; ConfigError in a process with Triton's interpreter."""
    if launch.INTERPRET:
        raise ConfigError("--plan needs a process without TRITON_INTERPRET=1")
    from triton.runtime.jit import JITFunction

    def always(x: torch.Tensor) -> bool:
        return True

    with ExitStack() as stack:
        for target, name, value in (
            (JITFunction, "run", lambda *arguments, **options: None),
            (launch, "cpu_multiprocessors", H200_MULTIPROCESSORS),
            (registration, "plain", always),
            (norm_api, "plain", always),
            (chunks, "CHUNK", chunks.CHUNK | {"cpu": chunks.CHUNK["cuda"]}),
            (torch.Tensor, "is_cuda", property(always)),
            (torch.Tensor, "data_ptr", lambda x: 0),
            # The number of nonzero numbers is not known: assume all.
            (torch.Tensor, "nonzero", lambda x: x.new_empty((x.numel(), x.dim()), dtype=torch.int64)),
            (torch.cuda, "current_device", lambda: -1),
            (torch.nn.Module, "to", _converted),
            (torch.nn.init, "trunc_normal_", lambda x, **options: x),  # needs values
        ):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(FakeTensorMode())
        yield
