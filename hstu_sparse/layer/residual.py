"""Compute the norm at the beginning of a residual block, and the sum at its end, with fused gradients.

Letters: T tokens of the batch, C channels.

`residual_norm` returns x and its norm: the backward kernel of the norm adds the gradient of the residual connection.
`residual_add`: one kernel converts the gradient to the dtype of `added` and sums it over parts of the tokens for the
bias; torch adds the parts.

Under torch.compile and dispatch modes the norm is the registered operator of `norm_gate`.
"""

import torch
import triton
import triton.language as tl

from hstu_sparse.core.launch import cdiv, multiprocessors, on_device, run
from hstu_sparse.core.precision import widened, without_autocast, working_dtype
from hstu_sparse.core.registration import launches_directly, no_second_derivative, register_preparation
from hstu_sparse.core.validation import check_tensor, choose_backend
from hstu_sparse.layer.norm_gate import (
    check_dtype,
    check_input,
    check_sizes,
    layer_norm,
    load_fp32,
    norm_gate_gradients,
    norm_gate_operator,
    rows_config,
)
from hstu_sparse.tiles.rows import as_rows

# Programs of the backward kernel of the sum per multiprocessor.
_PROGRAMS = 8


@without_autocast
def residual_norm(
    x: torch.Tensor, *, eps: float = 1e-6, dtype: torch.dtype | None = None, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x, layer_norm(x)) for a residual block. In Triton, one backward kernel adds both gradients of x.

    For arguments and errors see `layer_norm`.

    Examples:
        >>> x, normed = hstu_sparse.residual_norm(torch.tensor([[1.0, 3.0]]))
        >>> normed
        tensor([[-1.0000,  1.0000]])
    """
    eps, backend, _ = check_input(x, eps, backend, "residual_norm")
    check_dtype(dtype)
    if backend == "reference" or torch.compiler.is_compiling() or not launches_directly(x):
        return x, layer_norm(x, eps=eps, dtype=dtype, backend=backend)
    check_sizes(x=x)
    return Fork.apply(x, eps, dtype)


@without_autocast
def residual_add(
    x: torch.Tensor, added: torch.Tensor, bias: torch.Tensor | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """Compute x + added + bias, the end of a residual block. `added` is a matrix product without its bias.

    In Triton, forward is one kernel and backward at most two, besides conversions of dtypes. The sum and the gradient
    of the bias are computed in fp32. The results are deterministic.

    Args:
        x, added: [T, C], fp16, bf16 or fp32 (the reference also fp64). Copied if their channels are not adjacent.
        bias: [C], floating point, or None.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [T, C], contiguous, in the dtype of x + added. Gradients flow to x, added and bias; the kernels have no second
        derivatives.

    Examples:
        >>> hstu_sparse.residual_add(torch.ones(1, 2), torch.tensor([[2.0, 3.0]]), torch.tensor([10.0, 20.0]))
        tensor([[13., 24.]])

    Raises:
        TypeError, ValueError: with the expected and the actual value.
    """
    backend = choose_backend(backend, x, "residual_add")
    sizes: dict[str, int] = {}
    check_tensor("x", x, "T C", sizes)
    check_tensor("added", added, "T C", sizes, device=x.device)
    if bias is not None:
        check_tensor("bias", bias, "C", sizes, device=x.device)
    if backend == "reference":
        return residual_add_reference(x, added, bias)
    check_sizes(x=x, added=added)
    return Add.apply(x, added, None if bias is None else bias.contiguous())


def residual_add_reference(x: torch.Tensor, added: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute x + added + bias in the dtype of x + added: [T, C]."""
    dtype = torch.promote_types(x.dtype, added.dtype)
    x, added = widened(x, added)
    total = x + added
    if bias is not None:
        total = total + bias.to(working_dtype(dtype))
    return total.to(dtype).contiguous()


class Fork(torch.autograd.Function):
    """Return x and its norm. The backward kernel of the norm adds both gradients of x."""

    @staticmethod
    def forward(ctx, x, eps, dtype):
        ctx.save_for_backward(x)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return x, norm_gate_operator.forward(x, None, None, eps, 0.0, dtype)

    @staticmethod
    @no_second_derivative("residual_norm in Triton")
    def backward(ctx, stream_grad, grad):
        if grad is None:
            return stream_grad, None, None
        (x,) = ctx.saved_tensors
        with on_device(x.device):
            (dx,) = norm_gate_gradients(grad, x, None, stream_grad, None, ctx.eps, 0.0)
        return dx, None, None


@triton.jit(do_not_specialize=["tokens"])
def residual_add_fwd_kernel(
    x, added, bias, out, x_stride_t, added_stride_t, tokens, C: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Compute ROWS rows of x + added + bias."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_C)[None, :]
    inside = (row < tokens) & (column < C)
    total = load_fp32(x, row, column, x_stride_t, inside) + load_fp32(added, row, column, added_stride_t, inside)
    if bias is not None:
        total += tl.load(bias + column, column < C, 0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * C + column, total, inside)


@triton.jit(do_not_specialize=["tokens"])
def residual_add_bwd_kernel(
    grad, dadded, parts, grad_stride_t, tokens, C: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Convert grad to dadded, if its dtype differs, and sum it over every n-th tile in parts [programs, C], or None."""
    column = tl.arange(0, BLOCK_C)[None, :]
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for first in range(tl.program_id(0) * ROWS, tokens, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < tokens) & (column < C)
        upstream = load_fp32(grad, row, column, grad_stride_t, inside)
        total += upstream
        if dadded is not None:
            tl.store(dadded + row.to(tl.int64) * C + column, upstream, inside)
    if parts is not None:
        c = tl.arange(0, BLOCK_C)
        tl.store(parts + tl.program_id(0) * C + c, tl.sum(total, 0), c < C)


def _sum(x, added, bias) -> list[torch.Tensor]:
    """Return [x + added + bias]."""
    out = _fake_sum(x, added, bias)
    tokens, channels = x.shape
    if tokens:
        (x, added), config = as_rows(x, added, align=False), rows_config(channels)
        run(
            residual_add_fwd_kernel, cdiv(tokens, config.ROWS), x, added, bias, *out, x.stride(0),
            added.stride(0), tokens, **config,
        )  # fmt: skip
    return out


def _fake_sum(x, added, bias) -> list[torch.Tensor]:
    return [torch.empty(x.shape, dtype=torch.promote_types(x.dtype, added.dtype), device=x.device)]


def _shares(grad, dtype) -> list[torch.Tensor]:
    """Return [the sum of grad over tokens in fp32], followed by grad in `dtype` unless that is None."""
    (total, *dadded), (tokens, channels) = _fake_shares(grad, dtype), grad.shape
    if not tokens:
        return [total.zero_(), *dadded]
    (grad,), config = as_rows(grad, align=False), rows_config(channels)
    programs = min(_PROGRAMS * multiprocessors(grad.device), cdiv(tokens, config.ROWS))
    parts = torch.empty(programs, channels, dtype=torch.float32, device=grad.device)
    run(
        residual_add_bwd_kernel, programs, grad, *(dadded or [None]), parts, grad.stride(0), tokens, **config
    )  # fmt: skip
    return [torch.sum(parts, 0, out=total), *dadded]


def _fake_shares(grad, dtype) -> list[torch.Tensor]:
    total = torch.empty(grad.shape[1], dtype=torch.float32, device=grad.device)
    return [total] if dtype is None else [total, torch.empty(grad.shape, dtype=dtype, device=grad.device)]


_sum_operator = register_preparation("residual_sum", "Tensor x, Tensor added, Tensor? bias", _sum, _fake_sum)
_shares_operator = register_preparation("residual_shares", "Tensor grad, ScalarType? dtype", _shares, _fake_shares)


class Add(torch.autograd.Function):
    """Add a residual. Not an `Operator`, since backward returns its gradient without a copy."""

    @staticmethod
    def forward(ctx, x, added, bias):
        ctx.dtypes = x.dtype, added.dtype, None if bias is None else bias.dtype
        return _sum_operator(x, added, bias)[0]

    @staticmethod
    @no_second_derivative("residual_add in Triton")
    def backward(ctx, grad):
        x_dtype, dtype, bias_dtype = ctx.dtypes
        dx, same = grad.to(x_dtype), grad.dtype == dtype
        if bias_dtype is None:
            return dx, grad.to(dtype), None
        total, *dadded = _shares_operator(grad, None if same else dtype)
        return dx, grad if same else dadded[0], total.to(bias_dtype)
