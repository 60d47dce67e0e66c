"""Rotation by position and time: against a loop by hand, and what it is for."""

import functools
import math

import pytest
import torch

from hstu_sparse import rotary
from tests.support.budgets import EDGE_CASES, compare_with_reference, make_jagged, make_offsets, make_timestamps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_hand(x, offsets, longest, times, position):
    """Compute the definition, channel by channel, with Python's numbers."""
    x, out = x.double().tolist(), x.double().clone()
    for b in range(len(offsets) - 1):
        for t in range(offsets[b], offsets[b + 1]):
            for h, row in enumerate(x[t]):
                n = len(row) // 2
                m = (n + 1) // 2 if position and times is not None else n if position else 0
                for i in range(n):
                    if i < m:
                        period = 4 * (longest / 4) ** (i / (m - 1) if m > 1 else 0)
                        angle = (t - offsets[b]) * 2 * math.pi / period
                    else:
                        j, k = i - m, n - m
                        period = 60 * (1.3e8 / 60) ** (j / (k - 1) if k > 1 else 0)
                        angle = (times[t] - times[offsets[b]]) * 2 * math.pi / period
                    a, b_ = row[i], row[i + n]
                    out[t, h, i] = a * math.cos(angle) - b_ * math.sin(angle)
                    out[t, h, i + n] = b_ * math.cos(angle) + a * math.sin(angle)
    return out


@pytest.mark.parametrize("size", [1, 2, 4, 7, 10])
@pytest.mark.parametrize(("position", "timed"), [(True, True), (True, False), (False, True)])
def test_the_reference_by_hand(size, position, timed):
    lengths = [3, 0, 5]
    x, times = make_jagged(lengths, (2, size), dtype=torch.float64), make_timestamps(lengths, scale=1e7)
    actual = rotary(x, make_offsets(lengths), 20, times=times if timed else None, position=position)
    expected = by_hand(x, make_offsets(lengths).tolist(), 20, times.tolist() if timed else None, position)
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("case", EDGE_CASES)
@pytest.mark.parametrize("timed", [True, False])
def test_kernel_against_reference(case, timed):
    lengths, longest = EDGE_CASES[case]
    options = dict(
        seq_offsets=make_offsets(lengths, device=DEVICE),
        max_seq_len=longest,
        times=make_timestamps(lengths, device=DEVICE) if timed else None,
    )
    kernel, reference = (functools.partial(rotary, **options, backend=name) for name in ("triton", "reference"))
    compare_with_reference(kernel, reference, {"x": make_jagged(lengths, (2, 24), device=DEVICE)}, factor=4.0)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_parts_of_sequences(backend):
    """Tokens with given positions and origins turn as in the whole sequence."""
    if backend == "triton":
        pytest.importorskip("triton")
    lengths = [9, 0, 6]
    x = make_jagged(lengths, (2, 10), device=DEVICE)
    times, offsets = make_timestamps(lengths, scale=1e7, device=DEVICE), make_offsets(lengths, device=DEVICE)
    whole = rotary(x, offsets, 20, times=times, backend=backend)
    part = torch.tensor([1, 2, 7, 8, 10, 14], device=DEVICE)
    actual = rotary(
        x[part], make_offsets([4, 0, 2], device=DEVICE), 20, times=times[part],
        origins=times[torch.tensor([0, 9, 9], device=DEVICE)],
        positions=torch.tensor([1, 2, 7, 8, 1, 5], device=DEVICE), backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(actual, whole[part], rtol=1e-6, atol=1e-6)


def test_scores_depend_on_differences_alone():
    """Years of seconds, in fp32: the score of two tokens is the same wherever they stand, if their origins agree."""
    q, k = (make_jagged([1], (1, 64), seed=seed).expand(4, 1, 64) for seed in (0, 1))
    query_times = torch.tensor([0, 400_000_000, 7, 400_000_007])
    key_times = query_times - torch.tensor([0, 86_400 * 30, 0, 86_400 * 30])
    turned = [
        rotary(x, torch.tensor([0, 4]), 200, times=times, origins=torch.tensor([1000]), position=False)
        for x, times in ((q, query_times), (k, key_times))
    ]
    scores = (turned[0] * turned[1]).sum((1, 2))
    torch.testing.assert_close(scores[0], scores[2], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(scores[1], scores[3], rtol=1e-5, atol=1e-4)
    assert abs(scores[0] - scores[1]) > 0.1


def test_one_graph_and_opcheck():
    lengths = (3, 4)
    x = make_jagged(lengths, (2, 16), device=DEVICE, requires_grad=True)
    offsets, times = make_offsets(lengths, device=DEVICE), make_timestamps(lengths, device=DEVICE)
    call = functools.partial(rotary, seq_offsets=offsets, max_seq_len=9, times=times, backend="triton")
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), call(x))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x).square().sum(), x), torch.autograd.grad(call(x).pow(2).sum(), x)
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"position": False, "times": None}, ValueError, "rotary needs position=True or times"),
        ({"times": torch.zeros(3, dtype=torch.int64)}, ValueError, r"times must be \[T=5\], got shape \[3\]"),
        ({"times": torch.zeros(5)}, TypeError, "times must be torch.int64, got torch.float32"),
        ({"origins": torch.zeros(3).long()}, ValueError, r"origins must be \[B=1\], got shape \[3\]"),
        ({"max_seq_len": 0}, ValueError, "max_seq_len must be at least 1, got 0"),
    ],
)
def test_errors(change, error, message):
    options = dict(seq_offsets=torch.tensor([0, 5]), max_seq_len=5) | change
    with pytest.raises(error, match=message):
        rotary(torch.zeros(5, 1, 4), **options)
