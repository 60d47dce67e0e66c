"""Compute tables of cos and sin for keys and queries that are rotated to their positions (RoPE)."""

import torch
from torch import Tensor

from hstu_sparse.core.registration import cached_constant


def cos_sin(base: float, half: int, first: int, step: int, count: int) -> Tensor:
    """Return [count, 2, half] fp32 on a CPU: cos and sin of the angles of positions first, first + step, ..."""
    position = first + step * torch.arange(count, dtype=torch.float64, device="cpu")
    angle = position[:, None] * base ** (-torch.arange(half, dtype=torch.float64, device="cpu") / half)
    return torch.stack((angle.cos(), angle.sin()), 1).float()


@cached_constant
def rope_table(base: float, half: int, first: int, step: int, count: int, device: torch.device) -> Tensor:
    """Return `cos_sin` on a device."""
    return cos_sin(base, half, first, step, count).to(device)
