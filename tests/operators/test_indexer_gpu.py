"""The lightning indexer, sparse attention and the index loss on a GPU: every dtype, long sequences, determinism."""

import pytest
import torch

from hstu_sparse import index_scores, indexer_loss, lightning_indexer, sparse_attention
from tests.random.cases import indexer as cases
from tests.support.budgets import make_jagged, make_offsets, make_timestamps

pytestmark = pytest.mark.gpu

DTYPES = ["bfloat16", "float16", "float32"]


def agree(operator, lengths, dtype, **changes):
    options = dict(
        heads=4, size=64, value_size=64, top_k=40, position=False, time=False, exact=False, strided=False,
        wide_indices=False, deterministic=False, seed=3,
    )  # fmt: skip
    cases.check("cuda", operator=operator, lengths=list(lengths), dtype=dtype, **options | changes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_agrees_with_reference(operator, dtype):
    agree(operator, (300, 0, 77, 1), dtype)
    agree(operator, (200, 90), dtype, heads=16, size=128, value_size=100, position=True, time=True, deterministic=True)
    agree(operator, (90, 130), dtype, heads=20, size=200, value_size=256, top_k=130, wide_indices=True, strided=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", [name for name in cases.OPERATORS if name != "compute_index_loss_sparse"])
def test_groups_agree_with_reference(operator, dtype):
    """Tiles of one token to a whole group, groups of several tiles, and those that end with a sequence."""
    agree(operator, (300, 0, 77, 1), dtype, group=16, position=True, time=True)
    agree(operator, (200, 90), dtype, heads=16, size=128, value_size=100, group=7, time=True, deterministic=True)
    agree(operator, (90, 130), dtype, heads=20, size=200, value_size=256, top_k=130, group=50, strided=True)
    agree(
        operator, (150, 40), dtype, heads=1, size=32, value_size=32, top_k=9, group=2, position=True, wide_indices=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", ["sparse_attention", "indexer_loss"])
def test_key_heads_agree_with_reference(operator, dtype):
    agree(operator, (300, 0, 77, 1), dtype, key_heads=4, group=4, top_k=32, position=True, time=True)
    agree(operator, (200, 90), dtype, heads=8, key_heads=8, size=16, value_size=16, group=8, time=True)
    agree(operator, (200, 90), dtype, heads=6, key_heads=3, size=100, value_size=64, group=7, deterministic=True)
    agree(operator, (90, 130), dtype, heads=4, key_heads=2, size=200, value_size=256, top_k=130, group=50, strided=True)
    agree(operator, (90, 130), dtype, heads=5, key_heads=5, size=50, value_size=50, top_k=200, group=16, time=True)
    agree(operator, (150, 40), dtype, key_heads=2, size=32, value_size=32, top_k=9, position=True)
    agree(operator, (150, 40), dtype, heads=6, key_heads=3, time=True, deterministic=True)


@pytest.mark.parametrize("group", [2, 8])
def test_groups_choose_among_many(group):
    """More tokens than a query has room for: every kernel of the choice, up to the largest group that kernels take."""
    agree("lightning_indexer", (19000, 700), "bfloat16", group=16 * group, exact=True, time=True)
    agree("lightning_indexer", (2900, 1), "bfloat16", group=group, position=True, time=True)


@pytest.mark.parametrize("top_k", [100, 512, 1000, 2048, 2100])
def test_loss_of_each_size(top_k):
    """Scores of one block, of many, and more than are kept."""
    for operator in ("indexer_loss", "compute_index_loss_sparse"):
        agree(operator, (260, 30), "bfloat16", heads=16, size=128, top_k=top_k)
        agree(operator, (90,), "float16", heads=33, size=40, top_k=top_k)


def test_loss_needs_one_buffer_of_its_gradient_s_size():
    rows, top_k = 2000, 512
    q, k = torch.randn(rows, 16, 64, device="cuda").bfloat16(), torch.randn(rows, 64, device="cuda").bfloat16()
    scores = torch.randn(rows, top_k, device="cuda", requires_grad=True)
    indices = torch.randint(0, rows, (rows, top_k), device="cuda", dtype=torch.int32)
    offsets = make_offsets((rows,), device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(indexer_loss(q, k, scores, indices, offsets), scores)
        assert torch.cuda.max_memory_allocated() - before < 1.2 * 4 * scores.numel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_heads", [1, 3, 4, 9])
def test_choice_among_many(index_heads, dtype):
    """More tokens than a query has room for: sample, threshold and the collected candidates at their real sizes."""
    agree("lightning_indexer", (1900, 700), dtype, heads=index_heads)
    agree("lightning_indexer", (1500,), dtype, heads=index_heads, size=16, top_k=7, exact=True)
    agree("lightning_indexer", (1500,), dtype, heads=index_heads, size=40, exact=True, position=True, time=True)


@pytest.mark.parametrize("top_k", [1, 64, 1000, 2048])
@pytest.mark.parametrize("kind", ["random", "all zero", "none above zero", "ascending", "descending"])
def test_choice_of_each_distribution(kind, top_k):
    """Whole numbers, so that scores are exact and ties are many; the choice by a stable sort."""
    n = 9000
    generator = torch.Generator("cuda").manual_seed(0)

    def whole(*shape):
        return torch.randint(-2, 3, shape, generator=generator, device="cuda").bfloat16()

    iq, ik, w = whole(n, 4, 64), whole(n, 64), whole(n, 4)
    if kind == "all zero":
        w = torch.zeros_like(w)
    if kind == "none above zero":
        w = -w.abs()
    if kind.endswith("scending"):
        # Two channels make a number below 128 * 128 that grows or falls with the position.
        rank = torch.arange(n, device="cuda")
        rank = rank if kind == "ascending" else n - rank
        iq, ik, w = torch.zeros_like(iq), torch.zeros_like(ik), torch.ones_like(w)
        ik[:, 0], ik[:, 1] = rank // 128, rank % 128
        iq[:, :, 0], iq[:, :, 1] = 128, 1
    scores, indices = lightning_indexer(iq, ik, w, make_offsets((n,), device="cuda"), top_k)
    for begin in range(0, n, 3000):
        rows = slice(begin, begin + 3000)
        every = torch.einsum("tje,se->tjs", iq[rows].float(), ik.float()).relu()
        every = (every * w[rows].float()[..., None]).sum(1)
        every.masked_fill_(
            torch.arange(n, device="cuda") > torch.arange(begin, begin + 3000, device="cuda")[:, None], -1e9
        )
        best = every.sort(dim=1, descending=True, stable=True)
        chosen = best.indices[:, :top_k].masked_fill(best.values[:, :top_k] == -1e9, n).sort(1).values
        assert torch.equal(indices[rows], chosen.masked_fill(chosen == n, -1).int())
        chosen_scores = every.gather(1, chosen.clamp(max=n - 1)).masked_fill(chosen == n, -torch.inf)
        assert torch.equal(scores[rows], chosen_scores)


def test_the_sample_rarely_misleads(monkeypatch):
    """With as many keys as in the benchmark, hardly any row needs the kernel that reads its keys again."""
    from hstu_sparse.indexer import launch_indexer, topk

    seen = []
    run = launch_indexer.run

    def look(kernel, programs, *arguments, **settings):
        if kernel is topk.lightning_indexer_refill_kernel:
            named = kernel.arg_names.index
            counts, tokens, capacity, top_k = (arguments[named(n)] for n in ("counts", "tokens", "capacity", "K"))
            num_candidates, t = counts[tokens >= 0], tokens[tokens >= 0]
            seen.append(((num_candidates > capacity) | (num_candidates < (t + 1).clamp(max=top_k))).sum().item())
        run(kernel, programs, *arguments, **settings)

    monkeypatch.setattr(launch_indexer, "run", look)
    n, generator = 20_000, torch.Generator("cuda").manual_seed(0)
    iq, ik, w = (
        torch.randn(n, *shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        for shape in ((4, 64), (64,), (4,))
    )
    lightning_indexer(iq, ik, w, make_offsets((n,), device="cuda"), 1024)
    assert seen and sum(seen) <= 2, seen


def problem(lengths, dtype=torch.bfloat16):
    make = lambda seed, *inner: make_jagged(lengths, inner, dtype=dtype, device="cuda", seed=seed).requires_grad_()
    named = dict(q=make(1, 4, 64), k=make(2, 64), v=make(3, 64), iq=make(4, 4, 32), ik=make(5, 32), w=make(6, 4))
    position = torch.randn(2000, device="cuda").requires_grad_()
    time = torch.randn(129, device="cuda").requires_grad_()
    from hstu_sparse import RelativeBias

    bias = RelativeBias(position, time, make_timestamps(lengths, device="cuda"))
    return named, bias, make_offsets(lengths, device="cuda")


def layer(q, k, v, iq, ik, w, bias, offsets, top_k=50, group=1):
    shared = dict(selection_group=group)
    scores, indices = lightning_indexer(iq, ik, w, offsets, top_k, bias=bias, **shared)
    out = sparse_attention(q, k, v, indices, offsets, bias=bias, **shared)
    valid = torch.ones(len(q), device="cuda") > 0
    loss = indexer_loss(q, k, scores, indices, offsets, bias=bias, valid=valid, **shared)
    more = index_scores(iq, ik, w, indices, offsets, **shared)[:, 0]
    return out.float().square().mean() + loss + more.masked_fill(more == -torch.inf, 0).square().mean()


@pytest.mark.parametrize("group", [1, 8])
def test_deterministic_algorithms_give_the_same_bits(group):
    named, bias, offsets = problem((900, 0, 333))
    leaves = [*named.values(), bias.position, bias.time]
    step = lambda: torch.autograd.grad(layer(**named, bias=bias, offsets=offsets, group=group), leaves)
    with cases.deterministic_algorithms(True):
        first, second = step(), step()
    assert all(map(torch.equal, first, second))
    other = step()
    for a, b in zip(first, other):
        assert (a - b).float().norm() < 2e-2 * b.float().norm()


@pytest.mark.parametrize("group", [1, 8])
def test_another_batch_compiles_nothing_and_nothing_waits(group):
    from hstu_sparse.indexer import attention, choices, loss, scores, topk

    modules = (attention, choices, loss, scores, topk)
    kernels = [x for module in modules for n, x in vars(module).items() if n.endswith("_kernel")]

    def step(lengths, mode="error"):
        named, bias, offsets = problem(lengths)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            options = dict(bias=bias, offsets=offsets, group=group)
            torch.autograd.grad(layer(**named, **options), [*named.values(), bias.position])
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def count():
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    step((900, 300), "default")  # the table that finds time buckets is copied to the GPU once
    before = count()
    assert before >= 9
    for lengths in ((901, 300), (16, 700, 1, 0), (1600,), (17, 16, 1000)):
        step(lengths)
    assert count() == before


def test_one_graph():
    named, bias, offsets = problem((90, 33), dtype=torch.float32)
    leaves = list(named.values())
    expected = torch.autograd.grad(layer(**named, bias=bias, offsets=offsets), leaves)
    compiled = torch.compile(layer, fullgraph=True)
    actual = torch.autograd.grad(compiled(**named, bias=bias, offsets=offsets), leaves)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


def test_the_loss_saves_nothing_for_each_head():
    """Forward and backward of a padded chunk allocate little more memory than the gradient."""
    from hstu_sparse.compat import compute_index_loss_sparse

    rows, keys, top_k = 1024, 4096, 1024
    query = torch.randn(1, 16, rows, 128, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(1, keys, 128, device="cuda", dtype=torch.bfloat16)
    score = torch.randn(1, rows, top_k, device="cuda", requires_grad=True)
    indices = torch.randint(0, keys, (1, rows, top_k), device="cuda", dtype=torch.int32)

    def step():
        loss = compute_index_loss_sparse(query, key, score, indices, 128**-0.5, chunk_offset=keys - rows)
        return torch.autograd.grad(loss, score)

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1.2 * 4 * rows * top_k
