"""Dense HSTU attention. Letters: T tokens, N max_seq_len, H heads, D query/key and V value head size."""

import functools

import torch

from hstu_sparse import RelativeBias, hstu_attention
from hstu_sparse.testing import compare_with_reference, make_jagged, make_offsets, make_timestamps
from tests.operators import Launches

# A head of dk and dv, and with a bias of all, may spill so much: on sm_90 measured 7% faster than the largest tile that
# does not; with both biases and every feature at once the kernels spill some more.
SPILLS, SPILLS_UNBIASED = 192, 32


def attention(position=None, time=None, timestamps=None, query_timestamps=None, **arguments):
    """hstu_attention with what makes the bias apart, so that tables are differentiated as any argument."""
    return hstu_attention(**arguments, bias=RelativeBias(position, time, timestamps, query_timestamps))


def draw(random, small):
    most = 150 if small else random.choice([300, 1000, 3000])
    lengths = [random.choice([0, 1, random.randint(1, most)]) for _ in range(random.randint(0, 3 if small else 6))]
    sizes = [16, 25, 50, 64] if small else [16, 25, 32, 50, 64, 96, 128, 200, 256]
    return dict(
        lengths=lengths,
        longer=random.choice([0, 0, 1, 500]),
        heads=random.randint(1, 3),
        d=random.choice(sizes),
        v=random.choice(sizes),
        window=random.choice([0, 0, 1, random.randint(1, most)]),
        targets=random.random() < 0.4,
        position=random.random() < 0.6,
        time=random.random() < 0.6,
        query_times=random.random() < 0.5,
        ordered=random.random() < 0.8,
        num_buckets=random.choice([1, 16, 128, 200]),
        gap=random.choice([1.0, 60.0, 4e4, 4e7]),
        dtype="float32" if small else random.choice(["float32", "float16", "bfloat16"]),
        contiguous=random.random() < 0.7,
        seed=random.randrange(2**31),
    )


def check(
    device, *, lengths, longer, heads, d, v, window, targets, position, time, query_times, ordered, num_buckets, gap,
    dtype, contiguous, seed,
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    jagged = functools.partial(make_jagged, lengths, dtype=getattr(torch, dtype), device=device, contiguous=contiguous)
    total, n = sum(lengths), max([1, *lengths]) + longer
    x = dict(
        q=jagged((heads, d), seed=seed + 1),
        k=jagged((heads, d), seed=seed + 2),
        v=jagged((heads, v), seed=seed + 3),
        seq_offsets=make_offsets(lengths, device=device, dtype=torch.int32 if seed % 2 else torch.int64),
        max_seq_len=n,
        window_size=window,
    )
    if targets:
        x["num_targets"] = torch.tensor([int(length * (seed % 97) / 97) for length in lengths], dtype=torch.int64)
    if position:
        x["position"] = torch.randn(n, generator=generator)
    if time:
        x["time"] = torch.randn(num_buckets + 1, generator=generator)
        x["timestamps"] = make_timestamps(lengths, seed=seed, scale=gap)
        if not ordered:
            x["timestamps"] = x["timestamps"][torch.randperm(total, generator=generator)]
        if query_times:
            x["query_timestamps"] = x["timestamps"] + torch.randint(-(10**5), 10**6, (total,), generator=generator)
    x = {name: y.to(device) if isinstance(y, torch.Tensor) else y for name, y in x.items()}
    # Entries of a table's gradient are sums over pairs, which partly cancel: their error is that of the terms.
    floor = dict.fromkeys(("grad of position", "grad of time"), 1e-5 if dtype == "float32" else 4e-3)
    kernel, reference = (functools.partial(attention, backend=backend) for backend in ("triton", "reference"))
    compare_with_reference(kernel, reference, x, factor=4.0, floor=floor)


def launches():
    from hstu_sparse.dense.launch import dense_operator

    def case(dtype, d, v, *features, local_bytes=SPILLS):
        def call():
            q, values = torch.zeros(96, 2, d, dtype=dtype), torch.zeros(96, 2, v, dtype=dtype)
            offsets, times = torch.tensor([0, 40, 96]), torch.zeros(96, dtype=torch.int64)
            bias = RelativeBias(
                torch.zeros(100) if "position" in features else None,
                torch.zeros(129, dtype=torch.bfloat16) if "time" in features else None,
                *((times, times + 1) if "time" in features else (None, None)),
            )
            targets = torch.tensor([3, 4]) if "targets" in features else None
            window = 30 if "window" in features else 0
            plan = plan_for(q, values, offsets, targets, bias, window)
            arguments = (q, q, values, offsets, targets, *bias, plan.flat(), 100, window, 0.5)
            _, tables = dense_operator.forward(*arguments)
            dense_operator.backward(values, *arguments, tables)

        return Launches(f"{dtype} D={d} V={v} {features}", call, local_bytes)

    def plan_for(q, v, offsets, targets, bias, window):
        from hstu_sparse.dense.plan import make_plan, purpose_of

        purpose = purpose_of(q, v, offsets, targets, bias, 100, window)
        return make_plan(purpose, offsets, targets, *bias[2:], backward=True)

    everything = ("targets", "window", "position", "time")
    return [
        case(torch.bfloat16, 128, 128, local_bytes=SPILLS_UNBIASED),
        case(torch.bfloat16, 128, 128, "position", "time"),
        case(torch.bfloat16, 128, 128, *everything),
        case(torch.float16, 50, 50, "position"),
        case(torch.float32, 32, 32, "position", "time"),
        case(torch.bfloat16, 200, 256, "time"),
    ]
