"""Gates of queries. Letters: T tokens, H heads, D size of a query, F hidden, G gates."""

import functools

import torch

from hstu_sparse import query_gates
from tests.random.cases import Launches
from tests.support.budgets import compare_with_reference

kernel = functools.partial(query_gates, backend="triton")
reference = functools.partial(query_gates, backend="reference")


def inputs(
    tokens, heads, size, hidden, gates, *, dtype=torch.float32, weights=None, strided=False, device="cpu", seed=0
):
    """Return q [T, H, D], a strided part of a wider tensor, and weights of a network whose gates are not all alike."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(tokens, heads, size * (2 if strided else 1), generator=generator).to(device, dtype)
    shapes = {"w1": (hidden, size), "b1": (hidden,), "w2": (gates, hidden), "b2": (gates,)}
    scales = {"w1": size**-0.5, "b1": 1.0, "w2": hidden**-0.5, "b2": 1.0}
    weights_by_name = {
        name: (scales[name] * torch.randn(*shape, generator=generator)).to(device, weights or dtype)
        for name, shape in shapes.items()
    }
    return {"q": wide[..., -size:], **weights_by_name}


def draw(random, small):
    dtype = "float32" if small else random.choice(["float32", "float16", "bfloat16"])
    sizes = [1, 7, 16, 25, 64] if dtype == "float32" else [1, 7, 25, 64, 100, 128]
    return dict(
        tokens=random.choice([0, 1, random.randint(2, 40 if small else 30_000)]),
        heads=random.randint(1, 4),
        size=random.choice(sizes),
        hidden=random.choice([1, 16, 32] if small else [1, 16, 32, 50, 64]),
        gates=random.choice([1, 3, 5, 16]),
        dtype=dtype,
        same=random.random() < 0.5,
        strided=random.random() < 0.5,
        seed=random.randrange(2**31),
    )


def reference_bytes(*, tokens, heads, size, hidden, gates, **_):
    return 60 * tokens * heads * (size + 2 * hidden + 2 * gates)


def check(device, *, tokens, heads, size, hidden, gates, dtype, same, strided, seed):
    dtype = getattr(torch, dtype)
    x = inputs(
        tokens, heads, size, hidden, gates, dtype=dtype, weights=dtype if same else torch.float32, strided=strided,
        device=device, seed=seed,
    )  # fmt: skip
    compare(x)


def compare(x):
    # A sum over all rows, in fp32 where the reference rounds its parts.
    half = x["q"].dtype != torch.float32
    floor = 2e-2 if half else 2e-5
    names = ("q", "w1", "b1", "w2", "b2")
    # Where a hidden number is 0 but for rounding, ReLU's slope is either of two: such rows are left out.
    hidden = x["q"].double() @ x["w1"].double().T + x["b1"].double()
    clear = (hidden.abs() > (2e-2 if half else 1e-5)).all(-1)
    compare_with_reference(
        lambda **arguments: kernel(**arguments) * clear,
        lambda **arguments: reference(**arguments) * clear,
        x,
        factor=4.0,
        floor={f"grad of {name}": floor for name in names} | {"output": floor / 4},
    )


def launches():
    from hstu_sparse.layer.query_gates import query_gates_operator as operator

    def case(size, hidden, dtype, local_bytes=0):
        def call():
            x = inputs(40, 2, size, hidden, 3, dtype=dtype, weights=torch.float32)
            operator.backward(operator.forward(*x.values()), *x.values())

        return Launches(f"{dtype} D={size} F={hidden}", call, local_bytes)

    few = {"query_gates_bwd_kernel": 96}  # on other architectures than sm_90
    return [
        case(64, 32, torch.bfloat16, few),
        case(50, 32, torch.float32),
        case(128, 64, torch.float16),
        case(64, 64, torch.float32),
    ]
