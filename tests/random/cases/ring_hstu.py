"""HSTU attention with given positions, in one process. Letters: H heads, D query/key and V value head size."""

import functools

import torch

from hstu_sparse import RelativeBias, ring_hstu_attention
from tests.random.cases import Launches
from tests.random.terms import TABLES, sizes_of_terms
from tests.support.budgets import compare_with_reference, make_jagged, make_offsets, make_timestamps


def draw(random, small):
    most, sizes = (60, [16, 24]) if small else (1500, [16, 25, 50, 64, 128, 256])
    return dict(
        lengths=[
            random.choice([0, 1, random.randint(2, most), most]) for _ in range(random.randint(1, 3 if small else 9))
        ],
        gap=random.choice([0, most // 2]),
        heads=random.choice([1, 2, 4]),
        size=random.choice(sizes),
        value_size=random.choice(sizes),
        dtype="float32" if small else random.choice(["float32", "float16", "bfloat16"]),
        window=random.choice([0, 0, random.randint(1, most)]),
        position=random.random() < 0.6,
        timed=random.random() < 0.6,
        seed=random.randrange(2**31),
    )


def reference_bytes(*, lengths, heads, size, value_size, **_):
    return 96 * heads * (len(lengths) * max([1, *lengths]) ** 2 + sum(lengths) * (2 * size + value_size))


def check(device, *, lengths, gap, heads, size, value_size, dtype, window, position, timed, seed):
    """Compare with the reference. gap: positions left out of each sequence, as between the parts of a zigzag cut."""
    dtype, longest = getattr(torch, dtype), max([1, *lengths]) + gap
    inputs = {
        name: make_jagged(lengths, (heads, inner), dtype=dtype, device=device, seed=seed + i, contiguous=i != 1)
        for i, (name, inner) in enumerate((("q", size), ("k", size), ("v", value_size)))
    }
    generator = torch.Generator().manual_seed(seed)
    if position:
        inputs["position"] = torch.randn(longest + seed % 2 * 11, generator=generator).to(device)
    if timed:
        inputs["time"] = torch.randn(41, generator=generator).to(device)
    places = [torch.arange(n) + gap * (torch.arange(n) >= n // 2) for n in lengths]
    times = make_timestamps(lengths, seed=seed, device=device) if timed else None

    def attend(q, k, v, position=None, time=None, *, backend):
        bias = RelativeBias(position, time, times, None if times is None else times + 977)
        return ring_hstu_attention(
            q, k, v, torch.cat(places).to(device), longest, seq_offsets=make_offsets(lengths, device=device),
            window_size=window, bias=bias, normalizer=0.7 * longest if seed % 3 == 1 else None, backend=backend,
        )  # fmt: skip

    kernel, reference = (functools.partial(attend, backend=name) for name in ("triton", "reference"))
    # The terms of the tables' gradients are rounded to 16 bits in the reference of that dtype, to fp32 in the kernels.
    # An entry of a table's gradient sums up to as many fp32 terms of either sign as there are pairs, one after another:
    # a sum that is rounded n times wanders off by about sqrt(n) roundings. The reference adds in fp64.
    # Kernels of 16-bit inputs compute sigmoids with tanh.approx, with errors of up to 2^-11 (4 times the floor). Like
    # the terms, the errors have either sign, so a sum has about the relative error of a term.
    pairs = heads * sum(n * (n + 1) // 2 for n in lengths)
    least = max(1e-5, 2**-24 * pairs**0.5)
    floor = dict.fromkeys(TABLES, least if dtype == torch.float32 else max(2**-13, least))

    def terms(grad):
        wide = {name: x.double() for name, x in inputs.items()}
        return sizes_of_terms(lambda heads, **x: reference(**x), wide, grad.double(), "qkv", dtype == torch.float32)

    compare_with_reference(kernel, reference, inputs, factor=4.0, floor=floor, terms=terms)


def launches():
    from hstu_sparse.ring.hstu_kernels import block_dkv, block_dq, block_forward
    from hstu_sparse.ring.hstu_reference import Block

    def case(size, dtype, biased, window, *, value_size=None, **more):
        def call():
            q, dq = torch.zeros(64, 2, size, dtype=dtype), torch.zeros(64, 2, size)
            v, out = torch.zeros(64, 2, value_size or size, dtype=dtype), torch.zeros(64, 2, value_size or size)
            offsets, places = torch.tensor([0, 64], dtype=torch.int32), torch.arange(64)
            tables = [torch.zeros(64), torch.zeros(9)] if biased else [None, None]
            bias = RelativeBias(*tables, *([places, places] if biased else []))
            arguments = q, q, v, Block(offsets, offsets, places, places, 64, 0.1, window, bias)
            block_forward(*arguments, out)
            block_dq(v, *arguments, dq, *tables)
            block_dkv(v, *arguments, dq, out)

        return Launches(f"{dtype} D={size} {value_size=} {biased=} {window=}", call, **more)

    return [
        # The two gathers of a bias need registers, and spill.
        case(128, torch.bfloat16, True, 0, local_bytes=400),
        case(64, torch.float16, False, 10, architectures=(80,)),
        case(32, torch.float32, True, 0, architectures=(80,), local_bytes=16),
        case(256, torch.bfloat16, True, 0, architectures=(90,), local_bytes=400),
        # Narrow values, for which ptxas has left registers of wgmma unset.
        case(128, torch.float16, False, 12, value_size=16, architectures=(90,)),
        case(64, torch.bfloat16, False, 0, value_size=32, architectures=(90,)),
    ]
