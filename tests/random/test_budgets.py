"""The campaign's checks: a kernel whose products are rounded passes, one that is off by a thousandth does not.

Tokens are few, where nearly nothing may be left of every product and an error is soon called too large, or nothing an
error any more. In place of kernels, which need a GPU to round as they do there, stands the reference.
"""

import functools
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hstu_sparse import testing
from tests.random.cases import draw, operator

aten = torch.ops.aten
# What of an operator's module the check takes for its function, and calls with backend="triton".
FUNCTIONS = {
    "bsa": ["bsa_attention"],
    "catalogue_loss": ["catalogue_loss"],
    "dense": ["kernel"],
    "flash": ["flash_attention"],
    "indexer": ["index_scores", "sparse_attention", "indexer_loss", "compute_index_loss_sparse"],
    "ring_hstu": ["ring_hstu_attention"],
}
CASES = 200


class Rounded(TorchDispatchMode):
    """Products of fp32 matrices are wrong as those of three TF32 products are: by 2^-22 of their terms, normally."""

    def __init__(self):
        super().__init__()
        self.on, self.generator = False, torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        if self.on and function in (aten.mm.default, aten.bmm.default) and result.dtype == torch.float32:
            sizes = function(*(x.square() for x in arguments)).sqrt()
            result = result + 2**-22 * sizes * torch.randn(result.shape, generator=self.generator)
        return result


def stand_in(monkeypatch, module, names, factor):
    """Kernels of a module are the reference, rounded, whose output and gradients are `factor` times too large."""
    rounded, gradients = Rounded(), testing.gradients

    def called(function, *arguments, backend="triton", **named):
        rounded.on |= backend == "triton"
        return function(*arguments, backend="reference", **named)

    def enlarged_gradients(*arguments):
        rounded.on = False
        with rounded:
            result = gradients(*arguments)
        return {name: x * factor for name, x in result.items()} if rounded.on else result

    for name in names:
        function = getattr(module, name)
        function = function.func if isinstance(function, functools.partial) else function
        monkeypatch.setattr(module, name, functools.partial(called, function))
    for place in (testing, module):
        monkeypatch.setattr(place, "gradients", enlarged_gradients, raising=False)


def failures(name):
    """Return (how many of the cases the check finds wrong, what it says of the first)."""
    module, numbers, said = operator(name), random.Random(name), []
    for _ in range(CASES):
        case = draw(module, numbers, False) | {"dtype": "float32"}
        if "tokens" in case:
            # For a target without others beside it loss and gradients are 0.
            case |= {"tokens": numbers.randint(1, 3), "items": 9 + case["items"] % 300}
            case |= {"num_negatives": 9, "ignored": 0.0}
        else:
            case["lengths"] = [numbers.randint(1, 3) for _ in range(numbers.randint(1, 2))]
        if name == "indexer":
            # Sums of whole numbers are not rounded.
            case |= {"operator": numbers.choice(FUNCTIONS["indexer"]), "exact": False}
            # The first group of a sequence has no choice, and so no scores and no loss: groups shorter than that.
            case |= {"group": numbers.choice([1, 1, 2])}
        if case.get("key_lengths") is not None:
            case["key_lengths"] = [numbers.randint(1, 3) for _ in case["lengths"]]
        if "max_seq_len" in case:
            case["max_seq_len"] = 3 + case["max_seq_len"] % 50
        try:
            module.check("cpu", **case)
        except AssertionError as error:
            said.append(f"{case}: {error}")
    return len(said), said[:1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_rounding_does_is_allowed(name, monkeypatch):
    stand_in(monkeypatch, operator(name), FUNCTIONS[name], 1.0)
    count, said = failures(name)
    assert count == 0, said


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_thousandth_is_not(name, monkeypatch):
    stand_in(monkeypatch, operator(name), FUNCTIONS[name], 1.001)
    count, _ = failures(name)
    assert count >= 0.7 * CASES, f"{count} of {CASES} cases were found wrong"
