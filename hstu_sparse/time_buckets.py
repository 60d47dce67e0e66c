"""How kernels find time buckets: a table in place of a logarithm, and timestamps that fp32 arithmetic can subtract.

Letters: T tokens of the batch, B sequences.

A bucket is read from a table of fp32's leading bits. Timestamps come as pairs of fp32, high and low part, whose
differences are exact up to 2^24 seconds, and as offsets in int32 from the first timestamp of their sequence's keys.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.launch import start
from hstu_sparse.registration import register_preparation
from hstu_sparse.relative_bias import bucket_edges
from hstu_sparse.tiles import locate

# Differences of int64 seconds never get past this bucket, so a longer table has a tail that is never read.
MAX_BUCKETS = 145
# Cells of an octave in the table that finds buckets: 2 ** CELL_BITS, each narrower than a bucket.
CELL_BITS = 3
FP32_MANTISSA, FP32_BIAS, OCTAVES = 23, 127, 64
_SHIFT, _BASE = tl.constexpr(FP32_MANTISSA - CELL_BITS), tl.constexpr(FP32_BIAS << CELL_BITS)
_BLOCK = 256


class TokenTimes(NamedTuple):
    """Timestamps of the tokens in one role, of keys or of queries.

    split   [2, T] fp32: high and low part, whose sum is exact below 2^48 seconds
    offset  [T] int32: from the first timestamp of the sequence's keys; wraps where it does not fit
    """

    split: torch.Tensor
    offset: torch.Tensor


def bucket_cells(num_buckets: int) -> torch.Tensor:
    """[512, 2] int32 on the CPU: for each cell of fp32 numbers >= 1, the bits of the next bucket edge (or infinity) and
    the bucket below it. No cell has two edges.

    A cell's index is the number's exponent and the first bits of its mantissa: no logarithm, and exact.
    """
    edges = torch.tensor([*bucket_edges(num_buckets), math.inf], dtype=torch.float32)
    per_octave = 2**CELL_BITS
    starts = torch.tensor(
        [2.0 ** (i // per_octave) * (1 + i % per_octave / per_octave) for i in range(OCTAVES * per_octave)]
    )
    bucket = torch.bucketize(starts, edges[:-1], right=True)
    return torch.stack([edges[bucket].view(torch.int32), bucket.int()], 1)


@functools.lru_cache(maxsize=64)
def device_cells(num_buckets: int, device: torch.device) -> torch.Tensor:
    """`bucket_cells` on a device."""
    return bucket_cells(num_buckets).to(device)


@triton.jit
def cell_index(x):
    """Row of `bucket_cells` for fp32 numbers x >= 0."""
    return (tl.maximum(x, 1.0).to(tl.int32, bitcast=True) >> _SHIFT) - _BASE


@triton.jit
def bucket_of(x, cells):
    """Bucket of |x| (given as fp32 >= 0), exact. cells: `bucket_cells`."""
    index = cell_index(x)
    edge = tl.load(cells + 2 * index).to(tl.float32, bitcast=True)
    return tl.load(cells + 2 * index + 1) + (x >= edge).to(tl.int32)


@triton.jit
def load_split_times(times, inside):
    """int64 timestamps at `times` as two fp32 tensors, high and low part."""
    value = tl.load(times, inside, 0)
    high = value.to(tl.float32)
    return high, (value - high.to(tl.int64)).to(tl.float32)


@triton.jit
def store_split_times(times, origin, split, offset, total, token, inside):
    """Writes the `TokenTimes` of tokens of one sequence, whose first key has the timestamp `origin`."""
    high, low = load_split_times(times + token, inside)
    tl.store(split + token, high, inside)
    tl.store(split + total + token, low, inside)
    tl.store(offset + token, (tl.load(times + token, inside, 0) - origin).to(tl.int32), inside)


@triton.jit(
    do_not_specialize=["num_seqs", "total"], do_not_specialize_on_alignment=["seq_offsets", "times", "key_times"]
)
def split_times_kernel(seq_offsets, times, key_times, split, offset, num_seqs, total, BLOCK: tl.constexpr):
    """One program: BLOCK tokens of a sequence."""
    _, begin, length, tile = locate(seq_offsets, tl.program_id(0), num_seqs, BLOCK)
    if tile * BLOCK < length:
        place = tile * BLOCK + tl.arange(0, BLOCK)
        store_split_times(times, tl.load(key_times + begin), split, offset, total, begin + place, place < length)


def _split_times(seq_offsets, times, key_times):
    total, num_seqs = times.shape[0], seq_offsets.shape[0] - 1
    split, offset = _fake_split_times(seq_offsets, times, key_times)
    if total and num_seqs:
        given = seq_offsets, times, key_times, split, offset, num_seqs, total
        start(split_times_kernel, total // _BLOCK + num_seqs, given, dict(BLOCK=_BLOCK), {}, (seq_offsets.dtype,))
    return [split, offset]


def _fake_split_times(seq_offsets, times, key_times):
    total = times.shape[0]
    return [times.new_empty(2, total, dtype=torch.float32), times.new_empty(total, dtype=torch.int32)]


_split_times_operator = register_preparation(
    "split_times", "Tensor seq_offsets, Tensor times, Tensor key_times", launch=_split_times, fake=_fake_split_times
)


def split_times(
    seq_offsets: torch.Tensor, timestamps: torch.Tensor, query_timestamps: torch.Tensor
) -> tuple[TokenTimes, TokenTimes]:
    """(of the keys, of the queries) as kernels read them; what is computed once serves both where both are one tensor.

    Args:
        seq_offsets: [B+1].
        timestamps, query_timestamps: [T] int64, seconds.
    """
    keys = TokenTimes(*_split_times_operator(seq_offsets, timestamps, timestamps))
    if query_timestamps is timestamps:
        return keys, keys
    return keys, TokenTimes(*_split_times_operator(seq_offsets, query_timestamps, timestamps))
