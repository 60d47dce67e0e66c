"""Spare Triton's interpreter work that it repeats for nothing; what it computes stays the same, bit for bit.

On profiles of bsa's and htree's tests most of the time went there: `triton.language` patched anew for each launch and
call of a device function, a table of dtypes built for each value, `tl.sort`'s exclusive or taken element by element,
the shape of each value checked and wrapped anew, a check of each sum for overflow whose result is thrown away, and
types and shapes compared anew for each operation (`recipes.py`).
"""

import contextlib
import inspect
import math
from collections.abc import Callable
from unittest import mock

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.operators.recipes import quick


class _Patches:
    """Replace `interpreter._patch_lang`: patch each module once, until `restore`, and not for each launch."""

    def __init__(self, patch):
        self.patch = patch
        self.patched: set[str] = set()
        self.seen: set[Callable] = set()
        self.scopes: list[interpreter._LangPatchScope] = []

    def __call__(self, function):
        if function not in self.seen:
            self.seen.add(function)
            modules = {x.__name__ for x in function.__globals__.values() if x is tl or x is tl.core}
            if not modules or not modules <= self.patched:
                self.patched |= modules
                self.scopes.append(self.patch(function))
        return _NOTHING

    def restore(self):
        for scope in reversed(self.scopes):
            scope.restore()


_NOTHING = interpreter._LangPatchScope()  # what a launch undoes


def _unwrap(value):
    """Replace `_unwrap_if_constexpr`: return at once what is not wrapped."""
    return value if type(value) in _BARE else _unwrap_if_constexpr(value)


class _Dtypes(dict):
    """Replace `interpreter._get_np_dtype`: look each type's name up once."""

    def __init__(self, get):
        self.get_dtype = get

    def __call__(self, type):
        name = type.name
        if name not in self:
            self[name] = self.get_dtype(type)
        return self[name]


class _BlockTypes(dict):
    """Replace `block_type.__init__`: check and wrap each shape once for each type of element."""

    def __init__(self, make):
        self.make = make

    def __call__(self, type, element_ty, shape):
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in self:
            self.make(type, element_ty, shape)
            # What `tensor.__init__` makes of the shape; `tensor_facts` is ours.
            sizes = [tl.constexpr(size) for size in type.shape]
            type.tensor_facts = {"shape": tl.tuple(sizes), "numel": tl.constexpr(math.prod(type.shape))}
            self[key] = dict(vars(type))
        vars(type).update(self[key])
        type.element_ty = element_ty


_NUMBERS = (int, float, bool)
_BARE = {*_NUMBERS, str, type(None), tl.tensor, tl.dtype, tl.block_type, tl.pointer_type}
_unwrap_if_constexpr = tl.core._unwrap_if_constexpr
_SCALAR = {"shape": tl.tuple([]), "numel": tl.constexpr(1)}


class _Builtins(dict):
    """Replace `interpreter._patch_builtin`: look once through the members of a module or class."""

    def __call__(self, place, builder, scope):
        if place not in self:
            self[place] = [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]
        for name in self[place]:
            member = getattr(place, name)
            if tl.core.is_builtin(member):  # and not patched already
                _patch_attribute(place, name, member, scope)


_BUILTINS = _Builtins()


def _patch_attribute(place, name, member, scope):
    """Replace `interpreter._patch_attr`, without the intermediate call that asks whether a semantic is given."""
    function = getattr(member, "__wrapped__", member)
    if quickly := quick(place, name, function):
        scope.set_attr(place, name, quickly)
        return

    def interpreted(*values, **named):
        named["_semantic"] = interpreter.interpreter_semantic
        return function(*values, **named)

    scope.set_attr(place, name, interpreted)


def _make_tensor(tensor, handle, type):
    """Replace `tensor.__init__`: use the shape that the tensor's type has already wrapped."""
    vars(tensor).update(getattr(type, "tensor_facts", _SCALAR), handle=handle, type=type, dtype=type.scalar)


def _reduce_by_slices(reduction, inputs):
    """Replace `generic_reduce`: reduce whole slices along the axis, first to last, instead of single elements."""
    axis = reduction.axis
    parts = [np.moveaxis(x.handle.data, axis, 0) for x in inputs]
    total = tuple(reduction.to_tensor(part[0], x.dtype) for part, x in zip(parts, inputs))
    for i in range(1, len(parts[0])):
        more = (reduction.to_tensor(part[i], x.dtype) for part, x in zip(parts, inputs))
        combined = reduction.combine_fn.fn(*total, *more)
        combined = combined if isinstance(combined, tuple) else (combined,)
        total = tuple(reduction.to_tensor(y.handle.data, x.dtype) for y, x in zip(combined, inputs))
    if reduction.keep_dims:
        total = tuple(reduction.to_tensor(np.expand_dims(y.handle.data, axis), y.dtype) for y in total)
    return list(total)


class _Operands:
    """Replace `binary_op_type_checking_impl` or `broadcast_impl_value`: compute once what two types become.

    The tensor of a number is made once for each type that it meets: no operation writes into its operands.
    """

    def __init__(self, convert):
        self.convert = convert
        self.types: dict[tuple, tuple] = {}
        self.constants: dict[tuple, tl.tensor] = {}

    def __call__(self, semantic, left, right, *options):
        tensors = type(left) is tl.tensor, type(right) is tl.tensor
        if all(tensors):
            return self.of_tensors(semantic, left, right, options)
        number = left if tensors[1] else right
        if not any(tensors) or type(number) not in _NUMBERS:
            return self.convert(semantic, left, right, *options)
        tensor = right if tensors[1] else left
        key = tensor.type.name, type(number), number, tensors, options
        constant = self.constants.get(key)
        if constant is None:
            results = self.convert(semantic, left, right, *options)
            if any(x is tensor for x in results):  # it was not converted itself
                self.constants[key] = results[0] if tensors[1] else results[1]
            return results
        return (constant, right) if tensors[1] else (left, constant)

    def of_tensors(self, semantic, left, right, options):
        key = left.type.name, right.type.name, options
        if key in self.types:
            to_left, to_right = self.types[key]
            left = left if to_left is None else _spread(semantic, left, to_left)
            return left, right if to_right is None else _spread(semantic, right, to_right)
        results = self.convert(semantic, left, right, *options)
        if all(new.dtype == old.dtype for new, old in zip(results, (left, right))):
            self.types[key] = tuple(None if new is old else new.type for new, old in zip(results, (left, right)))
        return results


def _spread(semantic, x, type):
    if x.type.is_block():
        return semantic.tensor(semantic.builder.create_broadcast(x.handle, type.shape.values), type)
    return semantic.tensor(semantic.builder.create_splat(type, x.handle), type)


@contextlib.contextmanager
def quick_interpreter():
    """Within, kernels are interpreted without the repeated work."""
    patches = _Patches(getattr(interpreter._patch_lang, "patch", interpreter._patch_lang))  # Triton's own
    reduce, check_overflow = interpreter.ReduceOps.generic_reduce, TritonSemantic.binary_op_sanitize_overflow_impl
    block_types = _BlockTypes(tl.block_type.__init__)
    operands = _Operands(TritonSemantic.binary_op_type_checking_impl)
    broadcast = _Operands(TritonSemantic.broadcast_impl_value)

    def checked(semantic, *operation):
        if semantic.builder.options.debug:  # `device_assert`, to which the result goes, does nothing without
            check_overflow(semantic, *operation)

    to_tensor = TritonSemantic.to_tensor

    def as_tensor(semantic, x, check_type=True):
        return x if type(x) is tl.tensor else to_tensor(semantic, x, check_type)

    def reduced(reduction, inputs):
        several = reduction.axis is not None and inputs[0].handle.data.ndim > 1
        return (_reduce_by_slices if several else reduce)(reduction, inputs)

    with (
        mock.patch.object(interpreter, "_patch_lang", patches),
        mock.patch.object(interpreter, "_patch_builtin", _BUILTINS),
        mock.patch.object(tl.core, "_unwrap_if_constexpr", _unwrap),
        mock.patch.object(interpreter, "_get_np_dtype", _Dtypes(interpreter._get_np_dtype)),
        mock.patch.object(TritonSemantic, "to_tensor", as_tensor),
        mock.patch.object(interpreter.ReduceOps, "generic_reduce", reduced),
        mock.patch.object(
            tl.block_type, "__init__", lambda type, *values, **named: block_types(type, *values, **named)
        ),
        mock.patch.object(tl.tensor, "__init__", _make_tensor),
        mock.patch.object(TritonSemantic, "binary_op_type_checking_impl", lambda *values: operands(*values)),
        mock.patch.object(TritonSemantic, "broadcast_impl_value", lambda *values: broadcast(*values)),
        mock.patch.object(TritonSemantic, "binary_op_sanitize_overflow_impl", checked),
    ):
        try:
            yield
        finally:
            patches.restore()
