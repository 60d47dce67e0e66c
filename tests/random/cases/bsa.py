"""Block-sparse attention. Letters: H heads, D query/key and V value head size, as in hstu_sparse/bsa."""

import torch

from hstu_sparse import bsa_attention
from hstu_sparse.bias.relative import RelativeBias, pair_bias
from hstu_sparse.bsa import bsa_attention_reference
from tests.random.cases import Launches
from tests.random.terms import sizes_of_terms
from tests.support.budgets import compare_with_reference, make_jagged, make_offsets, make_timestamps

GATES = ("g_cmp", "g_slc", "g_swa")
# Bytes of local memory a thread may use for registers that do not fit. The key-major backward holds two accumulators of
# 64 x 128; with fewer rows, or more warps, nothing spills, and it is slower.
SPILLS = {
    "bsa_select_bwd_dkv_kernel": 352,
    "bsa_compress_bwd_dkv_kernel": 320,
    "bsa_query_bwd_dq_kernel": 352,  # none on Hopper
    "bsa_query_fwd_kernel": 8,
    "bsa_rank_kernel": 8,  # on sm_80
}
# Three TF32 products for one, and a sort of 64 groups by 64 scores without matrix instructions.
FP32_SPILLS = {
    "bsa_select_bwd_dkv_kernel": 1088,
    "bsa_compress_bwd_dkv_kernel": 64,
    "bsa_query_bwd_dq_kernel": 672,
    "bsa_choose_fwd_kernel": 320,
    "bsa_rank_kernel": 8,
}
# Biases keep more of a tile alive at a time.
BIAS_SPILLS = {
    "bsa_query_bwd_dq_kernel": 640,
    "bsa_select_bwd_dkv_kernel": 1088,
    "bsa_choose_fwd_kernel": 512,
    "bsa_compress_bwd_dkv_kernel": 512,
    "bsa_query_fwd_kernel": 256,
    "bsa_select_fwd_kernel": 640,  # on sm_120, where no launch was tuned; half of it on sm_100
    "bsa_select_bwd_dq_kernel": 160,  # deterministic, none on Hopper
}


def draw(random, small):
    most = 60 if small else 900
    block_size = random.choice([16, 32, 64, 128])
    lengths = [random.choice([0, 1, random.randint(1, most)]) for _ in range(random.randint(0, 2 if small else 6))]
    sizes = [1, 16, 25, 40] if small else [1, 7, 16, 25, 40, 50, 64, 96, 128, 200, 256]
    return dict(
        lengths=lengths,
        max_seq_len=max([1, *lengths]) + random.choice([0, 11]),
        heads=random.randint(1, 2 if small else 4),
        head_size=random.choice(sizes),
        value_size=random.choice(sizes),
        dtype="float32" if small else random.choice(["float32", "float16", "bfloat16"]),
        block_size=block_size,
        block_counts=random.choice([1, 2, 3, 4, 7, 16]),
        window_size=random.choice([0, random.randint(1, most)]),
        selection_group=random.choice([r for r in (1, 2, 4, 8, 16, 32, 64, 128) if r <= block_size]),
        contiguous=random.random() < 0.5,
        deterministic=random.random() < 0.2,
        position=random.random() < 0.5,
        buckets=random.choice([None, None, 1, 15, 128, 200]),
        table_dtype="float32" if small else random.choice(["float32", "bfloat16"]),
        spread=random.choice([1.0, 1e3, 4e4, 1e9]),
        seed=random.randrange(2**31),
    )


def reference_bytes(*, lengths, heads, head_size, value_size, block_size, **_):
    padded = max([1, *lengths]) + block_size
    return 96 * heads * (len(lengths) * padded**2 + sum(lengths) * (2 * head_size + value_size))


def check(
    device, *, lengths, max_seq_len, heads, head_size, value_size, dtype, block_size, block_counts, window_size,
    selection_group, contiguous=True, deterministic=False, position=False, buckets=None, table_dtype="float32",
    spread=4e4, gap=None, seed=0,
):  # fmt: skip
    """Output and gradients are the reference's for the blocks that the kernel chose, and the choice is a best one.

    buckets: of a time table, or None for none; spread: the longest gap between timestamps, which are out of order
    where it is 1e9; gap: between all timestamps, in place of random ones.
    """
    tensor_options = dict(dtype=getattr(torch, dtype), device=device, contiguous=contiguous)
    inputs = {
        name: make_jagged(lengths, (heads, size), seed=seed + i, **tensor_options)
        for i, (name, size) in enumerate((("q", head_size), ("k", head_size), ("v", value_size)))
    }
    for i, name in enumerate(GATES[: 3 if window_size else 2]):
        inputs[name] = make_jagged(lengths, (heads,), seed=seed + 5 + i, **tensor_options).sigmoid()
    # Every second entry of a wider tensor: kernels must not take metadata for contiguous.
    offsets = make_offsets(lengths, device=device, dtype=torch.int32).repeat_interleave(2)[::2]
    generator = torch.Generator().manual_seed(seed)
    for name, size in (
        ("position", max_seq_len + seed % 2 * 11 if position else 0),
        ("time", 0 if buckets is None else buckets + 1),
    ):
        if size:
            inputs[name] = torch.randn(size, generator=generator).to(device, getattr(torch, table_dtype))
    times = {}
    if buckets is not None:
        times["timestamps"] = make_timestamps(lengths, seed=seed, scale=spread)
        if gap:
            times["timestamps"] = torch.cat([torch.arange(n) * gap for n in lengths])
        if spread == 1e9:
            times["timestamps"] = times["timestamps"][torch.randperm(sum(lengths), generator=generator)]
        times["query_timestamps"] = times["timestamps"] + torch.randint(0, 1000, (sum(lengths),), generator=generator)
        times = {name: x.to(device) for name, x in times.items()}
    shape = dict(
        block_size=block_size, block_counts=block_counts, window_size=window_size, selection_group=selection_group
    )
    if seed % 3 == 1:
        shape["normalizer"] = 0.7 * max_seq_len
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        agree(inputs, offsets, max_seq_len, shape, times)
    finally:
        torch.use_deterministic_algorithms(before)


def agree(inputs, offsets, max_seq_len, shape, times=None):
    """Raise AssertionError unless the kernels do what the reference does, up to the rounding of close choices."""
    scale, choices = inputs["q"].shape[-1] ** -0.5, []

    def kernel(q, k, v, g_cmp, g_slc, g_swa=None, position=None, time=None):
        options = shape | dict(bias=RelativeBias(position, time, **(times or {})), backend="triton")
        gates = (g_cmp, g_slc, g_swa)
        out, indices = bsa_attention(q, k, v, offsets, max_seq_len, gates, **options, return_block_indices=True)
        check_choice(indices, inputs, offsets, shape, scale, times)
        choices.append(indices)
        return out

    def reference(q, k, v, g_cmp, g_slc, g_swa=None, position=None, time=None, chosen=None):
        bias = RelativeBias(position, time, **{name: x.to(q.device) for name, x in (times or {}).items()})
        arguments = (q, k, v, offsets.to(q.device), max_seq_len, (g_cmp, g_slc, g_swa))
        chosen = choices[0] if chosen is None else chosen
        return bsa_attention_reference(*arguments, **shape, bias=bias, scale=scale, block_indices=chosen)[0]

    def terms(grad):
        x = {name: x.detach().cpu().double() for name, x in inputs.items()}
        by_head = [name for name in x if name not in ("position", "time")]
        return sizes_of_terms(
            lambda heads, **x: reference(**x, chosen=choices[0][:, heads].cpu()), x, grad.cpu().double(), by_head, fp32
        )

    # fp32: three tf32 products stand for one of fp32, so the floor is a few roundings higher. A table's entry is a sum
    # of up to millions of terms, which are added in fp32.
    fp32 = inputs["q"].dtype == torch.float32
    # The output and gradients of a token and head are rows, each times one number. With few such numbers, the
    # reference's error may be small by chance.
    few = 1 + 3 / max(1, inputs["q"].shape[:2].numel()) ** 0.5
    floor = dict.fromkeys(["output", *(f"grad of {name}" for name in inputs)], few * 8 * torch.finfo(torch.float32).eps)
    floor = {name: x for name, x in floor.items() if fp32 or inputs.get(name[8:], inputs["q"]).dtype == torch.float32}
    # Kernels of 16-bit inputs compute sigmoids with tanh.approx, with errors of up to 2^-11 (twice the floor, less than
    # a table's budget). Like the terms, the errors have either sign, so a sum has about the relative error of a term.
    # Mean keys and values are rounded to the inputs' dtype, by up to half an eps; the reference has them in fp32.
    least = 0.0 if fp32 else max(2**-12, torch.finfo(inputs["q"].dtype).eps / 4)
    floor |= {
        f"grad of {n}": max(least, 64 * torch.finfo(inputs[n].dtype).eps) for n in ("position", "time") if n in inputs
    }
    compare_with_reference(kernel, reference, inputs, factor=3, floor=floor, terms=terms)


def check_choice(indices, inputs, offsets, shape, scale, times=None):
    """Check that indices [T, H, S] hold each token's block and the past blocks with the best scores, up to rounding."""
    block_size, most, group = shape["block_size"], shape["block_counts"] - 1, shape["selection_group"]
    q, k, device = inputs["q"].double(), inputs["k"].double(), indices.device
    for begin, end in zip(offsets.tolist(), offsets.tolist()[1:]):
        t = torch.arange(end - begin, device=device)
        first = t // group * group
        own_block = first // block_size  # [n]
        count = own_block.clamp(max=most)
        rows = indices[begin:end].long()  # [n, H, S]
        place = torch.arange(most + 1, device=device)
        assert (rows.gather(2, count[:, None, None].expand(-1, rows.shape[1], 1))[..., 0] == own_block[:, None]).all()
        used = (place <= count[:, None])[:, None]
        assert ((rows >= 0) == used).all()
        assert ((rows[:, :, 1:] > rows[:, :, :-1]) | ~used[:, :, 1:]).all()
        assert torch.equal(rows, rows[first])
        blocks = (end - begin) // block_size
        if not blocks or not most:
            continue
        kbar = k[begin : begin + blocks * block_size].unflatten(0, (blocks, block_size)).mean(1)  # [M, H, D]
        middle = torch.arange(blocks, device=device) * block_size + block_size // 2
        tables = RelativeBias(*(inputs[n].double() if n in inputs else None for n in ("position", "time")))
        query_times = times["query_timestamps"][begin:end][first][:, None] if times else None
        key_times = times["timestamps"][begin:end][middle] if times else None
        added = pair_bias(tables, first[:, None] - middle, query_times, key_times)
        added = added[:, None] if isinstance(added, torch.Tensor) else added
        scores = torch.nn.functional.silu(scale * torch.einsum("nhd,mhd->nhm", q[begin:end][first], kbar) + added)
        scores = scores.masked_fill(torch.arange(blocks, device=device) >= own_block[:, None, None], -torch.inf)
        best = scores.topk(min(most, blocks), -1).values
        chosen = torch.where(place < count[:, None, None], rows, blocks)[..., :most]
        scores = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
        got = scores.gather(2, chosen).sort(-1, descending=True).values[..., : best.shape[-1]]
        error = torch.where(best.isinf() & got.isinf(), 0, best - got).abs().max()
        finite = scores.masked_fill(scores.isinf(), 0)
        assert error <= 2e-5 * finite.abs().max(), f"a better block by {error:.2e}"


def launches():
    from hstu_sparse.bsa import launch, plan

    def case(
        group, architectures, dtype=torch.bfloat16, size=128, block_size=64, window=0, deterministic=False, bias=False
    ):
        def call():
            q, grad = (torch.zeros(256, 2, size, dtype=dtype) for _ in range(2))
            gate, offsets = torch.zeros(256, 2, dtype=dtype), torch.tensor([0, 256])
            times = torch.zeros(256, dtype=torch.int64)
            tables = RelativeBias(torch.zeros(256), torch.zeros(129), times, times) if bias else RelativeBias()
            tensor_options = plan.make_plan(plan.purpose_of(256, offsets, 256, block_size, tables), offsets, tables)
            options = (block_size, 16, window, group, 0.1, 256.0, deterministic)
            arguments = (
                q,
                q,
                q,
                offsets,
                256,
                gate,
                gate,
                gate if window else None,
                *tables[:2],
                tensor_options.flat(),
                *options,
            )
            torch.use_deterministic_algorithms(deterministic)
            out = launch.launch_forward(*arguments)
            launch.launch_backward(grad, *arguments, *out[1:])
            torch.use_deterministic_algorithms(False)

        label = f"{dtype} {size} BS={block_size} r={group} W={window} deterministic={deterministic} bias={bias}"
        spills = FP32_SPILLS if dtype == torch.float32 else SPILLS
        return Launches(label, call, spills | BIAS_SPILLS if bias else spills, architectures)

    # Compiling takes long: every kernel for every architecture, every option for one.
    return [
        case(2, (90,), window=100),
        case(64, (80, 90, 100, 120)),
        case(2, (80,), deterministic=True),
        case(64, (80,), torch.float32, size=64, window=100),
        case(2, (90,), torch.float32, size=64),
        case(32, (90,), torch.float16, size=64, block_size=32),
        case(64, (90,), bias=True, window=100),
        case(2, (100,), bias=True),
        case(2, (120,), bias=True, deterministic=True),
        case(64, (80,), torch.float32, size=64, bias=True),
    ]
