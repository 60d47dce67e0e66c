"""Check that the tests' shortcuts for Triton's interpreter do not change the results of kernels."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter runs where there is no GPU", allow_module_level=True)

import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.operators.interpreter import quick_interpreter


@triton.jit
def _minus(a, b):
    return a - b


@triton.jit
def _later_maximum(a, i, b, j):
    return tl.where(b >= a, b, a), tl.where(b >= a, j, i)


@triton.jit
def _doubled(x):
    return x + x


@triton.jit
def folds_kernel(x_ptr, columns_ptr, rows_ptr, most_ptr, place_ptr, R: tl.constexpr, C: tl.constexpr):
    row, column = tl.arange(0, R), tl.arange(0, C)
    x = _doubled(_doubled(tl.load(x_ptr + row[:, None] * C + column[None, :])))
    tl.store(columns_ptr + column, tl.reduce(x, 0, _minus))
    tl.store(rows_ptr + row[:, None], tl.reduce(x, 1, _minus, keep_dims=True))
    most, place = tl.reduce((x, column[None, :] + 0 * row[:, None]), 1, _later_maximum)
    tl.store(most_ptr + row, most)
    tl.store(place_ptr + row, place)


def folds(x):
    R, C = x.shape
    out = [torch.zeros(C), torch.zeros(R), torch.zeros(R), torch.zeros(R, dtype=torch.int32)]
    folds_kernel[(1,)](x, *out, R, C)
    return out


def test_folds_are_taken_in_order_and_by_element():
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    x[1, 2] = x[1, 6] = 9.0  # of two equal ones the later
    by_column, by_row, most, place = folds(x)
    four = 4 * x.numpy()
    assert np.array_equal(by_column, np.subtract.reduce(four, 0))
    assert np.array_equal(by_row, np.subtract.reduce(four, 1))
    assert np.array_equal(most, four.max(1)) and place[1] == 6


@triton.jit
def shapes_kernel(x_ptr, y_ptr, N: tl.constexpr):
    row = tl.arange(0, N)
    x = tl.load(x_ptr + row[:, None] * N + row[None, :])
    # A row and a column of equal sizes and other types, a transposed and a reshaped one.
    both = x.T + row[None, :] + row.to(tl.float32)[:, None]
    tl.static_assert(x.numel == N * N and both.shape[0] == N)
    tl.store(y_ptr + tl.arange(0, N * N), tl.reshape(both, (N * N,)))


def test_shapes_and_types_are_those_of_each_value():
    x, y = torch.randn(4, 4), torch.zeros(16)
    shapes_kernel[(1,)](x, y, 4)
    row = torch.arange(4)
    assert torch.equal(y.view(4, 4), x.T + row[None, :] + row[:, None])
    integers, floats = (tl.block_type(kind, [tl.constexpr(4), 2]) for kind in (tl.int32, tl.float32))
    assert (integers.scalar, floats.scalar, integers.shape.values) == (tl.int32, tl.float32, [4, 2])
    assert integers != floats and integers == tl.block_type(tl.int32, tl.tuple([4, 2])) and integers.numel == 8
    for wrong in ([3], [1.0]):  # refused each time, not only the first
        for _ in range(2):
            with pytest.raises((ValueError, TypeError)):
                tl.block_type(tl.int32, wrong)


@triton.jit
def operands_kernel(i_ptr, x_ptr, n, out_ptr, N: tl.constexpr):
    row = tl.arange(0, N)
    i, x = tl.load(i_ptr + row), tl.load(x_ptr + row)
    half = n * 0.5  # of a number that is a tensor
    for step in range(2):  # in the second round from memory
        for turn in range(3):
            y = i + 1.5 * turn if turn else i + 1
            out = tl.where(x > 0, y - x, 2 - x) + (3 if turn else True) * i / 2 - half + 0.0 * turn
            tl.store(
                out_ptr + (3 * step + turn) * N * N + row[:, None] * N + row, out[:, None] * x - (-n + i) * row[:, None]
            )


def test_operands_of_any_types_and_shapes():
    """Numbers, scalars and blocks of integers and floats, of which one or both are converted, each of them twice."""
    N, n = 4, 7
    i, x = torch.tensor([3, -2, 5, 2**40]), torch.tensor([0.5, -1.25, 2.0, -3.0])
    out, row = torch.zeros(2, 3, N, N), torch.arange(N)
    operands_kernel[(1,)](i, x, n, out, N)
    for turn in range(3):
        y = (i + 1.5 * turn if turn else i + 1).float()
        expected = torch.where(x > 0, y - x, 2 - x) + (3 if turn else 1) * i / 2 - n * 0.5
        expected = expected[:, None] * x - ((i - n) * row[:, None]).float()
        for step in range(2):
            torch.testing.assert_close(out[step, turn], expected, rtol=1e-6, atol=1e-6)


@triton.jit
def addresses_kernel(x_ptr, y_ptr, out_ptr, first, last, N: tl.constexpr):
    row = tl.arange(0, N)
    both = tl.where(row % 2 == 0, x_ptr + row, y_ptr + row)
    inside = (row >= first) & (row < last)
    tl.store(out_ptr + row, tl.load(both, inside, 7.0) + tl.load(x_ptr + row, mask=inside, other=row.to(tl.float32)))


def test_an_address_beside_all_tensors_is_refused():
    """Tensors of 6 elements, and tiles of 8, that are loaded from two tensors at once and from one."""
    x, y, out = torch.arange(6.0), 10 + torch.arange(6.0), torch.zeros(8)
    for first, last in ((0, 6), (2, 5), (3, 3)):
        addresses_kernel[(1,)](x, y, out, first, last, 8)
        row = torch.arange(8.0)
        loaded = torch.where(row % 2 == 0, row, row + 10) + row
        assert torch.equal(out, torch.where((row >= first) & (row < last), loaded, 7 + row))
    for first, last in ((0, 7), (-1, 8), (6, 7)):
        with pytest.raises(triton.runtime.errors.InterpreterError, match="in no tensor of the kernel's"):
            addresses_kernel[(1,)](x, y, out, first, last, 8)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="in no tensor of the kernel's"):
        addresses_kernel[(1,)](x, y, torch.zeros(7), 0, 6, 8)


@triton.jit
def constant_kernel(x_ptr, out_ptr, N: tl.constexpr):
    row = tl.arange(0, N)
    x = tl.load(x_ptr + row)
    tl.store(out_ptr + row, x + x)
    tl.store(out_ptr + N + row, x + tl.constexpr(x))
    tl.store(out_ptr + 2 * N + row, tl.where(x > 1, tl.constexpr(x), x))


def test_a_constant_may_hold_a_tensor():
    """Fields of a tuple, which a kernel hands on, come as such constants."""
    x, out = torch.arange(4.0), torch.zeros(3, 4)
    for _ in range(2):
        constant_kernel[(1,)](x, out, 4)
        assert torch.equal(out, torch.stack([2 * x, 2 * x, x]))


@triton.jit
def signs_kernel(x_ptr, i_ptr, out_ptr, whole_ptr, N: tl.constexpr):
    row = tl.arange(0, N)
    x, i = tl.load(x_ptr + row), tl.load(i_ptr + row)
    for turn in range(2):  # in the second round from memory
        tl.store(out_ptr + (3 * turn) * N + row, 1 / (x * 0.0))
        tl.store(out_ptr + (3 * turn + 1) * N + row, 1 / (x * -0.0))
        tl.store(out_ptr + (3 * turn + 2) * N + row, 1 / (x * tl.full((N,), -0.0, tl.float32)))
        tl.store(whole_ptr + (4 * turn) * N + row, i // 3)
        tl.store(whole_ptr + (4 * turn + 1) * N + row, 3 - i % 3)
        tl.store(whole_ptr + (4 * turn + 2) * N + row, (i >> 1) * (i > True))
        tl.store(whole_ptr + (4 * turn + 3) * N + row, tl.maximum(i, 1) << row.to(tl.int64))


def test_signs_of_zeros_and_of_divided_numbers():
    x, i = torch.tensor([1.0, -1.0]), torch.tensor([-5, 5])
    out, whole = torch.zeros(2, 3, 2), torch.zeros(2, 4, 2, dtype=torch.int64)
    with np.errstate(divide="ignore"):
        signs_kernel[(1,)](x, i, out, whole, 2)
    infinity = float("inf")  # Triton takes a number -0.0 for 0
    assert out.tolist() == 2 * [3 * [[infinity, -infinity]]]
    assert whole.tolist() == 2 * [[[-1, 1], [5, 1], [0, 2], [1, 10]]]


def test_device_functions_do_not_patch_the_language_again(monkeypatch):
    calls, patch = [], interpreter._patch_lang
    original = patch.patch  # Triton's own
    monkeypatch.setattr(patch, "patch", lambda function: calls.append(function) or original(function))
    x = torch.ones(4, 8)
    folds(x)
    folds(x)
    assert [function.__name__ for function in calls] == ["folds_kernel"]


def test_afterwards_the_interpreter_is_as_it_was():
    places = (
        (interpreter, "_patch_lang"),
        (interpreter, "_get_np_dtype"),
        (interpreter, "_patch_builtin"),
        (tl.core, "_unwrap_if_constexpr"),
        (interpreter.ReduceOps, "generic_reduce"),
        (tl.block_type, "__init__"),
        (tl.tensor, "__init__"),
        (TritonSemantic, "binary_op_sanitize_overflow_impl"),
        (TritonSemantic, "binary_op_type_checking_impl"),
        (TritonSemantic, "broadcast_impl_value"),
        (TritonSemantic, "to_tensor"),
        (tl, "load"),
        (tl.core, "full"),
        (tl.tensor, "__add__"),
    )
    before = [getattr(*place) for place in places]
    with quick_interpreter():
        assert interpreter._patch_lang is not before[0] and tl.block_type.__init__ is not before[5]
        folds(torch.ones(4, 8))
        assert tl.load is not before[11]
    assert before == [getattr(*place) for place in places]
