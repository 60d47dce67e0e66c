"""Triton's interpreter for tests: it checks addresses, and takes half the time.

A kernel may read and write nothing but the tensors that it is given. On a GPU an address outside of them often belongs
to other data, so that the fault is not noticed. The interpreter has no hook for this check. It reaches memory through
the functions of one C++ module and prepares the arguments of a launch in one method. Both are wrapped here: the
wrappers call Triton's functions and return what those return.

Half of the interpreter's time goes to work without an effect. Whenever a kernel calls a function, the interpreter
replaces the functions of triton.language, though the launch of the kernel has replaced them already. It computes
whether each integer operation overflows, and uses the answer only if its option `debug` is set, which it never is. It
lists all NumPy dtypes anew whenever it needs one.
"""

import contextlib
import functools
import importlib.util
import os
import types
from unittest import mock

import numpy as np
import torch


class CheckedMemory:
    """Triton's module for access to memory; raises AssertionError for an address outside of the kernel's tensors."""

    def __init__(self, memory):
        self.memory = memory
        self.allow(())

    def __getattr__(self, name):
        return getattr(self.memory, name)

    def allow(self, arguments):
        """Allow addresses in these arguments of a kernel from now on, and no others."""
        ranges = sorted({x for argument in arguments for x in storages(argument)})
        self.starts, self.ends = np.array(ranges or [(0, 0)], np.uint64).T

    def check(self, pointers, mask, size):
        addresses = pointers[np.broadcast_to(mask, pointers.shape).astype(bool)]
        index = np.searchsorted(self.starts, addresses, "right") - 1
        wrong = (index < 0) | (addresses + np.uint64(size) > self.ends[index])
        if wrong.any():
            raise AssertionError(f"{wrong.sum()} of {wrong.size} addresses are outside of the kernel's tensors")

    def load(self, pointers, mask, other, dtype):
        self.check(pointers, mask, np.dtype(dtype).itemsize)
        return self.memory.load(pointers, mask, other, dtype)

    def store(self, pointers, values, mask):
        self.check(pointers, mask, values.itemsize)
        return self.memory.store(pointers, values, mask)

    def atomic_rmw(self, operation, pointers, values, mask, order):
        self.check(pointers, mask, values.itemsize)
        return self.memory.atomic_rmw(operation, pointers, values, mask, order)

    def atomic_cas(self, pointers, expected, values, order):
        self.check(pointers, True, values.itemsize)
        return self.memory.atomic_cas(pointers, expected, values, order)


def storages(argument):
    """Yield (first byte, end) of the storages in a kernel's argument: a tensor, its descriptor, a tuple of them."""
    if isinstance(argument, torch.Tensor):
        storage = argument.untyped_storage()
        yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    elif isinstance(argument, tuple):
        for x in argument:
            yield from storages(x)
    elif hasattr(argument, "base"):
        yield from storages(argument.base)


@contextlib.contextmanager
def checked_interpreter():
    """Make interpreted kernels that leave their tensors raise AssertionError; compiled kernels stay as they are."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    memory = CheckedMemory(interpreter._interpreter)
    prepare = interpreter.GridExecutor._init_args_hst
    replace_functions = interpreter._patch_lang
    dtype_of_scalar = functools.cache(interpreter._get_np_dtype)
    all_functions = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def prepare_and_allow(executor, arguments, keywords):
        arguments, keywords = prepare(executor, arguments, keywords)
        memory.allow([*arguments, *keywords.values()])
        return arguments, keywords

    def numpy_dtype(dtype):
        return np.dtype(np.uint64) if dtype.scalar.is_ptr() else dtype_of_scalar(dtype.scalar)

    def call(function, *arguments, **keywords):
        return function.rewrite()(*arguments, **keywords)

    with (
        mock.patch.object(interpreter, "_interpreter", memory),
        mock.patch.object(interpreter.GridExecutor, "_init_args_hst", prepare_and_allow),
        mock.patch.object(interpreter, "_patch_lang", lambda kernel: replace_functions(all_functions)),
        mock.patch.object(interpreter, "_get_np_dtype", numpy_dtype),
        mock.patch.object(interpreter.InterpretedFunction, "__call__", call),
        mock.patch.object(
            interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False)
        ),
    ):
        yield
