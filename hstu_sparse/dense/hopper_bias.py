"""Compute the relative bias of a block of scores in the kernels for Hopper: bias/scores.py in explicit layouts.

A group of warps has 64 rows of its tile, queries or keys, and walks over the other side in blocks of OTHER. The plan
has the buckets of the pairs with the near blocks. Other blocks that need no mask and are narrow compare timestamps with
their few edges, and the rest computes each pair's bucket. A pair that is not seen has the time bias HIDDEN_BIAS. All
numbers are half of the biases.

The branches between the kinds of blocks stand where a group has no product under way, since they would wait for it.

Letters: T tokens of the batch, H heads. t and s: the positions of queries and keys in their sequence.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hstu_sparse.bias import buckets, scores
from hstu_sparse.dense import ranges

cell_index = gluon.jit(buckets.cell_index.fn)
visible = gluon.jit(ranges.visible.fn)

HALF = gl.constexpr(64)
HIDDEN_BIAS = scores.HIDDEN_BIAS
ENTRY_SHIFT, ENTRY_EDGES = buckets.ENTRY_SHIFT, buckets.ENTRY_EDGES


class Bias(NamedTuple):
    """A kernel's inputs for its biases, pointers but for the last two; members of an absent bias are not read.

    position, time              halves of the tables, see `halved_tables_kernel`
    cells, steps                `bucket_cells` and `bucket_steps`
    owned_times, owned_offset   `TokenTimes` of the side that tiles are of
    other_times, other_offset   those of the other side
    entries, near               see `TileMap`
    row                         entries of a slot
    total                       T
    """

    position: gl.tensor
    time: gl.tensor
    cells: gl.tensor
    steps: gl.tensor
    owned_times: gl.tensor
    owned_offset: gl.tensor
    other_times: gl.tensor
    other_offset: gl.tensor
    entries: gl.tensor
    near: gl.tensor
    row: gl.tensor
    total: gl.tensor


class Rows(NamedTuple):
    """A group's 64 rows of a tile.

    place                       [64, 1], the position of each row in its sequence
    high, low, offset           [64, 1], `TokenTimes` of each
    other_times, other_offset   pointers to those of the other side, from the sequence's first token on
    entries, near               pointers to the plan's entries of the tile, and to the buckets of the group's rows
    """

    place: gl.tensor
    high: gl.tensor
    low: gl.tensor
    offset: gl.tensor
    other_times: gl.tensor
    other_offset: gl.tensor
    entries: gl.tensor
    near: gl.tensor


@gluon.jit
def owned_rows(tile, place, bias, kind: gl.constexpr, WHICH: gl.constexpr):
    """Return the `Rows` of one of a tile's two groups, which are at `place` [64, 1]."""
    if kind.HAS_TIME:
        inside = place < tile.sequence.length
        token = tile.begin + place
        high = gl.load(bias.owned_times + token, inside, 0.0)
        low = gl.load(bias.owned_times + bias.total + token, inside, 0.0)
        offset = gl.load(bias.owned_offset + token, inside, 0)
        slot = (tile.begin // kind.OWN + tile.b + tile.first_row // kind.OWN).to(gl.int64)
        near = bias.near + slot * (gl.minimum(bias.row, kind.NEAR) * (kind.OWN * kind.OTHER))
        return Rows(
            place, high, low, offset, bias.other_times + tile.begin, bias.other_offset + tile.begin,
            bias.entries + slot * bias.row, near + WHICH * HALF * kind.OTHER,
        )  # fmt: skip
    else:
        return Rows(place, 0.0, 0.0, 0, 0, 0, 0, 0)


@gluon.jit
def look_up(table, index):
    """Load table[index], fp32, by assembly, which Triton leaves in its place and in the tile's layout.

    Not ld.global.nc, which ptxas may move behind the wait for the products and the group's barrier.
    """
    return gl.inline_asm_elementwise(
        "ld.global.f32 $0, [$1];", "=f,l", [(table + index).to(gl.int64)], gl.float32, True, 1
    )


@gluon.jit
def position_bias(start, rows, tile, bias, kind: gl.constexpr, SCORES: gl.constexpr):
    """Return the biases [64, OTHER] by position of any block."""
    column = gl.arange(0, kind.OTHER, gl.SliceLayout(0, SCORES))[None, :]
    if kind.HAS_TARGETS:  # candidates all count as standing at the first one's position
        row = gl.minimum(rows.place, tile.sequence.history)
        other = gl.minimum(start + column, tile.sequence.history)
        return look_up(bias.position, (row - other if kind.BY_QUERY else other - row).to(gl.int64))
    elif kind.BY_QUERY:
        return look_up(bias.position + (rows.place - start).to(gl.int64), -column.to(gl.int64))
    else:
        return look_up(bias.position + (start - rows.place).to(gl.int64), column.to(gl.int64))


@gluon.jit
def near_time_bias(start, rows, tile, bias, kind: gl.constexpr, SCORES: gl.constexpr):
    """Return the biases [64, OTHER] by time of a near block."""
    if kind.BY_QUERY:
        block = (tile.last - start) // kind.OTHER
    else:
        block = (start - tile.first) // kind.OTHER
    # 64 rows in the order of `near_order`, in which a thread's bytes are adjacent.
    LAYOUT: gl.constexpr = gl.BlockedLayout([kind.OTHER // 2], [32], [4], [0])
    stored = gl.load(rows.near + block * (kind.OWN * kind.OTHER) + gl.arange(0, HALF * kind.OTHER, LAYOUT))
    parts = gl.permute(gl.reshape(stored, [4, 8, 4, kind.OTHER // 8, 2, 2]), [0, 4, 1, 3, 2, 5])
    index = gl.convert_layout(gl.reshape(parts, [HALF, kind.OTHER]), SCORES, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "{ .reg .u64 a; mad.wide.u32 a, $2, 4, $1; ld.global.f32 $0, [a]; }", "=f,l,r",
        [bias.time.to(gl.int64), index.to(gl.int32)], gl.float32, True, 1,
    )  # fmt: skip


@gluon.jit
def past_edge(value, edge, origin, other, rows, kind: gl.constexpr):
    """Return `value` for the pairs of a narrow block at or past an edge, 0.0 for others: `reached` of buckets.py."""
    if kind.BY_QUERY:
        row = (rows.offset.to(gl.int64) - (edge + origin - 1)).to(gl.float32)
    else:
        row = ((origin + 1 - edge) - rows.offset.to(gl.int64)).to(gl.float32)
    return value * gl.inline_asm_elementwise("add.sat.f32 $0, $1, $2;", "=f,f,f", [row, other], gl.float32, True, 1)


@gluon.jit
def wide_time_bias(start, rows, tile, bias, kind: gl.constexpr, SCORES: gl.constexpr):
    """Return the biases [64, OTHER] by time of any block: looks up each pair's bucket."""
    column = gl.arange(0, kind.OTHER, gl.SliceLayout(0, SCORES))
    inside = start + column < tile.sequence.length
    other_high = gl.load(rows.other_times + start + column, inside, 0.0)[None, :]
    other_low = gl.load(rows.other_times + bias.total + start + column, inside, 0.0)[None, :]
    x = gl.abs((rows.high - other_high) + (rows.low - other_low))
    edge, below = gl.inline_asm_elementwise(
        "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=f,=r,l",
        [(bias.cells + 2 * cell_index(x).to(gl.int64)).to(gl.int64)], (gl.float32, gl.int32), True, 1,
    )  # fmt: skip
    value = look_up(bias.time, (below + (x >= edge).to(gl.int32)).to(gl.int64))
    other = (start + column)[None, :]
    if kind.BY_QUERY:
        seen = visible(rows.place, other, tile.sequence, kind.HAS_TARGETS, kind.HAS_WINDOW)
    else:
        seen = visible(other, rows.place, tile.sequence, kind.HAS_TARGETS, kind.HAS_WINDOW)
    return gl.where(seen, value, HIDDEN_BIAS)


@gluon.jit
def narrow_time_bias(start, entry, rows, bias, kind: gl.constexpr, SCORES: gl.constexpr):
    """Return the biases [64, OTHER] by time of a narrow block."""
    lowest = bias.time + (entry >> ENTRY_SHIFT)
    edges = entry & ENTRY_EDGES
    first = gl.load(lowest)
    biases = gl.zeros([HALF, kind.OTHER], gl.float32, SCORES) + first
    if edges > 0:
        steps = bias.steps + (entry >> ENTRY_SHIFT)
        origin = gl.load(rows.other_offset + start)
        column = gl.arange(0, kind.OTHER, gl.SliceLayout(0, SCORES))
        offsets = gl.load(rows.other_offset + start + column)[None, :]
        other = (origin - offsets if kind.BY_QUERY else offsets - origin).to(gl.float32)
        origin = origin.to(gl.int64)
        second = gl.load(lowest + 1)
        biases += past_edge(second - first, gl.load(steps + 1), origin, other, rows, kind)
        if edges > 1:
            third = gl.load(lowest + 2)
            biases += past_edge(third - second, gl.load(steps + 2), origin, other, rows, kind)
            if edges > 2:
                fourth, fifth = gl.load(lowest + 3), gl.load(lowest + 4)
                biases += past_edge(fourth - third, gl.load(steps + 3), origin, other, rows, kind)
                biases += past_edge(fifth - fourth, gl.load(steps + 4), origin, other, rows, kind)
    return biases


@gluon.jit
def far_time_bias(start, entry, rows, tile, bias, kind: gl.constexpr, SCORES: gl.constexpr):
    """Return the biases [64, OTHER] by time of a block that is not near. entry: see `narrow_entry`."""
    if entry < 0:
        biases = wide_time_bias(start, rows, tile, bias, kind, SCORES)
    else:
        biases = narrow_time_bias(start, entry, rows, bias, kind, SCORES)
    return biases


@gluon.jit
def narrow_entry(start, rows, tile, kind: gl.constexpr):
    """Return the `TileMap`'s entry of a block; -1 also for one that needs a mask and for one before the first."""
    entry = gl.load(rows.entries + start // kind.OTHER, (start >= tile.free) & (start < tile.masked), -1)
    return entry.to(gl.int32)
