"""The campaign of random shapes: every operator's kernels against its reference, for as long as it is given.

    python -m pytest -m gpu tests/test_campaign.py --seconds 300 [--campaign-seed 1]

Without a GPU it runs in Triton's interpreter, some seconds in all. A failing case is printed as it goes into FIXED.
"""

import random
import time

import pytest
import torch

from tests.operators import NAMES, operator

# Failures that the campaign found, as it printed them: (operator, case).
FIXED: list[tuple[str, dict]] = []


def campaign(name: str, device: str, seconds: float, seed: int) -> int:
    """Checks random cases of an operator until the time is up; returns their number."""
    module, numbers, cases = operator(name), random.Random(f"{name} {seed}"), 0
    end = time.monotonic() + seconds
    failed = []
    while not cases or time.monotonic() < end:
        case = module.draw(numbers, device == "cpu")
        try:
            module.check(device, **case)
        except Exception as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            failed.append(f"({name!r}, {case!r}),  # {type(error).__name__}: {str(error)[:300]}")
        cases += 1
        if device == "cuda":
            torch.cuda.empty_cache()  # other tests run beside this one
    assert not failed, f"{len(failed)} of {cases} cases failed:\n" + "\n".join(failed[:20])
    return cases


def fixed(name):
    return [case for operator_name, case in FIXED if operator_name == name]


@pytest.mark.gpu
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", NAMES)
def test_random_shapes_on_gpu(name, request, record_property):
    for case in fixed(name):
        operator(name).check("cuda", **case)
    seconds, seed = request.config.getoption("--seconds"), request.config.getoption("--campaign-seed")
    record_property("cases", campaign(name, "cuda", seconds / len(NAMES), seed))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("name", NAMES)
def test_random_shapes_in_the_interpreter(name, request):
    pytest.importorskip("triton")
    for case in fixed(name):
        if case.get("dtype", "float32") == "float32":
            operator(name).check("cpu", **case)
    seconds, seed = request.config.getoption("--seconds"), request.config.getoption("--campaign-seed")
    campaign(name, "cpu", seconds / len(NAMES), seed)
