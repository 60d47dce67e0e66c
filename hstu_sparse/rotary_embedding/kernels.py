"""Define the rotation's kernel and launchers; backward is the inverse rotation.

Letters: T tokens of the batch, B sequences, H heads, D head size, n = D // 2 pairs of channels. One program rotates a
tile of tokens of one sequence, all heads, which share the angles.
"""

import torch
import triton
import triton.language as tl

from hstu_sparse.core.launch import next_power_of_2, run
from hstu_sparse.core.registration import Operator
from hstu_sparse.rotary_embedding.reference import split, turns_per_unit
from hstu_sparse.tiles.rows import locate

TILE = 2048  # angles of a program


@triton.jit
def _turned(units, turns, SIGN: tl.constexpr):
    """Return (cos, sin) of units * turns whole turns; units int64, turns fp64."""
    turned = units.to(tl.float64) * turns
    angle = (turned - tl.floor(turned)).to(tl.float32) * 6.283185307179586
    return tl.cos(angle), SIGN * tl.sin(angle)


@triton.jit(
    do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["seq_offsets", "times", "origins", "positions"]
)
def rotary_kernel(
    x, out, x_stride_t, x_stride_h, x_stride_d, seq_offsets, times, origins, positions, turns, num_seqs,
    H: tl.constexpr, D: tl.constexpr, BY_POSITION: tl.constexpr, SIGN: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS tokens of a sequence; the first BY_POSITION of the D // 2 pairs by position, the others by time."""
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
    cos, sin = _turned(units, tl.load(turns + pair, pair < D // 2, 0.0), SIGN)
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


def _rotate(x, seq_offsets, times, origins, positions, max_seq_len, position, sign) -> torch.Tensor:
    tokens, heads, size = x.shape
    by_position = split(size, position, times is not None)
    turns = turns_per_unit(size // 2, by_position, max_seq_len, x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        num_seqs, pairs = seq_offsets.shape[0] - 1, next_power_of_2(max(1, size // 2))
        rows = min(64, TILE // pairs)
        arguments = x, out, *x.stride(), seq_offsets, times, origins, positions, turns, num_seqs
        run(
            rotary_kernel, tokens // rows + num_seqs, *arguments, H=heads, D=size, BY_POSITION=by_position, SIGN=sign,
            ROWS=rows, PAIRS=pairs, num_warps=4,
        )  # fmt: skip
    return out


def _forward(*arguments):
    return _rotate(*arguments, sign=1)


def _backward(grad, x, *options):
    return [_rotate(grad, *options, sign=-1)]


rotary_operator = Operator(
    "rotary",
    "Tensor x, Tensor seq_offsets, Tensor? times, Tensor? origins, Tensor? positions, SymInt max_seq_len, "
    "bool position",
    forward=_forward,
    backward=_backward,
    fake=lambda x, *_: x.new_empty(x.shape),
    differentiable=("x",),
)
