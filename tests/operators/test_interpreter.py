"""Test that the interpreter refuses addresses outside of a kernel's tensors."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter runs where there is no GPU", allow_module_level=True)

import triton
import triton.language as tl


@triton.jit
def addresses_kernel(x_ptr, y_ptr, out_ptr, first, last, N: tl.constexpr):
    row = tl.arange(0, N)
    both = tl.where(row % 2 == 0, x_ptr + row, y_ptr + row)
    inside = (row >= first) & (row < last)
    tl.store(out_ptr + row, tl.load(both, inside, 7.0) + tl.load(x_ptr + row, mask=inside, other=row.to(tl.float32)))


def test_an_address_outside_of_all_tensors_is_refused():
    """Tensors of 6 elements, and tiles of 8, that are loaded from two tensors at once and from one."""
    x, y, out = torch.arange(6.0), 10 + torch.arange(6.0), torch.zeros(8)
    for first, last in ((0, 6), (2, 5), (3, 3)):
        addresses_kernel[(1,)](x, y, out, first, last, 8)
        row = torch.arange(8.0)
        loaded = torch.where(row % 2 == 0, row, row + 10) + row
        assert torch.equal(out, torch.where((row >= first) & (row < last), loaded, 7 + row))
    for first, last in ((0, 7), (-1, 8), (6, 7)):
        with pytest.raises(triton.runtime.errors.InterpreterError, match="outside of the kernel's tensors"):
            addresses_kernel[(1,)](x, y, out, first, last, 8)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="outside of the kernel's tensors"):
        addresses_kernel[(1,)](x, y, torch.zeros(7), 0, 6, 8)
