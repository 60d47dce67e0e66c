"""The catalogue loss: the reference by hand, the interface, and the kernels in Triton's interpreter.

Letters: T tokens, I items, E embedding size, K negatives.
"""

import functools
import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from hstu_sparse import catalogue_loss
from hstu_sparse.catalogue import CatalogueShard
from hstu_sparse.core import jagged
from hstu_sparse.core.launch import override
from tests.random.cases.catalogue_loss import check

T, I, E, K = 9, 7, 5, 4
interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(T, E, generator=generator, dtype=torch.float64).requires_grad_()
    items = torch.randn(I, E, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.tensor([3, 0, -1, 6, 6, 2, -1, 1, 5])
    return out, items, targets


def logit(out, items, t, i, temperature, normalize):
    x, y = out[t], items[i]
    return (x @ y) / (x.norm() * y.norm() if normalize else 1) / temperature


# The reference.


@pytest.mark.parametrize("normalize", [True, False])
def test_whole_catalogue_by_hand(inputs, normalize):
    out, items, targets = inputs
    losses = []
    for t, target in enumerate(targets.tolist()):
        if target >= 0:
            logits = torch.stack([logit(out, items, t, i, 0.5, normalize) for i in range(I)])
            losses.append(logits.exp().sum().log() - logits[target])
    expected = torch.stack(losses).mean()
    actual = catalogue_loss(out, items, targets, temperature=0.5, normalize=normalize)
    torch.testing.assert_close(actual, expected)
    for a, b in zip(torch.autograd.grad(actual, (out, items)), torch.autograd.grad(expected, (out, items))):
        torch.testing.assert_close(a, b)


def test_smoothing_is_torchs(inputs):
    out, items, targets = inputs
    logits = F.normalize(out, dim=1) @ F.normalize(items, dim=1).T / 0.3
    expected = F.cross_entropy(logits, targets, ignore_index=-1, label_smoothing=0.2)
    actual = catalogue_loss(out, items, targets, temperature=0.3, label_smoothing=0.2)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("backend", "dtype"), [("reference", torch.float64), pytest.param("triton", torch.float32, marks=interpreter)]
)
@pytest.mark.parametrize(
    ("cuts", "normalize", "weighted"),
    [
        ((0, 7), True, False),
        ((0, 7), False, True),
        ((0, 3, 5, 7), True, False),
        ((0, 3, 5, 7), False, False),
        ((0, 3, 5, 7), True, True),
        ((0, 0, 7), True, False),
        ((0, 0, 7), False, False),
    ],
)
def test_parts_make_the_whole(inputs, cuts, normalize, weighted, backend, dtype):
    """Test parts of the catalogue that get the sums over all parts, as processes that share a catalogue do."""
    loss_error, gradient_error = ((1e-12, 1e-13),) * 2 if dtype == torch.float64 else ((1e-5, 1e-6), (1e-4, 1e-5))
    out, items, targets = inputs
    temperature = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    options = {"normalize": normalize, "weights": torch.linspace(0, 2, T) if weighted else None}
    expected = catalogue_loss(out, items, targets, temperature=temperature, **options)
    expected_gradients = torch.autograd.grad(expected, (out, items, temperature))
    parts_of_sums, merged = [], None

    def merge(lse, logit):
        parts_of_sums.append((lse, logit))
        return (lse, logit) if merged is None else merged

    for _ in range(2):
        gradients = []
        for first, last in itertools.pairwise(cuts):
            x, y, z = (a.detach().to(dtype).requires_grad_() for a in (out, items[first:last], temperature))
            part = CatalogueShard(first, merge)
            loss = catalogue_loss(
                x, y, targets, temperature=z, part=part, backend=backend if len(y) else "reference", **options
            )
            if merged is not None:
                torch.testing.assert_close(loss.double(), expected, rtol=loss_error[0], atol=loss_error[1])
                gradients.append(torch.autograd.grad(loss, (x, y, z)))
        if merged is None:
            sums, logits = (torch.stack(parts) for parts in zip(*parts_of_sums))
            merged = sums.logsumexp(0), logits.sum(0)
    douts, ditems, slopes = zip(*gradients)
    part_gradients = sum(douts), torch.cat(ditems), sum(slopes)
    for a, b in zip(part_gradients, expected_gradients):
        torch.testing.assert_close(a.double(), b, rtol=gradient_error[0], atol=gradient_error[1])


@pytest.mark.parametrize("shape", [(0,), (T, 0)], ids=["of the batch", "of each token"])
def test_no_negatives_count_nothing(inputs, shape):
    out, items, targets = inputs
    negatives, log_q = torch.empty(shape, dtype=torch.long), torch.zeros(I)
    assert catalogue_loss(out, items, targets, temperature=0.5, negatives=negatives, log_q=log_q) == 0


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
def test_sampled_by_hand(inputs, corrected, per_token):
    out, items, targets = inputs
    # The target of some tokens, an item twice, and one that does not count.
    negatives = torch.tensor([6, 2, 2, -1])
    if per_token:
        negatives = torch.stack([negatives.roll(t) for t in range(T)])
    log_q = torch.linspace(-3, -1, I, dtype=torch.float64) if corrected else None
    losses = []
    for t, target in enumerate(targets.tolist()):
        if target < 0:
            continue
        positive = logit(out, items, t, target, 0.5, True)
        total = positive.exp()
        for k in (negatives[t] if per_token else negatives).tolist():
            if k not in (target, -1):
                c = log_q[k] + math.log(K) if corrected else 0.0
                total = total + (logit(out, items, t, k, 0.5, True) - c).exp()
        losses.append(total.log() - positive)
    expected = torch.stack(losses).mean()
    compute = functools.partial(catalogue_loss, out, items, targets, temperature=0.5, negatives=negatives, log_q=log_q)
    actual = compute()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(compute(reduction="none")[targets >= 0], torch.stack(losses))
    for a, b in zip(torch.autograd.grad(actual, (out, items)), torch.autograd.grad(expected, (out, items))):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_numerically(inputs, reduction):
    out, items, targets = inputs
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    weights = torch.linspace(0, 2, T, dtype=torch.float64)[1:].requires_grad_()
    function = lambda out, items, temperature, weights: catalogue_loss(
        out, items, targets[1:], temperature=temperature, label_smoothing=0.1, weights=weights, reduction=reduction
    )
    assert torch.autograd.gradcheck(function, (out[1:].detach().requires_grad_(), items, temperature, weights))


def test_weights(inputs):
    out, items, targets = inputs
    compute = functools.partial(catalogue_loss, out, items, targets, temperature=0.5)
    losses = compute(reduction="none")
    assert losses.shape == (T,) and not losses[targets < 0].any()
    weights = torch.tensor([2, 0, 5, 1, 0, 0, 7, 0, 1.0])  # those of positions without a target do not count
    torch.testing.assert_close(compute(weights=weights), (2 * losses[0] + losses[3] + losses[8]) / 4)
    torch.testing.assert_close(compute(weights=weights, reduction="none"), weights * losses)
    torch.testing.assert_close(compute(weights=torch.full((T,), 3.0)), compute())
    assert compute(weights=torch.zeros(T)) == 0


def test_sampled_equals_whole_catalogue_when_all_items_are_negatives(inputs):
    out, items, targets = inputs
    whole = catalogue_loss(out, items, targets, temperature=0.5)
    torch.testing.assert_close(catalogue_loss(out, items, targets, temperature=0.5, negatives=torch.arange(I)), whole)


def test_result_is_fp32_for_16_bit_inputs(inputs):
    out, items, targets = inputs
    loss = catalogue_loss(out.bfloat16(), items.bfloat16(), targets, temperature=0.5)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert catalogue_loss(out, items, targets, temperature=0.5).dtype == torch.float64


# The interface.


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"out": torch.zeros(3)}, ValueError, r"out must be \[T, E\], got shape \[3\]"),
        ({"items": torch.zeros(5, 3)}, ValueError, r"items must be \[I, E=4\], got shape \[5, 3\]"),
        ({"items": torch.zeros(0, 4)}, ValueError, r"items must be \[I, E\] with I, E > 0, got shape \[0, 4\]"),
        ({"items": torch.zeros(5, 4).double()}, TypeError, "items must be torch.float32, got torch.float64"),
        ({"targets": torch.zeros(2).long()}, ValueError, r"targets must be \[T=3\], got shape \[2\]"),
        ({"targets": torch.zeros(3)}, TypeError, "targets must be int32 or int64, got torch.float32"),
        ({"temperature": 0.0}, ValueError, "temperature must be a finite number above 0, got 0.0"),
        (
            {"temperature": torch.ones(1)},
            ValueError,
            "temperature must be a number, or a floating point tensor without",
        ),
        ({"label_smoothing": 1.0}, ValueError, "label_smoothing must be at least 0 and less than 1, got 1.0"),
        ({"label_smoothing": -0.1}, ValueError, "label_smoothing must be at least 0 and less than 1, got -0.1"),
        (
            {"label_smoothing": 0.1, "negatives": torch.zeros(2).long()},
            ValueError,
            "label_smoothing must be 0 with negatives",
        ),
        ({"negatives": torch.zeros(2, 2).long()}, ValueError, r"negatives must be \[T=3, K\], got shape \[2, 2\]"),
        ({"negatives": torch.zeros(2)}, TypeError, "negatives must be int32 or int64"),
        ({"block": 128}, ValueError, "block=128 needs negatives"),
        ({"block": 64, "negatives": torch.zeros(2).long()}, ValueError, "block must be 1 or a multiple of 128, got 64"),
        (
            {"block": 128, "negatives": torch.zeros(2, 2).long()},
            ValueError,
            r"negatives must be \[ceil\(T=3 / block=128\), K\], got shape \[2, 2\]",
        ),
        ({"log_q": torch.zeros(5)}, ValueError, "log_q needs negatives"),
        ({"negatives": torch.zeros(2).long(), "log_q": torch.zeros(4)}, ValueError, r"log_q must be \[I=5\]"),
        ({"weights": torch.zeros(2)}, ValueError, r"weights must be \[T=3\], got shape \[2\]"),
        ({"weights": torch.tensor([1.0, 2.0, -0.5])}, ValueError, "weights must be finite and at least 0, got -0.5"),
        ({"reduction": "sum"}, ValueError, "reduction must be 'mean' or 'none', got 'sum'"),
        ({"backend": "cuda"}, ValueError, "backend must be one of auto, triton, reference"),
    ],
)
def test_errors(change, error, message):
    arguments = {
        "out": torch.zeros(3, 4),
        "items": torch.zeros(5, 4),
        "targets": torch.zeros(3, dtype=torch.long),
        "temperature": 0.1,
    }
    with pytest.raises(error, match=message):
        catalogue_loss(**{**arguments, **change})


def test_debug_checks_ids(monkeypatch):
    monkeypatch.setattr(jagged, "DEBUG", True)
    out, items = torch.ones(2, 4), torch.ones(5, 4)
    with pytest.raises(ValueError, match="targets must be below I=5, got 5"):
        catalogue_loss(out, items, torch.tensor([0, 5]), temperature=1.0)
    with pytest.raises(ValueError, match="negatives must be below I=5, got 9"):
        catalogue_loss(out, items, torch.tensor([0, 4]), temperature=1.0, negatives=torch.tensor([9]))


# The kernels, in the interpreter.

CASE = dict(
    tokens=37, items=83, size=24, sampled="no", num_negatives=7, corrected=False, normalize=True, temperature=0.2,
    learned=False, smoothing=0.0, ignored=0.3, ids="int64", strided=False, dtype="float32", weighted=False,
    reduction="mean", seed=0,
)  # fmt: skip
CASES = {
    "whole catalogue": {},
    "a learned temperature": {"learned": True},
    "no normalisation": {"normalize": False, "temperature": 3.0, "learned": True},
    "smoothing": {"smoothing": 0.1, "size": 50},
    "logits too large for a fixed offset": {"temperature": 0.02},
    "several chunks": {"size": 136, "learned": True},
    "rows apart": {"strided": True},
    "all ignored": {"ignored": 1.0, "learned": True},
    "no token": {"tokens": 0, "learned": True},
    "negatives of the batch": {"sampled": "shared", "learned": True, "ids": "int32"},
    "negatives of the batch, no normalisation": {"sampled": "shared", "normalize": False, "temperature": 3.0},
    "negatives of the batch, all ignored": {"sampled": "shared", "ignored": 1.0},
    "negatives of the batch, no token": {"sampled": "shared", "tokens": 0},
    "negatives of blocks": {"sampled": "blocks", "learned": True, "tokens": 130},
    "negatives of blocks, corrected": {"sampled": "blocks", "corrected": True, "weighted": True},
    "negatives of blocks, no normalisation": {"sampled": "blocks", "normalize": False, "temperature": 3.0},
    "negatives of blocks, no token": {"sampled": "blocks", "tokens": 0},
    "negatives of each token, corrected": {"sampled": "per token", "corrected": True, "tokens": 13},
    "negatives of each token, no normalisation": {
        "sampled": "per token",
        "normalize": False,
        "temperature": 3.0,
        "tokens": 13,
    },
    "negatives of each token, all ignored": {"sampled": "per token", "ignored": 1.0, "tokens": 13},
    "negatives of each token, no token": {"sampled": "per token", "tokens": 0},
    "each target's loss": {"reduction": "none", "learned": True},
    "each target's loss, no token": {"reduction": "none", "tokens": 0},
    "weights, smoothing, no normalisation": {
        "weighted": True,
        "smoothing": 0.1,
        "normalize": False,
        "temperature": 3.0,
        "learned": True,
    },
    "weights, negatives of the batch": {"weighted": True, "sampled": "shared", "corrected": True},
    "weights, negatives of each token": {"weighted": True, "sampled": "per token", "tokens": 13, "learned": True},
}


# Cases that are marked slow: other cases have their options, in the same kernels.
COMBINED = ("whole catalogue", "a learned temperature", "negatives of blocks, no normalisation")


@interpreter
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow if x in COMBINED else []) for x in CASES])
def test_kernels_agree_with_the_reference(name):
    pytest.importorskip("triton")
    check("cpu", **{**CASE, **CASES[name]})


EACH = [name for name in CASES if "each token, " in name or "weights, negatives of each" in name]
# The other cases do not change the ordered sum of the items' gradient, which takes seconds.
SORTED = [
    pytest.param(name, "sorted", marks=[] if name == "negatives of each token, corrected" else pytest.mark.slow)
    for name in EACH
]


@interpreter
@pytest.mark.parametrize(("name", "way"), [*((name, "products") for name in EACH), *SORTED])
def test_other_ways_to_negatives_of_each_token(name, way, monkeypatch):
    """Test products with a small catalogue, and gradients summed in order, in place of gathered rows and atomics."""
    launches = pytest.importorskip("hstu_sparse.catalogue.launches")
    monkeypatch.setattr(launches.small, "takes_products", lambda *_: way == "products")
    monkeypatch.setattr(launches, "ATOMIC_BYTES", 0)
    check("cpu", **{**CASE, **CASES[name]})


@interpreter
def test_products_with_a_small_catalogue_in_chunks(monkeypatch):
    small = pytest.importorskip("hstu_sparse.catalogue.small")
    monkeypatch.setattr(small, "HELD", 16)
    monkeypatch.setattr(small, "_TILE", 16)
    monkeypatch.setattr(small, "takes_products", lambda *_: True)
    check("cpu", **{**CASE, "sampled": "per token", "tokens": 20, "num_negatives": 12, "corrected": True})


@interpreter
@pytest.mark.parametrize(
    "name",
    [
        "whole catalogue",
        "no normalisation",
        "several chunks",
        "negatives of the batch",
        "negatives of blocks, corrected",
        pytest.param("negatives of blocks", marks=pytest.mark.slow),
        "each target's loss",
    ],
)
def test_kernels_with_tensor_descriptors(name):
    launches = pytest.importorskip("hstu_sparse.catalogue.launches")
    with override(launches.product_config, lambda config, *_: config.replace(TMA=True)):
        check("cpu", **{**CASE, **CASES[name]})


@interpreter
@pytest.mark.parametrize("items", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 5))])
@pytest.mark.parametrize("sampled", ["shared", "per token"])
def test_popular_items_are_cut_and_merged(sampled, items, monkeypatch):
    """Test runs of the table's gradient longer than a piece: cut within a window, over several, and at its end."""
    launches = pytest.importorskip("hstu_sparse.catalogue.launches")
    monkeypatch.setattr(launches.small, "takes_products", lambda *_: False)
    monkeypatch.setattr(launches, "ATOMIC_BYTES", 0)
    monkeypatch.setattr(launches, "PIECE", 16)
    monkeypatch.setattr(launches, "CHUNK", 8)
    check("cpu", **{**CASE, "sampled": sampled, "items": items, "tokens": 16, "num_negatives": 6, "ignored": 0.0})


@interpreter
def test_no_valid_negative_counts_nothing():
    pytest.importorskip("triton")
    out, items = torch.randn(3, 16), torch.randn(4, 16).requires_grad_()
    targets = torch.tensor([2, 2, -1])
    run = functools.partial(catalogue_loss, out, items, targets, temperature=0.1, backend="triton")
    for negatives in (torch.tensor([2, -1, 2]), torch.full((3, 2), 2), torch.empty(0, dtype=torch.long)):
        loss = run(negatives=negatives)
        assert loss.item() == 0 and not torch.autograd.grad(loss, items)[0].any()


@interpreter
def test_an_item_of_norm_zero():
    pytest.importorskip("triton")
    items = torch.randn(40, 16)
    items[[3, 17]] = 0
    out = torch.randn(20, 16)
    out[4] = 0
    targets = torch.arange(20)
    results = []
    for backend in ("triton", "reference"):
        x, y = out.clone().requires_grad_(), items.clone().requires_grad_()
        loss = catalogue_loss(x, y, targets, temperature=0.3, backend=backend)
        results.append((loss, *torch.autograd.grad(loss, (x, y))))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@interpreter
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        pytest.param((7,), 1, id="of the batch", marks=pytest.mark.slow),
        pytest.param((1, 7), 128, id="blocks"),
        pytest.param((4, 9), 1, id="products"),
        pytest.param((4, 1), 1, id="gathered", marks=pytest.mark.slow),
    ],
)
def test_opcheck(shape, block):
    pytest.importorskip("hstu_sparse.catalogue.launches")
    generator = torch.Generator().manual_seed(0)
    out, items = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (4, 30))
    targets = torch.randint(30, (4,), generator=generator)  # all valid: what is stored of others is undefined
    negatives = torch.randint(-1, 30, shape, generator=generator)
    temperature = torch.tensor(0.3, requires_grad=True)
    torch.library.opcheck(
        torch.ops.hstu_sparse.catalogue_loss_fwd.default,
        (out, items, targets, temperature, negatives, None, 1.0, True, 0.0, True, block),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
