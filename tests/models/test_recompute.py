"""Check that recomputed layers have the same bits, dropout included, and save fewer bytes."""

import dataclasses

import pytest
import torch

from models.hstu import SequenceModel
from models.options import ModelConfig
from tests.models.test_hstu import CONFIG, KINDS, NUM_ITEMS, make_batch

MORE = {
    "softmax with dropout": KINDS["softmax"] | {"attention": {"kind": "softmax", "dropout": 0.2}},
    "rotatekv": CONFIG | {"attention": {"kind": "rotatekv"}, "attention_dim": 16, "linear_dim": 16},
    "ring": CONFIG | {"attention": {"kind": "ring"}},
}
LENGTHS = [5, 1, 12, 7]


def trained(config, recompute):
    """Return (loss, auxiliary losses, gradients, the generator's next number; bytes saved without the weights)."""
    torch.manual_seed(0)
    model = SequenceModel(ModelConfig.model_validate(config | {"dropout": 0.3}), NUM_ITEMS).train()
    model.recompute = recompute
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def keep(x):
        if (storage := x.untyped_storage()).data_ptr() not in weights:
            saved[storage.data_ptr()] = x  # alive, so that no address comes twice
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out, aux = model(dataclasses.replace(make_batch(LENGTHS), phase=10**9))
    loss = (out * torch.arange(8.0)).sum() + sum(one.weighted for one in aux.values())
    loss.backward()
    values = [one.value for one in aux.values()]
    bits = [loss, *values, *(p.grad for p in model.parameters() if p.grad is not None), torch.rand(1)]
    return bits, sum(x.untyped_storage().nbytes() for x in saved.values())


@pytest.mark.parametrize("kind", KINDS | MORE)
def test_the_same_bits_and_fewer_bytes(kind):
    bits, size = trained((KINDS | MORE)[kind], recompute=True)
    expected, whole = trained((KINDS | MORE)[kind], recompute=False)
    assert len(bits) == len(expected) and all(torch.equal(a, b) for a, b in zip(bits, expected))
    # Two layers' inputs, the embedding's and the output's intermediates.
    assert size <= 6 * 4 * sum(LENGTHS) * 8 < 0.14 * whole
