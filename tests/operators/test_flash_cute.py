"""FlashAttention-4 as a backend: what it refuses, the calls that make a ring, and on a GPU its results."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hstu_sparse import flash_attention, ring_flash_attention
from hstu_sparse.flash import cute
from hstu_sparse.flash.reference import Options
from tests.operators import cute_stand_in
from tests.operators.distributed import run_ranks
from tests.operators.ring_on_gpus import capture
from tests.operators.test_flash_gpu import BASE, attention_of
from tests.operators.test_ring import assert_as_one_process
from tests.random.cases import flash
from tests.support.budgets import make_jagged, make_offsets

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("attend", [flash_attention, ring_flash_attention])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(dropout=0.1), "does not support dropout; use backend='triton'"),
        (dict(alibi_slopes=torch.ones(2)), "does not support alibi_slopes; use backend='triton'"),
        (dict(dtype=torch.float32), "does not support torch.float32; use backend='triton'"),
        (dict(size=50), r"head sizes D=50, V=50 \(only D = V, multiples of 8 from 24 to 256\); use backend='triton'"),
        (dict(size=16), r"head sizes D=16, V=16 \(only D = V, multiples of 8 from 24 to 256\); use backend='triton'"),
        (dict(size=264), "head sizes D=264, V=264 .*; use backend='triton'"),
        (dict(value_size=128), "head sizes D=64, V=128 .*; use backend='triton'"),
        ({}, "needs CUDA tensors, got cpu; use backend='reference'"),
    ],
)
def test_refusals(attend, changes, message):
    """Each error is one line that names what to use instead, and needs neither FlashAttention-4 nor a GPU."""
    case = dict(dtype=torch.bfloat16, size=64) | changes
    dtype, size = case.pop("dtype"), case.pop("size")
    value_size = case.pop("value_size", size)
    q, k, v = (make_jagged([5, 3], (2, width), dtype=dtype) for width in (size, size, value_size))
    with pytest.raises(ValueError, match=f"flash_attention: backend='cute' .*{message}$"):
        attend(q, k, v, make_offsets([5, 3]), backend="cute", **case)


def test_an_unknown_backend_is_refused():
    q = make_jagged([5], (2, 16))
    with pytest.raises(ValueError, match="one of auto, triton, reference, cute, got 'foo'"):
        flash_attention(q, q, q, make_offsets([5]), backend="foo")


def test_auto_on_a_cpu_is_the_reference():
    q = make_jagged([5000], (1, 128), dtype=torch.bfloat16)
    assert not cute.faster_with_cute(q, 128, (5000, 1), Options(1.0, -1, 0))


@pytest.mark.skipif(cute.INSTALLED, reason="flash-attn-4 is installed")
@pytest.mark.gpu
def test_without_the_extra():
    _, call = attention_of([300], backend="cute")
    with pytest.raises(ValueError, match=r"needs flash-attn-4 .the extra `cute`.; use backend='triton'"):
        call()


OPTIONS = ("full", "causal", "scaled", "shared keys")
WINDOWS = ("window", "causal window", "narrow window", "right window")
RING_CASES = [(form, option) for form in ("plain", "zigzag", "varlen", "zigzag varlen") for option in OPTIONS]
RING_CASES += [(form, option) for form in ("plain", "zigzag") for option in WINDOWS]


@pytest.mark.parametrize(("world", "cases", "single_heads"), [(2, RING_CASES, False), (3, RING_CASES[3::4], True)])
def test_the_calls_of_a_ring_make_the_whole_attention(world, cases, single_heads):
    """Imitate FlashAttention-4's calls on the CPU, to test rows, masks, and how parts are merged and sent."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    ranks = run_ranks(cute_stand_in.all_results, world, world, cases, single_heads)
    for form, option in cases:
        assert_as_one_process(form, option, world, ranks)


def test_the_rows_of_a_call():
    """FlashAttention-4 takes offsets and lengths of stride 1, which a tensor of one number need not have."""
    from hstu_sparse.ring.plan import whole_plan
    from hstu_sparse.ring.softmax import step_parts

    plan = whole_plan(make_offsets([8]), 0, 2, zigzag=True)
    (part,) = step_parts(plan, 1, Options(1.0, -1, 0))  # the later half of this rank's rows sees all of the other's
    rows = part.q.begins, part.q.lengths, part.k.begins
    assert [x.tolist() for x in rows] == [[2, 4], [2], [0, 4]] and part.k.lengths is None
    assert all(x.stride() == (1,) and x.dtype == torch.int32 for x in rows)


def test_a_window_wants_sequences_of_one_length():
    from hstu_sparse.ring.plan import whole_plan
    from hstu_sparse.ring.softmax import check_plan_for_cute

    for lengths in ([8, 8], [8], []):
        check_plan_for_cute("f", whole_plan(make_offsets(lengths), 0, 2, zigzag=True), Options(1.0, 5, 0))
    plan = whole_plan(make_offsets([8, 12]), 0, 2)
    check_plan_for_cute("f", plan, Options(1.0, -1, 0))
    with pytest.raises(ValueError, match=r"f: backend='cute' takes a window only .* use backend='triton'"):
        check_plan_for_cute("f", plan, Options(1.0, 5, 0))


@pytest.mark.parametrize("tokens", [37, pytest.param(5_759, marks=pytest.mark.gpu)])
def test_merging_rows(tokens):
    """A part's output is ignored if its log-sum-exp is -inf; if both are, the output is 0.

    With many rows: a program's threads read the log-sum-exp before one of them writes it.
    """
    merging = pytest.importorskip("hstu_sparse.flash.merge")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scores = torch.randn(2, 3, tokens, device=device)  # of two keys, for 3 heads
    values = torch.randn(2, tokens, 3, 20, device=device)
    scores[0, :, :9] = scores[1, :, 5:14] = -torch.inf
    weights = scores.softmax(0).nan_to_num(0.0)
    expected = (weights.transpose(1, 2)[..., None] * values).sum(0)
    parts = values.where(scores.transpose(1, 2)[..., None] > -torch.inf, float("nan"))
    for _ in range(1 if tokens < 100 else 50):
        lse, out = scores[0].clone(), torch.full_like(expected, 7.0)
        merging.merge(parts[0], lse, parts[1], scores[1].contiguous(), out)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, scores.logsumexp(0))


def gpu(function):
    absent = pytest.mark.skipif(not cute.INSTALLED, reason="flash-attn-4 is not installed")
    return pytest.mark.gpu(absent(function))


CASES = {
    "causal": {},
    "full, fp16": dict(causal=False, dtype="float16"),
    "window": dict(causal=False, window=(100, 37)),
    "causal window, shared keys": dict(window=(150, -1), kv_heads=2),
    "to the right": dict(causal=False, window=(-1, 20)),
    "narrow window": dict(window=(0, -1)),
    "one key head, fp16": dict(kv_heads=1, size=64, value_size=64, dtype="float16"),
    "strided": dict(size=64, value_size=64, contiguous=False),
    "heads of 24": dict(size=24, value_size=24),
    "heads of 96": dict(size=96, value_size=96),
    "large heads": dict(size=256, value_size=256, lengths=[300, 190], heads=2, kv_heads=1),
    "heads of 192": dict(size=192, value_size=192, lengths=[300, 190], heads=2, kv_heads=2),
    "other key lengths": dict(key_lengths=[900, 5, 0, 77, 20]),
    "other key lengths, full": dict(key_lengths=[900, 5, 0, 77, 20], causal=False),
    "more queries than keys": dict(key_lengths=[300, 5, 10, 1, 333]),
    "multiples of the tiles": dict(lengths=[512, 128, 256]),
    "thousands": dict(lengths=[4096, 1111], heads=2, kv_heads=2),
    "many sequences": dict(lengths=[3, 0, 130] * 120, heads=2, kv_heads=2, size=64, value_size=64),
    "no tokens": dict(lengths=[0, 0], size=64, value_size=64),
    "no sequences": dict(lengths=[], size=64, value_size=64),
    "no keys": dict(key_lengths=[0] * 5, size=64, value_size=64),
}


@gpu
@pytest.mark.parametrize("case", CASES)
def test_against_reference(case):
    flash.check("cuda", backend="cute", **BASE | dict(dtype="bfloat16") | CASES[case])


@gpu
@pytest.mark.parametrize("seed", range(6))
def test_random_shapes(seed):
    generator = random.Random(seed)
    case = flash.draw(generator, False) | dict(alibi=None, dropout=0.0, mask=None)
    # Few sizes: each is compiled anew.
    case["size"] = case["value_size"] = generator.choice([64, 128])
    case["dtype"] = generator.choice(["bfloat16", "float16"])
    case["heads"], case["kv_heads"] = generator.choice([(2, 2), (4, 4), (4, 2)])
    flash.check("cuda", backend="cute", **case)


@gpu
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("window", [(-1, -1), (200, -1)])
def test_the_same_bits_in_every_run(heads, window):
    lengths = [4000, 24, 2513]
    q, k, v = (
        make_jagged(lengths, (n, 64), dtype=torch.bfloat16, device="cuda", seed=n).requires_grad_()
        for n in (4, heads, heads)
    )
    grad = torch.randn_like(q)
    options = dict(causal=True, window_size=window, backend="cute")

    def run():
        out = flash_attention(q, k, v, make_offsets(lengths, device="cuda"), **options)
        return out, *torch.autograd.grad(out, (q, k, v), grad)

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@gpu
def test_compiles_whole():
    inputs, call = attention_of([300, 41], backend="cute")
    grad = torch.randn_like(call())
    expected = torch.autograd.grad(call(), inputs, grad)
    actual = torch.autograd.grad(torch.compile(call, fullgraph=True)(), inputs, grad)
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


@gpu
def test_auto_compiles_whole():
    inputs, call = attention_of([8192])
    grad = torch.randn_like(call())
    expected = torch.autograd.grad(call(), inputs, grad)
    actual = torch.autograd.grad(torch.compile(call, fullgraph=True)(), inputs, grad)
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


@gpu
def test_captured_and_replayed():
    """A CUDA graph of both passes, replayed with other numbers and other offsets."""
    lengths, others = [300, 41, 171], [17, 400, 95]
    inputs, _ = attention_of(lengths)
    offsets, grad = make_offsets(lengths, device="cuda"), torch.randn_like(inputs[0])

    def step():
        out = flash_attention(*inputs, offsets, causal=True, backend="cute")
        return out, *torch.autograd.grad(out, inputs, grad)

    graph, actual = capture(step)
    with torch.no_grad():
        for x in inputs:
            x.normal_()
    offsets.copy_(make_offsets(others))
    graph.replay()
    expected = step()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@gpu
def test_gradients_of_expanded_rows():
    inputs, call = attention_of([300, 41], backend="cute")
    row = torch.randn(4, 128, device="cuda", dtype=torch.bfloat16)
    whole = row.repeat(341, 1, 1)
    actual, expected = (torch.autograd.grad(call(), inputs, grad) for grad in (row.expand(341, 4, 128), whole))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@gpu
@pytest.mark.parametrize(
    ("form", "option"), [("zigzag varlen", "causal"), ("plain", "shared keys"), ("zigzag", "window")]
)
def test_steps_of_a_ring_add_up(form, option):
    """The parts of a ring of two, one after another on one GPU, against the reference."""
    cute_stand_in.check_parts(form, option, "cuda")


@gpu
def test_opcheck():
    (q, k, v), _ = attention_of([40, 9], size=64)
    offsets = make_offsets([40, 9], device="cuda")
    torch.library.opcheck(torch.ops.hstu_sparse.flash_cute_fwd.default, (q, k, v, offsets, offsets, -1, 0, 0.1))


@gpu
@pytest.mark.multigpu
@pytest.mark.parametrize("case", ["zigzag", "plain", "varlen", "heads in turn", "captured"])
def test_two_gpus(case):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.operators.ring_on_gpus", case, "cute"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
