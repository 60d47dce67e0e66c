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


def test_device_functions_do_not_patch_the_language_again(monkeypatch):
    calls, patch = [], interpreter._patch_lang
    original = patch.patch  # Triton's own
    monkeypatch.setattr(patch, "patch", lambda function: calls.append(function) or original(function))
    x = torch.ones(4, 8)
    folds(x)
    folds(x)
    assert [function.__name__ for function in calls].count("folds_kernel") == 2 == len(calls)


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
    )
    before = [getattr(*place) for place in places]
    with quick_interpreter():
        assert interpreter._patch_lang is not before[0] and tl.block_type.__init__ is not before[5]
    assert before == [getattr(*place) for place in places]
