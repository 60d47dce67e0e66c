"""Compute the Hadamard transform of rows by products with Sylvester's matrices of at most 128: kernel and operator.

The matrix of n = OUTER * INNER is the Kronecker product of those of OUTER and INNER: a row, as a matrix [OUTER, INNER],
is multiplied from both sides. Several rows of fewer than 16 elements form one row of the product.
"""

import torch
import triton
import triton.language as tl

from hstu_sparse.cache.codec import sign
from hstu_sparse.core.launch import cdiv, run
from hstu_sparse.core.registration import Operator
from hstu_sparse.core.validation import check_kernel, check_products

ELEMENTS = 2048  # elements of a program; more if a row has more


@triton.jit(do_not_specialize=["total"])
def hadamard_transform_fwd_kernel(
    x, out, total, scale, N: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Transform ROWS rows of OUTER * INNER elements; if N < INNER, such a row is several rows of x."""
    place = tl.arange(0, ROWS * OUTER * INNER)
    element = tl.program_id(0).to(tl.int64) * (ROWS * OUTER * INNER) + place
    values = tl.reshape(tl.load(x + element, element < total, 0.0), [ROWS * OUTER, INNER])
    i = tl.arange(0, INNER)
    matrix = sign(i[:, None], i[None, :])
    if N < INNER:
        matrix = tl.where((i[:, None] // N) == (i[None, :] // N), sign(i[:, None] % N, i[None, :] % N), 0.0)
    values = tl.dot(values, matrix.to(x.dtype.element_ty), input_precision=PRECISION)
    if OUTER > 1:
        o = tl.arange(0, OUTER)
        values = tl.trans(tl.reshape(values, [ROWS, OUTER, INNER]), 0, 2, 1)
        values = tl.reshape(values, [ROWS * INNER, OUTER])
        outer = sign(o[:, None], o[None, :])
        if x.dtype.element_ty == tl.float32:
            values = tl.dot(values, outer, input_precision=PRECISION)
        else:
            # Split into two bf16 numbers, which is exact for sums of 16-bit numbers; fp16 might overflow.
            high = values.to(tl.bfloat16)
            low = (values - high.to(tl.float32)).to(tl.bfloat16)
            values = tl.dot(low, outer.to(tl.bfloat16), tl.dot(high, outer.to(tl.bfloat16)))
        values = tl.trans(tl.reshape(values, [ROWS, INNER, OUTER]), 0, 2, 1)
    values = tl.reshape(values, [ROWS * OUTER * INNER]) * scale
    tl.store(out + element, values.to(out.dtype.element_ty), element < total)


def factors(n: int) -> tuple[int, int]:
    """Return (OUTER, INNER) of n: both at least 16, the minimum of tl.dot, or (1, INNER)."""
    if n < 256:
        return 1, max(16, n)
    inner = 1 << (n.bit_length() // 2)
    return n // inner, inner


def _forward(x):
    check_kernel("hadamard_transform", x, {})
    n = x.shape[-1]
    if factors(n)[0] > 1 and x.dtype != torch.float32:
        check_products("hadamard_transform", torch.bfloat16)  # 16-bit rows: the product with OUTER's matrix in bf16
    x = x.contiguous()
    out = torch.empty_like(x)
    total = x.numel()
    if total == 0:
        return out
    outer, inner = factors(n)
    rows = max(1, ELEMENTS // (outer * inner))
    run(
        hadamard_transform_fwd_kernel, cdiv(total, rows * outer * inner),
        x, out, total, n**-0.5, N=n, OUTER=outer, INNER=inner, ROWS=rows, PRECISION="tf32x3" if n > 1024 else "ieee",
        num_warps=8 if outer * inner > ELEMENTS else 4,
    )  # fmt: skip
    return out


def _backward(grad, x):
    return [_forward(grad)]


_SCHEMA = "Tensor x"
hadamard_operator = Operator("hadamard_transform", _SCHEMA, _forward, _backward, lambda x: x.new_empty(x.shape), "x")
