"""Flash attention. Letters: H heads of queries, Hkv of keys, D query/key and V value head size."""

import functools

import torch

from hstu_sparse.core.mask import Mask
from hstu_sparse.flash.api import flash_attention
from tests.random.cases import Launches
from tests.random.terms import sizes_under_softmax
from tests.support.budgets import assert_within_budget, gradients, make_jagged, make_offsets


def draw(random, small):
    most, masked = 70 if small else 2000, random.random() < 0.3
    sequences = random.randint(0, 3 if small else 12)
    heads = random.choice([1, 2, 4] if small else [1, 2, 3, 8])
    sizes = [1, 16, 24, 32] if small else [16, 25, 50, 64, 80, 128, 192, 256]
    return dict(
        lengths=[random.choice([0, 1, *(random.randint(2, most) for _ in range(4))]) for _ in range(sequences)],
        key_lengths=[random.randint(0, most) for _ in range(sequences)]
        if random.random() < 0.3 and not masked
        else None,
        heads=heads,
        kv_heads=random.choice([h for h in range(1, heads + 1) if heads % h == 0]),
        size=random.choice(sizes),
        value_size=random.choice(sizes),
        dtype="float32" if small else random.choice(["float32", "float16", "bfloat16"]),
        causal=masked or random.random() < 0.6,
        window=random.choice([(-1, -1), (-1, -1), (random.randint(0, most), random.randint(-1, most))]),
        alibi=random.choice([None, None, "heads", "sequences"]),
        dropout=random.choice([0.0, 0.0, 0.25]),
        contiguous=random.random() < 0.5,
        seed=random.randrange(2**31),
        mask=dict(
            targets=random.random() < 0.5,
            context=random.choice([0, 3, 100]),
            context_sees_all=random.random() < 0.5,
            target_group_size=random.choice([1, 2, 5]),
            full_attention_prefix=random.choice([0, 1, 70]),
        )
        if masked
        else None,
    )


def reference_bytes(*, lengths, key_lengths, heads, size, value_size, **_):
    pairs = len(lengths) * max([1, *lengths]) * max([1, *(key_lengths or lengths)])
    return 96 * heads * (pairs + sum(lengths + (key_lengths or [])) * (size + value_size))


def problem(
    device, lengths, key_lengths, heads, kv_heads, size, value_size, dtype, causal, window, alibi, dropout, contiguous,
    seed, mask=None,
):  # fmt: skip
    """Return (q, k, v by name, the other arguments)."""
    dtype = getattr(torch, dtype)
    shapes = {
        "q": (lengths, heads, size),
        "k": (lengths if key_lengths is None else key_lengths, kv_heads, size),
        "v": (lengths if key_lengths is None else key_lengths, kv_heads, value_size),
    }
    inputs = {
        name: make_jagged(n, inner, dtype=dtype, device=device, seed=seed + i, contiguous=contiguous)
        for i, (name, (n, *inner)) in enumerate(shapes.items())
    }
    slopes = None
    if alibi:
        slopes = torch.rand((len(lengths), heads), generator=torch.Generator().manual_seed(seed)).to(device)
        slopes = slopes if alibi == "sequences" or not lengths else slopes[0]
        slopes = slopes if slopes.shape[0] else None
    options = {}
    if mask:
        options = dict(full_attention_prefix=mask["full_attention_prefix"])
        rest = torch.tensor(lengths, dtype=torch.int64)
        if mask["targets"]:
            targets = rest * (seed % 7) // 8
            options |= dict(num_targets=targets.to(device), target_group_size=mask["target_group_size"])
            rest = rest - targets
        if mask["context"]:
            context = rest.clamp(max=mask["context"]).to(device)
            options |= dict(num_context=context, context_sees_all=mask["context_sees_all"])
    return inputs, dict(
        **options,
        seq_offsets=make_offsets(lengths, device=device),
        k_offsets=None if key_lengths is None else make_offsets(key_lengths, device=device, dtype=torch.int32),
        causal=causal,
        window_size=window,
        alibi_slopes=slopes,
        dropout=dropout,
        seed=torch.tensor([seed], device=device) if dropout else None,
    )


def check(device, backend="triton", **case):
    inputs, options = problem(device, **case)
    kernel, reference = (functools.partial(flash_attention, **options, backend=b) for b in (backend, "reference"))
    wide = {name: x.double() for name, x in inputs.items()}
    grad = torch.randn(
        inputs["q"].shape[0], case["heads"], case["value_size"], generator=torch.Generator().manual_seed(1)
    )
    actual, lossy = (gradients(function, inputs, grad.to(inputs["q"])) for function in (kernel, reference))
    exact = gradients(reference, wide, grad.to(wide["q"]))
    # Weights are computed from a log-sum-exp in fp32, so that their relative error is its size times eps / 2.
    fp32 = case["dtype"] == "float32"
    floor = 4 * torch.finfo(torch.float32).eps if fp32 else None
    scale = case["size"] ** -0.5 / (1 - case["dropout"])
    sizes = sizes_under_softmax(**inputs, grad=grad.to(inputs["q"]), scale=scale)
    for name in actual:
        triple, terms = (actual[name], lossy[name], exact[name]), sizes.get(name)
        if name in ("grad of q", "grad of k"):
            # For queries that see one key, this is the difference of two equal numbers of this size: 0 except for their
            # rounding. In fp32, one of the numbers is a sum of three TF32 products.
            size = (case["value_size"] / case["size"]) ** 0.5
            none = (exact[name].abs() < 1e-6 * size).all(-1)
            most = actual[name][none].abs().max().item() if none.any() else 0.0
            allowed = (64 if fp32 else 16) * torch.finfo(actual[name].dtype).eps * size
            assert most <= allowed, f"{name}: {most:.2e} in place of 0, {allowed:.2e} is allowed"
            triple = [x[~none] for x in triple]
        assert_within_budget(name, *triple, factor=4.0, floor=floor, terms=lambda terms=terms: terms)


def launches():
    from hstu_sparse.flash.launch import Launch
    from hstu_sparse.flash.reference import Layout, Options

    def case(
        size, dtype, *, group=1, left=-1, right=-1, pieces=1, add=False, alibi=False, dropout=0.0, v=None, many=False,
        masked=False, **more,
    ):  # fmt: skip
        def call():
            q = torch.zeros(64, 2, size, dtype=dtype)
            k = torch.zeros(64, 2 // group, size, dtype=dtype)
            value = torch.zeros(64, 2 // group, v or size, dtype=dtype)
            offsets = torch.tensor([0, 32, 64][-1 - pieces :])
            starts = torch.zeros(pieces, dtype=torch.int64) if pieces > 1 else None
            layout = Layout(offsets, offsets, starts, starts, pieces)
            seed = torch.zeros(1, dtype=torch.int64) if dropout else None
            numbers = torch.zeros(pieces, dtype=torch.int32)
            mask = Mask(numbers, numbers, left + 1, True, 2, 5) if masked else Mask()
            options = Options(0.1, left, right, torch.ones(2) if alibi else None, dropout, seed, mask)
            launch = Launch(q, k, value, layout, options)
            pad_d, pad_v, dtype_, features, arch = launch.chosen
            launch.chosen = pad_d, pad_v, dtype_, features | ({"many"} if many else set()), arch
            out, lse = torch.zeros(64, 2, v or size, dtype=dtype), torch.zeros(2, 64)
            launch.forward(out, lse, before=out.float() if add else None)
            rows = launch.rows(out, out, lse)
            launch.dq(out, rows, q, before=q.float() if add else None)
            launch.dkv(out, rows, k, value, sums=(k.float(), value.float()) if add else None)

        label = (
            f"{dtype} D={size} G={group} window={left, right} P={pieces} add={add} alibi={alibi} {dropout=} {masked=}"
        )
        return Launches(label, call, **more)

    bf16, dkv = torch.bfloat16, "flash_attention_bwd_dkv_kernel"
    dq, fwd = "flash_attention_bwd_dq_kernel", "flash_attention_fwd_kernel"
    # Tiles of 64 x 64 spill a few bytes, but take fewer instructions per pair than smaller tiles that do not spill.
    # Forward and dq spill on sm_120, for which nothing is tuned, and in two cases a few bytes elsewhere.
    few = {dkv: 32, dq: 32, fwd: 48}
    return [
        case(128, bf16, right=0, local_bytes=few),
        case(128, bf16, right=0, many=True, architectures=(90,), local_bytes={dkv: 32}),
        case(128, bf16, right=0, pieces=2, add=True, many=True, architectures=(90,), local_bytes={dkv: 96, fwd: 8}),
        case(256, bf16, right=0, v=192, architectures=(90,), local_bytes={dkv: 96}),
        case(64, bf16, left=100, right=0, masked=True, architectures=(80, 90), local_bytes=96),
        case(64, torch.float16, left=100, right=0, group=2, architectures=(80,), local_bytes={dq: 16}),
        case(50, bf16, alibi=True, dropout=0.1, architectures=(80,)),
        case(64, torch.float32, right=0, dropout=0.1, architectures=(80, 90), local_bytes=40),
    ]  # fmt: skip
