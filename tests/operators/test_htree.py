"""Hierarchical tree attention on the CPU: the reference against a literal per-token loop, and the public function.

Letters: T tokens of the batch, B sequences, N max_seq_len, Hq query heads, Hkv key/value heads, D query/key and V value
head size, r compression_rate.
"""

import functools
import math
import struct

import pytest
import torch

from hstu_sparse import htree_attention
from hstu_sparse.htree import reference
from tests.support.budgets import make_jagged, make_offsets


def qkv(lengths, heads, kv_heads, head_size, value_size, **options):
    shapes = ((heads, head_size), (kv_heads, head_size), (kv_heads, value_size))
    return [make_jagged(lengths, shape, seed=i, **options) for i, shape in enumerate(shapes)]


def turn(x, position, base):
    """RoPE of one vector, from its definition in complex numbers."""
    half = len(x) // 2
    pairs = torch.complex(x[:half], x[half:]) * turns(len(x), position, base)
    return torch.cat([pairs.real, pairs.imag])


@functools.cache
def turns(size, position, base):
    angle = torch.tensor([position * base ** (-2.0 * i / size) for i in range(size // 2)], dtype=torch.float64)
    return torch.polar(torch.ones_like(angle), angle)


def literal(q, k, v, lengths, r, top_k, group=1, base=10000.0):
    """Compute the definition, token by token, with lists and dictionaries."""
    most, low = r * top_k, 2 ** math.ceil(math.log2(r * top_k)) - 1
    outputs, start = [], 0
    for length in lengths:
        layers = [[(k[start + s], v[start + s]) for s in range(length)]]
        while len(layers[-1]) > most:
            below = layers[-1]
            parts = [below[i : i + r] for i in range(0, len(below), r)]
            layers.append([tuple(sum(x) / len(part) for x in zip(*part)) for part in parts])
        for t in range(length):
            for g in range(k.shape[1]):
                heads = range(g * (q.shape[1] // k.shape[1]), (g + 1) * (q.shape[1] // k.shape[1]))
                entered = {h: [] for h in heads}
                chosen = None
                for layer in range(len(layers) - 1, -1, -1):
                    rightmost = t // r**layer
                    if chosen is None:
                        nodes = list(range(rightmost + 1))
                    else:
                        nodes = [p * r + i for p in chosen for i in range(r) if p * r + i <= rightmost]
                    keys, values = ([x[i][g] for x in [layers[layer][p] for p in nodes]] for i in (0, 1))
                    turned, first = [turn(key, c, base) for c, key in enumerate(keys)], t // group * group
                    by_token = {}
                    for i in {t, first}:  # the token, and the one that chooses for its group
                        queries = {h: turn(q[start + i, h], len(nodes) - 1, base) for h in heads}
                        by_token[i] = {h: [q.shape[2] ** -0.5 * x @ key for key in turned] for h, x in queries.items()}
                    scores, own_scores = by_token[t], by_token[first]
                    remaining = set(range(len(nodes)))
                    if layer:
                        order = [len(nodes) - 1]
                        if len(nodes) > 1:
                            top = max(s.item() for h in heads for s in own_scores[h][:-1])
                            ranked = []
                            for c in range(len(nodes) - 1):
                                importance = sum(math.exp(own_scores[h][c].item() - top) for h in heads)
                                bits = struct.unpack("i", struct.pack("f", importance))[0]
                                ranked.append((-((bits // (low + 1)) * (low + 1) + low - c), c))
                            order += [c for _, c in sorted(ranked)]
                        remaining -= set(order[:top_k])
                        chosen = [nodes[c] for c in sorted(order[:top_k])]
                    for h in heads:
                        entered[h] += [(scores[h][c], values[c]) for c in remaining]
                for h in heads:
                    weights = torch.stack([s for s, _ in entered[h]]).softmax(0)
                    outputs.append(sum(w * value for w, (_, value) in zip(weights, entered[h])))
        start += length
    return torch.stack(outputs).reshape(len(q), q.shape[1], -1)


@pytest.mark.parametrize(
    "lengths, heads, kv_heads, r, top_k, group",
    [
        ((17,), 2, 1, 2, 2, 1),
        ((5, 0, 33, 1), 2, 2, 2, 2, 1),
        ((40, 7), 3, 1, 3, 2, 1),
        ((30,), 1, 1, 2, 1, 1),
        ((29, 30), 4, 2, 4, 2, 1),
        ((17, 0, 33), 2, 1, 2, 2, 2),
        ((29, 30), 4, 2, 4, 2, 4),
        ((29,), 2, 1, 4, 1, 2),
        ((9,), 2, 1, 12, 1, 6),
    ],
)
def test_reference_is_the_definition(lengths, heads, kv_heads, r, top_k, group):
    """Output and gradients."""
    inputs = [x.requires_grad_() for x in qkv(lengths, heads, kv_heads, 6, 5, dtype=torch.float64)]
    options = dict(compression_rate=r, top_k=top_k, selection_group=group)
    out = htree_attention(*inputs, make_offsets(lengths), max(lengths), **options)
    expected = literal(*inputs, lengths, r, top_k, group)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), rtol=1e-9, atol=1e-9
    )


def test_selection_group_divides_the_rate():
    q, k, v = qkv((5,), 1, 1, 2, 2)
    with pytest.raises(ValueError, match="selection_group must divide compression_rate=16, got 3"):
        htree_attention(q, k, v, make_offsets((5,)), 5, selection_group=3)


def test_enough_nodes_are_dense_attention_with_rope():
    lengths, base = (12, 7), 50.0
    q, k, v = qkv(lengths, 4, 2, 6, 5, dtype=torch.float64)
    out = htree_attention(q, k, v, make_offsets(lengths), 12, compression_rate=3, top_k=4, rope_base=base)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        for h in range(4):
            queries = torch.stack([turn(x, t, base) for t, x in enumerate(q[part, h])])
            keys = torch.stack([turn(x, t, base) for t, x in enumerate(k[part, h // 2])])
            scores = (queries @ keys.T * 6**-0.5).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
            torch.testing.assert_close(out[part, h], scores.softmax(-1) @ v[part, h // 2])
        start += length


def test_reference_in_chunks(monkeypatch):
    lengths = (33, 0, 20)
    inputs = [x.requires_grad_() for x in qkv(lengths, 2, 1, 6, 5, dtype=torch.float64)]
    options = dict(seq_offsets=make_offsets(lengths), max_seq_len=40, compression_rate=2, top_k=2, selection_group=2)
    results = []
    for most in (1 << 26, 5000):
        monkeypatch.setitem(reference.CHUNK, "cpu", most)
        out = htree_attention(*inputs, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(*results)
