"""Device functions of the dense kernels for a tile: its ranges of keys or queries, masks, SiLU.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key head size, V value head size. In the
kernels m: query rows of a tile, n: its key rows; t and s: the positions of queries and keys in their sequence.

One program owns one tile of queries (forward, dq) or of keys (dk and dv) of one head, and walks the other side in
blocks.

SiLU: with h = x/2, x a score with its bias, y = SiLU(x) and u = tanh(h),
    y = h + h u,    2 dy/dx = 1 + u + h (1 - u^2)
take one special-function instruction for both.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.bias.scores import NEAR, TileBias, resident_bias
from hstu_sparse.tiles.rows import COMPILED, tanh_approx

# Arguments that Triton must not specialise on, or it would compile kernels again for other batches: numbers that differ
# between batches, and the caller's pointers, whose alignment may differ.
PER_BATCH = ["window_size", "row", "time_shift"]
CALLER_POINTERS = ["seq_offsets", "num_targets"]
# All bits set, and more than the number of tiles of any sequence.
MOST_TILES = tl.constexpr(2**24 - 1)


class Sequence(NamedTuple):
    """One sequence: its number of tokens, of tokens before all candidates, and the window (in tokens)."""

    length: tl.tensor
    history: tl.tensor
    window_size: tl.tensor


class Kind(NamedTuple):
    """The constants that a kernel is compiled for, besides the sizes of its tiles, as one constexpr.

    D_OUT and V_OUT: the sizes of heads in the results; D and V: in memory; PAD_D and PAD_V: in tiles.
    """

    H: int
    D: int
    V: int
    D_OUT: int
    V_OUT: int
    PAD_D: int
    PAD_V: int
    HAS_TARGETS: bool
    HAS_WINDOW: bool
    HAS_POSITION: bool
    HAS_TIME: bool
    FAST: bool
    PRECISION: str
    ASM: bool


@triton.jit
def find_sequence(b, seq_offsets, num_targets, window_size):
    """Return (first token, Sequence) of sequence b; it has no candidates if `num_targets` is None."""
    begin = tl.load(seq_offsets + b).to(tl.int64)
    length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
    history = length
    if num_targets is not None:
        history = length - tl.load(num_targets + b).to(tl.int32)
    return begin, Sequence(length, history, window_size)


@triton.jit
def scheduled(schedule, H: tl.constexpr):
    """Return (the program's head, its sequence or -1 for no work, the address of the tile's entry in the schedule)."""
    entry = schedule + 2 * (tl.program_id(0) // H)
    return tl.program_id(0) % H, tl.load(entry), entry


@triton.jit
def find_query_tile(b, entry, seq_offsets, num_targets, window_size, BLOCK_M: tl.constexpr):
    """Return (first token, the Sequence, the tile's number, its queries' positions) for an entry of a schedule.

    The schedule counts tiles of queries from the sequence's end, where a query sees most keys.
    """
    begin, sequence = find_sequence(b, seq_offsets, num_targets, window_size)
    block = (sequence.length + BLOCK_M - 1) // BLOCK_M - 1 - tl.load(entry + 1)
    return begin, sequence, block, block * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def visible(t, s, sequence, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return the mask of the pairs (t, s), two tensors that broadcast against each other."""
    mask = (s <= t) & (t < sequence.length)
    history = sequence.history
    if HAS_TARGETS:
        mask = mask & ((s < history) | (s == t))
    if HAS_WINDOW:
        mask = mask & (tl.minimum(t, history) - tl.minimum(s, history) < sequence.window_size)
    return mask


@triton.jit
def key_ranges(
    first_row, sequence, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return (begin, full, diagonal, end), multiples of BLOCK_N: only the keys in full .. diagonal need no mask."""
    length, history, window_size = sequence.length, sequence.history, sequence.window_size
    end = tl.minimum(first_row + BLOCK_M, length)
    diagonal = first_row + 1
    if HAS_TARGETS:
        diagonal = tl.minimum(diagonal, history)
    diagonal = diagonal // BLOCK_N * BLOCK_N
    begin = 0
    full = 0
    if HAS_WINDOW:
        begin = tl.maximum(tl.minimum(first_row, history) - window_size + 1, 0) // BLOCK_N * BLOCK_N
        full = tl.maximum(tl.minimum(end - 1, history) - window_size + 1 + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
        diagonal = tl.maximum(diagonal, begin)
        full = tl.minimum(tl.maximum(full, begin), diagonal)
    return begin, full, diagonal, end


@triton.jit
def query_ranges(
    first_row, sequence, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return (begin, full, free, end), multiples of BLOCK_M except `end`: only queries in full .. free need no mask."""
    length, history, window_size = sequence.length, sequence.history, sequence.window_size
    end = length
    last_key = first_row + BLOCK_N - 1
    full = (last_key + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    free = length // BLOCK_M * BLOCK_M
    if HAS_TARGETS:
        if first_row >= history:
            end = tl.minimum(first_row + BLOCK_N, length)
        if last_key >= history:
            free = 0
    if HAS_WINDOW:
        seen_last = tl.minimum(last_key, history - 1) + window_size
        if seen_last <= history:
            end = tl.minimum(end, tl.maximum(seen_last, tl.minimum(first_row + BLOCK_N, length)))
        if history - first_row >= window_size:
            free = tl.minimum(free, (first_row + window_size) // BLOCK_M * BLOCK_M)
    full = tl.minimum(full, (end + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    return first_row // BLOCK_M * BLOCK_M, full, tl.maximum(tl.minimum(free, end), full), end


@triton.jit
def silu_and_slope(h, FAST: tl.constexpr):
    """Return (SiLU, twice its derivative minus 1) of a tile of scores, which are passed halved."""
    if FAST and COMPILED:
        u = tanh_approx(h)
    else:
        u = 2.0 / (1.0 + tl.exp(-2.0 * h)) - 1.0
    return h * u + h, h * (1.0 - u * u) + u


@triton.jit
def query_tile_bias(
    b, begin, block, t, sequence, bias, tiles, row, kind: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return, for a tile of queries, (the ranges of keys, its `TileBias`).

    The ranges are the five bounds of four loops over the keys. The second loop needs no masks; with a time bias its
    blocks are narrow, those of the third are wide and those of the fourth are near. Without one the third loop is
    empty.
    """
    first, full, diagonal, end = key_ranges(
        block * BLOCK_M, sequence, kind.HAS_TARGETS, kind.HAS_WINDOW, BLOCK_M, BLOCK_N
    )
    if kind.HAS_TIME:
        slot = begin // BLOCK_M + b + block
        near = tiles.near + slot * (tl.minimum(row, NEAR) * BLOCK_M * BLOCK_N)
        nearest = (end - 1) // BLOCK_N
        diagonal = tl.load(tiles.runs + slot)
        near_start = tl.maximum(diagonal, (nearest - (NEAR - 1)) * BLOCK_N)
        tile = resident_bias(
            bias, bias.query_times, bias.key_times, begin, t, t < sequence.length, tiles.entries + slot * row, near,
            nearest,
        )  # fmt: skip
        return (first, full, diagonal, near_start, end), tile
    else:
        return (first, full, diagonal, diagonal, end), TileBias(0.0, 0.0, 0, 0, 0, 0, 0, 0)
