"""Layer norm times a gate, with dropout, in plain PyTorch: the specification.

Letters: T tokens of the batch, C channels.
"""

import torch
from torch.nn import functional as F


def norm_gate_reference(x: torch.Tensor, u: torch.Tensor | None, *, eps: float, dropout: float) -> torch.Tensor:
    """dropout(LayerNorm(x) * u), or LayerNorm(x) without u: [T, C]. The keep mask is drawn by torch's own generator."""
    normed = F.layer_norm(x, x.shape[-1:], eps=eps)
    gated = normed if u is None else normed * u
    return F.dropout(gated, dropout) if dropout else gated
