"""The time and the position bias of a tile of scores.

Letters: T tokens of the batch, N max_seq_len; t and s: the positions of queries and keys in their sequence. The own
side of a program is that of its tile, of queries or of keys; the other side is the one it walks in blocks.

A position bias is read per pair from `position[t - s]`, a table of N. Time differences fall into buckets of logarithmic
width. How many bucket edges a tile reaches over is known from the least and the greatest timestamp of its two sides. A
tile of at most MOST_EDGES is called narrow: timestamps, as offsets from the sequence's first, are compared with its
edges, and a flat tile (no edge) needs only one number. With ascending timestamps all tiles are narrow but the few next
to the diagonal. The run of narrow tiles on the far side is walked by a loop that has no masks.

The NEAR nearest blocks, narrow or not, have the buckets of all their pairs in the plan, a byte each: NEAR times the
length of a block for each token. Pairs that are not seen have a bucket of their own there, and need no mask. Wide tiles
further away go to a loop that computes their buckets.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.assembly import bucket, look_up, scalar
from hstu_sparse.dense.ranges import key_ranges
from hstu_sparse.relative_bias import bucket_edges
from hstu_sparse.tiles import COMPILED, opaque

MOST_EDGES = tl.constexpr(4)
NEAR = tl.constexpr(16)
# A narrow tile's entry in the plan: its lowest bucket times 8, plus the number of edges in it.
ENTRY_SHIFT, ENTRY_EDGES = tl.constexpr(3), tl.constexpr(7)
# Zeros on both sides of the halved position table: look-ups may be moved in front of the loops' bounds checks, and
# then read for one block more, past the table's ends.
POSITION_MARGIN = 1024
# Half the bias of a pair that is not seen: SiLU and its slope are exactly zero there.
HIDDEN_BIAS = tl.constexpr(-1e30)
# Beyond all differences of int64 seconds that occur.
_NEVER = 2**62


class Bias(NamedTuple):
    """What finds the biases of a program's own tile; what belongs to a bias that is not there is not read.

    position, time        pointers to the tables' halves (see `dense_attention_tables_kernel`)
    cells, steps          pointers to `bucket_cells` and `bucket_steps`
    high, low, offset     [OWN, 1], timestamps of the own side, see `TokenTimes`
    other_split           pointer to the other side's, from the sequence's first token on
    other_offset          the same, of its offsets
    entries, near         pointers to what the plan has of the own tile, see `TileMap`
    nearest               the block of the other side that is nearest
    total                 T
    """

    position: tl.tensor
    time: tl.tensor
    cells: tl.tensor
    steps: tl.tensor
    high: tl.tensor
    low: tl.tensor
    offset: tl.tensor
    other_split: tl.tensor
    other_offset: tl.tensor
    entries: tl.tensor
    near: tl.tensor
    nearest: tl.tensor
    total: tl.tensor


def hidden_bucket(num_buckets: int) -> int:
    """The bucket of pairs that are not seen: behind the table and what is read beyond its end."""
    return num_buckets + 1 + MOST_EDGES.value


@functools.lru_cache(maxsize=64)
def bucket_steps(num_buckets: int, device: torch.device) -> torch.Tensor:
    """[num_buckets + 1 + MOST_EDGES] int64: the least integer in each bucket, then some beyond all."""
    steps = [min(math.ceil(edge), _NEVER) if edge < math.inf else _NEVER for edge in bucket_edges(num_buckets)]
    return torch.tensor([0, *steps, *[_NEVER] * MOST_EDGES.value], device=device)


@triton.jit
def read_ahead(start, last, bias, OTHER: tl.constexpr, ASM: tl.constexpr):
    """Of the narrow tile with the block from `start` on: (its entry, the bias of its lowest bucket, the next entry).

    From `last` on there is none: what stands there may be anything.
    """
    entries = bias.entries + start // OTHER
    entry = tl.where(start < last, scalar(entries, ASM).to(tl.int32), 0)
    return entry, scalar(bias.time + (entry >> ENTRY_SHIFT), ASM), scalar(entries + 1, ASM).to(tl.int32)


@triton.jit
def edge_place(own, origin, edge, BY_QUERY: tl.constexpr):
    """Where the own side stands by an edge, fp32, for `reached`. own: offsets; origin: of the block's first token."""
    if BY_QUERY:
        return (own.to(tl.int64) - (edge + origin - 1)).to(tl.float32)
    else:
        return ((origin + 1 - edge) - own.to(tl.int64)).to(tl.float32)


@triton.jit
def other_place(other, origin, BY_QUERY: tl.constexpr):
    """Where the other side stands. BY_QUERY: queries are the own side."""
    return (origin - other if BY_QUERY else other - origin).to(tl.float32)


@triton.jit
def reached(own, other):
    """1.0 for the pairs of a narrow tile at or past an edge, 0.0 for the rest, of `edge_place` and `other_place`.

    The sum of both, query less key less edge plus 1, is an integer, and exact where it is small: the other side of a
    narrow tile is less than 2^24 seconds long. One instruction at the full rate, which comparisons do not have.
    """
    if COMPILED:
        return tl.inline_asm_elementwise(
            "add.sat.f32 $0, $1, $2;", "=f,f,f", [own, other], tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.minimum(tl.maximum(own + other, 0.0), 1.0)


@triton.jit
def bias_position(t, history, HAS_TARGETS: tl.constexpr):
    """Where a token stands in the position bias (int64): candidates all at the first of them.

    The 64 bits let the compiler see that neighbouring pairs read neighbouring addresses.
    """
    if HAS_TARGETS:
        t = tl.minimum(t, history)
    return t.to(tl.int64)


@triton.jit
def near_order(tile, OWN: tl.constexpr, OTHER: tl.constexpr, STORE: tl.constexpr):
    """A tile [OWN, OTHER] from its order in memory, or (STORE) to it: a thread's values in wgmma's layout lie together.

    It is right for any layout; in wgmma's a thread loads its 16 bytes at once and nothing moves between threads.
    """
    if STORE:
        parts = tl.reshape(tile, [OWN // 16, 2, 8, OTHER // 8, 4, 2])
        return tl.reshape(tl.permute(parts, [0, 2, 4, 3, 1, 5]), [OWN * OTHER])
    else:
        parts = tl.reshape(tile, [OWN // 16, 8, 4, OTHER // 8, 2, 2])
        return tl.reshape(tl.permute(parts, [0, 4, 1, 3, 2, 5]), [OWN, OTHER])


@triton.jit
def next_four(pointer):
    """pointer[1] to pointer[MOST_EDGES]."""
    return tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3), tl.load(pointer + 4)


@triton.jit
def half_bias(
    start, place, sequence, ahead, bias, kind, MASKED: tl.constexpr, IS_NEAR: tl.constexpr, BY_QUERY: tl.constexpr,
    OWN: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """Half the biases, [OWN, OTHER], of a program's own tile with the block of the other side from `start` on.

    place: `bias_position` of the own side, [OWN, 1]. ahead: `read_ahead` of this tile, where it is narrow. MASKED: it
    need not be. IS_NEAR: its buckets are in the plan. BY_QUERY: queries are the own side.

    Returns the biases (IS_NEAR with time: HIDDEN_BIAS where a query does not see a key), the pairs' buckets if MASKED
    with time, and `read_ahead` of the next tile.
    """
    token = start + tl.arange(0, OTHER)
    buckets = 0
    found = tl.zeros([OWN, OTHER], tl.float32)
    if kind.HAS_POSITION:
        if kind.HAS_TARGETS and (MASKED or not BY_QUERY):
            column = bias_position(token, sequence.history, kind.HAS_TARGETS)[None, :]
            found = look_up(bias.position, place - column if BY_QUERY else column - place, kind.ASM)
        else:
            # The same; written so, the compiler sees which neighbours read the same address.
            row = bias.position + (place - start if BY_QUERY else start - place)
            column = tl.arange(0, OTHER).to(tl.int64)[None, :]
            # The condition, true of every block, is for Triton, which moves it and what hangs on it to the loop's top.
            if BY_QUERY or kind.HAS_TIME or start < sequence.length:
                found = look_up(row, -column if BY_QUERY else column, kind.ASM)
    if kind.HAS_TIME and IS_NEAR:
        block = bias.nearest - start // OTHER if BY_QUERY else start // OTHER - bias.nearest
        stored = tl.load(bias.near + block * (OWN * OTHER) + tl.arange(0, OWN * OTHER))
        buckets = near_order(stored, OWN, OTHER, False).to(tl.int32)
        found += look_up(bias.time, buckets, kind.ASM)
    elif kind.HAS_TIME and MASKED:
        inside = token < sequence.length
        other_high = tl.load(bias.other_split + token, inside, 0.0)[None, :]
        other_low = tl.load(bias.other_split + bias.total + token, inside, 0.0)[None, :]
        buckets = bucket(tl.abs((bias.high - other_high) + (bias.low - other_low)), bias.cells, kind.ASM)
        found += look_up(bias.time, buckets, kind.ASM)
    elif kind.HAS_TIME:
        entry, first, following = ahead
        # The next tile's numbers are asked for while this one is computed; it need not be narrow.
        next_first = scalar(bias.time + tl.maximum(following >> ENTRY_SHIFT, 0), kind.ASM)
        after_next = scalar(bias.entries + start // OTHER + 2, kind.ASM).to(tl.int32)
        # Triton pipelines no loop that hands on a number as it is: hence `opaque`.
        ahead = opaque(following), next_first, after_next
        edges = entry & ENTRY_EDGES
        time = bias.time + (entry >> ENTRY_SHIFT)
        steps = bias.steps + (entry >> ENTRY_SHIFT)
        # Both branches end alike, so that the sum, which waits for the position bias, is left for later.
        if edges == 0:
            found += first
        else:
            origin = tl.load(bias.other_offset + start).to(tl.int64)
            offsets = look_up(bias.other_offset, token.to(tl.int64)[None, :], kind.ASM)
            other = other_place(offsets, origin.to(tl.int32), BY_QUERY)
            edge, value = next_four(steps), next_four(time)  # at once: no branch waits for its own
            tile = first + (value[0] - first) * reached(edge_place(bias.offset, origin, edge[0], BY_QUERY), other)
            if edges > 1:
                tile += (value[1] - value[0]) * reached(edge_place(bias.offset, origin, edge[1], BY_QUERY), other)
            if edges > 2:
                tile += (value[2] - value[1]) * reached(edge_place(bias.offset, origin, edge[2], BY_QUERY), other)
                tile += (value[3] - value[2]) * reached(edge_place(bias.offset, origin, edge[3], BY_QUERY), other)
            found += tile
    return found, buckets, ahead


@triton.jit
def query_tile_bias(
    b, begin, block, first_row, t, sequence, q_times, q_offset, k_times, k_offset, entries, runs, near, row, total,
    HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TIME: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """For a tile of queries: (the keys' ranges, the fields of its `Bias` from `high` to `nearest`).

    Ranges: five bounds of four loops over the keys. The second loop needs no masks; with a time bias its blocks are
    narrow, the third is of wide and the fourth of near ones. Without, the third is empty.
    """
    first, full, diagonal, end = key_ranges(first_row, sequence, HAS_TARGETS, HAS_WINDOW, BLOCK_M, BLOCK_N)
    near_start = diagonal
    high, low, offset, nearest = 0.0, 0.0, 0, 0
    if HAS_TIME:
        slot = begin // BLOCK_M + b + block
        high = tl.load(q_times + begin + t, t < sequence.length, 0.0)[:, None]
        low = tl.load(q_times + total + begin + t, t < sequence.length, 0.0)[:, None]
        offset = tl.load(q_offset + begin + t, t < sequence.length, 0)[:, None]
        k_times += begin
        k_offset += begin
        entries += slot * row
        near += slot * (tl.minimum(row, NEAR) * BLOCK_M * BLOCK_N)
        nearest = (end - 1) // BLOCK_N
        diagonal = tl.load(runs + slot)
        near_start = tl.maximum(diagonal, (nearest - (NEAR - 1)) * BLOCK_N)
        return (first, full, diagonal, near_start, end), (high, low, offset, k_times, k_offset, entries, near, nearest)
    else:
        return (first, full, diagonal, near_start, end), (high, low, offset, 0, 0, 0, 0, nearest)
