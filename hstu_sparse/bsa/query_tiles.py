"""What query-major kernels need of a tile of queries: its place, its biases, its weights of the keys near by.

Letters: H heads, BS block size, BM queries and BN keys of a tile.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.assembly import look_up
from hstu_sparse.bsa.bias_tiles import chosen_bias, load_origin, means_tile, own_tile, position_tile, time_tile
from hstu_sparse.bsa.reach import (
    LOWEST,
    MOST_EDGES,
    keys_reach,
    load_reach,
    load_times,
    map_row,
    means_reach,
    plain_means,
    span,
)
from hstu_sparse.tiles import locate


@triton.jit
def band_weight(g_slc, g_swa, t, s, window, BS: tl.constexpr, WINDOW: tl.constexpr):
    """[BM, BN] weight of key s for query t: the own block's gate and the window's, where s <= t."""
    seen = s[None, :] <= t[:, None]
    weight = tl.where(seen & (s[None, :] // BS == t[:, None] // BS), g_slc[:, None], 0.0)
    if WINDOW:
        weight += tl.where(seen & (t[:, None] - s[None, :] < window), g_swa[:, None], 0.0)
    return weight


class QueryTile(NamedTuple):
    """A program's queries.

    b, start       their sequence and its first token
    begin, end     their positions begin .. end - 1, none if end <= begin
    lane           [BM] 0 .. BM - 1, int64
    t, live        [BM] positions, and whether there are such
    token          [BM] their places in [T, H]
    block_row      slot of the sequence's first block
    map_row        see `map_row`
    asked          their earliest and latest time, as `span` gives them
    """

    b: tl.tensor
    start: tl.tensor
    begin: tl.tensor
    end: tl.tensor
    lane: tl.tensor
    t: tl.tensor
    live: tl.tensor
    token: tl.tensor
    block_row: tl.tensor
    map_row: tl.tensor
    asked: tuple


@triton.jit
def find_queries(offsets, bias, tiles, h, tile, B, H, BM: tl.constexpr, BS: tl.constexpr):
    # Late tiles see the most blocks: they start first.
    b, start, length, i = locate(offsets, tiles - 1 - tile, B, BM)
    t = i * BM + tl.arange(0, BM)
    live = t < length
    asked = (0.0, 0.0, 0.0, 0.0)
    if bias.time is not None:
        high, low = load_times(bias.query_high, bias.query_low, start + t, live)
        asked = span(high, low, live, 0)
    return QueryTile(
        b, start, i * BM, tl.minimum(i * BM + BM, length), tl.arange(0, BM).to(tl.int64), t, live,
        (start + t) * H + h, (start // BS + b).to(tl.int32), map_row(start, b, i * BM, BS), asked,
    )  # fmt: skip


@triton.jit
def means_position(bias, asks, c, BN: tl.constexpr, BS: tl.constexpr, ASM: tl.constexpr):
    """The position's bias of a tile with the BN mean keys from block c on."""
    return position_tile(bias, c * BS + BS // 2 - asks.begin, -asks.lane, (tl.arange(0, BN) * BS).to(tl.int64), ASM)


@triton.jit
def means_ends(bias, asks, BS: tl.constexpr, LEAST: tl.constexpr = 0):
    """Of the mean keys those in front of the first tile in which one reaches several edges, none where there are no
    more than LEAST mean keys; all without a time bias.
    """
    if bias.time is not None:
        blocks = asks.end // BS
        return tl.where(blocks > LEAST, plain_means(bias, asks.map_row, blocks), 0)
    else:
        return asks.end // BS


@triton.jit
def means_time(
    bias, asks, c, known, near, several, BN: tl.constexpr, BS: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The time's, and what `add_time_gradient` wants: far to reaches. near: the queries' places in time."""
    middle = (c + tl.arange(0, BN)) * BS + BS // 2
    rows = tl.where(known, middle, 0).to(tl.int64)
    found = (
        (asks.start, rows),
        (asks.start + asks.begin, asks.lane),
        asks.asked,
        means_reach(bias, asks.map_row, c, BN, ASM),
    )
    if bias.time is not None:
        return means_tile(bias, asks.map_row, c, found[0], found[1], near, several, 1, ASM), found
    else:
        return 0.0, found


@triton.jit
def keys_position(bias, asks, first, BN: tl.constexpr, ASM: tl.constexpr):
    """The position's bias of a tile with the BN keys from position `first` on."""
    return position_tile(bias, first - asks.begin, -asks.lane, tl.arange(0, BN).to(tl.int64), ASM)


@triton.jit
def keys_time(bias, asks, first, sought, reaches, BN: tl.constexpr, ASM: tl.constexpr):
    """As `means_time`, of these keys."""
    queries, keys = (asks.start + asks.begin, asks.lane), (asks.start + first, tl.arange(0, BN).to(tl.int64))
    found = queries, keys, sought, reaches
    return time_tile(bias, *found, 0, True, ASM), found


@triton.jit
def band_bias(
    bias, asks, c, known, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, EXACT: tl.constexpr,
    OWN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Both, with keys of the own block or the window, and what `add_time_gradient` wants.

    Without EXACT as if they reached many buckets, which keys next to the diagonal do. OWN: all queries stand in the
    keys' block.
    """
    if EXACT:
        reaches = keys_reach(bias, asks.asked, asks.start + c + tl.arange(0, BN), known, BM, ASM)
    else:
        reaches = tl.zeros([BM], tl.int32), MOST_EDGES + 1, 0, 0
    time, found = keys_time(bias, asks, c, load_origin(bias, asks.block_row + c // BS, ASM), reaches, BN, ASM)
    if OWN:
        time = own_tile(bias, *in_block(asks, c, BN, BS), 0, BS, ASM)
    return (keys_position(bias, asks, c, BN, ASM), time), found


@triton.jit
def in_block(asks, c, BN: tl.constexpr, BS: tl.constexpr):
    """What `own_tile` wants of queries and the keys c .. c + BN - 1 in one block."""
    queries, keys = (asks.begin % BS, asks.lane), (c % BS, tl.arange(0, BN).to(tl.int64))
    return asks.block_row + asks.begin // BS, queries, keys


@triton.jit
def chosen_first(chosen, row, e, BN: tl.constexpr, BS: tl.constexpr, ASM: tl.constexpr):
    """The position of the first of the chosen keys e .. e + BN - 1. row: of the queries in `chosen`.

    Not by tl.load, which Triton would move through shared memory, one load's time before what hangs on it.
    """
    return tl.multiple_of(look_up(chosen.indices + row, tl.cast(e // BS, tl.int64), ASM) * BS + e % BS, BN)


@triton.jit
def chosen_ends(chosen, row, count, S, BS: tl.constexpr, ASM: tl.constexpr):
    """Of the `count` chosen keys before the own block those in blocks that reach no edge, and those that reach at most
    one. row: of the queries in `chosen`.
    """
    if chosen.reaches is None:
        return count, count
    else:
        blocks = look_up(chosen.reaches + row, tl.cast(S - 1, tl.int64), ASM)
        return (blocks & 0xFFFF) * BS, (blocks >> 16) * BS


@triton.jit
def chosen_both(
    bias, asks, edge, position, first, EDGES: tl.constexpr, MOST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`chosen_bias` of the BN keys from position `first` on, and what `add_time_gradient` wants."""
    if bias.time is not None:
        chosen, place, _, _ = edge
        queries, keys = (asks.start + asks.begin, asks.lane), (asks.start + first, tl.arange(0, BN).to(tl.int64))
        if EDGES == 2:
            reaches = load_reach(chosen.reaches + place, None, BM, ASM)
        else:
            lowest = look_up(chosen.reaches, place, ASM) & LOWEST
            reaches = tl.zeros([BM], tl.int32) + lowest, EDGES, lowest, lowest + EDGES
        origin = load_origin(bias, asks.block_row + first // BS, ASM)
        found = queries, keys, origin, reaches
        return chosen_bias(bias, edge, position, queries, keys, origin, reaches, EDGES, MOST, ASM), found
    else:
        return (position, 0.0, 0), (0, 0, 0, (0, 0, 0, 0))
