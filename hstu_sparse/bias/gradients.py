"""Sum the gradients of the bias tables in kernels: pair by pair, or for a tile of ds, the gradients of the scores.

Letters: T tokens of the batch, N max_seq_len, H heads, V value head size; t and s: the positions of queries and keys in
their sequence. A tile is BLOCK_M queries by BLOCK_N keys.

Kernels add to memory atomically, either in fp32, whose last bits depend on the order of additions, or in fixed point:
int64 multiples of 1 / unit, whose sum is the same in any order (`add_to`, `fixed_point_unit`, `TableSums`).

Pair by pair (`add_to_tables`), for any pairs: one addition for each pair and table.

By tiles (`add_position`, `add_time`):
- EXACT, for fp16 and bf16 inputs: the terms are the integers round(ds * scale), of at most 21 bits. For fp32 inputs,
  which have more digits, and in the interpreter, terms and sums are fp32.
- Position table: sum the diagonals of a tile in the ring of sums.py or in registers (`add_diagonals`).
- Time table: one sum for each bucket edge of a narrow tile (buckets.py), one addition for each pair of other tiles; in
  the histogram of sums.py, or without assembly (ASM) in copies of the table in memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.bias import sums
from hstu_sparse.bias.buckets import ENTRY_EDGES, ENTRY_SHIFT, past_edge, relative_to_edge, relative_to_origin
from hstu_sparse.bias.scores import bias_position
from hstu_sparse.tiles.assembly import look_up
from hstu_sparse.tiles.rows import opaque, row_norms

# Twice the largest derivative of SiLU, 1.0998, with room for the rounding of tanh and of the products.
_MAX_SLOPE = tl.constexpr(2.25)
_TINY, _INFINITY = tl.constexpr(1e-30), tl.constexpr(float("inf"))


def fixed_point_unit(bound: torch.Tensor) -> torch.Tensor:
    """Return the unit of sums in fixed point: the largest fp32 power of two for which unit * bound is below 2^62.

    bound: an upper bound of the sum of the absolute values of the terms, of any shape. Where it is not finite, the unit
    is NaN, and so are the sums.
    """
    unit = torch.exp2((62 - bound.double().clamp(min=1e-30).log2()).floor().clamp(-100, 100)).float()
    return unit.where(bound.isfinite(), torch.nan)


class Sums(NamedTuple):
    """The memory of sums: fp32, or int64 multiples of 1 / `unit`."""

    pointer: torch.Tensor
    unit: torch.Tensor | None  # one fp32 number; None for fp32 sums

    @classmethod
    def zeros(cls, like: torch.Tensor, bound: torch.Tensor | None) -> "Sums":
        """Allocate sums in the shape of `like`. bound: see `fixed_point_unit`; None for fp32."""
        unit = None if bound is None else fixed_point_unit(bound)
        dtype = torch.float32 if unit is None else torch.int64
        return cls(torch.zeros(like.shape, dtype=dtype, device=like.device), unit)

    def total(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the sums as numbers of `dtype`."""
        return (self.pointer if self.unit is None else self.pointer.double() / self.unit.double()).to(dtype)


class TableGradients(NamedTuple):
    """The memory to which kernels add the gradients of the tables.

    position, time      [copies, positions or buckets], fp32 or int64; None for an absent table
    unit                the unit of int64 sums, one fp32 number; None for fp32 sums
    positions, buckets  the number of entries of a copy
    norms               the argument of `exact_scale`, if the terms are scaled to integers
    means_factor        the factor of `scale` for mean keys in the time table's histogram (bsa)
    """

    position: object = None
    time: object = None
    unit: object = None
    positions: object = 0
    buckets: object = 0
    norms: object = None
    means_factor: object = None


class TableSums:
    """Allocate the sums of `add_to_tables` and convert them to the gradients of the tables.

    position, time  [copies, entries] fp32, or int64 if deterministic; None for an absent table
    unit            the unit of int64 sums, a tensor of one fp32 number; None for fp32 sums

    Args:
        tables: the position table and the time table, None for an absent one.
        copies: the number of copies of each table, over which kernels spread their additions.
        deterministic: sum in fixed point.
        bound: returns the argument of `fixed_point_unit`; called only if deterministic.
        padding: the number of further entries of each copy, to which kernels may add zeros.
    """

    def __init__(
        self,
        tables: tuple[torch.Tensor | None, torch.Tensor | None],
        copies: tuple[int, int],
        deterministic: bool,
        bound: Callable[[], torch.Tensor],
        padding: int = 0,
    ):
        self.tables, self.unit = tables, None
        if deterministic and any(table is not None for table in tables):
            self.unit = fixed_point_unit(bound())
        dtype = torch.float32 if self.unit is None else torch.int64
        self.position, self.time = (
            None if table is None else torch.zeros(count, table.shape[0] + padding, dtype=dtype, device=table.device)
            for table, count in zip(tables, copies)
        )

    @property
    def arguments(self) -> TableGradients:
        """The argument of kernels."""
        sizes = (0 if x is None else x.shape[1] for x in (self.position, self.time))
        return TableGradients(self.position, self.time, self.unit, *sizes)

    def gradients(self, factor: float | torch.Tensor = 1.0) -> list[torch.Tensor]:
        """Return the gradients of the tables that are not None, times `factor`, in the dtypes of the tables."""
        gradients = []
        for table, copies in zip(self.tables, (self.position, self.time)):
            if table is not None:
                total = copies[:, : table.shape[0]].sum(0)
                total = total if self.unit is None else total.double() / self.unit.double()
                gradients.append((total * factor).to(table.dtype))
        return gradients


@triton.jit
def add_to(pointers, value, unit=None, mask=None):
    """Add `value` atomically: in fp32, or to int64 sums as round(value * unit[0]), or round(value) if unit is None."""
    if pointers.dtype.element_ty == tl.int64:
        if unit is not None:
            value *= tl.load(unit)
        value = tl.floor(value + 0.5).to(tl.int64)
    tl.atomic_add(pointers, value, mask=mask, sem="relaxed")


@triton.jit
def add_to_tables(
    gradients, value, distance, seen, bucket, copy=0, POSITION_COPIES: tl.constexpr = 1, TIME_COPIES: tl.constexpr = 1
):
    """Add `value`, the gradients of the scores of pairs, to the gradients of both tables.

    gradients: `TableGradients`. distance, seen: the arguments of `table_bias`; bucket: its second result. copy: selects
    a copy of each table, modulo the number of copies.
    """
    position, time = gradients.position, gradients.time
    if position is not None:
        position += (copy % POSITION_COPIES) * gradients.positions
    if time is not None:
        time += (copy % TIME_COPIES) * gradients.buckets
    if position is not None:
        add_to(position + distance, value, gradients.unit, seen & (distance < gradients.positions))
    if time is not None:
        add_to(time + bucket, value, gradients.unit, seen)


class Gradients(NamedTuple):
    """The sums of a program's tile; those of an absent table are not used.

    position, time  pointers to the sums in memory
    ring            the shared-memory address of the ring
    lane            `histogram_lane`
    scale           the factor of ds in memory and in the ring
    time_scale      the factor of ds in the histogram
    """

    position: tl.tensor
    time: tl.tensor
    ring: tl.tensor
    lane: tl.tensor
    scale: tl.tensor
    time_scale: tl.tensor


@triton.jit
def add_diagonals(grad, ds, first_row, start, length, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add the sum of ds [BLOCK_M, BLOCK_N] along each diagonal t - s = d to grad[d].

    Rotating row i by i turns diagonals into columns. A column has pieces of two diagonals, BLOCK_N apart: one above and
    one below the row in which the rotation wraps around.
    """
    REPEATS: tl.constexpr = BLOCK_M // BLOCK_N if BLOCK_M > BLOCK_N else 1
    row = tl.arange(0, BLOCK_M)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    rotated = tl.gather(ds, (row - column) & (BLOCK_N - 1), 1)
    wraps = (row & (BLOCK_N - 1)) < column
    above = tl.sum(tl.reshape(tl.where(wraps, 0.0, rotated), [REPEATS, BLOCK_M // REPEATS, BLOCK_N]), 1)
    below = tl.sum(tl.reshape(tl.where(wraps, rotated, 0.0), [REPEATS, BLOCK_M // REPEATS, BLOCK_N]), 1)
    distance = first_row - start + column + BLOCK_N * tl.arange(0, REPEATS)[:, None]
    add_to(grad + distance, above * scale, None, (distance >= 0) & (distance < length))
    distance -= BLOCK_N
    add_to(grad + distance, below * scale, None, (distance >= 0) & (distance < length))


@triton.jit
def _halves(x):
    """Return (x[:, :, ::2], x[:, :, 1::2]) of a tile of four dimensions."""
    pairs = tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2, x.shape[3]])
    return tl.split(tl.permute(pairs, [0, 1, 2, 4, 3]))


@triton.jit
def _add_blocks(cell, ds, to_exact, STEP: tl.constexpr):
    """Add ds [rows / 16, 8, blocks, 8] to the ring. cell: the address of the cell of the first value.

    Dimension 0 has stride 16 rows, dimension 2 has stride STEP columns.
    """
    # Add the offsets to pointers one by one, so that the compiler sees which cells are neighbours.
    cells = cell.to(tl.int64).to(tl.pointer_type(tl.int32))
    rows = 16 * tl.arange(0, ds.shape[0]).to(tl.int64)[:, None] + tl.arange(0, 8).to(tl.int64)[None, :]
    cells = cells + rows[:, :, None, None]
    cells = cells + -tl.arange(0, 8).to(tl.int64)[None, None, None, :]
    cells = cells + -STEP * tl.arange(0, ds.shape[2]).to(tl.int64)[None, None, :, None]
    sums.ring_add(cells.to(tl.int64).to(tl.int32), ds, to_exact)


@triton.jit
def _add_to_ring(cell, ds, to_exact):
    """Add the diagonals of ds [BLOCK_M, BLOCK_N] to the ring. cell: the address of the cell of ds[0, 0].

    The values at (m, n) and (m + 8, n + 8) have the same cell. In the layouts of wgmma and mma they are in the same
    thread, so that adding them first leaves 10 of 16 additions in shared memory (9 for 64 keys). The result is correct
    for any layout.
    """
    BLOCKS: tl.constexpr = ds.shape[1] // 8
    ROUNDS: tl.constexpr = 2 if BLOCKS == 4 else 3
    tl.static_assert(BLOCKS == 2**ROUNDS)
    parts = tl.reshape(ds, [ds.shape[0] // 16, 2, 8, BLOCKS, 8])
    upper, lower = tl.split(tl.permute(parts, [0, 2, 3, 4, 1]))
    # Column block i of the upper rows has the diagonals of column block i + 1 of the lower rows. Add the even upper
    # blocks to the odd lower ones, then repeat with the rest, whose blocks are twice as far apart.
    for step in tl.static_range(ROUNDS):
        upper, upper_left = _halves(upper)
        lower_left, lower = _halves(lower)
        _add_blocks(cell + 4 * (8 - 8 * 2**step), upper + lower, to_exact, 16 * 2**step)
        upper, lower = upper_left, lower_left
    _add_blocks(cell + 4 * 8, lower, to_exact, 0)
    _add_blocks(cell + 4 * (8 - 8 * BLOCKS), upper, to_exact, 0)


@triton.jit
def _add_column(gradients, ds, position, key_positions, s, length):
    """Add ds [BLOCK_M, BLOCK_N] of queries at the same position to the gradient of the position table."""
    column = tl.sum(ds, 0) * gradients.scale
    seen = (s < length) & (column != 0.0)
    add_to(gradients.position + tl.maximum(position - key_positions, 0), column, None, seen)


@triton.jit
def _add_diagonals(gradients, ring_low, ds, first_row, start, length, kind: tl.constexpr, EXACT: tl.constexpr):
    """Add the diagonals of ds to the gradient of the position table; return the ring's lowest distance."""
    BLOCK_M: tl.constexpr = ds.shape[0]
    BLOCK_N: tl.constexpr = ds.shape[1]
    if EXACT and kind.ASM:
        if first_row - start - (BLOCK_N - 1) < ring_low:  # the first tile, or the ring is full
            sums.barrier(length)
            last = tl.minimum(ring_low + sums.RING, length)
            sums.ring_flush(gradients.ring, gradients.position, ring_low, ring_low, last, length)
            sums.barrier(length)
            ring_low = first_row - start + BLOCK_M - sums.RING
        cell = sums.ring_lane(gradients.ring) + 4 * (first_row - start - ring_low)
        _add_to_ring(cell, ds, gradients.scale)
    else:
        add_diagonals(gradients.position, ds, first_row, start, length, gradients.scale, BLOCK_M, BLOCK_N)
    return ring_low


@triton.jit
def add_position(gradients, ring_low, ds, t, first_row, start, sequence, kind: tl.constexpr, EXACT: tl.constexpr):
    """Add a tile of ds to the gradient of the position table; return the ring's lowest distance.

    t: the queries [BLOCK_M] from `first_row` on; start: the first key.
    """
    BLOCK_M: tl.constexpr = ds.shape[0]
    BLOCK_N: tl.constexpr = ds.shape[1]
    s = start + tl.arange(0, BLOCK_N)
    along = ds
    if kind.HAS_TARGETS:
        # Candidates with the same index in their groups have the same position: sum columns, not diagonals.
        candidate = (t >= sequence.history)[:, None]
        if kind.GROUP > 1:
            keys = bias_position(s, sequence, kind)
            first = tl.maximum(first_row - sequence.history, 0)
            for i in range(kind.GROUP if kind.GROUP < BLOCK_M else BLOCK_M):
                in_group = (first + i) % kind.GROUP
                same_position = candidate & ((t - sequence.history) % kind.GROUP == in_group)[:, None]
                _add_column(
                    gradients, tl.where(same_position, ds, 0.0), sequence.history + in_group, keys, s, sequence.length
                )
        else:
            keys = tl.maximum(s, sequence.context - 1) if kind.HAS_CONTEXT else s
            _add_column(gradients, tl.where(candidate, ds, 0.0), sequence.history, keys, s, sequence.length)
        along = tl.where(candidate, 0.0, ds)
    if kind.HAS_CONTEXT:
        # Context tokens have the same position: sum rows, not diagonals. As queries they all add to entry 0.
        if (start < sequence.context) | (first_row < sequence.context):
            same_position = (t < sequence.context)[:, None] | (s < sequence.context)[None, :]
            row = tl.sum(tl.where(same_position, along, 0.0), 1) * gradients.scale
            distance = tl.maximum(t - (sequence.context - 1), 0)
            add_to(gradients.position + distance, row, None, (t < sequence.length) & (row != 0.0))
            along = tl.where(same_position, 0.0, along)
        # Later blocks of keys have only pairs with context. The ring requires descending distances.
        if start < first_row + BLOCK_M:
            ring_low = _add_diagonals(gradients, ring_low, along, first_row, start, sequence.length, kind, EXACT)
    else:
        ring_low = _add_diagonals(gradients, ring_low, along, first_row, start, sequence.length, kind, EXACT)
    return ring_low


@triton.jit
def _move_sum(gradients, bucket, ds, resident, streamed, origin, edge, ASM: tl.constexpr, EXACT: tl.constexpr):
    """Move the sum of ds at or past an edge from gradient[bucket - 1] of the time table to gradient[bucket]."""
    place = relative_to_edge(resident, origin, tl.load(edge), True)
    if ASM:
        sums.histogram_move_sum(gradients.lane, bucket, ds, place, streamed, gradients.time_scale, EXACT)
    else:
        total = tl.sum(ds * past_edge(place, streamed)) * gradients.scale
        add_to(gradients.time + bucket, total)
        add_to(gradients.time + bucket - 1, -total)


@triton.jit
def add_pair_times(gradients, ds, buckets, ASM: tl.constexpr, EXACT: tl.constexpr):
    """Add a tile of ds to the gradient of the time table, pair by pair. buckets: valid where ds is not 0."""
    if ASM:
        sums.histogram_add(gradients.lane, buckets, ds, gradients.time_scale, EXACT)
    else:
        add_to(gradients.time + buckets, ds * gradients.scale, None, ds != 0.0)


@triton.jit
def add_narrow_times(gradients, ds, entry, resident, keys, steps, ASM: tl.constexpr, EXACT: tl.constexpr):
    """Add a narrow tile of ds [BLOCK_M, BLOCK_N] to the gradient of the time table.

    entry: the plan's entry of the tile. resident: the time offsets of the queries [BLOCK_M, 1]. keys: a pointer to the
    time offsets of the keys. steps: a pointer to `bucket_starts`.
    """
    lowest = entry >> ENTRY_SHIFT
    edges = entry & ENTRY_EDGES
    if ASM:
        sums.histogram_add_sum(gradients.lane, lowest, ds, gradients.time_scale, EXACT)
    else:
        add_to(gradients.time + lowest, tl.sum(ds) * gradients.scale)
    if edges > 0:
        edge = steps + lowest
        origin = tl.load(keys).to(tl.int64)
        resident = opaque(resident)
        offsets = look_up(keys, tl.arange(0, ds.shape[1]).to(tl.int64)[None, :], ASM)
        streamed = relative_to_origin(offsets, origin.to(tl.int32), True)
        _move_sum(gradients, lowest + 1, ds, resident, streamed, origin, edge + 1, ASM, EXACT)
        if edges > 1:
            _move_sum(gradients, lowest + 2, ds, resident, streamed, origin, edge + 2, ASM, EXACT)
        if edges > 2:
            _move_sum(gradients, lowest + 3, ds, resident, streamed, origin, edge + 3, ASM, EXACT)
            _move_sum(gradients, lowest + 4, ds, resident, streamed, origin, edge + 4, ASM, EXACT)


@triton.jit
def add_time(
    gradients, ds, buckets, entry, start, bias, tile, MASKED: tl.constexpr, ASM: tl.constexpr, EXACT: tl.constexpr
):
    """Add a tile of ds, whose first key is `start`, to the gradient of the time table.

    buckets: the pairs' buckets, if MASKED; entry: the plan's entry, otherwise. tile: `TileBias`.
    """
    if MASKED:
        add_pair_times(gradients, ds, buckets, ASM, EXACT)
    else:
        add_narrow_times(gradients, ds, entry, tile.offset, tile.offsets + start, bias.steps, ASM, EXACT)


@triton.jit
def exact_scale(norms):
    """Return the factor that scales ds to at most MAX_TERM. norms: the result of `max_norms_kernel`."""
    return sums.MAX_TERM / (_MAX_SLOPE * tl.load(norms) * tl.load(norms + 1) + _TINY)


@triton.jit
def _update_max_norm(x, rows, inside, norm, H: tl.constexpr, V: tl.constexpr, PAD_V: tl.constexpr):
    """Update norm [1] to the maximum of itself and the norms of `rows` of x (`Rows`); the norm of NaN is infinity."""
    columns = tl.arange(0, PAD_V)
    pointers = x.pointer + (rows // H).to(tl.int64) * x.stride_t + (rows % H) * x.stride_h
    mask = inside[:, None] & (columns < V)[None, :]
    norms = row_norms(tl.load(pointers[:, None] + columns[None, :], mask, 0.0).to(tl.float32))
    tl.atomic_max(norm, tl.max(tl.where(norms == norms, norms, _INFINITY), 0), sem="relaxed")


@triton.jit(do_not_specialize=["total"])
def max_norms_kernel(v, do, norms, total, H: tl.constexpr, V: tl.constexpr, PAD_V: tl.constexpr, BLOCK: tl.constexpr):
    """Compute norms [2], initially 0: the largest norm of the rows of v, and of do. Their product bounds every v.do."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _update_max_norm(v, rows, rows < total * H, norms, H, V, PAD_V)
    _update_max_norm(do, rows, rows < total * H, norms + 1, H, V, PAD_V)


@triton.jit(do_not_specialize=["scale"])
def table_gradients_kernel(
    tables, position_grad, time_grad, scale, N: tl.constexpr, TIMES: tl.constexpr, ALL: tl.constexpr,
    TABLE: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convert the sums of `TableGradients` to the gradients of the tables.

    position [N] becomes position_grad. The first TIMES columns of time [COPIES, TABLE], summed, become the first
    entries of time_grad [ALL]; the others are 0. With norms, sums are integers and are multiplied by scale /
    `exact_scale`.
    """
    position, time, norms = tables.position, tables.time, tables.norms
    unit = 1.0
    if norms is not None:
        unit = scale / exact_scale(norms).to(tl.float64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if position is not None:
        tl.store(position_grad + i, (tl.load(position + i, i < N, 0) * unit).to(position_grad.dtype.element_ty), i < N)
    if time is not None:
        copies = tl.arange(0, COPIES)[:, None]
        total = tl.sum(tl.load(time + copies * TABLE + i[None, :], (i < TIMES)[None, :], 0), 0)
        tl.store(time_grad + i, (total * unit).to(time_grad.dtype.element_ty), i < ALL)
