"""Jagged tensors: validation, and the way to and from padded ones."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hstu_sparse
from hstu_sparse.core import jagged
from tests.support.budgets import EDGE_CASES, make_jagged, make_offsets


@pytest.fixture(params=[True, False], ids=["with fbgemm", "without fbgemm"])
def fbgemm(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(jagged, "_INSTALLED", False)


@pytest.mark.parametrize("name", EDGE_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_there_and_back(name, dtype, fbgemm):
    lengths, _ = EDGE_CASES[name]
    values = (make_jagged(lengths, (2, 3)) * 100).to(dtype)
    offsets = make_offsets(lengths)
    longest = max([*lengths, 1])
    padded = jagged.jagged_to_padded(values, offsets, longest)
    assert padded.shape == (len(lengths), longest, 2, 3)
    for b, length in enumerate(lengths):
        begin = int(offsets[b])
        assert torch.equal(padded[b, :length], values[begin : begin + length])
        assert not padded[b, length:].any()
    assert torch.equal(jagged.padded_to_jagged(padded, offsets, sum(lengths)), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("inner", [(), (3,)])
def test_tokens_past_the_padded_length_are_dropped(dtype, inner, fbgemm):
    """If padded rows are shorter than their sequences, the tokens past them are dropped and come back as zeros."""
    values, offsets = (make_jagged((4, 2), inner) * 100).to(dtype), make_offsets((4, 2))
    padded = jagged.jagged_to_padded(values, offsets, 3)
    assert torch.equal(padded[0], values[:3])
    back = jagged.padded_to_jagged(padded, offsets, 6)
    assert torch.equal(back, torch.cat([values[:3], torch.zeros_like(values[:1]), values[4:]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients(dtype, fbgemm):
    offsets = make_offsets((4, 0, 2))
    values = make_jagged((4, 0, 2), (3,), dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 4, 3, dtype=dtype)
    (jagged.jagged_to_padded(values, offsets, 4) * weight).sum().backward()
    expected = torch.cat([weight[0, :4], weight[2, :2]])
    assert torch.equal(values.grad, expected)


def test_offsets_from_lengths():
    lengths = torch.tensor([3, 0, 2])
    assert jagged.offsets_from_lengths(lengths).tolist() == [0, 3, 3, 5]


def test_sequence_ids():
    assert jagged.sequence_ids(make_offsets((2, 0, 3)), 5).tolist() == [0, 0, 2, 2, 2]


@pytest.mark.parametrize(
    ("offsets", "max_seq_len", "error", "message"),
    [
        ([0, 5], 5, TypeError, "seq_offsets must be a tensor, got list"),
        (torch.tensor([0.0, 5.0]), 5, TypeError, "seq_offsets must be int32 or int64, got torch.float32"),
        (torch.tensor([[0, 5]]), 5, ValueError, r"seq_offsets must be \[B\+1\], got shape \[1, 2\]"),
        (torch.tensor([0, 5]), 5.0, TypeError, "max_seq_len must be an int, got float"),
        (torch.tensor([0, 5]), 0, ValueError, "max_seq_len must be at least 1, got 0"),
    ],
)
def test_metadata_errors(offsets, max_seq_len, error, message):
    with pytest.raises(error, match=message):
        jagged.check_jagged(offsets, max_seq_len, q=torch.zeros(5, 1, 1))


def test_token_counts_must_agree():
    with pytest.raises(ValueError, match="k must have T=5 tokens, as q, got 4"):
        jagged.check_jagged(torch.tensor([0, 5]), 5, q=torch.zeros(5, 1, 1), k=torch.zeros(4, 1, 1))


WRONG = [
    ([0, 2, 4], "seq_offsets must end at T=5, got 4"),
    ([1, 2, 5], "seq_offsets must begin at 0, got 1"),
    ([0, 6, 5], "seq_offsets must not decrease: sequence 1 goes from 6 to 5"),
    ([0, 2**62, 5], f"seq_offsets must not decrease: sequence 1 goes from {2**62} to 5"),
    ([0, 5], "sequence 0 has 5 tokens, more than max_seq_len=4"),
    ([0], "seq_offsets must end at T=5, got 0"),
]


@pytest.mark.parametrize(("offsets", "message"), WRONG)
def test_values_are_checked_on_a_cpu(offsets, message):
    limit = 4 if "max_seq_len" in message else 2**63 - 1
    with pytest.raises(ValueError, match=message):
        jagged.check_jagged(torch.tensor(offsets), limit, q=torch.zeros(5, 1, 1))


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(("offsets", "message"), WRONG)
def test_values_are_not_read_where_there_are_none(monkeypatch, debug, offsets, message):
    """Test fake and meta tensors, which have no values. Values on a GPU are read with the debug switch alone."""
    monkeypatch.setattr(jagged, "DEBUG", debug)
    jagged.check_jagged(torch.tensor(offsets, device="meta"), 4, q=torch.zeros(5, 1, 1, device="meta"))
    with FakeTensorMode() as mode:
        fake_offsets, q = mode.from_tensor(torch.tensor(offsets)), torch.zeros(5, 1, 1)
        jagged.check_jagged(fake_offsets, 4, q=q)

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(fake_offsets, q):
        jagged.check_jagged(fake_offsets, 4, q=q)
        return q + 1

    compiled(torch.tensor(offsets), torch.zeros(5, 1, 1))


def test_reading_a_mapped_tensor_is_left_out():
    weights, values, hidden = torch.ones(3, 2, 4), torch.randn(3, 4, 5), torch.zeros(2, 4, dtype=torch.bool)
    mapped = torch.vmap(lambda w, v: jagged.masked_product(w, v, hidden))(weights, values)
    torch.testing.assert_close(mapped, weights @ values)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_debug_switch_finds_what_is_not_finite(monkeypatch, name, value):
    """In a kernel a NaN would reach outputs before it (0 * NaN); it is found by name and token instead."""
    inputs = {n: torch.randn(6, 1, 4) for n in "qkv"}
    inputs[name][4, 0, 2] = value
    offsets = torch.tensor([0, 6])
    hstu_sparse.hstu_attention(**inputs, seq_offsets=offsets, max_seq_len=6)
    monkeypatch.setattr(jagged, "DEBUG", True)
    with pytest.raises(ValueError, match=f"{name} has NaN or infinity, first at token 4"):
        hstu_sparse.hstu_attention(**inputs, seq_offsets=offsets, max_seq_len=6)


def test_errors_name_the_offsets_that_are_wrong():
    x, offsets, wrong = torch.zeros(5, 1, 16), torch.tensor([0, 5]), torch.tensor([1, 5])
    pool = hstu_sparse.PagePool(hstu_sparse.PageFormat(1, 16, 16, torch.float32), 4, timed=False)
    pages, lengths = pool.table([pool.reserve([], 5)]), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^k_offsets must begin at 0, got 1"):
        hstu_sparse.flash_attention(x, x, x, offsets, k_offsets=wrong)
    with pytest.raises(ValueError, match=r"^cu_seqlens must begin at 0, got 1"):
        hstu_sparse.ring_plan(wrong)
    with pytest.raises(ValueError, match=r"^offsets must begin at 0, got 1"):
        pool.write(0, x, x, wrong, pages, lengths)
    with pytest.raises(ValueError, match=r"^q_offsets must begin at 0, got 1"):
        hstu_sparse.paged_attention(x, x, x, wrong, pool, pages, lengths, 10)
    with pytest.raises(ValueError, match=r"^sequence 0 has 5 tokens, more than the rows of position=3"):
        hstu_sparse.embed_inputs(x[:, 0], torch.zeros(3, 16), offsets)
