"""Benchmark paged attention: a query or candidates of each user against pages, and a history appended at once.

    python benchmarks/run.py --op paged --out paged.jsonl       64 users, 4 heads of 64, both biases, SiLU, bf16
    python benchmarks/run.py --op paged --lengths 4096 --queries 1 --only bf16,2bit
    python benchmarks/run.py --op paged --lengths 4096 --queries 1 --splits 1,2,3,4,6,8 --warps 2,4 --stages 2,3

--splits, --warps, --stages, --registers, --rows and --positions replace the launch options that the library chooses for
candidates: the number of parts of a history, and a program's warps, stages, registers, query rows and positions a
tile.

`bound_ms` of a record is the least time on an H200 (4.8 TB/s, 989 TFLOP/s) to read the pages or to compute products.
`dense` is one pass of `hstu_attention` over history and candidates together, with `num_targets`; in the part `append`
it is a pass over the history alone.
"""

import contextlib
import functools
import itertools

import torch
from run import Case, with_replay

SINKS, CLIP = 4, 0.75
TRIED = "splits", "warps", "stages", "registers", "rows", "positions"
OPTIONS = dict(
    warps="num_warps", stages="num_stages", registers="maxnreg", rows="BQ", positions="R"
)  # the option's name in Triton or in the kernel
BYTES_A_SECOND, FLOPS_A_SECOND = 4.8e12, 989e12
FORMATS = {"bf16": {}, "2bit": dict(bits=2, sink_tokens=SINKS, clip=CLIP), "4bit": dict(bits=4, sink_tokens=SINKS)}


def add_arguments(parser):
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--queries", type=lambda x: [int(n) for n in x.split(",")], default=[1, 1024])
    for name in TRIED:
        parser.add_argument(f"--{name}", type=lambda x: [int(n) for n in x.split(",")], default=[None])
    parser.add_argument("--formats", type=lambda x: x.split(","), default=["bf16", "2bit"])


def draw(tokens, heads, size, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(tokens, heads, size, device="cuda", dtype=torch.bfloat16, generator=generator)


def times_of(users, length):
    """Return [users * length] seconds, ascending for each user, a quarter of an hour apart on average."""
    generator = torch.Generator().manual_seed(7)
    gaps = torch.randint(1, 1800, (users, length), generator=generator)
    return (1_600_000_000 + gaps.cumsum(1)).flatten().cuda()


def tables(length):
    return torch.randn(length + 2, device="cuda"), torch.randn(129, device="cuda")


def filled(name, users, length, heads, size):
    """Return (pool, pages, lengths, offsets, keys, values, times) of users with histories of `length` in pages."""
    from hstu_sparse import PageFormat, PagePool
    from tests.support.budgets import make_offsets

    format = PageFormat(heads, size, size, torch.bfloat16, **FORMATS[name])
    pool = PagePool(format, users * format.num_pages(length), num_sequences=users, device="cuda")
    pages = pool.table([pool.reserve([], length) for _ in range(users)])
    offsets, zero = make_offsets([length] * users, device="cuda"), torch.zeros(users, dtype=torch.int64, device="cuda")
    k, v = (draw(users * length, heads, size, seed) for seed in range(2))
    times = times_of(users, length)
    pool.write(0, k, v, offsets, pages, zero)
    pool.write_timestamps(times, offsets, pages, zero)
    return pool, pages, zero + length, offsets, k, v, times


def attending(name, users, length, heads, size, queries):
    """Return a call that scores candidates of every user, and its queries."""
    from hstu_sparse import RelativeBias, paged_attention
    from tests.support.budgets import make_offsets

    pool, pages, lengths, *_ = filled(name, users, length, heads, size)
    q, k, v = (draw(users * queries, heads, size, seed) for seed in (2, 3, 4))
    offsets = make_offsets([queries] * users, device="cuda")
    now = torch.full((users,), 1_700_000_000, device="cuda")
    bias = RelativeBias(*tables(length), now, now + 60)
    return lambda q=q, backend="auto": paged_attention(
        q, k.to(q.dtype), v.to(q.dtype), offsets, pool, pages, lengths, length + 1, candidates=True, bias=bias,
        backend=backend,
    ), q  # fmt: skip


@contextlib.contextmanager
def launched_with(splits=None, **options):
    """Run paged attention with the given number of parts of a history and options of Triton."""
    from hstu_sparse.cache.paged import launch
    from hstu_sparse.core.launch import override

    with (
        override(launch.num_splits, lambda chosen, *_: splits or chosen),
        override(launch.tile, lambda chosen, *_: chosen.replace(**options)),
    ):
        yield


def run_paged(tried, *arguments):
    call, _ = attending(*arguments)
    if not tried:
        return with_replay(call)

    def changed():
        with launched_with(**{OPTIONS.get(name, name): x for name, x in tried.items()}):
            return call()

    return with_replay(changed)


def run_append(name, users, length, heads, size):
    """Append a history of `length` events at once: write it, and attend to it by all of its tokens."""
    from hstu_sparse import RelativeBias, paged_attention

    pool, pages, lengths, offsets, k, v, times = filled(name, users, length, heads, size)
    q, none = draw(users * length, heads, size, 2), torch.zeros_like(lengths)
    bias = RelativeBias(*tables(length), times, times + 60)
    return {
        "write": lambda: pool.write(0, k, v, offsets, pages, none),
        "append": lambda: paged_attention(q, k, v, offsets, pool, pages, none, length, bias=bias),
    }


def run_dense(users, length, heads, size, queries):
    from hstu_sparse import RelativeBias, hstu_attention
    from tests.support.budgets import make_offsets

    total_length = length + queries
    q, k, v = (draw(users * total_length, heads, size, seed) for seed in range(3))
    offsets, times = make_offsets([total_length] * users, device="cuda"), times_of(users, total_length)
    targets = torch.full((users,), queries, device="cuda", dtype=torch.int64) if queries else None
    bias = RelativeBias(*tables(total_length), times, times + 60)
    call = lambda: hstu_attention(q, k, v, offsets, total_length, num_targets=targets, bias=bias)
    return {"append": call} if not queries else with_replay(call)


@functools.cache
def check(name, heads, size, queries):
    """Compare with the fp64 reference on the same pages, for 2 users with fewer events."""
    from tests.support.budgets import assert_within_budget

    call, q = attending(name, 2, 1000, heads, size, queries)
    exact, lossy = call(q.double(), "reference"), call(q, "reference")
    assert_within_budget(name, call(), lossy, exact, factor=4.0)


def cases(arguments):
    users, heads, size = arguments.users, arguments.heads, arguments.head_size
    for length in arguments.lengths or [200, 4096]:
        for queries in arguments.queries:
            shape = dict(users=users, length=length, heads=heads, head_size=size, queries=queries)
            seconds = 4 * users * queries * length * heads * size / FLOPS_A_SECOND
            tried = itertools.product(*(getattr(arguments, name) for name in TRIED))
            for name, values in itertools.product(arguments.formats, tried):
                from hstu_sparse import PageFormat

                changes = {key: value for key, value in zip(TRIED, values) if value is not None}
                format = PageFormat(heads, size, size, torch.bfloat16, **FORMATS[name])
                bound = max(seconds, users * format.bytes(length) / BYTES_A_SECOND)
                yield Case(
                    name,
                    shape | changes | {"bound_ms": round(1e3 * bound, 4)},
                    functools.partial(run_paged, changes, name, users, length, heads, size, queries),
                    functools.partial(check, name, heads, size, queries),
                )
            sizes = users, length, heads, size, queries
            yield Case("dense", shape, functools.partial(run_dense, *sizes))
        shape = dict(users=users, length=length, heads=heads, head_size=size, queries=0)
        for name in arguments.formats:
            yield Case(name, shape, functools.partial(run_append, name, users, length, heads, size))
        yield Case("dense", shape, functools.partial(run_dense, users, length, heads, size, 0))
