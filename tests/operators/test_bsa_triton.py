"""The block-sparse kernels in Triton's interpreter, fp32: forward, block choice and every gradient against fp64."""

import functools

import pytest
import torch

from hstu_sparse import bsa_attention, bsa_plan
from hstu_sparse.bias.relative import RelativeBias
from tests.random.cases.bsa import check
from tests.support.budgets import EDGE_CASES, compare_with_reference, make_jagged, make_offsets, make_timestamps

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

CASES = {
    # lengths, N, BS, S, W, r, H, D, V
    "groups of 1": ((37, 0, 13, 1), 37, 16, 3, 0, 1, 1, 16, 16),
    "groups of 2, window, odd heads": ((37, 13), 60, 16, 2, 18, 2, 1, 20, 12),
    "groups of a whole small block": ((53, 30), 60, 16, 2, 0, 16, 1, 16, 16),
    "query-major, whole block": ((110, 31), 110, 32, 2, 0, 32, 1, 16, 16),
    "query-major, half a block, window": ((75,), 75, 64, 2, 40, 32, 2, 16, 24),
    "blocks of 128": ((200,), 200, 128, 2, 3, 2, 1, 16, 16),
    "own block only": ((40, 5), 40, 32, 1, 0, 1, 1, 16, 16),
    "more slots than blocks": ((33,), 1000, 16, 4, 0, 2, 1, 16, 16),
}


def problem(lengths, N, BS, S, W, r, H, D, V, **options):
    inputs = {
        n: make_jagged(lengths, (H, size), seed=i, **options) for i, (n, size) in enumerate(zip("qkv", (D, D, V)))
    }
    for i, name in enumerate(("g_cmp", "g_slc", "g_swa")[: 3 if W else 2]):
        inputs[name] = make_jagged(lengths, (H,), seed=5 + i).sigmoid()
    offsets = make_offsets(lengths, dtype=torch.int32)
    return inputs, offsets, N, dict(block_size=BS, block_counts=S, window_size=W, selection_group=r)


def named(case):
    """Return a case of CASES as the keywords of `check`."""
    names = (
        "lengths", "max_seq_len", "block_size", "block_counts", "window_size", "selection_group", "heads", "head_size",
        "value_size",
    )  # fmt: skip
    return dict(zip(names, CASES[case]), dtype="float32")


def attention(offsets, N, shape, **more):
    def run(q, k, v, g_cmp, g_slc, g_swa=None):
        return bsa_attention(q, k, v, offsets, N, (g_cmp, g_slc, g_swa), **shape, **more)

    return run


def agree(inputs, offsets, N, shape):
    indices = {"triton": [], "reference": []}

    def run(backend, **x):
        out, chosen = attention(offsets, N, shape, backend=backend, return_block_indices=True)(**x)
        indices[backend].append(chosen)
        return out

    compare_with_reference(functools.partial(run, "triton"), functools.partial(run, "reference"), inputs)
    assert torch.equal(indices["triton"][0], indices["reference"][0])


# Cases that are run with a bias below; the first one in deterministic mode without one too.
TWICE = ("groups of 2, window, odd heads", "groups of a whole small block", "query-major, half a block, window")


@pytest.mark.parametrize("case", [pytest.param(x, marks=pytest.mark.slow if x in TWICE else []) for x in CASES])
def test_agrees_with_reference(case):
    agree(*problem(*CASES[case]))


@pytest.mark.parametrize("case", [TWICE[0], pytest.param("query-major, whole block", marks=pytest.mark.slow)])
def test_deterministic_mode_agrees_with_reference(case):
    torch.use_deterministic_algorithms(True)
    try:
        agree(*problem(*CASES[case]))
    finally:
        torch.use_deterministic_algorithms(False)


# Cases above have such sequences: the first one, and "more slots than blocks".
EMPTY = ("empty batch", "all sequences empty")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EMPTY else pytest.mark.slow) for name in EDGE_CASES]
)
def test_edge_cases(name):
    lengths, N = EDGE_CASES[name]
    agree(*problem(lengths, N, 16, 2, 0, 2, 1, 16, 16))


BIASES = {
    "position": dict(position=True),
    "time": dict(buckets=9, spread=1e3),
    "both, times in no order": dict(position=True, buckets=9, spread=1e9),
}


@pytest.mark.parametrize(
    ("case", "bias"),
    [
        pytest.param(case, bias, marks=[] if bias == "both, times in no order" else pytest.mark.slow)
        for case in ("query-major, half a block, window", "groups of 2, window, odd heads")
        for bias in BIASES
    ],
)
def test_bias(case, bias):
    check("cpu", **named(case), **BIASES[bias])


@pytest.mark.parametrize(
    "case", [pytest.param("groups of 2, window, odd heads", marks=pytest.mark.slow), "query-major, whole block"]
)
def test_bias_in_deterministic_mode(case):
    lengths = (70, 31) if case == "query-major, whole block" else CASES[case][0]
    check("cpu", **named(case) | dict(lengths=lengths), position=True, buckets=9, deterministic=True)


@pytest.mark.parametrize(
    "name",
    [
        "all sequences empty",
        "an empty sequence in the middle",
        pytest.param("N far above every length", marks=pytest.mark.slow),
    ],
)
def test_bias_at_edge_cases(name):
    lengths, N = EDGE_CASES[name]
    case = named("groups of a whole small block") | dict(lengths=lengths, max_seq_len=N)
    check("cpu", **case, position=True, buckets=5)


def test_bias_opcheck():
    import hstu_sparse.bsa.launch
    import hstu_sparse.bsa.plan  # noqa: F401  both register operators

    inputs, offsets, N, _ = problem((5,), 5, 16, 2, 0, 2, 1, 16, 16)
    times = make_timestamps((5,))
    torch.library.opcheck(torch.ops.hstu_sparse.bsa_entries, (offsets, times, times, 5, 16, 8))
    sides = [*torch.ops.hstu_sparse.split_times(offsets, times, times)] * 2
    plan = [*sides, *torch.ops.hstu_sparse.bsa_entries(offsets, times, times, 5, 16, 8)]
    leaves = [x.requires_grad_() for x in (*inputs.values(), torch.randn(5), torch.randn(9))]
    call = (*leaves[:3], offsets, N, *leaves[3:5], None, *leaves[5:], plan, 16, 2, 0, 2, 0.25, float(N), False)
    torch.library.opcheck(torch.ops.hstu_sparse.bsa_fwd, call)


def test_position_bias_of_mean_keys_far_ahead():
    """Some mean keys of a program belong to blocks over 1,000 tokens after its first query, which does not see them."""
    case = named("query-major, whole block") | dict(lengths=(1160,), max_seq_len=1160, heads=1, block_counts=1)
    check("cpu", **case | dict(block_size=128, selection_group=128), position=True)


def test_not_a_number_adds_nothing_outside_of_the_tables():
    """NaN keys make the tables' gradients NaN, and pairs that are not seen write nothing outside of the tables."""
    (q, k, *rest), shape, bias = biased((40,), 40)
    k = torch.full_like(k, float("nan"))
    tables = [bias.position.requires_grad_(), bias.time.requires_grad_()]
    out = bsa_attention(q, k, *rest, **shape, bias=bias, backend="triton")
    assert all(grad.isnan().any() for grad in torch.autograd.grad(out.sum(), tables))


def test_a_time_table_with_a_tail_that_no_difference_reaches():
    case = named("query-major, whole block") | dict(lengths=(40,), max_seq_len=40)
    check("cpu", **case, position=False, buckets=5000, gap=10**9)


def test_strided_inputs():
    inputs, offsets, N, shape = problem((37, 9), 40, 16, 2, 4, 2, 2, 16, 16, contiguous=False)
    inputs |= {n: g.repeat_interleave(2, 1)[:, ::2] for n, g in inputs.items() if g.dim() == 2}
    agree(inputs, torch.stack([offsets, offsets.flip(0) * 1000], 1)[:, 0], N, shape)


def test_ties_go_to_the_smaller_block():
    inputs, offsets, N, shape = problem((75,), 75, 16, 3, 0, 1, 1, 16, 16)
    inputs["k"] = torch.ones_like(inputs["k"])
    _, indices = attention(offsets, N, shape, backend="triton", return_block_indices=True)(**inputs)
    assert indices[74].tolist() == [[0, 1, 4]]
    assert indices[63].tolist() == [[0, 1, 3]]


def test_long_lists_are_cut_into_chunks():
    """All queries choose block 0, so that its list spans two chunks of 8 * S * BS tokens."""
    inputs, offsets, N, shape = problem((290,), 290, 16, 2, 0, 1, 1, 16, 16)
    inputs["q"] = inputs["q"].abs()
    inputs["k"] = inputs["k"] * 0.1
    inputs["k"][:16] += 1
    agree(inputs, offsets, N, shape)


@pytest.mark.slow  # test_bias_opcheck runs the same operators
def test_opcheck():
    import hstu_sparse.bsa.launch
    import hstu_sparse.bsa.plan  # noqa: F401  both register operators

    inputs, offsets, N, shape = problem((18, 5), 18, 16, 2, 4, 2, 1, 10, 7)
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    call = (*list(leaves.values())[:3], offsets, N, *list(leaves.values())[3:], *shape.values())
    call = (*call[:8], None, None, [], 16, 2, 4, 2, 0.25, float(N), False)
    torch.library.opcheck(torch.ops.hstu_sparse.bsa_fwd, call)


def test_unsupported_options_name_the_way_out():
    inputs, offsets, N, shape = problem((30,), 30, 16, 2, 0, 1, 1, 16, 16)
    with pytest.raises(ValueError, match=r"block_size 16 32 64 128, got 24; use backend='reference'"):
        attention(offsets, N, shape | dict(block_size=24), backend="triton")(**inputs)
    with pytest.raises(ValueError, match="D from 1 to 256, got D=300"):
        wide = {n: x.repeat(1, 1, 19)[..., :300] if x.dim() == 3 else x for n, x in inputs.items()}
        attention(offsets, N, shape, backend="triton")(**wide)
    with pytest.raises(TypeError, match="float64"):
        attention(offsets, N, shape, backend="triton")(**{n: x.double() for n, x in inputs.items()})


def biased(lengths, N):
    """Return (arguments, RelativeBias) of a call with both biases."""
    inputs, offsets, N, shape = problem(lengths, N, 16, 2, 0, 2, 1, 16, 16)
    q, k, v, g_cmp, g_slc = inputs.values()
    times = make_timestamps(lengths)
    return (q, k, v, offsets, N, (g_cmp, g_slc, None)), shape, RelativeBias(torch.randn(N), torch.randn(9), times)


def test_layers_that_share_a_plan_compute_it_once(monkeypatch):
    from hstu_sparse.bsa import plan

    kernel, launches = plan.bsa_entries_kernel, []

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(plan, "bsa_entries_kernel", Counted())
    (q, *rest), shape, bias = biased((18,), 20)
    alone = bsa_attention(q, *rest, **shape, bias=bias, backend="triton")
    shared_plan = bsa_plan(q, *rest[2:4], block_size=16, bias=bias, backend="triton")
    launches.clear()
    out = q.requires_grad_()
    for layer in range(2):
        out = bsa_attention(out, *rest, **shape, bias=bias, backend="triton", plan=shared_plan)
        assert layer or torch.equal(out, alone)
    out.sum().backward()
    assert launches == [] and q.grad.abs().sum() > 0


def test_a_plan_that_does_not_fit_is_refused():
    (q, *rest), shape, bias = biased((37, 21), 40)
    shared_plan = bsa_plan(q, *rest[2:4], block_size=32, bias=bias, backend="triton")
    with pytest.raises(ValueError, match=r"plan was made for .*block_size=32.* needs a plan for .*block_size=16"):
        bsa_attention(q, *rest, **shape, bias=bias, backend="triton", plan=shared_plan)
    with pytest.raises(ValueError, match="plan must be None with backend='reference'"):
        bsa_attention(q, *rest, **shape, bias=bias, plan=shared_plan)
    assert bsa_plan(q, *rest[2:4], block_size=16, bias=bias) is None


@pytest.mark.parametrize(
    ("group", "gap", "buckets"),
    [
        (2, 4000, 60),
        pytest.param(32, 40, 3, marks=pytest.mark.slow),
        pytest.param(32, 10**7, 60, marks=pytest.mark.slow),
        pytest.param(2, 40, 3, marks=pytest.mark.slow),
        pytest.param(32, 4000, 60, marks=pytest.mark.slow),
    ],
)
def test_tiles_of_few_buckets(group, gap, buckets):
    """Evenly spaced times: chosen blocks that span one bucket, a few, or more seconds than fp32 represents exactly."""
    case = named("query-major, whole block")
    case |= dict(lengths=(100,), max_seq_len=100, selection_group=group)
    check("cpu", **case, position=True, buckets=buckets, gap=gap)


def test_tiles_with_fewer_mean_keys_than_the_map_of_time_buckets():
    """Heads of more than 128 in fp32: tiles have 16 mean keys; the map's tiles of 32 span at most one bucket edge."""
    inputs, offsets, N, shape = problem((530,), 530, 16, 1, 0, 8, 1, 16, 130)
    q, k, v, *gates = inputs.values()
    times = make_timestamps((530,))
    bias = RelativeBias(None, torch.tensor([3.0, -2.0]), times, times + 5)
    operands = (q, k, v, offsets, N, (*gates, None))
    (actual, chosen), (expected, same) = (
        bsa_attention(*operands, **shape, bias=bias, backend=backend, return_block_indices=True)
        for backend in ("triton", "reference")
    )
    assert torch.equal(chosen, same)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
