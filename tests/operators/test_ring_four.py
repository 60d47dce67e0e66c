"""Ring attention by four processes over gloo against one process: every form, every option; slow: all pairs of both."""

import pytest

from tests.operators.ring_cases import CASES, FORMS, OPTIONS
from tests.operators.test_ring import assert_as_one_process, results_of

FEW = (
    *((form, "causal") for form in FORMS),
    *((FORMS[i % len(FORMS)], option) for i, option in enumerate(OPTIONS) if option != "causal"),
)


@pytest.mark.parametrize(("form", "option"), FEW)
def test_four_processes_equal_one(form, option):
    assert_as_one_process(form, option, 4, results_of(4, FEW))


@pytest.mark.slow
@pytest.mark.parametrize(("form", "option"), CASES)
def test_all_pairs(form, option):
    assert_as_one_process(form, option, 4, results_of(4))
