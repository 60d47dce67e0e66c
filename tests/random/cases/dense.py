"""Dense HSTU attention. Letters: T tokens, N max_seq_len, H heads, D query/key and V value head size."""

import functools

import torch

from hstu_sparse import RelativeBias, hstu_attention
from hstu_sparse.core.mask import Mask
from tests.random.cases import Launches
from tests.random.terms import TABLES, sizes_of_terms
from tests.support.budgets import assert_within_budget, gradients, make_jagged, make_offsets, make_timestamps

# Bytes that a thread may spill, on sm_80 and sm_90, on later ones, whose kernels are not tuned, and without a bias:
# there the tile of dk and dv that spills 32 was measured 7% faster than the largest one that spills none.
SPILLS, SPILLS_LATER, SPILLS_UNBIASED = 192, 384, 32
# The sums of heads of 256 leave few registers.
SPILLS_WIDE = {
    "dense_attention_fwd_kernel": SPILLS,
    "dense_attention_bwd_dq_kernel": 320,
    "dense_attention_bwd_dkv_kernel": SPILLS,
}
# The kernels for Hopper spill numbers outside of their loops.
SPILLS_HOPPER = {
    "dense_attention_bwd_dq_hopper_kernel": 8,
    "dense_attention_bwd_dkv_hopper_kernel": 96,
}
SPILLS_HOPPER_WIDE = {
    "dense_attention_fwd_hopper_kernel": 8,
    "dense_attention_bwd_dq_hopper_kernel": 16,
}

kernel = functools.partial(hstu_attention, backend="triton")
reference = functools.partial(hstu_attention, backend="reference")


def with_tables(function):
    """Wrap `function` so that the tables of the bias are arguments, and are differentiated like any other."""

    def call(position=None, time=None, timestamps=None, query_timestamps=None, **arguments):
        return function(**arguments, bias=RelativeBias(position, time, timestamps, query_timestamps))

    return call


def compare(x, entries=True, function=None):
    """Compare the kernel (or `function`) with the reference on keyword arguments of `with_tables`.

    Compare output, gradients, and by default each entry of the tables' gradients.
    """
    half = x["q"].dtype != torch.float32
    wide = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in x.items()}
    grad = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(1)).to(x["v"])
    actual, lossy = (gradients(with_tables(f), x, grad) for f in (function or kernel, reference))
    exact = gradients(with_tables(reference), wide, grad)
    # A table's gradient is a sum over pairs, which partly cancels: its error is that of the terms.
    floor = dict.fromkeys(TABLES, 4e-3 if half else 1e-5)
    # The output and gradients of a token and head are rows, each times one number. With few such numbers, the
    # reference's error may be small by chance.
    few = 2 * torch.finfo(x["q"].dtype).eps * (1 + 3 / max(1, x["q"].shape[:2].numel()) ** 0.5)
    floor |= dict.fromkeys(("output", "grad of q", "grad of k", "grad of v"), few)
    sizes = functools.cache(
        lambda: sizes_of_terms(lambda heads, **x: with_tables(reference)(**x), wide, grad.double(), "qkv", not half)
    )
    for name in actual:
        assert_within_budget(
            name, actual[name], lossy[name], exact[name], factor=4.0, floor=floor.get(name),
            terms=lambda name=name: sizes().get(name),
        )  # fmt: skip
    if entries and ("position" in x or "time" in x):
        compare_entries(actual, exact, sizes(), 2**-6 if half else 1e-4)


def compare_entries(actual, exact, sizes, error):
    """Assert that every entry of the tables' gradients is right up to `error` times the size of its terms, `sizes`.

    An entry sums terms of either sign, one for each pair and head, whose errors add up like the terms. The size of a
    term is that of dP, since SiLU's slope may be 0.
    """
    for name in TABLES:
        if name in exact:
            off = (actual[name].double() - exact[name]).abs()
            allowed = error * sizes[name] + 1e-12
            worst = int((off / allowed).argmax())
            assert (off <= allowed).all(), (
                f"{name}[{worst}]: got {actual[name][worst]:.6e}, expected {exact[name][worst]:.6e}, to "
                f"{allowed[worst]:.1e}; {int((off > allowed).sum())} entries of {off.numel()} are off"
            )


def inputs(lengths, n, *, heads=2, d=16, v=16, features=(), window=0, dtype=torch.float32, device="cpu", **options):
    """Keyword arguments of `kernel`.

    features: some of targets, context, all (it sees all), groups, prefix, position, time, query_times.
    """
    generator = torch.Generator().manual_seed(7)
    jagged = functools.partial(make_jagged, lengths, dtype=dtype, device=device, **options)
    result = dict(
        q=jagged((heads, d), seed=1),
        k=jagged((heads, d), seed=2),
        v=jagged((heads, v), seed=3),
        seq_offsets=make_offsets(lengths, device=device),
        max_seq_len=n,
        window_size=window,
    )
    if "targets" in features:
        result["num_targets"] = torch.tensor([min(x, i % 5) for i, x in enumerate(lengths, 3)], dtype=torch.int64)
    if "context" in features:
        rest = torch.tensor(lengths) - result.get("num_targets", 0)
        result["num_context"] = (torch.arange(5, 5 + len(lengths)) * 7 % 40).minimum(rest)
        result["context_sees_all"] = "all" in features
    if "groups" in features:
        result["target_group_size"] = 2
    if "prefix" in features:
        result["full_attention_prefix"] = 9
    if "position" in features:
        result["position"] = torch.randn(n, generator=generator)
    if "time" in features:
        result["time"] = torch.randn(129, generator=generator)
        result["timestamps"] = make_timestamps(lengths)
    if "query_times" in features:
        shift = torch.randint(-(10**5), 10**6, (sum(lengths),), generator=generator)
        result["query_timestamps"] = result["timestamps"] + shift
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in result.items()}


def draw(random, small):
    most = 70 if small else random.choice([300, 1000, 3000])
    lengths = [random.choice([0, 1, random.randint(1, most)]) for _ in range(random.randint(0, 3 if small else 6))]
    sizes = [16, 25, 50, 64] if small else [16, 25, 32, 50, 64, 96, 128, 200, 256]
    case = dict(
        lengths=lengths,
        longer=random.choice([0, 0, 1, 500]),
        heads=random.randint(1, 3),
        d=random.choice(sizes),
        v=random.choice(sizes),
        window=random.choice([0, 0, 1, random.randint(1, most)]),
        targets=random.random() < 0.4,
        context=random.choice([0, 0, 0, 3, 100]),
        context_sees_all=random.random() < 0.5,
        group=random.choice([1, 1, 2, 5, 200]),
        prefix=random.choice([0, 0, 1, 70]),
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
    if not small and random.random() < 0.2:
        size, dtype = random.choice([64, 128, 256]), random.choice(["float16", "bfloat16"])
        case |= dict(hopper=True, d=size, v=size, dtype=dtype, position=False, time=False)
        case |= dict(context=0, group=1, prefix=0)
    return case


def reference_bytes(*, lengths, heads, d, v, **_):
    return 96 * heads * (sum(n * n for n in lengths) + sum(lengths) * (2 * d + v))


def check(
    device, *, lengths, longer, heads, d, v, window, targets, position, time, query_times, ordered, num_buckets, gap,
    dtype, contiguous, seed, hopper=False, context=0, context_sees_all=False, group=1, prefix=0,
):  # fmt: skip
    """Compare with the reference. hopper: run the kernels for Hopper where the device can."""
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
        x["target_group_size"] = group
    if context:
        rest = torch.tensor(lengths, dtype=torch.int64) - x.get("num_targets", 0)
        x |= dict(num_context=rest.clamp(max=context), context_sees_all=context_sees_all)
    x["full_attention_prefix"] = prefix
    if position:
        x["position"] = torch.randn(n + seed % 2 * 11, generator=generator)
    if time:
        x["time"] = torch.randn(num_buckets + 1, generator=generator)
        x["timestamps"] = make_timestamps(lengths, seed=seed, scale=gap)
        if not ordered:
            x["timestamps"] = x["timestamps"][torch.randperm(total, generator=generator)]
        if query_times:
            x["query_timestamps"] = x["timestamps"] + torch.randint(-(10**5), 10**6, (total,), generator=generator)
    if seed % 3 == 1:
        x["normalizer"] = 0.7 * n
    x = {name: y.to(device) if isinstance(y, torch.Tensor) else y for name, y in x.items()}
    from hstu_sparse.dense.configs import hopper_available

    hopper = hopper and hopper_available(torch.device(device))
    compare(x, function=functools.partial(hstu_attention, backend="hopper") if hopper else None)


def launches():
    from hstu_sparse.dense.launch import dense_operator

    def case(dtype, d, v, *features, local_bytes=SPILLS, architectures=(80, 90), hopper=False):
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
            mask = Mask(targets, None, window)
            if "context" in features:
                mask = Mask(targets, targets, window, True, 3, 2)
            plan = plan_for(q, values, offsets, mask, bias, hopper)
            arguments = (q, q, values, offsets, *mask, *bias, plan.flat(), 100, 0.5, 100.0, hopper)
            _, tables = dense_operator.forward(*arguments)
            dense_operator.backward(values, *arguments, tables)

        return Launches(f"{dtype} D={d} V={v} {features}{' hopper' * hopper}", call, local_bytes, architectures)

    def plan_for(q, v, offsets, mask, bias, hopper):
        from hstu_sparse.dense.plan import make_plan, purpose_of

        purpose = purpose_of(q, v, offsets, mask, bias, 100, hopper)
        return make_plan(purpose, offsets, mask, bias, backward=True)

    everything = ("targets", "window", "position", "time")
    later = dict(local_bytes=SPILLS_LATER, architectures=(100, 120))
    return [
        case(torch.bfloat16, 128, 128, local_bytes=SPILLS_UNBIASED, architectures=(80, 90, 100, 120)),
        case(torch.bfloat16, 128, 128, local_bytes=SPILLS_HOPPER, architectures=(90,), hopper=True),
        case(torch.float16, 64, 64, "targets", "window", local_bytes=SPILLS_HOPPER, architectures=(90,), hopper=True),
        case(torch.bfloat16, 256, 256, local_bytes=SPILLS_HOPPER_WIDE, architectures=(90,), hopper=True),
        case(torch.bfloat16, 256, 256, "position", "time", local_bytes=SPILLS_WIDE, architectures=(90,)),
        case(torch.bfloat16, 128, 128, *everything),
        case(torch.bfloat16, 64, 64, *everything, "context", local_bytes=SPILLS_LATER),
        case(torch.bfloat16, 128, 128, "position", "time", **later),
        case(torch.float16, 50, 50, "position"),
        case(torch.float32, 32, 32, "position", "time", architectures=(80, 90, 100, 120)),
        case(torch.float32, 16, 50, "time"),
    ]
