"""The diagonals' sums of a tile: values that share a cell of the ring are added before they reach it."""

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from hstu_sparse.bias import gradients  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")


@triton.jit
def add_in_memory(cell, value, sums):
    """Stand in for the ring's assembly: cells are multiples of four bytes."""
    tl.atomic_add(sums + cell // 4, value)


@triton.jit
def diagonals_kernel(tile, sums, first, M: tl.constexpr, N: tl.constexpr):
    values = tl.load(tile + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    gradients._add_to_ring(first, values, sums)


@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (64, 64), (16, 32)])
def test_diagonals_of_a_tile(rows, columns, monkeypatch):
    monkeypatch.setattr(gradients.sums, "ring_add", add_in_memory)
    tile, sums = torch.randn(rows, columns), torch.zeros(rows + columns - 1)
    diagonals_kernel[(1,)](tile, sums, 4 * (columns - 1), rows, columns)
    expected = [tile.double().diagonal(-d).sum() for d in range(1 - columns, rows)]
    torch.testing.assert_close(sums.double(), torch.stack(expected), rtol=0, atol=1e-4)
