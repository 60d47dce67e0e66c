"""Compute the relative bias of scores in kernels: pair by pair, or for a tile of consecutive tokens.

Letters: T tokens of the batch, N max_seq_len; t and s: the positions of queries and keys in their sequence. A program
loads the resident side of its tile, queries or keys, once and loops over blocks of the streamed side.

Pair by pair (`table_bias`), for any pairs: look up position[t - s] and time[bucket].

By tiles (`half_bias`), in three loops:
- The NEAR nearest blocks: the plan stores the bucket of every pair in a byte. Masked pairs have a bucket whose bias is
  MASKED_BIAS, and need no other mask.
- Narrow tiles (buckets.py) further away: compare timestamps with up to MAX_EDGES edges. Without an edge, the time bias
  is one number.
- Other tiles further away: compute the bucket of every pair.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.bias.buckets import (
    ENTRY_EDGES,
    ENTRY_SHIFT,
    MAX_EDGES,
    TokenTimes,
    bucket_of,
    bucket_starts,
    device_cells,
    masked_bucket,
    num_time_buckets,
    pair_bucket,
    past_edge,
    relative_to_edge,
    relative_to_origin,
    reorder_near,
)
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.core.launch import cdiv, run
from hstu_sparse.tiles.assembly import look_up, scalar
from hstu_sparse.tiles.ranges import token_position
from hstu_sparse.tiles.rows import opaque

NEAR = tl.constexpr(16)
# The number of zeros before and after the halved position table. The compiler may move look-ups before a loop's bounds
# check, so that they read one block past the table's ends.
POSITION_MARGIN = 1024
# Half the bias of a masked pair: SiLU and its derivative are exactly zero there.
MASKED_BIAS = tl.constexpr(-1e30)


class KernelBias(NamedTuple):
    """The arguments of kernels for a `RelativeBias`, made by `from_bias` or by `HalvedTables`.

                             for table_bias               for half_bias
    position                 [positions] floating point   half of it, fp32
    time                     [buckets] floating point     half of it, fp32
    cells                    `bucket_cells`               the same
    key_times, query_times   [T] int64 seconds            `TokenTimes`
    positions, buckets       the sizes of the tables, 0 for an absent one
    steps                    None                         `bucket_starts`
    width                    0                            W of `TokenTimes`

    Tensors of an absent table are None.
    """

    position: object = None
    time: object = None
    cells: object = None
    key_times: object = None
    query_times: object = None
    positions: object = 0
    buckets: object = 0
    steps: object = None
    width: object = 0

    @classmethod
    def from_bias(cls, bias: RelativeBias) -> "KernelBias":
        """Return the arguments for `table_bias`. bias: the result of `check_bias`."""
        position, time, *times = (None if x is None else x.contiguous() for x in bias)
        cells = None if time is None else device_cells(num_time_buckets(time), time.device)
        sizes = (0 if x is None else x.shape[0] for x in (position, time))
        return cls(position, time, cells, *times, *sizes)


class HalvedTables:
    """The layout of both tables, halved, in one fp32 tensor, for kernels that compute half of each score.

    The position table has `margin` zeros before and after it; the time table is followed by MAX_EDGES zeros and
    MASKED_BIAS. Without tables the tensor is empty.
    """

    def __init__(self, bias: RelativeBias, margin: int):
        self.position, self.time = bias[:2]
        self.positions = 0 if self.position is None else self.position.shape[0]
        self.buckets = num_time_buckets(self.time)
        # The number of entries of the time table that kernels read, and the bucket of masked pairs; 0 without a table.
        self.entries = 0 if self.buckets is None else self.buckets + 1
        self.masked = 0 if self.buckets is None else masked_bucket(self.buckets)
        self.margin = margin
        # Align the time table to 16 bytes: Triton compiles a kernel again when the alignment of a pointer changes.
        self.width = 0 if self.position is None else cdiv(self.positions + 2 * margin, 16) * 16
        self.size = self.width + (self.masked + 1 if self.masked else 0)

    def new(self, like: torch.Tensor) -> torch.Tensor:
        """Allocate the halves on the device of `like`."""
        return like.new_empty(self.size, dtype=torch.float32)

    def halved(self, like: torch.Tensor) -> torch.Tensor:
        """Compute the halves."""
        halves = self.new(like)
        if self.size:
            sizes = dict(N=self.positions, WIDTH=self.width, TIMES=self.entries, MARGIN=self.margin, BLOCK=1024)
            tables = halves, halves[self.width :], self.position, self.time
            run(halved_tables_kernel, cdiv(max(self.width, self.size - self.width), 1024), *tables, **sizes)
        return halves

    def kernel_bias(
        self, halves: torch.Tensor, key_times: TokenTimes | None, query_times: TokenTimes | None
    ) -> KernelBias:
        """Return the arguments for `half_bias`. halves: the result of `halved`; key_times, query_times: the plan's."""
        position = None if self.position is None else halves[self.margin :]
        if self.buckets is None or key_times is None:
            return KernelBias(position, positions=self.positions)
        cells, steps = (f(self.buckets, halves.device) for f in (device_cells, bucket_starts))
        sizes = self.positions, self.entries
        width = key_times.split.shape[1]
        return KernelBias(position, halves[self.width :], cells, key_times, query_times, *sizes, steps, width)


class TileBias(NamedTuple):
    """The timestamps and plan entries of a program's resident side; not read without a time bias.

    high, low, offset     [RESIDENT, 1], the times of the resident side, see `TokenTimes`
    times, offsets        pointers to the high parts and offsets of the streamed side's sequence
    entries, near         pointers to the plan's entries for the resident side, see `TileMap`
    nearest               the number of the nearest block of the streamed side
    """

    high: tl.tensor
    low: tl.tensor
    offset: tl.tensor
    times: tl.tensor
    offsets: tl.tensor
    entries: tl.tensor
    near: tl.tensor
    nearest: tl.tensor


@triton.jit
def resident_bias(bias, resident, streamed, begin, place, inside, entries, near, nearest):
    """Return the `TileBias` of the resident tokens begin + place; `begin` is the sequence's first token.

    resident, streamed: the `TokenTimes` of both sides; entries, near, nearest: see `TileBias`.
    """
    high = tl.load(resident.split + begin + place, inside, 0.0)[:, None]
    low = tl.load(resident.split + bias.width + begin + place, inside, 0.0)[:, None]
    offset = tl.load(resident.offset + begin + place, inside, 0)[:, None]
    return TileBias(high, low, offset, streamed.split + begin, streamed.offset + begin, entries, near, nearest)


@triton.jit
def load_times(times, token, inside):
    """Load int64 timestamps of tokens; return 0 where not `inside`, and everywhere if `times` is None."""
    if times is not None:
        return tl.load(times + token, inside, 0)
    else:
        return tl.zeros_like(token)


@triton.jit
def table_bias(bias, distance, seen, query_times, key_times):
    """Return (biases fp32, time buckets) of pairs, (0, 0) where not `seen`.

    bias: `KernelBias`. distance: t - s, in the shape of `seen`. query_times, key_times: int64 seconds that broadcast to
    this shape; not read without a time table.
    """
    biases = tl.zeros_like(distance.to(tl.float32))
    bucket = tl.zeros_like(distance)
    if bias.position is not None:
        biases += tl.load(bias.position + distance, mask=seen & (distance < bias.positions), other=0.0).to(tl.float32)
    if bias.time is not None:
        bucket = tl.where(seen, pair_bucket(query_times, key_times, bias.cells), 0)
        biases += tl.load(bias.time + bucket).to(tl.float32)
    return biases, bucket


@triton.jit
def prefetch_entry(start, last, bias, tile, STREAMED: tl.constexpr, ASM: tl.constexpr):
    """Return (entry, bias of its lowest bucket, next entry) of the narrow tile whose block begins at token `start`.

    The narrow tiles end at token `last`, from which on the result is arbitrary.
    """
    entries = tile.entries + start // STREAMED
    entry = tl.where(start < last, scalar(entries, ASM).to(tl.int32), 0)
    return entry, scalar(bias.time + (entry >> ENTRY_SHIFT), ASM), scalar(entries + 1, ASM).to(tl.int32)


@triton.jit
def bias_position(t, sequence, kind: tl.constexpr):
    """Return a token's position plus a constant of the sequence (see `token_position`), for differences of positions.

    With int64 the compiler sees that neighbouring pairs read neighbouring addresses.
    """
    EXTENSION: tl.constexpr = kind.EXTENSION
    return token_position(t, sequence, kind.HAS_TARGETS, EXTENSION).to(tl.int64)


@triton.jit
def load_next_four(pointer):
    """Load pointer[1] to pointer[MAX_EDGES]."""
    return tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3), tl.load(pointer + 4)


@triton.jit
def narrow_bias(first, edges, time, steps, resident, streamed, origin, BY_QUERY: tl.constexpr):
    """Return the time bias of a narrow tile with at least one edge.

    first: the bias of the lowest bucket. edges: the number of edges, 1 to MAX_EDGES. time, steps: pointers to the time
    table and to `bucket_starts` at the lowest bucket. first, time and steps are scalars, or tensors that broadcast to
    the tile. resident, origin, streamed: the offsets of the resident side, the first offset of the streamed side, and
    `relative_to_origin`.
    """
    edge, value = load_next_four(steps), load_next_four(time)  # loads inside the branches would be waited for
    tile = first + (value[0] - first) * past_edge(relative_to_edge(resident, origin, edge[0], BY_QUERY), streamed)
    if edges > 1:
        tile += (value[1] - value[0]) * past_edge(relative_to_edge(resident, origin, edge[1], BY_QUERY), streamed)
    if edges > 2:  # with three edges, no pair reaches the fourth
        tile += (value[2] - value[1]) * past_edge(relative_to_edge(resident, origin, edge[2], BY_QUERY), streamed)
        tile += (value[3] - value[2]) * past_edge(relative_to_edge(resident, origin, edge[3], BY_QUERY), streamed)
    return tile


@triton.jit
def half_bias(
    start, first_row, positions, sequence, ahead, bias, tile, kind: tl.constexpr, MASKED: tl.constexpr,
    IS_NEAR: tl.constexpr, BY_QUERY: tl.constexpr, RESIDENT: tl.constexpr, STREAMED: tl.constexpr,
):  # fmt: skip
    """Return half the biases [RESIDENT, STREAMED] of the resident side with the streamed block that begins at `start`.

    bias: `KernelBias`, tile: `TileBias`. first_row, positions: the first token of the resident side, and its
    `bias_position` [RESIDENT, 1]. ahead: `prefetch_entry` of a narrow tile. IS_NEAR: the plan has the buckets of the
    pairs. MASKED: the tile need not be narrow. BY_QUERY: queries are the resident side.

    Returns (the biases, the pairs' time buckets if IS_NEAR or MASKED, `prefetch_entry` of the next tile). If IS_NEAR,
    the time bias of masked pairs is MASKED_BIAS.
    """
    token = start + tl.arange(0, STREAMED)
    buckets = 0
    biases = tl.zeros([RESIDENT, STREAMED], tl.float32)
    if kind.HAS_POSITION:
        if (kind.HAS_TARGETS or kind.HAS_CONTEXT) and (MASKED or not BY_QUERY):
            column = bias_position(token, sequence, kind)[None, :]
            distance = positions - column if BY_QUERY else column - positions
            if kind.SEES_ALL or kind.GROUP > 1:
                distance = tl.maximum(distance, 0)
            biases = look_up(bias.position, distance, kind.ASM)
        else:
            # The same addresses, written as a pointer for each row plus constants, so that the compiler sees which
            # neighbours read the same address.
            if kind.HAS_TARGETS or kind.HAS_CONTEXT:
                row = bias.position + (positions - start)
            else:
                resident = tl.arange(0, RESIDENT).to(tl.int64)[:, None]
                row = bias.position + (first_row - start if BY_QUERY else start - first_row)
                row = row + (resident if BY_QUERY else -resident)
            column = tl.arange(0, STREAMED).to(tl.int64)[None, :]
            # The condition is always true; it makes Triton move the load and its address to the top of the loop.
            if BY_QUERY or kind.HAS_TIME or start < sequence.length:
                biases = look_up(row, -column if BY_QUERY else column, kind.ASM)
    if kind.HAS_TIME and IS_NEAR:
        block = tile.nearest - start // STREAMED if BY_QUERY else start // STREAMED - tile.nearest
        stored = tl.load(tile.near + block * (RESIDENT * STREAMED) + tl.arange(0, RESIDENT * STREAMED))
        buckets = reorder_near(stored, RESIDENT, STREAMED, False).to(tl.int32)
        biases += look_up(bias.time, buckets, kind.ASM)
    elif kind.HAS_TIME and MASKED:
        inside = token < sequence.length
        other_high = tl.load(tile.times + token, inside, 0.0)[None, :]
        other_low = tl.load(tile.times + bias.width + token, inside, 0.0)[None, :]
        buckets = bucket_of(tl.abs((tile.high - other_high) + (tile.low - other_low)), bias.cells, kind.ASM)
        biases += look_up(bias.time, buckets, kind.ASM)
    elif kind.HAS_TIME:
        entry, first, following = ahead
        # Load the next tile's numbers while this one is computed, whether or not it is narrow.
        next_first = scalar(bias.time + tl.maximum(following >> ENTRY_SHIFT, 0), kind.ASM)
        after_next = scalar(tile.entries + start // STREAMED + 2, kind.ASM).to(tl.int32)
        # Triton does not pipeline a loop that carries a value unchanged: hence `opaque`.
        ahead = opaque(following), next_first, after_next
        edges = entry & ENTRY_EDGES
        time = bias.time + (entry >> ENTRY_SHIFT)
        steps = bias.steps + (entry >> ENTRY_SHIFT)
        # Each branch ends with its own sum: with one sum after both, the position bias is complete before the branches.
        if edges == 0:
            biases += first
        else:
            origin = tl.load(tile.offsets + start).to(tl.int64)
            offsets = look_up(tile.offsets, token.to(tl.int64)[None, :], kind.ASM)
            streamed = relative_to_origin(offsets, origin.to(tl.int32), BY_QUERY)
            biases += narrow_bias(first, edges, time, steps, tile.offset, streamed, origin, BY_QUERY)
    return biases, buckets, ahead


@triton.jit(do_not_specialize_on_alignment=["position", "time"])
def halved_tables_kernel(
    half_position, half_time, position, time, N: tl.constexpr, WIDTH: tl.constexpr, TIMES: tl.constexpr,
    MARGIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write half of position [N] to half_position [WIDTH], and of time to half_time [TIMES + MAX_EDGES + 1], in fp32.

    half_position has MARGIN zeros first and zeros at its end; half_time ends with MAX_EDGES zeros and MASKED_BIAS.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if position is not None:
        value = tl.load(position + i - MARGIN, (i >= MARGIN) & (i < MARGIN + N), 0.0).to(tl.float32)
        tl.store(half_position + i, 0.5 * value, i < WIDTH)
    if time is not None:
        value = 0.5 * tl.load(time + i, i < TIMES, 0.0).to(tl.float32)
        value = tl.where(i == TIMES + MAX_EDGES, MASKED_BIAS, value)
        tl.store(half_time + i, value, i <= TIMES + MAX_EDGES)
