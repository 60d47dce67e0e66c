"""Define SiLU in parts: the public function, its validation, the choice of backend. Letters: T tokens, C channels."""

from collections.abc import Sequence

import torch

from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import check_int, check_kernel, check_tensor, choose_backend
from hstu_sparse.uvqk.reference import silu_parts_reference

PARTS = 4
MAX_SIZE = 4096


@without_autocast
def silu_parts(x: torch.Tensor, sizes: Sequence[int], *, backend: str = "auto") -> tuple[torch.Tensor, ...]:
    """Split SiLU(x) into four parts of columns: an HSTU layer does this with its product, whose parts are u, v, q and
    k.

    In Triton the parts are separate tensors, and one backward kernel writes the whole gradient from the four, which
    torch would concatenate first. Only x is saved.

    Args:
        x: [T, C], fp16, bf16 or fp32 (the reference also fp64).
        sizes: the sizes of the four parts, which sum up to C, each from 1 to 4,096.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        Four tensors [T, size] of x's dtype, in Triton contiguous. Gradients flow to x; the kernels have no second
        derivatives.

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
    check_kernel("silu_parts", x, {})
    from hstu_sparse.uvqk.kernels import silu_parts_operator

    return silu_parts_operator(x, *sizes)
