"""Rotation by position and time. Letters: H heads, D head size."""

import torch

from hstu_sparse import rotary
from tests.random.cases import Launches
from tests.support.budgets import compare_with_reference, make_jagged, make_offsets, make_timestamps


def draw(random, small):
    most = 40 if small else 3000
    position, timed = random.choice([(True, True), (True, False), (False, True)])
    return dict(
        lengths=[random.choice([0, 1, random.randint(1, most)]) for _ in range(random.randint(0, 3 if small else 40))],
        heads=random.randint(1, 4),
        size=random.choice([1, 2, 3, 16, 25, 50, 64, 128, 256]),
        dtype="float32" if small else random.choice(["float32", "float16", "bfloat16"]),
        position=position,
        timed=timed,
        contiguous=random.random() < 0.5,
        placed=random.random() < 0.3,
        seed=random.randrange(2**31),
    )


def reference_bytes(*, lengths, heads, size, **_):
    return 100 * sum(lengths) * heads * size


def check(device, *, lengths, heads, size, dtype, position, timed, contiguous, placed, seed):
    x = make_jagged(lengths, (heads, size), dtype=getattr(torch, dtype), seed=seed, contiguous=contiguous).to(device)
    options = dict(
        seq_offsets=make_offsets(lengths, device=device),
        max_seq_len=max([1, *lengths]),
        times=make_timestamps(lengths, seed=seed, scale=1e7, device=device) if timed else None,
        position=position,
        positions=torch.arange(sum(lengths), device=device) % 97 if placed else None,
    )
    compare_with_reference(
        lambda x: rotary(x, **options, backend="triton"),
        lambda x: rotary(x, **options, backend="reference"),
        {"x": x},
        factor=4.0,
    )


def launches():
    from hstu_sparse.layer.rotary import rotary_operator

    def case(size, dtype, timed, placed=False):
        def call():
            x, offsets = torch.zeros(64, 2, size, dtype=dtype), torch.tensor([0, 64])
            times = torch.zeros(64, dtype=torch.int64) if timed else None
            rest = (offsets, times, offsets[:1] if timed else None, offsets if placed else None, 64, True)
            rotary_operator.forward(x, *rest)
            rotary_operator.backward(x, x, *rest)

        # The sine has a stack, for arguments greater than any angle of these cases.
        return Launches(f"{dtype} D={size} {timed=} {placed=}", call, local_bytes=40)

    return [case(128, torch.bfloat16, True), case(25, torch.float32, True, True), case(64, torch.float16, False)]
