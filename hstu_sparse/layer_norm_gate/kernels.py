"""Define the Triton kernels and launchers of layer norm times a gate, with dropout.

Letters: T tokens of the batch, C channels.

One program has a tile of whole rows, a few thousand elements, so that a row is read once and its statistics stay in
registers. The backward pass reads the rows too and recomputes the statistics: since only the inputs are saved, the
forward pass allocates only its output.

With y the normalised row, g the incoming gradient through the dropout and h = g u:
    du = g y,    dx = (h - mean(h) - y mean(h y)) / sqrt(variance + eps)
"""

import functools

import torch
import triton
import triton.language as tl

from hstu_sparse.core.launch import LaunchConfig, cdiv, next_power_of_2, run
from hstu_sparse.core.registration import Operator
from hstu_sparse.core.rows import as_rows
from hstu_sparse.core.validation import check_kernel, check_seed
from hstu_sparse.tiles.rows import drop

MAX_CHANNELS = 4096
TILE = 2048


@triton.jit
def _load(base, row, column, stride, inside):
    return tl.load(base + row.to(tl.int64) * stride + column, inside, 0.0).to(tl.float32)


@triton.jit
def _normalise(x, column, eps, C: tl.constexpr):
    """Return (normalised rows with zeros past C, 1 / sqrt(variance + eps) [ROWS, 1]) of rows with zeros past C."""
    mean = tl.sum(x, 1, keep_dims=True) / C
    centred = tl.where(column < C, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) / C + eps)
    return centred * rstd, rstd


# Kernels are not specialised on T, which varies by batch, nor on the seed's alignment: it may be an element of a tensor
# with the seeds of all layers.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["seed"])
def norm_gate_fwd_kernel(
    x, u, out, x_stride_t, u_stride_t, tokens, eps, seed, dropout,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of the output; no gate without u, no dropout without seed."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_C)[None, :]
    inside = (row < tokens) & (column < C)
    y, _ = _normalise(_load(x, row, column, x_stride_t, inside), column, eps, C)
    if u is not None:
        y *= _load(u, row, column, u_stride_t, inside)
    if seed is not None:
        y = drop(y, seed, row, dropout, ROWS, BLOCK_C)
    tl.store(out + row.to(tl.int64) * C + column, y, inside)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["seed"])
def norm_gate_bwd_kernel(
    grad, x, u, more_grad, dx, du, grad_stride_t, x_stride_t, u_stride_t, more_stride_t, tokens, eps, seed, dropout,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of the gradients of x and, if given, u. more_grad: another gradient of x to add."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_C)[None, :]
    inside = (row < tokens) & (column < C)
    h = _load(grad, row, column, grad_stride_t, inside)
    y, rstd = _normalise(_load(x, row, column, x_stride_t, inside), column, eps, C)
    target = row.to(tl.int64) * C + column
    if seed is not None:
        h = drop(h, seed, row, dropout, ROWS, BLOCK_C)
    if u is not None:
        tl.store(du + target, h * y, inside)
        h *= _load(u, row, column, u_stride_t, inside)
    mean = tl.sum(h, 1, keep_dims=True) / C
    along = tl.sum(h * y, 1, keep_dims=True) / C
    total = (h - mean - y * along) * rstd
    if more_grad is not None:
        total += _load(more_grad, row, column, more_stride_t, inside)
    tl.store(dx + target, total, inside)


@functools.cache
def rows_config(channels: int) -> LaunchConfig:
    """Return the configuration of the kernels for C channels: ROWS rows of a program."""
    width = max(4, next_power_of_2(channels))
    # Fused into h - mean(h), the product h = g u would not be rounded as in the mean: with one channel the difference
    # would not be 0.
    warps, rows = max(4, width // 512), max(1, TILE // width)
    return LaunchConfig(warps, C=channels, ROWS=rows, BLOCK_C=width, enable_fp_fusion=False)


def stride(x: torch.Tensor | None) -> int:
    """Return the elements between rows, for a missing tensor a default."""
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
    """Return [dx, du], or [dx] without u."""
    return _gradients(grad, x, u, None, seed, eps, dropout)


def _gradients(grad, x, u, more_grad, seed, eps, dropout):
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


norm_gate_operator = Operator(
    "norm_gate",
    "Tensor x, Tensor? u, Tensor? seed, float eps, float dropout, ScalarType? dtype",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    differentiable=("x", "u"),
)


def check_sizes(**tensors: torch.Tensor | None) -> None:
    """Check the sizes of [T, C] tensors, the first of them named x, that the kernels do not support but the reference
    does.
    """
    for name, x in tensors.items():
        if x is not None:
            check_kernel(name, x, {})
    tokens, channels = tensors["x"].shape
    if channels > MAX_CHANNELS:
        raise ValueError(f"the kernels take C up to {MAX_CHANNELS}, got {channels}; use backend='reference'")
    if tokens >= 2**31:
        raise ValueError(f"the kernels take T below 2^31, got {tokens}")


def norm_gate_triton(x, u, eps, dropout, seed, dtype=None):
    """Compute `hstu_sparse.norm_gate`, or without u `hstu_sparse.layer_norm`, on CUDA or interpreted."""
    check_sizes(x=x, u=u)
    if dropout:
        if seed is None:
            raise ValueError("dropout > 0 needs a seed: an int64 tensor of one element on x's device")
        check_seed(seed, x.device)
    return norm_gate_operator(x, u, seed, eps, dropout, dtype)
