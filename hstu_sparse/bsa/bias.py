"""Compute the relative bias in the block-sparse kernels: a tile's bias, the tables' gradients.

b(t, s) is defined in hstu_sparse/bias/relative.py. Letters: T tokens of the batch, N max_seq_len, BM queries and BN
keys of a tile. A tile is [queries, keys], queries on its axis 0, or [keys, queries]: AXIS is the axis of the queries.

The plan has an entry (buckets.py) for each tile of queries and block of keys. Most of them are narrow, since most tiles
and blocks are far apart. Next to the diagonal and for mean keys, the bucket of each pair is computed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.bias import sums
from hstu_sparse.bias.buckets import (
    ENTRY_EDGES,
    ENTRY_SHIFT,
    MAX_EDGES,
    bucket_of,
    past_edge,
    relative_to_edge,
    relative_to_origin,
)
from hstu_sparse.bias.gradients import (
    Gradients,
    TableSums,
    add_diagonals,
    add_narrow_times,
    add_pair_times,
    add_to,
    exact_scale,
    max_norms_kernel,
)
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.bias.scores import narrow_bias
from hstu_sparse.core.launch import cdiv, padded_head, run
from hstu_sparse.tiles.assembly import look_up, scalar
from hstu_sparse.tiles.rows import Rows

_HISTOGRAM_ROWS = tl.constexpr(sums.HISTOGRAM_ROWS)
# The number of zeros on both sides of the halved position table, which masked pairs read: a tile may have mean keys of
# up to 128 blocks of 128 tokens after its queries.
MARGIN = 128 * 128 + 256
# The number of copies of each table's gradient, to which different programs add. The stride between copies of the
# position table's gradient is a multiple of POSITION_COPIES, minus one cell. So the index of any cell is a multiple of
# POSITION_COPIES in one of the copies. A gathered query adds to the copy in which this holds for its first cell: four
# neighbouring cells are then one atomic addition. Programs of consecutive queries add to every fourth copy.
POSITION_COPIES, TIME_COPIES = tl.constexpr(16), tl.constexpr(64)


class Side(NamedTuple):
    """The queries or the keys of a tile.

    token, place  the index of an origin in the batch, and its position in the sequence: the first one if they are
                  consecutive, token 0 for gathered queries
    lane          [BM] or [BN] int64, the distance of each from the origin
    """

    token: tl.tensor
    place: tl.tensor
    lane: tl.tensor


@triton.jit
def position_tile(bias, queries, keys, AXIS: tl.constexpr, ASM: tl.constexpr):
    """Return the position bias of a tile; requires a position table.

    Addresses have 64 bits, and the tile's distance is one number, so that the compiler sees which neighbours read
    neighbouring addresses, and which read the same address.
    """
    row = bias.position + tl.cast(queries.place - keys.place, tl.int64)
    return look_up(row + tl.expand_dims(queries.lane, 1 - AXIS), -tl.expand_dims(keys.lane, AXIS), ASM)


@triton.jit
def pair_buckets(bias, queries, keys, AXIS: tl.constexpr, ASM: tl.constexpr):
    """Return the time buckets of a tile's pairs."""
    query_high = look_up(bias.query_times.split + queries.token, queries.lane, ASM)
    query_low = look_up(bias.query_times.split + bias.width + queries.token, queries.lane, ASM)
    key_high = look_up(bias.key_times.split + keys.token, keys.lane, ASM)
    key_low = look_up(bias.key_times.split + bias.width + keys.token, keys.lane, ASM)
    high = tl.expand_dims(query_high, 1 - AXIS) - tl.expand_dims(key_high, AXIS)
    low = tl.expand_dims(query_low, 1 - AXIS) - tl.expand_dims(key_low, AXIS)
    return bucket_of(tl.abs(high + low), bias.cells, ASM)


@triton.jit
def pair_tile(bias, queries, keys, AXIS: tl.constexpr, ASM: tl.constexpr):
    """Return (half the bias of a tile of any queries and keys, its time buckets); 0.0 and 0 without tables."""
    tile = 0.0
    buckets = 0
    if bias.time is not None:
        buckets = pair_buckets(bias, queries, keys, AXIS, ASM)
        tile += look_up(bias.time, buckets, ASM)
    if bias.position is not None:
        tile += position_tile(bias, queries, keys, AXIS, ASM)
    return tile, buckets


@triton.jit
def block_tile(bias, entry, queries, keys, AXIS: tl.constexpr, ASM: tl.constexpr):
    """Return half the bias of a tile of queries and the keys of a block that they chose; 0.0 without tables.

    entry: the plan's entry, one for all queries or [BM] for each.
    """
    position = 0.0
    if bias.position is not None:
        position = position_tile(bias, queries, keys, AXIS, ASM)
    if bias.time is not None:
        M: tl.constexpr = queries.lane.shape[0] if AXIS == 0 else keys.lane.shape[0]
        N: tl.constexpr = keys.lane.shape[0] if AXIS == 0 else queries.lane.shape[0]
        edges, lowest = _edges(entry, AXIS)
        if edges > MAX_EDGES:
            tile = look_up(bias.time, pair_buckets(bias, queries, keys, AXIS, ASM), ASM)
        else:
            first = tl.load(bias.time + lowest) if entry.type.is_block() else scalar(bias.time + lowest, ASM)
            tile = tl.zeros([M, N], tl.float32) + first
            if edges > 0:
                resident, streamed, origin = _edge_sides(bias, queries, keys, AXIS, ASM)
                time, steps = bias.time + lowest, bias.steps + lowest
                tile = narrow_bias(first, edges, time, steps, resident, streamed, origin, True)
        return tile + position  # added here, so that no branch waits for the position's look-up
    else:
        return position


@triton.jit
def _edges(entry, AXIS: tl.constexpr):
    """Return (the greatest number of edges of an entry, the lowest buckets, broadcastable to a tile)."""
    if entry.type.is_block():
        return tl.max(entry & ENTRY_EDGES, 0), tl.expand_dims(entry >> ENTRY_SHIFT, 1 - AXIS)
    else:
        return entry & ENTRY_EDGES, entry >> ENTRY_SHIFT


@triton.jit
def _edge_sides(bias, queries, keys, AXIS: tl.constexpr, ASM: tl.constexpr):
    """Return (resident, streamed, origin) of a tile for `relative_to_edge` and `past_edge`; queries are resident."""
    resident = tl.expand_dims(look_up(bias.query_times.offset + queries.token, queries.lane, ASM), 1 - AXIS)
    origin = tl.load(bias.key_times.offset + keys.token)
    offsets = tl.expand_dims(look_up(bias.key_times.offset + keys.token, keys.lane, ASM), AXIS)
    return resident, relative_to_origin(offsets, origin, True), origin.to(tl.int64)


@triton.jit
def open_gradients(tables, time_shift, SUMS: tl.constexpr):
    """Return (`Gradients`, histogram) for a program of consecutive queries.

    SUMS: first sum integers in shared memory, of 21 bits, or 21 - `time_shift` in the time table's histogram; then add
    the sums to memory in fp32.
    """
    ring, lane = 0, 0
    scale, time_scale = 1.0, 1.0
    position, time = 0, 0  # a function cannot return None (Triton 3.6: "cannot convert None")
    if tables.position is not None:
        position = tables.position + (tl.program_id(0) % (POSITION_COPIES // 4)) * (4 * tables.positions)
    if tables.time is not None:
        time = tables.time + (tl.program_id(0) % TIME_COPIES) * tables.buckets
    if tables.unit is not None:
        scale = tl.load(tables.unit)
    histogram = 0
    if SUMS:
        scale = exact_scale(tables.norms)
        time_scale = scale / (1 << time_shift).to(tl.float32)
        if tables.position is not None:
            ring = sums.ring_open(time_shift)
        if tables.time is not None:
            histogram = sums.histogram_open(time_shift)
            lane = sums.histogram_lane(histogram)
        tl.debug_barrier()
    return Gradients(position, time, ring, lane, scale, time_scale), histogram


@triton.jit
def close_times(gradients, histogram, tables, SUMS: tl.constexpr):
    """Add the histogram to the gradient in memory."""
    if SUMS and tables.time is not None:
        sums.histogram_close(histogram, gradients.time, 1.0 / gradients.time_scale, 0, _HISTOGRAM_ROWS, True)


@triton.jit
def means_gradients(gradients, histogram, tables, SUMS: tl.constexpr):
    """Return `Gradients` for mean keys, whose terms in the time table are larger: see `TableGradients`."""
    if SUMS and tables.time is not None:
        sums.histogram_clear(histogram)
    return Gradients(
        gradients.position, gradients.time, gradients.ring, gradients.lane, gradients.scale,
        gradients.scale * tables.means_factor if SUMS else gradients.time_scale,
    )  # fmt: skip


@triton.jit
def add_position_tile(gradients, ds, queries, keys, length, SUMS: tl.constexpr):
    """Add a tile of ds, [queries, keys], both consecutive, to the position table's gradient."""
    BM: tl.constexpr = ds.shape[0]
    BN: tl.constexpr = ds.shape[1]
    if SUMS:
        # The tile's diagonals are added to memory immediately: the next block may lie anywhere.
        tl.static_assert(BM + BN - 1 <= 128)
        cell = sums.ring_lane(gradients.ring) + 4 * (BN - 1)
        sums.ring_add(cell + 4 * (tl.arange(0, BM)[:, None] - tl.arange(0, BN)[None, :]), ds, gradients.scale)
        sums.barrier(length)
        lane = tl.arange(0, 128)
        value = sums.ring_take(gradients.ring, lane)
        distance = queries.place - keys.place - (BN - 1) + lane
        use = (distance >= 0) & (distance < length) & (value != 0)
        tl.atomic_add(gradients.position + distance, value.to(tl.float32) / gradients.scale, use, sem="relaxed")
        sums.barrier(length)
    else:
        add_diagonals(gradients.position, ds, queries.place, keys.place, length, gradients.scale, BM, BN)


@triton.jit
def add_mean_positions(gradients, tables, ds, queries, keys):
    """Add a tile of ds of mean keys to the position table's gradient, pair by pair: few are on one diagonal."""
    distance = queries.place - keys.place + (queries.lane[:, None] - keys.lane[None, :])
    # Masked pairs may lie outside of the table. Four neighbours are all inside or all outside.
    first = queries.place - keys.place + ((queries.lane // 4 * 4)[:, None] - keys.lane[None, :])
    add_to(gradients.position + distance, ds, tables.unit, (first >= 0) & (first < tables.positions - 3))


@triton.jit
def add_block_times(gradients, ds, bias, entry, queries, keys, SUMS: tl.constexpr, ASM: tl.constexpr):
    """Add a tile of ds, [queries, keys], of a block to the time table's gradient; entry: one number."""
    if (entry & ENTRY_EDGES) > MAX_EDGES:
        add_pair_times(gradients, ds, pair_buckets(bias, queries, keys, 0, ASM), SUMS, SUMS)
    else:
        resident = look_up(bias.query_times.offset + queries.token, queries.lane, ASM)[:, None]
        add_narrow_times(gradients, ds, entry, resident, bias.key_times.offset + keys.token, bias.steps, SUMS, SUMS)


@triton.jit
def add_gathered(tables, ds, bias, entry, queries, keys, ASM: tl.constexpr):
    """Add a tile of ds, [keys, queries], of gathered queries to the tables' gradients; entry: [BM], or one for all.

    The keys are consecutive and descend. For the time table, a query adds one sum for its lowest bucket, and one for
    each edge.
    """
    BN: tl.constexpr = ds.shape[0]
    BM: tl.constexpr = ds.shape[1]
    scale = 1.0 if tables.unit is None else tl.load(tables.unit)
    ds *= scale
    if tables.position is not None:
        # The keys descend: the last has the least distance.
        first = queries.place - keys.place - (BN - 1) + queries.lane
        cell = tables.position + ((first % POSITION_COPIES) * tables.positions + first)
        cell = tl.multiple_of(cell, 4 * POSITION_COPIES)
        add_to(cell[None, :] + tl.arange(0, BN)[:, None], ds)
    if tables.time is not None:
        cell = tables.time + (tl.arange(0, BM) % TIME_COPIES) * tables.buckets
        edges, lowest = _edges(entry, 1)
        if edges > MAX_EDGES:
            buckets = pair_buckets(bias, queries, keys, 1, ASM)
            add_to(cell[None, :] + buckets, ds, None, ds != 0.0)
        else:
            cell += entry >> ENTRY_SHIFT
            add_to(cell, tl.sum(ds, 0))
            if edges > 0:
                resident, streamed, origin = _edge_sides(bias, queries, keys, 1, ASM)
                for E in tl.static_range(1, MAX_EDGES + 1):
                    if edges >= E:
                        edge = tl.load(bias.steps + lowest + E)
                        past = tl.sum(ds * past_edge(relative_to_edge(resident, origin, edge, True), streamed), 0)
                        add_to(cell + E, past, None, past != 0.0)
                        add_to(cell + (E - 1), -past, None, past != 0.0)


def table_sums(bias: RelativeBias, do, v, gates, terms: int, deterministic: bool) -> TableSums:
    """Allocate the tables' gradients; terms: a bound of the number of terms in a table's gradient."""

    def bound() -> torch.Tensor:
        # SiLU's slope is at most 1.1.
        greatest = [x.abs().amax().double() for x in (do, v)]
        return 1.1 * v.shape[2] * terms * greatest[0] * greatest[1] * _max_gate_sum(gates).double()

    copies = POSITION_COPIES.value, TIME_COPIES.value
    padding = MAX_EDGES.value + 1
    positions = 0 if bias.position is None else bias.position.shape[0]
    padding += -(positions + padding + 1) % POSITION_COPIES.value  # see POSITION_COPIES
    return TableSums(bias[:2], copies, deterministic, bound, padding)


def _max_gate_sum(gates) -> torch.Tensor:
    """Return a bound of the sum of a pair's gates: a key may be both in the query's block and in the window."""
    return sum(torch.linalg.vector_norm(g, float("inf"), dtype=torch.float32) for g in gates)


def pair_norms(do: torch.Tensor, v: torch.Tensor, gates) -> torch.Tensor:
    """Return [2] fp32, whose product bounds every do.v times the gates, for `exact_scale`."""
    norms = torch.zeros(2, dtype=torch.float32, device=v.device)
    T, H, V = v.shape
    run(
        max_norms_kernel, (cdiv(T * H, 128),), Rows.of(v), Rows.of(do), norms, T,
        H=H, V=V, PAD_V=padded_head(V), BLOCK=128, num_warps=8,
    )  # fmt: skip
    norms[1] *= _max_gate_sum(gates)
    return norms
