"""The relative bias of a call: what kernels are given of it, and where they add its tables' gradients.

b(t, s) is defined in hstu_sparse/relative_bias.py. Letters: T tokens of the batch, N max_seq_len, t and s positions of
queries and keys in their sequence, BS block size.

The position table is kept backwards, `position[s - t]` with a pointer to entry 0, and with zeros around it, so that no
index of a pair that is not seen needs a bound.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.assembly import proven
from hstu_sparse.bsa.reach import LEAST_TILE, MOST_EDGES, bsa_edges_kernel, bucket_cells
from hstu_sparse.launch import cdiv, run
from hstu_sparse.relative_bias import bucket_edges

# Entries around the position table: past its end, and for blocks of a tile that are not there yet (128 of 128 tokens).
BEHIND, BEFORE = 256, 128 * 128 + 256
# Mean keys of a tile, at most.
MEANS = 64
# Sums kept of each bucket's gradient, so that programs do not wait for another.
LANES = tl.constexpr(64)
# Buckets whose sums are taken side by side, and entries behind the time table, which tiles read or add to.
AT_ONCE = tl.constexpr(4)
BEYOND = MOST_EDGES.value + AT_ONCE.value
# Copies of the position table's gradient.
COPIES = tl.constexpr(16)


class KernelBias(NamedTuple):
    """What kernels read of a RelativeBias: pointers, or None where a table is absent. Both tables are halved: kernels
    compute half of each score, of which SiLU is one product less.
    """

    position: object = None  # [s - t] fp32
    time: object = None  # [bucket] fp32, BEYOND zeros behind
    steps: object = None  # [bucket] fp32, the least whole difference in each, infinite behind
    cells: object = None  # int32, see `bucket_cells`
    key_high: object = None  # [T] fp32, times of the keys
    key_low: object = None
    query_high: object = None
    query_low: object = None
    key_spans: object = None  # [NB, 4] fp32, of each block the earliest time (high, low) and the latest
    means: object = None  # [slots, blocks] int16, see `bsa_means_kernel`
    summaries: object = None  # [slots, blocks / CHUNK] int32
    blocks: object = None
    places: object = None  # [T] fp32, queries' times since `origins`
    key_places: object = None  # [T] fp32, keys' times since their block's earliest
    own: object = None  # [T, BS] int16, buckets between queries and the keys of the block they stand in
    origins: object = None  # [slots, 2] fp32, the earliest times of the tiles of `means`
    edges: object = None  # [slots, blocks / CHUNK, 3, CHUNK] fp32, see `bsa_edges_kernel`


class TableGradients(NamedTuple):
    """Where kernels add the tables' gradients: fp32, or int64 multiples of 1 / scale, which add in any order alike."""

    ahead: object = None  # [t - s], for queries that stand side by side
    backwards: object = None  # [COPIES, s - t], for keys that do
    time: object = None  # [bucket, LANES]
    scale: object = None  # one fp32 number, with int64


@functools.cache
def bucket_steps(num_buckets: int, device: torch.device) -> torch.Tensor:
    """[num_buckets + 1 + BEYOND] fp32, the least whole number in each bucket, infinity behind."""
    steps = torch.tensor([0.0, *bucket_edges(num_buckets), *[math.inf] * BEYOND], dtype=torch.float32)
    return steps.ceil().to(device)


@triton.jit(do_not_specialize=["N", "origin", "entries", "buckets"])
def bsa_tables_kernel(
    position, time, backwards, padded, N, origin, entries, buckets, BEYOND: tl.constexpr, SIZE: tl.constexpr
):
    """Writes half of the position table backwards with its margins, and half of the time table with zeros behind."""
    lane = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    if position is not None:
        distance = origin - lane
        value = tl.load(position + distance, mask=(distance >= 0) & (distance < N), other=0.0)
        tl.store(backwards + lane, 0.5 * value.to(tl.float32), mask=lane < entries)
    if time is not None:
        value = tl.load(time + lane, mask=lane < buckets, other=0.0)
        tl.store(padded + lane, 0.5 * value.to(tl.float32), mask=lane < buckets + BEYOND)


def prepare(
    position: torch.Tensor | None,
    time: torch.Tensor | None,
    plan: Sequence[torch.Tensor | None],
    seq_offsets: torch.Tensor,
    block_size: int,
) -> KernelBias:
    """What kernels read of the tables and of a plan's tensors."""
    if position is None and time is None:
        return KernelBias()
    device = (time if position is None else position).device
    fp32 = dict(dtype=torch.float32, device=device)
    N = origin = entries = buckets = 0
    backwards = padded = None
    # Pointers stay multiples of 16 bytes whatever N is: kernels are compiled anew where they do not.
    if position is not None:
        N = position.shape[0]
        origin = table_origin(N)
        entries = origin + BEFORE
        backwards = torch.empty(entries, **fp32)
    if time is not None:
        buckets = time.shape[0]
        padded = torch.empty(buckets + BEYOND, **fp32)
    run(
        bsa_tables_kernel, (cdiv(max(entries, buckets + BEYOND), 1024),), position, time, backwards, padded,
        N, origin, entries, buckets, BEYOND=BEYOND, SIZE=1024, num_warps=4,
    )  # fmt: skip
    backwards = None if backwards is None else backwards[origin:]
    if time is None:
        return KernelBias(backwards)
    times, spans, means, summaries, places, origins, key_places, own = plan
    steps, cells = bucket_steps(buckets - 1, device), bucket_cells(buckets - 1, device)
    edges = means.new_empty(means.numel() * 3, dtype=torch.float32)
    found = KernelBias(
        backwards,
        padded,
        steps,
        cells,
        *times,
        spans,
        means,
        summaries,
        means.shape[1],
        places,
        key_places,
        own,
        origins,
        edges,
    )
    sizes = dict(BS=block_size, TILE=max(block_size, LEAST_TILE.value), MEANS=MEANS, ASM=proven(device))
    grid = means.shape[0], min(8, cdiv(means.shape[1], 128))
    run(bsa_edges_kernel, grid, seq_offsets, found, seq_offsets.shape[0] - 1, **sizes, num_warps=1)
    return found


def table_origin(N: int) -> int:
    """Where distance 0 stands in a position table that is kept backwards, or in its gradient."""
    return cdiv(N + BEHIND, 16) * 16


class TableSums:
    """Memory for the tables' gradients, and their last sums.

    Under torch.use_deterministic_algorithms, whole multiples of a power of two small enough that `terms` times the
    greatest of all terms stays below 2^62. scattered: some kernel adds to the position table's pair by pair.
    """

    def __init__(self, position, time, do, v, gates, terms: int, scattered: bool):
        self.position, self.time, self.scale, self.pitch = position, time, None, 0
        kind = dict(dtype=torch.float32, device=do.device)
        if torch.are_deterministic_algorithms_enabled():
            greatest = [x.abs().amax().float() for x in (do, v)] + [
                torch.stack([g.abs().amax() for g in gates]).amax().float()
            ]
            # SiLU's slope is at most 1.1.
            greatest = 1.1 * v.shape[2] * greatest[0] * greatest[1] * greatest[2]
            power = torch.floor(62 - math.log2(terms) - torch.log2(greatest)).clamp(-100, 100)
            self.scale = torch.exp2(power).view(1)
            kind["dtype"] = torch.int64
        ahead = backwards = buckets = None
        if position is not None:
            self.origin = table_origin(position.shape[0])
            self.ahead = torch.zeros(BEFORE + self.origin, **kind)
            ahead = self.ahead[BEFORE:]
            if scattered:
                self.pitch = self.origin + BEHIND
                self.backwards = torch.zeros(COPIES.value * self.pitch, **kind)
                backwards = self.backwards[self.origin :]
        if time is not None:
            buckets = torch.zeros(time.shape[0] + BEYOND, LANES.value, **kind)
        self.tables = TableGradients(ahead, backwards, buckets, self.scale)

    def gradients(self, factor: float) -> list[torch.Tensor]:
        """[position's, time's], those that there are, times `factor`."""
        found = []
        if self.position is not None:
            N = self.position.shape[0]
            total = self.tables.ahead[:N]
            if self.tables.backwards is not None:
                # Copy c has distance d at origin + c - d.
                copies = self.backwards.as_strided((COPIES.value, N), (self.pitch + 1, 1), self.origin - (N - 1))
                total = total + copies.sum(0).flip(0)
            found.append(total)
        if self.time is not None:
            found.append(self.tables.time[: self.time.shape[0]].sum(1))
        if self.scale is not None:
            found = [x.double() / self.scale for x in found]
        tables = (x for x in (self.position, self.time) if x is not None)
        return [(x * factor).to(table.dtype) for x, table in zip(found, tables)]
