"""Compute in kernels the time bucket of a pair, or the buckets that a tile of pairs covers.

Letters: T tokens of the batch, B sequences. The resident side of a program's tile, queries or keys, is loaded once; the
program walks over the streamed side in blocks.

A bucket is read from a table indexed by fp32's leading bits, which replaces a logarithm. Timestamps are int64 seconds,
or pairs of fp32, high and low part, whose differences are exact up to 2^24 seconds, and int32 offsets from the first
timestamp of their sequence's keys.

The least and the greatest timestamp of a tile's two sides determine the buckets that it covers. A tile with at most
MOST_EDGES bucket edges is narrow: its entry has the lowest bucket and the number of edges, and offsets are compared
with those edges (`reached`). With ascending timestamps, all tiles are narrow except a few next to the diagonal.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.bias.relative import bucket_edges
from hstu_sparse.core.launch import cdiv, run
from hstu_sparse.core.registration import cached_constant, register_preparation
from hstu_sparse.tiles.assembly import load_edge
from hstu_sparse.tiles.rows import COMPILED, locate

# Differences of int64 seconds never exceed this bucket; further entries of a longer table are never read.
MAX_BUCKETS = 145
# Cells of an octave in the table of buckets: 2 ** CELL_BITS, each narrower than a bucket.
CELL_BITS = 3
FP32_MANTISSA, FP32_BIAS, OCTAVES = 23, 127, 64
_SHIFT, _BASE = tl.constexpr(FP32_MANTISSA - CELL_BITS), tl.constexpr(FP32_BIAS << CELL_BITS)
_BLOCK = 256
# Zeros behind the tokens in the result of `split_times`, for tiles that reach past a batch's end.
MARGIN = 256
# The greatest number of edges in a narrow tile of pairs.
MOST_EDGES = tl.constexpr(4)
# A narrow tile's entry in the plan: its lowest bucket times 8, plus the number of its edges.
ENTRY_SHIFT, ENTRY_EDGES = tl.constexpr(3), tl.constexpr(7)
LEAST, GREATEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
# fp32 represents seconds exactly up to here.
EXACT_SECONDS = tl.constexpr(2**24)
# Greater than all differences of int64 seconds that occur.
_NEVER = 2**62


class TokenTimes(NamedTuple):
    """The timestamps of tokens as keys or as queries.

    split   [2, W] fp32, W at least T: two parts, high and low, whose sum is exact below 2^48 seconds
    offset  [W] int32: relative to the first timestamp of the sequence's keys; wraps if it does not fit
    """

    split: torch.Tensor
    offset: torch.Tensor


def bucket_cells(num_buckets: int) -> torch.Tensor:
    """Return [512, 2] int32: for each cell of fp32 numbers >= 1 the next bucket edge's bits and the bucket below it.

    A cell's index is the number's exponent and the first bits of its mantissa, which is exact and needs no logarithm.
    No cell has two edges; infinity is behind the last one.
    """
    edges = torch.tensor([*bucket_edges(num_buckets), math.inf], dtype=torch.float32, device="cpu")
    per_octave = 2**CELL_BITS
    starts = torch.tensor(
        [2.0 ** (i // per_octave) * (1 + i % per_octave / per_octave) for i in range(OCTAVES * per_octave)],
        device="cpu",
    )
    bucket = torch.bucketize(starts, edges[:-1], right=True)
    return torch.stack([edges[bucket].view(torch.int32), bucket.int()], 1)


@cached_constant
def device_cells(num_buckets: int, device: torch.device) -> torch.Tensor:
    """Return `bucket_cells` on a device."""
    return bucket_cells(num_buckets).to(device)


def num_time_buckets(time: torch.Tensor | None) -> int | None:
    """Return the number of buckets of a time table that a difference can fall into; None without a table."""
    return None if time is None else min(time.shape[0] - 1, MAX_BUCKETS)


def hidden_bucket(num_buckets: int) -> int:
    """Return the bucket of masked pairs: behind the table and behind what is read beyond its end."""
    return num_buckets + 1 + MOST_EDGES.value


@cached_constant
def bucket_steps(num_buckets: int, device: torch.device) -> torch.Tensor:
    """Return [num_buckets + 1 + MOST_EDGES] int64: the least integer in each bucket, then some beyond all."""
    steps = [min(math.ceil(edge), _NEVER) if edge < math.inf else _NEVER for edge in bucket_edges(num_buckets)]
    return torch.tensor([0, *steps, *[_NEVER] * MOST_EDGES.value], device=device)


@triton.jit
def cell_index(x):
    """Return the row of `bucket_cells` for fp32 numbers x >= 0."""
    return (tl.maximum(x, 1.0).to(tl.int32, bitcast=True) >> _SHIFT) - _BASE


@triton.jit
def bucket_of(x, cells, ASM: tl.constexpr = False):
    """Return the exact bucket of |x| (given as fp32 >= 0). cells: `bucket_cells`. ASM: see tiles/assembly.py."""
    index = cell_index(x)
    if ASM:
        index = index.to(tl.int64)
    edge, below = load_edge(cells + 2 * index, ASM)
    return below + (x >= edge).to(tl.int32)


@triton.jit
def pair_bucket(query_times, key_times, cells):
    """Return the buckets of pairs of int64 seconds, which broadcast against each other."""
    return bucket_of(tl.abs(query_times - key_times).to(tl.float32), cells)


@triton.jit
def extremes(times, origin, inside, AXIS: tl.constexpr):
    """Return the least and the greatest offset from `origin` of int64 timestamps, as int64 within the range of int32.

    An offset outside of that range counts as both ends of the range, so that no tile with it is narrow.
    """
    offset = tl.load(times, inside, 0) - origin
    fits = (offset > LEAST) & (offset < GREATEST)
    least = tl.where(inside, tl.where(fits, offset, LEAST), GREATEST).to(tl.int32)
    greatest = tl.where(inside, tl.where(fits, offset, GREATEST), LEAST).to(tl.int32)
    return tl.min(least, AXIS).to(tl.int64), tl.max(greatest, AXIS).to(tl.int64)


@triton.jit
def tile_entry(query_first, query_last, key_first, key_last, cells, ASM: tl.constexpr):
    """Return the `ENTRY` of tiles of pairs, int32: of a narrow tile its lowest bucket times 8 plus its edges, else -1.

    query_first to key_last: the least and the greatest time of both sides, see `extremes`. Narrow: no key is later than
    a query, and the differences cover at most MOST_EDGES edges. The caller checks that a side is short enough for
    `reached`.
    """
    nearest, farthest = query_first - key_last, query_last - key_first
    lowest = bucket_of(tl.maximum(nearest, 0).to(tl.float32), cells, ASM)
    highest = bucket_of(tl.maximum(farthest, 0).to(tl.float32), cells, ASM)
    narrow = (nearest >= 0) & (highest - lowest <= MOST_EDGES)
    return tl.where(narrow, (lowest << ENTRY_SHIFT) + highest - lowest, -1)


@triton.jit
def edge_place(resident, origin, edge, BY_QUERY: tl.constexpr):
    """Return the resident side, as offsets, relative to an edge, for `reached`. origin: of the block's start."""
    if BY_QUERY:
        return (resident.to(tl.int64) - (edge + origin - 1)).to(tl.float32)
    else:
        return ((origin + 1 - edge) - resident.to(tl.int64)).to(tl.float32)


@triton.jit
def other_place(streamed, origin, BY_QUERY: tl.constexpr):
    """Return the streamed side's position for `reached`. BY_QUERY: queries are the resident side."""
    return (origin - streamed if BY_QUERY else streamed - origin).to(tl.float32)


@triton.jit
def reached(resident, streamed):
    """Return 1.0 for a narrow tile's pairs at or past an edge, else 0.0, from `edge_place` and `other_place`.

    The sum of both, query less key less edge plus 1, is an integer, exact if it is small: the streamed side of a narrow
    tile spans less than 2^24 seconds. It takes one instruction at the full rate, unlike comparisons.
    """
    if COMPILED:
        return tl.inline_asm_elementwise(
            "add.sat.f32 $0, $1, $2;", "=f,f,f", [resident, streamed], tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.minimum(tl.maximum(resident + streamed, 0.0), 1.0)


@triton.jit
def near_order(tile, OWN: tl.constexpr, OTHER: tl.constexpr, STORE: tl.constexpr):
    """Reorder a tile [OWN, OTHER] from its order in memory, or (STORE) to it, so that a thread's values are adjacent.

    It is correct for any layout; in wgmma's layout a thread loads 16 bytes at once and threads exchange nothing.
    """
    if STORE:
        parts = tl.reshape(tile, [OWN // 16, 2, 8, OTHER // 8, 4, 2])
        return tl.reshape(tl.permute(parts, [0, 2, 4, 3, 1, 5]), [OWN * OTHER])
    else:
        parts = tl.reshape(tile, [OWN // 16, 8, 4, OTHER // 8, 2, 2])
        return tl.reshape(tl.permute(parts, [0, 4, 1, 3, 2, 5]), [OWN, OTHER])


@triton.jit
def load_split_times(times, inside):
    """Load int64 timestamps at `times` as two fp32 tensors, high and low part."""
    value = tl.load(times, inside, 0)
    high = value.to(tl.float32)
    return high, (value - high.to(tl.int64)).to(tl.float32)


@triton.jit(
    do_not_specialize=["num_seqs", "width"], do_not_specialize_on_alignment=["seq_offsets", "times", "key_times"]
)
def split_times_kernel(seq_offsets, times, key_times, split, offset, num_seqs, width, BLOCK: tl.constexpr):
    """Split the times of BLOCK tokens of a sequence in one program.

    split: [2, width] fp32, the high parts and then the low ones. offset: from the sequence's first time of a key.
    """
    _, begin, length, tile = locate(seq_offsets, tl.program_id(0), num_seqs, BLOCK)
    if tile * BLOCK < length:
        place = tile * BLOCK + tl.arange(0, BLOCK)
        token, inside = begin + place, place < length
        high, low = load_split_times(times + token, inside)
        tl.store(split + token, high, inside)
        tl.store(split + width + token, low, inside)
        relative = tl.load(times + token, inside, 0) - tl.load(key_times + begin)
        tl.store(offset + token, relative.to(tl.int32), inside)


def _fake_split_times(seq_offsets, times, key_times):
    width = cdiv(times.shape[0], 16) * 16 + MARGIN
    return [times.new_zeros(2, width, dtype=torch.float32), times.new_zeros(width, dtype=torch.int32)]


def _split_times(seq_offsets, times, key_times):
    total, num_seqs = times.shape[0], seq_offsets.shape[0] - 1
    split, offset = _fake_split_times(seq_offsets, times, key_times)
    if total and num_seqs:
        arguments = seq_offsets, times, key_times, split, offset, num_seqs, split.shape[1]
        run(split_times_kernel, total // _BLOCK + num_seqs, *arguments, BLOCK=_BLOCK)
    return [split, offset]


_SCHEMA = "Tensor seq_offsets, Tensor times, Tensor key_times"
_split_times_operator = register_preparation("split_times", _SCHEMA, _split_times, _fake_split_times)


def split_times(
    seq_offsets: torch.Tensor, timestamps: torch.Tensor, query_timestamps: torch.Tensor
) -> tuple[TokenTimes, TokenTimes]:
    """Return the times (of the keys, of the queries) as kernels read them, computed once if both are one tensor.

    They have T rounded up to a multiple of 16, for aligned pointers, and MARGIN more, for kernels whose tiles reach
    past a batch's end.

    Args:
        seq_offsets: [B+1].
        timestamps, query_timestamps: [T] int64, seconds.
    """
    keys = TokenTimes(*_split_times_operator(seq_offsets, timestamps, timestamps))
    if query_timestamps is timestamps:
        return keys, keys
    return keys, TokenTimes(*_split_times_operator(seq_offsets, query_timestamps, timestamps))
