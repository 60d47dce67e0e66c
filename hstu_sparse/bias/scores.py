"""Add the relative bias to scores in kernels: pair by pair, or to a tile of scores of consecutive tokens.

Letters: T tokens of the batch, N max_seq_len; t and s: the positions of queries and keys in their sequence. The
resident side of a program's tile, queries or keys, is loaded once; the program walks over the streamed side in blocks.

Pair by pair (`table_bias`): a position bias is read from `position[t - s]`, a table of N, a time bias from the bucket
of the two timestamps. It is correct for any pairs.

By tiles (`half_bias`): a narrow tile (buckets.py) compares timestamps with its few edges, and without edges it needs
only one number. A loop without masks walks over the narrow tiles on the far side. For the NEAR nearest blocks, narrow
or not, the plan has the buckets of all their pairs, a byte each: NEAR times the length of a block for each token.
Masked pairs have a bucket of their own there, and need no further mask. Wide tiles further away go to a loop that
computes their buckets.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.bias.buckets import (
    ENTRY_EDGES,
    ENTRY_SHIFT,
    MOST_EDGES,
    TokenTimes,
    bucket_of,
    bucket_steps,
    device_cells,
    edge_place,
    hidden_bucket,
    near_order,
    num_time_buckets,
    other_place,
    pair_bucket,
    reached,
)
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.core.launch import cdiv, run
from hstu_sparse.tiles.assembly import look_up, scalar
from hstu_sparse.tiles.ranges import place
from hstu_sparse.tiles.rows import opaque

NEAR = tl.constexpr(16)
# Zeros on both sides of the halved position table: the compiler may move look-ups before the loops' bounds checks, and
# they then read one block more, past the table's ends.
POSITION_MARGIN = 1024
# Half the bias of a masked pair: SiLU and its slope are exactly zero there.
HIDDEN_BIAS = tl.constexpr(-1e30)


class KernelBias(NamedTuple):
    """A `RelativeBias` as kernels take it; members of an absent table are None.

    position                 [positions] floating point; by a plan its halves (see `halved_tables_kernel`)
    time                     [buckets] floating point; by a plan its halves
    cells                    `bucket_cells`
    key_times, query_times   [T] int64 seconds; by a plan `TokenTimes`
    positions, buckets       the tables' numbers of entries, 0 for an absent one
    steps                    by a plan `bucket_steps`
    width                    by a plan the number of tokens of `TokenTimes.split`, whose low parts begin there
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
    def of(cls, bias: RelativeBias) -> "KernelBias":
        """Return the arguments of kernels that add the bias pair by pair. bias: the result of `check_bias`."""
        position, time, *times = (None if x is None else x.contiguous() for x in bias)
        cells = None if time is None else device_cells(num_time_buckets(time), time.device)
        sizes = (0 if x is None else x.shape[0] for x in (position, time))
        return cls(position, time, cells, *times, *sizes)


class HalvedTables:
    """A bias's tables halved, for kernels that compute half of each score: one fp32 tensor, empty without tables.

    The position table has `margin` zeros on both sides, the time table MOST_EDGES zeros behind and then HIDDEN_BIAS.
    """

    def __init__(self, bias: RelativeBias, margin: int):
        self.position, self.time = bias[:2]
        self.positions = 0 if self.position is None else self.position.shape[0]
        self.buckets = num_time_buckets(self.time)
        # Entries of the time table that are read, and the bucket of masked pairs behind them; 0 without a table.
        self.entries = 0 if self.buckets is None else self.buckets + 1
        self.hidden = 0 if self.buckets is None else hidden_bucket(self.buckets)
        self.margin = margin
        # Pointers are multiples of 16 bytes for any size: Triton compiles a kernel again when their alignment changes.
        self.width = 0 if self.position is None else cdiv(self.positions + 2 * margin, 16) * 16
        self.size = self.width + (self.hidden + 1 if self.hidden else 0)

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
        """Return the kernels' arguments for the halves and the times of a plan."""
        position = None if self.position is None else halves[self.margin :]
        if self.buckets is None or key_times is None:
            return KernelBias(position, positions=self.positions)
        cells, steps = (f(self.buckets, halves.device) for f in (device_cells, bucket_steps))
        sizes = self.positions, self.entries
        width = key_times.split.shape[1]
        return KernelBias(position, halves[self.width :], cells, key_times, query_times, *sizes, steps, width)


class TileBias(NamedTuple):
    """The tile of a `KernelBias` that a program adds; not read without a time bias.

    high, low, offset     [OWN, 1], times of the resident side, see `TokenTimes`
    times, offsets        pointers to the streamed side's high parts and offsets, from the sequence's first token on
    entries, near         pointers to the plan's entries of the resident side, see `TileMap`
    nearest               the nearest block of the streamed side
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
    """Return the `TileBias` of the tokens at `place` of the sequence that begins at token `begin`.

    resident, streamed: the `TokenTimes` of the resident and of the streamed side; the others: see `TileBias`.
    """
    high = tl.load(resident.split + begin + place, inside, 0.0)[:, None]
    low = tl.load(resident.split + bias.width + begin + place, inside, 0.0)[:, None]
    offset = tl.load(resident.offset + begin + place, inside, 0)[:, None]
    return TileBias(high, low, offset, streamed.split + begin, streamed.offset + begin, entries, near, nearest)


@triton.jit
def load_times(times, token, inside):
    """Load int64 timestamps of tokens, 0 where not `inside`, and everywhere if no table needs `times` (None)."""
    if times is not None:
        return tl.load(times + token, inside, 0)
    else:
        return tl.zeros_like(token)


@triton.jit
def table_bias(bias, distance, seen, query_times, key_times):
    """Return (biases fp32, time buckets) of pairs by a `KernelBias`; 0 and bucket 0 of those that are not `seen`.

    distance: t - s, of any shape, which is that of `seen`. query_times, key_times: int64 seconds, which broadcast to
    it; not read without a time table.
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
def read_ahead(start, last, bias, tile, OTHER: tl.constexpr, ASM: tl.constexpr):
    """Return (entry, bias of its lowest bucket, next entry) of the narrow tile whose block begins at `start`.

    From `last` on there is no narrow tile, and the result is arbitrary.
    """
    entries = tile.entries + start // OTHER
    entry = tl.where(start < last, scalar(entries, ASM).to(tl.int32), 0)
    return entry, scalar(bias.time + (entry >> ENTRY_SHIFT), ASM), scalar(entries + 1, ASM).to(tl.int32)


@triton.jit
def bias_position(t, sequence, kind: tl.constexpr):
    """Return a token's position in the position bias (int64), but for a constant: see `place`.

    The 64 bits let the compiler see that neighbouring pairs read neighbouring addresses.
    """
    MORE: tl.constexpr = kind.MORE
    return place(t, sequence, kind.HAS_TARGETS, MORE).to(tl.int64)


@triton.jit
def next_four(pointer):
    """Load pointer[1] to pointer[MOST_EDGES]."""
    return tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3), tl.load(pointer + 4)


@triton.jit
def narrow_bias(first, edges, time, steps, resident, streamed, origin, BY_QUERY: tl.constexpr):
    """Return the time bias of a narrow tile with at least one edge.

    first: its lowest bucket's bias; edges: the number of its edges, 1 to MOST_EDGES; time, steps: pointers to the table
    and to `bucket_steps` at the lowest bucket; resident, streamed, origin: for `reached`, the resident side's offsets,
    `other_place`, the time of the streamed side's first token. first, time and steps may be numbers, or tensors that
    broadcast to the tile.
    """
    edge, value = next_four(steps), next_four(time)  # loaded together, so that no branch waits for its own load
    tile = first + (value[0] - first) * reached(edge_place(resident, origin, edge[0], BY_QUERY), streamed)
    if edges > 1:
        tile += (value[1] - value[0]) * reached(edge_place(resident, origin, edge[1], BY_QUERY), streamed)
    if edges > 2:
        tile += (value[2] - value[1]) * reached(edge_place(resident, origin, edge[2], BY_QUERY), streamed)
        tile += (value[3] - value[2]) * reached(edge_place(resident, origin, edge[3], BY_QUERY), streamed)
    return tile


@triton.jit
def half_bias(
    start, first_row, positions, sequence, ahead, bias, tile, kind: tl.constexpr, MASKED: tl.constexpr,
    IS_NEAR: tl.constexpr, BY_QUERY: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """Return half the biases, [OWN, OTHER], of the resident side with the streamed side's block from `start` on.

    tile: `TileBias`. first_row: the resident side's first token; positions: its `bias_position`, [OWN, 1]. ahead:
    `read_ahead` of this tile, if it is narrow. MASKED: the tile may be wide. IS_NEAR: its buckets are in the plan.
    BY_QUERY: queries are the resident side.

    Returns the biases (IS_NEAR with time: HIDDEN_BIAS if a query does not see a key), the pairs' buckets if MASKED
    with time, and `read_ahead` of the next tile.
    """
    token = start + tl.arange(0, OTHER)
    buckets = 0
    biases = tl.zeros([OWN, OTHER], tl.float32)
    if kind.HAS_POSITION:
        if (kind.HAS_TARGETS or kind.HAS_CONTEXT) and (MASKED or not BY_QUERY):
            column = bias_position(token, sequence, kind)[None, :]
            distance = positions - column if BY_QUERY else column - positions
            if kind.SEES_ALL or kind.GROUP > 1:
                distance = tl.maximum(distance, 0)
            biases = look_up(bias.position, distance, kind.ASM)
        else:
            # The same sum, written so that the compiler sees which neighbours read the same address: a pointer for
            # each row, which is new in each block, plus constants.
            if kind.HAS_TARGETS or kind.HAS_CONTEXT:
                row = bias.position + (positions - start)
            else:
                resident = tl.arange(0, OWN).to(tl.int64)[:, None]
                row = bias.position + (first_row - start if BY_QUERY else start - first_row)
                row = row + (resident if BY_QUERY else -resident)
            column = tl.arange(0, OTHER).to(tl.int64)[None, :]
            # The condition is always true: it makes Triton move the load and what depends on it to the loop's top.
            if BY_QUERY or kind.HAS_TIME or start < sequence.length:
                biases = look_up(row, -column if BY_QUERY else column, kind.ASM)
    if kind.HAS_TIME and IS_NEAR:
        block = tile.nearest - start // OTHER if BY_QUERY else start // OTHER - tile.nearest
        stored = tl.load(tile.near + block * (OWN * OTHER) + tl.arange(0, OWN * OTHER))
        buckets = near_order(stored, OWN, OTHER, False).to(tl.int32)
        biases += look_up(bias.time, buckets, kind.ASM)
    elif kind.HAS_TIME and MASKED:
        inside = token < sequence.length
        other_high = tl.load(tile.times + token, inside, 0.0)[None, :]
        other_low = tl.load(tile.times + bias.width + token, inside, 0.0)[None, :]
        buckets = bucket_of(tl.abs((tile.high - other_high) + (tile.low - other_low)), bias.cells, kind.ASM)
        biases += look_up(bias.time, buckets, kind.ASM)
    elif kind.HAS_TIME:
        entry, first, following = ahead
        # The next tile's numbers are loaded while this one is computed; it need not be narrow.
        next_first = scalar(bias.time + tl.maximum(following >> ENTRY_SHIFT, 0), kind.ASM)
        after_next = scalar(tile.entries + start // OTHER + 2, kind.ASM).to(tl.int32)
        # Triton pipelines no loop that carries a number unchanged: hence `opaque`.
        ahead = opaque(following), next_first, after_next
        edges = entry & ENTRY_EDGES
        time = bias.time + (entry >> ENTRY_SHIFT)
        steps = bias.steps + (entry >> ENTRY_SHIFT)
        # Both branches end alike, so that the sum, which waits for the position bias, is delayed.
        if edges == 0:
            biases += first
        else:
            origin = tl.load(tile.offsets + start).to(tl.int64)
            offsets = look_up(tile.offsets, token.to(tl.int64)[None, :], kind.ASM)
            streamed = other_place(offsets, origin.to(tl.int32), BY_QUERY)
            biases += narrow_bias(first, edges, time, steps, tile.offset, streamed, origin, BY_QUERY)
    return biases, buckets, ahead


@triton.jit(do_not_specialize_on_alignment=["position", "time"])
def halved_tables_kernel(
    half_position, half_time, position, time, N: tl.constexpr, WIDTH: tl.constexpr, TIMES: tl.constexpr,
    MARGIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute halves of the bias tables in fp32, since the attention kernels compute half the scores.

    Position [N] gets MARGIN zeros in front, and zeros behind up to WIDTH; time [TIMES] gets MOST_EDGES zeros behind and
    then HIDDEN_BIAS.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if position is not None:
        value = tl.load(position + i - MARGIN, (i >= MARGIN) & (i < MARGIN + N), 0.0).to(tl.float32)
        tl.store(half_position + i, 0.5 * value, i < WIDTH)
    if time is not None:
        value = 0.5 * tl.load(time + i, i < TIMES, 0.0).to(tl.float32)
        value = tl.where(i == TIMES + MOST_EDGES, HIDDEN_BIAS, value)
        tl.store(half_time + i, value, i <= TIMES + MOST_EDGES)
