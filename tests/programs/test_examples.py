"""Docstrings carry examples: every public operator has one, and each gives what it says."""

import doctest
import importlib
import inspect

import pytest
import torch

import hstu_sparse

TYPES = {"PageFormat", "PagePool", "PoolFull", "RingPlan", "RotateKVCache"}  # described where they are used
OTHERS = [
    "hstu_sparse.core.jagged:offsets_from_lengths",
    "hstu_sparse.core.jagged:sequence_ids",
    "evaluation.ranking_metrics:ranking_metrics",
    "training.strict_yaml:parse_yaml",
    "data.filtering:k_core",
    "data.filtering:offsets_of",
]
PUBLIC = [f"hstu_sparse:{name}" for name in hstu_sparse.__all__ if name not in TYPES]


@pytest.mark.parametrize("place", [*PUBLIC, *OTHERS])
def test_the_example_gives_what_it_says(place):
    module_name, name = place.split(":")
    module = importlib.import_module(module_name)
    documented = getattr(module, name)
    names = {"torch": torch, "hstu_sparse": hstu_sparse, name: documented}
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(documented) or "", names, place, None, None)
    assert example.examples, "no example in the docstring"
    torch.manual_seed(0)
    report: list[str] = []
    options = doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    doctest.DocTestRunner(optionflags=options).run(example, out=report.append)
    assert not report, "".join(report)
