"""Block-sparse HSTU attention on a GPU: every dtype against the reference, memory, compilation, determinism."""

import random

import pytest
import torch

from hstu_sparse import bsa_attention
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.bsa import bsa_attention_reference
from tests.random.cases.bsa import agree, check
from tests.support.budgets import compare_with_reference, make_jagged, make_offsets, make_timestamps

pytestmark = pytest.mark.gpu

CASES = {
    # lengths, N, BS, S, W, r, H, D, V
    "groups of 1": ((500, 0, 130, 1, 333), 512, 32, 4, 0, 1, 2, 64, 64),
    "groups of 2, window": ((500, 0, 130, 1, 333), 512, 32, 4, 70, 2, 2, 64, 64),
    "groups of 16": ((700, 129), 700, 64, 5, 0, 16, 2, 128, 128),
    "query-major, half a block": ((500, 77, 320), 512, 64, 4, 0, 32, 2, 128, 128),
    "query-major, whole block": ((900, 64, 63), 1000, 64, 6, 100, 64, 2, 128, 128),
    "query-major, whole block of 32": ((900, 0, 333, 31), 900, 32, 4, 0, 32, 2, 64, 128),
    "query-major, odd heads, block of 32": ((500, 64, 33), 512, 32, 4, 50, 32, 1, 50, 25),
    "blocks of 16, whole block": ((300, 33), 300, 16, 4, 20, 16, 2, 64, 64),
    "blocks of 128": ((900, 300), 1000, 128, 3, 0, 128, 1, 64, 128),
    "blocks of 16": ((300, 33), 300, 16, 9, 5, 2, 2, 64, 32),
    "odd head sizes": ((260, 90), 300, 32, 4, 40, 4, 3, 40, 24),
    "largest heads": ((300, 190), 300, 64, 3, 0, 2, 1, 256, 256),
    "largest heads, query-major": ((300, 190), 300, 64, 3, 30, 64, 1, 256, 192),
    "one block only": ((30, 64, 5), 64, 64, 1, 0, 1, 2, 32, 32),
}


def problem(case, dtype, seed=0, **options):
    lengths, N, BS, S, W, r, H, D, V = CASES[case]
    inputs = {n: make_jagged(lengths, (H, s), dtype=dtype, device="cuda", seed=seed + i, **options)
              for i, (n, s) in enumerate((("q", D), ("k", D), ("v", V)))}  # fmt: skip
    names = ("g_cmp", "g_slc", "g_swa") if W else ("g_cmp", "g_slc")
    for i, name in enumerate(names):
        inputs[name] = make_jagged(lengths, (H,), dtype=dtype, device="cuda", seed=seed + 5 + i).sigmoid()
    shape = dict(block_size=BS, block_counts=S, window_size=W, selection_group=r)
    return inputs, make_offsets(lengths, device="cuda", dtype=torch.int32), N, shape


def kernel(offsets, N, shape, **more):
    def run(q, k, v, g_cmp, g_slc, g_swa=None):
        return bsa_attention(q, k, v, offsets, N, (g_cmp, g_slc, g_swa), **shape, **more)

    return run


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_reference(case, dtype, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    try:
        agree(*problem(case, dtype))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("group", [1, 2, 16, 32, 64])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_every_group_of_every_block(block_size, group, biased):
    """Draw lengths, heads and dtypes, which tile sizes depend on; where a group is a block, test all dtypes."""
    if group > block_size:
        pytest.skip("a group lies within a block")
    draw = random.Random(1000 * block_size + group)
    dtypes = ["bfloat16", "float16", "float32"]
    for dtype in dtypes if group == block_size else draw.sample(dtypes, 1):
        check(
            "cuda",
            lengths=[draw.randrange(400) for _ in range(draw.randrange(1, 4))] + [draw.randrange(400, 700)],
            max_seq_len=700,
            heads=draw.randrange(1, 3),
            head_size=draw.choice([16, 25, 50, 64, 128]),
            value_size=draw.choice([16, 25, 50, 64, 128]),
            dtype=dtype,
            block_size=block_size,
            block_counts=4,
            window_size=draw.choice([0, 37]),
            selection_group=group,
            seed=group,
            position=biased,
            buckets=128 if biased else None,
        )


def test_non_contiguous_inputs():
    inputs, offsets, N, shape = problem("groups of 2, window", torch.bfloat16, contiguous=False)
    run = kernel(offsets, N, shape)
    dense = {n: x.contiguous() for n, x in inputs.items()}
    torch.testing.assert_close(run(**inputs), run(**dense), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["groups of 2, window", "query-major, whole block"])
def test_deterministic_mode_repeats_bit_for_bit(case):
    inputs, offsets, N, shape = problem(case, torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()}
            out = kernel(offsets, N, shape)(**leaves)
            runs.append((out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("tables", [dict(position=True), dict(buckets=20), dict(position=True, buckets=128)])
@pytest.mark.parametrize("group", [2, 64])
def test_bias(group, tables, dtype):
    """Test times seconds and years apart, and unordered ones, with both ways of adding up the tables' gradients."""
    for spread, deterministic in ((10.0, False), (4e4, True), (1e9, False)):
        check(
            "cuda", lengths=[900, 0, 77, 400], max_seq_len=911, heads=2, head_size=64, value_size=32, dtype=dtype,
            block_size=64, block_counts=4, window_size=30, selection_group=group, spread=spread,
            deterministic=deterministic, **tables,
        )  # fmt: skip


@pytest.mark.parametrize("case", ["groups of 2, window", "query-major, whole block"])
def test_deterministic_mode_repeats_the_tables_gradients(case):
    inputs, offsets, N, shape = problem(case, torch.bfloat16)
    lengths = CASES[case][0]
    inputs |= {"position": torch.randn(N, device="cuda"), "time": torch.randn(129, device="cuda")}
    times = make_timestamps(lengths, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()}
            bias = RelativeBias(leaves["position"], leaves["time"], times)
            gates = (leaves["g_cmp"], leaves["g_slc"], leaves.get("g_swa"))
            out = bsa_attention(leaves["q"], leaves["k"], leaves["v"], offsets, N, gates, **shape, bias=bias)
            runs.append(torch.autograd.grad(out.float().square().sum(), list(leaves.values())))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_popular_blocks_are_split():
    """Every query chooses the same few blocks: their lists span several chunks and are merged."""
    lengths, H, D = (6000,), 1, 32
    q = make_jagged(lengths, (H, D), device="cuda", dtype=torch.float32).abs()
    k = make_jagged(lengths, (H, D), device="cuda", seed=1) * 0.1
    k[:48] += 1.0
    v = make_jagged(lengths, (H, D), device="cuda", seed=2)
    offsets = make_offsets(lengths, device="cuda")
    inputs = dict(q=q, k=k, v=v, g_cmp=q[..., 0].sigmoid(), g_slc=q[..., 1].sigmoid())
    shape = dict(block_size=16, block_counts=4, window_size=0, selection_group=1)

    def reference(q, k, v, g_cmp, g_slc):
        scale = q.shape[-1] ** -0.5
        return bsa_attention_reference(q, k, v, offsets, 6000, (g_cmp, g_slc, None), **shape, scale=scale)[0]

    names = ["output", *(f"grad of {n}" for n in inputs)]
    floor = dict.fromkeys(names, 8 * torch.finfo(torch.float32).eps)
    compare_with_reference(kernel(offsets, 6000, shape), reference, inputs, factor=3, floor=floor)


@pytest.mark.parametrize("group", [1, 2, 64])
def test_memory(group):
    """Peak beyond inputs, outputs and gradients: at most 1.5 times q, k and v together."""
    T, H, D = 131072, 4, 128
    q, k, v = (torch.randn(T, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gates = [torch.rand(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    offsets = make_offsets((T,), device="cuda")
    grad = torch.randn_like(v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = bsa_attention(q, k, v, offsets, T, (*gates, None), block_size=64, block_counts=16, selection_group=group)
    forward = torch.cuda.max_memory_allocated() - before - out.nbytes
    grads = torch.autograd.grad(out, (q, k, v, *gates), grad)
    both = torch.cuda.max_memory_allocated() - before - out.nbytes - sum(g.nbytes for g in grads)
    size = q.nbytes + k.nbytes + v.nbytes
    print(f"group {group}: forward {forward / size:.2f}, with backward {both / size:.2f} of q, k, v")
    assert forward <= 1.5 * size
    assert both <= 1.5 * size


def test_compiles_without_graph_breaks_and_without_recompiling():
    inputs, offsets, N, shape = problem("groups of 2, window", torch.bfloat16)
    run = kernel(offsets, N, shape)
    compiled = torch.compile(run, fullgraph=True)
    torch.testing.assert_close(compiled(**inputs), run(**inputs), rtol=0, atol=1e-4)


def test_batches_do_not_recompile_kernels():
    from hstu_sparse.bsa import blocks, key_major, query_major

    def step(lengths):
        inputs = {n: make_jagged(lengths, (2, 64), device="cuda", dtype=torch.bfloat16) for n in ("q", "k", "v")}
        gates = [make_jagged(lengths, (2,), device="cuda", dtype=torch.bfloat16).sigmoid() for _ in range(2)]
        leaves = [x.requires_grad_() for x in (*inputs.values(), *gates)]
        offsets = make_offsets(lengths, device="cuda")
        out = bsa_attention(*leaves[:3], offsets, 512, (*gates, None), block_size=32, block_counts=4, selection_group=2)
        torch.autograd.grad(out.sum(), leaves)

    def compiled():
        kernels = [x for m in (blocks, key_major, query_major) for x in vars(m).values() if hasattr(x, "device_caches")]
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    step((300, 17))
    count = compiled()
    for lengths in ((500, 1, 64), (16,), (3,), (512, 512, 512, 512)):
        step(lengths)
    assert count > 0
    assert compiled() == count
