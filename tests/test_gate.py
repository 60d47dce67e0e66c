"""GateModel: shapes, range, and that the heads share one network."""

import torch

from models.gate import GateModel


def test_gates_are_the_stated_network():
    torch.manual_seed(0)
    gate = GateModel(in_features=6, hidden_dim=5)
    q = torch.randn(7, 3, 6)
    first, _, last, _ = gate.layers
    hidden = (q @ first.weight.T + first.bias).clamp(min=0)
    expected = (1 / (1 + (-(hidden @ last.weight.T + last.bias)).exp())).unbind(-1)
    gates = gate(q)
    assert len(gates) == 3
    for got, want in zip(gates, expected):
        assert got.shape == (7, 3)
        torch.testing.assert_close(got, want)


def test_gates_take_padded_queries_and_train():
    gate = GateModel(in_features=4, hidden_dim=8)
    q = torch.randn(2, 5, 3, 4, requires_grad=True)
    gates = gate(q)
    assert all(g.shape == (2, 5, 3) and (g > 0).all() and (g < 1).all() for g in gates)
    sum(g.sum() for g in gates).backward()
    assert q.grad.abs().sum() > 0
    assert all(p.grad is not None for p in gate.parameters())


def test_empty_batch():
    assert [g.shape for g in GateModel(4, 8)(torch.zeros(0, 2, 4))] == [(0, 2)] * 3
