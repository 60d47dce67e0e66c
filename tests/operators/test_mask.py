"""Test the options of the mask (context, groups of candidates, prefix) against the formulas of the papers."""

import functools
import itertools
import math
import random

import pytest
import torch

from hstu_sparse import RelativeBias, attention_plan, flash_attention, hstu_attention
from hstu_sparse.core.mask import Mask, visible_pairs
from tests.random.cases import flash
from tests.random.cases.dense import compare, inputs

interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")


def position(t, n, c, m, group):
    """Return the position of token t: context 0, events from 1 on, each group of candidates after the last event."""
    if t < c:
        return 0
    history = n - m
    return t - c + 1 if t < history else history - c + 1 + (t - history) % group


def sees(t, s, n, c, m, window=0, sees_all=False, group=1, prefix=0):
    """Return whether t attends to s, by the definition in core/mask.py."""
    history = n - m
    if t < c:
        return s < c or (sees_all and s < history)
    if s > t or (s >= history and (t < history or (t - history) // group != (s - history) // group)):
        return False
    near = position(t, n, c, m, group) - position(s, n, c, m, group) < window
    return window == 0 or near or s < c + prefix


def meta(t, s, n, c, m, max_attn_len):
    """Return whether t attends to s in Meta's generative-recommenders, where every sequence has c context tokens."""
    last = n - m - c + 1 if c else n - m
    row, column = (min(max(x - c + 1, 0), last) if c else min(x, last) for x in (t, s))
    seen = t == s or row > column
    if max_attn_len:
        seen = seen and row - column <= max_attn_len
    return seen or (c > 0 and row == 0 and column < last)


def nvidia(t, s, n, c, m, group):
    """Return whether t attends to s in NVIDIA's recsys-examples, without a window."""
    row, column = (max(x - c + 1, 0) for x in (t, s))
    end = n - c + 1
    groups = [max(x - end + m, -1) // group for x in (row, column)]
    seen = (t == s or row > column) and (groups[0] == groups[1] or min(groups) < 0)
    return seen or (row == 0 and column < end - m)


def table(rule, n):
    return torch.tensor([[rule(t, s) for s in range(n)] for t in range(n)], dtype=torch.bool).reshape(n, n)


def mask_of(n, c, m, **options):
    mask = Mask(num_targets=torch.tensor([m]), num_context=torch.tensor([c]), **options)
    return visible_pairs(mask, torch.arange(n), torch.tensor([n]))[1][0]


@pytest.mark.parametrize(("n", "c", "m"), [(9, 3, 2), (9, 0, 4), (7, 4, 3), (5, 5, 0), (6, 0, 6), (8, 1, 0)])
def test_agrees_with_the_published_masks(n, c, m):
    for window in (0, 1, 3):
        expected = table(functools.partial(meta, n=n, c=c, m=m, max_attn_len=max(window - 1, 0)), n)
        if window != 1:  # a max_attn_len of 0 is no window
            actual = mask_of(n, c, m, window_size=window, context_sees_all=True)
            hides = window > 0  # Meta's window hides context, ours does not
            actual[c:, :c], expected[c:, :c] = actual[c:, :c] & (not hides), expected[c:, :c] & (not hides)
            assert torch.equal(actual, expected), (window, actual, expected)
    for group in (1, 2, 3):
        expected = table(functools.partial(nvidia, n=n, c=c, m=m, group=group), n)
        assert torch.equal(mask_of(n, c, m, context_sees_all=True, target_group_size=group), expected)


def random_case(seed):
    """Return the arguments of hstu_attention of a random batch in fp64, and both outputs computed pair by pair."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = [draw.choice([0, 1, 2, draw.randrange(3, 14)]) for _ in range(draw.randrange(1, 4))]
    total, longest = sum(lengths), max([1, *lengths])
    context = [draw.randrange(n + 1) for n in lengths]
    targets = [draw.randrange(n - c + 1) for n, c in zip(lengths, context)]
    use = {
        name: draw.random() < 0.7 for name in ("context", "targets", "window", "prefix", "position", "time", "later")
    }
    if not use["context"]:
        context = [0] * len(lengths)
    if not use["targets"]:
        targets = [0] * len(lengths)
    options = dict(
        window=draw.randrange(1, 6) if use["window"] else 0,
        sees_all=use["context"] and draw.random() < 0.5,
        group=draw.randrange(1, 5) if use["targets"] else 1,
        prefix=draw.randrange(1, 4) if use["prefix"] else 0,
    )
    q, k, v = (torch.randn(total, 2, size, generator=generator, dtype=torch.float64) for size in (3, 3, 2))
    tables = [torch.randn(size, generator=generator, dtype=torch.float64) for size in (longest, 8)]
    times = torch.randint(0, 3000, (total,), generator=generator)
    query_times = times + torch.randint(0, 900, (total,), generator=generator) if use["later"] else times
    bias = RelativeBias(
        tables[0] if use["position"] else None, *((tables[1], times, query_times) if use["time"] else (None,) * 3)
    )
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    arguments = dict(
        seq_offsets=offsets, max_seq_len=longest, bias=bias, window_size=options["window"],
        num_targets=torch.tensor(targets) if use["targets"] else None,
        num_context=torch.tensor(context, dtype=torch.int32) if use["context"] else None,
        context_sees_all=options["sees_all"], target_group_size=options["group"],
        full_attention_prefix=options["prefix"],
    )  # fmt: skip
    expected, softmax = torch.zeros(2, total, 2, 2, dtype=torch.float64)
    for begin, n, c, m in zip(offsets.tolist(), lengths, context, targets):
        key_seconds = times[begin : begin + n].tolist()
        query_seconds = query_times[begin : begin + n].tolist()
        key_seconds[:c] = query_seconds[:c] = [key_seconds[min(c, n - 1)]] * c if n else []
        weights = torch.zeros(n, n, 2, dtype=torch.float64)  # of the softmax, without a bias
        for t, s in itertools.product(range(n), repeat=2):
            if not sees(t, s, n, c, m, **options):
                continue
            weights[t, s] = torch.exp((q[begin + t] * k[begin + s]).sum(-1) * 0.5)
            added = 0.0
            if use["position"]:
                distance = position(t, n, c, m, options["group"]) - position(s, n, c, m, options["group"])
                added += float(tables[0][max(distance, 0)])
            if use["time"]:
                added += float(
                    tables[1][min(math.floor(math.log(max(abs(query_seconds[t] - key_seconds[s]), 1)) / 0.301), 7)]
                )
            x = (q[begin + t] * k[begin + s]).sum(-1) * 0.5 + added
            expected[begin + t] += (x * torch.sigmoid(x) / longest)[:, None] * v[begin + s]
        weights = weights / weights.sum(1, keepdim=True)
        softmax[begin : begin + n] = torch.einsum("tsh,shv->thv", weights, v[begin : begin + n])
    return dict(q=q, k=k, v=v, scale=0.5, **arguments), expected, softmax


def check_random_case(seed):
    arguments, expected, softmax = random_case(seed)
    torch.testing.assert_close(hstu_attention(**arguments), expected, atol=1e-12, rtol=1e-10)
    for name in ("max_seq_len", "bias"):
        del arguments[name]
    window = arguments.pop("window_size") - 1, -1
    out = flash_attention(**arguments, window_size=window, causal=True)
    torch.testing.assert_close(out, softmax, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("seed", range(12))
def test_reference_by_pairs(seed):
    check_random_case(seed)


@pytest.mark.slow
def test_reference_by_pairs_500_times():
    for seed in range(12, 512):
        check_random_case(seed)


def test_reference_gradients():
    arguments, *_ = random_case(3)
    names = ["q", "k", "v"]
    tables = [x.requires_grad_() for x in arguments["bias"][:2] if x is not None]
    leaves = [arguments.pop(name).requires_grad_() for name in names]
    assert arguments["num_context"] is not None and len(tables) == 2

    def function(q, k, v, position, time):
        bias = arguments["bias"]._replace(position=position, time=time)
        return hstu_attention(q, k, v, **{**arguments, "bias": bias})

    assert torch.autograd.gradcheck(function, (*leaves, *tables))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"num_context": torch.tensor([3, 1])},
            ValueError,
            "num_context of sequence 0 must be from 0 to 2, its length, got 3",
        ),
        (
            {"num_context": torch.tensor([0, 3]), "num_targets": torch.tensor([0, 2])},
            ValueError,
            "num_context of sequence 1 must be from 0 to 2, its length minus num_targets, got 3",
        ),
        ({"num_context": torch.zeros(2)}, TypeError, "num_context must be int32 or int64, got torch.float32"),
        ({"context_sees_all": True}, ValueError, r"context_sees_all=True needs num_context \[B\], got None"),
        ({"context_sees_all": 1}, TypeError, "context_sees_all must be True or False, got 1"),
        ({"target_group_size": 2}, ValueError, r"target_group_size=2 needs num_targets \[B\], got None"),
        ({"target_group_size": 0}, ValueError, "target_group_size must be at least 1, got 0"),
        ({"full_attention_prefix": -1}, ValueError, "full_attention_prefix must be at least 0, got -1"),
    ],
)
def test_errors(options, error, message):
    x = torch.zeros(6, 1, 4)
    with pytest.raises(error, match=message):
        hstu_attention(x, x, x, torch.tensor([0, 2, 6]), 8, **options)


# The kernels of dense attention, in the interpreter.

ALL = ("context", "all", "targets", "groups", "prefix", "position", "time", "query_times")
OPTIONS = [
    pytest.param(("context", "position"), 0, marks=pytest.mark.slow),
    (("context", "targets", "prefix", "time", "position"), 20),
    (("context", "all", "targets", "position"), 33),
    (("targets", "groups", "position"), 3),
    (ALL, 10),
]


@interpreter
@pytest.mark.parametrize(("features", "window"), OPTIONS)
def test_dense_kernels(features, window):
    compare(inputs((45, 0, 20), 50, heads=1, features=features, window=window))


@interpreter
def test_a_plan_holds_the_options():
    x = inputs((40,), 45, heads=1, features=ALL, window=10)
    tables = [x.pop(name) for name in ("position", "time", "timestamps", "query_timestamps")]
    x["bias"] = RelativeBias(*tables)
    q, k, v = (x.pop(name) for name in ("q", "k", "v"))
    with torch.no_grad():
        plan = attention_plan(q, v, **x, backend="triton")
    out = hstu_attention(q, k, v, **x, backend="triton")
    assert torch.equal(hstu_attention(q, k, v, **x, backend="triton", plan=plan), out)
    for change in ({"num_context": torch.tensor([1])}, {"context_sees_all": False}, {"full_attention_prefix": 1}):
        with pytest.raises(ValueError, match="plan was made for"):
            hstu_attention(q, k, v, **{**x, **change}, backend="triton", plan=plan)


# Those of the softmax.


@pytest.mark.parametrize("change", [{"causal": False}, {"k_offsets": torch.tensor([0, 6])}])
def test_softmax_needs_a_causal_mask(change):
    x = torch.zeros(6, 1, 4)
    with pytest.raises(ValueError, match="num_context needs causal=True and no k_offsets, got "):
        flash_attention(x, x, x, torch.tensor([0, 6]), num_context=torch.tensor([1]), **{"causal": True, **change})


@interpreter
@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (
            dict(context=40, context_sees_all=True, target_group_size=2, full_attention_prefix=0),
            dict(heads=1, kv_heads=1),
        ),
        (
            dict(context=5, context_sees_all=False, target_group_size=5, full_attention_prefix=9),
            dict(window=(11, -1), alibi="heads", kv_heads=1),
        ),
    ],
)
def test_flash_kernels(mask, options):
    case = dict(heads=2, kv_heads=2, size=16, value_size=16, dtype="float32", contiguous=True, seed=4)
    case |= dict(lengths=[45, 0, 37], key_lengths=None, causal=True, dropout=0.0, alibi=None, window=(-1, -1))
    flash.check("cpu", **case | options, mask=dict(targets=True) | mask)
