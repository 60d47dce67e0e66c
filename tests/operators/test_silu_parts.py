"""SiLU in parts: the interface, the kernels in the interpreter and on a GPU."""

import functools

import pytest
import torch
from torch.nn import functional as F

from hstu_sparse import silu_parts
from tests.random.cases.silu_parts import check

kernel = functools.partial(silu_parts, backend="triton")
interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")


def test_reference():
    x = torch.randn(5, 12)
    for actual, expected in zip(silu_parts(x, [3, 2, 6, 1]), F.silu(x).split([3, 2, 6, 1], 1)):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("x", "sizes", "error", "message"),
    [
        (torch.zeros(4), (1, 1, 1, 1), ValueError, r"x must be \[T, C\], got shape \[4\]"),
        (torch.zeros(2, 4).long(), (1, 1, 1, 1), TypeError, "x must be floating point, got torch.int64"),
        (torch.zeros(2, 4), (2, 2), TypeError, r"sizes must be 4 whole numbers, got \(2, 2\)"),
        (torch.zeros(2, 4), (2, 2, 0, 0), ValueError, "sizes must be at least 1, got 0"),
        (torch.zeros(2, 4), (1, 1, 1, 2), ValueError, r"sizes must sum up to C=4, got \[1, 1, 1, 2\]"),
    ],
)
def test_errors(x, sizes, error, message):
    with pytest.raises(error, match=message):
        silu_parts(x, sizes)


@interpreter
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    ("tokens", "sizes"), [(0, (4,) * 4), (1, (1, 1, 1, 1)), (37, (50,) * 4), (9, (64, 7, 16, 100))]
)
def test_kernels(tokens, sizes, strided):
    check("cpu", tokens=tokens, sizes=sizes, dtype="float32", strided=strided, seed=0)


@interpreter
def test_parts_without_a_gradient_and_gradients_that_lie_apart():
    x = torch.randn(6, 12, requires_grad=True)
    grad = torch.randn(3, 6).T
    for i in range(4):
        actual, expected = (
            torch.autograd.grad(silu_parts(x, [3] * 4, backend=backend)[i], x, grad)[0]
            for backend in ("triton", "reference")
        )
        torch.testing.assert_close(actual, expected)


@interpreter
def test_opcheck_and_one_graph():
    x = torch.randn(5, 12)
    grads = (torch.randn(5, 3), None, torch.randn(5, 6), torch.randn(5, 1))
    torch.library.opcheck(torch.ops.hstu_sparse.silu_parts_bwd.default, (*grads, x, 3, 2, 6, 1))
    torch.library.opcheck(torch.ops.hstu_sparse.silu_parts_fwd.default, (x.requires_grad_(), 3, 2, 6, 1))
    compiled = torch.compile(lambda x: kernel(x, (3, 2, 6, 1)), fullgraph=True, backend="aot_eager")
    for run in (compiled, lambda x: kernel(x, (3, 2, 6, 1))):
        u, *_, k = run(x)
        (gradient,) = torch.autograd.grad(u.sum() + k.sum(), x)
        u, *_, k = silu_parts(x, (3, 2, 6, 1))
        torch.testing.assert_close(gradient, torch.autograd.grad(u.sum() + k.sum(), x)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("tokens", "sizes"), [(3000, (256,) * 4), (15_000, (50,) * 4), (301, (1000, 1, 64, 7))])
def test_kernels_on_gpu(tokens, sizes, dtype):
    check("cuda", tokens=tokens, sizes=sizes, dtype=dtype, strided=tokens == 301, seed=0)
