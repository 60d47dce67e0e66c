"""Which buckets of time differences two sides reach: between a query's times and a block's, or a tile's.

Letters: T tokens of the batch, B sequences, H heads, BS block size, S blocks chosen per group, R tokens per group, NB
block slots (see hstu_sparse/tiles.py).

It follows from the earliest and the latest time of the two sides, in any order of times. Most chosen blocks lie so far
back that it is one bucket.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.assembly import look_up, scalar
from hstu_sparse.bias.relative import bucket_edges
from hstu_sparse.tiles import locate

# The bucket has 12 bits of a cell's word.
MAX_BUCKETS = 4095
# Cells of an octave of fp32 numbers: 2 ** 3, each 1.125 times as wide as it begins, at most; a bucket is 1.35 times.
CELL_BITS = 3
CELL_SHIFT, CELL_REST = tl.constexpr(23 - CELL_BITS), tl.constexpr((1 << (23 - CELL_BITS)) - 1)
FIRST_CELL = tl.constexpr(127 << CELL_BITS)
# Powers of two that whole seconds can reach.
OCTAVES = 65
# Edges that `reached` (bias_tiles.py) takes a tile over; fp32 counts seconds exactly up to twice EXACT_SECONDS.
MOST_EDGES, EXACT_SECONDS = tl.constexpr(4), tl.constexpr(2.0**23)
# The lowest bucket and, above, the number of edges in one word.
EDGE_SHIFT, LOWEST = tl.constexpr(12), tl.constexpr(0xFFF)
# A bucket that is reached fits into eight bits: no difference of int64 seconds gets past the 145th.
SHORT_SHIFT, SHORT = tl.constexpr(8), tl.constexpr(0xFF)
# Parts of a block's list of groups, by edges: over MOST_EDGES, over a few, over 0, none. A few are 1 where groups fill
# a tile, whose single edges have a loop of their own, else 2.
PARTS = tl.constexpr(4)
# Queries whose buckets in the plan stand side by side.
TOGETHER = tl.constexpr(8)
# Of the map of means: the least tile of queries that it tells apart, and the blocks that it sums up.
LEAST_TILE, CHUNK = tl.constexpr(64), tl.constexpr(32)


class Chosen(NamedTuple):
    """The blocks that each group chose, as query-major kernels read them: [NG, H, S] each.

    With a time bias those that reach no edge come first, then those that reach one, and the own block is still behind
    all others.

    indices  int32
    reaches  int32, see bsa_reach_kernel; in the last place, where no past block is, how many reach no edge and, above
             16 bits, how many no more than one
    bases    fp32, the lowest bucket's entry in the table
    mores    fp32, what the next bucket's is more
    edges    fp32, where its edge lies: see `edge_places`, bias_tiles.py
    """

    indices: object
    reaches: object = None
    bases: object = None
    mores: object = None
    edges: object = None


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


@triton.jit
def span(high, low, mask, AXIS: tl.constexpr):
    """(high, low, high, low) of the earliest and of the latest of some times; infinite if there are none."""
    first = tl.min(tl.where(mask, high, float("inf")), AXIS)
    last = tl.max(tl.where(mask, high, float("-inf")), AXIS)
    first_low = tl.where(mask & (high == tl.expand_dims(first, AXIS)), low, float("inf"))
    last_low = tl.where(mask & (high == tl.expand_dims(last, AXIS)), low, float("-inf"))
    return first, tl.min(first_low, AXIS), last, tl.max(last_low, AXIS)


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
def own_places(queries, keys, BS: tl.constexpr):
    """Where a block of the plan's `own` has the buckets between its queries and keys, by their places in the block.

    Those of TOGETHER queries and a key stand side by side: for a tile of queries and keys, whichever way it lies in
    registers, a warp then reads few lines of memory.
    """
    return queries // TOGETHER * (TOGETHER * BS) + queries % TOGETHER + keys * TOGETHER


@triton.jit
def reach(cells, asked, seen, mask, FAR_QUERIES: tl.constexpr, ASM: tl.constexpr):
    """(lowest bucket, edges) between spans of times of queries (`asked`) and of keys (`seen`).

    There are more than MOST_EDGES too where a key is younger than a query or `reached` cannot tell an edge exactly.
    FAR_QUERIES: see `time_tile`.
    """
    near = (asked[0] - seen[2]) + (asked[1] - seen[3])
    far = (asked[2] - seen[0]) + (asked[3] - seen[1])
    long = (asked[2] - asked[0]) + (asked[3] - asked[1])
    if FAR_QUERIES:
        long = tl.maximum(long, (seen[2] - seen[0]) + (seen[3] - seen[1]))
    lowest = find_bucket(tl.where(mask, tl.maximum(tl.maximum(near, -far), 0.0), 0.0), cells, ASM)
    edges = find_bucket(tl.where(mask, tl.maximum(far, -near), 0.0), cells, ASM) - lowest
    exact = tl.minimum(near, -long + (EXACT_SECONDS - 1.0)) >= 0.0
    edges = tl.where(exact, edges, tl.maximum(edges, MOST_EDGES + 1))
    return lowest, tl.where(mask, edges, 0)


@triton.jit
def all_reach(lowest, edges, mask):
    """(lowest, the most edges of one, the lowest and the highest bucket of all), what `time_tile` wants."""
    least = tl.min(tl.where(mask, lowest, LOWEST), 0)
    return lowest, tl.max(edges, 0), least, tl.max(tl.where(mask, lowest + edges, 0), 0)


@triton.jit
def map_row(start, b, begin, BS: tl.constexpr):
    """The row in the plan's map of means for queries from position `begin` on of sequence b."""
    SIZE: tl.constexpr = BS if BS > LEAST_TILE else LEAST_TILE
    return (start // SIZE + b + begin // SIZE).to(tl.int64)


@triton.jit
def means_reach(bias, row, first, SIZE: tl.constexpr, ASM: tl.constexpr):
    """`all_reach` of SIZE blocks' middle tokens, from block `first` on, for queries of a `map_row`."""
    if bias.time is not None:
        place = row * bias.blocks + first
        lowest = scalar(bias.means + place + tl.arange(0, SIZE), ASM).to(tl.int32) & SHORT
        word = tl.load(bias.summaries + place // CHUNK)
        edges, least, greatest = word & SHORT, (word >> SHORT_SHIFT) & SHORT, word >> 2 * SHORT_SHIFT
        for i in tl.static_range(1, SIZE // CHUNK):
            word = tl.load(bias.summaries + place // CHUNK + i)
            edges = tl.maximum(edges, word & SHORT)
            least = tl.minimum(least, (word >> SHORT_SHIFT) & SHORT)
            greatest = tl.maximum(greatest, word >> 2 * SHORT_SHIFT)
        return lowest, edges, least, greatest
    else:
        return tl.zeros([SIZE], tl.int32), 0, 0, 0


@triton.jit
def plain_means(bias, row, blocks):
    """Of the `blocks` mean keys that queries of a `map_row` see those in front of the first CHUNK in which one reaches
    several edges; 128 CHUNKs at most.
    """
    chunk = tl.arange(0, 128)
    words = tl.load(bias.summaries + row * bias.blocks // CHUNK + chunk, chunk * CHUNK < blocks, SHORT)
    return tl.minimum(tl.min(tl.where((words & SHORT) > 1, chunk, 128), 0) * CHUNK, blocks)


@triton.jit
def last_rough(bias, row, rows, first, SIZE: tl.constexpr):
    """Of `rows` tiles of queries from a `map_row` on those up to the last to which one of the SIZE mean keys from
    `first` on reaches several edges.
    """
    found = 0
    for i in range(0, rows, 128):
        tile = i + tl.arange(0, 128)
        place = ((row + tile) * bias.blocks + first) // CHUNK
        edges = tl.zeros([128], tl.int32)
        for chunk in tl.static_range(SIZE // CHUNK if SIZE > CHUNK else 1):
            edges = tl.maximum(edges, tl.load(bias.summaries + place + chunk, tile < rows, 0) & SHORT)
        found = tl.maximum(found, tl.max(tl.where(edges > 1, tile + 1, 0), 0))
    return found


@triton.jit
def keys_reach(bias, asked, rows, known, SIZE: tl.constexpr, ASM: tl.constexpr):
    """The same of SIZE queries of the span `asked` and the keys at `rows`, all of the queries alike."""
    if bias.time is not None:
        high, low = load_times(bias.key_high, bias.key_low, rows, known)
        lowest, edges = reach(bias.cells, asked, span(high, low, known, 0), True, True, ASM)
        return tl.zeros([SIZE], tl.int32) + lowest, edges, lowest, lowest + edges
    else:
        return tl.zeros([SIZE], tl.int32), 0, 0, 0


@triton.jit
def load_reach(pointers, mask, SIZE: tl.constexpr, ASM: tl.constexpr):
    """The same of SIZE queries from what bsa_reach_kernel wrote: for each, or, without a mask, one for all."""
    if pointers is not None:
        if mask is not None:
            found = tl.load(pointers, mask=mask, other=0)
            return all_reach(found & LOWEST, found >> EDGE_SHIFT, mask)
        else:
            found = look_up(pointers, tl.cast(0, tl.int64), ASM)
            lowest, edges = found & LOWEST, found >> EDGE_SHIFT
            return tl.zeros([SIZE], tl.int32) + lowest, edges, lowest, lowest + edges
    else:
        return tl.zeros([SIZE], tl.int32), 0, 0, 0


@triton.jit(do_not_specialize=["B"])
def bsa_reach_kernel(
    indices, offsets, reaches, chosen, bias, H, B, S,
    BS: tl.constexpr, R: tl.constexpr, BG: tl.constexpr, P: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """For each group's chosen blocks what `reach` finds: the lowest bucket, and above EDGE_SHIFT the edges.

    chosen: None, or a `Chosen` to be written.
    """
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
    lowest, edges = reach(bias.cells, asked, seen, j >= 0, True, ASM)
    tl.store(reaches + entry, lowest | (edges << EDGE_SHIFT), mask=j >= 0)
    if chosen is not None:
        past = (j >= 0) & (j < group[:, None] * R // BS)
        plain = (past & (edges == 0)).to(tl.int32)
        single = (past & (edges == 1)).to(tl.int32)
        rest = past.to(tl.int32) - plain - single
        none = tl.sum(plain, 1)[:, None]
        few = none + tl.sum(single, 1)[:, None]
        behind = tl.where(single == 1, none + tl.cumsum(single, 1), few + tl.cumsum(rest, 1))
        place = tl.where(past, tl.where(plain == 1, tl.cumsum(plain, 1), behind) - 1, p)
        target = entry - p + place
        tl.store(chosen.indices + target, j, mask=j >= 0)
        base = tl.load(bias.time + lowest)
        tl.store(chosen.bases + target, base, mask=past)
        tl.store(chosen.mores + target, tl.load(bias.time + lowest + 1) - base, mask=past)
        tile = bias.origins + map_row(start, b, group * R, BS)[:, None] * 2
        high, low = tl.load(tile, mask=past, other=0.0), tl.load(tile + 1, mask=past, other=0.0)
        edge = ((high - seen[0]) - tl.load(bias.steps + lowest + 1)) + ((low - seen[1]) + 1.0)
        tl.store(chosen.edges + target, edge, mask=past)
        tl.store(chosen.reaches + target, lowest | (edges << EDGE_SHIFT), mask=past)
        last = (group[:, None] * R < length) & (p == S - 1)
        tl.store(chosen.reaches + entry, tl.broadcast_to(none | (few << 16), entry.shape), mask=last)


@triton.jit(do_not_specialize=["B", "pitch", "blocks"])
def bsa_means_kernel(
    offsets, times, cells, means, summaries, places, origins, B, pitch, blocks,
    BS: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """For each tile of TILE queries and each block that is complete for one of them the lowest bucket, and of CHUNK
    blocks together the most edges of one, the lowest and the highest bucket; and where the queries stand in time.
    """
    slot = tl.program_id(0)
    _b, start, length, i = locate(offsets, slot, B, TILE)
    t = i * TILE + tl.arange(0, TILE)
    live = t < length
    if i * TILE < length:
        high, low = load_times(times + 2 * pitch, times + 3 * pitch, start + t, live)
        asked = span(high, low, live, 0)
        tl.store(places + start + t, (high - asked[0]) + (low - asked[1]), live)
        tl.store(origins + slot * 2, asked[0])
        tl.store(origins + slot * 2 + 1, asked[1])
        end = tl.minimum(i * TILE + TILE, length) // BS
        for c in range(0, end, CHUNK):
            j = c + tl.arange(0, CHUNK)
            known = j < end
            mean = load_times(times, times + pitch, start + j * BS + BS // 2, known)
            lowest, edges = reach(cells, asked, (mean[0], mean[1], mean[0], mean[1]), known, False, ASM)
            _, edges, least, greatest = all_reach(lowest, edges, known)
            place = slot.to(tl.int64) * blocks + c
            tl.store(means + place + tl.arange(0, CHUNK), lowest.to(means.dtype.element_ty), known)
            tl.store(summaries + place // CHUNK, edges | (least << SHORT_SHIFT) | (greatest << 2 * SHORT_SHIFT))


@triton.jit(do_not_specialize=["B"])
def bsa_edges_kernel(offsets, bias, B, BS: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr):
    """Writes bias.edges: of each tile of TILE queries and CHUNK mean keys the lowest bucket's entry of the table, what
    the next bucket's is more, and where its edge lies (see `reached`, bias_tiles.py); 0 for keys that are not seen. The
    mean keys are dealt to grid axis 1 in turn.
    """
    slot = tl.program_id(0)
    _b, start, length, i = locate(offsets, slot, B, TILE)
    high, low = tl.load(bias.origins + slot * 2), tl.load(bias.origins + slot * 2 + 1)
    end = tl.minimum(i * TILE + TILE, length) // BS
    for c in range(tl.program_id(1) * CHUNK, bias.blocks, tl.num_programs(1) * CHUNK):
        j = c + tl.arange(0, CHUNK)
        known = (j < end) & (i * TILE < length)
        place = slot.to(tl.int64) * bias.blocks + c
        lowest = tl.load(bias.means + place + tl.arange(0, CHUNK), known, 0).to(tl.int32) & SHORT
        mean_high, mean_low = load_times(bias.key_high, bias.key_low, start + j * BS + BS // 2, known)
        entry = tl.load(bias.time + lowest, known, 0.0)
        more = tl.load(bias.time + lowest + 1, known, 0.0) - entry
        edge = ((high - mean_high) - tl.load(bias.steps + lowest + 1)) + ((low - mean_low) + 1.0)
        target = bias.edges + place * 3 + tl.arange(0, CHUNK)
        tl.store(target, entry)
        tl.store(target + CHUNK, more)
        tl.store(target + 2 * CHUNK, tl.where(known, edge, 0.0))
