"""Do the operations of interpreted kernels as the first of their kind was done, without asking anew what is to be done.

Triton's interpreter finds out for each addition which types meet, converts and spreads both operands and checks what it
makes: for tiles as small as those of tests that takes ten times as long as NumPy's addition. Here the first operation
on two types is done by Triton, and what it asks of NumPy is recorded: the function, the conversions and the type of
the result. Later ones do just that. A recipe is used only if it gave Triton's result, bit for bit, the first time.
"""

import math
from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_BUILDER = interpreter.interpreter_builder
_TENSOR, _HANDLE = tl.tensor, interpreter.TensorHandle
# Types whose values are what NumPy takes them for; a bfloat16 is an integer to it.
_PLAIN = {f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")} | {"int1", "fp32", "fp64"}
_METHODS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
_METHODS = {f"__{name}__" for name in (*_METHODS, "gt", "ge", "lt", "le", "eq", "ne", "neg")}
_REFLECTED = {f"__r{name[2:]}" for name in _METHODS}
_UNKNOWN = object()


def quick(place, name: str, function: Callable) -> Callable | None:
    """Return what does the same as an operation of the language in less time, or None if there is nothing.

    place: `tl.tensor` for its methods, or a module; function: takes the operands and `_semantic`.
    """
    if (place, name) not in _QUICK:
        make = None
        if place is _TENSOR:
            make = _of_operands if name in _METHODS | _REFLECTED else _OF_TENSORS.get(name)
        elif place is tl or place is tl.core:
            make = _OF_LANGUAGE.get(name)
        _QUICK[place, name] = make and make(name, function)
    return _QUICK[place, name]


_QUICK: dict[tuple[object, str], Callable | None] = {}


def _number(x) -> tuple | None:
    """Return what tells a number from others, or None if it is none, or is not equal to itself."""
    kind = type(x)
    if kind is int or kind is bool:
        return kind, x
    if kind is float and x == x:
        return kind, x, math.copysign(1.0, x)
    return None


def _facts(x) -> tuple:
    """Return what `_tensor` gives to every tensor like this one."""
    return x.shape, x.numel, x.type, x.dtype, x.handle.dtype


def _tensor(data: np.ndarray, facts: tuple) -> tl.tensor:
    x, handle = _TENSOR.__new__(_TENSOR), _HANDLE.__new__(_HANDLE)
    x.shape, x.numel, x.type, x.dtype, handle.dtype = facts
    handle.data, handle.attr, x.handle = data, {}, handle
    return x


def _of_operands(name: str, function: Callable) -> Callable:
    """Replace an operation on tensors, of which all but the first may be numbers."""
    recipes: dict[tuple, tuple | None] = {}
    reflected = name in _REFLECTED

    def original(operands, named):
        return function(*operands, **named, _semantic=interpreter.interpreter_semantic)

    def operation(*operands, **named):
        key = []
        if tl.constexpr in map(type, operands):
            operands = tuple(x.value if type(x) is tl.constexpr else x for x in operands)
        for operand in operands:
            if type(operand) is _TENSOR:
                key.append(operand.type.name)
            elif number := _number(operand):
                key.append(number)
            else:
                return original(operands, named)
        if named or type(operands[0]) is not _TENSOR:
            return original(operands, named)
        key = tuple(key)
        recipe = recipes.get(key, _UNKNOWN)
        if recipe is _UNKNOWN:
            result, recipes[key] = _learn(original, operands, reflected)
            return result
        if recipe is None:
            return original(operands, named)
        compute, facts = recipe
        return _tensor(compute(*operands), facts)

    return operation


def _learn(original: Callable, operands: tuple, reflected: bool) -> tuple:
    """Return an operation's result and the recipe for others like it, or None."""
    recorded: list[tuple] = []

    def record(name, function, *handles):
        recorded.append((name, function, [handle.data for handle in handles]))
        return getattr(interpreter.InterpreterBuilder, name)

    def binary_op(left, right, function):
        return record("binary_op", function, left, right)(_BUILDER, left, right, function)

    def ternary_op(a, b, c, function):
        return record("ternary_op", function, a, b, c)(_BUILDER, a, b, c, function)

    def create_idiv(left, right):
        return record("create_idiv", _divided, left, right)(_BUILDER, left, right)

    def create_addptr(pointer, offset):
        width = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
        return record("create_addptr", lambda p, x: p + width * x.astype(np.uint64), pointer, offset)(
            _BUILDER, pointer, offset
        )

    replaced = {f.__name__: f for f in (binary_op, ternary_op, create_idiv, create_addptr)}
    vars(_BUILDER).update(replaced)
    try:
        result = original(operands, {})
    finally:
        for name in replaced:
            delattr(_BUILDER, name)
    tensors = [x for x in (*operands, result) if type(x) is _TENSOR]
    if len(recorded) != 1 or type(result) is not _TENSOR or not all(_plain(x) for x in tensors):
        return result, None
    name, function, arrays = recorded[0]
    order = [*range(len(operands))][:: -1 if reflected else 1]
    order = [None] * (len(arrays) - len(order)) + order  # -x is 0 - x
    if name == "create_addptr" and not operands[order[0]].type.scalar.is_ptr():
        order.reverse()
    compute, right = _composed(function, arrays, operands, order), result.handle.data
    actual = compute(*operands)
    if actual.dtype != right.dtype:
        widened, dtype = compute, right.dtype
        compute = lambda *x: widened(*x).astype(dtype)
        actual = compute(*operands)
    if actual.shape != right.shape or actual.tobytes() != right.tobytes():
        return result, None
    return result, (compute, _facts(result))


def _plain(x: tl.tensor) -> bool:
    return x.type.scalar.is_ptr() or x.type.scalar.name in _PLAIN


def _divided(left, right):
    return (left - np.fmod(left, right)) // right


def _composed(function: Callable, arrays: list, operands: tuple, order: list) -> Callable:
    """Return `function` of the operands in this order, converted as the arrays are that it was once called with."""
    parts = []
    for array, place in zip(arrays, order):
        if place is None or type(operands[place]) is not _TENSOR:
            parts.append((None, array.ravel()[:1]))  # the same number everywhere
        else:
            parts.append((place, None if operands[place].handle.data.dtype == array.dtype else array.dtype))
    if parts == [(0, None), (1, None)]:
        return lambda a, b: function(a.handle.data, b.handle.data)
    if parts == [(1, None), (0, None)]:
        return lambda a, b: function(b.handle.data, a.handle.data)
    if len(parts) == 2 and parts[0] == (0, None) and parts[1][0] is None:
        constant = parts[1][1]
        return lambda a, _: function(a.handle.data, constant)

    def compute(*operands):
        data = []
        for place, dtype in parts:
            x = dtype if place is None else operands[place].handle.data
            data.append(x if place is None or dtype is None else x.astype(dtype))
        return function(*data)

    return compute


def _indexed(name: str, function: Callable) -> Callable:
    """Replace `tensor.__getitem__`, which adds axes."""
    recipes: dict[tuple, tuple] = {}

    def operation(x, slices):
        if type(slices) is not tuple or not x.type.is_block():
            return function(x, slices, _semantic=interpreter.interpreter_semantic)
        key = (x.type.name, *[None if i is None else i == slice(None) or _UNKNOWN for i in slices])
        if key not in recipes:
            result = function(x, slices, _semantic=interpreter.interpreter_semantic)
            if _UNKNOWN not in key:
                recipes[key] = _facts(result)
            return result
        return _tensor(x.handle.data[slices], recipes[key])

    return operation


def _converted(name: str, function: Callable) -> Callable:
    """Replace `tensor.to`."""
    recipes: dict[tuple[str, str], tuple | None] = {}

    def operation(x, dtype, *options, **named):
        if options or named or not isinstance(dtype, tl.dtype):
            return function(x, dtype, *options, **named, _semantic=interpreter.interpreter_semantic)
        key = x.type.name, dtype.name
        recipe = recipes.get(key, _UNKNOWN)
        if recipe is _UNKNOWN or recipe is None:
            result = function(x, dtype, _semantic=interpreter.interpreter_semantic)
            if recipe is _UNKNOWN:
                data = result.handle.data
                known = _plain(x) and _plain(result) and dtype.name in _PLAIN - {"int1"}
                same = known and x.handle.data.astype(data.dtype).tobytes() == data.tobytes()
                recipes[key] = (result is x, data.dtype, _facts(result)) if same else None
            return result
        unchanged, kind, facts = recipe
        return x if unchanged else _tensor(x.handle.data.astype(kind), facts)

    return operation


def _constant(name: str, function: Callable) -> Callable:
    """Replace `arange` or `full`: make each constant once. It cannot be written to."""
    constants: dict[tuple, tl.tensor] = {}

    def operation(*values, **named):
        plain = not named and {*map(type, values)} == {int}  # as those of `arange` are
        if plain and values in constants:
            return constants[values]
        key = tuple(_part(x) for x in (*values, *named.items()))
        x = None if None in key else constants.get(key)
        if x is None:
            x = function(*values, **named, _semantic=interpreter.interpreter_semantic)
            if None not in key and _plain(x) and not x.type.scalar.is_int_unsigned():
                x.handle.data.flags.writeable = False
                constants[key] = x
                if plain:
                    constants[values] = x
        return x

    return operation


def _load(name: str, function: Callable) -> Callable:
    """Replace `load` from pointers that are as many as the loaded values."""
    recipes: dict[tuple, tuple | None] = {}

    def operation(pointer, mask=None, other=None, **named):
        number = None if type(other) is _TENSOR else _number(other)
        if named or type(pointer) is not _TENSOR or not (mask is None or type(mask) is _TENSOR):
            return function(pointer, mask, other, **named, _semantic=interpreter.interpreter_semantic)
        if not (other is None or number or type(other) is _TENSOR):
            return function(pointer, mask, other, _semantic=interpreter.interpreter_semantic)
        padded = number or (None if other is None else other.type.name)
        key = pointer.type.name, None if mask is None else mask.type.name, padded
        recipe = recipes.get(key, _UNKNOWN)
        if recipe is _UNKNOWN or recipe is None:
            result = function(pointer, mask, other, _semantic=interpreter.interpreter_semantic)
            if recipe is _UNKNOWN:
                recipes[key] = _learn_load(pointer, mask, other, number, result)
            return result
        padding, dtype, facts = recipe
        data = pointer.handle.data
        mask_data = _TRUE if mask is None else mask.handle.data
        padding = other.handle.data if padding is None else padding
        memory = interpreter._interpreter
        if not hasattr(memory, "hold"):  # as `addresses` has it, which takes all shapes
            mask_data, padding = np.broadcast_to(mask_data, data.shape), np.broadcast_to(padding, data.shape)
        return _tensor(memory.load(data, mask_data, padding, dtype), facts)

    return operation


def _learn_load(pointer, mask, other, number, result) -> tuple | None:
    element, data = pointer.type.scalar.element_ty, result.handle.data
    if element.name not in _PLAIN - {"int1"} or data.shape != pointer.handle.data.shape:
        return None
    if number or other is None:
        padding = np.array([number[1] if number else 0]).astype(data.dtype)
    elif other.handle.data.dtype == data.dtype and other.type.scalar == element:
        padding = None
    else:
        return None
    return padding, data.dtype, _facts(result)


_TRUE = np.ones(1, bool)


def _dot(name: str, function: Callable) -> Callable:
    """Replace `dot`."""
    recipes: dict[tuple, tuple | None] = {}

    def operation(a, b, acc=None, **named):
        options = [(key, "none" if value is None else _part(value)) for key, value in named.items()]
        if not (acc is None or type(acc) is _TENSOR) or any(value is None for _, value in options):
            return function(a, b, acc, **named, _semantic=interpreter.interpreter_semantic)
        key = a.type.name, b.type.name, acc if acc is None else acc.type.name, *options
        recipe = recipes.get(key, _UNKNOWN)
        if recipe is _UNKNOWN or recipe is None:
            result = function(a, b, acc, **named, _semantic=interpreter.interpreter_semantic)
            if recipe is _UNKNOWN:
                recipes[key] = _learn_dot(a, b, acc, result)
            return result
        start, dtype, facts = recipe
        start = acc.handle.data if start is None else start
        return _tensor(np.matmul(a.handle.data, b.handle.data, dtype=dtype) + start, facts)

    return operation


def _learn_dot(a, b, acc, result) -> tuple | None:
    right = result.handle.data
    if not all(_plain(x) for x in (a, b, result)) or (acc is not None and acc.handle.data.dtype != right.dtype):
        return None
    start = np.zeros(right.shape, right.dtype) if acc is None else None
    actual = np.matmul(a.handle.data, b.handle.data, dtype=right.dtype) + (start if acc is None else acc.handle.data)
    same = actual.shape == right.shape and actual.tobytes() == right.tobytes()
    return (start, right.dtype, _facts(result)) if same else None


def _part(x) -> tuple | None:
    """Return what tells an argument of `_constant` from others, or None if there is no such thing."""
    x = x.value if type(x) is tl.constexpr else x
    if isinstance(x, tl.dtype):
        return "dtype", x.name
    if isinstance(x, str):
        return "name", x
    if isinstance(x, (list, tuple, tl.tuple)):
        parts = tuple(_part(y) for y in x)
        return None if None in parts else ("several", *parts)
    return _number(x)


_OF_TENSORS = {"__getitem__": _indexed, "to": _converted}
_OF_LANGUAGE = {name: _of_operands for name in ("where", "minimum", "maximum")} | {
    "arange": _constant,
    "full": _constant,
}
_OF_LANGUAGE |= {"load": _load, "dot": _dot}
