"""The checks that all operators share, and how one is registered."""

import pytest
import torch

from hstu_sparse.core.registration import Operator
from hstu_sparse.core.validation import (
    FLOATING,
    INTEGER,
    check_int,
    check_number,
    check_qkv,
    check_tensor,
    choose_backend,
)

OFFSETS = torch.tensor([0, 2, 5])


@pytest.mark.parametrize(
    ("x", "shape", "options", "error", "message"),
    [
        ([1.0], "T D", {}, TypeError, r"x must be a tensor \[T, D\], got list"),
        (torch.zeros(5), "T D", {}, ValueError, r"x must be \[T=5, D\], got shape \[5\]"),
        (torch.zeros(4, 2), "T D", {}, ValueError, r"x must be \[T=5, D\], got shape \[4, 2\]"),
        (torch.zeros(5, 2).int(), "T D", {}, TypeError, "x must be floating point, got torch.int32"),
        (torch.zeros(5), "T", {"dtype": INTEGER}, TypeError, "x must be int32 or int64, got torch.float32"),
        (torch.zeros(5), "T", {"dtype": torch.int64}, TypeError, "x must be torch.int64, got torch.float32"),
        (torch.zeros(5), "T", {"device": torch.device("meta")}, ValueError, "x is on cpu, expected on meta"),
    ],
)
def test_tensors(x, shape, options, error, message):
    with pytest.raises(error, match=message):
        check_tensor("x", x, shape, {"T": 5}, **options)


def test_letters_get_the_sizes_of_a_tensor():
    sizes = {}
    check_tensor("q", torch.zeros(5, 2, 3), "T H D", sizes, dtype=FLOATING)
    assert sizes == {"T": 5, "H": 2, "D": 3}


@pytest.mark.parametrize(
    ("k", "v", "heads", "message"),
    [
        ((5, 4, 8), (5, 4, 6), "H", None),
        ((5, 2, 8), (5, 2, 6), "Hkv", None),
        ((5, 3, 8), (5, 3, 6), "Hkv", "the heads of k must divide the 4 heads of q, got 3"),
        ((5, 2, 8), (5, 2, 6), "H", r"k must be \[T=5, H=4, D=8\], got shape \[5, 2, 8\]"),
        ((5, 2, 8), (5, 1, 6), "Hkv", r"v must be \[T=5, Hkv=2, V\], got shape \[5, 1, 6\]"),
        ((6, 4, 8), (5, 4, 6), "H", r"k must be \[T=5, H=4, D=8\], got shape \[6, 4, 8\]"),
    ],
)
def test_queries_keys_and_values(k, v, heads, message):
    q, k, v = torch.zeros(5, 4, 8), torch.zeros(k), torch.zeros(v)
    if message is None:
        assert check_qkv(q, k, v, OFFSETS, 3, kv_heads=heads)["V"] == 6
    else:
        with pytest.raises(ValueError, match=message):
            check_qkv(q, k, v, OFFSETS, 3, kv_heads=heads)


@pytest.mark.parametrize("value", [True, 1.0, 1.5, "1", None])
def test_whole_numbers(value):
    check_int("n", 3, 1, 3)
    with pytest.raises(TypeError, match="n must be a whole number, got"):
        check_int("n", value, 0)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        check_int("n", 0, 1)
    with pytest.raises(ValueError, match="n must be at most 3, got 4"):
        check_int("n", 4, 1, 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 2.0])
def test_numbers(value):
    assert check_number("x", 1, above=0, below=2) == 1.0
    with pytest.raises(ValueError, match=f"x must be a finite number above 0 and below 2, got {value}"):
        check_number("x", value, above=0, below=2)
    with pytest.raises(TypeError, match="x must be a number, got True"):
        check_number("x", True)


def test_backends():
    x = torch.zeros(1)
    assert choose_backend("auto", x, "op") == choose_backend("reference", x, "op") == "reference"
    with pytest.raises(ValueError, match="op: backend must be one of auto, triton, reference, got 'cuda'"):
        choose_backend("cuda", x, "op")


def _scaled(x, table, index, rest, scale):
    """Return x * scale * table[index] and the rows that were looked up; the metadata must be contiguous."""
    assert table.is_contiguous() and index.is_contiguous()
    rows = table[index]
    return x * scale * rows[:, None], rows


def _scaled_gradients(grad, x, table, index, rest, scale, rows):
    assert table.is_contiguous() and index.is_contiguous()
    gradients = [grad * scale * rows[:, None]]
    return [*gradients, torch.zeros_like(table).index_add(0, index, (grad * x * scale).sum(1))]


@pytest.fixture(scope="module")
def scaled():
    return Operator(
        "test_scaled",
        "Tensor x, Tensor table, Tensor index, Tensor?[] rest, float scale",
        forward=_scaled,
        backward=_scaled_gradients,
        fake=lambda x, table, index, *_: (x.new_empty(x.shape), table.new_empty(index.shape)),
        differentiable="x table",
        outputs=2,
    )


def arguments():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, generator=generator).requires_grad_()
    table = torch.randn(8, generator=generator)[::2].requires_grad_()
    return x, table, torch.tensor([0, 9, 1, 9, 3, 9, 3, 9, 2, 9, 0, 9])[::2], [None, torch.ones(2)], 2.0


def test_an_operator_outside_and_inside_of_a_graph(scaled):
    x, table, index, rest, scale = arguments()
    expected = x * scale * table[index][:, None]
    expected_gradients = torch.autograd.grad(expected.square().sum(), (x, table))
    for call in (scaled, torch.compile(lambda *inputs: scaled(*inputs), fullgraph=True, backend="aot_eager")):
        out, rows = call(x, table, index, rest, scale)
        assert not rows.requires_grad
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (x, table)), expected_gradients)
    with torch.no_grad():
        torch.testing.assert_close(scaled(x, table, index, rest, scale)[0], expected.detach())


def test_an_operator_passes_opcheck(scaled):
    torch.library.opcheck(scaled.registered_forward, arguments())


def test_no_second_derivative_in_silence(scaled):
    x, *others = arguments()
    (first,) = torch.autograd.grad(scaled(x, *others)[0].sum(), x, create_graph=False)
    assert first.shape == x.shape
    with pytest.raises(RuntimeError, match="test_scaled has no second derivative in Triton: use backend='reference'"):
        torch.autograd.grad(scaled(x, *others)[0].square().sum(), x, create_graph=True)
