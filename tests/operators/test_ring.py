"""Ring attention over gloo: every form and option against one process, by the reference and by the kernels."""

import functools

import pytest
import torch

from hstu_sparse.ring import softmax
from hstu_sparse.ring.plan import cut_sequences
from tests.operators.distributed import run_ranks
from tests.operators.ring_cases import CASES, FORMS, OPTIONS, all_results, expected, lengths_of, rank_results
from tests.support.budgets import make_offsets

NAMES = ("out", "lse", "dq", "dk", "dv")


@functools.cache
def results_of(world: int, cases: tuple = tuple(CASES)) -> list:
    """Return the results of every rank, all cases: one start of the processes serves all tests."""
    return run_ranks(all_results, world, world, cases, "reference")


def assert_as_one_process(form, option, world, ranks, heads=4):
    """Check that the results of `world` processes equal those of one process with all tokens."""
    for rank in ranks:
        if not isinstance(rank, dict):
            raise AssertionError(f"a rank failed: {rank}")
    tolerance = {"float64": 1e-12, "bfloat16": 2e-2}.get(OPTIONS[option].get("dtype"), 2e-5)
    offsets = make_offsets(lengths_of(form, world))
    whole = expected(form, option, world, heads=heads)
    seen = []
    for rank in range(world):
        index, _ = cut_sequences(offsets, rank, world, zigzag="zigzag" in form)
        seen.append(index)
        for name, value, right in zip(NAMES, ranks[rank][form, option], whole, strict=True):
            right = right[:, index] if name == "lse" else right[index]
            torch.testing.assert_close(
                value,
                right,
                rtol=tolerance,
                atol=tolerance,
                check_dtype=name != "lse",
                msg=lambda m, n=name: f"{n}: {m}",
            )
    assert torch.cat(seen).sort().values.tolist() == list(range(int(offsets[-1])))


@pytest.mark.parametrize(("form", "option"), CASES)
def test_two_processes_equal_one(form, option):
    assert_as_one_process(form, option, 2, results_of(2))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("option", ["causal", "all at once"])
def test_no_process_group(form, option):
    assert_as_one_process(form, option, 1, [{(form, option): rank_results(0, 1, form, option, "reference")}])


def test_a_group_of_one():
    ranks = run_ranks(all_results, 1, 1, [("zigzag varlen", "causal")], "reference")
    assert_as_one_process("zigzag varlen", "causal", 1, ranks)


def by_single_heads(rank, *arguments):
    """Run `all_results` with the fewest heads in a round of the ring, as long sequences do."""
    softmax.TILES = 1
    return all_results(rank, *arguments)


def test_heads_go_round_one_after_another():
    options = ("alibi", "alibi by sequence, full", "dropout", "shared keys")
    cases = [(form, option) for form in FORMS for option in options]
    ranks = run_ranks(by_single_heads, 2, 2, cases, "reference")
    for form, option in cases:
        assert_as_one_process(form, option, 2, ranks)


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    # The second one's heads go round one after another; with dropout all go together.
    cases = [("few zigzag varlen", option) for option in ("all at once", "causal")]
    ranks = run_ranks(by_single_heads, 2, 2, cases, "triton", 2)
    for form, option in cases:
        assert_as_one_process(form, option, 2, ranks, heads=2)
