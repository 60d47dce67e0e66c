"""HSTU attention round a ring over gloo against one process."""

import functools

import pytest
import torch

from hstu_sparse.ring.plan import cut_sequences
from tests.operators.distributed import run_ranks
from tests.operators.ring_cases import HSTU_CASES, all_hstu_results, hstu_expected, hstu_inputs, hstu_rank_results


@functools.cache
def results_of(world: int) -> list:
    return run_ranks(all_hstu_results, world, world, HSTU_CASES, "reference")


def check(case, world, ranks):
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    tolerance = 1e-12 if case == "fp64" else 1e-5
    right = hstu_expected(case)
    offsets = hstu_inputs(case)[2]
    parts = [cut_sequences(offsets, rank, world, zigzag=case == "zigzag")[0] for rank in range(world)]
    for rank, index in enumerate(parts):
        for value, whole in zip(ranks[rank][case][:4], right[:4], strict=True):
            torch.testing.assert_close(value, whole[index], rtol=tolerance, atol=tolerance)
    # Each rank has its queries' part of the tables' gradients.
    for place in range(4, len(right)):
        total = sum(rank[case][place] for rank in ranks)
        torch.testing.assert_close(total, right[place], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", HSTU_CASES)
def test_ring_equals_one_process(case, world):
    check(case, world, results_of(world))


@pytest.mark.parametrize("case", HSTU_CASES)
def test_no_process_group(case):
    check(case, 1, [{case: hstu_rank_results(0, 1, case, "reference")}])


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    case = "both biases, few tokens"
    check(case, 2, run_ranks(all_hstu_results, 2, 2, [case], "triton"))
