"""RotateKV. Letters: H heads, D query/key and V value head size, G heads of a head group."""

import torch
from torch.utils.checkpoint import checkpoint

from hstu_sparse import (
    RelativeBias,
    hstu_attention,
    rotatekv_attention,
    rotatekv_compress,
    rotatekv_decompress,
    rotatekv_round_trip,
    rotatekv_self_attention,
)
from hstu_sparse.bias.relative import check_bias
from hstu_sparse.cache import store
from hstu_sparse.cache.paged.reference import Scoring
from hstu_sparse.cache.rotatekv import reference
from hstu_sparse.compat import mustafar_attention_with_rope
from tests.random.cases import Launches
from tests.random.cases.paged import launched_with
from tests.random.terms import FEW_TOKENS, TABLES
from tests.support.budgets import (
    assert_within_budget,
    compare_with_reference,
    make_jagged,
    make_offsets,
    make_timestamps,
)

# Bytes of local memory that a thread may use for registers that do not fit. To rotate a key back, all channels of its
# head group are in registers; with one head at a time nothing spills, but the work is a third more.
SPILLS = {
    "paged_attention_fwd_kernel": 704,
    "rotatekv_round_trip_kernel": 704,
    "write_codes_kernel": 128,
    "rotary_kernel": 56,
}


def draw(random, small):
    most = 100 if small else 2000
    group = random.choice([1, 2, 4])
    channels = random.choice([16, 32, 64, 128] if small else [16, 64, 128, 256, 512, 1024])
    size = max(4, min(channels // group, 128 if small else 256))
    lengths = [random.choice([0, 1, random.randint(1, most)]) for _ in range(random.randint(1, 2 if small else 8))]
    return dict(
        lengths=lengths,
        query_lengths=[random.choice([0, 1, random.randint(1, 5 if small else 150)]) for _ in lengths],
        max_seq_len=max([1, *lengths]) + random.choice([0, 11]),
        groups=random.randint(1, 2),
        head_size=max(size, 16 // group),
        value_size=random.choice([1, 16, 24, 32, 40, 64, 96] if small else [1, 16, 40, 64, 96, 128, 200, 256]),
        dtype=random.choice(["float32", "float16"] if small else ["float32", "float16", "bfloat16"]),
        bits=random.choice([2, 3, 4, 8]),
        head_group=group,
        quant_group=random.choice([16, 32, 64, 64, 128]),
        sparsity=random.choice([0.0, 0.0, random.uniform(0.05, 0.9)]),
        sink_tokens=random.choice([0, 0, random.randint(1, 90)]),
        clip=random.choice([1.0, 1.0, random.uniform(0.1, 1.0)]),
        ordered=random.random() < 0.3,
        softmax=random.random() < 0.5,
        rope=random.random() < 0.4,
        position=random.random() < 0.4,
        timed=random.random() < 0.4,
        splits=random.choice([None, 1, random.randint(2, 5)]),
        contiguous=random.random() < 0.5,
        seed=random.randrange(2**31),
    )


def reference_bytes(*, lengths, query_lengths, groups, head_group, head_size, value_size, **_):
    pairs = len(lengths) * max([1, *lengths]) * max([1, *query_lengths])
    return 112 * groups * head_group * (pairs + sum(lengths) * (head_size + value_size))


def check(
    device, *, lengths, query_lengths, max_seq_len, groups, head_size, value_size, dtype, bits=2, head_group=2,
    quant_group=64, sparsity=0.0, sink_tokens=0, clip=1.0, ordered=False, softmax=False, rope=False, position=False,
    timed=False, splits=None, contiguous=True, seed=0,
):  # fmt: skip
    """Check the kernels' cache against the options, and decompression, round trip and attention on it."""
    heads, dtype = groups * head_group, getattr(torch, dtype)
    tensor_options = dict(dtype=dtype, device=device, contiguous=contiguous)
    k = make_jagged(lengths, (heads, head_size), seed=seed, **tensor_options)
    v = make_jagged(lengths, (heads, value_size), seed=seed + 1, **tensor_options)
    q = make_jagged(query_lengths, (heads, head_size), seed=seed + 2, **tensor_options)
    # Every second entry of a wider tensor: kernels must not take metadata for contiguous.
    offsets, q_offsets = (make_offsets(x, device=device).repeat_interleave(2)[::2] for x in (lengths, query_lengths))
    order = None
    if ordered:
        generator = torch.Generator().manual_seed(seed)
        order = torch.stack([torch.randperm(head_size * head_group, generator=generator) for _ in range(groups)])
        order = order.to(device)
    options = dict(
        bits=bits, head_group=head_group, quant_group=quant_group, sparsity=sparsity, sink_tokens=sink_tokens,
        clip=clip, channel_order=order,
    )  # fmt: skip
    if seed % 4 == 1:
        check_self_attention(
            device, lengths=lengths, max_seq_len=max_seq_len, groups=groups, head_size=head_size,
            value_size=value_size, dtype=str(dtype).removeprefix("torch."), position=position, timed=timed,
            contiguous=contiguous, seed=seed, **options,
        )  # fmt: skip
    cache = rotatekv_compress(k, v, offsets, **options, backend="triton")
    codes_are_right(cache, k, v)

    restored = rotatekv_decompress(cache, backend="triton")
    lossy, exact = (reference.decompress_reference(cache, wide) for wide in (dtype, torch.float64))
    again = rotatekv_round_trip(k, v, offsets, **options, backend="triton")
    for name, *got, low, high in zip("kv", restored, again, lossy, exact):
        for way, x in zip(("decompress", "round trip"), got):
            most = first_channels(cache, high) if name == "k" and dtype == torch.float32 else None
            assert_within_budget(f"{way} {name}", x, low, high, factor=4.0, terms=lambda most=most: most)

    bias = RelativeBias()
    if position or timed:
        tables = (
            make_jagged([max_seq_len + 3], (), device=device, seed=seed + 3) if position else None,
            make_jagged([129], (), device=device, seed=seed + 4) if timed else None,
            make_timestamps(lengths, device=device, seed=seed),
            make_timestamps(query_lengths, device=device, seed=seed + 1) + 100_000,
        )
        bias = RelativeBias(*(x if x is None else x.repeat_interleave(2)[::2] for x in tables))
    call = dict(bias=bias, rope_base=10000.0 if rope else None, scale=head_size**-0.5)
    settings = call | dict(activation="softmax" if softmax else "silu")
    normalizer = 0.7 * max_seq_len if seed % 3 == 1 else float(max_seq_len)
    if not softmax:
        settings["normalizer"] = normalizer
    reference_options = dict(
        call, bias=check_bias(bias, max_seq_len + 1, sum(lengths), q.device, query_tokens=sum(query_lengths))
    )

    def by_reference(wide, change=lambda x: x, **more):
        def given_as(x):
            return change(x.to(wide)) if x is not None and x.is_floating_point() else x

        queries, keys, values = map(given_as, (q, *reference.decompress_reference(cache, wide)))
        changed = settings | more | dict(bias=RelativeBias(*map(given_as, reference_options["bias"])))
        return reference.attention_reference(queries, q_offsets, keys, values, offsets, **changed)

    def sizes():  # of few queries: what output and log-sum-exp were if no product cancelled
        few = sum(query_lengths) <= FEW_TOKENS and dtype == torch.float32
        return by_reference(torch.float64, torch.abs, rope_base=None) if few else exact

    lossy, exact = by_reference(dtype), by_reference(torch.float64)
    public = settings | dict(return_lse=softmax, backend="triton")
    with launched_with(splits):
        ways = {
            "fused": rotatekv_attention(q, q_offsets, cache, max_seq_len, **public),
            "two stages": mustafar_attention_with_rope(q, q_offsets, *restored, offsets, max_seq_len, **public),
        }
    for way, got in ways.items():
        out, lse = got if isinstance(got, tuple) else (got, None)
        assert_within_budget(way, out, lossy[0], exact[0], factor=4.0, terms=lambda: sizes()[0])
        if softmax:
            finite = exact[1].isfinite()
            assert torch.equal(finite, lse.isfinite())
            assert_within_budget(
                f"log-sum-exp, {way}", lse[finite], lossy[1][finite].float(), exact[1][finite], factor=4.0,
                floor=2 * torch.finfo(dtype).eps, terms=lambda finite=finite: sizes()[1][finite],
            )  # fmt: skip


def check_self_attention(
    device, *, lengths, max_seq_len, groups, head_size, value_size, dtype, head_group=2, position=False, timed=False,
    contiguous=True, seed=0, **options,
):  # fmt: skip
    """Check the kernels' `rotatekv_self_attention` and every gradient for the kernels' codes."""
    dtype, options = getattr(torch, dtype), options | dict(head_group=head_group)
    tensor_options = dict(dtype=dtype, device=device, contiguous=contiguous)
    sizes = dict(q=head_size, k=head_size, v=value_size)
    tensors = {
        name: make_jagged(lengths, (groups * head_group, size), seed=seed + i, **tensor_options)
        for i, (name, size) in enumerate(sizes.items())
    }
    offsets = make_offsets(lengths, device=device)
    times = make_timestamps(lengths, device=device, seed=seed)
    tables = dict(
        position=make_jagged([max_seq_len + 3], (), device=device, seed=seed + 3) if position else None,
        time=make_jagged([129], (), device=device, seed=seed + 4) if timed else None,
    )
    factors = dict(scale=0.5 * head_size**-0.5, normalizer=0.7 * max_seq_len)
    coded = rotatekv_round_trip(tensors["k"], tensors["v"], offsets, **options, backend="triton")

    def biased(position, time):
        return RelativeBias(position, time, times, times + 1000) if timed else RelativeBias(position)

    def kernel(q, k, v, position, time):
        arguments = factors | options | dict(bias=biased(position, time), backend="triton")
        return rotatekv_self_attention(q, k, v, offsets, max_seq_len, **arguments)

    def dense(q, k, v, position, time):
        arguments = factors | dict(bias=biased(position, time), backend="reference")
        return hstu_attention(q, k, v, offsets, max_seq_len, **arguments)

    def by_reference(q, k, v, position, time):
        bias = biased(position, time)
        straight = [y.to(q) + (x - x.detach()) for x, y in zip((k, v), coded, strict=True)]
        self_term = reference.self_term(q, k, v, *straight, bias, *factors.values())
        heads = zip(*(x.split(1, dim=1) for x in (q, *straight)), strict=True)
        # Scores of one head at a time, computed again in backward: the greatest case is of 9,000 tokens.
        out = [checkpoint(dense, *head, position, time, use_reentrant=False) for head in heads]
        return torch.cat(out, dim=1) + self_term

    # Most of a table's gradient is dense attention's: the floors are those of its own check (cases/dense.py).
    floor = dict.fromkeys(TABLES, 1e-5 if dtype == torch.float32 else 4e-3)
    compare_with_reference(kernel, by_reference, tensors | tables, factor=4.0, floor=floor)


def first_channels(cache, k):
    """Return the sizes of the terms of keys [T, H, D]; the zeros of codes all add to the first of each 64 channels."""
    channel = torch.arange(k.shape[1] * k.shape[2], device=k.device).view(k.shape[1:])
    # A group's zero is about twice as large as a channel, and the transform adds as many as there are channels.
    zeros = 2 * (k.square().mean() * cache.format.keys.channels).sqrt()
    return torch.where(channel % min(64, cache.format.keys.block) == 0, zeros, k.abs())


def codes_are_right(cache, k, v):
    """Assert that every code is the nearest for its stored scale and zero, and that the greatest numbers are kept."""
    format = cache.format
    sequence, position = cache.tokens()
    packed = position >= format.sink_tokens
    sinks = cache.pages[sequence[~packed], 0].long(), position[~packed]
    for name, x in (("sink_k", k), ("sink_v", v)) if format.sink_tokens else ():
        assert torch.equal(cache.tensors[name][sinks], x[~packed])
    if not packed.any():
        return
    levels = 2**format.bits - 1
    where = store.locate_tokens(format, cache.pages, sequence[packed], position[packed])
    codes = store.read_codes(cache.tensors, format, *where)
    rotated = store.rotate(k[packed].double(), format.head_group, cache.channel_order)
    plain = store.grouped(v[packed].double(), format.head_group)
    for name, coded, x, side in (("k", codes[0], rotated, format.keys), ("v", codes[1], plain, format.values)):
        real = torch.ones_like(x, dtype=torch.bool)
        if coded.mask is not None:
            real = coded.mask
            assert (real.sum(-1) == format.num_kept).all()
            least = x.abs().masked_fill(~real, float("inf")).amin(-1)
            most_dropped = x.abs().masked_fill(real, 0).amax(-1)
            assert (most_dropped <= least * (1 + 1e-5) + 1e-6).all(), f"{name}: not the greatest are kept"
        padding = side.groups * side.group - side.channels
        grouped = torch.nn.functional.pad(x, (0, padding)).unflatten(-1, (side.groups, side.group))
        real = torch.nn.functional.pad(real, (0, padding)).view(grouped.shape)
        code = coded.codes.view(grouped.shape)
        assert (code[~real] == 0).all()
        least = grouped.masked_fill(~real, float("inf")).amin(-1)
        most = grouped.masked_fill(~real, float("-inf")).amax(-1)
        margin = (most - least) * format.inset
        least, most = least + margin, most - margin
        # The rounding errors of fp32, and the absolute one of fp16 for its smallest numbers.
        some, lost = real.any(-1), 1e-6 * grouped.abs().amax(-1) + 2**-24
        for what, got, true in (("zero", coded.zero, least), ("scale", coded.scale, (most - least) / levels)):
            error, allowed = (got.double() - true).abs(), true.abs() * 2**-11 * 1.01 + lost
            assert (error[some] <= allowed[some]).all(), f"{name}: {what}"
            assert (got[~some] == 0).all()
        scale, zero = coded.scale.double()[..., None], coded.zero.double()[..., None]
        ideal = torch.where(scale > 0, (grouped - zero) / scale, 0).clamp(0, levels)
        allowed = 0.5 + 1e-5 * levels + torch.where(scale > 0, lost[..., None] / scale, 0)
        excess = (((code - ideal).abs() - allowed) * real).max().item()
        assert excess <= 0, f"{name}: a code is {excess} more than half a step from the number that it stands for"


def launches():
    from hstu_sparse import PageFormat, PagePool, RotateKVCache
    from hstu_sparse.cache.launch import decompress, round_trip_operator, write_pages
    from hstu_sparse.cache.rotatekv.hadamard import hadamard_operator
    from hstu_sparse.cache.rotatekv.launch import attend_to_cache, attend_to_rows
    from hstu_sparse.cache.rotatekv.self_term import self_term_operator

    def case(what, dtype=torch.bfloat16, heads=8, size=128, value_size=128, queries=1, ordered=False, splits=None,
             attend=None, local_bytes=SPILLS, architectures=(80, 90, 100, 120), **options):  # fmt: skip
        def call():
            format = PageFormat(heads, size, value_size, dtype, **{"bits": 2} | options)
            offsets = make_offsets((100,))
            order = torch.arange(format.keys.channels).expand(format.head_groups, -1).contiguous() if ordered else None
            pool = PagePool(format, 10, num_sequences=1, timed=False)
            cache = RotateKVCache(pool, [pool.reserve([], 100)], [100], order)
            k, v = (torch.zeros(100, heads, x, dtype=dtype) for x in (size, value_size))
            q = torch.zeros(queries, heads, size, dtype=dtype)
            if what == "compress":
                write_pages(cache.tensors, format, k, v, offsets, cache.pages, torch.zeros(1, dtype=torch.int64), order)
            elif what == "decompress":
                decompress(cache)
            elif what == "round trip":
                o = cache.format
                round_trip_operator.forward(
                    k, v, offsets, order, o.bits, o.head_group, o.quant_group, o.sparsity, o.sink_tokens, o.clip
                )
            else:
                settings = dict(softmax=False, scale=0.1, normalizer=200.0, bias=RelativeBias())
                rest = 200, Scoring(**settings | (attend or {}))
                with launched_with(splits):
                    if what == "plain":
                        attend_to_rows(q, make_offsets((queries,)), (k, v, offsets), *rest)
                    else:
                        attend_to_cache(q, make_offsets((queries,)), cache, *rest)

        label = f"{what} {dtype} H={heads} D={size} V={value_size} Tq={queries} {options} {list(attend or [])}"
        return Launches(label, call, local_bytes, architectures)

    zeros = torch.zeros(100, dtype=torch.int64)
    biased = dict(
        softmax=True, return_lse=True, bias=RelativeBias(torch.zeros(201), torch.zeros(129), zeros, zeros[:1])
    )
    small = dict(heads=2, size=32, value_size=32)
    one = dict(heads=1, head_group=1)
    lse, position = dict(softmax=True, return_lse=True), dict(bias=RelativeBias(torch.zeros(201)))
    rope = dict(rope_base=10000.0, bias=biased["bias"])

    def self_term(dtype, size, value_size, bias, local_bytes=0):
        def call():
            q, k, v = (torch.zeros(100, 4, x, dtype=dtype) for x in (size, size, value_size))
            arguments = q, k, v, k, v, *bias, 0.1, 200.0
            self_term_operator.forward(*arguments)
            self_term_operator.backward(v, *arguments)

        return Launches(f"self term {dtype} D={size} V={value_size} {bias[0] is not None}", call, local_bytes)

    def transform(n, dtype, local_bytes=0):
        call = lambda: hadamard_operator.forward(torch.zeros(8, n, dtype=dtype))
        return Launches(f"hadamard {n} {dtype}", call, local_bytes=local_bytes)

    return [
        transform(4096, torch.bfloat16),
        transform(64, torch.float32, local_bytes=256),
        # Three TF32 products for one, of a row that no program can share; worst on Blackwell.
        transform(4096, torch.float32, local_bytes=3328),
        case("compress"),
        case("compress", bits=3, **small),
        case("compress", sparsity=0.7, sink_tokens=4, **small),
        case("decompress"),
        case("decompress", sparsity=0.7, **small),
        case("round trip"),
        case("round trip", dtype=torch.float32, **small),
        case("round trip", heads=4, size=64, value_size=64),
        self_term(torch.bfloat16, 64, 64, RelativeBias(torch.zeros(201), torch.zeros(129), zeros, zeros)),
        self_term(torch.float32, 25, 40, RelativeBias(), local_bytes=16),
        case("attention"),
        case("attention", splits=3, attend=dict(softmax=True)),
        case("attention", attend=biased, **small),
        case("attention", bits=4, sink_tokens=4, **small),
        case("attention", attend=dict(rope_base=10000.0), architectures=(90,)),
        case("attention", queries=128, attend=dict(softmax=True)),
        case("attention", queries=16, bits=4, dtype=torch.float16, attend=biased, architectures=(90,)),
        case("attention", queries=128, attend=dict(rope_base=10000.0), architectures=(90,)),
        case("attention", sparsity=0.7, **small),
        case("attention", ordered=True, attend=dict(rope_base=10000.0), dtype=torch.float16, **small),
        case(
            "attention",
            ordered=True,
            attend=dict(rope_base=10000.0),
            dtype=torch.float32,
            heads=4,
            architectures=(80, 90),
        ),
        # Registers by the thousand that do not fit, of which ptxas has loaded one again before it was stored.
        case(
            "attention",
            bits=3,
            sparsity=0.8105972604593938,
            head_group=4,
            quant_group=128,
            ordered=True,
            dtype=torch.float16,
            heads=4,
            value_size=96,
            queries=40,
            splits=1,
            local_bytes=5632,
            architectures=(90,),
            attend=dict(softmax=True, return_lse=True, rope_base=10000.0, bias=RelativeBias(torch.zeros(201))),
        ),
        # Tiles with rows under 128 bytes: with 64 queries in a program, ptxas 12.8 of Triton 3.6 makes a wrong
        # descriptor in each of these.
        *(
            case("attention", queries=40, attend=attend, architectures=(90,), **options)
            for attend, options in (
                (position, one | dict(dtype=torch.float16, size=64, value_size=16, bits=4, sparsity=0.81)),
                (position, dict(heads=4, value_size=64, head_group=4, sparsity=0.81)),
                (lse, dict(heads=2, size=64, value_size=16, bits=3, quant_group=128, sparsity=0.81, ordered=True)),
                (rope, one | dict(size=32, value_size=16, bits=8, quant_group=32, sink_tokens=3)),
                (rope, one | dict(size=64, value_size=16, quant_group=128, sparsity=0.7)),
                (lse, dict(heads=4, size=16, value_size=40, head_group=4, bits=8, quant_group=32, sparsity=0.81)),
            )
        ),
        case("plain"),
        case("plain", attend=dict(rope_base=10000.0), queries=128),
    ]
