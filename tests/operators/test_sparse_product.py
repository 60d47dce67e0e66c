"""A constant sparse matrix times a dense one: against the dense product in fp64, both directions."""

import numpy as np
import pytest
import torch

from hstu_sparse.layer.sparse_product import MAX_PIECE, SparseProduct


@pytest.mark.parametrize(
    ("rows", "columns", "longest"),
    [
        (7, 5, 3),
        (MAX_PIECE + 1, 2, 1),
        (2, 4, 3 * MAX_PIECE),
        (1, 1, 1),
        (40 * MAX_PIECE, 1, 1),
        (3, 2, 0),
        (1, 3, MAX_PIECE * MAX_PIECE + 1),
    ],
)
def test_product_and_gradient(rows, columns, longest):
    """Some rows and columns have no entry, others more entries than one or two levels of sums hold."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, longest, rows, endpoint=True)
    lengths[-1] = longest
    at, weights = rng.permutation(np.repeat(np.arange(rows), lengths)), rng.normal(size=lengths.sum())
    places = rng.integers(0, columns, len(at))
    matrix = torch.zeros(rows, columns, dtype=torch.float64)
    matrix.index_put_((torch.from_numpy(at), torch.from_numpy(places)), torch.from_numpy(weights), accumulate=True)
    dense, gradient = (torch.from_numpy(rng.normal(size=(count, 6))) for count in (columns, rows))

    product = SparseProduct(at, places, weights, (rows, columns))
    assert not product.state_dict()
    leaf = dense.float().requires_grad_()
    result = product(leaf)
    result.backward(gradient.float())
    assert result.dtype == torch.float32 and result.shape == (rows, 6)
    torch.testing.assert_close(result.double(), matrix @ dense, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(leaf.grad.double(), matrix.T @ gradient, rtol=1e-5, atol=1e-4)


def test_a_table_in_bf16_gets_its_gradient_in_bf16():
    product = SparseProduct(np.array([0, 0, 1]), np.array([0, 1, 1]), np.array([0.5, 0.5, 1.0]), (2, 2))
    table = torch.eye(2, dtype=torch.bfloat16, requires_grad=True)
    product(table).sum().backward()
    assert table.grad.dtype == torch.bfloat16 and table.grad.tolist() == [[0.5, 0.5], [1.5, 1.5]]
