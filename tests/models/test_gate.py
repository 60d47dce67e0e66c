"""Check GateModel and its kernels, in the interpreter and on a GPU."""

import pytest
import torch

from models.gate import GateModel
from tests.random.cases.query_gates import compare, inputs, kernel, reference


def test_gates_equal_the_network():
    torch.manual_seed(0)
    gate = GateModel(in_features=6, hidden_dim=5)
    q = torch.randn(7, 3, 6)
    first, _, last, _ = gate.layers
    hidden = (q @ first.weight.T + first.bias).clamp(min=0)
    expected = (1 / (1 + (-(hidden @ last.weight.T + last.bias)).exp())).unbind(-1)
    gates = gate(q)
    assert len(gates) == 3
    for got, want in zip(gates, expected):
        assert got.shape == (7, 3)
        torch.testing.assert_close(got, want)


def test_gates_take_padded_queries_and_train():
    gate = GateModel(in_features=4, hidden_dim=8)
    q = torch.randn(2, 5, 3, 4, requires_grad=True)
    gates = gate(q)
    assert all(g.shape == (2, 5, 3) and (g > 0).all() and (g < 1).all() for g in gates)
    sum(g.sum() for g in gates).backward()
    assert q.grad.abs().sum() > 0
    assert all(p.grad is not None for p in gate.parameters())


def test_empty_batch():
    assert [g.shape for g in GateModel(4, 8)(torch.zeros(0, 2, 4))] == [(0, 2)] * 3


def test_the_reference_is_the_network():
    gate, q = GateModel(6, 5), torch.randn(7, 3, 6)
    first, _, last, _ = gate.layers
    actual = reference(q, first.weight, first.bias, last.weight, last.bias)
    torch.testing.assert_close(actual, torch.stack(gate(q)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(5, 4)}, ValueError, r"q must be \[T, H, D\], got shape \[5, 4\]"),
        ({"w1": torch.zeros(8, 3)}, ValueError, r"w1 must be \[F, D=4\], got shape \[8, 3\]"),
        ({"b2": torch.zeros(2)}, ValueError, r"b2 must be \[G=3\], got shape \[2\]"),
        ({"w2": None}, TypeError, r"w2 must be a tensor \[G, F\], got NoneType"),
        ({"q": torch.zeros(5, 2, 4).long()}, TypeError, "q must be floating point, got torch.int64"),
    ],
)
def test_errors(change, error, message):
    with pytest.raises(error, match=message):
        reference(**{**inputs(5, 2, 4, 8, 3), **change})


needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")


@needs_interpreter
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "size", "hidden", "gates"), [
    (0, 2, 16, 8, 3), (1, 1, 1, 1, 1), (37, 3, 25, 32, 3), (70, 1, 64, 16, 16),
])  # fmt: skip
def test_kernels(tokens, heads, size, hidden, gates, strided):
    compare(inputs(tokens, heads, size, hidden, gates, strided=strided))


@needs_interpreter
def test_opcheck():
    x = tuple(inputs(5, 2, 6, 8, 3).values())
    torch.library.opcheck(torch.ops.hstu_sparse.query_gates_bwd.default, (torch.randn(3, 5, 2), *x))
    torch.library.opcheck(torch.ops.hstu_sparse.query_gates_fwd.default, tuple(a.requires_grad_() for a in x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "size", "hidden"), [(3000, 64, 32), (777, 50, 32), (301, 64, 64), (20_000, 25, 16)])
def test_kernels_on_gpu(tokens, size, hidden, dtype):
    compare(inputs(tokens, 2, size, hidden, 3, dtype=dtype, weights=torch.float32, strided=True, device="cuda"))


@pytest.mark.gpu
def test_the_same_bits_in_every_run():
    x = {name: a.requires_grad_() for name, a in inputs(5000, 4, 64, 32, 3, device="cuda").items()}
    first, second = (torch.autograd.grad(kernel(**x).square().sum(), list(x.values())) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.gpu
def test_model_uses_the_kernel():
    gate, q = GateModel(64, 32).cuda(), torch.randn(500, 4, 64, device="cuda")
    for actual, expected in zip(gate(q), gate.layers(q).unbind(-1)):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
