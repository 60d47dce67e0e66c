"""Rotate queries and keys by position and time (RoPE), so that scores depend on the distance of two tokens.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D head size, n = D // 2 pairs of channels.

A program rotates a tile of tokens of one sequence in all heads, which share the angles. Backward is the inverse
rotation.
"""

import math

import torch
import triton
import triton.language as tl

from hstu_sparse.core.jagged import check_jagged, sequence_ids
from hstu_sparse.core.launch import next_power_of_2, run
from hstu_sparse.core.precision import without_autocast, working_dtype
from hstu_sparse.core.registration import Operator, cached_constant
from hstu_sparse.core.validation import check_bool, check_kernel, check_tensor, choose_backend
from hstu_sparse.tiles.rows import locate


@without_autocast
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
    """Rotate pairs of channels of x by angles that are proportional to the token's position or time.

    Channel i is paired with channel i + D // 2; an odd last channel is unchanged. With position and times the first
    ceil(n / 2) of the n pairs rotate by position and the others by time. Otherwise all rotate by position, or by time.
    Pair i of m rotates by

        position * 2 pi / (4 * (N / 4) ** (i / (m - 1)))
        (time - origin) * 2 pi / (60 * (1.3e8 / 60) ** (i / (m - 1)))    times in seconds

    or, if m is 1, with the period of i = 0. Rotations are computed in fp64, so that years of seconds lose no precision.

    Args:
        x: [T, H, D], fp16, bf16 or fp32 (the reference also fp64); any strides.
        seq_offsets: [B+1], int32 or int64, from 0 to T.
        max_seq_len: N, the longest period of positions.
        times: [T] int64, in seconds: query times for queries, times of events for keys. None for no rotation by time.
        origins: [B] int64, the time that is subtracted in each sequence; by default the time of its first token. It
            must be the same for queries and keys.
        position: whether pairs rotate by position.
        positions: [T] int64, the positions of the tokens; by default 0, 1, ... in each sequence.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [T, H, D], contiguous, dtype of x. The gradient flows to x.

    Examples:
        >>> x, seq_offsets = torch.ones(3, 1, 4), torch.tensor([0, 3])
        >>> y = hstu_sparse.rotary(x, seq_offsets, max_seq_len=16)
        >>> torch.equal(y[0], x[0]), y.norm(dim=-1).flatten().round()  # position 0 is unchanged, norms are preserved
        (True, tensor([2., 2., 2.]))

    Raises:
        TypeError, ValueError: with the expected and the actual value.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2, with other pairs and periods.
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
    check_bool("position", position)
    if times is None and not position:
        raise ValueError("rotary needs position=True or times [T]")
    if choose_backend(backend, x, "rotary") == "reference":
        return rotary_reference(
            x, seq_offsets, max_seq_len, times=times, origins=origins, position=position, positions=positions
        )
    check_kernel("rotary", x, {"D": sizes["D"]}, products=False)
    if times is not None and origins is None:
        origins = first_times(times, seq_offsets)
    return rotary_operator(x, seq_offsets, times, origins, positions, max_seq_len, position)


# Periods of the pairs: from SHORTEST_POSITION to N tokens, from SHORTEST_TIME to LONGEST_TIME (four years) seconds.
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
    rotations = (units * frequencies_of_pairs(n, by_position, max_seq_len, x.device)).frac()
    wide = working_dtype(x.dtype)
    angles = (rotations * (2 * math.pi)).to(wide)[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second, unpaired = x.to(wide).split([n, n, size - 2 * n], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, unpaired], -1).to(x.dtype)


def split(head_size: int, position: bool, timed: bool) -> int:
    """Return the number of pairs of a head that rotate by position; the others rotate by time."""
    pairs = head_size // 2
    return (pairs + 1) // 2 if position and timed else pairs if position else 0


@cached_constant
def frequencies_of_pairs(pairs: int, by_position: int, max_seq_len: int, device: torch.device) -> torch.Tensor:
    """Return the frequencies of the pairs, [n] fp64: rotations for each token or second."""

    def frequencies_of_periods(count, shortest, longest):
        return [1 / (shortest * (longest / shortest) ** (i / max(count - 1, 1))) for i in range(count)]

    frequencies = frequencies_of_periods(by_position, SHORTEST_POSITION, float(max_seq_len))
    frequencies += frequencies_of_periods(pairs - by_position, SHORTEST_TIME, LONGEST_TIME)
    return torch.tensor(frequencies, dtype=torch.float64, device=device)


def first_times(times: torch.Tensor, seq_offsets: torch.Tensor) -> torch.Tensor:
    """Return the time of the first token of each sequence, [B]; arbitrary for an empty sequence."""
    if not len(times):
        return times.new_zeros(seq_offsets.shape[0] - 1)
    return times[seq_offsets[:-1].long().clamp(max=len(times) - 1)]


TILE = 2048  # angles of a program


@triton.jit
def _cos_sin(units, frequencies, SIGN: tl.constexpr):
    """Return (cos, sin) of the angles 2 pi * units * frequencies; units int64, frequencies fp64."""
    rotations = units.to(tl.float64) * frequencies
    angle = (rotations - tl.floor(rotations)).to(tl.float32) * 6.283185307179586
    return tl.cos(angle), SIGN * tl.sin(angle)


@triton.jit(
    do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["seq_offsets", "times", "origins", "positions"]
)
def rotary_kernel(
    x, out, x_stride_t, x_stride_h, x_stride_d, seq_offsets, times, origins, positions, frequencies, num_seqs,
    H: tl.constexpr, D: tl.constexpr, BY_POSITION: tl.constexpr, SIGN: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS tokens of a sequence: the first BY_POSITION of the D // 2 pairs by position, the others by time."""
    b, start, length, tile = locate(seq_offsets, tl.program_id(0), num_seqs, ROWS)
    if tile * ROWS >= length:
        return
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (row < length) & (pair < D // 2)
    token = start + row
    position = row.to(tl.int64)
    if positions is not None:
        position = tl.load(positions + token, row < length, 0)
    units = position + tl.zeros([ROWS, PAIRS], tl.int64)
    if times is not None:
        elapsed = tl.load(times + token, row < length, 0) - tl.load(origins + b)
        units = tl.where(pair < BY_POSITION, units, elapsed)
    cos, sin = _cos_sin(units, tl.load(frequencies + pair, pair < D // 2, 0.0), SIGN)
    x += token * x_stride_t
    out += token * (H * D)
    for head in range(H):
        source, target = x + head * x_stride_h, out + head * D
        first = tl.load(source + pair * x_stride_d, inside, 0.0).to(tl.float32)
        second = tl.load(source + (pair + D // 2) * x_stride_d, inside, 0.0).to(tl.float32)
        tl.store(target + pair, first * cos - second * sin, inside)
        tl.store(target + pair + D // 2, second * cos + first * sin, inside)
        if D % 2:
            last = tl.load(source + (D - 1) * x_stride_d, row < length, 0.0)
            tl.store(target + D - 1, last, row < length)


def rotated(
    x: torch.Tensor,
    seq_offsets: torch.Tensor,
    frequencies: torch.Tensor,
    by_position: int,
    *,
    times: torch.Tensor | None = None,
    origins: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    sign: int = 1,
) -> torch.Tensor:
    """Return x [T, H, D], rotated. frequencies: [D // 2] fp64, rotations of each pair for a token or a second.

    The first `by_position` pairs rotate by position, the others by time.
    """
    tokens, heads, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        num_seqs, pairs = seq_offsets.shape[0] - 1, next_power_of_2(max(1, size // 2))
        rows = min(64, TILE // pairs)
        arguments = x, out, *x.stride(), seq_offsets, times, origins, positions, frequencies, num_seqs
        run(
            rotary_kernel, tokens // rows + num_seqs, *arguments, H=heads, D=size, BY_POSITION=by_position, SIGN=sign,
            ROWS=rows, PAIRS=pairs, num_warps=4,
        )  # fmt: skip
    return out


def _rotate(x, seq_offsets, times, origins, positions, max_seq_len, position, sign) -> torch.Tensor:
    by_position = split(x.shape[2], position, times is not None)
    frequencies = frequencies_of_pairs(x.shape[2] // 2, by_position, max_seq_len, x.device)
    return rotated(
        x, seq_offsets, frequencies, by_position, times=times, origins=origins, positions=positions, sign=sign
    )


def _forward(*arguments):
    return _rotate(*arguments, sign=1)


def _backward(grad, x, *options):
    return [_rotate(grad, *options, sign=-1)]


_SCHEMA = (
    "Tensor x, Tensor seq_offsets, Tensor? times, Tensor? origins, Tensor? positions, SymInt max_seq_len, bool position"
)
rotary_operator = Operator("rotary", _SCHEMA, _forward, _backward, lambda x, *_: x.new_empty(x.shape), "x")
