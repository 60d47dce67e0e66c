"""What the tests spare Triton's interpreter changes nothing of what kernels compute."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter runs where there is no GPU", allow_module_level=True)

import triton
import triton.language as tl
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


def test_device_functions_do_not_patch_the_language_again(monkeypatch):
    calls, patch = [], interpreter._patch_lang
    given = patch.patch  # Triton's own
    monkeypatch.setattr(patch, "patch", lambda function: calls.append(function) or given(function))
    x = torch.ones(4, 8)
    folds(x)
    folds(x)
    assert [function.__name__ for function in calls].count("folds_kernel") == 2 == len(calls)


def test_afterwards_the_interpreter_is_as_it_was():
    names = ("_patch_lang", "_get_np_dtype")
    before = [getattr(interpreter, name) for name in names], interpreter.ReduceOps.generic_reduce
    with quick_interpreter():
        assert interpreter._patch_lang is not before[0][0]
    assert before == ([getattr(interpreter, name) for name in names], interpreter.ReduceOps.generic_reduce)
