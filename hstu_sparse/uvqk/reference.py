"""Compute SiLU in parts, in plain PyTorch: the specification."""

import torch
from torch.nn import functional as F


def silu_parts_reference(x: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """Compute SiLU(x) [T, C], split into columns."""
    return F.silu(x).split(sizes, dim=-1)
