"""Compute the input of a model: embeddings of tokens plus embeddings of positions, with dropout.

Letters: T tokens of the batch, B sequences, N positions, E embedding size.

Forward, and gradients of tokens: a program has a tile of consecutive tokens of a sequence (`locate`). Gradient of
positions: a program has a tile of positions and sums over every n-th sequence; if there are many sequences, several
programs share a tile, and their parts are summed afterwards.
"""

import functools

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from hstu_sparse.core import validation
from hstu_sparse.core.jagged import check_jagged, sequence_ids
from hstu_sparse.core.launch import LaunchConfig, cdiv, next_power_of_2, run
from hstu_sparse.core.precision import widened, without_autocast
from hstu_sparse.core.registration import Operator
from hstu_sparse.core.validation import (
    check_kernel,
    check_not_empty,
    check_number,
    check_seed,
    check_tensor,
    choose_backend,
)
from hstu_sparse.layer.norm_gate import check_dtype
from hstu_sparse.tiles.rows import drop, locate

MAX_SIZE = 4096


@without_autocast
def embed_inputs(
    rows: torch.Tensor,
    position: torch.Tensor,
    seq_offsets: torch.Tensor,
    *,
    scale: float = 1.0,
    num_targets: torch.Tensor | None = None,
    more: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute dropout(rows * scale + position[t] + more); t is the position of each token in its sequence.

    With `num_targets` the last m_b tokens of sequence b are candidates; all have the position of the first candidate.

    In Triton, forward is one kernel, and backward two, one for tokens and one for positions, whose parts torch adds up
    if there are several. They save only the inputs. Gradients are deterministic.

    Args:
        rows: [T, E], the embedding of each token, fp16, bf16 or fp32 (the reference also fp64).
        position: [N, E], the embedding of each position, floating point.
        seq_offsets: [B+1], int32 or int64, from 0 to T; no sequence is longer than N.
        scale: the factor of rows.
        num_targets: [B] int32 or int64, the number m_b of candidates at the end of each sequence; None for none.
        more: [T, E], added to the result, or None.
        dropout, seed: see `norm_gate`.
        dtype: the dtype of the result, floating point; by default that of rows + position (+ more).
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [T, E], contiguous, in `dtype`. Gradients flow to rows, position and more; the kernels have no second
        derivatives.

    Examples:
        >>> rows, position = torch.ones(3, 2), torch.tensor([[0.0, 0], [10, 20]])
        >>> hstu_sparse.embed_inputs(rows, position, torch.tensor([0, 1, 3]), scale=2.0)
        tensor([[ 2.,  2.],
                [ 2.,  2.],
                [12., 22.]])

    Raises:
        TypeError, ValueError: with the expected and the actual value. The kernels support E up to 4,096.
    """
    backend = choose_backend(backend, rows, "embed_inputs")
    sizes: dict[str, int] = {}
    check_tensor("rows", rows, "T E", sizes)
    check_tensor("position", position, "N E", sizes, device=rows.device)
    if more is not None:
        check_tensor("more", more, "T E", sizes, device=rows.device)
    check_not_empty(sizes, "E", "N")
    check_jagged(seq_offsets, sizes["N"], limit="the rows of position", rows=rows)
    validation.check_targets(num_targets, seq_offsets)
    scale, dropout = check_number("scale", scale), validation.check_fraction("dropout", dropout)
    check_dtype(dtype)
    if backend == "reference":
        return embed_inputs_reference(
            rows, position, seq_offsets, scale=scale, num_targets=num_targets, more=more, dropout=dropout,
            dtype=dtype,
        )  # fmt: skip
    check_kernel("embed_inputs", rows, {"E": sizes["E"]}, most=MAX_SIZE, products=False)
    if dropout:
        check_seed(seed, rows.device)
    return embed_inputs_operator(
        rows, position, seq_offsets, num_targets, more, seed if dropout else None, scale, dropout, dtype
    )


def embed_inputs_reference(
    rows, position, seq_offsets, *, scale, num_targets, more, dropout, dtype=None
) -> torch.Tensor:
    """Compute `embed_inputs` in plain PyTorch, with a dropout mask from torch's default generator."""
    tokens = torch.arange(rows.shape[0], device=rows.device)
    sequences = sequence_ids(seq_offsets, rows.shape[0])
    positions = tokens - seq_offsets[sequences]
    if num_targets is not None:
        positions = torch.minimum(positions, (seq_offsets.diff() - num_targets)[sequences])
    dtype = _result(rows, position, more, dtype)
    rows, position, more = widened(rows, position, more)
    x = rows * scale + position.index_select(0, positions)
    if more is not None:
        x = x + more
    return (F.dropout(x, dropout) if dropout else x).to(dtype).contiguous()


TILE = 2048  # elements of a program's tile
# For the gradient of positions: the minimum number of sequences of a program, the maximum number of programs of a tile.
_MIN_SEQUENCES, _MAX_SHARING = 8, 16


@triton.jit
def _tile(seq_offsets, num_targets, B, E: tl.constexpr, PAD_E: tl.constexpr, ROWS: tl.constexpr):
    """Return (tokens [ROWS, 1], positions [ROWS, 1], channels [1, PAD_E], mask) of a program's tile."""
    b, start, length, tile = locate(seq_offsets, tl.program_id(0), B, ROWS)
    place = tile * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PAD_E)[None, :]
    token, inside = start + place, (place < length) & (column < E)
    if num_targets is not None:
        place = tl.minimum(place, length - tl.load(num_targets + b).to(tl.int32))
    return token, place, column, inside


@triton.jit(do_not_specialize=["B", "N", "scale", "dropout"], do_not_specialize_on_alignment=["seed", "num_targets"])
def embed_inputs_fwd_kernel(
    rows, position, seq_offsets, num_targets, more, seed, out, scale, dropout, B, N, E: tl.constexpr,
    PAD_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the output for a tile of tokens."""
    token, place, column, inside = _tile(seq_offsets, num_targets, B, E, PAD_E, ROWS)
    at = token * E + column
    x = tl.load(rows + at, inside, 0.0).to(tl.float32) * scale
    x += tl.load(position + place * E + column, inside & (place < N), 0.0).to(tl.float32)
    if more is not None:
        x += tl.load(more + at, inside, 0.0).to(tl.float32)
    if seed is not None:
        x = drop(x, seed, token.to(tl.int32), dropout, ROWS, PAD_E)
    tl.store(out + at, x.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["B", "scale", "dropout"], do_not_specialize_on_alignment=["seed", "num_targets"])
def embed_inputs_bwd_rows_kernel(
    grad, seq_offsets, seed, drows, dmore, scale, dropout, B, E: tl.constexpr, PAD_E: tl.constexpr, ROWS: tl.constexpr
):
    """Compute the gradients of rows and more (or None) for a tile of tokens."""
    token, _place, column, inside = _tile(seq_offsets, None, B, E, PAD_E, ROWS)
    at = token * E + column
    x = tl.load(grad + at, inside, 0.0).to(tl.float32)
    if seed is not None:
        x = drop(x, seed, token.to(tl.int32), dropout, ROWS, PAD_E)
    tl.store(drows + at, (x * scale).to(drows.dtype.element_ty), inside)
    if dmore is not None:
        tl.store(dmore + at, x.to(dmore.dtype.element_ty), inside)


@triton.jit
def _gradient(grad, seed, token, inside, dropout, E: tl.constexpr, PAD_E: tl.constexpr, ROWS: tl.constexpr):
    """Return the gradient [ROWS, PAD_E] of the tokens [ROWS, 1] before dropout."""
    column = tl.arange(0, PAD_E)[None, :]
    x = tl.load(grad + token * E + column, inside, 0.0).to(tl.float32)
    if seed is not None:
        x = drop(x, seed, token.to(tl.int32), dropout, ROWS, PAD_E)
    return x


@triton.jit(do_not_specialize=["B", "N", "sharing", "dropout"], do_not_specialize_on_alignment=["seed", "num_targets"])
def embed_inputs_bwd_position_kernel(
    grad, seq_offsets, num_targets, seed, parts, dropout, B, N, sharing, E: tl.constexpr, PAD_E: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute parts [sharing, N, E] for a tile of positions: sums over every `sharing`-th sequence."""
    first = tl.program_id(0) // sharing * ROWS
    share = tl.program_id(0) % sharing
    place = first + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PAD_E)[None, :]
    total = tl.zeros([ROWS, PAD_E], tl.float32)
    for b in range(share, B, sharing):
        start = tl.load(seq_offsets + b).to(tl.int64)
        length = (tl.load(seq_offsets + b + 1) - start).to(tl.int32)
        history = length
        if num_targets is not None:
            history -= tl.load(num_targets + b).to(tl.int32)
        if first < history:
            total += _gradient(grad, seed, start + place, (place < history) & (column < E), dropout, E, PAD_E, ROWS)
        if num_targets is not None:  # noqa: SIM102  known to the compiler
            if (history >= first) & (history < first + ROWS):
                for begin in range(history, length, ROWS):
                    candidate = begin + tl.arange(0, ROWS)[:, None]
                    inside = (candidate < length) & (column < E)
                    x = _gradient(grad, seed, start + candidate, inside, dropout, E, PAD_E, ROWS)
                    total += tl.where(place == history, tl.sum(x, 0)[None, :], 0.0)
    at = (share * N + place).to(tl.int64) * E + column
    tl.store(parts + at, total, (place < N) & (column < E))


def _config(size: int) -> LaunchConfig:
    width = max(4, next_power_of_2(size))
    return LaunchConfig(max(4, width // 512), E=size, PAD_E=width, ROWS=max(1, TILE // width))


def _result(rows, position, more, dtype: torch.dtype | None) -> torch.dtype:
    """Return `dtype`, by default that of the sum."""
    return dtype or functools.reduce(torch.promote_types, (x.dtype for x in (rows, position, more) if x is not None))


def _forward(rows, position, seq_offsets, num_targets, more, seed, scale, dropout, dtype):
    out = torch.empty(rows.shape, dtype=_result(rows, position, more, dtype), device=rows.device)
    sequences, config = len(seq_offsets) - 1, _config(rows.shape[1])
    if len(rows):
        run(
            embed_inputs_fwd_kernel, len(rows) // config.ROWS + sequences,
            rows.contiguous(), position.contiguous(), seq_offsets, num_targets,
            None if more is None else more.contiguous(), seed, out, scale, dropout, sequences, len(position), **config,
        )  # fmt: skip
    return out


def _backward(grad, rows, position, seq_offsets, num_targets, more, seed, scale, dropout, _):
    """Return the gradients of rows, position and, unless it is None, more."""
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
    sharing = max(1, min(_MAX_SHARING, sequences // _MIN_SEQUENCES))
    direct = sharing == 1 and position.dtype == torch.float32
    parts = dposition if direct else torch.empty(sharing, *position.shape, dtype=torch.float32, device=grad.device)
    run(
        embed_inputs_bwd_position_kernel, cdiv(len(position), config.ROWS) * sharing, grad, seq_offsets,
        num_targets, seed, parts, dropout, sequences, len(position), sharing, **config,
    )  # fmt: skip
    return [drows, dposition if direct else parts.sum(0).to(position.dtype), *dmore]


def _fake(rows, position, seq_offsets, num_targets, more, seed, scale, dropout, dtype):
    return rows.new_empty(rows.shape, dtype=_result(rows, position, more, dtype))


_SCHEMA = (
    "Tensor rows, Tensor position, Tensor seq_offsets, Tensor? num_targets, Tensor? more, Tensor? seed, float scale, "
    "float dropout, ScalarType? dtype"
)
embed_inputs_operator = Operator("embed_inputs", _SCHEMA, _forward, _backward, _fake, "rows position more")
