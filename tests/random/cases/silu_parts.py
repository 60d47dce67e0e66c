"""SiLU in parts. Letters: T tokens, C channels."""

import torch

from hstu_sparse import silu_parts
from tests.random.cases import Launches
from tests.support.budgets import compare_with_reference


def joined(backend, sizes):
    """Return the parts, each times another factor, as one output."""

    def call(x):
        parts = silu_parts(x, sizes, backend=backend)
        return torch.cat([part * (i + 1) for i, part in enumerate(parts)], 1)

    return call


def draw(random, small):
    return dict(
        tokens=random.choice([0, 1, random.randint(2, 40 if small else 30_000)]),
        sizes=[random.choice([1, 7, 16, 50, 64] if small else [1, 7, 25, 50, 64, 200, 256]) for _ in range(4)],
        dtype="float32" if small else random.choice(["float32", "float16", "bfloat16"]),
        strided=random.random() < 0.5,
        seed=random.randrange(2**31),
    )


def reference_bytes(*, tokens, sizes, **_):
    return 80 * tokens * sum(sizes)


def check(device, *, tokens, sizes, dtype, strided, seed):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(tokens, sum(sizes) * (2 if strided else 1), generator=generator)
    x = x.to(device, getattr(torch, dtype))[:, : sum(sizes)]
    compare_with_reference(joined("triton", sizes), joined("reference", sizes), {"x": x}, factor=4.0)


def launches():
    from hstu_sparse.layer.silu_parts import silu_parts_operator as operator

    def case(sizes, dtype):
        def call():
            x = torch.zeros(40, sum(sizes), dtype=dtype)
            parts = operator.forward(x, *sizes)
            operator.backward(*parts[:3], None, x, *sizes)

        return Launches(f"{dtype} {sizes}", call)

    return [case((256,) * 4, torch.bfloat16), case((50,) * 4, torch.float32), case((1000, 1, 64, 7), torch.float16)]
