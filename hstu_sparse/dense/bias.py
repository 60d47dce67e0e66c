"""The time and the position bias of a tile of scores, and the kernels that prepare the timestamps.

Letters: T tokens of the batch, N max_seq_len; t and s: the positions of queries and keys in their sequence.

A position bias is read per pair from `position_bias[t - s]`, a table of N. Time differences fall into buckets of
logarithmic width. How many bucket edges a tile reaches over is known from the least and the greatest timestamp of its
two sides. A tile of at most MOST_EDGES is called narrow: timestamps, as offsets from the sequence's first, are compared
with its edges, and a flat tile (no edge) needs only one number. With ascending timestamps all tiles are narrow but the
few next to the diagonal. The run of narrow tiles on the far side is found before the loops, and walked by the loop that
has no masks; all others go to the loop that has them. There timestamps come as pairs of fp32 (high and low part), whose
differences are exact up to 2^24 seconds, and a bucket is read from a table of fp32's leading bits: for the NEAR nearest
blocks by a kernel that runs before and serves all heads, for others in the loop.
"""

import math

import torch
import triton
import triton.language as tl

from hstu_sparse._triton import COMPILED
from hstu_sparse.dense.reference import bucket_edges
from hstu_sparse.dense.tiles import _sequence

MAX_BUCKETS = 145
POSITION_MARGIN = 1024
MOST_EDGES = tl.constexpr(4)
NEAR = tl.constexpr(6)
GROUP = tl.constexpr(16)
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


@triton.jit(do_not_specialize_on_alignment=["position", "time"])
def dense_attention_tables_kernel(
    position, time, half_position, half_time, N: tl.constexpr, TIMES: tl.constexpr, MARGIN: tl.constexpr,
    MORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Halves of the bias tables in fp32, position [N] with MARGIN zeros on both sides, time [TIMES] with MORE behind.

    Halves, since the attention kernels want half the scores; either table may be None.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if position is not None:
        value = tl.load(position + i - MARGIN, (i >= MARGIN) & (i < MARGIN + N), 0.0).to(tl.float32)
        tl.store(half_position + i, 0.5 * value, i < N + 2 * MARGIN)
    if time is not None:
        value = tl.load(time + i, i < TIMES, 0.0).to(tl.float32)
        tl.store(half_time + i, 0.5 * value, i < TIMES + MORE)


@triton.jit(
    do_not_specialize=["total"],
    do_not_specialize_on_alignment=["times", "origins", "seq_offsets", "least", "greatest"],
)
def dense_attention_times_kernel(
    times, origins, seq_offsets, split, offset, least, greatest, total, CHUNK: tl.constexpr
):
    """Timestamps as fp32 pairs `split [2, T]` and as `offset [T]` int32 from the sequence's first in `origins`, and the
    least and greatest of each GROUP tokens of a sequence.

    Group i of sequence b is at seq_offsets[b] // GROUP + b + i, which leaves room for every group without a prefix sum.
    Where an offset does not fit, the group's extremes are infinite, so that no tile with it passes for narrow.
    """
    b = tl.program_id(0)
    begin = tl.load(seq_offsets + b).to(tl.int64)
    length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
    first = tl.program_id(1) * CHUNK
    if first >= length:
        return
    group = tl.arange(0, CHUNK // GROUP)
    token = first + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = token < length
    value = tl.load(times + begin + token, inside, 0)
    high = value.to(tl.float32)
    low = (value - high.to(tl.int64)).to(tl.float32)
    tl.store(split + begin + token, high, inside)
    tl.store(split + total + begin + token, low, inside)
    relative = value - tl.load(origins + begin)
    fits = (relative > -2147483648) & (relative < 2147483647)
    tl.store(offset + begin + token, relative.to(tl.int32), inside)
    slot = begin // GROUP + b + first // GROUP + group
    used = first + group * GROUP < length
    limit = 4611686018427387904
    smallest = tl.min(tl.where(inside, tl.where(fits, value, -limit), limit), 1)
    largest = tl.max(tl.where(inside, tl.where(fits, value, limit), -limit), 1)
    tl.store(least + slot, smallest, used)
    tl.store(greatest + slot, largest, used)


@triton.jit(
    do_not_specialize=["stride"],
    do_not_specialize_on_alignment=["seq_offsets", "own_least", "own_greatest", "least", "greatest"],
)
def dense_attention_narrow_kernel(
    tiles, seq_offsets, own_least, own_greatest, least, greatest, cells, tile_buckets, stride,
    OWN: tl.constexpr, OTHER: tl.constexpr, OWN_IS_QUERY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """tile_buckets[tile, block] int16: of a narrow pair of an own and another block, 8 times its lowest bucket plus the
    number of bucket edges in it; -1 for the rest.

    Narrow: no key is younger than a query, and the differences reach over MOST_EDGES edges at most.
    """
    b = tl.load(tiles + 2 * tl.program_id(0))
    if b < 0:
        return
    begin = tl.load(seq_offsets + b).to(tl.int64)
    length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
    block = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if tl.program_id(1) * CHUNK * OTHER >= length:
        return
    own = begin // OWN + b + tl.load(tiles + 2 * tl.program_id(0) + 1)
    inside = block * OTHER < length
    groups = begin // GROUP + b
    mine = tl.load(tiles + 2 * tl.program_id(0) + 1) * (OWN // GROUP) + tl.arange(0, OWN // GROUP)
    used = mine * GROUP < length
    own_first = tl.min(tl.load(own_least + groups + mine, used, 4611686018427387904), 0)
    own_last = tl.max(tl.load(own_greatest + groups + mine, used, -4611686018427387904), 0)
    theirs = block[:, None] * (OTHER // GROUP) + tl.arange(0, OTHER // GROUP)[None, :]
    used = theirs * GROUP < length
    other_first = tl.min(tl.load(least + groups + theirs, used, 4611686018427387904), 1)
    other_last = tl.max(tl.load(greatest + groups + theirs, used, -4611686018427387904), 1)
    if OWN_IS_QUERY:
        nearest = own_first - other_last
        farthest = own_last - other_first
    else:
        nearest = other_first - own_last
        farthest = other_last - own_first
    lowest = _bucket(tl.maximum(nearest, 0).to(tl.float32), cells)
    highest = _bucket(tl.maximum(farthest, 0).to(tl.float32), cells)
    narrow = (nearest >= 0) & (highest - lowest <= MOST_EDGES)
    value = tl.where(narrow, 8 * lowest + highest - lowest, -1)
    tl.store(tile_buckets + own * stride + block, value.to(tl.int16), inside)


@triton.jit
def _look_up(table, index):
    """table[index] (fp32 or int32) for a tile of indices, left in the layout that the tile has.

    An ordinary load is given a layout of its own, and moving a tile from there to the tensor cores' layout costs more
    than the load. An elementwise operation keeps its operand's layout.
    """
    if COMPILED:
        pointers = (table + index).to(tl.int64)
        if table.dtype.element_ty == tl.int32:
            return tl.inline_asm_elementwise(
                "ld.global.nc.b32 $0, [$1];", "=r,l", [pointers], tl.int32, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers], tl.float32, is_pure=True, pack=1
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
def _narrow_run(first, last, tile_buckets, BLOCK: tl.constexpr, FROM_FIRST: tl.constexpr):
    """Where the run of narrow blocks among the rows first .. last ends (all multiples of BLOCK).

    FROM_FIRST: the first row of the first block that is not narrow. Else: the row after the last such block.
    """
    CHUNK: tl.constexpr = 256
    wide_first = last // BLOCK
    wide_end = first // BLOCK
    for start in range(first // BLOCK, last // BLOCK, CHUNK):
        block = start + tl.arange(0, CHUNK)
        wide = tl.load(tile_buckets + block, block < last // BLOCK, 0) < 0
        wide_first = tl.minimum(wide_first, tl.min(tl.where(wide, block, wide_first), 0))
        wide_end = tl.maximum(wide_end, tl.max(tl.where(wide, block + 1, wide_end), 0))
    if FROM_FIRST:
        return tl.maximum(wide_first * BLOCK, first)
    else:
        return wide_end * BLOCK


@triton.jit
def _reached(own, other, edge, BY_QUERY: tl.constexpr):
    """Mask of a narrow tile: at or past this edge; `own` and `other`: the offsets of its two sides.

    One comparison per pair: the edge is added to the own side, which has fewer elements per thread (BY_QUERY: queries).
    """
    if BY_QUERY:
        return tl.maximum(own.to(tl.int64) - edge, -2147483648).to(tl.int32) >= other
    else:
        return other >= tl.minimum(own.to(tl.int64) + edge, 2147483647).to(tl.int32)


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


@triton.jit(
    do_not_specialize=["row", "total"],
    do_not_specialize_on_alignment=["seq_offsets", "num_targets", "own_times", "times"],
)
def dense_attention_near_kernel(
    tiles, seq_offsets, num_targets, own_times, times, cells, tile_buckets, near, row, total,
    HAS_TARGETS: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr, OWN_IS_QUERY: tl.constexpr,
):  # fmt: skip
    """near[tile, NEAR, OWN * OTHER] uint8: the buckets of each own tile's pairs with the NEAR nearest blocks of the
    other side, where the attention kernels want them: not beyond the last block that is not narrow.
    """
    b = tl.load(tiles + 2 * tl.program_id(0))
    if b < 0:
        return
    begin, length, history = _sequence(b, seq_offsets, num_targets, HAS_TARGETS)
    index = tl.load(tiles + 2 * tl.program_id(0) + 1)
    first_row = index * OWN
    slot = begin // OWN + b + index
    tile_buckets += slot * row
    near += slot * (NEAR * OWN * OTHER)
    own = first_row + tl.arange(0, OWN)
    high = tl.load(own_times + begin + own, own < length, 0.0)[:, None]
    low = tl.load(own_times + total + begin + own, own < length, 0.0)[:, None]
    if OWN_IS_QUERY:
        nearest = (tl.minimum(first_row + OWN, length) - 1) // OTHER
        diagonal = tl.minimum(first_row + 1, history) // OTHER * OTHER
        first = tl.maximum(_narrow_run(0, diagonal, tile_buckets, OTHER, True) // OTHER, nearest - (NEAR - 1))
        last = nearest + 1
    else:
        nearest = first_row // OTHER
        full = (first_row + OWN + OTHER - 2) // OTHER * OTHER
        wide = _narrow_run(full, tl.maximum(length // OTHER * OTHER, full), tile_buckets, OTHER, False) // OTHER
        first = nearest
        last = tl.minimum(tl.minimum(wide, (length + OTHER - 1) // OTHER), nearest + NEAR)
    for block in range(first, last):
        other = block * OTHER + tl.arange(0, OTHER)
        other_high = tl.load(times + begin + other, other < length, 0.0)[None, :]
        other_low = tl.load(times + total + begin + other, other < length, 0.0)[None, :]
        bucket = _bucket(tl.abs((high - other_high) + (low - other_low)), cells).to(tl.uint8)
        place = nearest - block if OWN_IS_QUERY else block - nearest
        where = place * (OWN * OTHER) + tl.arange(0, OWN * OTHER)
        tl.store(near + where, _near_order(bucket, OWN, OTHER, True))


@triton.jit
def _half_bias(
    start, place, history, length, ahead, parts,
    HAS_TARGETS: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, MASKED: tl.constexpr,
    IS_NEAR: tl.constexpr, BY_QUERY: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """Half the biases, [OWN, OTHER], of a program's own tile with the block of the other side from `start` on.

    Returns them, if MASKED the pairs' buckets (IS_NEAR: read from `near`), and `_ahead` of the next tile. BY_QUERY:
    queries are the own side. place: `_bias_position` of the own side. parts: the tables and what finds buckets; the
    timestamps of the own side (place and they: [OWN, 1]) and of the other; the tiles' entries, what
    `dense_attention_near_kernel` left for the own tile, and the block that is nearest; the tokens of the batch.
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
            bias = _look_up(row, -column if BY_QUERY else column)
    if HAS_TIME and IS_NEAR:
        block = nearest - start // OTHER if BY_QUERY else start // OTHER - nearest
        bucket = _near_order(tl.load(near + block * (OWN * OTHER) + tl.arange(0, OWN * OTHER)), OWN, OTHER, False)
        bucket = bucket.to(tl.int32)
        bias += _look_up(time_bias, bucket.to(tl.int64))
    elif HAS_TIME and MASKED:
        inside = token < length
        other_high = tl.load(times + token, inside, 0.0)[None, :]
        other_low = tl.load(times + total + token, inside, 0.0)[None, :]
        bucket = _bucket(tl.abs((high - other_high) + (low - other_low)), cells)
        bias += _look_up(time_bias, bucket.to(tl.int64))
    elif HAS_TIME:
        entry, first, following = ahead
        # The next tile's numbers are asked for while this one is computed; it need not be narrow.
        next_first = _scalar(time_bias + tl.maximum(following >> 3, 0))
        # Triton pipelines no loop that hands on a number as it is: hence `_opaque`.
        ahead = _opaque(following), next_first, _scalar(tile_buckets + start // OTHER + 2).to(tl.int32)
        edges = entry & 7
        time_bias += entry >> 3
        steps += entry >> 3
        if edges == 0:
            bias += first
        else:
            other = _look_up(offsets, token.to(tl.int64)[None, :])
            tile = tl.where(_reached(offset, other, tl.load(steps + 1), BY_QUERY), tl.load(time_bias + 1), first)
            if edges > 1:
                tile = tl.where(_reached(offset, other, tl.load(steps + 2), BY_QUERY), tl.load(time_bias + 2), tile)
            if edges > 2:
                tile = tl.where(_reached(offset, other, tl.load(steps + 3), BY_QUERY), tl.load(time_bias + 3), tile)
                tile = tl.where(_reached(offset, other, tl.load(steps + 4), BY_QUERY), tl.load(time_bias + 4), tile)
            bias += tile
    return bias, bucket, ahead
