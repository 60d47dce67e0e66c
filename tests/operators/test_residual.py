"""A residual stream: the interface, the kernels in the interpreter and on a GPU."""

import functools

import pytest
import torch
from torch.nn import functional as F

from hstu_sparse import residual_add, residual_norm
from tests.random.cases.residual import check, stream

interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
add, norm = functools.partial(residual_add, backend="triton"), functools.partial(residual_norm, backend="triton")


def test_reference():
    x, added, bias = torch.randn(5, 6), torch.randn(5, 6).half(), torch.randn(6)
    torch.testing.assert_close(residual_add(x, added, bias), x + added + bias)
    torch.testing.assert_close(residual_add(x, added), x + added)
    same, normed = residual_norm(x, eps=0.5, dtype=torch.float16)
    assert same is x
    torch.testing.assert_close(normed, F.layer_norm(x, (6,), eps=0.5).half())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: residual_add(torch.zeros(3), torch.zeros(3)), ValueError, r"x must be \[T, C\], got shape \[3\]"),
        (lambda: residual_add(torch.zeros(3, 4), torch.zeros(3, 5)), ValueError, r"added must be \[T=3, C=4\]"),
        (
            lambda: residual_add(torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3)),
            ValueError,
            r"bias must be \[C=4\]",
        ),
        (lambda: residual_norm(torch.zeros(3, 4), dtype=torch.int32), TypeError, "dtype must be floating point"),
        (lambda: norm(torch.zeros(3, 5000)), ValueError, "the kernels take C up to 4096, got 5000|needs CUDA tensors"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@interpreter
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("tokens", "channels", "stride"), [(0, 8, 1), (1, 16, 1), (300, 50, 2), (37, 256, 1)])
def test_kernels(tokens, channels, stride, biased):
    check("cpu", tokens=tokens, channels=channels, dtype="float32", added_dtype="float32", biased=biased,
          stride=stride, seed=0)  # fmt: skip


@interpreter
def test_another_dtype_is_added():
    check("cpu", tokens=70, channels=20, dtype="float32", added_dtype="float16", biased=True, stride=1, seed=0)


@interpreter
@pytest.mark.parametrize("left", ["total", "normed", "none"])
def test_outputs_that_the_loss_does_not_use(left):
    x = torch.randn(6, 8, requires_grad=True)
    grads = []
    for backend in ("triton", "reference"):
        total, normed = residual_norm(x, backend=backend)
        loss = (0 if left == "total" else total.square().sum()) + (0 if left == "normed" else normed.pow(3).sum())
        grads.append(torch.autograd.grad(loss, x)[0])
    torch.testing.assert_close(*grads)


@interpreter
def test_one_graph():
    x, added, bias = (torch.randn(*shape, requires_grad=True) for shape in ((5, 6), (5, 6), (6,)))
    compiled = torch.compile(stream("triton"), fullgraph=True, backend="aot_eager")
    actual, expected = (torch.autograd.grad(f(x, added, bias).square().sum(), (x, added, bias))
                       for f in (compiled, stream("reference")))  # fmt: skip
    torch.testing.assert_close(actual, expected)


@interpreter
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_compiled_sum_is_the_kernels(dtype, biased):
    """Check that backend="triton" under torch.compile launches the kernels that it names, forward and backward."""
    from torch._dynamo.backends.common import aot_autograd

    targets = []

    def keep(module, _):
        targets.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module

    leaves = [torch.randn(5, 6), torch.randn(5, 6).to(dtype), torch.randn(6)][: 3 if biased else 2]
    leaves = [x.requires_grad_() for x in leaves]
    compiled = torch.compile(add, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    (out, actual), (right, expected) = (
        (total, torch.autograd.grad(total.square().sum(), leaves))
        for total in (compiled(*leaves), residual_add(*leaves))
    )
    tolerance = dict(rtol=1e-2, atol=1e-2) if dtype == torch.float16 else {}
    torch.testing.assert_close((out, *actual), (right, *expected), **tolerance)
    ours = [target for target in targets if "hstu_sparse" in target]
    assert ours == ["hstu_sparse.residual_sum.default", "hstu_sparse.residual_shares.default"][: 2 if biased else 1]
    assert not any("add" in target for target in targets if target not in ours)


@interpreter
def test_dispatch_modes_get_torchs_operations():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(5, 6, requires_grad=True)
        stream("triton")(x, torch.empty(5, 6), torch.empty(6)).sum().backward()
        assert x.grad.shape == (5, 6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "added_dtype"), [("float32", "bfloat16"), ("float32", "float32"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize(("tokens", "channels"), [(3000, 256), (15_000, 50), (9, 4096)])
def test_kernels_on_gpu(tokens, channels, dtype, added_dtype):
    check("cuda", tokens=tokens, channels=channels, dtype=dtype, added_dtype=added_dtype, biased=True, stride=1, seed=0)


@pytest.mark.gpu
def test_the_same_bits_in_every_run():
    x, added, bias = (
        torch.randn(*shape, device="cuda", requires_grad=True) for shape in ((20_000, 64), (20_000, 64), (64,))
    )
    runs = [torch.autograd.grad(add(x, added, bias).square().sum(), bias)[0] for _ in range(2)]
    assert torch.equal(*runs)
