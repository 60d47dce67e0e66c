"""The RotateKV kernels in Triton's interpreter against the reference: fp32, and fp16 for the bits that it alone has."""

import pytest
import torch

from hstu_sparse import (
    RelativeBias,
    hadamard_transform,
    rotatekv_attention,
    rotatekv_compress,
    rotatekv_decompress,
    rotatekv_self_attention,
)
from hstu_sparse.cache import store
from tests.random.cases.rotatekv import check, check_self_attention
from tests.support.budgets import EDGE_CASES, compare_with_reference, make_jagged, make_offsets, make_timestamps

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

BASE = dict(
    lengths=[37, 0, 1], query_lengths=[1, 2, 0], max_seq_len=75, groups=1, head_size=32, value_size=24, dtype="float32"
)  # fmt: skip
HALF = dict(dtype="float16", value_size=32)
CASES = {
    "groups of 1 heads, non-contiguous": dict(head_group=1, groups=2, contiguous=False),
    "groups of 4 heads, 8 bits, split": dict(
        head_group=4, bits=8, splits=2, lengths=[70], query_lengths=[2], max_seq_len=72
    ),
    "pruned, 3 bits, sinks, both biases, softmax, split": dict(
        sparsity=0.7, bits=3, sink_tokens=5, position=True, timed=True, softmax=True, splits=3
    ),
    "more sinks than tokens, rope, softmax": dict(sink_tokens=70, rope=True, softmax=True),
    "clipped, ordered, pruned, rope, softmax": dict(
        clip=0.7, ordered=True, sparsity=0.4, rope=True, softmax=True, head_size=16, head_group=4, quant_group=32
    ),
    "narrow groups, many queries, rope, bias": dict(
        quant_group=16, bits=4, query_lengths=[70, 1, 35], rope=True, timed=True
    ),
    "wide groups, 3 bits": dict(head_size=64, quant_group=128, bits=3),
    "smallest heads": dict(head_size=8, value_size=1, head_group=2),
    "nobody asks": dict(query_lengths=[0, 0, 0]),
    "half precision": dict(HALF, sink_tokens=5, position=True, timed=True),
    "half precision, 4 bits, softmax, ordered": dict(HALF, bits=4, softmax=True, ordered=True, splits=2),
    "half precision, rope, 256": dict(
        HALF, head_size=256, head_group=1, rope=True, softmax=True, lengths=[20], query_lengths=[1]
    ),
}
# One option at a time, or fewer than a case above has.
ALONE = {
    **{f"{bits} bits": dict(bits=bits) for bits in (2, 3, 4, 8)},
    "groups of 4 heads": dict(head_group=4),
    "groups of 4 heads, 8 bits": dict(head_group=4, bits=8),
    "groups of 2 heads": dict(head_group=2, groups=2),
    "groups of 1 heads": dict(head_group=1, groups=2),
    "pruned, 3 bits, sinks": dict(sparsity=0.7, bits=3, sink_tokens=5),
    "more sinks than tokens": dict(sink_tokens=40),
    "clipped": dict(clip=0.7, sparsity=0.3),
    "90% pruned": dict(sparsity=0.9, lengths=[70], query_lengths=[2]),
    "20% pruned": dict(sparsity=0.2, lengths=[70], query_lengths=[2]),
    "ordered": dict(ordered=True),
    "ordered and pruned": dict(ordered=True, sparsity=0.4, head_size=16, head_group=4, quant_group=32),
    "narrow groups": dict(quant_group=16, bits=4),
    "wide groups": dict(head_size=64, quant_group=128),
    "large heads": dict(head_size=256, lengths=[20], query_lengths=[2], value_size=72),
    "softmax": dict(softmax=True),
    "rope": dict(rope=True),
    "rope, pruned, ordered": dict(rope=True, sparsity=0.5, ordered=True, softmax=True),
    "both biases": dict(position=True, timed=True),
    "both biases, softmax, split": dict(position=True, timed=True, softmax=True, splits=3, sink_tokens=3),
    "split": dict(splits=2, lengths=[70], query_lengths=[2], max_seq_len=72),
    "long split": dict(splits=2, lengths=[130], query_lengths=[2], max_seq_len=130),
    "many queries": dict(query_lengths=[70, 1, 35]),
    "many queries, rope, bias": dict(query_lengths=[70, 1, 35], rope=True, timed=True),
    "non-contiguous": dict(contiguous=False),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in ALONE)])
def test_cache_and_attention(name):
    check("cpu", **(BASE | (CASES | ALONE)[name]))


SELF = {
    "both biases": dict(position=True, timed=True, sink_tokens=3),
    "position": dict(position=True, bits=4, contiguous=False, value_size=40),
    "time, pruned": dict(timed=True, sparsity=0.5, lengths=[70], max_seq_len=70),
    "neither": dict(clip=0.7, head_group=4, lengths=[], max_seq_len=1),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow if x == "both biases" else []) for x in SELF])
def test_self_attention(name):
    case = {what: x for what, x in (BASE | SELF[name]).items() if what != "query_lengths"}
    check_self_attention("cpu", **case)


def test_self_attention_is_one_graph():
    lengths = (5,)
    leaves = [make_jagged(lengths, (2, 16), seed=seed).requires_grad_() for seed in range(3)]
    leaves += [torch.linspace(-1, 1, size).requires_grad_() for size in (12, 20)]
    times = make_timestamps(lengths)

    def layer(q, k, v, position, time):
        bias = RelativeBias(position, time, times, times + 5)
        out = rotatekv_self_attention(q, k, v, make_offsets(lengths), 12, bias=bias, backend="triton")
        return out.square().sum()

    expected = torch.autograd.grad(layer(*leaves), leaves)
    compiled = torch.autograd.grad(torch.compile(layer, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    torch.testing.assert_close(compiled, expected)


@pytest.mark.parametrize(
    "name",
    [
        "empty batch",
        "all sequences empty",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("length 1", "N far above every length")),
    ],
)
def test_edge_cases(name):
    lengths, N = EDGE_CASES[name]
    check("cpu", **(BASE | dict(lengths=list(lengths), query_lengths=[2 for _ in lengths], max_seq_len=N)))


PACKING = {"plain": {}, "pruned": dict(sparsity=0.7), "groups": dict(head_group=4, quant_group=16, sink_tokens=9)}


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ("plain", 2), ("groups", 3),
        *(pytest.param("plain", bits, marks=pytest.mark.slow) for bits in (3, 4, 8)),
        *(pytest.param("groups", bits, marks=pytest.mark.slow) for bits in (2, 4, 8)),
        *(pytest.param("pruned", bits, marks=pytest.mark.slow) for bits in (2, 3, 4, 8)),
    ],
)  # fmt: skip
def test_packed_bits_are_the_references(bits, options):
    """On whole numbers, whose sums are exact in whatever order, every tensor of the cache is the same."""
    lengths, more = (70, 0, 5), (1, 20, 0)
    generator = torch.Generator().manual_seed(bits)
    caches = []
    parts = [
        (*(torch.randint(-9, 10, (sum(n), 4, size), generator=generator).float() for size in (32, 20)), make_offsets(n))
        for n in (lengths, more)
    ]
    for backend in ("reference", "triton"):
        cache = rotatekv_compress(*parts[0], bits=bits, **PACKING[options], backend=backend)
        caches.append(cache.append(*parts[1], backend=backend).tensors)
    for name, x in caches[0].items():
        assert torch.equal(x, caches[1][name]), name


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_in_the_mantissa_of_half_precision(bits):
    k, v = make_jagged((70,), (2, 32), dtype=torch.float16), make_jagged((70,), (2, 16), dtype=torch.float16, seed=1)
    offsets, q = make_offsets((70,)), make_jagged((2,), (2, 32), dtype=torch.float16, seed=2)
    cache = rotatekv_compress(k, v, offsets, bits=bits, backend="triton")
    for x, y in zip(*(rotatekv_decompress(cache, backend=b) for b in ("triton", "reference"))):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-3)
    arguments = dict(q=q, q_offsets=make_offsets((2,)), cache=cache, max_seq_len=70, activation="softmax")
    results = [rotatekv_attention(**arguments, backend=backend) for backend in ("triton", "reference")]
    torch.testing.assert_close(*results, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("n", [1, 4, 64, 128, 2048])
def test_hadamard(n):
    x = torch.randn(2, 3, n, generator=torch.Generator().manual_seed(n))[:, ::2]
    run = lambda backend: lambda x: hadamard_transform(x, backend=backend)
    compare_with_reference(run("triton"), run("reference"), {"x": x}, factor=4.0)
    matrix = store.hadamard_reference(torch.eye(n))
    torch.testing.assert_close(hadamard_transform(x, backend="triton"), x @ matrix, atol=1e-4, rtol=1e-4)
