"""In Triton's interpreter: a kernel reads and writes nothing but the tensors that it is given.

On a GPU an address beside them is often somebody else's memory, so that nothing is seen until it is nobody's.
"""

import bisect
import contextlib
import ctypes
import math
from unittest import mock

import numpy as np
import torch

# What np.all, min and max call in the end.
_all, _least, _most = np.logical_and.reduce, np.minimum.reduce, np.maximum.reduce


class _Memory:
    """Stand-in for the interpreter's access to memory that holds each address against a kernel's tensors."""

    def __init__(self, inner):
        self.inner = inner
        self.open(())

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def open(self, arguments):
        """Allow addresses in these: tensors, or descriptors of them, in tuples or not."""
        ranges = sorted({part for x in arguments for part in _parts(x)})
        self.starts, self.ends = np.array(ranges or [(0, 0)], np.uint64).T
        self.ranges = ranges
        self.views: dict[tuple, np.ndarray] = {}

    def hold(self, pointers, mask, size) -> tuple[np.ndarray, int | None]:
        """Check each address; return those that the mask lets through, and the range that all of them lie in."""
        addresses = pointers if _all(mask, None) else pointers[_spread(mask, pointers.shape)]
        if not addresses.size:
            return addresses, None
        low, high = int(_least(addresses, None)), int(_most(addresses, None))
        place = bisect.bisect_right(self.ranges, (low, math.inf)) - 1
        if place >= 0 and high + size <= self.ranges[place][1]:
            return addresses, place
        places = np.searchsorted(self.starts, addresses, "right") - 1
        wrong = (places < 0) | (addresses + np.uint64(size) > self.ends[places])
        if wrong.any():
            raise AssertionError(f"{int(wrong.sum())} of {wrong.size} addresses lie in no tensor of the kernel's")
        return addresses, None

    def load(self, pointers, mask, other, dtype):
        dtype = np.dtype(dtype)
        addresses, place = self.hold(pointers, mask, dtype.itemsize)
        if place is None:
            return self._loaded(pointers, mask, other, dtype)
        start, end = self.ranges[place]
        offsets = addresses - np.uint64(start)
        if int(np.bitwise_or.reduce(offsets, None)) % dtype.itemsize:
            return self._loaded(pointers, mask, other, dtype)
        # NumPy gathers a tile's elements in a tenth of the time that the interpreter needs one by one.
        view = self.views.get((place, dtype))
        if view is None:
            memory = (ctypes.c_char * (end - start)).from_address(start)
            view = self.views[place, dtype] = np.frombuffer(memory, dtype, (end - start) // dtype.itemsize)
        values = view[offsets // np.uint64(dtype.itemsize)]
        if addresses is pointers:
            return values
        result = np.empty(pointers.shape, dtype)
        result[...] = other
        result[_spread(mask, pointers.shape)] = values
        return result

    def _loaded(self, pointers, mask, other, dtype):
        """Return what the interpreter itself loads; mask and other are spread to the pointers' shape."""
        return self.inner.load(pointers, _spread(mask, pointers.shape), np.broadcast_to(other, pointers.shape), dtype)

    def store(self, pointers, values, mask):
        self.hold(pointers, mask, values.itemsize)
        return self.inner.store(pointers, values, mask)

    def atomic_rmw(self, operation, pointers, values, mask, order):
        self.hold(pointers, mask, values.itemsize)
        return self.inner.atomic_rmw(operation, pointers, values, mask, order)

    def atomic_cas(self, pointers, expected, values, order):
        self.hold(pointers, True, values.itemsize)
        return self.inner.atomic_cas(pointers, expected, values, order)


def _spread(mask, shape):
    """Return the mask, which may come as integers, as booleans of this shape."""
    mask = np.asarray(mask)
    mask = mask if mask.dtype == bool else mask.astype(bool)
    return mask if mask.shape == shape else np.broadcast_to(mask, shape)


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
