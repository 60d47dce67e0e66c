"""Compute layer norm without affine parameters, alone or multiplied by a gate, with dropout.

Letters: T tokens of the batch, C channels.

A program has a tile of whole rows, so that each row is read once and its statistics stay in registers. The backward
pass recomputes the statistics, so that only the inputs are saved.

With y the normalised row, g the gradient before dropout and h = g u:
    du = g y,    dx = (h - mean(h) - y mean(h y)) / sqrt(variance + eps)
"""

import functools

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from hstu_sparse.core import validation
from hstu_sparse.core.launch import LaunchConfig, cdiv, next_power_of_2, run
from hstu_sparse.core.precision import widened, without_autocast
from hstu_sparse.core.registration import Operator
from hstu_sparse.core.validation import check_kernel, check_number, check_seed, check_tensor, choose_backend
from hstu_sparse.tiles.rows import as_rows, drop

MAX_CHANNELS = 4096
TILE = 2048


@without_autocast
def norm_gate(
    x: torch.Tensor,
    u: torch.Tensor,
    *,
    eps: float = 1e-6,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute dropout(LayerNorm(x) * u), the step between attention and output projection in an HSTU layer.

    The norm is over C, without affine parameters. In Triton, forward and backward are one kernel each. Only x, u and
    the seed are saved; backward recomputes mean, scale and mask.

    Dropout keeps element (t, c) with probability p = 1 - dropout and divides it by p. In Triton the mask depends on
    (seed, t, c) only (Philox 4x32, 10 rounds): use another seed for every layer and step. The reference ignores `seed`
    and draws another mask from torch's default generator.

    Args:
        x: [T, C], fp16, bf16 or fp32 (the reference also fp64). Copied if its channels are not adjacent.
        u: [T, C]; the dtype may differ from that of x. Copied if its channels are not adjacent.
        eps: added to the variance.
        dropout: the probability of zeroing, 0 <= dropout < 1; pass 0 in evaluation.
        seed: int64 tensor of one element on the device of x; the kernels need it if dropout > 0.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [T, C], contiguous, in the dtype of x * u. Gradients flow to x and u; the kernels have no second derivatives.

    Examples:
        >>> x, u = torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 5.0]])
        >>> hstu_sparse.norm_gate(x, u)
        tensor([[-2.0000,  5.0000]])

    Raises:
        TypeError, ValueError: with the expected and the actual value.

    Source: Zhai et al., Actions Speak Louder than Words, ICML 2024, section 3, equation 3 (arXiv 2402.17152).
    """
    eps, backend, sizes = check_input(x, eps, backend, "norm_gate")
    check_tensor("u", u, "T C", sizes, device=x.device)
    dropout = validation.check_fraction("dropout", dropout)
    if backend == "reference":
        return norm_gate_reference(x, u, eps=eps, dropout=dropout)
    check_sizes(x=x, u=u)
    if dropout:
        check_seed(seed, x.device)
    return norm_gate_operator(x, u, seed, eps, dropout, None)


@without_autocast
def layer_norm(
    x: torch.Tensor, *, eps: float = 1e-6, dtype: torch.dtype | None = None, backend: str = "auto"
) -> torch.Tensor:
    """Compute LayerNorm(x) over C without affine parameters: (x - mean) / sqrt(variance + eps).

    The kernels are fast for few channels: a program has many rows, where torch's CUDA kernel has one.

    Args:
        x: [T, C], fp16, bf16 or fp32 (the reference also fp64). Copied if its channels are not adjacent.
        eps: added to the variance.
        dtype: the dtype of the result, floating point; by default that of x. Statistics are fp32.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [T, C], contiguous, in `dtype`. Gradients flow to x; the kernels have no second derivatives.

    Examples:
        >>> hstu_sparse.layer_norm(torch.tensor([[1.0, 3.0], [5.0, 1.0]]))
        tensor([[-1.0000,  1.0000],
                [ 1.0000, -1.0000]])

    Raises:
        TypeError, ValueError: with the expected and the actual value.
    """
    eps, backend, _ = check_input(x, eps, backend, "layer_norm")
    check_dtype(dtype)
    if backend == "reference":
        return norm_gate_reference(x, None, eps=eps, dropout=0.0, dtype=dtype)
    check_sizes(x=x)
    return norm_gate_operator(x, None, None, eps, 0.0, dtype)


def check_input(x, eps, backend, op) -> tuple[float, str, dict[str, int]]:
    """Return (eps as a float, the backend, letter -> size) for x [T, C]."""
    sizes: dict[str, int] = {}
    check_tensor("x", x, "T C", sizes)
    if not sizes["C"]:
        raise ValueError("x must be [T, C] with C > 0, got C=0")
    return check_number("eps", eps, above=0.0), choose_backend(backend, x, op), sizes


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise TypeError unless `dtype` is None or floating point."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be floating point, got {dtype!r}")


def norm_gate_reference(
    x: torch.Tensor, u: torch.Tensor | None, *, eps: float, dropout: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Compute dropout(LayerNorm(x) * u), or LayerNorm(x) without u: [T, C] in `dtype`, by default that of x * u."""
    dtype = dtype or (x.dtype if u is None else torch.promote_types(x.dtype, u.dtype))
    x, u = widened(x, u)
    normed = F.layer_norm(x, x.shape[-1:], eps=eps)
    gated = normed if u is None else normed * u
    return (F.dropout(gated, dropout) if dropout else gated).to(dtype).contiguous()


@triton.jit
def load_fp32(base, row, column, stride, inside):
    """Load rows as fp32; 0 where not `inside`."""
    return tl.load(base + row.to(tl.int64) * stride + column, inside, 0.0).to(tl.float32)


@triton.jit
def _normalise(x, column, eps, C: tl.constexpr):
    """Return (normalised rows, 1 / sqrt(variance + eps) [ROWS, 1]); x and the rows are 0 from column C on."""
    mean = tl.sum(x, 1, keep_dims=True) / C
    centred = tl.where(column < C, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) / C + eps)
    return centred * rstd, rstd


# Not specialised on T, which varies, nor on the alignment of the seed, which may be an element of a tensor.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["seed"])
def norm_gate_fwd_kernel(
    x, u, out, x_stride_t, u_stride_t, tokens, eps, seed, dropout,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of the output, without gate if u is None, without dropout if seed is None."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_C)[None, :]
    inside = (row < tokens) & (column < C)
    y, _ = _normalise(load_fp32(x, row, column, x_stride_t, inside), column, eps, C)
    if u is not None:
        y *= load_fp32(u, row, column, u_stride_t, inside)
    if seed is not None:
        y = drop(y, seed, row, dropout, ROWS, BLOCK_C)
    tl.store(out + row.to(tl.int64) * C + column, y, inside)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["seed"])
def norm_gate_bwd_kernel(
    grad, x, u, more_grad, dx, du, grad_stride_t, x_stride_t, u_stride_t, more_stride_t, tokens, eps, seed, dropout,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of the gradients of x and u (or None). more_grad: another gradient of x to add, or None."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_C)[None, :]
    inside = (row < tokens) & (column < C)
    h = load_fp32(grad, row, column, grad_stride_t, inside)
    y, rstd = _normalise(load_fp32(x, row, column, x_stride_t, inside), column, eps, C)
    target = row.to(tl.int64) * C + column
    if seed is not None:
        h = drop(h, seed, row, dropout, ROWS, BLOCK_C)
    if u is not None:
        tl.store(du + target, h * y, inside)
        h *= load_fp32(u, row, column, u_stride_t, inside)
    mean = tl.sum(h, 1, keep_dims=True) / C
    along = tl.sum(h * y, 1, keep_dims=True) / C
    total = (h - mean - y * along) * rstd
    if more_grad is not None:
        total += load_fp32(more_grad, row, column, more_stride_t, inside)
    tl.store(dx + target, total, inside)


@functools.cache
def rows_config(channels: int) -> LaunchConfig:
    """Return the configuration of the kernels for C channels, with ROWS rows for each program."""
    width = max(4, next_power_of_2(channels))
    # With fused multiply-add, h = g u in h - mean(h) would not be rounded as in the mean: for one channel the
    # difference would not be 0.
    warps, rows = max(4, width // 512), max(1, TILE // width)
    return LaunchConfig(warps, C=channels, ROWS=rows, BLOCK_C=width, enable_fp_fusion=False)


def stride(x: torch.Tensor | None) -> int:
    """Return the stride of the rows; 0 for None."""
    return 0 if x is None else x.stride(0)


def _result(x, u, dtype):
    return dtype or (x.dtype if u is None or u.dtype == x.dtype else torch.promote_types(x.dtype, u.dtype))


def _forward(x, u, seed, eps, dropout, dtype):
    tokens, channels = x.shape
    x, u = as_rows(x, u, align=False)
    dtype = _result(x, u, dtype)
    out = torch.empty((tokens, channels), dtype=dtype, device=x.device)
    if tokens:
        if not dropout:
            seed = None
        config = rows_config(channels)
        run(
            norm_gate_fwd_kernel, cdiv(tokens, config.ROWS), x, u, out, stride(x), stride(u), tokens, eps, seed,
            dropout, **config,
        )  # fmt: skip
    return out


def _backward(grad, x, u, seed, eps, dropout, _):
    """Return [dx, du], or [dx] if u is None."""
    return norm_gate_gradients(grad, x, u, None, seed, eps, dropout)


def norm_gate_gradients(grad, x, u, more_grad, seed, eps, dropout):
    """Return [dx + more_grad, du], or [dx + more_grad] if u is None. more_grad: [T, C] or None."""
    tokens, channels = x.shape
    grad, x, u, more_grad = as_rows(grad, x, u, more_grad, align=False)
    outputs = [torch.empty((tokens, channels), dtype=a.dtype, device=x.device) for a in (x, u) if a is not None]
    if tokens:
        if not dropout:
            seed = None
        config = rows_config(channels)
        run(
            norm_gate_bwd_kernel, cdiv(tokens, config.ROWS), grad, x, u, more_grad, outputs[0],
            None if u is None else outputs[1], stride(grad), stride(x), stride(u), stride(more_grad), tokens, eps, seed,
            dropout, **config,
        )  # fmt: skip
    return outputs


def _fake(x, u, seed, eps, dropout, dtype):
    return x.new_empty(x.shape, dtype=_result(x, u, dtype))


_SCHEMA = "Tensor x, Tensor? u, Tensor? seed, float eps, float dropout, ScalarType? dtype"
norm_gate_operator = Operator("norm_gate", _SCHEMA, _forward, _backward, _fake, "x u")


def check_sizes(**tensors: torch.Tensor | None) -> None:
    """Raise an error for dtypes and sizes of [T, C] tensors, one named x, that only the reference supports."""
    for name, x in tensors.items():
        if x is not None:
            check_kernel(name, x, {}, products=False)
    tokens, channels = tensors["x"].shape
    if channels > MAX_CHANNELS:
        raise ValueError(f"the kernels take C up to {MAX_CHANNELS}, got {channels}; use backend='reference'")
    if tokens >= 2**31:
        raise ValueError(f"the kernels take T below 2^31, got {tokens}; use backend='reference'")
