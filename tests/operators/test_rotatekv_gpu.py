"""RotateKV on a GPU: every dtype and option against the reference, both rotations, memory, no recompilation."""

import pytest
import torch

from hstu_sparse import RelativeBias, hadamard_transform, rotatekv_attention, rotatekv_compress, rotatekv_decompress
from hstu_sparse.cache.rotatekv import reference
from tests.random.cases.rotatekv import check, check_self_attention
from tests.support.budgets import assert_within_budget, compare_with_reference, make_jagged, make_offsets

pytestmark = pytest.mark.gpu

BASE = dict(
    lengths=[700, 0, 130, 1, 64], query_lengths=[1, 2, 3, 4, 0], max_seq_len=720, groups=2, head_size=128,
    value_size=128
)  # fmt: skip
CASES = {
    **{f"{bits} bits": dict(bits=bits) for bits in (2, 3, 4, 8)},
    **{f"groups of {group} heads of 64": dict(head_group=group, head_size=64, value_size=40) for group in (1, 2, 4)},
    "as trained on MovieLens": dict(head_size=32, value_size=32, groups=1, position=True, timed=True, sink_tokens=4),
    "pruned": dict(sparsity=0.7),
    "clipped": dict(clip=0.75),
    "pruned, 3 bits, sinks, softmax": dict(sparsity=0.5, bits=3, sink_tokens=5, softmax=True),
    "pruned, rope": dict(sparsity=0.5, rope=True),
    "narrow groups, ordered": dict(quant_group=16, ordered=True),
    "wide groups, ordered, rope": dict(quant_group=128, ordered=True, rope=True),
    "1,024 channels": dict(head_size=256, head_group=4, groups=1, value_size=256, rope=True, lengths=[200] * 5),
    "1,024 channels, ordered": dict(
        head_size=256, head_group=4, groups=1, value_size=256, rope=True, ordered=True, lengths=[200] * 5
    ),
    "softmax, split": dict(softmax=True, splits=5),
    "rope, softmax, split, sinks": dict(rope=True, softmax=True, splits=3, sink_tokens=70),
    "rope, 4 bits": dict(rope=True, bits=4, softmax=True, quant_group=128),
    "rope, heads of 256": dict(rope=True, head_size=256, head_group=1, value_size=256, softmax=True),
    "rope, one head a group": dict(rope=True, head_group=1, sink_tokens=3),
    "both biases": dict(position=True, timed=True, softmax=True),
    "many queries": dict(query_lengths=[128, 64, 100, 1, 70]),
    "many queries, rope, both biases": dict(query_lengths=[128, 64, 100, 1, 70], rope=True, position=True, timed=True),
    "many queries, 4 bits, softmax": dict(query_lengths=[128, 64, 100, 1, 70], bits=4, softmax=True, sink_tokens=70),
    "many queries, softmax, pruned": dict(query_lengths=[128, 64, 100, 1, 70], softmax=True, sparsity=0.6),
    "smallest": dict(head_size=8, head_group=2, value_size=1, rope=True),
    "non-contiguous": dict(contiguous=False, softmax=True),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_reference(name, dtype):
    check("cuda", **(BASE | CASES[name] | dict(dtype=dtype)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "options",
    [
        dict(head_size=64, value_size=64, position=True, timed=True, sink_tokens=4),
        dict(sparsity=0.5, bits=4, timed=True, contiguous=False, value_size=40),
        dict(lengths=[9000, 3], max_seq_len=9000, clip=0.75, head_size=32, value_size=32),
    ],
)
def test_self_attention(options, dtype):
    case = {name: x for name, x in (BASE | options | dict(dtype=dtype)).items() if name != "query_lengths"}
    check_self_attention("cuda", **case)


MANY = dict(
    lengths=[700, 0, 129, 1, 64, 128, 1500], query_lengths=[128, 64, 100, 1, 130, 300, 129], max_seq_len=1510,
    softmax=True
)  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        dict(head_group=1, groups=4),
        dict(splits=5),
        dict(head_group=4, groups=1, sink_tokens=70, splits=3),
        dict(clip=0.75, contiguous=False, dtype="float16"),
        dict(lengths=[9000, 3], query_lengths=[200, 1], max_seq_len=9000),
        dict(lengths=[40, 0, 300] * 60, query_lengths=[1, 130, 90] * 60, max_seq_len=300),
    ],
)
def test_many_queries_of_softmax(options):
    """Test partial and whole tiles of 128 queries."""
    check("cuda", **(BASE | MANY | dict(dtype="bfloat16") | options))


@pytest.mark.parametrize("options", [{}, dict(head_group=1), dict(sink_tokens=70)])
def test_maxima_that_rise_along_the_history(options):
    """Scores grow to 30 powers of two above those of the first tile, and fall again."""
    length, scale = 2000, 128**-0.5
    k, v = (make_jagged((length, 130), (4, 128), dtype=torch.bfloat16, device="cuda", seed=i) for i in range(2))
    grown = torch.linspace(0, 12, length, device="cuda")
    k[:length] *= grown.minimum(12 - grown)[:, None, None]
    q = make_jagged((128, 100), (4, 128), dtype=torch.bfloat16, device="cuda", seed=2)
    q_offsets, offsets = make_offsets((128, 100), device="cuda"), make_offsets((length, 130), device="cuda")
    cache = rotatekv_compress(k, v, offsets, **options)
    settings = dict(activation="softmax", scale=scale, return_lse=True)
    actual = rotatekv_attention(q, q_offsets, cache, length, **settings)
    lossy, exact = (
        reference.attention_reference(
            q.to(dtype), q_offsets, *reference.decompress_reference(cache, dtype), offsets, bias=RelativeBias(),
            rope_base=None, activation="softmax", scale=scale,
        )
        for dtype in (torch.bfloat16, torch.float64)
    )  # fmt: skip
    for name, got, low, high in zip(("out", "log-sum-exp"), actual, lossy, exact):
        assert_within_budget(name, got, low.to(got.dtype), high, factor=4.0, floor=2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("num_queries", [1, 20, 100])
def test_repeated_calls(num_queries):
    """Compare with calls on another cache of the same tokens, before and after an append."""
    k, v = (make_jagged((300, 17), (2, 128), dtype=torch.bfloat16, device="cuda", seed=i) for i in range(2))
    offsets, q_offsets = make_offsets((300, 17), device="cuda"), make_offsets((num_queries, num_queries), device="cuda")
    q = [
        make_jagged((num_queries, num_queries), (2, 128), dtype=torch.bfloat16, device="cuda", seed=i) for i in range(3)
    ]
    caches = [rotatekv_compress(k, v, offsets) for _ in range(2)]
    options = dict(activation="softmax", return_lse=True)
    for _ in range(2):
        results = [rotatekv_attention(x, q_offsets, caches[0], 700, **options) for x in q]
        for x, got in zip(q, results):
            assert all(map(torch.equal, got, rotatekv_attention(x, q_offsets, caches[1], 700, **options)))
        # Now after more tokens.
        for cache in caches:
            cache.append(k, v, offsets)
    for wrong in (dict(max_seq_len=0), dict(max_seq_len=700, activation="relu")):
        with pytest.raises(ValueError):
            rotatekv_attention(q[0], q_offsets, caches[0], **(options | wrong))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("options", [{}, dict(sparsity=0.7), dict(head_group=4, quant_group=16), dict(sink_tokens=9)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_bits_are_the_references(bits, options, dtype):
    """On whole numbers, whose sums are exact in whatever order, every tensor of the cache is the same."""
    generator = torch.Generator().manual_seed(bits)
    parts = []
    for n in ((370, 0, 130, 1), (1, 700, 3, 0)):
        x = [torch.randint(-9, 10, (sum(n), 4, size), generator=generator).to("cuda", dtype) for size in (64, 40)]
        parts.append((*x, make_offsets(n, device="cuda")))
    caches = []
    for backend in ("reference", "triton"):
        cache = rotatekv_compress(*parts[0], bits=bits, **options, backend=backend)
        caches.append(cache.append(*parts[1], backend=backend).tensors)
    for name, x in caches[0].items():
        assert torch.equal(x, caches[1][name]), name


@pytest.mark.parametrize("n", [4, 64, 128, 256, 2048, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_hadamard(n, dtype):
    x = torch.randn(1000, n, generator=torch.Generator().manual_seed(n)).to("cuda", dtype)
    run = lambda backend: lambda x: hadamard_transform(x, backend=backend)
    floor = dict.fromkeys(["output", "grad of x"], 8 * torch.finfo(dtype).eps)
    compare_with_reference(run("triton"), run("reference"), {"x": x}, factor=4.0, floor=floor)


def large(dtype=torch.bfloat16):
    lengths = (8192,) * 8
    k, v = (make_jagged(lengths, (8, 128), dtype=dtype, device="cuda", seed=i) for i in range(2))
    return k, v, make_offsets(lengths, device="cuda")


def test_compress_takes_little_memory_beside_the_cache():
    k, v, offsets = large()
    rotatekv_compress(k[:64], v[:64], make_offsets((8,) * 8, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cache = rotatekv_compress(k, v, offsets)
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * cache.nbytes
    assert cache.nbytes <= 0.17 * (k.nbytes + v.nbytes)


def test_attention_unpacks_nothing_to_memory():
    k, v, offsets = large()
    cache, q = rotatekv_compress(k, v, offsets), make_jagged((1,) * 8, (8, 128), dtype=k.dtype, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rotatekv_attention(q, make_offsets((1,) * 8, device="cuda"), cache, 8192, rope_base=10000.0)
    assert torch.cuda.max_memory_allocated() - before <= cache.nbytes / 4


def test_the_same_bits_in_every_run():
    k, v, offsets = large()
    q = make_jagged((3,) * 8, (8, 128), dtype=k.dtype, device="cuda")
    results = []
    for _ in range(2):
        cache = rotatekv_compress(k, v, offsets, sparsity=0.5)
        out = rotatekv_attention(q, make_offsets((3,) * 8, device="cuda"), cache, 8192, activation="softmax")
        results.append((out, *rotatekv_decompress(cache), *cache.tensors.values()))
    assert all(torch.equal(x, y) for x, y in zip(*results))


def test_batches_do_not_recompile_kernels():
    from hstu_sparse.cache import decode, encode
    from hstu_sparse.cache.paged.kernel import paged_attention_fwd_kernel

    kernels = [encode.write_codes_kernel, decode.rotatekv_decompress_kernel, paged_attention_fwd_kernel]

    def step(lengths):
        k, v = (make_jagged(lengths, (2, 64), dtype=torch.bfloat16, device="cuda", seed=i) for i in range(2))
        cache = rotatekv_compress(k, v, make_offsets(lengths, device="cuda"))
        cache.append(k, v, make_offsets(lengths, device="cuda"))
        rotatekv_decompress(cache)
        num_queries = [1 for _ in lengths]
        q = make_jagged(num_queries, (2, 64), dtype=torch.bfloat16, device="cuda")
        rotatekv_attention(q, make_offsets(num_queries, device="cuda"), cache, 2 * max(lengths))

    def compiled():
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    step((300, 17))
    step((16,))  # so few pages that one program attends to all of them and writes the output itself
    count = compiled()
    for lengths in ((600, 170, 20), (500, 1, 64), (33,), (333,), (512,) * 16):
        step(lengths)
    assert count > 0
    assert compiled() == count
