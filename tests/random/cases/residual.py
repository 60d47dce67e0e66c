"""A residual stream: what is added at a block's end, and the norm at the next one's start. T tokens, C channels."""

import functools

import torch

from hstu_sparse import residual_add, residual_norm
from tests.random.cases import Launches
from tests.support.budgets import compare_with_reference


def forked(x, backend):
    """Return both outputs of the norm, concatenated."""
    x, normed = residual_norm(x, backend=backend)
    return torch.cat([x, 2 * normed], 1)


def stream(backend, dtype=None):
    """Return a function of both operators, with one output: the sum and its norm, concatenated."""

    def call(x, added, bias):
        total = residual_add(x, added, bias, backend=backend)
        total, normed = residual_norm(total, dtype=dtype, backend=backend)
        return torch.cat([total, 2 * normed.to(total.dtype)], 1)

    return call


def draw(random, small):
    dtypes = ["float32"] if small else ["float32", "float16", "bfloat16"]
    return dict(
        tokens=random.choice([0, 1, random.randint(2, 40 if small else 20_000)]),
        channels=random.choice([2, 16, 50, 64, 100, 256] if small else [2, 7, 50, 64, 128, 256, 1000, 4096]),
        dtype=random.choice(dtypes),
        added_dtype=random.choice(dtypes),
        biased=random.random() < 0.7,
        stride=random.choice([1, 2]),
        seed=random.randrange(2**31),
    )


def reference_bytes(*, tokens, channels, **_):
    return 150 * tokens * channels


def check(device, *, tokens, channels, dtype, added_dtype, biased, stride, seed):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(2, tokens, stride * channels, generator=generator)
    x = {
        "x": wide[0].to(device, getattr(torch, dtype))[:, :channels],
        "added": wide[1].to(device, getattr(torch, added_dtype))[:, ::stride],
        "bias": torch.randn(channels, generator=generator).to(device) if biased else None,
    }
    # The bias's gradient is a sum over tokens that cancels, in fp32 here.
    floor = {"grad of bias": 1e-5 if dtype == added_dtype == "float32" else 4e-3}
    add, norm = (lambda backend, f=f: functools.partial(f, backend=backend) for f in (residual_add, forked))
    compare_with_reference(add("triton"), add("reference"), x, factor=4.0, floor=floor)
    # The norm is computed from x, not from the rounded sum: its slope is steep where channels are nearly equal (the
    # norm of two channels is the sign of their difference), so that the sum's rounding would decide there.
    few = functools.partial(sizes_of_terms, x["x"]) if channels < 16 and dtype == "float32" else None
    compare_with_reference(norm("triton"), norm("reference"), {"x": x["x"]}, factor=4.0, terms=few)


def sizes_of_terms(x, grad):
    """Return the size of the terms that cancel in the norm's gradient: with two channels (1 and -1) nearly all.

    Rounding the mean changes the differences of channels from it, relatively more the smaller they are.
    """
    x, channels = x.double(), x.shape[1]
    slope = (x.var(1, correction=0, keepdim=True) + 1e-6).rsqrt()
    added, normed = grad.double().abs().split(channels, 1)
    return {"grad of x": added + 2 * normed * slope * (1 + slope * x.abs().amax(1, keepdim=True))}


def launches():
    from hstu_sparse.layer.residual import Add, Fork

    def case(channels, dtype, added_dtype, biased):
        def call():
            x = torch.zeros(64, channels, dtype=dtype, requires_grad=True)
            added, bias = x.detach().to(added_dtype).requires_grad_(), torch.zeros(channels) if biased else None
            inputs = (x, added, bias.requires_grad_()) if biased else (x, added)
            total, normed = Fork.apply(Add.apply(x, added, bias), 1e-6, added_dtype)
            torch.autograd.grad((total, normed), inputs, (total.detach(), normed.detach()))

        return Launches(f"{dtype} and {added_dtype} C={channels} bias={biased}", call)

    return [
        case(256, torch.float32, torch.bfloat16, True),
        case(50, torch.float32, torch.float32, True),
        case(4096, torch.float16, torch.float16, False),
    ]
