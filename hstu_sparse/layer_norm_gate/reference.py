"""Compute layer norm times a gate, with dropout, and the sum of a residual, in plain PyTorch: the specification.

Letters: T tokens of the batch, C channels.
"""

import torch
from torch.nn import functional as F

from hstu_sparse.core.precision import widened, working_dtype


def norm_gate_reference(
    x: torch.Tensor, u: torch.Tensor | None, *, eps: float, dropout: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Compute dropout(LayerNorm(x) * u), or LayerNorm(x) without u: [T, C]. torch's own generator draws the mask.

    dtype: dtype of the result; by default that of x * u.
    """
    dtype = dtype or (x.dtype if u is None else torch.promote_types(x.dtype, u.dtype))
    x, u = widened(x, u)
    normed = F.layer_norm(x, x.shape[-1:], eps=eps)
    gated = normed if u is None else normed * u
    return (F.dropout(gated, dropout) if dropout else gated).to(dtype).contiguous()


def residual_add_reference(x: torch.Tensor, added: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute x + added + bias in the dtype of x + added: [T, C]."""
    dtype = torch.promote_types(x.dtype, added.dtype)
    x, added = widened(x, added)
    total = x + added
    if bias is not None:
        total = total + bias.to(working_dtype(dtype))
    return total.to(dtype).contiguous()
