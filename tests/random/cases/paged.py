"""Paged attention. Letters: H heads, D query/key and V value head size, G heads of a head group."""

import contextlib

import torch

from hstu_sparse import PageFormat, PagePool, RelativeBias, paged_attention
from hstu_sparse.bias.relative import check_bias
from hstu_sparse.cache.paged.reference import Queries, Scoring, paged_reference
from tests.random.cases import Launches
from tests.random.terms import FEW_TOKENS
from tests.support.budgets import assert_within_budget, make_jagged, make_offsets, make_timestamps


def draw(random, small):
    most = 90 if small else 2000
    group = random.choice([1, 2, 4])
    lengths = [random.choice([0, 1, random.randint(1, most)]) for _ in range(random.randint(1, 3 if small else 8))]
    dtypes = ["float32", "float16", "bfloat16"]
    return dict(
        lengths=lengths,
        query_lengths=[random.choice([0, 1, 1, random.randint(1, 40 if small else 300)]) for _ in lengths],
        longer=random.choice([0, 11]),
        groups=random.randint(1, 2),
        head_size=random.choice([16, 25, 32, 64] if small else [16, 25, 32, 48, 64, 96, 128, 256]),
        value_size=random.choice([16, 24, 32, 40, 64] if small else [16, 25, 40, 64, 96, 128, 200, 256]),
        dtype="float32" if small else random.choice(dtypes),
        stored="float32" if small else random.choice(dtypes),
        bits=random.choice([None, 2, 4, 8]),
        head_group=group,
        quant_group=random.choice([16, 32, 64, 64, 128]),
        sink_tokens=random.choice([0, 4, random.randint(1, 70)]),
        clip=random.choice([1.0, 0.75]),
        candidates=random.random() < 0.5,
        window=random.choice([0, 0, 1, random.randint(2, most)]),
        context=random.choice([None, None, 1, random.randint(0, 40)]),
        softmax=random.random() < 0.5,
        position=random.random() < 0.5,
        timed=random.random() < 0.5,
        splits=random.choice([None, 1, random.randint(2, 5)]),
        contiguous=random.random() < 0.5,
        seed=random.randrange(2**31),
    )


def reference_bytes(*, lengths, query_lengths, groups, head_group, head_size, value_size, **_):
    tokens = [n + m for n, m in zip(lengths, query_lengths)]
    pairs = len(lengths) * max([1, *tokens]) * max([1, *query_lengths])
    return 112 * groups * head_group * (pairs + sum(tokens) * (head_size + value_size))


def launched_with(splits):
    """Return a context in which pages are divided into `splits` parts."""
    if splits is None:
        return contextlib.nullcontext()
    from hstu_sparse.cache.paged import launch
    from hstu_sparse.core.launch import override

    return override(launch.num_splits, lambda *_: splits)


def check(
    device, *, lengths, query_lengths, groups, head_size, value_size, dtype="float32", stored="float32", bits=None,
    head_group=1, quant_group=64, sink_tokens=0, clip=1.0, candidates=False, softmax=False, position=False, timed=False,
    window=0, context=None, splits=None, contiguous=True, longer=0, seed=0,
):  # fmt: skip
    """Check that the kernels write the same pages as the reference, and attend to them correctly.

    context: the context tokens of sequences that have so many.
    """
    heads, dtype, stored = groups * head_group, getattr(torch, dtype), getattr(torch, stored)
    codes = dict(bits=bits, quant_group=quant_group, sink_tokens=sink_tokens, clip=clip) if bits else {}
    format = PageFormat(heads, head_size, value_size, stored, head_group=head_group, **codes)
    whole = [n + m for n, m in zip(lengths, query_lengths)]
    tensor_options = dict(dtype=dtype, device=device, contiguous=contiguous)
    pools = [
        PagePool(format, sum(map(format.num_pages, whole)) + 1, layers=2, num_sequences=len(whole), device=device)
        for _ in range(2)
    ]
    for pool in pools:
        first = pool.reserve([], 1)  # so that the first page is not the first sequence's
        rows = [pool.reserve([], n) for n in whole[::-1]][::-1] if not sink_tokens or not codes else None
        if rows is None:
            pool.shrink(first, 0)
            rows = [pool.reserve([], n) for n in whole[::-1]][::-1]
    pool, plain = pools
    pages, max_seq_len = pool.table(rows), max([1, *whole]) + longer + int(candidates)
    n, zero = torch.tensor(lengths, device=device), torch.zeros(len(lengths), dtype=torch.int64, device=device)
    # Every second entry of a wider tensor: kernels must not take metadata for contiguous.
    offsets, q_offsets = (make_offsets(x, device=device).repeat_interleave(2)[::2] for x in (lengths, query_lengths))
    keys_and_queries = [
        make_jagged(x, (heads, head_size), seed=seed + i, **tensor_options)
        for i, x in enumerate((lengths, query_lengths, query_lengths))
    ]
    values = [
        make_jagged(x, (heads, value_size), seed=seed + 3 + i, **tensor_options)
        for i, x in enumerate((lengths, query_lengths))
    ]
    cached_k, k, q = keys_and_queries
    cached_v, v = values
    times = make_timestamps(whole, device=device, seed=seed)
    num_context = None
    if context is not None:
        most = [m if n == 0 and not candidates else n for n, m in zip(lengths, query_lengths)]
        num_context = torch.tensor([min(context, n) for n in most], device=device).repeat_interleave(2)[::2]
    for target, backend in ((pool, "triton"), (plain, "reference")):
        target.write(1, cached_k, cached_v, offsets, pages, zero, backend=backend)
        if not candidates:
            target.write(1, k, v, q_offsets, pages, n, backend=backend)
        target.write_timestamps(times, make_offsets(whole, device=device), pages, zero)
    written_alike(pool, plain, pages, n if candidates else n + q_offsets.diff())
    untouched = {name: x.clone() for name, x in pool.tensors[1].items()}

    bias = RelativeBias()
    if position or timed:
        new = len(lengths) if candidates else sum(query_lengths)
        tables = (
            make_jagged([max_seq_len + 3], (), device=device, seed=seed + 5) if position else None,
            make_jagged([129], (), device=device, seed=seed + 6) if timed else None,
            *(make_timestamps([new], device=device, seed=seed + i) + 10_000 for i in range(2)),
        )
        bias = RelativeBias(*(x if x is None else x.repeat_interleave(2)[::2] for x in tables))
    full = check_bias(bias, max_seq_len, len(lengths) if candidates else sum(query_lengths), q.device)
    activation, normalizer = "softmax" if softmax else "silu", 0.7 * max_seq_len
    call = dict(layer=1, candidates=candidates, activation=activation, scale=0.9 * head_size**-0.5)
    with launched_with(splits):
        out = paged_attention(
            q, k, v, q_offsets, pool, pages, n, max_seq_len, bias=bias, backend="triton",
            normalizer=None if softmax else normalizer, window_size=window, num_context=num_context, **call,
        )  # fmt: skip
    assert all(torch.equal(x, pool.tensors[1][name]) for name, x in untouched.items())

    def by_reference(wide, change=lambda x: x, source=pool):
        def given_as(x):
            return change(x.to(wide)) if x is not None and x.is_floating_point() else x

        scoring = Scoring(softmax, call["scale"], normalizer, RelativeBias(*map(given_as, full)), window=window)
        new = Queries(*map(given_as, (q, k, v)), q_offsets, n, candidates, num_context)
        return paged_reference(new, source, 1, pages, scoring)

    def sizes():  # what the output was if no product cancelled
        if sum(query_lengths) > FEW_TOKENS or dtype != torch.float32:
            return exact
        absolute = PagePool(PageFormat(heads, head_size, value_size, torch.float64), pool.num_pages, layers=2)
        absolute.timestamps = pool.timestamps
        stored = n if candidates else n + q_offsets.diff()
        table = pages[:, int(format.sink_tokens > 0) :]
        keys = [x.abs() for x in pool.read(1, pages, stored, torch.float64)]
        absolute.write(1, *keys, make_offsets(stored.tolist()), table, zero)
        bias = RelativeBias(*(x.abs() if x is not None and x.is_floating_point() else x for x in full))
        new = Queries(*(x.double().abs() for x in (q, k, v)), q_offsets, n, candidates, num_context)
        return paged_reference(
            new, absolute, 1, table, Scoring(softmax, call["scale"], normalizer, bias, window=window)
        )

    exact = by_reference(torch.float64)
    assert_within_budget("out", out, by_reference(dtype), exact, factor=4.0, terms=sizes)


def written_alike(kernel_pool, reference_pool, pages, lengths):
    """Check that the kernels wrote the same as the reference; codes on the edge between two may differ."""
    actual, expected = (pool.read(1, pages, lengths, torch.float64) for pool in (kernel_pool, reference_pool))
    for name, x, y in zip("kv", actual, expected):
        if kernel_pool.format.bits is None:
            assert torch.equal(x, y), name
        elif x.numel():
            levels = 2**kernel_pool.format.bits - 1
            step = (reference_pool.read(1, pages, lengths, torch.float64)[name == "v"].abs().amax() * 4) / levels
            assert float((x - y).abs().max()) <= 1.1 * step and float((x != y).double().mean()) < 1, name


def launches():
    from hstu_sparse.cache.launch import write_pages, write_timestamps
    from hstu_sparse.cache.paged.launch import attend_to_pool

    def case(heads=4, size=64, value_size=64, queries=1, users=2, dtype=torch.bfloat16, stored=None, splits=None,
             biased=True, local_bytes=128, architectures=(80, 90, 100, 120), call=None, write=False,
             **options):  # fmt: skip
        format = PageFormat(heads, size, value_size, stored or dtype, **options)

        def launch():
            pool = PagePool(format, 20, num_sequences=users)
            pages = pool.table([pool.reserve([], 130) for _ in range(users)])
            counts = [queries] * users
            q, k, v = (torch.zeros(sum(counts), heads, x, dtype=dtype) for x in (size, size, value_size))
            where = make_offsets(counts), pages, torch.zeros(users, dtype=torch.int64)
            if write:
                write_pages(pool.tensors[0], format, k, v, *where)
                write_timestamps(pool.timestamps, format, torch.zeros(sum(counts), dtype=torch.int64), *where)
                return

            zeros = torch.zeros(sum(counts), dtype=torch.int64)
            bias = RelativeBias(torch.zeros(201), torch.zeros(129), zeros, zeros) if biased else RelativeBias()
            settings = dict(candidates=False, softmax=False, window=0, context=None) | (call or {})
            context = settings["context"] and torch.full((users,), settings["context"])
            new = Queries(q, k, v, where[0], where[2], settings["candidates"], context)
            with launched_with(splits):
                scoring = Scoring(settings["softmax"], 0.1, 200.0, bias, window=settings["window"])
                attend_to_pool(new, pool, 0, where[1], scoring)

        label = f"H={heads} D={size} V={value_size} Tq={queries} {dtype} {stored} {options} {call} write={write}"
        return Launches(label, launch, local_bytes, architectures)

    candidates, softmax = dict(candidates=True), dict(softmax=True)
    codes = dict(bits=2, sink_tokens=4)
    return [
        case(write=True),
        case(call=candidates),
        case(call=candidates | softmax, splits=3),
        case(call=softmax, queries=1024, users=1),
        case(call=softmax | dict(window=40), queries=1024, users=1, architectures=(90,)),
        case(call=candidates | dict(window=40), splits=3, **codes, architectures=(80,)),
        case(call=dict(context=3, window=40), queries=1024, users=1, architectures=(90,)),
        case(call=candidates | dict(context=3, window=40), splits=3, **codes, architectures=(90,)),
        case(call=candidates, queries=1024, users=1),
        case(call=candidates, queries=40, users=1, architectures=(90,)),
        case(call=candidates, queries=1024, users=1, size=256, value_size=256, architectures=(90,)),
        case(size=25, value_size=25, heads=2, dtype=torch.float32, queries=40, users=1),
        case(call=candidates, stored=torch.float16, dtype=torch.float32, architectures=(90,)),
        case(call=candidates, **codes),
        case(call=candidates | softmax, splits=3, **codes),
        case(call=softmax, bits=4, head_group=4, size=32, value_size=40, architectures=(90,)),
        case(call=softmax, queries=1024, users=1, **codes),
        case(call=candidates, queries=1024, users=1, **codes),
        case(call=candidates, queries=200, users=1, bits=8, size=128, value_size=96, architectures=(90,)),
        case(call=candidates, queries=33, bits=4, quant_group=32, size=48, value_size=128, architectures=(90,)),
        case(call=candidates, queries=33, bits=2, quant_group=32, size=128, value_size=96, architectures=(90,)),
        case(size=25, value_size=25, heads=2, dtype=torch.float32, queries=40, users=1, **codes),
    ]
