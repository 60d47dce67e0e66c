"""Count the bytes of allocated tensors by part of the model, as torch's allocator would."""

from __future__ import annotations

import weakref
from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK = 512  # bytes; torch's allocator for GPUs returns whole multiples


class Meter(TorchDispatchMode):
    """Count the memory of all tensors that are created in the block, until they are freed.

    live: the current bytes. peak: their maximum. part: the name under which allocations are counted. by_part: the
    current bytes by part. at_peak: by_part at the time of the peak.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.part = "other"
        self.by_part: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        self._known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._add(x.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._known[storage] = weakref.finalize(storage, self._free, size, self.part)
        self.live += size
        self.by_part[self.part] += size
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, self.by_part.copy()

    def _free(self, size: int, part: str) -> None:
        self.live -= size
        self.by_part[part] -= size

    def reset_peak(self) -> None:
        self.peak, self.at_peak = self.live, self.by_part.copy()

    def follow(self, module: nn.Module, name: str) -> None:
        """Count the allocations in the forward pass of `module` as the part `name`."""
        outer: list[str] = []

        def enter(*arguments) -> None:
            outer.append(self.part)
            self.part = name

        def leave(*arguments) -> None:
            self.part = outer.pop()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)  # the recomputation of a layer ends with an exception
