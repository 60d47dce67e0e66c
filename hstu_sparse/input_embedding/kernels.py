"""Define the Triton kernels and launchers of a model's input embedding. Letters: see api.py.

Forward and the tokens' gradients: a program has a tile of a sequence's tokens (`tiles.locate`), which have consecutive
positions. The positions' gradient: a program has a tile of positions and iterates over every n-th sequence; with many
sequences, several programs share a tile, and their parts are summed up afterwards.
"""

import torch
import triton
import triton.language as tl

from hstu_sparse.core.launch import LaunchConfig, cdiv, next_power_of_2, run
from hstu_sparse.core.registration import Operator
from hstu_sparse.tiles.rows import drop, locate

# Numbers of a program's tile.
TILE = 2048
# The least number of sequences of a program of the positions' gradient, and the greatest number of programs of a tile.
_WALKED, _SHARING = 8, 16


@triton.jit
def _own(seq_offsets, B, E: tl.constexpr, PAD_E: tl.constexpr, ROWS: tl.constexpr):
    """Return (tokens [ROWS, 1], their positions, channels [1, PAD_E], mask) of a program's tile."""
    _b, start, length, tile = locate(seq_offsets, tl.program_id(0), B, ROWS)
    place = tile * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PAD_E)[None, :]
    return start + place, place, column, (place < length) & (column < E)


@triton.jit(do_not_specialize=["B", "N", "scale", "dropout"], do_not_specialize_on_alignment=["seed"])
def embed_inputs_fwd_kernel(
    rows, position, seq_offsets, more, seed, out, scale, dropout, B, N, E: tl.constexpr, PAD_E: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of tokens: the sum of the given tensors, with dropout."""
    token, place, column, inside = _own(seq_offsets, B, E, PAD_E, ROWS)
    at = token * E + column
    x = tl.load(rows + at, inside, 0.0).to(tl.float32) * scale
    x += tl.load(position + place * E + column, inside & (place < N), 0.0).to(tl.float32)
    if more is not None:
        x += tl.load(more + at, inside, 0.0).to(tl.float32)
    if seed is not None:
        x = drop(x, seed, token.to(tl.int32), dropout, ROWS, PAD_E)
    tl.store(out + at, x.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["B", "scale", "dropout"], do_not_specialize_on_alignment=["seed"])
def embed_inputs_bwd_rows_kernel(
    grad, seq_offsets, seed, drows, dmore, scale, dropout, B, E: tl.constexpr, PAD_E: tl.constexpr, ROWS: tl.constexpr
):
    """Compute the gradients of rows and, if given, more for a tile of tokens."""
    token, _place, column, inside = _own(seq_offsets, B, E, PAD_E, ROWS)
    at = token * E + column
    x = tl.load(grad + at, inside, 0.0).to(tl.float32)
    if seed is not None:
        x = drop(x, seed, token.to(tl.int32), dropout, ROWS, PAD_E)
    tl.store(drows + at, (x * scale).to(drows.dtype.element_ty), inside)
    if dmore is not None:
        tl.store(dmore + at, x.to(dmore.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["B", "N", "sharing", "dropout"], do_not_specialize_on_alignment=["seed"])
def embed_inputs_bwd_position_kernel(
    grad, seq_offsets, seed, parts, dropout, B, N, sharing, E: tl.constexpr, PAD_E: tl.constexpr, ROWS: tl.constexpr
):
    """Compute parts [sharing, N, E]: the sums of a tile of positions over the sequences s, s + sharing, .., s <
    sharing.
    """
    first = tl.program_id(0) // sharing * ROWS
    share = tl.program_id(0) % sharing
    place = first + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PAD_E)[None, :]
    total = tl.zeros([ROWS, PAD_E], tl.float32)
    for b in range(share, B, sharing):
        start = tl.load(seq_offsets + b).to(tl.int64)
        length = (tl.load(seq_offsets + b + 1) - start).to(tl.int32)
        if first < length:
            token = start + place
            x = tl.load(grad + token * E + column, (place < length) & (column < E), 0.0).to(tl.float32)
            if seed is not None:
                x = drop(x, seed, token.to(tl.int32), dropout, ROWS, PAD_E)
            total += x
    at = (share * N + place).to(tl.int64) * E + column
    tl.store(parts + at, total, (place < N) & (column < E))


def _config(size: int) -> LaunchConfig:
    width = max(4, next_power_of_2(size))
    return LaunchConfig(max(4, width // 512), E=size, PAD_E=width, ROWS=max(1, TILE // width))


def _result(rows, position, more) -> torch.dtype:
    dtype = torch.promote_types(rows.dtype, position.dtype)
    return dtype if more is None else torch.promote_types(dtype, more.dtype)


def _forward(rows, position, seq_offsets, more, seed, scale, dropout):
    out = torch.empty(rows.shape, dtype=_result(rows, position, more), device=rows.device)
    sequences, config = len(seq_offsets) - 1, _config(rows.shape[1])
    if len(rows):
        run(
            embed_inputs_fwd_kernel, len(rows) // config.ROWS + sequences,
            rows.contiguous(), position.contiguous(), seq_offsets, None if more is None else more.contiguous(), seed,
            out, scale, dropout, sequences, len(position), **config,
        )  # fmt: skip
    return out


def _backward(grad, rows, position, seq_offsets, more, seed, scale, dropout):
    """Return the gradients of rows, position and, if given, more."""
    drows, dposition, *dmore = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (rows, position, more) if x is not None
    )
    if not len(rows):
        return [drows, dposition.zero_(), *dmore]
    grad, sequences, config = grad.contiguous(), len(seq_offsets) - 1, _config(rows.shape[1])
    run(
        embed_inputs_bwd_rows_kernel, len(rows) // config.ROWS + sequences, grad, seq_offsets, seed, drows,
        *(dmore or [None]), scale, dropout, sequences, **config,
    )  # fmt: skip
    sharing = max(1, min(_SHARING, sequences // _WALKED))
    direct = sharing == 1 and position.dtype == torch.float32
    parts = dposition if direct else torch.empty(sharing, *position.shape, dtype=torch.float32, device=grad.device)
    run(
        embed_inputs_bwd_position_kernel, cdiv(len(position), config.ROWS) * sharing, grad, seq_offsets, seed,
        parts, dropout, sequences, len(position), sharing, **config,
    )  # fmt: skip
    return [drows, dposition if direct else parts.sum(0).to(position.dtype), *dmore]


def _fake(rows, position, seq_offsets, more, *_):
    return rows.new_empty(rows.shape, dtype=_result(rows, position, more))


embed_inputs_operator = Operator(
    "embed_inputs",
    "Tensor rows, Tensor position, Tensor seq_offsets, Tensor? more, Tensor? seed, float scale, float dropout",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    differentiable=("rows", "position", "more"),
)
