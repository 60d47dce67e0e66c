"""Rotation of queries and keys by position and time: with it a score depends on how far apart two tokens are.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D head size, n = D // 2 pairs of channels.
"""

import functools
import math

import torch

from hstu_sparse.jagged import check_jagged, sequence_ids
from hstu_sparse.validation import check_kernel, check_tensor, choose_backend

# Periods of the pairs, in tokens from the first to N and in seconds from the first to the second (four years).
SHORTEST_POSITION = 4.0
SHORTEST_TIME, LONGEST_TIME = 60.0, 1.3e8


def rotary(
    x: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    *,
    times: torch.Tensor | None = None,
    origins: torch.Tensor | None = None,
    position: bool = True,
    positions: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """x with pairs of channels turned by angles that grow with the token's position and time.

    Channel i is paired with channel i + D // 2; an odd last channel stays. With position and times the first
    ceil(n / 2) of the n pairs turn by position and the others by time, else all by the one given. Pair i of m turns by

        position * 2 pi / (4 * (N / 4) ** (i / (m - 1)))
        (time - origin) * 2 pi / (60 * (1.3e8 / 60) ** (i / (m - 1)))    times in seconds

    (the first period where m is 1). Turns are counted in fp64, so that years of seconds lose nothing.

    Args:
        x: [T, H, D], fp16, bf16 or fp32 (the reference also fp64); any strides.
        seq_offsets: [B+1], int32 or int64, from 0 to T.
        max_seq_len: N, the longest period of positions.
        times: [T] int64, in seconds; absent, nothing turns by time. Queries take the times at which they ask, keys
            those of their events.
        origins: [B] int64, the time that counts as 0 in each sequence; absent, the first of its `times`. Queries and
            keys need the same for their difference to be that of their times.
        position: whether pairs turn by position.
        positions: [T] int64, where the tokens stand, for sequences of which x has parts; absent, they count from 0.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [T, H, D], contiguous, dtype of x. The gradient flows to x.

    Raises:
        TypeError, ValueError: what was expected and what came.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2; half-split pairs and the periods are this package's.
    """
    sizes: dict[str, int] = {}
    check_tensor("x", x, "T H D", sizes)
    if times is not None:
        check_tensor("times", times, "T", sizes, dtype=torch.int64)
    if positions is not None:
        check_tensor("positions", positions, "T", sizes, dtype=torch.int64, device=x.device)
    check_jagged(seq_offsets, max_seq_len, x=x, times=times)
    if origins is not None:
        sizes["B"] = seq_offsets.shape[0] - 1
        check_tensor("origins", origins, "B", sizes, dtype=torch.int64, device=x.device)
    if times is None and not position:
        raise ValueError("rotary needs position=True or times [T]")
    if choose_backend(backend, x, "rotary") == "reference":
        return rotary_reference(
            x, seq_offsets, max_seq_len, times=times, origins=origins, position=position, positions=positions
        )
    check_kernel("rotary", x, {"D": sizes["D"]})
    from hstu_sparse.rotary_kernel import rotary_operator

    if times is not None and origins is None:
        origins = _origins(times, seq_offsets)
    return rotary_operator(x, seq_offsets, times, origins, positions, max_seq_len, position)


def rotary_reference(
    x, seq_offsets, max_seq_len, *, times=None, origins=None, position=True, positions=None
) -> torch.Tensor:
    """Arguments and result as `rotary`, in plain PyTorch; differentiable."""
    tokens, _, size = x.shape
    n, sequence = size // 2, sequence_ids(seq_offsets, tokens)
    by_position = split(size, position, times is not None)
    if positions is None:
        positions = torch.arange(tokens, device=x.device) - seq_offsets.long()[sequence]
    units = positions.double()[:, None].expand(-1, n)
    if times is not None:
        origins = _origins(times, seq_offsets) if origins is None else origins
        elapsed = (times - origins[sequence]).double()[:, None]
        units = torch.where(torch.arange(n, device=x.device) < by_position, units, elapsed)
    turned = (units * turns_per_unit(n, by_position, max_seq_len, x.device)).frac()
    wide = torch.promote_types(x.dtype, torch.float32)
    angles = (turned * (2 * math.pi)).to(wide)[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = x.to(wide).split([n, n, size - 2 * n], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)


def split(head_size: int, position: bool, timed: bool) -> int:
    """How many of a head's pairs turn by position; the others turn by time."""
    pairs = head_size // 2
    return (pairs + 1) // 2 if position and timed else pairs if position else 0


@functools.lru_cache(maxsize=64)
def turns_per_unit(pairs: int, by_position: int, max_seq_len: int, device: torch.device) -> torch.Tensor:
    """[n] fp64: whole turns of each pair in one token or one second."""

    def turns(count, shortest, longest):
        return [1 / (shortest * (longest / shortest) ** (i / max(count - 1, 1))) for i in range(count)]

    found = turns(by_position, SHORTEST_POSITION, float(max_seq_len))
    found += turns(pairs - by_position, SHORTEST_TIME, LONGEST_TIME)
    return torch.tensor(found, dtype=torch.float64, device=device)


def _origins(times: torch.Tensor, seq_offsets: torch.Tensor) -> torch.Tensor:
    """[B]: the time of each sequence's first token; of an empty one, whatever stands there."""
    if not len(times):
        return times.new_zeros(seq_offsets.shape[0] - 1)
    return times[seq_offsets[:-1].long().clamp(max=len(times) - 1)]
