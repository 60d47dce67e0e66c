"""Flash attention on a GPU: every dtype against the reference, compilation, the same bits in every run."""

import random

import pytest
import torch

from hstu_sparse import flash_attention
from hstu_sparse.core.mask import Mask
from tests.random.cases import flash
from tests.support.budgets import make_jagged, make_offsets

pytestmark = pytest.mark.gpu

BASE = dict(
    lengths=[700, 0, 130, 1, 333],
    key_lengths=None,
    heads=4,
    kv_heads=4,
    size=128,
    value_size=128,
    causal=True,
    window=(-1, -1),
    alibi=None,
    dropout=0.0,
    contiguous=True,
    seed=1,
)
MASK = dict(targets=True, context=40, context_sees_all=False, target_group_size=1, full_attention_prefix=0)
CASES = {
    "causal": {},
    "full": dict(causal=False),
    "window": dict(causal=False, window=(100, 37)),
    "causal window, shared keys": dict(window=(150, -1), kv_heads=2),
    "one key head, alibi": dict(kv_heads=1, alibi="sequences", size=64, value_size=64),
    "dropout": dict(dropout=0.2, size=64, value_size=64),
    "dropout, alibi, wide": dict(dropout=0.2, alibi="heads", lengths=[300, 65]),
    "odd sizes": dict(size=50, value_size=25, contiguous=False),
    "small heads": dict(size=16, value_size=32),
    "large heads": dict(size=256, value_size=256, lengths=[300, 190], heads=2, kv_heads=1),
    "values wider": dict(size=64, value_size=192, lengths=[300, 190]),
    "other key lengths": dict(key_lengths=[900, 5, 0, 77, 20]),
    "more queries than keys": dict(key_lengths=[300, 5, 10, 1, 333]),
    "multiples of the tiles": dict(lengths=[512, 128, 256]),
    "context that sees all, groups": dict(mask=MASK | dict(context_sees_all=True, target_group_size=3)),
    "context, prefix, window": dict(mask=MASK | dict(full_attention_prefix=70), window=(100, -1), alibi="heads"),
    "much context, shared keys": dict(mask=MASK | dict(context=300, context_sees_all=True), window=(5, -1), kv_heads=2),
    "thousands": dict(lengths=[4096, 1111], heads=2, kv_heads=2),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_against_reference(case, dtype):
    flash.check("cuda", **BASE | dict(dtype=dtype) | CASES[case])


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.big_gpu] * (n in (0, 3, 5))) for n in range(8)])
def test_random_shapes(seed):
    flash.check("cuda", **flash.draw(random.Random(seed), False))


def attention_of(lengths, dtype=torch.bfloat16, size=128, **options):
    inputs = [make_jagged(lengths, (4, size), dtype=dtype, device="cuda", seed=i).requires_grad_() for i in range(3)]
    return inputs, lambda: flash_attention(*inputs, make_offsets(lengths, device="cuda"), causal=True, **options)


def test_the_same_bits_in_every_run():
    inputs, call = attention_of([1000, 24, 513], dropout=0.1, seed=torch.tensor([3], device="cuda"))
    grad = torch.randn_like(call())
    first, second = (torch.autograd.grad(call(), inputs, grad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_recompilation_for_other_batches():
    from hstu_sparse.flash.forward import flash_attention_fwd_kernel

    _, call = attention_of([1000, 24, 513], backend="triton")
    call()
    cache = flash_attention_fwd_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(cache)
    for lengths in ([999, 1], [16] * 20, [1], [640, 3, 3]):
        attention_of(lengths, backend="triton")[1]()
    assert len(cache) == before


def test_compiles_whole():
    inputs, call = attention_of([300, 41])
    grad = torch.randn_like(call())
    expected = torch.autograd.grad(call(), inputs, grad)
    actual = torch.autograd.grad(torch.compile(call, fullgraph=True)(), inputs, grad)
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_a_gradient_of_expanded_rows():
    inputs, call = attention_of([300, 41])
    row = torch.randn(4, 128, device="cuda", dtype=torch.bfloat16)
    whole = row.repeat(341, 1, 1)
    actual, expected = (torch.autograd.grad(call(), inputs, grad) for grad in (row.expand(341, 4, 128), whole))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_opcheck():
    from hstu_sparse.flash.launch import flash_operator

    (q, k, v), _ = attention_of([40, 9], size=64)
    offsets = make_offsets([40, 9], device="cuda")
    torch.library.opcheck(
        torch.ops.hstu_sparse.flash_fwd.default, (q, k, v, offsets, offsets, None, *Mask(), None, None, -1, 0, 0.1, 0.0)
    )
    assert flash_operator is not None


def test_memory_is_the_outputs():
    """Nothing of the size of the weights, and no padding."""
    inputs, call = attention_of([8192, 1] + [7] * 50)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * inputs[0].numel() * 2


@pytest.mark.multigpu
def test_a_device_that_is_not_the_current_one():
    inputs, call = attention_of([300, 41])
    on_second_gpu = [x.detach().to("cuda:1").requires_grad_() for x in inputs]
    offsets = make_offsets([300, 41], device="cuda:1")
    out = flash_attention(*on_second_gpu, offsets, causal=True)
    assert torch.equal(out.cpu(), call().cpu())
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), on_second_gpu))


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_of_a_ring_add_up(parts, dtype):
    """Keys in zigzag parts one after another, as a ring brings them: forward and gradients of the whole."""
    from hstu_sparse.flash.launch import Launch
    from hstu_sparse.flash.reference import Options
    from hstu_sparse.ring.plan import cut_sequences, whole_plan

    lengths = [1000, 3, 700]
    inputs, call = attention_of(lengths, dtype)
    offsets = make_offsets(lengths, device="cuda")
    grad = torch.randn_like(inputs[0])
    whole = [call(), *torch.autograd.grad(call(), inputs, grad)]
    exact = flash_attention(*(x.double() for x in inputs), offsets, causal=True, backend="reference")
    options, sums = Options(128**-0.5, -1, 0), [torch.zeros_like(x, dtype=torch.float32) for x in whole]
    places = [cut_sequences(offsets, rank, parts, zigzag=True)[0] for rank in range(parts)]
    for rank, local in enumerate(places):
        plan = whole_plan(offsets, rank, parts, zigzag=True)
        q, k, v = (x.detach()[local] for x in inputs)
        out, lse = torch.zeros_like(q, dtype=torch.float32), torch.empty(4, len(local), device="cuda")
        dq = torch.zeros_like(out)
        blocks = [(plan.layout(s), *(x.detach()[places[s]] for x in inputs[1:])) for s in range(parts)]
        for step, (layout, key, value) in enumerate(blocks):
            Launch(q, key, value, layout, options).forward(out, lse, before=out if step else None)
        rows = Launch(q, k, v, blocks[0][0], options).rows(out.to(dtype), grad[local], lse)
        for step, (layout, key, value) in enumerate(blocks):
            launch = Launch(q, key, value, layout, options)
            dk, dv = (torch.empty_like(x, dtype=torch.float32) for x in (key, value))
            launch.dkv(grad[local], rows, dk, dv)
            launch.dq(grad[local], rows, dq, before=dq if step else None)
            sums[2][places[step]] += dk
            sums[3][places[step]] += dv
        sums[0][local], sums[1][local] = out, dq
    assert (sums[0] - exact).norm() < 1e-2 * exact.norm()
    for ring, single in zip(sums, whole, strict=True):
        assert (ring - single.float()).norm() < (1e-2 if dtype == torch.bfloat16 else 1e-5) * single.float().norm()
