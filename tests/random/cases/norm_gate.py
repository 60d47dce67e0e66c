"""Layer norm times a gate. Letters: T tokens, C channels."""

import torch

from hstu_sparse import layer_norm, norm_gate
from tests.random.cases import Launches
from tests.support.budgets import compare_with_reference


def draw(random, small):
    dtypes = ["float32"] if small else ["float32", "float16", "bfloat16"]
    return dict(
        tokens=random.choice([0, 1, random.randint(2, 40 if small else 20_000)]),
        channels=random.choice([1, 16, 50, 64, 100, 256] if small else [1, 7, 50, 64, 128, 256, 1000, 4096]),
        dtype=random.choice(dtypes),
        u_dtype=random.choice(dtypes),
        gate=random.random() < 0.7,
        stride=random.choice([1, 2]),
        seed=random.randrange(2**31),
    )


def reference_bytes(*, tokens, channels, **_):
    return 120 * tokens * channels


def check(device, *, tokens, channels, dtype, u_dtype, gate, stride, seed):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(2, tokens, stride * channels, generator=generator)
    x = wide[0].to(device, getattr(torch, dtype))[:, :channels]
    u = wide[1].to(device, getattr(torch, u_dtype))[:, ::stride]
    inputs, function = ({"x": x, "u": u}, norm_gate) if gate else ({"x": x}, layer_norm)
    compare_with_reference(
        lambda **arguments: function(**arguments, backend="triton"),
        lambda **arguments: function(**arguments, backend="reference"),
        inputs,
        factor=4.0,
    )


def launches():
    from hstu_sparse.layer import norm_gate as kernels

    def case(channels, dtype, gate, dropout):
        def call():
            x = torch.zeros(64, channels, dtype=dtype)
            u, seed = x if gate else None, torch.zeros(1, dtype=torch.int64) if dropout else None
            kernels.norm_gate_operator.forward(x, u, seed, 1e-6, dropout, None)
            kernels.norm_gate_operator.backward(x, x, u, seed, 1e-6, dropout, None)

        return Launches(f"{dtype} C={channels} gate={gate} dropout={dropout}", call)

    return [
        case(50, torch.float32, True, 0.5),
        case(4096, torch.float32, True, 0.5),
        case(1, torch.float32, True, 0.5),
        case(256, torch.bfloat16, True, 0.0),
        case(50, torch.float16, False, 0.0),
    ]
