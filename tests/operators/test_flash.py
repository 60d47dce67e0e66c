"""Flash attention: the reference by hand and against SDPA, what is refused, the kernels in the interpreter."""

import functools
import math

import pytest
import torch

from hstu_sparse import flash_attention
from hstu_sparse.core.launch import LaunchConfig, override
from hstu_sparse.core.mask import Mask
from hstu_sparse.flash.reference import Layout, Options, flash_attention_reference, philox
from tests.random.cases import flash
from tests.support.budgets import EDGE_CASES, make_jagged, make_offsets

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_hand(q, k, v, lengths, key_lengths, scale, left, right, slopes):
    """Output and log-sum-exp, pair by pair, in Python's own numbers."""
    out, lse = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype), torch.zeros(q.shape[1], q.shape[0])
    first, first_key = 0, 0
    for b, (n, m) in enumerate(zip(lengths, key_lengths)):
        for i in range(n):
            for h in range(q.shape[1]):
                g, t, scores = h * k.shape[1] // q.shape[1], i + m - n, {}
                for s in range(m):
                    if (left < 0 or s >= t - left) and (right < 0 or s <= t + right):
                        score = scale * sum((q[first + i, h] * k[first_key + s, g]).tolist())
                        scores[s] = score - (slopes[b][h] * abs(t - s) if slopes else 0)
                total = sum(math.exp(x) for x in scores.values())
                lse[h, first + i] = math.log(total) if scores else -math.inf
                for s, x in scores.items():
                    out[first + i, h] += math.exp(x) / total * v[first_key + s, g]
        first, first_key = first + n, first_key + m
    return out, lse


@pytest.mark.parametrize(
    ("left", "right", "causal", "alibi"), [(-1, -1, False, False), (2, 1, False, True), (-1, 0, True, True)]
)
@pytest.mark.parametrize("key_lengths", [[4, 0, 3], [6, 2, 1]], ids=str)
def test_the_reference_by_hand(left, right, causal, alibi, key_lengths):
    lengths = [4, 0, 3]
    q = make_jagged(lengths, (4, 3), dtype=torch.float64)
    k, v = (make_jagged(key_lengths, (2, size), dtype=torch.float64, seed=size) for size in (3, 5))
    slopes = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) if alibi else None
    actual, lse = flash_attention(
        q, k, v, make_offsets(lengths), k_offsets=make_offsets(key_lengths), scale=0.7, causal=causal,
        window_size=(left, right), alibi_slopes=slopes, return_lse=True, backend="reference",
    )  # fmt: skip
    slope_list = None if slopes is None else slopes.tolist()
    out, right_lse = by_hand(q, k, v, lengths, key_lengths, 0.7, left, right, slope_list)
    torch.testing.assert_close(actual, out)
    torch.testing.assert_close(lse.float(), right_lse, rtol=1e-5, atol=1e-5)


def test_the_reference_against_sdpa():
    lengths = [17, 17]
    inputs = [make_jagged(lengths, (h, 8), dtype=torch.float64, seed=h).requires_grad_() for h in (4, 2, 2)]
    grad = torch.randn(34, 4, 8, dtype=torch.float64)
    actual = flash_attention(*inputs, make_offsets(lengths), causal=True)
    q, k, v = (x.view(2, 17, -1, 8).transpose(1, 2) for x in inputs)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out = out.transpose(1, 2).reshape(34, 4, 8)
    torch.testing.assert_close(actual, out)
    for a, b in zip(torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(out, inputs, grad), strict=True):
        torch.testing.assert_close(a, b)


def test_philox_as_published():
    """The known answers of Random123's kat_vectors for philox4x32-10."""
    zero = torch.zeros((), dtype=torch.int64)
    words = [int(x) for x in philox(0, zero, zero, zero, zero)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    full = zero - 1
    words = [int(x) for x in philox(-1, full, full, full, full)]
    assert words == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_dropout_keeps_its_share_and_the_mean():
    """With equal weights and values of 1 the output is the kept share over 1 - dropout."""
    lengths, seed = [120, 80], torch.tensor([11])
    q = torch.zeros(200, 2, 4, dtype=torch.float64)
    attend = functools.partial(flash_attention, q, q, torch.ones_like(q), make_offsets(lengths), dropout=0.3)
    actual = attend(seed=seed)
    assert abs(actual.mean().item() - 1) < 0.02 and actual.std() > 0.01
    assert torch.equal(actual, attend(seed=seed)) and not torch.equal(actual, attend(seed=seed + 1))
    torch.manual_seed(5)
    drawn = attend()
    assert not torch.equal(drawn, attend())


OPTIONS = {
    "causal": {},
    "window": dict(causal=False, window=(9, 5), kv_heads=1),
    "dropout": dict(dropout=0.25, alibi="sequences", contiguous=False),
}
# All other lengths are marked slow: these have every kind of tiles.
FAST = ("empty batch", "all sequences empty", "an empty sequence in the middle")
CAUSAL = (*FAST, "length 1")
CASES = [
    pytest.param(options, case, marks=[] if case in (CAUSAL if options == "causal" else FAST) else pytest.mark.slow)
    for options in OPTIONS
    for case in EDGE_CASES
]


@pytest.mark.parametrize(("options", "case"), CASES)
def test_kernels_against_reference(case, options):
    pytest.importorskip("triton")
    base = dict(
        key_lengths=None, heads=2, kv_heads=2, size=24, value_size=16, dtype="float32", causal=True, window=(-1, -1),
        alibi=None, dropout=0.0, contiguous=True, seed=1,
    )  # fmt: skip
    flash.check(DEVICE, **base | dict(lengths=EDGE_CASES[case][0]) | OPTIONS[options])


@pytest.mark.parametrize("size", [50, 256, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 96))])
def test_head_sizes(size):
    pytest.importorskip("triton")
    base = dict(
        key_lengths=[40, 3], heads=1, kv_heads=1, dtype="float32", causal=True, window=(-1, -1), alibi=None,
        dropout=0.0, contiguous=True, seed=2,
    )  # fmt: skip
    flash.check(DEVICE, lengths=[33, 5], size=size, value_size=max(16, size // 2), **base)


@pytest.mark.parametrize(
    "large", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1.0, 30.0, float("inf"))), float("nan")]
)
def test_with_and_without_a_maximum(large):
    """Test heads whose keys are short, long, or hold an inf or NaN.

    The forward pass of many tokens has no running maximum for tiles whose scores are bounded, and adds both kinds up.
    """
    launch = pytest.importorskip("hstu_sparse.flash.launch")
    lengths = [70, 3, 0, 41]
    q, k, v = (make_jagged(lengths, (heads, 16), device=DEVICE, seed=heads) for heads in (4, 2, 2))
    k[90, 1] *= large  # in the last sequence
    scale = 1.0
    offsets = make_offsets(lengths, device=DEVICE)
    parts = [offsets.clone() for _ in range(2)]  # of each sequence's keys: the first 40, the rest
    cut = offsets.diff().clamp(max=40)
    parts[0][1:] = cut.cumsum(0)
    parts[1][1:] = (offsets.diff() - cut).cumsum(0)
    first = torch.cat([torch.arange(n, device=DEVICE) < 40 for n in lengths])
    starts = [torch.zeros(4, dtype=torch.int32, device=DEVICE), cut.int()]
    out, lse = torch.full_like(q, torch.nan), torch.full((4, len(q)), torch.nan, device=DEVICE)
    config = LaunchConfig(BLOCK_M=32, BLOCK_N=16, TMA=False, num_warps=4, num_stages=1)
    for step, keep in enumerate((first, ~first)):
        layout = Layout(offsets, parts[step], torch.zeros_like(starts[0]), starts[step])
        step_launch = launch.Launch(q, k[keep], v[keep], layout, Options(scale, -1, 0))
        with override(launch.fwd_config, lambda *_: config), override(launch.uses_score_bounds, lambda *_: True):
            step_launch.forward(out, lse, before=out if step else None)
    wide = [x.double() for x in (q, k, v)]
    right, right_lse = flash_attention_reference(*wide, Layout(offsets, offsets), Options(scale, -1, 0))
    torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5, equal_nan=True)
    # The case has heads of both kinds.
    longest = [x.square().sum(-1).amax(0) for x in (q, k)]
    bounded = longest[0] * longest[1].repeat_interleave(2) * (scale / math.log(2)) ** 2 <= 80**2
    assert bounded.tolist() == [True, True, large == 1, large == 1]


def test_rows_without_keys_in_a_later_step_keep_their_output():
    """The first step has scores far below 0; the second uses bounds as maxima, and some rows see none of its keys."""
    launch = pytest.importorskip("hstu_sparse.flash.launch")
    q, k, v = torch.ones(70, 1, 16, device=DEVICE), *(make_jagged([70], (1, 16), device=DEVICE, seed=i) for i in (1, 2))
    k[:40] -= 20.0
    out, lse = torch.empty_like(q), torch.empty(1, 70, device=DEVICE)
    config = LaunchConfig(BLOCK_M=32, BLOCK_N=16, TMA=False, num_warps=4, num_stages=1)
    whole = make_offsets([70], device=DEVICE)
    for keys in (slice(0, 40), slice(40, 70)):
        start = torch.tensor([keys.start], dtype=torch.int32, device=DEVICE)
        layout = Layout(whole, make_offsets([keys.stop - keys.start], device=DEVICE), torch.zeros_like(start), start)
        step_launch = launch.Launch(q, k[keys], v[keys], layout, Options(1.0, -1, 0))
        with override(launch.fwd_config, lambda *_: config), override(launch.uses_score_bounds, lambda *_: True):
            step_launch.forward(out, lse, before=out if keys.start else None)
    wide = [x.double() for x in (q, k, v)]
    right, right_lse = flash_attention_reference(*wide, Layout(whole, whole), Options(1.0, -1, 0))
    torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)


def test_gradients_of_the_reference():
    inputs = [make_jagged([4, 2], (h, 4), dtype=torch.float64, seed=h).requires_grad_() for h in (2, 1, 1)]
    attend = functools.partial(
        flash_attention, seq_offsets=make_offsets([4, 2]), window_size=(2, 1), dropout=0.3, seed=torch.tensor([3])
    )
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v), inputs)


Q = torch.zeros(6, 4, 8)
K = torch.zeros(6, 2, 8)
GOOD = dict(q=Q, k=K, v=K, seq_offsets=torch.tensor([0, 6]))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(k=torch.zeros(6, 3, 8), v=torch.zeros(6, 3, 8)), ValueError, "divide the 4 heads of q, got 3"),
        (dict(v=torch.zeros(6, 4, 8)), ValueError, "Hkv=2"),
        (dict(k=K.double()), TypeError, "k must be torch.float32"),
        (dict(k=torch.zeros(7, 2, 8)), ValueError, "T=6"),
        (dict(k_offsets=torch.tensor([0, 3, 6])), ValueError, "k_offsets must be"),
        (dict(scale=0.0), ValueError, "scale"),
        (dict(window_size=3), TypeError, "window_size must be"),
        (dict(window_size=(-2, 0)), ValueError, "from -1"),
        (dict(alibi_slopes=torch.zeros(3)), ValueError, r"H=4"),
        (dict(alibi_slopes=torch.zeros(4, dtype=torch.float64)), TypeError, "fp32"),
        (dict(dropout=1.0), ValueError, "less than 1"),
        (dict(dropout=0.5, seed=3), TypeError, "int64 tensor"),
        (dict(backend="cuda"), ValueError, "backend must be one of"),
        (dict(seq_offsets=torch.tensor([0.0, 6.0])), TypeError, "int32 or int64"),
    ],
)
def test_what_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        flash_attention(**GOOD | changes)


def test_compiles_whole_and_is_a_good_operator():
    pytest.importorskip("triton")
    inputs = [make_jagged([5, 2], (1, 16), device=DEVICE, seed=i).requires_grad_() for i in range(3)]
    offsets, grad = make_offsets([5, 2], device=DEVICE), torch.randn(7, 1, 16, device=DEVICE)
    attend = functools.partial(flash_attention, seq_offsets=offsets, causal=True, backend="triton")
    expected = torch.autograd.grad(attend(*inputs), inputs, grad)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(*inputs), inputs, grad), expected, strict=True):
        assert torch.equal(a, b)
    torch.library.opcheck(
        torch.ops.hstu_sparse.flash_fwd.default, (*inputs, offsets, offsets, None, *Mask(), None, None, -1, 0, 0.1, 0.0)
    )
