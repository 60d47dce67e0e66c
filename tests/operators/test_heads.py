"""The exchange of tokens for heads over gloo: softmax attention on it, and the index loss of heads over ranks, equal
those of one process; wrong calls.
"""

import functools

import pytest
import torch

from hstu_sparse import heads_to_tokens, tokens_to_heads
from tests.operators import heads_cases
from tests.operators.distributed import run_ranks
from tests.operators.heads_cases import CASES, tokens_of_ranks

ERRORS = (
    "at least one tensor",
    "must be torch.float32 on cpu, as tensors[0], got torch.float64",
    "tensors[1] must be [T=2",
    "a number for each of",
    "T=3 for this rank, got tensors with 2",
    "divide the heads of tensors[0], got H=7",
    "tokens of all ranks, got 2",
    "has tensors=",
)


@functools.cache
def results_of(world: int) -> list:
    """Return the results of every rank: one start of the processes serves all tests."""
    ranks = run_ranks(heads_cases.all_results, world, world)
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    return ranks


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_equal_one_process(world):
    ranks = results_of(world)
    for case, dtype in CASES.items():
        whole = heads_cases.expected(case)
        for place, right in enumerate(whole):
            value = torch.cat([rank[case][place] for rank in ranks])
            tolerance = 1e-12 if dtype == torch.float64 else 2e-2
            torch.testing.assert_close(value, right, rtol=tolerance, atol=tolerance)
        parts = [len(rank[case][0]) for rank in ranks]
        assert parts == tokens_of_ranks(len(whole[0]), world)
    assert all(rank["twice"] for rank in ranks)
    for case in heads_cases.losses_of(world):
        whole = heads_cases.index_loss(slice(None), "reference", *case[1:])
        for rank in ranks:
            torch.testing.assert_close(rank["index losses"][case], whole, rtol=1e-5, atol=1e-7)
    for rank in ranks:
        for message, part in zip(rank["errors"], ERRORS, strict=True):
            assert part in message


def test_one_process_keeps_its_tensors():
    q, k = torch.randn(2, 5, 3, 4)
    assert tokens_to_heads(q, k) == (q, k) and heads_to_tokens(q) is q
