"""Compute the rotation in plain PyTorch, and the pairs' periods, which the kernel reads too.

Letters: T tokens of the batch, B sequences, N max_seq_len, D head size, n = D // 2 pairs of channels.
"""

import functools
import math

import torch

from hstu_sparse.core.jagged import sequence_ids
from hstu_sparse.core.precision import working_dtype

# Periods of the pairs, in tokens from the first to N and in seconds from the first to the second (four years).
SHORTEST_POSITION = 4.0
SHORTEST_TIME, LONGEST_TIME = 60.0, 1.3e8


def rotary_reference(
    x, seq_offsets, max_seq_len, *, times=None, origins=None, position=True, positions=None
) -> torch.Tensor:
    """Compute `rotary` in plain PyTorch; differentiable."""
    tokens, _, size = x.shape
    n, sequence = size // 2, sequence_ids(seq_offsets, tokens)
    by_position = split(size, position, times is not None)
    if positions is None:
        positions = torch.arange(tokens, device=x.device) - seq_offsets.long()[sequence]
    units = positions.double()[:, None].expand(-1, n)
    if times is not None:
        origins = first_times(times, seq_offsets) if origins is None else origins
        elapsed = (times - origins[sequence]).double()[:, None]
        units = torch.where(torch.arange(n, device=x.device) < by_position, units, elapsed)
    turned = (units * turns_per_unit(n, by_position, max_seq_len, x.device)).frac()
    wide = working_dtype(x.dtype)
    angles = (turned * (2 * math.pi)).to(wide)[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second, unpaired = x.to(wide).split([n, n, size - 2 * n], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, unpaired], -1).to(x.dtype)


def split(head_size: int, position: bool, timed: bool) -> int:
    """Return how many of a head's pairs rotate by position; the others rotate by time."""
    pairs = head_size // 2
    return (pairs + 1) // 2 if position and timed else pairs if position else 0


@functools.lru_cache(maxsize=64)
def turns_per_unit(pairs: int, by_position: int, max_seq_len: int, device: torch.device) -> torch.Tensor:
    """Return [n] fp64: whole turns of each pair in one token or one second."""

    def turns(count, shortest, longest):
        return [1 / (shortest * (longest / shortest) ** (i / max(count - 1, 1))) for i in range(count)]

    frequencies = turns(by_position, SHORTEST_POSITION, float(max_seq_len))
    frequencies += turns(pairs - by_position, SHORTEST_TIME, LONGEST_TIME)
    return torch.tensor(frequencies, dtype=torch.float64, device=device)


def first_times(times: torch.Tensor, seq_offsets: torch.Tensor) -> torch.Tensor:
    """Return [B]: the time of each sequence's first token; arbitrary for an empty one."""
    if not len(times):
        return times.new_zeros(seq_offsets.shape[0] - 1)
    return times[seq_offsets[:-1].long().clamp(max=len(times) - 1)]
