"""The htree kernels in Triton's interpreter, fp32: forward, choice and every gradient against the reference in fp64."""

import pytest
import torch

from hstu_sparse import htree_attention
from tests.random.cases.htree import agree, kernel_choices, make_inputs
from tests.support.budgets import EDGE_CASES, make_offsets

pytest.importorskip("triton")
launch = pytest.importorskip("hstu_sparse.htree.launch")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

CASES = {
    # lengths, N, query heads, key/value heads, D, V, r, top_k
    "one layer": ((7,), 8, 2, 1, 16, 16, 2, 4),
    "two layers, around r^k": ((3, 4, 5), 5, 2, 1, 16, 16, 2, 1),
    "three layers": ((9,), 9, 1, 1, 16, 16, 2, 2),
    "four layers around r^k, groups of 4": ((8, 9), 9, 4, 1, 16, 12, 2, 1),
    "groups of 16": ((9,), 9, 16, 1, 16, 16, 3, 1),
    "two key/value heads, odd sizes": ((7, 1), 7, 4, 2, 20, 7, 3, 2),
    "tiles of siblings": ((19,), 19, 2, 1, 16, 16, 16, 1),
    "siblings, two tiles a parent": ((35,), 35, 1, 1, 16, 16, 32, 1),
    "shorter than N says": ((6, 2), 40, 1, 1, 16, 16, 2, 2),
}


def problem(lengths, N, heads, kv_heads, D, V, rate, top_k, **options):
    return make_inputs(lengths, heads, kv_heads, D, V, **options), make_offsets(lengths), N, rate, top_k


# The interpreter takes at least five seconds for each of these cases, which differ from others only in sizes;
# test_queries_turned_step_by_step covers siblings without groups.
LONG = {
    "tiles of siblings",
    "two layers, around r^k", "three layers", "four layers around r^k, groups of 4", "groups of 16",
    "siblings, two tiles a parent", "shorter than N says", "three layers, two key/value heads, odd sizes",
    "more rows than a tile", "one head",
}  # fmt: skip


def marked(cases, fast=frozenset()):
    return [pytest.param(case, marks=pytest.mark.slow) if case in LONG - fast else case for case in cases]


@pytest.mark.parametrize("case", marked(CASES))
def test_agrees_with_reference(case):
    agree(*problem(*CASES[case]))


GROUPED = {
    # lengths, N, query heads, key/value heads, D, V, r, top_k, selection_group
    "dense": ((7, 0, 3), 8, 2, 1, 16, 16, 4, 2, 4),
    "two layers": ((18, 0, 1), 20, 4, 1, 16, 16, 4, 2, 4),
    "three layers, two key/value heads, odd sizes": ((17,), 17, 4, 2, 20, 7, 4, 1, 2),
    "tiles of siblings": ((37,), 37, 4, 1, 16, 16, 16, 1, 16),
    "more rows than a tile": ((37,), 37, 12, 1, 16, 16, 16, 1, 8),
    "one head": ((33,), 33, 1, 1, 16, 16, 6, 2, 3),
    "a group longer than N": ((5, 2), 5, 2, 1, 16, 16, 64, 3, 32),
}


@pytest.mark.parametrize("case", marked(GROUPED, {"tiles of siblings"}))
def test_groups_agree_with_reference(case):
    *sizes, selection_group = GROUPED[case]
    agree(*problem(*sizes), selection_group=selection_group)


@pytest.mark.parametrize("rate, length", [(16, 18), pytest.param(32, 35, marks=pytest.mark.slow)])
def test_queries_turned_step_by_step(rate, length, monkeypatch):
    """Take the path of the 16-bit types with fp32, since the interpreter does not support them."""
    monkeypatch.setattr(launch, "STEPPED", (torch.float32,))
    agree(*problem((length,), length, 1, 1, 16, 16, rate, 1))


@pytest.mark.parametrize("selection_group", [1, 2])
@pytest.mark.parametrize(
    "name", ["empty batch", "all sequences empty", pytest.param("length 1", marks=pytest.mark.slow)]
)
def test_edge_cases(name, selection_group):
    lengths, N = EDGE_CASES[name]
    agree(*problem(lengths, N, 2, 1, 16, 16, 2, 2), selection_group=selection_group)


def test_non_contiguous_inputs_int32_offsets_negative_scale_and_rope_base():
    inputs, offsets, *rest = problem((6, 0, 2), 6, 2, 1, 16, 16, 2, 2, contiguous=False)
    inputs["v"] = inputs["v"].transpose(1, 2).contiguous().transpose(1, 2)
    agree(inputs, offsets.int(), *rest, scale=-0.4, rope_base=100.0)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("selection_group", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_deterministic_mode(deterministic, selection_group):
    agree(*problem((5, 2), 5, 2, 1, 16, 16, 2, 2), selection_group=selection_group)


def test_ties_go_to_the_smaller_position():
    inputs, offsets, N, rate, top_k = problem((16,), 16, 2, 1, 16, 16, 2, 3)
    inputs["k"] = torch.zeros_like(inputs["k"])
    layer1, layer2 = kernel_choices(inputs, offsets, N, rate, top_k, 0.25)
    assert layer2[15, 0].tolist() == [0, 1, 3]
    assert layer1[15, 0].tolist() == [0, 1, 7]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [pytest.param(1e4, marks=pytest.mark.slow), float("nan")])
@pytest.mark.parametrize(
    "length, rate, tokens, group",
    [
        pytest.param(11, 2, (4, 8), 1, marks=pytest.mark.slow),
        (18, 16, (16,), 1),
        (9, 2, (5,), 2),
        pytest.param(35, 16, (7, 15, 31), 8, marks=pytest.mark.slow),
    ],
    ids=["any", "siblings", "groups", "groups of siblings"],
)
def test_the_future_does_not_reach_the_past(length, rate, tokens, group, value):
    """Finite numbers of later tokens change nothing; NaN and infinity may reach the tokens of the same group.

    Nothing reaches another sequence.
    """
    if value == 1e4 and group > 1:
        tokens = (*tokens, 5, 17 % length)
    inputs, offsets, N, rate, top_k = problem((length, 1), length, 1, 1, 16, 16, rate, 1)
    options = dict(compression_rate=rate, top_k=top_k, selection_group=group, backend="triton")
    before = htree_attention(**inputs, seq_offsets=offsets, max_seq_len=N, **options)
    for t in tokens:
        changed = {name: x.clone() for name, x in inputs.items()}
        for x in changed.values():
            x[t + 1 : length] = value
        after = htree_attention(**changed, seq_offsets=offsets, max_seq_len=N, **options)
        assert after[length - 1].isfinite().all() == (value == 1e4)
        assert torch.equal(before[: t + 1], after[: t + 1])
        assert torch.equal(before[length:], after[length:])


@pytest.mark.parametrize(
    ("selection_group", "rows"),
    [(2, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 2), (1, 3), (2, 2)))],
)
def test_choices_that_are_not_saved(selection_group, rows, monkeypatch):
    """Tables of two or three groups, whose choices are made again in the backward pass."""
    monkeypatch.setattr(launch, "TABLE_BYTES", rows * 2 * (2 + 2) * 4)
    agree(*problem((9, 3), 9, 2, 1, 16, 16, 2, 2), selection_group=selection_group)


@pytest.mark.parametrize("selection_group", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_torch_opcheck(selection_group):
    inputs, offsets, N, rate, top_k = problem((3,), 3, 2, 1, 16, 16, 2, 1)
    options = N, rate, top_k, selection_group, 0.25, 10000.0
    arguments = *(x.requires_grad_() for x in inputs.values()), offsets, *options
    torch.library.opcheck(torch.ops.hstu_sparse.htree_fwd.default, arguments)
