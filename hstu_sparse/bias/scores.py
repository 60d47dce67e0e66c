"""How kernels add the relative bias to scores: pair by pair, or to a tile of scores of consecutive tokens.

Letters: T tokens of the batch, N max_seq_len; t and s: the positions of queries and keys in their sequence. The own
side of a program is that of its tile, of queries or of keys; the other side is the one it walks in blocks.

Pair by pair (`pair_bias`): a position bias is read from `position[t - s]`, a table of N, a time bias from the bucket of
the two timestamps. It is right for any pairs.

By tiles (`half_bias`): a narrow tile (buckets.py) compares timestamps with its few edges, and where it has none needs
only one number. The run of narrow tiles on the far side is walked by a loop that has no masks. The NEAR nearest blocks,
narrow or not, have the buckets of all their pairs in the plan, a byte each: NEAR times the length of a block for each
token. Pairs that are not seen have a bucket of their own there, and need no mask. Wide tiles further away go to a loop
that computes their buckets.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.assembly import look_up, scalar
from hstu_sparse.bias.buckets import (
    ENTRY_EDGES,
    ENTRY_SHIFT,
    MOST_EDGES,
    bucket_of,
    edge_place,
    near_order,
    other_place,
    pair_bucket,
    reached,
)
from hstu_sparse.tiles import opaque

NEAR = tl.constexpr(16)
# Zeros on both sides of the halved position table: look-ups may be moved in front of the loops' bounds checks, and
# then read for one block more, past the table's ends.
POSITION_MARGIN = 1024
# Half the bias of a pair that is not seen: SiLU and its slope are exactly zero there.
HIDDEN_BIAS = tl.constexpr(-1e30)


class Bias(NamedTuple):
    """What finds the biases of a program's own tile; what belongs to a bias that is not there is not read.

    position, time        pointers to the tables' halves (see `halved_tables_kernel`)
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


@triton.jit
def time_bias(time, cells, query_times, key_times):
    """(biases fp32, time buckets) of pairs of int64 seconds, which broadcast against each other.

    time, cells: pointers to the table, of any floating dtype, and to its `bucket_cells`.
    """
    bucket = pair_bucket(query_times, key_times, cells)
    return tl.load(time + bucket).to(tl.float32), bucket


@triton.jit
def pair_bias(distance, seen, query_times, key_times, position, time, cells, positions):
    """(biases fp32, time buckets) of pairs; 0 and bucket 0 of those that are not `seen`.

    distance: t - s, of any shape, which is that of `seen`. query_times, key_times: int64 seconds, which broadcast to
    it; not read without a time table. position, time, cells: pointers to the tables, None for one that there is not,
    and to `bucket_cells`. positions: entries of the position table.
    """
    bias = tl.zeros_like(distance.to(tl.float32))
    bucket = tl.zeros_like(distance)
    if position is not None:
        bias += tl.load(position + distance, mask=seen & (distance < positions), other=0.0).to(tl.float32)
    if time is not None:
        bucket = tl.where(seen, pair_bucket(query_times, key_times, cells), 0)
        bias += tl.load(time + bucket).to(tl.float32)
    return bias, bucket


@triton.jit
def read_ahead(start, last, bias, OTHER: tl.constexpr, ASM: tl.constexpr):
    """Return (entry, bias of its lowest bucket, next entry) of the narrow tile whose block begins at `start`.

    From `last` on there is no narrow tile, and the result may be anything.
    """
    entries = bias.entries + start // OTHER
    entry = tl.where(start < last, scalar(entries, ASM).to(tl.int32), 0)
    return entry, scalar(bias.time + (entry >> ENTRY_SHIFT), ASM), scalar(entries + 1, ASM).to(tl.int32)


@triton.jit
def bias_position(t, history, HAS_TARGETS: tl.constexpr):
    """Where a token stands in the position bias (int64): candidates all at the first of them.

    The 64 bits let the compiler see that neighbouring pairs read neighbouring addresses.
    """
    if HAS_TARGETS:
        t = tl.minimum(t, history)
    return t.to(tl.int64)


@triton.jit
def next_four(pointer):
    """pointer[1] to pointer[MOST_EDGES]."""
    return tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3), tl.load(pointer + 4)


@triton.jit
def narrow_bias(first, edges, time, steps, own, other, origin, BY_QUERY: tl.constexpr):
    """The time bias of a narrow tile of one edge at least.

    first: its lowest bucket's bias; edges: how many it has, 1 to MOST_EDGES; time, steps: pointers to the table and to
    `bucket_steps` at the lowest bucket; own, other, origin: for `reached`, the own side's offsets, `other_place`, the
    time of the other side's first token. first, time and steps may be numbers, or tensors that broadcast to the tile.
    """
    edge, value = next_four(steps), next_four(time)  # at once: no branch waits for its own
    tile = first + (value[0] - first) * reached(edge_place(own, origin, edge[0], BY_QUERY), other)
    if edges > 1:
        tile += (value[1] - value[0]) * reached(edge_place(own, origin, edge[1], BY_QUERY), other)
    if edges > 2:
        tile += (value[2] - value[1]) * reached(edge_place(own, origin, edge[2], BY_QUERY), other)
        tile += (value[3] - value[2]) * reached(edge_place(own, origin, edge[3], BY_QUERY), other)
    return tile


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
        buckets = bucket_of(tl.abs((bias.high - other_high) + (bias.low - other_low)), bias.cells, kind.ASM)
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
            found += narrow_bias(first, edges, time, steps, bias.offset, other, origin, BY_QUERY)
    return found, buckets, ahead


@triton.jit(do_not_specialize_on_alignment=["position", "time"])
def halved_tables_kernel(
    half_position, half_time, position, time, N: tl.constexpr, WIDTH: tl.constexpr, TIMES: tl.constexpr,
    MARGIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Halves of the bias tables in fp32, since the attention kernels want half the scores.

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
