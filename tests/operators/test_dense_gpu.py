"""Dense HSTU attention on a GPU: all features and dtypes, no retuning, one graph."""

import functools

import pytest
import torch
import triton

from hstu_sparse import RelativeBias, attention_plan, hstu_attention
from hstu_sparse.core.mask import Mask
from tests.random.cases.dense import compare, with_tables
from tests.random.cases.dense import inputs as dense_inputs
from tests.support.budgets import EDGE_CASES, gradients, make_jagged

pytestmark = pytest.mark.gpu

reference, kernel = (with_tables(functools.partial(hstu_attention, backend=b)) for b in ("reference", "triton"))
hopper = functools.partial(hstu_attention, backend="hopper")
ALL = ("targets", "position", "time", "query_times")


def inputs(lengths, n, **options):
    return dense_inputs(lengths, n, **{"dtype": torch.bfloat16, "d": 64, "v": 64, "device": "cuda"} | options)


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_cases(name, dtype):
    lengths, n = EDGE_CASES[name]
    compare(inputs(lengths, n, features=ALL, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [(), ("targets",), ("position",), ("time",), ALL])
@pytest.mark.parametrize("window", [0, 100])
def test_features(features, window, dtype):
    compare(inputs((300, 0, 701, 1, 217), 1024, features=features, window=window, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(
    "features",
    [
        ("context",),
        ("context", "all", "prefix", "position"),
        ("targets", "groups", "position"),
        ("context", "all", "groups", "prefix", *ALL),
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_options_of_the_mask(features, window, many, dtype):
    """Test few and many context tokens and candidates, and sequences longer than the near blocks of the time bias."""
    x = inputs((300, 0, 701, 1, 1500), 1600, features=features, window=window, dtype=dtype)
    lengths = x["seq_offsets"].diff()
    if many and "targets" in features:
        x["num_targets"], x["target_group_size"] = lengths // 3, 70
    if many and "context" in features:
        x["num_context"] = lengths // 2
    compare(x)
    without_tables = {name: value for name, value in x.items() if name not in ("position", "time")}
    outs = [kernel(**without_tables) for _ in range(2)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "v"), [(16, 16), (25, 25), (50, 50), (32, 96), (128, 128), (40, 256), (256, 200)])
def test_head_sizes(d, v, dtype):
    compare(inputs((190, 67), 200, d=d, v=v, features=("position", "time"), dtype=dtype))


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("features", [("position",), ("time",), ALL, ("context", "all", "groups", "prefix", *ALL)])
def test_heads_of_256_with_biases(features, window):
    """Their sums of dk and dv do not fit into the registers of one program."""
    x = inputs((300, 0, 701, 1, 217), 1024, d=256, v=256, features=features, window=window)
    compare(x)
    leaves = [x[name].requires_grad_() for name in "qkv"]
    first, second = (torch.autograd.grad(kernel(**x).float().square().sum(), leaves) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("window", [0, 1, 200])
@pytest.mark.parametrize("features", [(), ("targets",)])
def test_hopper(features, window, d, dtype):
    """Test lengths around the sizes of tiles and blocks, and a batch that gives programs several tiles each."""
    for lengths in ((128, 1, 0, 64, 129, 127, 256, 63, 65, 700, 192, 2000), [37 * i % 200 for i in range(300)]):
        x = inputs(lengths, 2000, d=d, v=d, features=features, window=window, dtype=dtype, heads=4)
        compare(x, function=hopper)


@on_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
def test_hopper_with_many_candidates(d):
    x = inputs((500, 300, 7, 400), 500, d=d, v=d, features=("targets",), heads=4)
    x["num_targets"] = torch.tensor([400, 1, 7, 200], device="cuda")
    compare(x, function=hopper)


@on_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
def test_hopper_gives_the_same_bits(d):
    x = inputs([37 * i % 600 for i in range(400)], 600, d=d, v=d, heads=4)
    expected = hopper(**x)
    for _ in range(5):
        assert torch.equal(hopper(**x), expected)
    heads_first = {name: x[name].transpose(0, 1).contiguous().transpose(0, 1) for name in "qkv"}
    assert torch.equal(hopper(**{**x, **heads_first}), expected)
    assert torch.equal(torch.compile(hopper, fullgraph=True)(**x), expected)


@on_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
def test_hopper_gives_the_same_gradients(d):
    x = inputs([37 * i % 600 for i in range(400)], 600, d=d, v=d, heads=4)
    leaves = [x[name].requires_grad_() for name in "qkv"]
    passes = [torch.autograd.grad(hopper(**x).float().square().sum(), leaves) for _ in range(4)]
    for again in passes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(passes[0], again))


@on_hopper
@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("name", ["q", "k", "v", "grad"])
def test_hopper_keeps_sequences_apart(name, d):
    """Infinities in one sequence do not reach its neighbours' output and gradients."""
    lengths = (200, 77, 100)
    x = inputs(lengths, 200, d=d, v=d, heads=4)
    grad = make_jagged(lengths, (4, d), seed=4, dtype=torch.bfloat16, device="cuda")

    def call():
        leaves = {n: x[n].detach().clone().requires_grad_() for n in "qkv"}
        out = hopper(**{**x, **leaves})
        return out.detach(), *torch.autograd.grad(out, leaves.values(), grad)

    before = call()
    (grad if name == "grad" else x[name])[200:277] = float("inf")
    after = call()
    if name != "grad":
        assert not after[0][276].isfinite().all()
    assert not after[1][276].isfinite().all()
    for result, old, new in zip(("output", "dq", "dk", "dv"), before, after, strict=True):
        off = old != new
        off[200:277] = False
        first = off.nonzero()[:1].flatten().tolist()
        assert not first, (
            f"{result}: {int(off.sum())} numbers of rows {off.any(2).any(1).nonzero().flatten().tolist()} changed, "
            f"the first, {first}, from {old[*first]} to {new[*first]}"
        )


@on_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
def test_auto_takes_hopper_for_long_sequences(d, monkeypatch):
    """Test both passes in eager mode, compiled and in a CUDA graph. Short sequences do not use these kernels."""
    from hstu_sparse.dense import configs

    x = inputs((2000, 48, 1024), 2000, d=d, v=d, heads=4)
    leaves = [x[name].requires_grad_() for name in "qkv"]

    def passes(function, x=x, leaves=leaves):
        out = function(**x)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    def same(one, other):
        return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]

    expected, by_triton = passes(hopper), passes(functools.partial(hstu_attention, backend="triton"))
    assert not any(same(expected, by_triton)[:2])
    assert all(same(passes(hstu_attention), expected))
    assert all(same(passes(torch.compile(hstu_attention, fullgraph=True)), expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = passes(hstu_attention)
    for _ in range(2):
        graph.replay()
        assert all(same(captured, expected))
    monkeypatch.setattr(configs, "HOPPER_MIN_LENGTH", 1025)
    assert all(same(passes(hstu_attention), by_triton))


@pytest.mark.parametrize("features", [("position", "time"), ALL])
@pytest.mark.parametrize("window", [0, 900])
def test_long_sequence_with_narrow_tiles(features, window):
    compare(inputs((3000, 500), 3000, d=128, v=128, features=features, window=window))


@pytest.mark.parametrize("features", [("position", "time"), ALL])
def test_timestamps_in_no_order(features):
    """No tile is narrow, and most are far from the diagonal."""
    x = inputs((900, 333), 1000, features=features)
    x["timestamps"] = x["timestamps"][torch.randperm(1233, generator=torch.Generator().manual_seed(1)).cuda()]
    compare(x)


def test_strided_inputs():
    compare(inputs((190, 67), 200, features=("position",), contiguous=False))


def test_time_buckets_at_their_edges():
    """Every integer next to an edge: one-hot tables read the bucket off the output."""
    import math

    edges = [math.ceil(math.exp(0.301 * k)) for k in range(1, 50)]
    gaps = sorted({max(1, e + i) for e in edges for i in (-2, -1, 0, 1)})
    for gap in gaps:
        if gap >= 2**24:
            continue
        x = inputs((2,), 2, heads=1, d=16, v=16, dtype=torch.float32)
        x["time"] = torch.arange(129.0).cuda()
        x["timestamps"] = torch.tensor([0, gap]).cuda()
        torch.testing.assert_close(kernel(**x), reference(**x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_deterministic(dtype):
    x = inputs((900, 333), 1000, features=ALL, dtype=dtype)
    leaves = [x[name].requires_grad_() for name in ("position", "time", "q", "k", "v")]
    gradients = []
    for _ in range(3):
        gradients.append(torch.autograd.grad(kernel(**x).float().square().sum(), leaves))
    for again in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], again))


def test_a_gradient_that_is_not_a_number_shows():
    x = inputs((100, 37), 128, features=("position", "time"))
    leaves = [x[name].requires_grad_() for name in ("position", "time", "q")]
    out = kernel(**x)
    grad = torch.ones_like(out)
    grad[50] = float("nan")
    for gradient in torch.autograd.grad(out, leaves, grad):
        assert gradient.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_the_tables_keep_their_digits_where_those_of_scores_vanish(dtype):
    """The scores' gradients, 1e-8, are zero in fp16."""
    x = inputs((100, 37), 128, features=("position", "time"), dtype=dtype)
    x["v"] *= 0.01
    grad = torch.full_like(x["v"], 1e-6)
    wide = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in x.items()}
    actual, expected = gradients(kernel, x, grad), gradients(reference, wide, grad.double())
    for name in ("grad of position", "grad of time"):
        exact = expected[name]
        torch.testing.assert_close(actual[name].double(), exact, rtol=0.1, atol=0.02 * exact.abs().max().item())


def test_batches_of_other_lengths_compile_nothing_new():
    from hstu_sparse.bias import buckets, scores
    from hstu_sparse.dense import kernels as attention
    from hstu_sparse.dense import launch, plan

    modules = (attention, launch, plan, buckets, scores)
    kernels = {f for module in modules for n, f in vars(module).items() if n.endswith("_kernel")}
    assert len(kernels) == 8

    def run(lengths):
        x = inputs(lengths, 512, features=("position", "time"))
        x["q"].requires_grad_()
        kernel(**x).float().sum().backward()

    def compiled():
        return {k.__name__: sum(len(c[0]) for c in k.device_caches.values()) for k in kernels}

    run((100, 37, 512))
    before = compiled()
    for lengths in ((1, 16, 32, 400), (511,), (64, 0, 128), (17,) * 33):
        run(lengths)
    assert compiled() == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_paths(dtype, monkeypatch):
    """Test the kernels and settings of GPUs on which the inline assembly was not tested."""
    from hstu_sparse.dense import launch, plan

    for module in (launch, plan):
        monkeypatch.setattr(module, "proven", lambda device: False)
    monkeypatch.setattr(plan, "architecture", lambda device: 120)
    compare(inputs((300, 0, 701, 1), 800, features=ALL, dtype=dtype))
    compare(inputs((300, 701), 800, d=25, v=128, features=("position", "time"), dtype=dtype, window=100))
    compare(inputs((190, 67), 200, d=256, v=200, dtype=dtype))


def test_the_gate_opens_here():
    """Check that the inline assembly is used, unless this version of Triton is not a tested one."""
    from hstu_sparse.tiles import assembly

    known = torch.cuda.get_device_capability() in ((8, 0), (9, 0))
    version = ".".join(triton.__version__.split(".")[:2])
    assert assembly.proven(torch.device("cuda")) == (known and version in assembly.PROVEN_TRITON)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_far_apart_in_size(dtype):
    """Rows of do and v have very different sizes, and the greatest of their products scales the exact sums.

    The integers have a resolution of 2^-21 of the greatest possible term, so entries that sum only small rows are lost.
    """
    x = inputs((300, 217), 400, features=("position", "time"), dtype=dtype)
    x["v"] = x["v"] * torch.logspace(-3, 2, 517, device="cuda")[:, None, None].to(x["v"])
    compare(x, entries=False)


@pytest.mark.parametrize("name", ["seq_offsets", "num_targets", "timestamps", "query_timestamps"])
def test_strided_metadata(name):
    x = inputs((133, 20, 70), 150, features=ALL)
    expected = kernel(**x)
    wide = torch.full((2 * x[name].shape[0],), 10**6, dtype=x[name].dtype, device="cuda")
    wide[::2] = x[name]
    assert torch.equal(kernel(**{**x, name: wide[::2]}), expected)


def gradients_with(x, leaves, plan=None):
    bias = RelativeBias(*(x[name] for name in ("position", "time", "timestamps", "query_timestamps")))
    rest = {n: t for n, t in x.items() if n not in ("position", "time", "timestamps", "query_timestamps")}
    out = hstu_attention(**rest, bias=bias, plan=plan)
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def test_a_shared_plan_under_a_cuda_graph():
    """The plan is made in the captured step, by whatever the batch then holds."""
    batches = [inputs((300, 217), 320, features=ALL), inputs((201, 316), 320, features=ALL)]
    batches[1]["timestamps"] += 10**6 * torch.arange(517).cuda()
    static = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in batches[0].items()}
    leaves = [static[name].requires_grad_() for name in ("q", "k", "v", "position", "time")]

    def step():
        bias = RelativeBias(*(static[name] for name in ("position", "time", "timestamps", "query_timestamps")))
        plan = attention_plan(
            static["q"], static["v"], static["seq_offsets"], 320, num_targets=static["num_targets"], bias=bias
        )
        return gradients_with(static, leaves, plan)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            actual = step()
    for batch in (*batches, batches[0]):
        with torch.no_grad():
            for name, t in static.items():
                if isinstance(t, torch.Tensor):
                    t.copy_(batch[name])
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        fresh = [batch[name].detach().requires_grad_() for name in ("q", "k", "v", "position", "time")]
        expected = gradients_with({**batch, **dict(zip(("q", "k", "v", "position", "time"), fresh))}, fresh)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected))


@pytest.mark.multigpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_on_a_gpu_that_is_not_current(dtype):
    x = {n: t.to("cuda:1") if isinstance(t, torch.Tensor) else t for n, t in inputs((300, 217), 320, d=128, v=128,
         features=ALL, dtype=dtype).items()}  # fmt: skip
    assert torch.cuda.current_device() == 0
    compare(x)
    assert torch.cuda.current_device() == 0


def test_compiles_as_one_graph():
    x = inputs((120, 0, 57), 130, features=("position", "time"))
    x["q"].requires_grad_()
    expected = kernel(**x)
    (gradient,) = torch.autograd.grad(expected.float().square().sum(), x["q"])
    actual = torch.compile(kernel, fullgraph=True)(**x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual.float().square().sum(), x["q"])[0], gradient)


def test_opcheck():
    from hstu_sparse.dense.launch import dense_operator  # noqa: F401  registers the operators

    x = inputs((12, 0, 5), 13, features=ALL)
    bias = RelativeBias(*(x[name] for name in ("position", "time", "timestamps", "query_timestamps")))
    plan = attention_plan(x["q"], x["v"], x["seq_offsets"], 13, num_targets=x["num_targets"], bias=bias)
    for name in ("q", "k", "v", "position", "time"):
        x[name].requires_grad_()
    names = ("q", "k", "v", "seq_offsets")
    torch.library.opcheck(
        torch.ops.hstu_sparse.dense_fwd.default,
        (*(x[name] for name in names), *Mask(x["num_targets"]), *bias, plan.flat(), 13, 0.25, 13.0, None),
        # Compares gradients of two runs, and the time bias's depends on the order of additions.
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
