"""In Triton's interpreter: a kernel reads and writes nothing but the tensors that it is given.

On a GPU an address beside them is often somebody else's memory, so that nothing is seen until it is nobody's.
"""

import contextlib
from unittest import mock

import numpy as np
import torch


class _Memory:
    """Stand-in for the interpreter's access to memory that holds each address against a kernel's tensors."""

    def __init__(self, inner):
        self.inner = inner
        self.starts = self.ends = np.zeros(0, np.int64)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def open(self, arguments):
        """Allow addresses in these: tensors, or descriptors of them, in tuples or not."""
        ranges = sorted({part for x in arguments for part in _parts(x)})
        self.starts, self.ends = np.array(ranges or [(0, 0)], np.int64).T

    def hold(self, pointers, mask, size):
        mask = np.broadcast_to(mask, np.shape(pointers)).astype(bool)  # it may come as integers
        addresses = np.asarray(pointers).astype(np.int64)[mask]
        place = np.searchsorted(self.starts, addresses, "right") - 1
        wrong = (place < 0) | (addresses + size > self.ends[place])
        if wrong.any():
            raise AssertionError(f"{int(wrong.sum())} of {wrong.size} addresses lie in no tensor of the kernel's")

    def load(self, pointers, mask, other, dtype):
        self.hold(pointers, mask, np.dtype(dtype).itemsize)
        return self.inner.load(pointers, mask, other, dtype)

    def store(self, pointers, values, mask):
        self.hold(pointers, mask, values.itemsize)
        return self.inner.store(pointers, values, mask)

    def atomic_rmw(self, operation, pointers, values, mask, order):
        self.hold(pointers, mask, values.itemsize)
        return self.inner.atomic_rmw(operation, pointers, values, mask, order)

    def atomic_cas(self, pointers, expected, values, order):
        self.hold(pointers, True, values.itemsize)
        return self.inner.atomic_cas(pointers, expected, values, order)


def _parts(argument):
    """Yield (first byte, end) of the storages in a kernel's argument."""
    if isinstance(argument, torch.Tensor):
        storage = argument.untyped_storage()
        yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    elif isinstance(argument, tuple):
        for x in argument:
            yield from _parts(x)
    elif hasattr(argument, "base"):
        yield from _parts(argument.base)


@contextlib.contextmanager
def addresses_held():
    """Within, an address of no tensor of a kernel's raises AssertionError."""
    from triton.runtime import interpreter

    memory = _Memory(interpreter._interpreter)
    init_arguments = interpreter.GridExecutor._init_args_hst

    def opened(executor, arguments, keywords):
        arguments, keywords = init_arguments(executor, arguments, keywords)
        memory.open([*arguments, *keywords.values()])
        return arguments, keywords

    with (
        mock.patch.object(interpreter, "_interpreter", memory),
        mock.patch.object(interpreter.GridExecutor, "_init_args_hst", opened),
    ):
        yield
