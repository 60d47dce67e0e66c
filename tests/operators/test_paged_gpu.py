"""Paged attention and the page pool on a GPU: every format against the reference, order of candidates, compilation."""

import itertools

import pytest
import torch

from hstu_sparse import PageFormat, PagePool, RelativeBias, paged_attention
from hstu_sparse.core import jagged
from tests.random.cases.paged import check
from tests.support.budgets import make_jagged, make_offsets

pytestmark = pytest.mark.gpu

BASE = dict(
    lengths=[700, 0, 130, 1, 64], query_lengths=[1, 2, 3, 4, 0], groups=2, head_size=64, value_size=64, position=True,
    timed=True,
)  # fmt: skip
MANY = dict(lengths=[700, 0, 130, 1, 64], query_lengths=[130, 90, 300, 1, 64])
CASES = {
    "append": {},
    "append, softmax, parts": dict(softmax=True, splits=3),
    "candidates": dict(candidates=True),
    "candidates, softmax, parts": dict(candidates=True, softmax=True, splits=5),
    "many": MANY,
    "many, softmax": dict(MANY, softmax=True),
    "many candidates": dict(MANY, candidates=True, contiguous=False),
    "some": dict(MANY, query_lengths=[20, 30, 1, 10, 20], candidates=True, softmax=True),
    "window": dict(window=100),
    "window, many, softmax": dict(MANY, window=70, softmax=True),
    "window, many candidates": dict(MANY, window=200, candidates=True, splits=2),
    "context": dict(context=5),
    "context, window, many, softmax": dict(MANY, context=100, window=70, softmax=True, splits=2),
    "context, window, many candidates": dict(MANY, context=40, window=200, candidates=True),
    "heads of 25": dict(head_size=25, value_size=25),
    "heads of 256, many": dict(MANY, head_size=256, value_size=256, groups=1, candidates=True),
    "heads of 256": dict(head_size=256, value_size=16, groups=1),
    "as trained on MovieLens": dict(head_size=32, value_size=32, groups=1, candidates=True),
}
FORMATS = {
    "plain": {},
    "fp16": dict(stored="float16"),
    "2 bits": dict(bits=2, head_group=2, sink_tokens=4, clip=0.75),
    "4 bits": dict(bits=4, head_group=4, quant_group=32),
    "8 bits": dict(bits=8, head_group=1, sink_tokens=70),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("name", "format"), itertools.product(CASES, FORMATS))
def test_agrees_with_reference(name, format, dtype):
    check("cuda", **(BASE | CASES[name] | dict(dtype=dtype, stored=dtype) | FORMATS[format]))


def filled(format, lengths, room=0):
    pool = PagePool(format, 400, num_sequences=len(lengths), device="cuda")
    pages = pool.table([pool.reserve([], length + room) for length in lengths])
    k, v = (make_jagged(lengths, (4, 64), dtype=torch.bfloat16, device="cuda", seed=i) for i in range(2))
    zero = torch.zeros(len(lengths), dtype=torch.int64, device="cuda")
    pool.write(0, k, v, make_offsets(lengths, device="cuda"), pages, zero)
    return pool, pages, torch.tensor(lengths, device="cuda")


@pytest.mark.parametrize("options", [{}, dict(bits=2, sink_tokens=4)])
@pytest.mark.parametrize("count", [5, 40, 300])
@pytest.mark.parametrize("activation", ["silu", "softmax"])
def test_an_order_of_candidates_does_not_matter_bit_for_bit(options, count, activation):
    pool, pages, lengths = filled(PageFormat(4, 64, 64, torch.bfloat16, **options), (1000, 30, 0))
    q, k, v = (make_jagged((count,) * 3, (4, 64), dtype=torch.bfloat16, device="cuda", seed=i) for i in range(3))
    offsets, generator = make_offsets((count,) * 3, device="cuda"), torch.Generator().manual_seed(0)
    order = torch.cat([b * count + torch.randperm(count, generator=generator) for b in range(3)]).cuda()
    bias = RelativeBias(torch.randn(2000, device="cuda"))
    call = (offsets, pool, pages, lengths, 1001)
    out = paged_attention(q, k, v, *call, candidates=True, bias=bias, activation=activation)
    moved = paged_attention(q[order], k[order], v[order], *call, candidates=True, bias=bias, activation=activation)
    assert torch.equal(out[order], moved)


def test_batches_do_not_recompile_kernels():
    from hstu_sparse.cache.encode import write_codes_kernel, write_pages_kernel
    from hstu_sparse.cache.paged.kernel import candidate_bias_kernel, paged_attention_fwd_kernel

    kernels = paged_attention_fwd_kernel, candidate_bias_kernel, write_codes_kernel, write_pages_kernel

    bias = RelativeBias(torch.zeros(1000, device="cuda"))

    def step(lengths):
        for options in ({}, dict(bits=2, sink_tokens=4)):
            pool, pages, cached = filled(PageFormat(4, 64, 64, torch.bfloat16, **options), lengths, room=3)
            q = make_jagged([2] * len(lengths), (4, 64), dtype=torch.bfloat16, device="cuda")
            offsets = make_offsets([2] * len(lengths), device="cuda")
            pool.write(0, q, q, offsets, pages, cached)
            paged_attention(q, q, q, offsets, pool, pages, cached, 1000)
            paged_attention(q, q, q, offsets, pool, pages, cached, 1000, candidates=True, bias=bias)

    def compiled():
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    step((300, 17))
    step((600, 170, 20))
    count = compiled()
    for lengths in ((500, 1, 64), (16,), (333,), (112,) * 16):
        step(lengths)
    assert count > 0
    assert compiled() == count


def test_debug_checks_page_tables_of_the_gpu(monkeypatch):
    monkeypatch.setattr(jagged, "DEBUG", True)
    check("cuda", **BASE, dtype="float32")
