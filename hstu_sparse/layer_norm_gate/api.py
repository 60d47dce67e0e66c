"""Define layer norm without affine, alone, beside a residual or times a gate with dropout: the public functions.

They validate and choose the backend.

Letters: T tokens of the batch, C channels.
"""

import torch

from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.registration import takes_launcher
from hstu_sparse.core.validation import check_dropout, check_number, check_tensor, choose_backend
from hstu_sparse.layer_norm_gate.reference import norm_gate_reference, residual_add_reference


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

    The norm is over C, without affine parameters. In Triton there is one kernel each for forward and backward; only x,
    u and the seed are saved for the backward pass, which recomputes mean, scale and mask.

    Dropout retains element (t, c) with probability 1 - dropout and divides it by that. In Triton the mask is a function
    of (seed, t, c) alone (Philox 4x32, 10 rounds), so equal seeds give equal masks for any T and C: use another seed
    for every layer and step. The reference ignores `seed` and draws from torch's default generator, so that its mask
    differs.

    Args:
        x: [T, C], fp16, bf16 or fp32 (the reference also fp64). Rows need not be adjacent (a slice of a wider tensor is
            not copied); a tensor whose channels are not adjacent is copied.
        u: [T, C], its dtype may differ from x's; strides as x.
        eps: added to the variance.
        dropout: probability of zeroing, 0 <= dropout < 1; pass 0 in evaluation.
        seed: int64 tensor of one element on x's device, needed by the kernels when dropout > 0. Read on the device.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [T, C], contiguous, of the dtype that x * u has. Gradients flow to x and u; the kernels have no second
        derivatives.

    Examples:
        >>> x, u = torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 5.0]])
        >>> hstu_sparse.norm_gate(x, u)
        tensor([[-2.0000,  5.0000]])

    Raises:
        TypeError, ValueError: with the expected and the actual value.

    Source: Zhai et al., Actions Speak Louder than Words, ICML 2024, section 3, equation 3 (arXiv 2402.17152).
    """
    eps, backend, sizes = _check(x, eps, backend, "norm_gate")
    check_tensor("u", u, "T C", sizes, device=x.device)
    dropout = check_dropout(dropout)
    if backend == "reference":
        return norm_gate_reference(x, u, eps=eps, dropout=dropout)
    from hstu_sparse.layer_norm_gate.kernels import norm_gate_triton

    return norm_gate_triton(x, u, eps, dropout, seed)


@without_autocast
def layer_norm(
    x: torch.Tensor, *, eps: float = 1e-6, dtype: torch.dtype | None = None, backend: str = "auto"
) -> torch.Tensor:
    """Compute LayerNorm(x) over C without affine parameters: (x - mean) / sqrt(variance + eps), as torch does.

    It is for few channels: torch's CUDA kernel uses a block of threads for each row, these kernels a tile of many rows.

    Args:
        x: [T, C], fp16, bf16 or fp32 (the reference also fp64). Rows need not be adjacent, as for `norm_gate`.
        eps: added to the variance.
        dtype: dtype of the result, floating point; by default x's. Statistics are always fp32.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [T, C], contiguous, of that dtype. Gradients flow to x; the kernels have no second derivatives.

    Examples:
        >>> hstu_sparse.layer_norm(torch.tensor([[1.0, 3.0], [5.0, 1.0]]))
        tensor([[-1.0000,  1.0000],
                [ 1.0000, -1.0000]])

    Raises:
        TypeError, ValueError: with the expected and the actual value.
    """
    eps, backend, _ = _check(x, eps, backend, "layer_norm")
    _check_dtype(dtype)
    if backend == "reference":
        return norm_gate_reference(x, None, eps=eps, dropout=0.0, dtype=dtype)
    from hstu_sparse.layer_norm_gate.kernels import norm_gate_triton

    return norm_gate_triton(x, None, eps, 0.0, None, dtype)


@without_autocast
def residual_norm(
    x: torch.Tensor, *, eps: float = 1e-6, dtype: torch.dtype | None = None, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x, layer_norm(x)), for a block whose result is added to x again: in Triton one backward kernel adds up
    both gradients of x, which torch adds afterwards.

    Arguments and errors as `layer_norm`.

    Examples:
        >>> x, normed = hstu_sparse.residual_norm(torch.tensor([[1.0, 3.0]]))
        >>> normed
        tensor([[-1.0000,  1.0000]])
    """
    eps, backend, _ = _check(x, eps, backend, "residual_norm")
    _check_dtype(dtype)
    if backend == "reference" or torch.compiler.is_compiling() or not takes_launcher(x):
        return x, layer_norm(x, eps=eps, dtype=dtype, backend=backend)
    from hstu_sparse.layer_norm_gate.kernels import check_sizes
    from hstu_sparse.layer_norm_gate.residual import residual_norm_triton

    check_sizes(x=x)
    return residual_norm_triton(x, eps, dtype)


@without_autocast
def residual_add(
    x: torch.Tensor, added: torch.Tensor, bias: torch.Tensor | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """Compute x + added + bias, the end of a block: added is a product without its bias, usually of fewer bits than x.

    In Triton this is one kernel, and one backward kernel that gives `added` its gradient in its own dtype and sums up
    the bias's gradient at the same time, in a fixed order. The sum is fp32 for all dtypes.

    Args:
        x, added: [T, C], fp16, bf16 or fp32 (the reference also fp64). Rows need not be adjacent, as for `norm_gate`.
        bias: [C] of any floating dtype, or None.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [T, C], contiguous, of the dtype that x + added has. Gradients flow to all three; the kernels have no second
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
    from hstu_sparse.layer_norm_gate.kernels import check_sizes
    from hstu_sparse.layer_norm_gate.residual import residual_add_triton

    check_sizes(x=x, added=added)
    return residual_add_triton(x, added, bias)


def _check(x, eps, backend, op) -> tuple[float, str, dict[str, int]]:
    """Return eps as a float, the chosen backend, letter -> size."""
    sizes: dict[str, int] = {}
    check_tensor("x", x, "T C", sizes)
    if not sizes["C"]:
        raise ValueError("x must be [T, C] with C > 0, got C=0")
    return check_number("eps", eps, above=0.0), choose_backend(backend, x, op), sizes


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be floating point, got {dtype}")
