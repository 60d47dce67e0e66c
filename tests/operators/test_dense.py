"""Dense HSTU attention on the CPU: the reference by hand, the interface, the kernels in Triton's interpreter."""

import functools
import math

import pytest
import torch

from hstu_sparse import RelativeBias, attention_plan, hstu_attention
from hstu_sparse.bias.relative import time_bucket
from hstu_sparse.core.mask import Mask
from tests.random.cases.dense import compare, inputs, with_tables
from tests.support.budgets import EDGE_CASES

interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

reference, kernel = (with_tables(functools.partial(hstu_attention, backend=b)) for b in ("reference", "triton"))


# The reference.


def by_hand(
    q, k, v, seq_offsets, max_seq_len, scale, targets, window, position_bias, time_bias, timestamps, query_times
):
    """Compute the formula of the contract, one pair at a time."""
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
                    gap = abs(int(query_times[begin + t]) - int(timestamps[begin + s]))
                    bias += float(time_bias[min(math.floor(math.log(max(gap, 1)) / 0.301), len(time_bias) - 1)])
                for h in range(q.shape[1]):
                    x = scale * float(q[begin + t, h].double() @ k[begin + s, h].double()) + bias
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
    names = ("num_targets", "position", "time", "timestamps", "query_timestamps")
    targets, position, time, timestamps, query_times = (x.get(name) for name in names)
    expected = by_hand(
        x["q"], x["k"], x["v"], x["seq_offsets"], 11, 0.7, targets, window, position, time, timestamps,
        timestamps if query_times is None else query_times,
    )  # fmt: skip
    torch.testing.assert_close(reference(**x, scale=0.7).double(), expected, atol=1e-5, rtol=1e-5)


def test_reference_gradients():
    x = inputs((5, 0, 3), 6, heads=1, d=2, v=2, features=("targets", "position", "time"), dtype=torch.float64)
    names = ["q", "k", "v", "position", "time"]
    leaves = [x.pop(name).double().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(lambda *args: reference(**dict(zip(names, args)), **x), leaves)


# The interface.


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"backend": "cuda"}, ValueError, "backend must be one of auto, triton, reference, hopper, got 'cuda'"),
        ({"q": torch.zeros(6, 2)}, ValueError, r"q must be \[T, H, D\], got shape \[6, 2\]"),
        ({"k": torch.zeros(6, 2, 3)}, ValueError, r"k must be \[T=6, H=2, D=4\], got shape \[6, 2, 3\]"),
        ({"v": torch.zeros(6, 1, 4)}, ValueError, r"v must be \[T=6, H=2, V\], got shape \[6, 1, 4\]"),
        ({"v": torch.zeros(5, 2, 4)}, ValueError, r"v must be \[T=6, H=2, V\], got shape \[5, 2, 4\]"),
        ({"v": torch.zeros(6, 2, 4).half()}, TypeError, "v must be torch.float32, got torch.float16"),
        ({"window_size": -1}, ValueError, "window_size must be at least 0, got -1"),
        ({"num_targets": torch.zeros(3).long()}, ValueError, r"num_targets must be \[B=2\], got shape \[3\]"),
        ({"num_targets": torch.zeros(2)}, TypeError, "num_targets must be int32 or int64, got torch.float32"),
        ({"bias": torch.zeros(8)}, TypeError, "bias must be a RelativeBias, got Tensor"),
        ({"bias": RelativeBias(torch.zeros(7))}, ValueError, r"bias.position must be \[at least 8\], got \[7\]"),
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
    with pytest.raises(ValueError, match="the kernels take V from 1 to 256, got V=300"):
        kernel(**inputs((3,), 4, v=300))


# The kernels, in the interpreter.


# Shapes that cases below have too.
LONGER = ("lengths that divide nothing", "one sequence only")


@interpreter
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONGER else []) for name in EDGE_CASES]
)
def test_edge_cases(name):
    lengths, n = EDGE_CASES[name]
    heads = 2 if name == "an empty sequence in the middle" else 1
    compare(inputs(lengths, n, heads=heads, features=("targets", "position", "time")))


@interpreter
@pytest.mark.parametrize(
    ("features", "window"),
    [
        ((), 0),
        pytest.param((), 20, marks=pytest.mark.slow),
        pytest.param(("targets",), 0, marks=pytest.mark.slow),
        (("targets",), 20),
        pytest.param(("position",), 0, marks=pytest.mark.slow),
        pytest.param(("time",), 0, marks=pytest.mark.slow),
        pytest.param(("targets", "position"), 33, marks=pytest.mark.slow),
        (("targets", "position", "time", "query_times"), 0),
    ],
)
def test_features(features, window):
    compare(inputs((70, 0, 20), 77, heads=1, features=features, window=window))


@interpreter
@pytest.mark.parametrize(
    ("d", "v"),
    [
        (16, 40),
        (25, 25),
        (200, 256),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((50, 64), (128, 16))),
    ],
)
def test_head_sizes(d, v):
    compare(inputs((40, 21), 48, heads=1, d=d, v=v))


@pytest.fixture
def few_near_blocks(monkeypatch):
    """Map the buckets of only two blocks for each tile, so that the loops over all other blocks run."""
    import triton.language as tl

    from hstu_sparse.dense import kernels, plan

    for module in (kernels, plan):
        monkeypatch.setattr(module, "NEAR", tl.constexpr(2))


@interpreter
@pytest.mark.parametrize(
    ("features", "gap"),
    [
        (("targets", "position", "time", "query_times"), 1000),
        pytest.param(("position", "time"), 1_000_000, marks=pytest.mark.slow),
        pytest.param(("targets", "position", "time", "query_times"), 1_000_000, marks=pytest.mark.slow),
        pytest.param(("position", "time"), 1000, marks=pytest.mark.slow),
    ],
)
def test_narrow_tiles_of_the_time_bias(few_near_blocks, gap, features):
    """Evenly spaced times: tiles away from the diagonal span few buckets, but with large gaps too many seconds."""
    x = inputs((130,), 140, heads=1, features=features)
    x["timestamps"] = 1_400_000_000 + gap * torch.arange(130)
    if "query_times" in features:
        x["query_timestamps"] = x["timestamps"] + 7 * gap
    compare(x)


@interpreter
def test_descending_and_equal_timestamps(few_near_blocks):
    x = inputs((70, 20), 70, heads=1, features=("time",))
    x["timestamps"] = torch.cat([torch.arange(70, 0, -1) * 100_000, torch.full((20,), 5)])
    compare(x)


@interpreter
@pytest.mark.parametrize("window", [0, pytest.param(60, marks=pytest.mark.slow)])
def test_timestamps_in_no_order(few_near_blocks, window):
    """No tile is narrow, and most are far from the diagonal."""
    x = inputs((70,), 70, heads=1, features=("position", "time"), window=window)
    x["timestamps"] = x["timestamps"][torch.randperm(70, generator=torch.Generator().manual_seed(1))]
    compare(x)


@interpreter
def test_a_block_too_long_to_count_seconds_in_fp32(few_near_blocks):
    """Test few buckets with keys more than 2^24 seconds apart, some a second from the edge of a bucket."""
    x = inputs((128,), 128, heads=1, features=("time",))
    late, edge = 2**25 + 1, math.ceil(math.exp(0.301 * 55))
    times = torch.cat(
        [torch.zeros(1).long(), late + torch.arange(31), late + 100 + torch.arange(64), late + edge + torch.arange(32)]
    )
    x["timestamps"] = times
    compare(x)


@interpreter
def test_timestamps_far_apart(few_near_blocks):
    """Beyond 2^31 seconds from the first one, where offsets do not fit into 32 bits."""
    x = inputs((70,), 70, heads=1, features=("position", "time"))
    x["timestamps"] = torch.arange(70) ** 6
    compare(x)


@interpreter
def test_strided_inputs_int32_offsets_and_alpha():
    x = inputs((33, 20), 40, features=("position",), contiguous=False)
    x["seq_offsets"] = x["seq_offsets"].int()
    compare({**x, "scale": 0.9})


@interpreter
def test_dk_and_dv_by_a_launch_each():
    """Test that a launch for each, as wide heads have on sm_90, gives the same bits as one for both."""
    from hstu_sparse.core.launch import override
    from hstu_sparse.dense.configs import bwd_dkv_config

    x = inputs((70,), 70, heads=1, d=64, v=32, features=("targets", "position", "time"))
    leaves = [x[name].requires_grad_() for name in "kv"]

    def backward(warps):
        with override(bwd_dkv_config, lambda config, *_: config.replace(BLOCK_N=64, num_warps=warps)):
            return torch.autograd.grad(kernel(**x).square().sum(), leaves)

    assert all(torch.equal(one, other) for one, other in zip(backward(1), backward(4), strict=True))


@interpreter
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d": 64, "v": 64}, r"takes fp16 or bf16 heads, .* got torch.float32, D = 64, V = 64"),
        ({"d": 50, "v": 50, "dtype": torch.float16}, r"got torch.float16, D = 50, V = 50"),
        ({"d": 64, "v": 128, "dtype": torch.float16}, r"got torch.float16, D = 64, V = 128"),
        ({"d": 64, "v": 64, "features": ("position",)}, "^backend='hopper' takes no bias: use backend='triton'$"),
        ({"d": 64, "v": 64, "dtype": torch.float16}, r"needs sm_90 and Triton 3.6 or 3.7, got cpu"),
    ],
)
def test_hopper_refuses_what_it_cannot(options, message):
    x = inputs((12, 5), 13, **options)
    with pytest.raises(ValueError, match=message):
        with_tables(functools.partial(hstu_attention, backend="hopper"))(**x)


def heads_of(tokens, d, v, dtype):
    return (torch.empty(tokens, 1, size, dtype=dtype, device="meta") for size in (d, v))


@pytest.mark.parametrize(
    ("tokens", "d", "v", "dtype", "biased", "expected"),
    [
        (3 * 1024, 64, 64, torch.bfloat16, False, True),
        (3 * 1024, 128, 128, torch.float16, False, True),
        (3 * 1024, 256, 256, torch.bfloat16, False, True),
        (3 * 1024 - 1, 128, 128, torch.bfloat16, False, False),
        (3 * 1024, 64, 64, torch.float32, False, False),
        (3 * 1024, 64, 128, torch.bfloat16, False, False),
        (3 * 1024, 96, 96, torch.bfloat16, False, False),
        (3 * 1024, 64, 64, torch.bfloat16, True, False),
    ],
)
def test_which_calls_auto_gives_to_hopper(tokens, d, v, dtype, biased, expected, monkeypatch):
    """Test three sequences on a GPU with sm_90, on another GPU, and with another version of Triton."""
    from hstu_sparse.dense import configs

    monkeypatch.setattr(configs, "proven", lambda device: True)
    monkeypatch.setattr(configs, "architecture", lambda device: 90)
    assert configs.prefers_hopper(*heads_of(tokens, d, v, dtype), biased, 3) == expected
    monkeypatch.setattr(configs, "architecture", lambda device: 100)
    assert not configs.prefers_hopper(*heads_of(tokens, d, v, dtype), biased, 3)
    monkeypatch.setattr(configs, "architecture", lambda device: 90)
    monkeypatch.setattr(configs, "proven", lambda device: False)
    assert not configs.prefers_hopper(*heads_of(tokens, d, v, dtype), biased, 3)


def op_arguments(x):
    """Arguments of the registered operator for keyword arguments of `kernel`."""
    from hstu_sparse.dense.launch import dense_operator  # noqa: F401  registers it

    bias = RelativeBias(*(x.get(name) for name in ("position", "time", "timestamps", "query_timestamps")))
    rest = dict(num_targets=x.get("num_targets"), window_size=x["window_size"])
    plan = attention_plan(x["q"], x["v"], x["seq_offsets"], x["max_seq_len"], bias=bias, backend="triton", **rest)
    return (
        *(x[name] for name in ("q", "k", "v", "seq_offsets")), *Mask(rest["num_targets"], None, rest["window_size"]),
        *bias, plan.flat(), x["max_seq_len"], 0.25, 13.0, None,
    )  # fmt: skip


@interpreter
@pytest.mark.parametrize(
    "features", [pytest.param((), marks=pytest.mark.slow), ("targets", "position", "time", "query_times")]
)
def test_opcheck(features):
    x = inputs((3,), 4, heads=1, features=features)
    for name in ("q", "k", "v", "position", "time"):
        if name in x:
            x[name].requires_grad_()
    arguments = op_arguments(x)
    torch.library.opcheck(torch.ops.hstu_sparse.dense_fwd.default, arguments)
    detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
    _, tables = torch.ops.hstu_sparse.dense_fwd(*detached)
    torch.library.opcheck(torch.ops.hstu_sparse.dense_bwd.default, (torch.randn(3, 1, 16), *detached, tables))


@interpreter
def test_opcheck_of_what_a_plan_is_made_by():
    from hstu_sparse.dense import plan  # noqa: F401  registers the operators

    x = inputs((12, 0, 5), 13, features=("targets", "time", "query_times"))
    arguments = (
        x["seq_offsets"],
        *Mask(x["num_targets"], None, 4),
        x["timestamps"],
        x["query_timestamps"],
        17,
        13,
        128,
        32,
        16,
        True,
    )
    # What the kernels do not read of a map is not written, so two runs differ there.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.hstu_sparse.dense_tile_map.default, arguments, test_utils=tests)
    torch.library.opcheck(
        torch.ops.hstu_sparse.split_times.default, (x["seq_offsets"], x["query_timestamps"], x["timestamps"])
    )


@interpreter
def test_compiles_as_one_graph():
    x = inputs((5,), 6, heads=1, features=("position", "time"))
    x["q"].requires_grad_()
    x["time"].requires_grad_()
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    for function in (kernel, compiled):
        x["q"].grad = x["time"].grad = None
        function(**x).square().sum().backward()
        actual = x["q"].grad, x["time"].grad
        if function is kernel:
            expected = actual
    torch.testing.assert_close(actual, expected)


@interpreter
@pytest.mark.parametrize("table", [pytest.param("position", marks=pytest.mark.slow), "time"])
def test_a_zeroed_entry_of_a_tables_gradient_is_seen(table, monkeypatch):
    from hstu_sparse.dense import launch
    from tests.random.cases import dense

    backward = launch._Launch.backward

    def zeroed(self, *arguments):
        gradients = backward(self, *arguments)
        gradients[3 if table == "position" else 4][12] = 0
        return gradients

    x = inputs((30,), 30, heads=1, features=("position", "time"))
    x["timestamps"] = 20 * torch.arange(30)
    monkeypatch.setattr(launch._Launch, "backward", zeroed)
    monkeypatch.setattr(dense, "assert_within_budget", lambda *_, **__: None)
    with pytest.raises(AssertionError, match=rf"grad of {table}\[12\]"):
        compare(x)


# One plan for several calls.


def two_layers(q, k, v, seq_offsets, max_seq_len, shared, **options):
    """Call the operator twice on one batch, the second time on the first output, with a plan each or a shared one."""
    bias = [RelativeBias(options.pop(f"position_{i}"), options.pop(f"time_{i}"), *options["times"]) for i in (0, 1)]
    del options["times"]
    plan = None
    if shared:
        plan = attention_plan(q, v, seq_offsets, max_seq_len, bias=bias[0], backend="triton", **options)
    layer = functools.partial(hstu_attention, plan=plan, backend="triton", **options)
    x = layer(q, k, v, seq_offsets, max_seq_len, bias=bias[0])
    return layer(x, k, v, seq_offsets, max_seq_len, bias=bias[1])


@interpreter
@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.slow), "compiled"])
def test_a_shared_plan_gives_the_same_bits(mode):
    x = inputs((12, 5), 16, heads=1, features=("targets", "position", "time", "query_times"))
    leaves = {name: x[name].requires_grad_() for name in ("q", "k", "v")}
    generator = torch.Generator().manual_seed(3)
    for i in (0, 1):
        leaves[f"position_{i}"] = torch.randn(16, generator=generator, requires_grad=True)
        leaves[f"time_{i}"] = torch.randn(129, generator=generator, requires_grad=True)
    options = dict(num_targets=x["num_targets"], times=(x["timestamps"], x["query_timestamps"]), window_size=9)
    results = []
    for shared in (False, True):
        function = functools.partial(two_layers, shared=shared)
        if shared and mode == "compiled":
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        out = function(seq_offsets=x["seq_offsets"], max_seq_len=16, **leaves, **options)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))))
    for apart, together in zip(*results):
        assert torch.equal(apart, together)


@interpreter
def test_layers_that_share_a_plan_launch_it_once(monkeypatch):
    from hstu_sparse.dense import plan

    kernel, launches = plan.dense_attention_plan_kernel, []

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(plan, "dense_attention_plan_kernel", Counted())
    x = inputs((5, 3), 8, heads=1, features=("time",))
    arguments = [x[name] for name in ("seq_offsets", "max_seq_len")]
    bias = RelativeBias(time=x["time"], timestamps=x["timestamps"])
    shared_plan = attention_plan(x["q"], x["v"], *arguments, bias=bias, backend="triton")
    once = len(launches)
    q = x["q"].requires_grad_()
    for _ in range(2):
        q = hstu_attention(q, x["k"], x["v"], *arguments, bias=bias, plan=shared_plan, backend="triton")
    q.sum().backward()
    assert 1 <= once == len(launches)


@interpreter
def test_a_plan_that_does_not_fit_is_refused():
    x = inputs((37, 21), 40, features=("time",))
    arguments = [x[name] for name in ("seq_offsets", "max_seq_len")]
    bias = RelativeBias(time=x["time"], timestamps=x["timestamps"])
    shared_plan = attention_plan(x["q"], x["v"], *arguments, backend="triton")
    assert attention_plan(x["q"], x["v"], *arguments, backend="reference") is None
    with pytest.raises(ValueError, match=r"plan was made for .*num_buckets=None.* needs a plan for .*num_buckets=128"):
        hstu_attention(x["q"], x["k"], x["v"], *arguments, bias=bias, plan=shared_plan, backend="triton")


@interpreter
def test_strided_metadata():
    x = inputs((33, 20, 7), 40, heads=1, features=("targets", "position", "time", "query_times"))
    expected = reference(**x)
    for name in ("seq_offsets", "num_targets", "timestamps", "query_timestamps"):
        wide = torch.full((2 * x[name].shape[0],), 10**6, dtype=x[name].dtype)
        wide[::2] = x[name]
        x[name] = wide[::2]
        assert not x[name].is_contiguous()
    torch.testing.assert_close(kernel(**x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_buckets", [1, 7, 128, 145])
def test_bucket_cells(num_buckets):
    """The kernels' table gives the reference's bucket, also next to every edge and for the largest differences."""
    from hstu_sparse.bias.buckets import CELL_BITS, bucket_cells
    from hstu_sparse.bias.relative import bucket_edges

    edges = torch.tensor([math.ceil(edge) for edge in bucket_edges(num_buckets) if edge < 2**62])
    spread = torch.cat(
        [edges - 1, edges, edges + 1, torch.arange(5000), 2 ** torch.arange(62), torch.tensor([2**63 - 1])]
    )
    x = spread.float()
    edge, below = bucket_cells(num_buckets)[(x.clamp(min=1).view(torch.int32) >> 23 - CELL_BITS) - (127 << CELL_BITS)].T
    buckets = below + (x >= edge.contiguous().view(torch.float32))
    assert torch.equal(buckets, time_bucket(spread, num_buckets))
