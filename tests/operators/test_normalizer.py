"""The normaliser of the SiLU operators, and position tables that are longer than N: outputs and gradients."""

import functools

import pytest
import torch

from hstu_sparse import (
    RelativeBias,
    bsa_attention,
    hstu_attention,
    ring_hstu_attention,
    rotatekv_attention,
    rotatekv_compress,
)
from tests.operators.test_dense import interpreter
from tests.support.budgets import make_jagged, make_offsets

LENGTHS, N = (12, 0), 12
OFFSETS = make_offsets(LENGTHS)
GATES = tuple(make_jagged(LENGTHS, (2,), seed=7 + i).sigmoid() for i in range(3))
CACHE = rotatekv_compress(*(make_jagged(LENGTHS, (2, 16), seed=i) for i in (4, 5)), OFFSETS, bits=8)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])


def rotatekv(q, k, v, n, **options):
    return rotatekv_attention(q, OFFSETS, CACHE, n, **options)


OPERATORS = {
    "hstu_attention": lambda q, k, v, n, **options: hstu_attention(q, k, v, OFFSETS, n, **options),
    "bsa_attention": lambda q, k, v, n, **options: bsa_attention(
        q, k, v, OFFSETS, n, GATES, block_size=16, window_size=3, **options
    ),
    "ring_hstu_attention": lambda q, k, v, n, **options: ring_hstu_attention(
        q, k, v, POSITIONS, n, seq_offsets=OFFSETS, **options
    ),
    "rotatekv_attention": rotatekv,
}


def results(name, *, entries, backend, normalizer=None):
    """Return the output and the gradients of q, k, v and a position table of `entries` entries."""
    leaves = [make_jagged(LENGTHS, (2, 16), seed=seed) for seed in range(3)]
    leaves.append(torch.linspace(-1, 1, 2 * N)[:entries].clone())
    if name != "rotatekv_attention":
        leaves = [x.requires_grad_() for x in leaves]
    options = {} if normalizer is None else dict(normalizer=normalizer)
    out = OPERATORS[name](*leaves[:3], N, bias=RelativeBias(leaves[3]), backend=backend, **options)
    if not out.requires_grad:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.cos(torch.arange(out.numel())).view_as(out))]


@pytest.mark.parametrize("name", OPERATORS)
def test_output_and_gradients_are_divided_by_it(name):
    run = functools.partial(results, name, entries=N + 1, backend="reference")
    usual, halved = run(), run(normalizer=2.0 * N)
    assert all(map(torch.equal, usual, run(normalizer=N)))  # the default, as a whole number
    for x, y in zip(usual, halved, strict=True):
        assert x.abs().max() > 0
        torch.testing.assert_close(y, x / 2)


@pytest.mark.parametrize("name", ["hstu_attention", "bsa_attention", "ring_hstu_attention"])
def test_a_longer_position_table(name):
    """Entries from N on are not read and get no gradient."""
    usual, longer = (results(name, entries=entries, backend="reference") for entries in (N, 2 * N))
    assert longer[4][N:].abs().max() == 0 and usual[4].abs().max() > 0
    for x, y in zip(usual, [*longer[:4], longer[4][:N]], strict=True):
        assert torch.equal(x, y)


@interpreter
@pytest.mark.parametrize("name", OPERATORS)
def test_kernels_with_another_normalizer_and_a_longer_table(name):
    usual = results(name, entries=N + 1, backend="reference")
    *halved, table = results(name, entries=2 * N, backend="triton", normalizer=2.0 * N)
    if halved:
        assert table[N:].abs().max() == 0
        table = table[: N + 1]
    for x, y in zip(usual, [*halved, table], strict=True):
        assert x.abs().max() > 0
        torch.testing.assert_close(y, x / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1.0, ValueError), (True, TypeError), ("x", TypeError)])
def test_refused(name, value, error):
    with pytest.raises(error, match="normalizer must be"):
        results(name, entries=N + 1, backend="reference", normalizer=value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refused_if_not_finite(value):
    with pytest.raises(ValueError, match="normalizer must be a finite number above 0"):
        results("hstu_attention", entries=N, backend="reference", normalizer=value)


def test_softmax_has_none():
    q = make_jagged(LENGTHS, (2, 16))
    with pytest.raises(ValueError, match="needs activation='silu', got 'softmax'"):
        rotatekv(q, None, None, N, activation="softmax", normalizer=3.0)
