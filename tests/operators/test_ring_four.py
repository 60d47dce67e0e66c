"""Ring attention by four processes over gloo: every form and option against one process."""

import pytest

from tests.operators.ring_cases import CASES
from tests.operators.test_ring import assert_as_one_process, results_of


@pytest.mark.parametrize(("form", "option"), CASES)
def test_four_processes_equal_one(form, option):
    assert_as_one_process(form, option, 4, results_of(4))
