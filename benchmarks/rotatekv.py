"""Benchmark RotateKV: attention on the packed cache against SDPA on a bf16 cache, against two stages, and compression.

    python benchmarks/run.py --op rotatekv       the cases of 64 users with 8,192 events
    python benchmarks/run.py --op rotatekv --queries 1 --only fused,sdpa-flash,sdpa-cudnn

8 heads of 128, bf16. `gb` is the size of keys and values in bf16: the cache of SDPA, what compression reads. `copy`
copies the same bytes and shows the bandwidth that can be reached.
"""

import functools

import torch
from run import Case, with_replay

PARTS = ("fused", "fused rope", "two stages", "two stages rope")
SDPA = {"sdpa-flash": "FLASH_ATTENTION", "sdpa-cudnn": "CUDNN_ATTENTION", "sdpa-efficient": "EFFICIENT_ATTENTION"}
BASE = 10000.0


def add_arguments(parser):
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--queries", type=lambda x: [int(n) for n in x.split(",")], default=[1, 16, 128])
    parser.add_argument("--bits", type=lambda x: [int(n) for n in x.split(",")], default=[2])
    parser.add_argument("--sparsity", type=lambda x: [float(n) for n in x.split(",")], default=[0.0])
    parser.add_argument("--ordered", action="store_true", help="with the channel order of `calibrate`")


def draw(users, length, heads, size, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(users * length, heads, size, device="cuda", dtype=torch.bfloat16, generator=generator)


def inputs(users, length, heads, size, queries):
    from tests.support.budgets import make_offsets

    k, v = (draw(users, length, heads, size, seed) for seed in range(2))
    q = draw(users, queries, heads, size, 2)
    return q, make_offsets([queries] * users, device="cuda"), k, v, make_offsets([length] * users, device="cuda")


def order_of(k, ordered):
    from hstu_sparse import calibrate

    return calibrate(k[:10_000]) if ordered else None


def packed(k, v, offsets, bits, sparsity, ordered):
    from hstu_sparse import rotatekv_compress

    return rotatekv_compress(k, v, offsets, bits=bits, sparsity=sparsity, channel_order=order_of(k, ordered))


def attend(name, q, q_offsets, cache, length):
    """Run softmax attention on the cache once, in the way that `name` says."""
    from hstu_sparse import rotatekv_attention, rotatekv_decompress
    from hstu_sparse.cache.rotatekv.api import unpacked_attention

    options = dict(activation="softmax", rope_base=BASE if "rope" in name else None)
    if name.startswith("fused"):
        return rotatekv_attention(q, q_offsets, cache, length, **options)
    return unpacked_attention(q, q_offsets, *rotatekv_decompress(cache), cache.seq_offsets, length, **options)


@functools.cache
def check(name, heads, size, queries, *options):
    """Compare with the fp64 reference on the same cache, for 2 users with fewer events."""
    from hstu_sparse.bias.relative import RelativeBias
    from hstu_sparse.cache.rotatekv import reference
    from tests.support.budgets import assert_within_budget

    q, q_offsets, k, v, offsets = inputs(2, 1000, heads, size, queries)
    cache = packed(k, v, offsets, *options)
    call = dict(activation="softmax", scale=size**-0.5, bias=RelativeBias(), rope_base=BASE if "rope" in name else None)
    low, high = (
        reference.attention_reference(
            q.to(dtype), q_offsets, *reference.decompress_reference(cache, dtype), offsets, **call
        )[0]
        for dtype in (q.dtype, torch.float64)
    )
    assert_within_budget(name, attend(name, q, q_offsets, cache, 1000), low, high, factor=4.0)


def run_packed(name, users, length, heads, size, queries, *options):
    q, q_offsets, k, v, offsets = inputs(users, length, heads, size, queries)
    cache = packed(k, v, offsets, *options)
    del k, v
    call = lambda: attend(name, q, q_offsets, cache, length)
    return {"fwd": call} if "two stages" in name else with_replay(call)  # decompression waits for a size from the GPU


def run_sdpa(backend, users, length, heads, size, queries):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, _, k, v, _ = inputs(users, length, heads, size, queries)
    q, k, v = (x.view(users, -1, heads, size).transpose(1, 2).contiguous() for x in (q, k, v))

    def call():
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return with_replay(call)


def run_compress(users, length, heads, size, bits, sparsity, ordered):
    """Run only the kernel, into the pages of an existing cache."""
    from hstu_sparse.cache.launch import write_pages

    _, _, k, v, offsets = inputs(users, length, heads, size, 1)
    cache = packed(k, v, offsets, bits, sparsity, ordered)
    into = cache.tensors, cache.pool.format, k, v, offsets, cache.pages, torch.zeros_like(offsets[1:])
    return {"compress": lambda: write_pages(*into, cache.channel_order)}


def run_copy(users, length, heads, size):
    _, _, k, v, _ = inputs(users, length, heads, size, 1)
    k2, v2 = torch.empty_like(k), torch.empty_like(v)
    return {"compress": lambda: (k2.copy_(k), v2.copy_(v))}


def run_decompress(users, length, heads, size, *options):
    from hstu_sparse import rotatekv_decompress

    _, _, k, v, offsets = inputs(users, length, heads, size, 1)
    cache = packed(k, v, offsets, *options)
    return {"decompress": lambda: rotatekv_decompress(cache)}


def cases(arguments):
    users, heads, size = arguments.users, arguments.heads, arguments.head_size
    for length in arguments.lengths or [8192]:
        shape = dict(users=users, length=length, heads=heads, head_size=size)
        cache_gb = users * length * heads * size * 4 / 1e9
        for bits in arguments.bits:
            for sparsity in arguments.sparsity:
                more = dict(bits=bits, sparsity=sparsity, ordered=arguments.ordered)
                sizes = (users, length, heads, size, *more.values())
                yield Case("compress", shape | more | {"gb": cache_gb}, functools.partial(run_compress, *sizes))
                yield Case("decompress", shape | more, functools.partial(run_decompress, *sizes))
                for queries in arguments.queries:
                    for name in PARTS:
                        yield Case(
                            name,
                            shape | more | {"queries": queries},
                            functools.partial(run_packed, name, users, length, heads, size, queries, *more.values()),
                            functools.partial(check, name, heads, size, queries, *more.values()),
                        )
        yield Case("copy", shape | {"gb": cache_gb}, functools.partial(run_copy, users, length, heads, size))
        for queries in arguments.queries:
            for name, backend in SDPA.items():
                described = shape | {"queries": queries, "gb": cache_gb}
                yield Case(name, described, functools.partial(run_sdpa, backend, users, length, heads, size, queries))
