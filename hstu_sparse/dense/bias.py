"""The time and the position bias of a tile of scores.

Letters: T tokens of the batch, N max_seq_len; t and s: the positions of queries and keys in their sequence.

A position bias is read per pair from `position_bias[t - s]`, a table of N. Time differences fall into buckets of
logarithmic width. How many bucket edges a tile reaches over is known from the least and the greatest timestamp of its
two sides. A tile of at most MOST_EDGES is called narrow: timestamps, as offsets from the sequence's first, are compared
with its edges, and a flat tile (no edge) needs only one number. With ascending timestamps all tiles are narrow but the
few next to the diagonal. The run of narrow tiles on the far side is walked by a loop that has no masks.

The NEAR nearest blocks, narrow or not, have the buckets of all their pairs in the map, a byte each: NEAR times the
length of a block for each token. Pairs that are not seen have a bucket of their own there, and need no mask. Wide tiles
further away go to a loop that computes their buckets. There, as for the map, timestamps come as pairs of fp32 (high and
low part), whose differences are exact up to 2^24 seconds, and a bucket is read from a table of fp32's leading bits.
"""

import math

import torch
import triton
import triton.language as tl

from hstu_sparse._triton import COMPILED
from hstu_sparse.relative_bias import bucket_edges

MAX_BUCKETS = 145
POSITION_MARGIN = 1024
MOST_EDGES = tl.constexpr(4)
NEAR = tl.constexpr(16)
# Cells of an octave in the table that finds buckets: 2 ** CELL_BITS, each narrower than a bucket.
CELL_BITS = 3
_SHIFT, _BASE = tl.constexpr(23 - CELL_BITS), tl.constexpr(127 << CELL_BITS)


def bucket_cells(num_buckets: int) -> torch.Tensor:
    """[512, 2] int32 on the CPU: for each cell of fp32 numbers >= 1, the bits of the next bucket edge (or infinity) and
    the bucket below it. No cell has two edges.

    A cell's index is the number's exponent and the first bits of its mantissa: no logarithm, and exact.
    """
    edges = torch.tensor([*bucket_edges(num_buckets), math.inf], dtype=torch.float32)
    per_octave = 2**CELL_BITS
    starts = torch.tensor(
        [2.0 ** (i // per_octave) * (1 + i % per_octave / per_octave) for i in range(64 * per_octave)]
    )
    bucket = torch.bucketize(starts, edges[:-1], right=True)
    return torch.stack([edges[bucket].view(torch.int32), bucket.int()], 1)


@triton.jit
def _look_up(table, index):
    """table[index] (fp32 or int32) for a tile of indices, left in the layout that the tile has. int32 indices: >= 0.

    An ordinary load is given a layout of its own, and moving a tile from there to the tensor cores' layout costs more
    than the load. An elementwise operation keeps its operand's layout.
    """
    if COMPILED:
        if index.dtype == tl.int32:
            return tl.inline_asm_elementwise(
                "{ .reg .u64 a; mad.wide.u32 a, $2, 4, $1; ld.global.nc.f32 $0, [a]; }", "=f,l,r",
                [table.to(tl.int64), index], tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
        elif table.dtype.element_ty == tl.int32:
            return tl.inline_asm_elementwise(
                "ld.global.nc.b32 $0, [$1];", "=r,l", [(table + index).to(tl.int64)], tl.int32, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                "ld.global.nc.f32 $0, [$1];", "=f,l", [(table + index).to(tl.int64)], tl.float32, is_pure=True, pack=1
            )
    else:
        return tl.load(table + index)


@triton.jit
def _opaque(x):
    """x, without the compiler's knowing it: what is computed from it is computed anew, not kept in registers."""
    if COMPILED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=True, pack=1)
    else:
        return x


@triton.jit
def _scalar(pointer):
    """tl.load of one number (int16 or fp32) that Triton does not move through shared memory."""
    if COMPILED:
        if pointer.dtype.element_ty == tl.int16:
            return tl.inline_asm_elementwise(
                "ld.global.nc.s16 $0, [$1];", "=r,l", [pointer.to(tl.int64)], tl.int32, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                "ld.global.nc.f32 $0, [$1];", "=f,l", [pointer.to(tl.int64)], tl.float32, is_pure=True, pack=1
            )
    else:
        return tl.load(pointer)


@triton.jit
def _ahead(start, parts, OTHER: tl.constexpr):
    """Of the narrow tile with the block from `start` on: (its entry, the bias of its lowest bucket, the next entry)."""
    time_bias, tile_buckets = parts[0][1], parts[3][0] + start // OTHER
    entry = _scalar(tile_buckets).to(tl.int32)
    return entry, _scalar(time_bias + (entry >> 3)), _scalar(tile_buckets + 1).to(tl.int32)


@triton.jit
def _bucket(x, cells):
    """Bucket of |x| (given as fp32 >= 0), exact. cells: see `bucket_cells`."""
    index = (tl.maximum(x, 1.0).to(tl.int32, bitcast=True) >> _SHIFT) - _BASE
    if COMPILED:
        edge, bucket = tl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=f,=r,l", [(cells + 2 * index.to(tl.int64)).to(tl.int64)],
            (tl.float32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        edge = tl.load(cells + 2 * index).to(tl.float32, bitcast=True)
        bucket = tl.load(cells + 2 * index + 1)
    return bucket + (x >= edge).to(tl.int32)


@triton.jit
def _edge_place(own, origin, edge, BY_QUERY: tl.constexpr):
    """Where the own side stands by an edge, fp32, for `_reached`. own: offsets; origin: of the block's first token."""
    if BY_QUERY:
        return (own.to(tl.int64) - (edge + origin - 1)).to(tl.float32)
    else:
        return ((origin + 1 - edge) - own.to(tl.int64)).to(tl.float32)


@triton.jit
def _other_place(other, origin, BY_QUERY: tl.constexpr):
    """Where the other side stands. BY_QUERY: queries are the own side."""
    return (origin - other if BY_QUERY else other - origin).to(tl.float32)


@triton.jit
def _reached(own, other):
    """1.0 for the pairs of a narrow tile at or past an edge, 0.0 for the rest, of `_edge_place` and `_other_place`.

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
def _bias_position(t, history, HAS_TARGETS: tl.constexpr):
    """Where a token stands in the position bias (int64): candidates all at the first of them.

    The 64 bits let the compiler see that neighbouring pairs read neighbouring addresses.
    """
    if HAS_TARGETS:
        t = tl.minimum(t, history)
    return t.to(tl.int64)


@triton.jit
def _near_order(tile, OWN: tl.constexpr, OTHER: tl.constexpr, STORE: tl.constexpr):
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
def _next_four(pointer):
    """pointer[1] to pointer[MOST_EDGES]."""
    return tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3), tl.load(pointer + 4)


@triton.jit
def _half_bias(
    start, place, history, length, ahead, parts,
    HAS_TARGETS: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, MASKED: tl.constexpr,
    IS_NEAR: tl.constexpr, BY_QUERY: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """Half the biases, [OWN, OTHER], of a program's own tile with the block of the other side from `start` on.

    Returns them, if MASKED the pairs' buckets (IS_NEAR: read from `near`), and `_ahead` of the next tile. BY_QUERY:
    queries are the own side. place: `_bias_position` of the own side. parts: the tables and what finds buckets; the
    timestamps of the own side (place and they: [OWN, 1]) and of the other; what `dense_attention_map_kernel` left for
    the own tile, and the block that is nearest; the tokens of the batch. IS_NEAR hides what a query does not see.
    """
    tables, own_times, other_times, map_, total = parts
    position_bias, time_bias, cells, steps = tables
    high, low, offset = own_times
    times, offsets = other_times
    tile_buckets, near, nearest = map_
    token = start + tl.arange(0, OTHER)
    bucket = 0
    bias = tl.zeros([OWN, OTHER], tl.float32)
    if HAS_POSITION:
        if HAS_TARGETS and (MASKED or not BY_QUERY):
            column = _bias_position(token, history, HAS_TARGETS)[None, :]
            bias = _look_up(position_bias, place - column if BY_QUERY else column - place)
        else:
            # The same; written so, the compiler sees which neighbours read the same address.
            row = position_bias + (place - start if BY_QUERY else start - place)
            column = tl.arange(0, OTHER).to(tl.int64)[None, :]
            # The condition, true of every block, is for Triton, which moves it and what hangs on it to the loop's top.
            if BY_QUERY or HAS_TIME or start < length:
                bias = _look_up(row, -column if BY_QUERY else column)
    if HAS_TIME and IS_NEAR:
        block = nearest - start // OTHER if BY_QUERY else start // OTHER - nearest
        bucket = _near_order(tl.load(near + block * (OWN * OTHER) + tl.arange(0, OWN * OTHER)), OWN, OTHER, False)
        bucket = bucket.to(tl.int32)
        bias += _look_up(time_bias, bucket)
    elif HAS_TIME and MASKED:
        inside = token < length
        other_high = tl.load(times + token, inside, 0.0)[None, :]
        other_low = tl.load(times + total + token, inside, 0.0)[None, :]
        bucket = _bucket(tl.abs((high - other_high) + (low - other_low)), cells)
        bias += _look_up(time_bias, bucket)
    elif HAS_TIME:
        entry, first, following = ahead
        # The next tile's numbers are asked for while this one is computed; it need not be narrow.
        next_first = _scalar(time_bias + tl.maximum(following >> 3, 0))
        # Triton pipelines no loop that hands on a number as it is: hence `_opaque`.
        ahead = _opaque(following), next_first, _scalar(tile_buckets + start // OTHER + 2).to(tl.int32)
        edges = entry & 7
        time_bias += entry >> 3
        steps += entry >> 3
        # Both branches end alike, so that the sum, which waits for the position bias, is left for later.
        if edges == 0:
            bias += first
        else:
            origin = tl.load(offsets + start).to(tl.int64)
            other = _other_place(_look_up(offsets, token.to(tl.int64)[None, :]), origin.to(tl.int32), BY_QUERY)
            edge, value = _next_four(steps), _next_four(time_bias)  # at once: no branch waits for its own
            tile = first + (value[0] - first) * _reached(_edge_place(offset, origin, edge[0], BY_QUERY), other)
            if edges > 1:
                tile += (value[1] - value[0]) * _reached(_edge_place(offset, origin, edge[1], BY_QUERY), other)
            if edges > 2:
                tile += (value[2] - value[1]) * _reached(_edge_place(offset, origin, edge[2], BY_QUERY), other)
                tile += (value[3] - value[2]) * _reached(_edge_place(offset, origin, edge[3], BY_QUERY), other)
            bias += tile
    return bias, bucket, ahead
