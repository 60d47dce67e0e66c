"""The relative bias of a tile of scores and the gradients of its tables: device functions, and what they are given.

b(t, s) is defined in hstu_sparse/relative_bias.py. Letters: T tokens of the batch, N max_seq_len, BM queries and BN
keys of a tile, t and s positions of queries and keys in their sequence, BS block size.

Position. The table is kept backwards, `position[s - t]` with a pointer to entry 0, and with zeros around it, so that no
index of a pair that is not seen needs a bound.

Time. Seconds are kept as two fp32 numbers, a multiple of 2^20 and the rest. The difference of two times is then right
to the last bit of fp32. Which buckets a tile reaches follows from the earliest and the latest time of its two sides.
Most chosen blocks lie so far back that it is one bucket, and then one number is added to the tile; else each pair's
entry is found by comparing its difference with the edges between the tile's buckets.

Gradients. A tile's part of the position table is summed along its diagonals, or added pair by pair where rows are
gathered; its part of the time table is summed for each bucket that the tile reaches.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.bsa.plan import span
from hstu_sparse.dense.assembly import look_up
from hstu_sparse.launch import cdiv
from hstu_sparse.relative_bias import bucket_edges
from hstu_sparse.tiles import COMPILED, locate

# The bucket has 12 bits of a cell's word.
MAX_BUCKETS = 4095
# Cells of an octave of fp32 numbers: 2 ** 3, each 1.125 times as wide as it begins, at most; a bucket is 1.35 times.
CELL_BITS = 3
CELL_SHIFT, CELL_REST = tl.constexpr(23 - CELL_BITS), tl.constexpr((1 << (23 - CELL_BITS)) - 1)
FIRST_CELL = tl.constexpr(127 << CELL_BITS)
# Powers of two that whole seconds can reach.
OCTAVES = 65
# Entries around the position table: past its end, and for blocks of a tile that are not there yet (128 of 128 tokens).
BEHIND, BEFORE = 256, 128 * 128 + 256
# Sums kept of each bucket's gradient, so that programs do not wait for another.
LANES = tl.constexpr(64)
# Edges that a tile may reach over for `reached`; fp32 counts seconds exactly up to EXACT_SECONDS.
MOST_EDGES, EXACT_SECONDS = tl.constexpr(4), tl.constexpr(2.0**24)
# Copies of the position table's gradient.
COPIES = tl.constexpr(16)
EDGE_SHIFT, LOWEST = tl.constexpr(12), tl.constexpr(0xFFF)


class KernelBias(NamedTuple):
    """What kernels read of a RelativeBias: pointers, or None where a table is absent."""

    position: object = None  # [s - t] fp32
    time: object = None  # [bucket] fp32, MOST_EDGES zeros behind
    steps: object = None  # [bucket] fp32, the least whole difference in each, infinite behind
    cells: object = None  # int32, see `bucket_cells`
    key_high: object = None  # [T] fp32, times of the keys
    key_low: object = None
    query_high: object = None
    query_low: object = None
    key_spans: object = None  # [NB, 4] fp32, of each block the earliest time (high, low) and the latest


class TableGradients(NamedTuple):
    """Where kernels add the tables' gradients: fp32, or int64 multiples of 1 / scale, which add in any order alike."""

    ahead: object = None  # [t - s], for queries that stand side by side
    backwards: object = None  # [COPIES, s - t], for keys that do
    time: object = None  # [bucket, LANES]
    scale: object = None  # one fp32 number, with int64


@functools.cache
def bucket_cells(num_buckets: int, device: torch.device) -> torch.Tensor:
    """[cells] int32: the last mantissa bits of the edge within the cell, less 1 (all ones: none), and its bucket.

    A number x >= 1 lies in the cell that its exponent and first mantissa bits name. Its bucket is the cell's, or the
    next if its last bits are greater than the word's.
    """
    edges = torch.tensor([*bucket_edges(num_buckets), math.inf], dtype=torch.float32)
    index = torch.arange(OCTAVES << CELL_BITS)
    starts = torch.exp2((index >> CELL_BITS).double()) * (1 + (index % 2**CELL_BITS) / 2**CELL_BITS)
    starts = starts.float()
    bucket = torch.bucketize(starts, edges[:-1], right=True)
    edge_bits, start_bits = (x.view(torch.int32).long() for x in (edges[bucket], starts))
    none = CELL_REST.value
    rest = torch.where(edge_bits - start_bits <= none, (edge_bits & none) - 1, none)
    word = (rest << 12) | bucket
    return torch.where(word >= 2**31, word - 2**32, word).int().to(device)


@functools.cache
def bucket_steps(num_buckets: int, device: torch.device) -> torch.Tensor:
    """[num_buckets + 1 + MOST_EDGES] fp32, the least whole number in each bucket, infinity behind."""
    steps = torch.tensor([0.0, *bucket_edges(num_buckets), *[math.inf] * MOST_EDGES.value], dtype=torch.float32)
    return steps.ceil().to(device)


@triton.jit(do_not_specialize=["N", "origin", "entries", "buckets"])
def bsa_tables_kernel(
    position, time, backwards, padded, N, origin, entries, buckets, MOST: tl.constexpr, SIZE: tl.constexpr
):
    """Writes the position table backwards with its margins, and the time table with zeros behind."""
    lane = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    if position is not None:
        distance = origin - lane
        value = tl.load(position + distance, mask=(distance >= 0) & (distance < N), other=0.0)
        tl.store(backwards + lane, value.to(tl.float32), mask=lane < entries)
    if time is not None:
        value = tl.load(time + lane, mask=lane < buckets, other=0.0)
        tl.store(padded + lane, value.to(tl.float32), mask=lane < buckets + MOST)


@triton.jit(do_not_specialize=["B"])
def bsa_reach_kernel(
    indices, offsets, reaches, bias, H, B, S,
    BS: tl.constexpr, R: tl.constexpr, BG: tl.constexpr, P: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """For each group's chosen blocks what `reach` finds: the lowest bucket, and above EDGE_SHIFT the edges."""
    tile, h = tl.program_id(0), tl.program_id(1)
    b, start, length, i = locate(offsets, tile, B, BG * R)
    if i * BG * R >= length:
        return
    group = i * BG + tl.arange(0, BG)
    p = tl.arange(0, P)[None, :]
    entry = ((start // R + b + group)[:, None] * H + h) * S + p
    j = tl.load(indices + entry, mask=(group[:, None] * R < length) & (p < S), other=-1)
    token = group[:, None] * R + tl.arange(0, R)[None, :]
    inside = token < length
    high, low = load_times(bias.query_high, bias.query_low, start + token, inside)
    first, first_low, last, last_low = span(high, low, inside, 1)
    asked = (first[:, None], first_low[:, None], last[:, None], last_low[:, None])
    block = bias.key_spans + (start // BS + b + tl.maximum(j, 0)) * 4
    seen = (tl.load(block), tl.load(block + 1), tl.load(block + 2), tl.load(block + 3))
    lowest, edges = reach(bias, asked, seen, j >= 0, True, ASM)
    tl.store(reaches + entry, lowest | (edges << EDGE_SHIFT), mask=j >= 0)


def prepare(
    position: torch.Tensor | None, time: torch.Tensor | None, plan: Sequence[torch.Tensor | None]
) -> KernelBias:
    """What kernels read of the tables and of a plan's (times, spans): one launch."""
    if position is None and time is None:
        return KernelBias()
    device = (time if position is None else position).device
    fp32 = dict(dtype=torch.float32, device=device)
    N = origin = entries = buckets = 0
    backwards = padded = None
    # Pointers stay multiples of 16 bytes whatever N is: kernels are compiled anew where they do not.
    if position is not None:
        N = position.shape[0]
        origin = table_origin(N)
        entries = origin + BEFORE
        backwards = torch.empty(entries, **fp32)
    if time is not None:
        buckets = time.shape[0]
        padded = torch.empty(buckets + MOST_EDGES.value, **fp32)
    bsa_tables_kernel[(cdiv(max(entries, buckets + MOST_EDGES.value), 1024),)](
        position, time, backwards, padded, N, origin, entries, buckets, MOST=MOST_EDGES.value, SIZE=1024, num_warps=4
    )
    backwards = None if backwards is None else backwards[origin:]
    if time is None:
        return KernelBias(backwards)
    times, spans = plan
    steps, cells = bucket_steps(buckets - 1, device), bucket_cells(buckets - 1, device)
    return KernelBias(backwards, padded, steps, cells, *times, spans)


def table_origin(N: int) -> int:
    """Where distance 0 stands in a position table that is kept backwards, or in its gradient."""
    return cdiv(N + BEHIND, 16) * 16


class TableSums:
    """Memory for the tables' gradients, and their last sums.

    Under torch.use_deterministic_algorithms, whole multiples of a power of two small enough that `terms` times the
    greatest of all terms stays below 2^62.
    """

    def __init__(self, position, time, do, v, gates, terms: int):
        self.position, self.time, self.scale, self.pitch = position, time, None, 0
        kind = dict(dtype=torch.float32, device=do.device)
        if torch.are_deterministic_algorithms_enabled():
            greatest = [x.abs().amax().float() for x in (do, v)] + [
                torch.stack([g.abs().amax() for g in gates]).amax().float()
            ]
            # SiLU's slope is at most 1.1.
            greatest = 1.1 * v.shape[2] * greatest[0] * greatest[1] * greatest[2]
            power = torch.floor(62 - math.log2(terms) - torch.log2(greatest)).clamp(-100, 100)
            self.scale = torch.exp2(power).view(1)
            kind["dtype"] = torch.int64
        ahead = backwards = buckets = None
        if position is not None:
            self.origin = table_origin(position.shape[0])
            self.ahead = torch.zeros(BEFORE + self.origin, **kind)
            ahead = self.ahead[BEFORE:]
            self.pitch = self.origin + BEHIND
            self.backwards = torch.zeros(COPIES.value * self.pitch, **kind)
            backwards = self.backwards[self.origin :]
        if time is not None:
            buckets = torch.zeros(time.shape[0] + MOST_EDGES.value, LANES.value, **kind)
        self.tables = TableGradients(ahead, backwards, buckets, self.scale)

    def gradients(self, factor: float) -> list[torch.Tensor]:
        """[position's, time's], those that there are, times `factor`."""
        found = []
        if self.position is not None:
            N = self.position.shape[0]
            # Copy c has distance d at origin + c - d.
            copies = self.backwards.as_strided((COPIES.value, N), (self.pitch + 1, 1), self.origin - (N - 1))
            found.append(self.tables.ahead[:N] + copies.sum(0).flip(0))
        if self.time is not None:
            found.append(self.tables.time[: self.time.shape[0]].sum(1))
        if self.scale is not None:
            found = [x.double() / self.scale for x in found]
        tables = (x for x in (self.position, self.time) if x is not None)
        return [(x * factor).to(table.dtype) for x, table in zip(found, tables)]


@triton.jit
def load_times(high, low, rows, mask):
    """Times of tokens as (high, low); (0, 0) where there is no time table."""
    if high is not None:
        return tl.load(high + rows, mask=mask, other=0.0), tl.load(low + rows, mask=mask, other=0.0)
    else:
        return tl.zeros(rows.shape, tl.float32), tl.zeros(rows.shape, tl.float32)


@triton.jit
def find_bucket(difference, cells, ASM: tl.constexpr):
    """The buckets of differences."""
    bits = tl.maximum(tl.abs(difference), 1.0).to(tl.int32, bitcast=True)
    cell = look_up(cells, ((bits >> CELL_SHIFT) - FIRST_CELL).to(tl.int64), ASM)
    edge = (cell.to(tl.uint32, bitcast=True) >> 12).to(tl.int32)
    return (cell & 0xFFF) + ((bits & CELL_REST) > edge).to(tl.int32)


@triton.jit
def reach(bias, asked, seen, mask, FAR_QUERIES: tl.constexpr, ASM: tl.constexpr):
    """(lowest bucket, edges) between spans of times of queries (`asked`) and of keys (`seen`).

    More than MOST_EDGES stand for: a key is younger than a query, or `reached` cannot tell an edge exactly.
    FAR_QUERIES: see `add_time`.
    """
    near = (asked[0] - seen[2]) + (asked[1] - seen[3])
    far = (asked[2] - seen[0]) + (asked[3] - seen[1])
    side = seen if FAR_QUERIES else asked
    long = (side[2] - side[0]) + (side[3] - side[1])
    lowest = find_bucket(tl.where(mask, tl.maximum(near, 0.0), 0.0), bias.cells, ASM)
    highest = find_bucket(tl.where(mask, tl.maximum(far, 0.0), 0.0), bias.cells, ASM)
    edges = tl.minimum(highest - lowest, MOST_EDGES + 1)
    edges = tl.where(tl.minimum(near, -long + (EXACT_SECONDS - 1.0)) >= 0.0, edges, MOST_EDGES + 1)
    return lowest, tl.where(mask, edges, 0)


@triton.jit
def means_reach(bias, asked, rows, known, ASM: tl.constexpr):
    """(lowest buckets of blocks' middle tokens at `rows`, the most edges of one) for queries of the span `asked`."""
    if bias.time is not None:
        rows = tl.where(known, rows, 0)
        high, low = look_up(bias.key_high, rows, ASM), look_up(bias.key_low, rows, ASM)
        lowest, edges = reach(bias, asked, (high, low, high, low), known, False, ASM)
        return lowest, tl.max(edges, 0)
    else:
        return tl.zeros(rows.shape, tl.int32), 0


@triton.jit
def load_reach(pointers, mask, SIZE: tl.constexpr):
    """(lowest buckets, the most edges) of SIZE queries from what bsa_reach_kernel wrote: for each, or one for all."""
    if pointers is not None:
        if mask is not None:
            found = tl.load(pointers, mask=mask, other=0)
            return found & LOWEST, tl.max(found >> EDGE_SHIFT, 0)
        else:
            found = tl.load(pointers)
            return tl.full([SIZE], 0, tl.int32) + (found & LOWEST), found >> EDGE_SHIFT
    else:
        return tl.zeros([SIZE], tl.int32), 0


@triton.jit
def load_origin(bias, slot):
    """The earliest time of a block's keys as (high, low); (0, 0) where there is no time table."""
    if bias.time is not None:
        return tl.load(bias.key_spans + slot * 4), tl.load(bias.key_spans + slot * 4 + 1)
    else:
        return 0.0, 0.0


@triton.jit
def position_tile(bias, rows, columns, ASM: tl.constexpr):
    """The position's bias of a tile whose pairs are s - t = rows + columns (int64) apart; 0 without a table."""
    if bias.position is not None:
        return look_up(bias.position + rows[:, None], columns[None, :], ASM)
    else:
        return tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)


@triton.jit
def side_times(bias, rows, QUERIES: tl.constexpr, ASM: tl.constexpr):
    """Times (high, low) of the tokens at `rows` (int64), of queries or of keys."""
    if QUERIES:
        return look_up(bias.query_high, rows, ASM), look_up(bias.query_low, rows, ASM)
    else:
        return look_up(bias.key_high, rows, ASM), look_up(bias.key_low, rows, ASM)


@triton.jit
def pair_buckets(bias, far, near, AXIS: tl.constexpr, FAR_QUERIES: tl.constexpr, ASM: tl.constexpr):
    """Buckets of all pairs of a tile; arguments as of `add_time`."""
    far, near = side_times(bias, far, FAR_QUERIES, ASM), side_times(bias, near, not FAR_QUERIES, ASM)
    high = tl.expand_dims(far[0], 1 - AXIS) - tl.expand_dims(near[0], AXIS)
    low = tl.expand_dims(far[1], 1 - AXIS) - tl.expand_dims(near[1], AXIS)
    return find_bucket(high + low, bias.cells, ASM)


@triton.jit
def near_place(bias, near, origin, FAR_QUERIES: tl.constexpr, ASM: tl.constexpr):
    """Where the near side stands, for `reached`."""
    near = side_times(bias, near, not FAR_QUERIES, ASM)
    place = (near[0] - origin[0]) + (near[1] - origin[1])
    return -place if FAR_QUERIES else place


@triton.jit
def edge_place(bias, far, origin, bucket, FAR_QUERIES: tl.constexpr, ASM: tl.constexpr):
    """Where the far side stands by the first edge of a bucket, for `reached`. Exact near the edge: whole numbers."""
    edge = look_up(bias.steps, bucket, ASM)
    if FAR_QUERIES:
        return ((far[0] - origin[0]) - edge) + ((far[1] - origin[1]) + 1.0)
    else:
        return ((origin[0] - far[0]) - edge) + ((origin[1] - far[1]) + 1.0)


@triton.jit
def reached(far, near, AXIS: tl.constexpr):
    """1.0 for the pairs of a tile at or past an edge, 0.0 for the rest: query less key less edge plus 1, clamped."""
    far, near = tl.expand_dims(far, 1 - AXIS), tl.expand_dims(near, AXIS)
    if COMPILED:
        return tl.inline_asm_elementwise(
            "add.sat.f32 $0, $1, $2;", "=f,f,f", [far, near], tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.minimum(tl.maximum(far + near, 0.0), 1.0)


@triton.jit
def time_step(
    bias, far, near, origin, lowest, E: tl.constexpr, AXIS: tl.constexpr, FAR_QUERIES: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """What the E-th edge past each lowest bucket adds to a tile."""
    step = look_up(bias.time, lowest + E, ASM) - look_up(bias.time, lowest + (E - 1), ASM)
    place = edge_place(bias, far, origin, lowest + E, FAR_QUERIES, ASM)
    return tl.expand_dims(step, 1 - AXIS) * reached(place, near, AXIS)


@triton.jit
def add_time(
    added, bias, far, near, origin, lowest, edges, AXIS: tl.constexpr, FAR_QUERIES: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """added + the time's bias of a tile, [far, near] if AXIS is 0, else [near, far].

    far, near: tokens of both sides (int64); FAR_QUERIES: the far side is that of the queries.
    origin: a time of the near side. lowest, of each of the far side, and edges, one number: as `reach` finds them.
    """
    if bias.time is not None:
        if edges > MOST_EDGES:
            added += look_up(bias.time, pair_buckets(bias, far, near, AXIS, FAR_QUERIES, ASM), ASM)
        else:
            tile = added + tl.expand_dims(look_up(bias.time, lowest, ASM), 1 - AXIS)
            if edges > 0:
                place = near_place(bias, near, origin, FAR_QUERIES, ASM)
                times = side_times(bias, far, FAR_QUERIES, ASM)
                tile += time_step(bias, times, place, origin, lowest, 1, AXIS, FAR_QUERIES, ASM)
                if edges > 1:
                    tile += time_step(bias, times, place, origin, lowest, 2, AXIS, FAR_QUERIES, ASM)
                if edges > 2:
                    tile += time_step(bias, times, place, origin, lowest, 3, AXIS, FAR_QUERIES, ASM)
                    tile += time_step(bias, times, place, origin, lowest, 4, AXIS, FAR_QUERIES, ASM)
            added = tile
    return added


@triton.jit
def add_to(pointers, value, scale, mask=None):
    """pointers += value, in fp32 or, if they are to int64, in multiples of 1 / scale."""
    if pointers.dtype.element_ty == tl.int64:
        value = tl.floor(value * tl.load(scale) + 0.5).to(tl.int64)
    tl.atomic_add(pointers, value, mask=mask, sem="relaxed")


@triton.jit
def move_sum(
    tables, grad, bias, far, near, origin, lowest, cell, E: tl.constexpr, AXIS: tl.constexpr,
    FAR_QUERIES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Moves what lies past the E-th edge from the bucket before it to the one behind."""
    place = edge_place(bias, far, origin, lowest + E, FAR_QUERIES, ASM)
    past = tl.sum(grad * reached(place, near, AXIS), 1 - AXIS)
    add_to(cell + E * LANES, past, tables.scale, past != 0)
    add_to(cell + (E - 1) * LANES, -past, tables.scale, past != 0)


@triton.jit
def add_time_gradient(
    tables, grad, bias, far, near, origin, lowest, edges, AXIS: tl.constexpr, FAR_QUERIES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Adds a tile's gradient to the buckets that it reaches; arguments as of `add_time`."""
    if tables.time is not None:
        if edges > MOST_EDGES:
            lane = tl.expand_dims(tl.arange(0, grad.shape[1 - AXIS]) % LANES, AXIS)
            cells = pair_buckets(bias, far, near, AXIS, FAR_QUERIES, ASM) * LANES + lane
            add_to(tables.time + cells, grad, tables.scale, grad != 0)
        else:
            cell = tables.time + lowest * LANES + tl.arange(0, grad.shape[AXIS]) % LANES
            add_to(cell, tl.sum(grad, 1 - AXIS), tables.scale)
            if edges > 0:
                place = near_place(bias, near, origin, FAR_QUERIES, ASM)
                times = side_times(bias, far, FAR_QUERIES, ASM)
                move_sum(tables, grad, bias, times, place, origin, lowest, cell, 1, AXIS, FAR_QUERIES, ASM)
                if edges > 1:
                    move_sum(tables, grad, bias, times, place, origin, lowest, cell, 2, AXIS, FAR_QUERIES, ASM)
                if edges > 2:
                    move_sum(tables, grad, bias, times, place, origin, lowest, cell, 3, AXIS, FAR_QUERIES, ASM)
                    move_sum(tables, grad, bias, times, place, origin, lowest, cell, 4, AXIS, FAR_QUERIES, ASM)


@triton.jit
def add_position_gradient(tables, pitch, grad, t, s, AXIS: tl.constexpr):
    """Adds a tile's gradient to the position table, for keys s that stand side by side, on the tile's axis AXIS.

    t, s: int32 positions. The copy of the table that a query adds to makes its first key's cell a multiple of COPIES:
    so four neighbours are added at once.
    """
    if tables.backwards is not None:
        row = tables.backwards + (t % COPIES).to(tl.int64) * pitch - (t // COPIES * COPIES)
        add_to(tl.expand_dims(row, AXIS) + tl.expand_dims(s, 1 - AXIS), grad, tables.scale)
