"""Tables of cos and sin for keys and queries that are turned to their positions (RoPE)."""

import functools

import torch
from torch import Tensor

from hstu_sparse.pages.layout import TILE


def cos_sin(base: float, half: int, first: int, step: int, count: int) -> Tensor:
    """[count, 2, half] fp32 on a CPU: cos and sin of the angles of positions first, first + step, ..."""
    position = first + step * torch.arange(count, dtype=torch.float64)
    angle = position[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    return torch.stack((angle.cos(), angle.sin()), 1).float()


@functools.lru_cache(maxsize=16)
def rope_table(base: float, half: int, first: int, step: int, count: int, device: torch.device) -> Tensor:
    """`cos_sin` on a device."""
    return cos_sin(base, half, first, step, count).to(device)


@functools.lru_cache(maxsize=16)
def angle_table(base: float, half: int, count: int, device: torch.device) -> Tensor:
    """`cos_sin` of positions 0, 1, .. in fp16, as int32 pairs: [count, 2, half / 2]."""
    return cos_sin(base, half, 0, 1, count).half().view(torch.int32).to(device)


@functools.lru_cache(maxsize=16)
def angle_pairs(base: float, half: int, count: int, device: torch.device) -> Tensor:
    """As `angle_table`, [count, half], with what a thread of `few` takes side by side.

    Of each 16 angles it has for j = 0 .. 3 a pair of cos of angles 2j, 2j + 1, one of those 8 behind, and two of sin.
    """
    table = cos_sin(base, half, 0, 1, count).half().view(torch.int32).view(count, 2, half // 16, 2, 4)
    return table.permute(0, 2, 4, 1, 3).reshape(count, half).to(device)


@functools.lru_cache(maxsize=16)
def all_tables(base: float, half: int, count: int, paired: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """`rope_table` of positions in a tile, of tiles, and fp16 ones of every position."""
    near, far = rope_table(base, half, 0, 1, TILE, device), rope_table(base, half, 0, TILE, count, device)
    return near, far, (angle_pairs if paired else angle_table)(base, half, count * TILE, device)
