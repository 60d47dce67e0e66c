"""Compute SiLU of a matrix product and split the result into four tensors.

Letters: T tokens, C channels; A, B, M, N columns of the parts.

A program has whole rows. Only x is saved: both kernels are limited by memory traffic, and reading x again in backward
adds little.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from hstu_sparse.core.launch import INTERPRET, LaunchConfig, cdiv, next_power_of_2, run
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.registration import Operator
from hstu_sparse.core.validation import check_int, check_kernel, check_tensor, choose_backend
from hstu_sparse.tiles.rows import as_rows, silu, silu_and_grad

PARTS = 4
MAX_SIZE = 4096


@without_autocast
def silu_parts(x: torch.Tensor, sizes: Sequence[int], *, backend: str = "auto") -> tuple[torch.Tensor, ...]:
    """Split SiLU(x) by columns into four parts: u, v, q and k of an HSTU layer.

    In Triton the parts are contiguous tensors. One backward kernel reads their four gradients, which torch would
    concatenate first. Only x is saved.

    Args:
        x: [T, C], fp16, bf16 or fp32 (the reference also fp64).
        sizes: the sizes of the four parts, each from 1 to 4,096; their sum is C.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        Four tensors [T, size], dtype of x. Gradients flow to x; the kernels have no second derivatives.

    Examples:
        >>> u, v, q, k = hstu_sparse.silu_parts(torch.zeros(5, 12), [4, 4, 2, 2])
        >>> u.shape, k.shape
        (torch.Size([5, 4]), torch.Size([5, 2]))

    Raises:
        TypeError, ValueError: with the expected and the actual value.
    """
    backend = choose_backend(backend, x, "silu_parts")
    check_tensor("x", x, "T C", {})
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or len(sizes) != PARTS:
        raise TypeError(f"sizes must be {PARTS} whole numbers, got {sizes!r}")
    for size in sizes:
        check_int("sizes", size, 1, MAX_SIZE)
    if sum(sizes) != x.shape[1]:
        raise ValueError(f"sizes must sum up to C={x.shape[1]}, got {list(sizes)}")
    if backend == "reference":
        return silu_parts_reference(x, list(sizes))
    check_kernel("silu_parts", x, {}, products=False)
    return silu_parts_operator(x, *sizes)


def silu_parts_reference(x: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """Return SiLU(x) [T, C], split by columns."""
    return F.silu(x).split(sizes, dim=-1)


# The number of elements of the widest part in a program's tile.
TILE = 2048


@triton.jit
def _place(base, row, stride, tokens, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Return (pointers to SIZE columns of the rows, their mask)."""
    column = tl.arange(0, PAD)[None, :]
    return base + row[:, None].to(tl.int64) * stride + column, (row < tokens)[:, None] & (column < SIZE)


@triton.jit
def _forward_part(x, out, row, tokens, C: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr):
    source, inside = _place(x, row, C, tokens, SIZE, PAD)
    target, _ = _place(out, row, SIZE, tokens, SIZE, PAD)
    value = silu(tl.load(source, inside, 0.0).to(tl.float32), False)
    tl.store(target, value.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens"])
def silu_parts_fwd_kernel(
    x, a, b, m, n, tokens, A: tl.constexpr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PAD_A: tl.constexpr,
    PAD_B: tl.constexpr, PAD_M: tl.constexpr, PAD_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of the four parts."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _forward_part(x, a, row, tokens, A + B + M + N, A, PAD_A)
    _forward_part(x + A, b, row, tokens, A + B + M + N, B, PAD_B)
    _forward_part(x + A + B, m, row, tokens, A + B + M + N, M, PAD_M)
    _forward_part(x + A + B + M, n, row, tokens, A + B + M + N, N, PAD_N)


@triton.jit
def _backward_part(grad, grad_stride, x, dx, row, tokens, C: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr):
    target, inside = _place(dx, row, C, tokens, SIZE, PAD)
    if grad is None:
        tl.store(target, tl.zeros(target.shape, dx.dtype.element_ty), inside)
    else:
        source, _ = _place(x, row, C, tokens, SIZE, PAD)
        grad_pointers, _ = _place(grad, row, grad_stride, tokens, SIZE, PAD)
        _, slope = silu_and_grad(tl.load(source, inside, 0.0).to(tl.float32), False)
        value = tl.load(grad_pointers, inside, 0.0).to(tl.float32) * slope
        tl.store(target, value.to(dx.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens"])
def silu_parts_bwd_kernel(
    da, db, dm, dn, x, dx, a_stride, b_stride, m_stride, n_stride, tokens, A: tl.constexpr, B: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PAD_A: tl.constexpr, PAD_B: tl.constexpr, PAD_M: tl.constexpr,
    PAD_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of dx from the gradients of the four parts; None stands for zeros."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _backward_part(da, a_stride, x, dx, row, tokens, A + B + M + N, A, PAD_A)
    _backward_part(db, b_stride, x + A, dx + A, row, tokens, A + B + M + N, B, PAD_B)
    _backward_part(dm, m_stride, x + A + B, dx + A + B, row, tokens, A + B + M + N, M, PAD_M)
    _backward_part(dn, n_stride, x + A + B + M, dx + A + B + M, row, tokens, A + B + M + N, N, PAD_N)


def _config(sizes) -> LaunchConfig:
    widths = [next_power_of_2(size) for size in sizes]
    names = [f"{kind}{name}" for kind in ("", "PAD_") for name in "ABMN"]
    rows = max(1, min(64, TILE // max(widths)))
    return LaunchConfig(4, ROWS=8 if INTERPRET else rows, **dict(zip(names, (*sizes, *widths))))


def _forward(x, *sizes):
    parts = tuple(torch.empty(len(x), size, dtype=x.dtype, device=x.device) for size in sizes)
    if len(x):
        config = _config(sizes)
        run(silu_parts_fwd_kernel, cdiv(len(x), config.ROWS), x.contiguous(), *parts, len(x), **config)
    return parts


def _backward(da, db, dm, dn, x, *sizes):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        grads = as_rows(da, db, dm, dn, align=False)
        strides = [0 if g is None else g.stride(0) for g in grads]
        config = _config(sizes)
        run(
            silu_parts_bwd_kernel, cdiv(len(x), config.ROWS), *grads, x.contiguous(), dx, *strides, len(x),
            **config,
        )  # fmt: skip
    return [dx]


def _fake(x, *sizes):
    return tuple(x.new_empty(x.shape[0], size) for size in sizes)


_SCHEMA = "Tensor x, int a, int b, int m, int n"
silu_parts_operator = Operator("silu_parts", _SCHEMA, _forward, _backward, _fake, "x", outputs=4, graded=4)
