"""A model's input: the interface, the kernels in the interpreter and on a GPU."""

import functools

import pytest
import torch

from hstu_sparse import embed_inputs
from tests.random.cases.embed_inputs import check, inputs, kernel, reference
from tests.support.budgets import EDGE_CASES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")


def check_dropout(lengths, n, size, p=0.3, targets=False):
    """Values that dropout keeps are divided by 1 - p, the rest are 0, and gradients have the same mask."""
    x = inputs(lengths, n, size, more=True, targets=targets, device=DEVICE)
    leaves = [x[name].requires_grad_() for name in ("rows", "position", "more")]
    run = functools.partial(kernel, **x, scale=3.0)
    whole, out = run(), run(dropout=p, seed=torch.tensor([7], device=DEVICE))
    mask = out != 0
    share = mask.float().mean().item()
    assert abs(share - (1 - p)) < 4 * (p * (1 - p) / mask.numel()) ** 0.5
    torch.testing.assert_close(out, whole * mask / (1 - p))
    assert torch.equal(out, run(dropout=p, seed=torch.tensor([7], device=DEVICE)))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    actual, expected = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(whole, leaves, grad * mask / (1 - p))
    torch.testing.assert_close(actual, expected)


def test_reference():
    rows, position, more = torch.randn(5, 3), torch.randn(4, 3), torch.randn(5, 3)
    actual = embed_inputs(rows, position, torch.tensor([0, 2, 2, 5]), scale=2.0, more=more)
    torch.testing.assert_close(actual, 2 * rows + position[[0, 1, 0, 1, 2]] + more)
    offsets, targets = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 0, 2])
    actual = embed_inputs(rows, position, offsets, scale=2.0, more=more, num_targets=targets)
    torch.testing.assert_close(actual, 2 * rows + position[[0, 1, 0, 1, 1]] + more)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": torch.zeros(5)}, ValueError, r"rows must be \[T, E\], got shape \[5\]"),
        ({"position": torch.zeros(4, 2)}, ValueError, r"position must be \[N, E=3\], got shape \[4, 2\]"),
        ({"more": torch.zeros(4, 3)}, ValueError, r"more must be \[T=5, E=3\], got shape \[4, 3\]"),
        ({"position": torch.zeros(2, 3)}, ValueError, "more than the rows of position=2"),
        ({"seq_offsets": torch.tensor([0, 4])}, ValueError, "seq_offsets must end at T=5, got 4"),
        ({"num_targets": torch.tensor([0, 4])}, ValueError, "num_targets of sequence 1 must be from 0 to its length 3"),
        ({"scale": float("nan")}, ValueError, "scale must be a finite number"),
        ({"dtype": torch.int64}, TypeError, "dtype must be floating point, got torch.int64"),
        ({"dropout": 1.0}, ValueError, "dropout must be at least 0 and less than 1"),
    ],
)
def test_errors(change, error, message):
    with pytest.raises(error, match=message):
        embed_inputs(**inputs((2, 3), 4, 3) | change)


@interpreter
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("name", EDGE_CASES)
def test_kernels(name, more):
    lengths, n = EDGE_CASES[name]
    check(
        "cpu", lengths=lengths, longer=n - max([1, *lengths]), size=50, dtype="float32", more=more, strided=more, seed=0
    )


@interpreter
def test_candidates_have_the_position_of_the_first_of_them():
    """Tiles of 32 positions: histories of no token, of parts of a tile and of whole ones, and candidates of two."""
    lengths = (70, 0, 40, 33, 1)
    check("cpu", lengths=lengths, longer=3, size=50, dtype="float32", more=True, strided=True, seed=0, targets=True)
    check_dropout((37, 0, 13), 40, 50, targets=True)


@interpreter
def test_many_sequences_and_dropout():
    options = {"size": 16, "dtype": "float32", "more": False, "strided": False, "seed": 0, "result": "bfloat16"}
    check("cpu", lengths=[3, 0, 5, 1] * 9, longer=2, **options)
    check_dropout((37, 0, 13), 40, 50)


@interpreter
def test_opcheck():
    x = inputs((2, 3), 4, 6)
    rest = (x["seq_offsets"], torch.tensor([1, 2]), None, torch.tensor([3]), 2.0, 0.3, None)
    leaves = x["rows"].requires_grad_(), x["position"].requires_grad_()
    torch.library.opcheck(torch.ops.hstu_sparse.embed_inputs_fwd.default, (*leaves, *rest))
    plain = (y.detach() for y in leaves)
    torch.library.opcheck(torch.ops.hstu_sparse.embed_inputs_bwd.default, (torch.randn(5, 6), *plain, *rest))


def test_the_kernels_need_a_seed():
    with pytest.raises(ValueError, match=r"dropout > 0 needs a seed|needs CUDA tensors"):
        kernel(**inputs((2,), 2, 4, device=DEVICE), dropout=0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("count", "length", "size"), [(8, 1000, 256), (300, 90, 50), (1, 5000, 64)])
def test_kernels_on_gpu(count, length, size, dtype):
    lengths = [length - 7 * (i % 11) for i in range(count)]
    options = dict(more=count == 8, strided=False, seed=0, targets=count != 300)
    check("cuda", lengths=lengths, longer=3, size=size, dtype=dtype, **options)


@pytest.mark.gpu
def test_dropout_on_gpu():
    check_dropout((500, 0, 777), 900, 64)


@pytest.mark.gpu
def test_the_model_takes_the_kernel():
    from data.batch import Batch
    from tests.models.test_hstu import make_embedding

    model = make_embedding(30, embedding_dim=16, max_seq_len=50).cuda()
    times = torch.zeros(40, dtype=torch.int64)
    batch = Batch(torch.arange(40) % 30, times, times, times, torch.tensor([0, 13, 40]), torch.arange(2)).to("cuda")
    rows = model.item_weight[batch.item_ids]
    expected = reference(rows, model.position, batch.seq_offsets, scale=4.0)
    torch.testing.assert_close(model(batch), expected)
