"""Compute the time bucket of a pair, or the buckets of a tile of pairs, in kernels.

Letters: T tokens of the batch, B sequences. A program loads the resident side of its tile, queries or keys, once and
loops over blocks of the streamed side.

A table indexed by the leading bits of an fp32 number replaces the logarithm. Timestamps are int64 seconds. Tiles take
them as two fp32 numbers, whose differences are exact up to 2^24 seconds, and as int32 offsets from the time of the
sequence's first key.

The minimum and maximum time of both sides bound the buckets of a tile. A tile that spans at most MAX_EDGES bucket edges
is narrow: the plan stores its lowest bucket and its number of edges, and the kernel compares offsets with these edges
(`past_edge`). If timestamps ascend, all tiles are narrow except a few next to the diagonal.
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

# The bucket of the largest difference of int64 seconds; further entries of a table are never read.
MAX_BUCKETS = 145
# The table of buckets has 2 ** CELL_BITS cells for each power of two, each narrower than a bucket.
CELL_BITS = 3
FP32_MANTISSA, FP32_BIAS, OCTAVES = 23, 127, 64
_SHIFT, _BASE = tl.constexpr(FP32_MANTISSA - CELL_BITS), tl.constexpr(FP32_BIAS << CELL_BITS)
_BLOCK = 256
# The number of zeros after the tokens in the result of `split_times`, for tiles that extend past the batch's end.
MARGIN = 256
# The largest number of edges in a narrow tile.
MAX_EDGES = tl.constexpr(4)
# The plan's entry of a narrow tile is (lowest bucket << ENTRY_SHIFT) + number of edges.
ENTRY_SHIFT, ENTRY_EDGES = tl.constexpr(3), tl.constexpr(7)
INT32_MIN, INT32_MAX = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
# fp32 represents integers exactly up to here.
EXACT_SECONDS = tl.constexpr(2**24)
# Larger than every difference of times.
_UNREACHABLE = 2**62


class TokenTimes(NamedTuple):
    """The timestamps of the tokens as keys or as queries, in the form that tiles read.

    split   [2, W] fp32, W at least T: high and low part, whose sum is exact below 2^48 seconds
    offset  [W] int32: minus the time of the sequence's first key; wraps around on overflow
    """

    split: torch.Tensor
    offset: torch.Tensor


def bucket_cells(num_buckets: int) -> torch.Tensor:
    """Return [512, 2] int32: for each cell of fp32 numbers >= 1 (the bits of the next bucket edge, the bucket below).

    The index of a cell is the exponent and the first bits of the mantissa. No cell contains two edges; the edge after
    the last one is infinity.
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
    """Return the number of buckets of a time table that kernels use; None without a table."""
    return None if time is None else min(time.shape[0] - 1, MAX_BUCKETS)


def masked_bucket(num_buckets: int) -> int:
    """Return the bucket of masked pairs: after the table and the entries that are read past its end."""
    return num_buckets + 1 + MAX_EDGES.value


@cached_constant
def bucket_starts(num_buckets: int, device: torch.device) -> torch.Tensor:
    """Return the smallest integer in each bucket, then MAX_EDGES unreachable ones: [num_buckets + 1 + MAX_EDGES]."""
    starts = [math.ceil(min(edge, _UNREACHABLE)) for edge in bucket_edges(num_buckets)]
    return torch.tensor([0, *starts, *[_UNREACHABLE] * MAX_EDGES.value], device=device)


@triton.jit
def cell_index(x):
    """Return the row of `bucket_cells` for fp32 numbers x >= 0."""
    return (tl.maximum(x, 1.0).to(tl.int32, bitcast=True) >> _SHIFT) - _BASE


@triton.jit
def bucket_of(x, cells, ASM: tl.constexpr = False):
    """Return the exact bucket of x, fp32 >= 0. cells: `bucket_cells`. ASM: see tiles/assembly.py."""
    index = cell_index(x)
    if ASM:
        index = index.to(tl.int64)
    edge, below = load_edge(cells + 2 * index, ASM)
    return below + (x >= edge).to(tl.int32)


@triton.jit
def pair_bucket(query_times, key_times, cells):
    """Return the buckets of pairs of int64 seconds, which broadcast with each other."""
    return bucket_of(tl.abs(query_times - key_times).to(tl.float32), cells)


@triton.jit
def extremes(times, origin, inside, AXIS: tl.constexpr):
    """Return the minimum and maximum offset of int64 timestamps from `origin`, as int64 within the range of int32.

    An offset outside this range counts as both ends of the range, so that its tile is not narrow.
    """
    offset = tl.load(times, inside, 0) - origin
    fits = (offset > INT32_MIN) & (offset < INT32_MAX)
    least = tl.where(inside, tl.where(fits, offset, INT32_MIN), INT32_MAX).to(tl.int32)
    greatest = tl.where(inside, tl.where(fits, offset, INT32_MAX), INT32_MIN).to(tl.int32)
    return tl.min(least, AXIS).to(tl.int64), tl.max(greatest, AXIS).to(tl.int64)


@triton.jit
def tile_entry(query_first, query_last, key_first, key_last, cells, ASM: tl.constexpr):
    """Return the plan's entries of tiles, int32: see ENTRY_SHIFT for a narrow tile, -1 for another.

    query_first, query_last, key_first, key_last: the `extremes` of both sides. A tile is narrow if no key is later than
    a query and the differences span at most MAX_EDGES edges. The caller checks the time span that `past_edge` needs.
    """
    nearest, farthest = query_first - key_last, query_last - key_first
    lowest = bucket_of(tl.maximum(nearest, 0).to(tl.float32), cells, ASM)
    highest = bucket_of(tl.maximum(farthest, 0).to(tl.float32), cells, ASM)
    narrow = (nearest >= 0) & (highest - lowest <= MAX_EDGES)
    return tl.where(narrow, (lowest << ENTRY_SHIFT) + highest - lowest, -1)


@triton.jit
def relative_to_edge(resident, origin, edge, BY_QUERY: tl.constexpr):
    """Return the first argument of `past_edge`, from the resident side's offsets. origin: the block's first offset."""
    if BY_QUERY:
        return (resident.to(tl.int64) - (edge + origin - 1)).to(tl.float32)
    else:
        return ((origin + 1 - edge) - resident.to(tl.int64)).to(tl.float32)


@triton.jit
def relative_to_origin(streamed, origin, BY_QUERY: tl.constexpr):
    """Return the second argument of `past_edge`, from the streamed side's offsets. BY_QUERY: queries are resident."""
    return (origin - streamed if BY_QUERY else streamed - origin).to(tl.float32)


@triton.jit
def past_edge(resident, streamed):
    """Return 1.0 for the pairs of a narrow tile at or past an edge, else 0.0.

    resident, streamed: from `relative_to_edge` and `relative_to_origin`. Their sum is query - key - edge + 1, which is
    exact near 0, since the streamed side of a narrow tile spans less than 2^24 seconds. A saturating addition runs at
    the full rate, unlike a comparison.
    """
    if COMPILED:
        return tl.inline_asm_elementwise(
            "add.sat.f32 $0, $1, $2;", "=f,f,f", [resident, streamed], tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.minimum(tl.maximum(resident + streamed, 0.0), 1.0)


@triton.jit
def reorder_near(tile, RESIDENT: tl.constexpr, STREAMED: tl.constexpr, STORE: tl.constexpr):
    """Reorder a tile [RESIDENT, STREAMED] that was loaded from memory, or with STORE one that will be stored.

    In memory the values of a thread are adjacent if the tile has wgmma's layout: a thread then loads 16 bytes at once,
    without an exchange between threads. The result is correct for any layout.
    """
    if STORE:
        parts = tl.reshape(tile, [RESIDENT // 16, 2, 8, STREAMED // 8, 4, 2])
        return tl.reshape(tl.permute(parts, [0, 2, 4, 3, 1, 5]), [RESIDENT * STREAMED])
    else:
        parts = tl.reshape(tile, [RESIDENT // 16, 8, 4, STREAMED // 8, 2, 2])
        return tl.reshape(tl.permute(parts, [0, 4, 1, 3, 2, 5]), [RESIDENT, STREAMED])


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
    """Compute `TokenTimes` of BLOCK tokens of a sequence in one program. split: [2, width]."""
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
    """Return the `TokenTimes` of (the keys, the queries), computed once if both are the same tensor.

    W is T rounded up to a multiple of 16, which aligns pointers, plus MARGIN, for tiles that extend past the batch's
    end.

    Args:
        seq_offsets: [B+1].
        timestamps, query_timestamps: [T] int64, seconds.
    """
    keys = TokenTimes(*_split_times_operator(seq_offsets, timestamps, timestamps))
    if query_timestamps is timestamps:
        return keys, keys
    return keys, TokenTimes(*_split_times_operator(seq_offsets, query_timestamps, timestamps))
