"""Dense HSTU attention on a GPU: all features and dtypes, no retuning, one graph."""

import functools

import pytest
import torch

from hstu_sparse import RelativeBias, hstu_attention
from hstu_sparse.testing import (
    EDGE_CASES,
    compare_with_reference,
    gradients,
    make_jagged,
    make_offsets,
    make_timestamps,
)

pytestmark = pytest.mark.gpu


def attention(position_bias=None, time_bias=None, timestamps=None, query_timestamps=None, **arguments):
    """hstu_attention with what makes the bias apart, so that tables are differentiated as any argument."""
    return hstu_attention(**arguments, bias=RelativeBias(position_bias, time_bias, timestamps, query_timestamps))


reference = functools.partial(attention, backend="reference")
kernel = functools.partial(attention, backend="triton")
ALL = ("targets", "position", "time", "query_times")


def inputs(lengths, n, *, heads=2, d=64, v=64, features=(), window=0, dtype=torch.bfloat16, **options):
    generator = torch.Generator().manual_seed(7)
    jagged = functools.partial(make_jagged, lengths, dtype=dtype, device="cuda", **options)
    result = dict(
        q=jagged((heads, d), seed=1),
        k=jagged((heads, d), seed=2),
        v=jagged((heads, v), seed=3),
        seq_offsets=make_offsets(lengths),
        max_seq_len=n,
        window_size=window,
    )
    if "targets" in features:
        result["num_targets"] = torch.tensor([min(x, i % 5) for i, x in enumerate(lengths, 3)], dtype=torch.int64)
    if "position" in features:
        result["position_bias"] = torch.randn(n, generator=generator)
    if "time" in features:
        result["time_bias"] = torch.randn(129, generator=generator)
        result["timestamps"] = make_timestamps(lengths)
    if "query_times" in features:
        shift = torch.randint(-(10**5), 10**6, (sum(lengths),), generator=generator)
        result["query_timestamps"] = result["timestamps"] + shift
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in result.items()}


def check(arguments):
    # A table's gradient is a sum over all pairs, which partly cancels: its error is that of the terms, and each term
    # has been through the fast tanh (fp16 and bf16) or added in another order (fp32).
    half = arguments["q"].dtype != torch.float32
    floor = dict.fromkeys(("grad of position_bias", "grad of time_bias"), 4e-3 if half else 4e-6)
    compare_with_reference(kernel, reference, arguments, floor=floor)


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_cases(name, dtype):
    lengths, n = EDGE_CASES[name]
    check(inputs(lengths, n, features=ALL, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [(), ("targets",), ("position",), ("time",), ALL])
@pytest.mark.parametrize("window", [0, 100])
def test_features(features, window, dtype):
    check(inputs((300, 0, 701, 1, 217), 1024, features=features, window=window, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "v"), [(16, 16), (25, 25), (50, 50), (32, 96), (128, 128), (40, 256), (256, 200)])
def test_head_sizes(d, v, dtype):
    check(inputs((190, 67), 200, d=d, v=v, features=("position", "time"), dtype=dtype))


@pytest.mark.parametrize("features", [("position", "time"), ALL])
@pytest.mark.parametrize("window", [0, 900])
def test_long_sequence_with_narrow_tiles(features, window):
    check(inputs((3000, 500), 3000, d=128, v=128, features=features, window=window))


@pytest.mark.parametrize("features", [("position", "time"), ALL])
def test_timestamps_in_no_order(features):
    """No tile is narrow, and most are far from the diagonal."""
    x = inputs((900, 333), 1000, features=features)
    x["timestamps"] = x["timestamps"][torch.randperm(1233, generator=torch.Generator().manual_seed(1)).cuda()]
    check(x)


def test_strided_inputs():
    check(inputs((190, 67), 200, features=("position",), contiguous=False))


def test_time_buckets_at_their_edges():
    """Every integer next to an edge: one-hot tables read the bucket off the output."""
    import math

    edges = [math.ceil(math.exp(0.301 * k)) for k in range(1, 50)]
    gaps = sorted({max(1, e + i) for e in edges for i in (-2, -1, 0, 1)})
    for gap in gaps:
        if gap >= 2**24:
            continue
        x = inputs((2,), 2, heads=1, d=16, v=16, dtype=torch.float32)
        x["time_bias"] = torch.arange(129.0).cuda()
        x["timestamps"] = torch.tensor([0, gap]).cuda()
        torch.testing.assert_close(kernel(**x), reference(**x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_deterministic(dtype):
    x = inputs((900, 333), 1000, features=ALL, dtype=dtype)
    leaves = [x[name].requires_grad_() for name in ("position_bias", "time_bias", "q", "k", "v")]
    found = []
    for _ in range(3):
        found.append(torch.autograd.grad(kernel(**x).float().square().sum(), leaves))
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again))


def test_a_gradient_that_is_not_a_number_shows():
    x = inputs((100, 37), 128, features=("position", "time"))
    leaves = [x[name].requires_grad_() for name in ("position_bias", "time_bias", "q")]
    out = kernel(**x)
    grad = torch.ones_like(out)
    grad[50] = float("nan")
    for found in torch.autograd.grad(out, leaves, grad):
        assert found.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_the_tables_keep_their_digits_where_those_of_scores_vanish(dtype):
    """The scores' gradients, 1e-8, are zero in fp16."""
    x = inputs((100, 37), 128, features=("position", "time"), dtype=dtype)
    x["v"] *= 0.01
    grad = torch.full_like(x["v"], 1e-6)
    wide = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in x.items()}
    actual, expected = gradients(kernel, x, grad), gradients(reference, wide, grad.double())
    for name in ("grad of position_bias", "grad of time_bias"):
        exact = expected[name]
        torch.testing.assert_close(actual[name].double(), exact, rtol=0.1, atol=0.02 * exact.abs().max().item())


def test_batches_of_other_lengths_compile_nothing_new():
    from hstu_sparse.dense import triton as dense

    kernels = [kernel for name, kernel in vars(dense).items() if name.startswith("dense_attention_")]
    assert len(kernels) == 6

    def run(lengths):
        x = inputs(lengths, 512, features=("position", "time"))
        x["q"].requires_grad_()
        kernel(**x).float().sum().backward()

    def compiled():
        return [sum(len(c[0]) for c in k.device_caches.values()) for k in kernels]

    run((100, 37, 512))
    before = compiled()
    for lengths in ((1, 16, 32, 400), (511,), (64, 0, 128), (17,) * 33):
        run(lengths)
    assert compiled() == before


def test_compiles_as_one_graph():
    x = inputs((120, 0, 57), 130, features=("position", "time"))
    x["q"].requires_grad_()
    expected = kernel(**x)
    (gradient,) = torch.autograd.grad(expected.float().square().sum(), x["q"])
    found = torch.compile(kernel, fullgraph=True)(**x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.float().square().sum(), x["q"])[0], gradient)


def test_opcheck():
    import hstu_sparse.dense.triton  # noqa: F401  registers the operators

    x = inputs((12, 0, 5), 13, features=ALL)
    names = ("q", "k", "v", "seq_offsets", "max_seq_len", "alpha", "num_targets", "window_size", "position_bias")
    x["alpha"] = 0.25
    tail = ("time_bias", "timestamps", "query_timestamps")
    for name in ("q", "k", "v", "position_bias", "time_bias"):
        x[name].requires_grad_()
    torch.library.opcheck(
        torch.ops.hstu_sparse.dense_fwd.default,
        tuple(x[name] for name in (*names, *tail)),
        # Compares gradients of two runs, and the time bias's depends on the order of additions.
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
