"""Layer norm times a gate, with dropout: the interface, the kernels in the interpreter and on a GPU."""

import functools

import pytest
import torch
from torch.nn import functional as F

from hstu_sparse import layer_norm, norm_gate
from tests.support.budgets import compare_with_reference

interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

kernel = functools.partial(norm_gate, backend="triton")
reference = functools.partial(norm_gate, backend="reference")
norm_kernel = functools.partial(layer_norm, backend="triton")
norm_reference = functools.partial(layer_norm, backend="reference")


def inputs(tokens, channels, *, dtype=torch.float32, u_dtype=None, seed=0):
    """Return x of mean 1 and deviation 3, and u, a slice of a wider tensor: {"x": [T, C], "u": [T, C]}."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(tokens, channels, generator=generator) + 1
    wide = torch.randn(tokens, 4 * channels, generator=generator)
    return {
        "x": x.to(DEVICE, dtype),
        "u": wide.to(DEVICE, u_dtype or dtype)[:, channels : 2 * channels],
    }


def gradients(x, u, grad, **options):
    """Return (output, dx, du) of the kernel."""
    x, u = x.detach().requires_grad_(), u.detach().requires_grad_()
    out = kernel(x, u, **options)
    return out.detach(), *torch.autograd.grad(out, (x, u), grad)


def mask(tokens, channels, p, seed, dtype=torch.float32):
    """Return the dropout mask of the kernel: x and u are such that no element of the undropped output is near 0."""
    x = torch.tensor([1.0, -1.0], device=DEVICE, dtype=dtype).repeat(channels)[:channels].expand(tokens, channels)
    return kernel(x, torch.ones_like(x), dropout=p, seed=seed) != 0


def check_dropout(tokens, channels, *, p=0.3, dtype=torch.float32):
    """Check the kept share, kept values and gradients (those without dropout / (1 - p)), the zeros, and the seed."""
    x, u = inputs(tokens, channels, dtype=dtype).values()
    grad = torch.randn(tokens, channels, generator=torch.Generator().manual_seed(3)).to(x)
    seed = torch.tensor([2**40 + 5], device=DEVICE)
    kept_mask = mask(tokens, channels, p, seed, dtype)
    share, spread = kept_mask.float().mean().item(), (p * (1 - p) / kept_mask.numel()) ** 0.5
    assert abs(share - (1 - p)) < 4 * spread, f"kept {share:.4f} of {kept_mask.numel()} elements, expected {1 - p:.4f}"

    out, dx, du = gradients(x, u, grad, dropout=p, seed=seed)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    # With the gradient already dropped, the kernel without dropout has to give the same.
    scale = kept_mask / (1 - p)
    expected = gradients(x.float(), u.float(), grad * scale)
    close(out.float(), expected[0] * scale)
    close(dx.float(), expected[1])
    close(du.float(), expected[2])
    assert not out[~kept_mask].any() and not du[~kept_mask].any()

    assert torch.equal(out, kernel(x, u, dropout=p, seed=seed.clone()))
    other = mask(tokens, channels, p, seed + 1)
    assert abs((other == kept_mask).float().mean().item() - (p**2 + (1 - p) ** 2)) < 4 * spread
    # The mask depends on the element's place only, neither on T nor on C.
    assert torch.equal(mask(tokens // 2, channels // 2, p, seed), kept_mask[: tokens // 2, : channels // 2])


# The interface.


def test_reference():
    x, u = (a.cpu() for a in inputs(7, 25).values())
    torch.testing.assert_close(reference(x, u), F.layer_norm(x, (25,), eps=1e-6) * u)
    torch.testing.assert_close(layer_norm(x, eps=0.5), F.layer_norm(x, (25,), eps=0.5))
    torch.manual_seed(4)
    out = norm_gate(x, u, dropout=0.4)
    torch.manual_seed(4)
    torch.testing.assert_close(out, F.dropout(reference(x, u), 0.4))
    assert norm_gate(x.double(), u).dtype == torch.float64


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=interpreter)])
def test_norm_in_another_dtype(backend):
    """The fp32 result rounded once, and the gradient as if it had not been rounded."""
    x = inputs(7, 25)["x"]
    x, grad = x.clone().requires_grad_(), torch.randn(7, 25, device=x.device).half()
    exact, rounded = layer_norm(x, backend=backend), layer_norm(x, dtype=torch.float16, backend=backend)
    assert rounded.dtype == torch.float16
    torch.testing.assert_close(rounded.float(), exact, rtol=1e-3, atol=1e-4)
    (expected,), (actual,) = (torch.autograd.grad(y, x, g) for y, g in ((exact, grad.float()), (rounded, grad)))
    assert actual.dtype == torch.float32
    for wrong in (torch.int64, "float16"):
        with pytest.raises(TypeError, match=f"dtype must be floating point, got {wrong!r}"):
            layer_norm(x, dtype=wrong, backend=backend)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"backend": "cuda"}, ValueError, "backend must be one of auto, triton, reference, got 'cuda'"),
        ({"x": torch.zeros(6)}, ValueError, r"x must be \[T, C\], got shape \[6\]"),
        ({"x": torch.zeros(6, 0)}, ValueError, r"x must be \[T, C\] with C > 0, got C=0"),
        ({"x": torch.zeros(6, 4).long()}, TypeError, "x must be floating point, got torch.int64"),
        ({"x": None}, TypeError, r"x must be a tensor \[T, C\], got NoneType"),
        ({"u": None}, TypeError, r"u must be a tensor \[T, C\], got NoneType"),
        ({"u": torch.zeros(6, 3)}, ValueError, r"u must be \[T=6, C=4\], got shape \[6, 3\]"),
        ({"u": torch.zeros(6, 4).int()}, TypeError, "u must be floating point, got torch.int32"),
        ({"u": torch.zeros(6, 4, device="meta")}, ValueError, "u is on meta, expected on cpu"),
        ({"eps": 0.0}, ValueError, "eps must be a finite number above 0, got 0.0"),
        ({"dropout": 1.0}, ValueError, "dropout must be at least 0 and less than 1, got 1.0"),
        ({"dropout": -0.1}, ValueError, "dropout must be at least 0 and less than 1, got -0.1"),
    ],
)
def test_errors(change, error, message):
    with pytest.raises(error, match=message):
        norm_gate(**{"x": torch.zeros(6, 4), "u": torch.zeros(6, 4), **change})


def test_kernels_refuse_what_they_cannot_do():
    x, u = inputs(3, 4).values()
    with pytest.raises(TypeError, match="u: the kernels take fp16, bf16 and fp32, got"):
        kernel(x, u.double())
    with pytest.raises(ValueError, match="the kernels take C up to 4096, got 5000"):
        norm_kernel(torch.zeros(2, 5000, device=DEVICE))
    with pytest.raises(ValueError, match="dropout > 0 needs a seed"):
        kernel(x, u, dropout=0.1)
    with pytest.raises(ValueError, match=r"seed must be an int64 tensor of one element on .*, got torch.int32"):
        kernel(x, u, dropout=0.1, seed=torch.zeros(1, dtype=torch.int32, device=DEVICE))
    leaf = x.requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(kernel(leaf, u).sum(), leaf, create_graph=True)


def test_triton_on_a_cpu_tensor_needs_the_interpreter(monkeypatch):
    from hstu_sparse.core import validation

    monkeypatch.setattr(validation, "INTERPRET", False)
    with pytest.raises(ValueError, match="needs CUDA tensors, got cpu"):
        kernel(torch.zeros(3, 4), torch.zeros(3, 4))


# The kernels, in the interpreter.


@interpreter
@pytest.mark.parametrize(
    ("tokens", "channels"),
    [
        pytest.param(tokens, channels, marks=pytest.mark.slow if tokens == 300 and channels in (1, 50, 64, 256) else [])
        for tokens in (0, 1, 7, 300)
        for channels in (1, 25, 50, 64, 100, 256)
    ],
)
def test_kernels(tokens, channels):
    x = inputs(tokens, channels)
    compare_with_reference(kernel, reference, x, factor=4.0)
    compare_with_reference(norm_kernel, norm_reference, {"x": x["x"]}, factor=4.0)


@interpreter
def test_many_channels_and_another_eps():
    compare_with_reference(kernel, reference, inputs(3, 1000), factor=4.0)
    compare_with_reference(
        functools.partial(kernel, eps=0.3), functools.partial(reference, eps=0.3), inputs(5, 24), factor=4.0
    )


@interpreter
def test_strides():
    """Rows apart, rows apart and off alignment, channels apart, an expanded gradient."""
    wide = torch.randn(9, 40)
    x, u = wide[:, 3:14], wide[:, 20:31]
    compare_with_reference(kernel, reference, {"x": x, "u": u}, factor=4.0)
    compare_with_reference(kernel, reference, {"x": torch.randn(11, 9).T, "u": wide[:, :22:2]}, factor=4.0)
    for grad in (torch.ones(()).expand(9, 11), torch.randn(11).expand(9, 11)):
        for actual, expected in zip(gradients(x, u, grad), gradients(x, u, grad.contiguous())):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@interpreter
def test_a_constant_row_has_no_direction():
    x = torch.full((2, 8), 3.0, requires_grad=True)
    out = norm_kernel(x)
    out.backward(torch.randn(2, 8))
    assert not out.any()
    assert torch.isfinite(x.grad).all()


@interpreter
def test_mixed_dtypes():
    """Mix fp16 and fp32, either way; the interpreter is wrong for bf16."""
    for dtype, u_dtype in ((torch.float16, torch.float32), (torch.float32, torch.float16)):
        compare_with_reference(kernel, reference, inputs(9, 20, dtype=dtype, u_dtype=u_dtype), factor=4.0)


@interpreter
@pytest.mark.parametrize("channels", [25, pytest.param(64, marks=pytest.mark.slow)])
def test_dropout(channels):
    check_dropout(300, channels)


@interpreter
def test_only_the_needed_gradients():
    x, u = inputs(4, 6).values()
    out = kernel(x, u.requires_grad_())
    out.sum().backward()
    assert x.grad is None
    assert not kernel(x, u.detach()).requires_grad
    with torch.no_grad():
        assert not kernel(x, u).requires_grad


@interpreter
@pytest.mark.parametrize(
    ("gate", "dropout"),
    [
        (True, 0.3),
        (False, 0.0),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, 0.0), (False, 0.3))),
    ],
)
def test_opcheck(gate, dropout):
    x, u = inputs(5, 6).values()
    rest = (u if gate else None, torch.tensor([3]) if dropout else None, 1e-6, dropout, None)
    torch.library.opcheck(torch.ops.hstu_sparse.norm_gate_bwd.default, (torch.randn(5, 6), x, *rest))
    u.requires_grad_()
    torch.library.opcheck(torch.ops.hstu_sparse.norm_gate_fwd.default, (x.requires_grad_(), *rest))


def one_graph(backend, options, dynamic=None):
    x, u = inputs(12, 6).values()
    expected = gradients(x, u, torch.ones_like(x), **options)
    compiled = torch.compile(kernel, fullgraph=True, backend=backend, dynamic=dynamic)
    x, u = x.requires_grad_(), u.requires_grad_()
    out = compiled(x, u, **options)
    actual = out.detach(), *torch.autograd.grad(out.sum(), (x, u))
    torch.testing.assert_close(actual, expected)
    compiled_norm = torch.compile(norm_kernel, fullgraph=True, backend=backend, dynamic=dynamic)
    torch.testing.assert_close(compiled_norm(x), norm_kernel(x))


@interpreter
@pytest.mark.parametrize(
    ("dynamic", "options"),
    [
        (None, {}),
        (True, {"dropout": 0.3, "seed": torch.tensor([5])}),
        pytest.param(True, {}, marks=pytest.mark.slow),
        pytest.param(None, {"dropout": 0.3, "seed": torch.tensor([5])}, marks=pytest.mark.slow),
    ],
    ids=["plain", "dynamic, dropout", "dynamic", "dropout"],
)
def test_compiles_as_one_graph(options, dynamic):
    one_graph("aot_eager", options, dynamic)


@interpreter
def test_fake_tensors_and_dispatch_modes_see_the_operator():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x, u = inputs(5, 6).values()
    with Record():
        out = kernel(x.requires_grad_(), u)
        out.backward(torch.ones(5, 6))
    assert [name for name in seen if "hstu_sparse" in name] == [
        "hstu_sparse.norm_gate_fwd.default",
        "hstu_sparse.norm_gate_bwd.default",
    ]
    assert x.grad is not None
    with FakeTensorMode():
        fake = torch.empty(5, 6, requires_grad=True)
        kernel(fake, torch.empty(5, 6)).sum().backward()
        assert fake.grad.shape == (5, 6)


# Compilation ahead of time.


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "channels"), [(0, 50), (3000, 1), (15000, 50), (777, 256), (301, 1024), (9, 4096)])
def test_kernels_on_gpu(tokens, channels, dtype):
    x = inputs(tokens, channels, dtype=dtype)
    compare_with_reference(kernel, reference, x, factor=4.0)
    compare_with_reference(norm_kernel, norm_reference, {"x": x["x"]}, factor=4.0)


@pytest.mark.gpu
def test_mixed_dtypes_on_gpu():
    for dtype, u_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        compare_with_reference(kernel, reference, inputs(99, 50, dtype=dtype, u_dtype=u_dtype), factor=4.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [50, 64, 256])
def test_dropout_on_gpu(channels, dtype):
    check_dropout(2000, channels, dtype=dtype)


@pytest.mark.gpu
def test_alignment_is_looked_at_in_every_call():
    """After a call with aligned tensors the kernel compiled for them must not serve those that are not."""
    flat = torch.randn(101 * 64, device=DEVICE)
    u = torch.randn(100, 64, device=DEVICE)
    for offset in (0, 1, 2, 4, 8, 0):
        x = flat[offset : offset + 6400].view(100, 64)
        torch.testing.assert_close(kernel(x, u), reference(x, u))


@pytest.mark.gpu
def test_another_batch_compiles_nothing():
    from hstu_sparse.core import launch
    from hstu_sparse.layer.norm_gate import norm_gate_bwd_kernel, norm_gate_fwd_kernel

    seeds = torch.arange(8, device=DEVICE)

    def step(tokens, seed):
        x, u = inputs(tokens, 50).values()
        for options in ({}, {"dropout": 0.2, "seed": seed}):
            gradients(x, u, torch.ones_like(x), **options)

    def count():
        kernels = norm_gate_fwd_kernel, norm_gate_bwd_kernel
        caches = [c[0] for k in kernels for c in k.device_caches.values()]
        return sum(map(len, caches)), sum(len(launch._kernels[id(k)].compiled) for k in kernels)

    step(300, seeds[0])
    before = count()
    for i, tokens in enumerate((301, 16, 1, 4096, 15001)):
        step(tokens, seeds[i])
    assert before > (0, 0)
    assert count() == before


@pytest.mark.gpu
def test_no_synchronisation_and_no_other_kernels():
    x, u = inputs(500, 50).values()
    x, u, grad = x.requires_grad_(), u.requires_grad_(), torch.ones_like(x)
    options = {"dropout": 0.2, "seed": torch.tensor([3], device=DEVICE)}
    torch.autograd.grad(kernel(x, u, **options), (x, u), grad)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.autograd.grad(kernel(x, u, **options), (x, u), grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    # The last synchronisation is ours.
    assert sorted(name for name in names if "Sync" not in name) == ["norm_gate_bwd_kernel", "norm_gate_fwd_kernel"]


@pytest.mark.gpu
def test_compiles_as_one_graph_on_gpu():
    one_graph("inductor", {"dropout": 0.3, "seed": torch.tensor([5], device=DEVICE)})
