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
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.launch import cdiv
from hstu_sparse.relative_bias import RelativeBias, bucket_edges
from hstu_sparse.tiles import locate

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


class KernelBias(NamedTuple):
    """What kernels read of a RelativeBias: pointers, or None where a table is absent."""

    position: object = None  # [s - t] fp32
    time: object = None  # [bucket] fp32
    edges: object = None  # [bucket] fp32, the least difference in each
    cells: object = None  # int32, see `bucket_cells`
    key_high: object = None  # [T] fp32, times of the keys
    key_low: object = None
    query_high: object = None
    query_low: object = None
    key_spans: object = None  # [NB, 4] fp32, of each block the earliest time (high, low) and the latest
    query_spans: object = None


class TableGradients(NamedTuple):
    """Where kernels add the tables' gradients: fp32, or int64 multiples of 1 / scale, which add in any order alike."""

    position: object = None  # [t - s]
    backwards: object = None  # [s - t], for pairs that are added one by one with neighbouring keys side by side
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
def first_in_bucket(num_buckets: int, device: torch.device) -> torch.Tensor:
    """[num_buckets + 1] fp32, the least difference in each bucket."""
    return torch.tensor([0.0, *bucket_edges(num_buckets)], dtype=torch.float32).to(device)


@triton.jit(do_not_specialize=["N", "origin", "entries", "T", "pitch"])
def bsa_bias_kernel(
    position, table, N, origin, entries, timestamps, query_timestamps, times, T, pitch, SIZE: tl.constexpr
):
    """Writes the position table backwards with its margins, and the times in halves."""
    lane = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    if position is not None:
        distance = origin - lane
        value = tl.load(position + distance, mask=(distance >= 0) & (distance < N), other=0.0)
        tl.store(table + lane, value.to(tl.float32), mask=lane < entries)
    if timestamps is not None:
        inside = lane < T
        for side in tl.static_range(2):
            seconds = tl.load((query_timestamps if side else timestamps) + lane, mask=inside, other=0)
            low = seconds & 0xFFFFF
            tl.store(times + 2 * side * pitch + lane, (seconds - low).to(tl.float32), mask=inside)
            tl.store(times + (2 * side + 1) * pitch + lane, low.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["B"])
def bsa_span_kernel(
    offsets, key_high, key_low, query_high, query_low, key_spans, query_spans, B, BS: tl.constexpr
):  # fmt: skip
    slot = tl.program_id(0)
    _b, start, length, j = locate(offsets, slot, B, BS)
    row = j * BS + tl.arange(0, BS)
    inside = row < length
    if j * BS < length:
        for side in tl.static_range(2):
            high, low = load_times(
                query_high if side else key_high, query_low if side else key_low, start + row, inside
            )
            found = span(high, low, inside)
            for i in tl.static_range(4):
                tl.store((query_spans if side else key_spans) + slot * 4 + i, found[i])


def prepare(bias: RelativeBias, offsets: torch.Tensor, tokens: int, slots: int, block_size: int) -> KernelBias:
    """Two launches. They serve one layer: keeping its 16 bytes a token from layer to layer would save microseconds."""
    if bias.position is None and bias.time is None:
        return KernelBias()
    device = offsets.device
    fp32 = dict(dtype=torch.float32, device=device)
    N = origin = entries = pitch = 0
    table = times = None
    views = [None] * 4
    # Pointers stay multiples of 16 bytes whatever N and T are: kernels are compiled anew where they do not.
    if bias.position is not None:
        N = bias.position.shape[0]
        origin = cdiv(N + BEHIND, 16) * 16
        entries = origin + BEFORE
        table = torch.empty(entries, **fp32)
    if bias.time is not None:
        pitch = cdiv(tokens, 16) * 16
        times = torch.empty(4 * pitch, **fp32)
        views = [times[i * pitch :] for i in range(4)]
    bsa_bias_kernel[(cdiv(max(entries, pitch), 1024),)](
        bias.position, table, N, origin, entries, bias.timestamps, bias.query_timestamps, times, tokens, pitch,
        SIZE=1024, num_warps=4,
    )  # fmt: skip
    position = None if table is None else table[origin:]
    if times is None:
        return KernelBias(position)
    spans = torch.empty(2, slots, 4, **fp32)
    bsa_span_kernel[(slots,)](offsets, *views, *spans, offsets.shape[0] - 1, BS=block_size, num_warps=1)
    buckets = bias.time.shape[0] - 1
    cells, edges = bucket_cells(buckets, device), first_in_bucket(buckets, device)
    return KernelBias(position, bias.time.float(), edges, cells, *views, *spans)


class TableSums:
    """Memory for the tables' gradients, and their last sums.

    Under torch.use_deterministic_algorithms, whole multiples of a power of two small enough that `terms` times the
    greatest of all terms stays below 2^62.
    """

    def __init__(self, bias: RelativeBias, do, v, gates, terms: int):
        self.bias, self.scale = bias, None
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
        position = backwards = time = None
        if bias.position is not None:
            self.origin = cdiv(bias.position.shape[0] + BEHIND, 16) * 16
            position = torch.zeros(self.origin, **kind)
            self.backwards = torch.zeros(self.origin + 16, **kind)
            backwards = self.backwards[self.origin :]
        if bias.time is not None:
            time = torch.zeros(bias.time.shape[0], LANES.value, **kind)
        self.tables = TableGradients(position, backwards, time, self.scale)

    def gradients(self, factor: float) -> list[torch.Tensor]:
        """[position's, time's], those that there are, times `factor`."""
        found = []
        if self.bias.position is not None:
            N = self.bias.position.shape[0]
            found.append(
                self.tables.position[:N] + self.tables.backwards._base[self.origin - N + 1 : self.origin + 1].flip(0)
            )
        if self.bias.time is not None:
            found.append(self.tables.time.sum(1))
        if self.scale is not None:
            found = [x.double() / self.scale for x in found]
        tables = (x for x in self.bias[:2] if x is not None)
        return [(x * factor).to(table.dtype) for x, table in zip(found, tables)]


@triton.jit
def load_times(high, low, rows, mask):
    """Times of tokens as (high, low); (0, 0) where there is no time table."""
    if high is not None:
        return tl.load(high + rows, mask=mask, other=0.0), tl.load(low + rows, mask=mask, other=0.0)
    else:
        return tl.zeros(rows.shape, tl.float32), tl.zeros(rows.shape, tl.float32)


@triton.jit
def load_span(spans, slot):
    """The span of a block's times, as `span` gives it; zeros where there is no time table."""
    if spans is not None:
        spans += slot * 4
        return tl.load(spans), tl.load(spans + 1), tl.load(spans + 2), tl.load(spans + 3)
    else:
        return 0.0, 0.0, 0.0, 0.0


@triton.jit
def span(high, low, mask):
    """(high, low, high, low) of the earliest and of the latest of some times; infinite if there are none."""
    first = tl.min(tl.where(mask, high, float("inf")), 0)
    last = tl.max(tl.where(mask, high, float("-inf")), 0)
    first_low = tl.min(tl.where(mask & (high == first), low, float("inf")), 0)
    last_low = tl.max(tl.where(mask & (high == last), low, float("-inf")), 0)
    return first, first_low, last, last_low


@triton.jit
def find_bucket(difference, cells):
    """The bucket of one difference."""
    bits = tl.maximum(tl.abs(difference), 1.0).to(tl.int32, bitcast=True)
    cell = tl.load(cells + (bits >> CELL_SHIFT) - FIRST_CELL)
    edge = (cell.to(tl.uint32, bitcast=True) >> 12).to(tl.int32)
    return (cell & 0xFFF) + ((bits & CELL_REST) > edge).to(tl.int32)


@triton.jit
def reached(bias, asked, seen):
    """(lowest, highest) bucket of the times between two spans; (0, 0) where there is no time table."""
    lowest, highest = 0, 0
    if bias.time is not None:
        later = (asked[2] - seen[0]) + (asked[3] - seen[1])
        earlier = (seen[2] - asked[0]) + (seen[3] - asked[1])
        # Of an empty side everything is infinite, and nothing is there to add.
        near = tl.minimum(tl.maximum(tl.maximum(-later, -earlier), 0.0), 1e18)
        far = tl.minimum(tl.maximum(later, earlier), 1e18)
        lowest, highest = find_bucket(near, bias.cells), find_bucket(far, bias.cells)
    return lowest, highest


@triton.jit
def differences(held, high, low, rows, mask, HELD: tl.constexpr):
    """|differences| of a tile's times: those of its rows (HELD 0) or columns (1) are given, the others are loaded."""
    other = load_times(high, low, rows, mask)
    high = tl.expand_dims(held[0], 1 - HELD) - tl.expand_dims(other[0], HELD)
    low = tl.expand_dims(held[1], 1 - HELD) - tl.expand_dims(other[1], HELD)
    return tl.abs(high + low)


@triton.jit
def add_position(score, bias, t, s, KEYS_FIRST: tl.constexpr):
    """score + the position's bias of a tile [BM, BN], or [BN, BM] with KEYS_FIRST; a block stands at its middle."""
    if bias.position is not None:
        query: tl.constexpr = 0 if KEYS_FIRST else 1
        place = tl.expand_dims(s, 1 - query) - tl.expand_dims(t, query)
        score += tl.load(bias.position + place)
    return score


@triton.jit
def add_time(score, bias, held, high, low, rows, mask, lowest, highest, HELD: tl.constexpr):
    """score + the time's bias. lowest, highest: buckets `reached`; the others as for `differences`."""
    if bias.time is not None:
        entry = tl.load(bias.time + lowest)
        if lowest == highest:
            score += entry
        else:
            apart = differences(held, high, low, rows, mask, HELD)
            added = tl.zeros_like(score) + entry
            for b in range(lowest + 1, highest + 1):
                added = tl.where(apart >= tl.load(bias.edges + b), tl.load(bias.time + b), added)
            score += added
    return score


@triton.jit
def add_to(pointers, value, scale, mask=None):
    """pointers += value, in fp32 or, if they are to int64, in multiples of 1 / scale."""
    if pointers.dtype.element_ty == tl.int64:
        value = tl.floor(value * tl.load(scale) + 0.5).to(tl.int64)
    tl.atomic_add(pointers, value, mask=mask, sem="relaxed")


@triton.jit
def add_time_gradient(tables, grad, bias, held, high, low, rows, mask, lowest, highest, HELD: tl.constexpr):
    """Adds a tile's gradient to the buckets that it reaches; arguments as of `add_time`."""
    if tables.time is not None:
        cell = tables.time + tl.program_id(0) % LANES
        if lowest == highest:
            add_to(cell + lowest * LANES, tl.sum(grad), tables.scale)
        else:
            apart = differences(held, high, low, rows, mask, HELD)
            below = tl.load(bias.edges + lowest)
            for b in range(lowest, highest + 1):
                # Behind the last bucket there is no edge, and none is needed: nothing of the tile lies there.
                above = tl.where(b < highest, tl.load(bias.edges + tl.minimum(b + 1, highest)), float("inf"))
                part = tl.sum(tl.where((apart >= below) & (apart < above), grad, 0.0))
                add_to(cell + b * LANES, part, tables.scale)
                below = above


@triton.jit
def add_diagonals(tables, grad, distance):
    """Adds a tile's gradient [BM, BN] of consecutive queries and keys to the position table.

    distance: of the first query from the first key. Row i is turned by i, so that a diagonal becomes a column.
    """
    if tables.position is not None:
        BM: tl.constexpr = grad.shape[0]
        BN: tl.constexpr = grad.shape[1]
        column = tl.arange(0, BN)
        turn = tl.arange(0, BM)[:, None] - column[None, :]
        turned = tl.gather(grad, turn & (BN - 1), 1)
        for part in tl.static_range(-1, BM // BN + (BM % BN != 0)):
            inside = (turn >= part * BN) & (turn < (part + 1) * BN)
            place = distance + part * BN + column
            add_to(tables.position + place, tl.sum(tl.where(inside, turned, 0.0), 0), tables.scale, place >= 0)


@triton.jit
def add_pairs(pointers, tables, grad, mask):
    """Adds each of a tile's gradients at its own pointer."""
    add_to(pointers, grad, tables.scale, mask)
