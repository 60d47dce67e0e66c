"""A model's input. Letters: T tokens, B sequences, N max_seq_len, E embedding size."""

import functools

import torch

from hstu_sparse import embed_inputs
from tests.random.cases import Launches
from tests.support.budgets import compare_with_reference, make_jagged, make_offsets

kernel = functools.partial(embed_inputs, backend="triton")
reference = functools.partial(embed_inputs, backend="reference")


def inputs(lengths, n, size, *, dtype=torch.float32, more=False, targets=False, device="cpu", seed=0, **options):
    counts = torch.tensor([length - (length * place) // (len(lengths) or 1) for place, length in enumerate(lengths)])
    return dict(
        rows=make_jagged(lengths, (size,), dtype=dtype, device=device, seed=seed, **options),
        position=make_jagged((n,), (size,), device=device, seed=seed + 1),
        seq_offsets=make_offsets(lengths, device=device),
        num_targets=counts.long().to(device) if targets else None,
        more=make_jagged(lengths, (size,), dtype=dtype, device=device, seed=seed + 2) if more else None,
    )


def draw(random, small):
    most = 60 if small else random.choice([300, 3000])
    count = random.choice([0, 1, random.randint(2, 5 if small else 200)])
    return dict(
        lengths=[random.choice([0, 1, random.randint(1, most)]) for _ in range(count)],
        longer=random.choice([0, 1, 100]),
        size=random.choice([1, 16, 50, 64] if small else [1, 7, 50, 64, 128, 256, 1000]),
        dtype="float32" if small else random.choice(["float32", "float16", "bfloat16"]),
        more=random.random() < 0.4,
        targets=random.random() < 0.4,
        strided=random.random() < 0.5,
        result=random.choice([None, None, "bfloat16"]),
        seed=random.randrange(2**31),
    )


def reference_bytes(*, lengths, longer, size, **_):
    return 80 * size * (sum(lengths) + longer + max([1, *lengths]))


def check(device, *, lengths, longer, size, dtype, more, strided, seed, targets=False, result=None):
    n = max([1, *lengths]) + longer
    x = inputs(lengths, n, size, dtype=getattr(torch, dtype), more=more, targets=targets, device=device, seed=seed,
               contiguous=not strided)  # fmt: skip
    options = {"scale": size**0.5, "dtype": result and getattr(torch, result)}
    functions = (functools.partial(f, **options) for f in (kernel, reference))
    compare_with_reference(*functions, x, factor=4.0, floor={"grad of position": 1e-6})


def launches():
    from hstu_sparse.layer.embed_inputs import embed_inputs_operator as operator

    def case(size, dtype, more, dropout, targets=False, result=None, local_bytes=0):
        def call():
            x = inputs((40, 56), 100, size, dtype=dtype, more=more, targets=targets)
            arguments = (*x.values(), torch.zeros(1, dtype=torch.int64) if dropout else None, 2.0, dropout, result)
            operator.backward(operator.forward(*arguments), *arguments)

        return Launches(f"{dtype} E={size} more={more} dropout={dropout} targets={targets}", call, local_bytes)

    return [
        case(256, torch.float32, False, 0.5),
        case(50, torch.float32, True, 0.5),
        case(64, torch.float32, False, 0.5, targets=True, local_bytes=16),
        case(128, torch.bfloat16, False, 0.0),
        case(256, torch.float32, False, 0.5, result=torch.bfloat16),
    ]
