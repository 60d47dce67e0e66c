"""Test the checks of the random cases: a kernel whose products are rounded passes, one with a thousandth more does not.

The cases have few tokens, with which products may nearly cancel and a budget is most easily too strict or too loose.
The reference with rounding added takes the place of the kernels, since the interpreter does not round as a GPU does.
"""

import contextlib
import functools
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.random.cases import draw, operator
from tests.support import budgets as testing

aten = torch.ops.aten
# Function of an operator's module that the check calls with backend="triton".
FUNCTIONS = {
    "bsa": ["bsa_attention"],
    "catalogue_loss": ["catalogue_loss"],
    "dense": ["kernel"],
    "flash": ["flash_attention"],
    "indexer": ["index_scores", "sparse_attention", "indexer_loss", "compute_index_loss_sparse"],
    "ring_hstu": ["ring_hstu_attention"],
}


class Rounded(TorchDispatchMode):
    """Products of fp32 matrices with the errors of three TF32 products: normally distributed, 2^-22 of their terms."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        if function in (aten.mm.default, aten.bmm.default) and result.dtype == torch.float32:
            sizes = function(*(x.square() for x in arguments)).sqrt()
            result = result + 2**-22 * sizes * torch.randn(result.shape, generator=self.generator)
        return result


def stand_in(monkeypatch, module, names):
    """Replace the kernels of a module by the reference, rounded in both passes where gradients are computed."""
    rounded, gradients = Rounded(), testing.gradients
    passes = contextlib.ExitStack()  # what is entered in the forward pass holds until the end of the backward pass
    needs_grad = False

    def called(function, *arguments, backend="triton", **named):
        if backend == "triton" and needs_grad:
            passes.enter_context(rounded)
        return function(*arguments, backend="reference", **named)

    def rounded_gradients(*arguments):
        nonlocal needs_grad
        needs_grad = True
        try:
            with passes:
                return gradients(*arguments)
        finally:
            needs_grad = False

    for name in names:
        function = getattr(module, name)
        function = function.func if isinstance(function, functools.partial) else function
        monkeypatch.setattr(module, name, functools.partial(called, function))
    for place in (testing, module):
        monkeypatch.setattr(place, "gradients", rounded_gradients, raising=False)


def hold_enlarged(monkeypatch, module):
    """Check each result also when enlarged by a thousandth; return the list of errors, to which these checks add."""
    messages, original = [], testing.assert_within_budget

    def assert_within_budget(name, actual, *others, **options):
        try:
            original(name, actual * 1.001, *others, **options)
        except AssertionError as error:
            messages.append(str(error))
        original(name, actual, *others, **options)

    for place in (testing, module):
        monkeypatch.setattr(place, "assert_within_budget", assert_within_budget, raising=False)
    return messages


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_what_rounding_does_is_allowed_and_a_thousandth_is_not(name, count, monkeypatch):
    module, numbers, messages, noticed = operator(name), random.Random(name), [], 0
    stand_in(monkeypatch, module, FUNCTIONS[name])
    enlarged = hold_enlarged(monkeypatch, module)
    for _ in range(count):
        case = draw(module, numbers, False) | {"dtype": "float32"}
        if "tokens" in case:
            # For a target without competing items loss and gradients are 0.
            case |= {"tokens": numbers.randint(1, 3), "items": 9 + case["items"] % 300}
            case |= {"num_negatives": 9, "ignored": 0.0}
        else:
            case["lengths"] = [numbers.randint(1, 3) for _ in range(numbers.randint(1, 2))]
        if name == "indexer":
            # Sums of whole numbers are not rounded.
            case |= {"operator": numbers.choice(FUNCTIONS["indexer"]), "exact": False}
            # The first group of a sequence has no choice, so no scores and no loss: use shorter groups.
            case |= {"group": numbers.choice([1, 1, 2])}
        if case.get("key_lengths") is not None:
            case["key_lengths"] = [numbers.randint(1, 3) for _ in case["lengths"]]
        if "max_seq_len" in case:
            case["max_seq_len"] = 3 + case["max_seq_len"] % 50
        enlarged.clear()
        try:
            module.check("cpu", **case)
        except AssertionError as error:
            messages.append(f"{case}: {error}")
        noticed += bool(enlarged)
    assert not messages, f"{len(messages)} of {count} cases were found wrong: {messages[0]}"
    assert noticed >= 0.7 * count, f"{noticed} of {count} cases a thousandth too large were found wrong"
