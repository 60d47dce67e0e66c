"""The htree kernels on a GPU: every dtype, deep trees, the dense limit, causality to the bit, the same bits twice."""

import pytest
import torch

from hstu_sparse import htree_attention
from tests.random.cases.htree import agree, make_inputs
from tests.support.budgets import EDGE_CASES, make_offsets

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

CASES = {
    # lengths, N, query heads, key/value heads, D, V, r, top_k
    "one layer, groups of 16": ((255, 256, 257), 300, 32, 2, 32, 32, 16, 32),
    "two layers, groups of 16": ((1023, 1025, 4096), 4096, 16, 1, 32, 32, 16, 64),
    "three layers, groups of 4": ((63, 64, 65, 1023), 1023, 8, 2, 64, 64, 4, 8),
    "four layers, groups of 1": ((31, 32, 33, 511), 511, 2, 2, 16, 16, 2, 16),
    "three layers of siblings": ((4097, 300), 4097, 32, 2, 32, 32, 16, 8),
    "the default's many candidates": ((9000,), 9000, 16, 1, 32, 32, 16, 512),
    "heads of 128": ((700, 1), 700, 16, 1, 128, 128, 16, 4),
    "odd heads": ((600,), 600, 6, 2, 50, 37, 7, 5),
    "groups of 64": ((600,), 600, 64, 1, 32, 32, 16, 4),
}


def problem(lengths, N, heads, kv_heads, D, V, rate, top_k, **options):
    inputs = make_inputs(lengths, heads, kv_heads, D, V, "cuda", **options)
    return inputs, make_offsets(lengths, device="cuda"), N, rate, top_k


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_reference(case, dtype):
    agree(*problem(*CASES[case], dtype=dtype), factor=4.0)


GROUPED = {
    # lengths, N, query heads, key/value heads, D, V, r, top_k, selection_group
    "a recommender's": ((8192, 5000), 8192, 4, 1, 64, 64, 16, 32, 16),
    "three layers": ((9000, 1), 9000, 4, 1, 64, 64, 16, 8, 16),
    "a recommender's short ones": ((200, 199, 3, 0, 120), 200, 4, 1, 64, 64, 8, 16, 8),
    "a key head for each head": ((200, 199, 3, 0, 120), 200, 4, 4, 64, 64, 16, 8, 16),
    "groups of 4": ((200, 199, 3, 0, 120), 200, 4, 1, 64, 64, 4, 32, 4),
    "groups of 2, heads of 25": ((700,), 700, 2, 2, 50, 25, 4, 8, 2),
    "dense": ((300, 40), 300, 8, 2, 32, 32, 16, 32, 8),
    "two tiles of rows": ((700, 300), 700, 16, 1, 32, 32, 16, 8, 8),
    "heads of 128": ((700, 1), 700, 8, 1, 128, 128, 16, 4, 16),
    "heads of 256": ((700,), 700, 2, 1, 256, 200, 16, 4, 4),
    "odd heads and rates": ((600,), 600, 6, 2, 50, 37, 6, 5, 3),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", GROUPED)
def test_groups_agree_with_reference(case, dtype):
    *sizes, selection_group = GROUPED[case]
    agree(*problem(*sizes, dtype=dtype), factor=4.0, selection_group=selection_group)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rate, most, top_k, group", [(2, 7, 4, 4), (4, 5, 2, 1), (16, 3, 4, 16)])
def test_lengths_around_powers(rate, most, top_k, group, dtype):
    lengths = [rate**power + off for power in range(1, most + 1) for off in (-1, 0, 1)]
    agree(*problem(lengths, max(lengths), 2 * group, 2, 32, 32, rate, top_k, dtype=dtype), factor=4.0)


@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_cases(name):
    lengths, N = EDGE_CASES[name]
    agree(*problem(lengths, N, 4, 2, 16, 24, 2, 4))


@pytest.mark.parametrize("selection_group", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_mode_gives_the_same_bits(dtype, selection_group):
    inputs, offsets, *rest = problem((900, 3000), 3000, 32, 2, 32, 32, 16, 8, dtype=dtype)
    options = dict(selection_group=selection_group)
    torch.use_deterministic_algorithms(True)
    try:
        agree(inputs, offsets, *rest, factor=4.0, **options)
        N, rate, top_k = rest
        leaves = [x.requires_grad_() for x in inputs.values()]
        grad = torch.randn_like(inputs["q"])
        results = []
        for _ in range(2):
            out = htree_attention(*leaves, offsets, N, compression_rate=rate, top_k=top_k, **options)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
        assert all(torch.equal(a, b) for a, b in zip(*results))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("value", [1e4, float("nan")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rate, group", [(4, 1), (16, 1), (4, 2), (16, 16)])
def test_the_future_does_not_reach_the_past(rate, group, dtype, value):
    """Finite numbers of later tokens change nothing; NaN and infinity may reach the tokens of the same group."""
    inputs, offsets, N, rate, top_k = problem((5000,), 5000, 32, 2, 32, 32, rate, 8, dtype=dtype)
    options = dict(seq_offsets=offsets, max_seq_len=N, compression_rate=rate, top_k=top_k, selection_group=group)
    before = htree_attention(**inputs, **options)
    for t in (0, 15, 16, 300, 2047, 4095, 4998):
        if value != value:
            t |= group - 1
        changed = {name: x.clone() for name, x in inputs.items()}
        for x in changed.values():
            x[t + 1 :] = value
        assert torch.equal(before[: t + 1], htree_attention(**changed, **options)[: t + 1])


def test_enough_nodes_are_dense_attention_with_rope():
    inputs, offsets, N, *_ = problem((1000,), 1000, 16, 2, 32, 32, 16, 64)
    out = htree_attention(**inputs, seq_offsets=offsets, max_seq_len=N, compression_rate=16, top_k=64)
    position = torch.arange(N, device="cuda", dtype=torch.float64)[:, None]
    angle = position * 10000.0 ** (-2.0 * torch.arange(16, device="cuda") / 32)
    turned = []
    for x in (inputs["q"].double(), inputs["k"].double()):
        pairs = torch.complex(x[..., :16], x[..., 16:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
        turned.append(torch.cat([pairs.real, pairs.imag], -1).transpose(0, 1))
    value = inputs["v"].double().transpose(0, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x[None] for x in (*turned, value)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out.double(), expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("selection_group", [1, 8])
def test_torch_compile(selection_group):
    inputs, offsets, N, rate, top_k = problem((300, 40), 300, 16, 1, 32, 32, 16, 4)
    options = dict(compression_rate=rate, top_k=top_k, selection_group=selection_group)
    plain = htree_attention(**inputs, seq_offsets=offsets, max_seq_len=N, **options)
    compiled = torch.compile(lambda q, k, v: htree_attention(q, k, v, offsets, N, **options), fullgraph=True)
    assert torch.equal(plain, compiled(**inputs))
