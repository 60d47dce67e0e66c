"""Tensors made rows that kernels can read: adjacent, aligned, heads padded with zeros; the order of programs."""

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from hstu_sparse.core.launch import run  # noqa: E402
from hstu_sparse.tiles.rows import head_and_slot  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(row_tensor, x):
    assert torch.equal(row_tensor, F.pad(x, (0, -x.shape[-1] % 16)))
    assert row_tensor.data_ptr() % 16 == 0 and row_tensor.stride(-1) == 1
    assert all(s and s % 16 == 0 for s, size in zip(row_tensor.stride()[:-1], row_tensor.shape) if size > 1), (
        row_tensor.stride()
    )


@pytest.mark.parametrize("tokens", [0, 37])
@pytest.mark.parametrize(("d", "v", "heads"), [(50, 50, 1), (25, 7, 2), (16, 50, 3), (32, 32, 1), (1, 1, 1)], ids=str)
def test_heads_of_several_tensors(tokens, d, v, heads):
    from hstu_sparse.tiles.rows import as_rows

    wide = torch.randn(tokens, heads, 2 * d + 3, device=DEVICE)
    k, values = (torch.randn(tokens, heads, size, device=DEVICE) for size in (d, v))
    inputs = wide[..., 3 : 3 + d], k, None, values, k
    for actual, x in zip(as_rows(*inputs), inputs, strict=True):
        assert actual is None if x is None else check(actual, x) is None


def test_tensors_that_one_kernel_does_not_pad():
    """Test other tokens or heads, other dimensions, channels that are not adjacent, and five tensors."""
    from hstu_sparse.tiles.rows import as_rows

    x = torch.randn(6, 2, 5, device=DEVICE)
    others = x[:4], x[:, :1], x[:, 0], x.transpose(0, 2), x.transpose(1, 2), torch.randn(2, 6, 2, 5, device=DEVICE)
    for inputs in (*((x, other) for other in others), (x,) * 5):
        for actual, one in zip(as_rows(*inputs), inputs, strict=True):
            check(actual, one)


def test_copies_only_what_cannot_be_read():
    from hstu_sparse.tiles.rows import as_rows

    x = torch.randn(4, 2, 96, device=DEVICE)
    view, shifted, expanded = x[..., 16:48], x[..., 1:33], x[:, :1].expand(4, 2, 96)
    results = as_rows(view, shifted, expanded, x.transpose(1, 2)[..., :1].expand(4, 96, 16))
    assert results[0] is view and results[1] is not shifted
    for one, source in zip(results, (view, shifted, expanded)):
        check(one, source)
    plain = as_rows(shifted, None, expanded, x.transpose(1, 2), align=False)
    assert plain[0] is shifted and plain[1] is None and plain[2] is expanded and plain[3].is_contiguous()


@triton.jit
def _order_kernel(target, slots, heads, TOGETHER: tl.constexpr):
    head, slot = head_and_slot(tl.program_id(0), slots, heads, TOGETHER)
    tl.store(target + tl.program_id(0), head * slots + slot)


def test_slots_of_a_head_before_those_of_the_next():
    heads, slots = 3, 10
    order = torch.zeros(heads * slots, dtype=torch.int32, device=DEVICE)
    run(_order_kernel, heads * slots, order, slots, heads, TOGETHER=4)
    chunks = range(0, 4), range(4, 8), range(8, 10)
    assert order.tolist() == [head * slots + slot for chunk in chunks for head in range(heads) for slot in chunk]
