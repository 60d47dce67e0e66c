"""Dense HSTU attention on the CPU: the reference by hand, the interface, the kernels in Triton's interpreter."""

import functools
import math

import pytest
import torch

from hstu_sparse import RelativeBias, hstu_attention
from hstu_sparse.relative_bias import time_bucket
from hstu_sparse.testing import EDGE_CASES, compare_with_reference, make_jagged, make_offsets, make_timestamps

interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")


def attention(position_bias=None, time_bias=None, timestamps=None, query_timestamps=None, **arguments):
    """hstu_attention with what makes the bias apart, so that tables are differentiated as any argument."""
    return hstu_attention(**arguments, bias=RelativeBias(position_bias, time_bias, timestamps, query_timestamps))


reference = functools.partial(attention, backend="reference")
kernel = functools.partial(attention, backend="triton")


def inputs(lengths, n, *, heads=2, d=16, v=16, features=(), window=0, dtype=torch.float32, device="cpu", **options):
    """Keyword arguments of hstu_attention; `features` of targets, position, time, query_times."""
    generator = torch.Generator().manual_seed(7)
    jagged = functools.partial(make_jagged, lengths, dtype=dtype, device=device, **options)
    result = dict(
        q=jagged((heads, d), seed=1),
        k=jagged((heads, d), seed=2),
        v=jagged((heads, v), seed=3),
        seq_offsets=make_offsets(lengths, device=device),
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
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in result.items()}


def check(arguments, **options):
    # A table's gradient is a sum over all pairs, which partly cancels: its error is that of the terms.
    floor = {"grad of position_bias": 2e-6, "grad of time_bias": 2e-6}
    compare_with_reference(kernel, reference, arguments, factor=4.0, floor=floor, **options)


# The reference.


def by_hand(q, k, v, seq_offsets, max_seq_len, alpha, targets, window, position_bias, time_bias, timestamps, asked):
    """The formula of the contract, one pair at a time."""
    out = torch.zeros(v.shape, dtype=torch.float64)
    for b in range(len(seq_offsets) - 1):
        begin, end = int(seq_offsets[b]), int(seq_offsets[b + 1])
        history = end - begin - (int(targets[b]) if targets is not None else 0)
        for t in range(end - begin):
            for s in range(t + 1):
                if s >= history and s != t:
                    continue
                distance = min(t, history) - min(s, history)
                if window and distance >= window:
                    continue
                bias = 0.0
                if position_bias is not None:
                    bias += float(position_bias[distance])
                if time_bias is not None:
                    gap = abs(int(asked[begin + t]) - int(timestamps[begin + s]))
                    bias += float(time_bias[min(math.floor(math.log(max(gap, 1)) / 0.301), len(time_bias) - 1)])
                for h in range(q.shape[1]):
                    x = alpha * float(q[begin + t, h].double() @ k[begin + s, h].double()) + bias
                    out[begin + t, h] += x / (1 + math.exp(-x)) * v[begin + s, h].double() / max_seq_len
    return out


@pytest.mark.parametrize(
    ("features", "window"),
    [
        ((), 0),
        (("position",), 3),
        (("targets",), 0),
        (("targets", "position", "time"), 4),
        (("targets", "position", "time", "query_times"), 0),
    ],
)
def test_reference_by_hand(features, window):
    x = inputs((9, 0, 1, 6), 11, d=3, v=5, features=features, window=window)
    names = ("num_targets", "position_bias", "time_bias", "timestamps", "query_timestamps")
    targets, position, time, timestamps, asked = (x.get(name) for name in names)
    expected = by_hand(
        x["q"], x["k"], x["v"], x["seq_offsets"], 11, 0.7, targets, window, position, time, timestamps,
        timestamps if asked is None else asked,
    )  # fmt: skip
    torch.testing.assert_close(attention(**x, alpha=0.7).double(), expected, atol=1e-5, rtol=1e-5)


def test_reference_gradients():
    x = inputs((5, 0, 3), 6, heads=1, d=2, v=2, features=("targets", "position", "time"), dtype=torch.float64)
    names = ["q", "k", "v", "position_bias", "time_bias"]
    leaves = [x.pop(name).double().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(lambda *args: attention(**dict(zip(names, args)), **x), leaves)


# The interface.


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"backend": "cuda"}, ValueError, "backend must be one of auto, triton, reference, got 'cuda'"),
        ({"q": torch.zeros(6, 2)}, ValueError, r"q must be \[T, H, D\], got shape \[6, 2\]"),
        ({"k": torch.zeros(6, 2, 3)}, ValueError, r"k must have q's shape \[6, 2, 4\], got \[6, 2, 3\]"),
        ({"v": torch.zeros(6, 1, 4)}, ValueError, "v must have H=2 heads as q, got 1"),
        ({"v": torch.zeros(5, 2, 4)}, ValueError, "v must have T=6 tokens as q, got 5"),
        ({"v": torch.zeros(6, 2, 4).half()}, TypeError, "v must be floating point and of q's dtype torch.float32"),
        ({"window_size": -1}, ValueError, "window_size must be 0"),
        ({"num_targets": torch.zeros(3).long()}, ValueError, r"num_targets must be \[B=2\], got \[3\]"),
        ({"num_targets": torch.zeros(2)}, TypeError, "num_targets must be int32 or int64, got torch.float32"),
        ({"bias": torch.zeros(8)}, TypeError, "bias must be a RelativeBias, got Tensor"),
        ({"bias": RelativeBias(torch.zeros(7))}, ValueError, r"bias.position must be \[N=8\], got \[7\]"),
        ({"bias": RelativeBias(time=torch.zeros(7))}, ValueError, r"bias.time needs bias.timestamps \[T=6\]"),
        ({"bias": RelativeBias(None, torch.zeros(7), torch.zeros(6))}, TypeError, "bias.timestamps must be int64"),
        (
            {"bias": RelativeBias(None, torch.zeros(7), torch.zeros(5).long())},
            ValueError,
            r"must be \[T=6\], got \[5\]",
        ),
    ],
)
def test_errors(change, error, message):
    tensor = torch.zeros(6, 2, 4)
    arguments = dict(q=tensor, k=tensor, v=tensor, seq_offsets=torch.tensor([0, 2, 6]), max_seq_len=8)
    with pytest.raises(error, match=message):
        hstu_attention(**{**arguments, **change})


@interpreter
def test_kernels_refuse_what_they_cannot_do():
    with pytest.raises(TypeError, match="the kernels take fp16, bf16 and fp32"):
        kernel(**inputs((3,), 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="head sizes up to 256, got V=300"):
        kernel(**inputs((3,), 4, v=300))


def test_triton_on_a_cpu_tensor_needs_the_interpreter(monkeypatch):
    from hstu_sparse import validation

    monkeypatch.setattr(validation, "INTERPRET", False)
    with pytest.raises(ValueError, match="needs CUDA tensors, got cpu"):
        kernel(**inputs((3,), 4))


# The kernels, in the interpreter.


@interpreter
@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_cases(name):
    lengths, n = EDGE_CASES[name]
    check(inputs(lengths, n, features=("targets", "position", "time")))


@interpreter
@pytest.mark.parametrize(
    ("features", "window"),
    [
        ((), 0),
        ((), 20),
        (("targets",), 0),
        (("targets",), 20),
        (("position",), 0),
        (("time",), 0),
        (("targets", "position"), 33),
        (("targets", "position", "time", "query_times"), 0),
    ],
)
def test_features(features, window):
    check(inputs((70, 0, 45), 77, heads=1, features=features, window=window))


@interpreter
@pytest.mark.parametrize(("d", "v"), [(16, 40), (25, 25), (50, 64), (128, 16), (200, 256)])
def test_head_sizes(d, v):
    check(inputs((40, 21), 48, heads=1, d=d, v=v))


@pytest.fixture
def few_near_blocks(monkeypatch):
    """The map holds the buckets of two blocks for each tile, so that the loops of all others are reached."""
    import triton.language as tl

    from hstu_sparse.dense import backward, bias_map, forward, triton

    for module in (backward, bias_map, forward, triton):
        monkeypatch.setattr(module, "NEAR", tl.constexpr(2))


@interpreter
@pytest.mark.parametrize("gap", [1000, 1_000_000])
@pytest.mark.parametrize("features", [("position", "time"), ("targets", "position", "time", "query_times")])
def test_narrow_tiles_of_the_time_bias(few_near_blocks, gap, features):
    """Timestamps even enough that tiles away from the diagonal span few buckets; with large gaps, too long for that."""
    x = inputs((230,), 240, heads=1, features=features)
    x["timestamps"] = 1_400_000_000 + gap * torch.arange(230)
    if "query_times" in features:
        x["query_timestamps"] = x["timestamps"] + 7 * gap
    check(x)


@interpreter
def test_descending_and_equal_timestamps(few_near_blocks):
    x = inputs((90, 40), 90, heads=1, features=("time",))
    x["timestamps"] = torch.cat([torch.arange(90, 0, -1) * 100_000, torch.full((40,), 5)])
    check(x)


@interpreter
@pytest.mark.parametrize("window", [0, 100])
def test_timestamps_in_no_order(few_near_blocks, window):
    """No tile is narrow, and most are far from the diagonal."""
    x = inputs((300,), 300, heads=1, features=("position", "time"), window=window)
    x["timestamps"] = x["timestamps"][torch.randperm(300, generator=torch.Generator().manual_seed(1))]
    check(x)


@interpreter
def test_a_block_too_long_to_count_seconds_in_fp32(few_near_blocks):
    """Few buckets, but keys more than 2^24 seconds apart, and differences to one of them a second around an edge."""
    x = inputs((128,), 128, heads=1, features=("time",))
    late, edge = 2**25 + 1, math.ceil(math.exp(0.301 * 55))
    times = torch.cat(
        [torch.zeros(1).long(), late + torch.arange(31), late + 100 + torch.arange(64), late + edge + torch.arange(32)]
    )
    x["timestamps"] = times
    check(x)


@interpreter
def test_timestamps_far_apart(few_near_blocks):
    """Beyond 2^31 seconds from the first one, where offsets do not fit into 32 bits."""
    x = inputs((140,), 140, heads=1, features=("position", "time"))
    x["timestamps"] = torch.arange(140) ** 5
    check(x)


@interpreter
def test_strided_inputs():
    check(inputs((33, 20), 40, features=("position",), contiguous=False))


@interpreter
def test_int32_offsets_and_alpha():
    x = inputs((33, 20), 40)
    x["seq_offsets"] = x["seq_offsets"].int()
    check({**x, "alpha": 0.9})


def op_arguments(x):
    names = ("q", "k", "v", "seq_offsets", "max_seq_len", "alpha", "num_targets", "window_size", "position_bias")
    x = {"alpha": 0.25, **x}
    tail = [x.get(name) for name in ("time_bias", "timestamps", "query_timestamps")]
    return (*[x.get(name) for name in names], *tail)


@interpreter
@pytest.mark.parametrize("features", [(), ("targets", "position", "time", "query_times")])
def test_opcheck(features):
    import hstu_sparse.dense.triton  # noqa: F401  registers the operators

    x = inputs((12, 0, 5), 13, features=features)
    for name in ("q", "k", "v", "position_bias", "time_bias"):
        if name in x:
            x[name].requires_grad_()
    torch.library.opcheck(torch.ops.hstu_sparse.dense_fwd.default, op_arguments(x))
    detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in op_arguments(x)]
    torch.library.opcheck(torch.ops.hstu_sparse.dense_bwd.default, (torch.randn(17, 2, 16), *detached))


@interpreter
def test_compiles_as_one_graph():
    x = inputs((12, 0, 5), 13, features=("position", "time"))
    x["q"].requires_grad_()
    x["time_bias"].requires_grad_()
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    for function in (kernel, compiled):
        x["q"].grad = x["time_bias"].grad = None
        function(**x).square().sum().backward()
        found = x["q"].grad, x["time_bias"].grad
        if function is kernel:
            expected = found
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("num_buckets", [1, 7, 128, 145])
def test_bucket_cells(num_buckets):
    """The kernels' table gives the reference's bucket, also next to every edge and for the largest differences."""
    from hstu_sparse.dense.bias import CELL_BITS, bucket_cells
    from hstu_sparse.relative_bias import bucket_edges

    edges = torch.tensor([math.ceil(edge) for edge in bucket_edges(num_buckets) if edge < 2**62])
    spread = torch.cat(
        [edges - 1, edges, edges + 1, torch.arange(5000), 2 ** torch.arange(62), torch.tensor([2**63 - 1])]
    )
    x = spread.float()
    edge, below = bucket_cells(num_buckets)[(x.clamp(min=1).view(torch.int32) >> 23 - CELL_BITS) - (127 << CELL_BITS)].T
    found = below + (x >= edge.contiguous().view(torch.float32))
    assert torch.equal(found, time_bucket(spread, num_buckets))
