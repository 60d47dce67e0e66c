"""The bias tables' gradients of one program, summed up in shared memory before they go to memory.

A program owns a tile of queries and meets keys that stand side by side, or mean keys, tile by tile. Letters: BM queries
and BN keys of a tile.

Position: of keys side by side the sums along the tile's diagonals, in cells of the ring (assembly.py). Tiles take turns
in two stretches of it: while one is added to, the one before goes to memory. Time: the histogram of assembly.py, first
of keys, then of mean keys, whose terms are greater.

Both hold integers: a program's terms times a scale that makes of the greatest that its queries' gradients and gates
allow one of 21 bits, less what keeps a cell's sum of all terms below 2^31. What leaves shared memory is fp32.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.bias.sums import (
    GREATEST_TERM,
    HISTOGRAM_ROWS,
    ROUNDING_BITS,
    STRETCH,
    barrier,
    histogram_add,
    histogram_add_sum,
    histogram_clear,
    histogram_close,
    histogram_lane,
    histogram_move_sum,
    histogram_open,
    ring_add,
    ring_lane,
    ring_open,
    stretch_take,
)
from hstu_sparse.bsa.bias import LANES
from hstu_sparse.bsa.bias_tiles import (
    differences,
    edge_place,
    edge_places,
    means_edge,
    near_place,
    reached,
    side_times,
)
from hstu_sparse.bsa.reach import MOST_EDGES, find_bucket
from hstu_sparse.tiles import opaque, row_norms

# SiLU's greatest slope, 1.0998, with room for roundings.
_STEEPEST = tl.constexpr(1.125)
_TINY, _INFINITY = tl.constexpr(1e-30), tl.constexpr(float("inf"))
# More than what squares too small for fp32 may hide of a row's norm.
_SMALL = tl.constexpr(1e-18)
_ROWS = tl.constexpr(HISTOGRAM_ROWS)
# Edges of a chosen block whose sums are moved one by one: of more it is quicker to look each pair's bucket up.
MOST_MOVED = tl.constexpr(2)
_WHOLE, _WHOLE_BITS = tl.constexpr(2.0**23), tl.constexpr(0x4B000000)


class ProgramSums(NamedTuple):
    """Where a program's sums are, and what scales them.

    ring, histogram  shared-memory addresses, 0 without the table
    copy, lane       of the thread's copy of the ring, and of the lane's cells of the histogram
    scale, unit      of a term in the ring, and 1 / scale
    means_scale      in the histogram, of a mean key
    keys_scale       of another
    turn             0 or 1, the stretch of the ring that the last tile was added to
    low              its least distance, t - s
    done             columns of that stretch's tile that were added
    bucket           where the time's sums of them belong, -1 where they were added pair by pair
    """

    ring: tl.tensor
    histogram: tl.tensor
    copy: tl.tensor
    lane: tl.tensor
    scale: tl.tensor
    unit: tl.tensor
    means_scale: tl.tensor
    keys_scale: tl.tensor
    turn: tl.tensor
    low: tl.tensor
    done: tl.tensor
    bucket: tl.tensor


@triton.jit
def open_sums(bias, upstream, norm, cmp, slc, means_unit, keys_unit):
    """Sums of nothing.

    upstream: the queries' [BM, BV]; norm: pointer to the greatest norm of a value; cmp, slc: [BM], the weight of mean
    keys and the greatest of any other; means_unit, keys_unit: what keeps the histogram's sums small enough.
    """
    ring, histogram, copy, lane = 0, 0, 0, 0
    most = _STEEPEST * tl.load(norm)
    upstream = upstream.to(tl.float32)
    squares = tl.sum(upstream * upstream, 1)
    others, means, greatest = _greatest(tl.sqrt(squares) + _SMALL, slc, cmp, squares)
    if (greatest > 1e30) | (greatest < 1e-24):  # squares that may have left fp32's range
        others, means, _ = _greatest(row_norms(upstream), slc, cmp, squares)
    scale = GREATEST_TERM / (others * most + _TINY)
    means_scale = means_unit * GREATEST_TERM / (means * most + _TINY)
    if bias.position is not None:
        ring = ring_open(0, True)
        copy = ring_lane(ring)
    if bias.time is not None:
        histogram = histogram_open(0, True)
        lane = histogram_lane(histogram, True)
    tl.debug_barrier()
    return ProgramSums(ring, histogram, copy, lane, scale, 1.0 / scale, means_scale, scale * keys_unit, 0, 0, 0, -1)


@triton.jit
def _greatest(rows, slc, cmp, squares):
    """The greatest of rows * |slc|, infinite if one is not a number, of rows * |cmp| and of the squares, at once."""
    others, means = rows * tl.abs(slc), rows * tl.abs(cmp)
    others, means = tl.where(others == others, others, _INFINITY), tl.where(means == means, means, _INFINITY)
    weighed, rest = tl.split(tl.max(tl.join(tl.join(others, means), tl.join(squares, squares)), 0))
    others, means = tl.split(weighed)
    greatest, _ = tl.split(rest)
    return others, means, greatest


@triton.jit
def add_means(sums, grad, bias, found, row, first, near, SEVERAL: tl.constexpr, ASM: tl.constexpr):
    """Adds a tile of mean keys to the time table's sums. found: what `means_time` gives; others: as of `means_tile`."""
    if bias.time is not None:
        means, queries, _, reaches = found
        if SEVERAL:
            bucket = find_bucket(differences(bias, means, queries, 1, False, ASM), bias.cells, ASM)
        else:
            # 0.0 or 1.0 to an integer: in the low bits of a number whose last bit is worth 1.
            past = reached(means_edge(bias, row, first, 2, grad.shape[1], ASM), near, 1)
            whole = past + (reaches[0].to(tl.float32) + _WHOLE)[None, :]
            bucket = whole.to(tl.int32, bitcast=True) - _WHOLE_BITS
        histogram_add(sums.lane, bucket, grad, sums.means_scale, True, True)


@triton.jit
def _move(sums, grad, bias, far, near, origin, lowest, bucket, E: tl.constexpr, ASM: tl.constexpr):
    place = edge_place(bias, far, origin, lowest + E, True, ASM)[:, None]
    histogram_move_sum(sums.lane, bucket + E, grad, place, near[None, :], sums.keys_scale, True, True)


@triton.jit
def _move_chosen(sums, grad, bias, edge, keys, origin, bucket, E: tl.constexpr, ASM: tl.constexpr):
    place, beside = edge_places(bias, edge, keys, origin, bucket, E, ASM)
    histogram_move_sum(sums.lane, bucket + E, grad, place[:, None], beside[None, :], sums.keys_scale, True, True)


@triton.jit
def add_keys(
    tables, sums, grad, gate, bias, far, near, origin, reaches, edge, EDGES: tl.constexpr, buckets, apart, part,
    SPAN: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The sums with a tile of keys that stand side by side and that all queries reach alike.

    gate: None, or [BM], what `grad` still is to be multiplied by. apart: how far the first key is behind the first
    query. part: where it stands in a span of SPAN keys, whose tiles follow each other and share a stretch of the ring.
    edge, EDGES: None, or of a chosen block's keys what `edge_places` wants, and how many edges they reach (2: or more).
    buckets: the pairs', of the own block and of chosen ones where EDGES is 2, else None. Others: as of `time_tile`,
    queries on the far side.
    """
    BM: tl.constexpr = grad.shape[0]
    BN: tl.constexpr = grad.shape[1]
    tl.static_assert(BM + SPAN - 1 <= STRETCH)
    turn, low, done, total = sums.turn, sums.low, sums.done, sums.bucket
    if bias.position is not None:
        if part == 0:
            barrier(apart)
            _flush(tables, sums, BM, SPAN)
            # Triton pipelines no loop that hands on a number as it is: hence `opaque`.
            turn, low = 1 - turn, opaque(apart - (SPAN - 1))
        base = sums.copy + 4 * (SPAN - 1 - part + turn * STRETCH)
        cell = (base + tl.arange(0, BM) * 4)[:, None] + (tl.arange(0, BN) * -4)[None, :]
        done, total = opaque(part + BN), opaque(tl.full([], -1, tl.int32))
        if EDGES is not None and bias.time is not None:
            total = opaque(reaches[2] if EDGES < 2 else tl.where(reaches[1] > MOST_MOVED, -1, reaches[2]))
        ring_add(cell, grad, sums.scale if gate is None else (sums.scale * gate)[:, None], True)
    if bias.time is not None:
        lowest, edges, bucket, _ = reaches
        if gate is not None:
            grad *= gate[:, None]
        if EDGES is None and buckets is not None:
            histogram_add(sums.lane, buckets, grad, sums.keys_scale, True, True)
        elif EDGES is not None:
            if EDGES < 2:
                if bias.position is None:
                    histogram_add_sum(sums.lane, bucket, grad, sums.keys_scale, True, True)
                if EDGES == 1:
                    _move_chosen(sums, grad, bias, edge, near, origin, bucket, 1, ASM)
            elif edges > MOST_MOVED:
                histogram_add(sums.lane, buckets, grad, sums.keys_scale, True, True)
            else:
                if bias.position is None:
                    histogram_add_sum(sums.lane, bucket, grad, sums.keys_scale, True, True)
                _move_chosen(sums, grad, bias, edge, near, origin, bucket, 1, ASM)
                _move_chosen(sums, grad, bias, edge, near, origin, bucket, 2, ASM)
        elif edges > MOST_EDGES:
            looked_up = find_bucket(differences(bias, far, near, 0, True, ASM), bias.cells, ASM)
            histogram_add(sums.lane, looked_up, grad, sums.keys_scale, True, True)
        else:
            histogram_add_sum(sums.lane, bucket, grad, sums.keys_scale, True, True)
            if edges > 0:
                beside = near_place(bias, near, origin, True, ASM)
                times = side_times(bias, far, True, ASM)
                _move(sums, grad, bias, times, beside, origin, lowest, bucket, 1, ASM)
                if edges > 1:
                    _move(sums, grad, bias, times, beside, origin, lowest, bucket, 2, ASM)
                if edges > 2:
                    _move(sums, grad, bias, times, beside, origin, lowest, bucket, 3, ASM)
                    _move(sums, grad, bias, times, beside, origin, lowest, bucket, 4, ASM)
    return ProgramSums(
        sums.ring, sums.histogram, sums.copy, sums.lane, sums.scale, sums.unit, sums.means_scale, sums.keys_scale,
        turn, low, done, total,
    )  # fmt: skip


@triton.jit
def _flush(tables, sums, BM: tl.constexpr, SPAN: tl.constexpr):
    cell = tl.arange(0, 128)
    value = stretch_take(sums.ring + 4 * STRETCH * sums.turn, cell)
    terms = tl.minimum(cell + (sums.done - SPAN), BM - 1) - tl.maximum(cell - (SPAN - 1), 0) + 1
    value -= tl.maximum(terms, 0) * ROUNDING_BITS
    if tables.time is not None:
        unit = tl.where(sums.bucket >= 0, sums.keys_scale * sums.unit, 0.0)
        bucket = tl.maximum(sums.bucket, 0) + tl.zeros([128], tl.int32)
        histogram_add(sums.lane, bucket, value.to(tl.float32), unit, True, True)
    use = (sums.low + cell >= 0) & (value != 0)
    tl.atomic_add(tables.ahead + sums.low + cell, value.to(tl.float32) * sums.unit, use, sem="relaxed")


@triton.jit
def _close_histogram(tables, sums, scale):
    cells = tables.time + tl.program_id(0) % LANES
    histogram_close(sums.histogram, cells, 1.0 / scale, 0, _ROWS, True, LANES, True)


@triton.jit
def close_keys(tables, sums, BM: tl.constexpr, SPAN: tl.constexpr):
    """Moves all sums of keys to memory, NaN where a term had no bound; the histogram is the mean keys' from then on."""
    bad = (sums.means_scale == 0.0) | (sums.scale == 0.0)
    if tables.ahead is not None:
        tl.debug_barrier()
        _flush(tables, sums, BM, SPAN)
        tl.atomic_add(tables.ahead, float("nan"), mask=bad, sem="relaxed")
    if tables.time is not None:
        _close_histogram(tables, sums, sums.keys_scale)
        histogram_clear(sums.histogram, True)
        tl.atomic_add(tables.time, float("nan"), mask=bad, sem="relaxed")


@triton.jit
def close_means(tables, sums):
    """Moves the sums of mean keys to memory."""
    if tables.time is not None:
        _close_histogram(tables, sums, sums.means_scale)
