"""The catalogue loss on a GPU: every dtype against the reference, memory, 64-bit addresses, compilation, determinism.

Letters: T tokens, I items, E embedding size, K negatives.
"""

import pytest
import torch
from torch.nn import functional as F

from hstu_sparse import catalogue_loss
from hstu_sparse.catalogue import BLOCK
from tests.random.cases.catalogue_loss import check

pytestmark = pytest.mark.gpu

CASE = dict(
    tokens=1500, items=5000, size=256, sampled="no", num_negatives=50, corrected=False, normalize=True,
    temperature=0.05, learned=True, smoothing=0.0, ignored=0.2, ids="int64", strided=False, weighted=False,
    reduction="mean", seed=0,
)  # fmt: skip
CASES = {
    "whole catalogue": {},
    "no split": {"tokens": 40_000, "items": 700},
    "E = 512, smoothing": {"size": 512, "smoothing": 0.1},
    "E = 50, no normalisation": {"size": 50, "normalize": False, "temperature": 10.0},
    "E = 16": {"size": 16, "temperature": 0.3},
    "E = 96": {"size": 96},
    "E = 128, few tokens": {"size": 128, "tokens": 100, "items": 20_000},
    "E = 320, rows apart": {"size": 320, "strided": True},
    "negatives of the batch": {"sampled": "shared", "num_negatives": 777, "corrected": True},
    "negatives of the batch, E = 64": {"sampled": "shared", "size": 64, "normalize": False, "temperature": 10.0},
    "negatives of blocks": {"sampled": "blocks", "corrected": True},
    "negatives of blocks, E = 64": {"sampled": "blocks", "size": 64, "normalize": False, "temperature": 10.0},
    "negatives of blocks, weights": {"sampled": "blocks", "weighted": True, "num_negatives": 128},
    "negatives of each token": {"sampled": "per token", "corrected": True},
    "negatives of each token, E = 50": {"sampled": "per token", "size": 50, "items": 40},
    "negatives of each token, several chunks": {
        "sampled": "per token",
        "tokens": 3000,
        "size": 64,
        "items": 1500,
        "num_negatives": 100,
        "temperature": 0.3,
    },
    "rows gathered": {"sampled": "per token", "items": 20_000, "corrected": True},
    "rows gathered, E = 50": {
        "sampled": "per token",
        "size": 50,
        "items": 5000,
        "normalize": False,
        "temperature": 10.0,
    },
    "each target's loss": {"reduction": "none"},
    "weights, no split, smoothing": {"weighted": True, "tokens": 40_000, "items": 700, "smoothing": 0.1},
    "weights, no normalisation": {"weighted": True, "size": 50, "normalize": False, "temperature": 10.0},
    "weights, negatives of the batch": {"weighted": True, "sampled": "shared", "corrected": True},
    "weights, negatives of each token": {"weighted": True, "sampled": "per token", "corrected": True},
    "weights, rows gathered": {"weighted": True, "sampled": "per token", "items": 20_000},
    "all ignored": {"ignored": 1.0},
    "no token": {"tokens": 0},
}


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name, dtype, monkeypatch):
    from hstu_sparse.catalogue import small

    if "several chunks" in name:
        monkeypatch.setattr(small, "HELD", 2**21)
    check("cuda", **{**CASE, **CASES[name], "dtype": dtype})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["rows gathered", "rows gathered, E = 50"])
def test_agrees_with_the_reference_where_torch_is_deterministic(name, dtype, deterministic):
    check("cuda", **{**CASE, **CASES[name], "dtype": dtype})


def test_tf32_where_torch_may():
    generator = torch.Generator().manual_seed(0)
    out, items = (torch.randn(n, 64, generator=generator).cuda().requires_grad_() for n in (500, 3000))
    targets = torch.randint(3000, (500,), generator=generator).cuda()
    results = []
    for precision in ("ieee", "tf32"):
        torch.backends.cuda.matmul.fp32_precision = precision
        try:
            loss = catalogue_loss(out, items, targets, temperature=0.2)
            results.append((loss.detach(), *torch.autograd.grad(loss, (out, items))))
        finally:
            torch.backends.cuda.matmul.fp32_precision = "ieee"
    for exact, rounded in zip(*results):
        assert 0 < (exact - rounded).norm() < 5e-3 * exact.norm()


# Without negatives, of the batch, of blocks, of each token: over a small catalogue, over a large one.
FORMS = [None, "shared", "blocks", "per token", "gathered"]


def problem(tokens=3000, items=7000, size=256, negatives=None, dtype=torch.bfloat16):
    if negatives == "per token":
        items = 15 * size
    elif negatives == "gathered":
        negatives, items = "per token", 60 * size
    generator = torch.Generator().manual_seed(0)
    out, table = (torch.randn(n, size, generator=generator).to("cuda", dtype) for n in (tokens, items))
    targets = torch.randint(-1, items, (tokens,), generator=generator).cuda()
    shape = {"shared": (500,), "blocks": (-(-tokens // BLOCK), 60), "per token": (tokens, 60)}.get(negatives)
    drawn = None if shape is None else torch.randint(items // 20, shape, generator=generator).cuda()
    sampled = {"negatives": drawn, "block": BLOCK if negatives == "blocks" else 1}
    return out.requires_grad_(), table.requires_grad_(), targets, sampled


@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_in_every_run(form, request):
    if form == "gathered":
        request.getfixturevalue("deterministic")
    out, items, targets, sampled = problem(negatives=form)
    runs = []
    for _ in range(3):
        loss = catalogue_loss(out, items, targets, temperature=0.05, **sampled)
        runs.append((loss, *torch.autograd.grad(loss, (out, items))))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run))


@pytest.mark.parametrize("form", FORMS)
def test_no_wait_for_the_device_and_graphs(form):
    out, items, targets, sampled = problem(negatives=form)
    temperature = torch.tensor(0.05, device="cuda", requires_grad=True)

    def step():
        loss = catalogue_loss(out, items, targets, temperature=temperature, **sampled)
        return loss.detach(), *torch.autograd.grad(loss, (out, items, temperature))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [x.clone() for x in step()]
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = step()
    for x in actual:
        x.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(actual, expected):
        # Atomic additions to the table's gradient have no order.
        torch.testing.assert_close(
            a, b, **({"rtol": 1e-2, "atol": 1e-6} if form == "gathered" else {"rtol": 0, "atol": 0})
        )


@pytest.mark.parametrize("form", FORMS)
def test_compiles_without_graph_breaks(form, request):
    if form == "gathered":
        request.getfixturevalue("deterministic")
    out, items, targets, sampled = problem(negatives=form, tokens=300)
    run = lambda out, items: catalogue_loss(out, items, targets, temperature=0.05, **sampled)
    loss, compiled = run(out, items), torch.compile(run, fullgraph=True)(out, items)
    torch.testing.assert_close(loss, compiled)
    for a, b in zip(torch.autograd.grad(loss, (out, items)), torch.autograd.grad(compiled, (out, items))):
        assert torch.equal(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form, deterministic):
    import hstu_sparse.catalogue.launches  # noqa: F401  registers the operators

    out, items, targets, sampled = problem(40, 90, 32, form, torch.float32)
    temperature = torch.tensor(0.3, device="cuda", requires_grad=True)
    torch.library.opcheck(
        torch.ops.hstu_sparse.catalogue_loss_fwd.default,
        (out, items, targets, temperature, sampled["negatives"], None, 1.0, True, 0.0, True, sampled["block"]),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_batches_do_not_recompile_kernels():
    from hstu_sparse.catalogue import products, rows, sampled, small

    def compiled():
        kernels = [x for m in (products, rows, sampled, small) for x in vars(m).values() if hasattr(x, "device_caches")]
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def step(tokens):
        for form in FORMS:
            out, items, targets, sampled = problem(tokens, 3000, 64, form)
            catalogue_loss(out, items, targets, temperature=0.05, **sampled).backward()

    for tokens in (1, 300, 100_000):  # one gradient split, both, the other
        step(tokens)
    count = compiled()
    for tokens in (2, 17, 301, 4096, 90_001):
        step(tokens)
    assert count > 0
    assert compiled() == count


def test_memory_beyond_inputs_and_gradients():
    """Below 64 MB at T = 65,536, E = 256, I = 1,000,000."""
    out = torch.randn(65_536, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    items = torch.randn(1_000_000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(len(items), (len(out),), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(catalogue_loss(out, items, targets, temperature=0.05), (out, items))
    beyond = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)
    print(f"beyond inputs and gradients: {beyond / 2**20:.1f} MiB")
    assert beyond < 64e6


@pytest.mark.big_gpu
@pytest.mark.parametrize("form", [None, "shared", "per token"])
def test_addresses_beyond_32_bits(form):
    """Test 17 million items of 128: more than 2^31 numbers, with targets and negatives among the last."""
    I, E, T = 17_000_000, 128, 300
    out = torch.randn(T, E, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    items = torch.empty(I, E, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
    targets = torch.arange(I - T, I, device="cuda")
    shape = {"shared": (40,), "per token": (T, 40)}.get(form)
    negatives = None if shape is None else torch.randint(I - 1000, I, shape, device="cuda")
    loss = catalogue_loss(out, items, targets, temperature=0.2, negatives=negatives)
    dout, ditems = torch.autograd.grad(loss, (out, items))

    x = F.normalize(out.detach().float(), dim=1)
    last = items.detach()[-1000:].float().requires_grad_()
    tail = F.normalize(last, dim=1)
    if form is None:
        parts = [(x @ F.normalize(p.float(), dim=1).T / 0.2).logsumexp(1) for p in items.detach()[:-1000].split(2**17)]
        logits = torch.cat([torch.stack(parts, 1), x @ tail.T / 0.2], 1)
        expected = F.cross_entropy(logits, targets - (I - 1000) + len(parts))
    else:
        expected = catalogue_loss(
            x, last, targets - (I - 1000), temperature=0.2, negatives=negatives - (I - 1000), backend="reference"
        )
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
    (tail_grad,) = torch.autograd.grad(expected, last)
    assert (ditems[-1000:].float() - tail_grad).norm() < 2e-2 * tail_grad.norm()
    assert dout.isfinite().all()
