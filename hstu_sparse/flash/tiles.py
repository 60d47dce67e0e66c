"""Define what the kernels of both passes do with a tile: its place, what it sees, its scores, its dropout.

Letters: B sequences, H heads of queries, D query/key and V value head size, P pieces of a sequence (see problem.py).
m: query rows of a tile, n: its key rows, counted within a piece; t and s: positions in the sequence.

One program has one tile of queries (forward, dq) or of keys (dk and dv) and iterates over the other side. In a range of
tiles that it iterates over, only the first and the last ones need masks.

Scores are in units of log2: exp2 is one instruction, and the scale is folded into the product with log2(e).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.tiles.rows import locate

# Numbers that differ between batches, for which Triton would compile again, and the caller's pointers.
PER_BATCH = ["num_pieces", "total", "left", "right", "slope_stride"]
CALLER_POINTERS = ["q_offsets", "k_offsets", "q_starts", "k_starts", "seed"]

# The initial maximum: finite, so that differences of two maxima are defined.
LEAST = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)
# If all scores (in units of log2) are within this distance of 0, the softmax needs no maximum: its weights and their
# sums, 2^-80 to 2^80 times the number of keys, are far from the limits of fp32 and of bf16.
STEADY = tl.constexpr(80.0)
# The size of slots for the numbers of queries that backward computes first, at least the queries of a tile.
ROW_BLOCK = tl.constexpr(128)


@triton.jit
def piece(index, offsets, starts):
    """Return (first row in memory, length, position of the first row) of a piece."""
    begin = tl.load(offsets + index).to(tl.int64)
    length = (tl.load(offsets + index + 1) - begin).to(tl.int32)
    position = 0
    if starts is not None:
        position = tl.load(starts + index).to(tl.int32)
    return begin, length, position


class Call(NamedTuple):
    """The numbers of a launch that batches share: the scale times log2(e), the slopes or None, and the dropout."""

    scale: object
    slopes: object
    dropout: object


class HeadOptions(NamedTuple):
    """The options of a sequence's head: slope in units of log2, or None; `pair`: its number in Philox's counters."""

    scale: tl.tensor
    slope: tl.tensor
    left: tl.tensor
    right: tl.tensor
    seed: tl.tensor
    pair: tl.tensor
    dropout: tl.tensor


class Tile(NamedTuple):
    """The rows of a program's tile, `first` .. of a piece, for one head. `index`: the piece's."""

    head: tl.tensor
    index: tl.tensor
    sequence: tl.tensor
    begin: tl.tensor
    length: tl.tensor
    position: tl.tensor
    first: tl.tensor


@triton.jit
def find_tile(
    offsets, starts, num_pieces, HEADS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
    LAST_FIRST: tl.constexpr,
):  # fmt: skip
    """Return the program's Tile, `first` negative if there is none. LAST_FIRST: from the last piece's end on."""
    slot = tl.program_id(0) // HEADS
    if LAST_FIRST:
        slot = tl.num_programs(0) // HEADS - 1 - slot
    index, begin, length, tile = locate(offsets, slot, num_pieces, BLOCK)
    _, _, position = piece(index, offsets, starts)
    first = tl.where(tile * BLOCK < length, tile * BLOCK, -1)
    return Tile(tl.program_id(0) % HEADS, index, index // PIECES, begin, length, position, first)


@triton.jit
def key_ranges(
    first_row, q_length, k_length, ahead, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return (begin, full, free, end): the keys that a tile of queries sees; only those in full .. free need no mask.

    ahead: position of the first query less that of the first key. All but `end` are multiples of BLOCK_N.
    """
    last_row = tl.minimum(first_row + BLOCK_M, q_length) - 1
    begin = 0
    full = 0
    end = k_length
    free = k_length
    if HAS_RIGHT:
        end = tl.maximum(tl.minimum(end, last_row + ahead + right + 1), 0)
        free = tl.maximum(tl.minimum(free, first_row + ahead + right + 1), 0)
    free = free // BLOCK_N * BLOCK_N
    if HAS_LEFT:
        begin = tl.maximum(first_row + ahead - left, 0) // BLOCK_N * BLOCK_N
        full = (tl.maximum(last_row + ahead - left, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        free = tl.maximum(free, begin)
        full = tl.minimum(full, free)
    return begin, full, free, end


@triton.jit
def keys_seen(
    tile, k_offsets, k_starts, left, right, PIECES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the number of keys, possibly 0, that a tile of queries has to iterate over."""
    count = 0
    for i in tl.static_range(PIECES):
        _, k_length, k_position = piece(tile.sequence * PIECES + i, k_offsets, k_starts)
        begin, _, _, end = key_ranges(
            tile.first, tile.length, k_length, tile.position - k_position, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M,
            BLOCK_N,
        )  # fmt: skip
        count += tl.maximum(end - begin, 0)
    return count


@triton.jit
def query_ranges(
    first_key, q_length, k_length, ahead, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the same for the queries that see a tile of keys; all but `end` are multiples of BLOCK_M."""
    return key_ranges(first_key, k_length, q_length, -ahead, right, left, HAS_RIGHT, HAS_LEFT, BLOCK_N, BLOCK_M)


@triton.jit
def head_slope(slopes, tile, head, stride):
    """Return the slope of a head of the tile's sequence, in units of log2."""
    return tl.load(slopes + tile.sequence * stride + head) * LOG2_E


@triton.jit
def hide(scores, t, s, q_inside, k_inside, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Set masked pairs to -inf; t, s and the others broadcast to the shape of the scores."""
    seen = q_inside & k_inside
    if HAS_RIGHT:
        seen = seen & (s - t <= right)
    if HAS_LEFT:
        seen = seen & (t - s <= left)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def dropout_mask(options, t_first, s_first, ALIGNED: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return [M, N] bool: the weights of M queries from position t_first and N keys from s_first that are not dropped.

    A call of Philox gives the numbers of four keys, from a multiple of four on. ALIGNED: s_first is such a multiple.
    """
    key = tl.load(options.seed)
    t = t_first + tl.arange(0, M)[:, None]
    if ALIGNED:
        zero = tl.zeros([M, N // 4], tl.int32)
        group = s_first // 4 + tl.arange(0, N // 4)[None, :]
        first, second, third, fourth = tl.philox(key, zero + group, zero + t, zero + options.pair, zero)
        bits = tl.join(tl.join(first, third), tl.join(second, fourth)).reshape(M, N)
    else:
        zero = tl.zeros([M, N], tl.int32)
        s = s_first + tl.arange(0, N)[None, :]
        first, second, third, fourth = tl.philox(key, zero + s // 4, zero + t, zero + options.pair, zero)
        word = s % 4
        bits = tl.where(word < 2, tl.where(word == 0, first, second), tl.where(word == 2, third, fourth))
    return (bits >> 8).to(tl.float32) >= options.dropout * 16777216.0
