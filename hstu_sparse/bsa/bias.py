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
from hstu_sparse.bias.gradients import fixed_point_unit
from hstu_sparse.bias.relative import bucket_edges
from hstu_sparse.bsa.reach import CHUNK, LEAST_TILE, MOST_EDGES, bsa_edges_kernel, bucket_cells
from hstu_sparse.launch import cdiv, run

# Entries around the position table: past its end, and for blocks of a tile that are not there yet (128 of 128 tokens).
BEHIND, BEFORE = 256, 128 * 128 + 256
# Places of a norm, of which the first is used: what is behind stays aligned.
NORM = 16
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
    own: object = None  # [NB, BS * BS] int16, buckets between queries and the keys of the block they stand in
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


@triton.jit(do_not_specialize=["N", "origin", "entries", "buckets", "places"])
def bsa_tables_kernel(
    position, time, norm, backwards, padded, N, origin, entries, buckets, places, NORM: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Writes half of the position table backwards with its margins, half of the time table with zeros behind up to
    `places`, and a norm of 0.
    """
    lane = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    if position is not None:
        distance = origin - lane
        value = tl.load(position + distance, mask=(distance >= 0) & (distance < N), other=0.0)
        tl.store(backwards + lane, 0.5 * value.to(tl.float32), mask=lane < entries)
    if time is not None:
        value = tl.load(time + lane, mask=lane < buckets, other=0.0)
        tl.store(padded + lane, 0.5 * value.to(tl.float32), mask=lane < places)
    tl.store(norm + tl.arange(0, NORM), tl.zeros([NORM], tl.float32))


class Prepared:
    """What a call makes of its tables, in one fp32 tensor that is kept for the backward pass: the greatest norm of a
    value, which bsa_pool_fwd_kernel finds; the position table backwards; the time table and what bsa_edges_kernel
    writes. Nothing without tables.
    """

    def __init__(self, position: torch.Tensor | None, time: torch.Tensor | None, plan: Sequence[torch.Tensor | None]):
        self.position, self.time, self.plan = position, time, plan
        self.N = self.origin = self.buckets = entries = places = edges = 0
        # Pointers stay multiples of 16 bytes whatever N is: kernels are compiled anew where they do not.
        if position is not None:
            self.N = position.shape[0]
            self.origin = table_origin(self.N)
            entries = self.origin + BEFORE
        if time is not None:
            self.buckets = time.shape[0]
            places, edges = cdiv(self.buckets + BEYOND, 16) * 16, 3 * plan[2].numel()
        self.sizes = NORM if entries or places else 0, entries, places, edges

    def new(self, like: torch.Tensor) -> torch.Tensor:
        """Its memory, on the device of `like`."""
        return like.new_empty(sum(self.sizes), dtype=torch.float32)

    def bias(self, prepared: torch.Tensor) -> KernelBias:
        """What kernels read of it and of the plan's tensors."""
        if not len(prepared):
            return KernelBias()
        _, backwards, padded, edges = prepared.split(self.sizes)
        backwards = None if self.position is None else backwards[self.origin :]
        if self.time is None:
            return KernelBias(backwards)
        times, spans, means, summaries, places, origins, key_places, own = self.plan
        steps, cells = (f(self.buckets - 1, prepared.device) for f in (bucket_steps, bucket_cells))
        return KernelBias(
            backwards, padded, steps, cells, *times, spans, means, summaries, means.shape[1], places, key_places, own,
            origins, edges,
        )  # fmt: skip

    def launch(self, seq_offsets: torch.Tensor, block_size: int) -> torch.Tensor:
        """All of it but the norm, which is 0."""
        prepared = self.new(seq_offsets)
        if not len(prepared):
            return prepared
        norm, backwards, padded, _ = prepared.split(self.sizes)
        _, entries, places, _ = self.sizes
        run(
            bsa_tables_kernel, (cdiv(max(entries, places), 1024),), self.position, self.time, norm, backwards, padded,
            self.N, self.origin, entries, self.buckets, places, NORM=NORM, SIZE=1024, num_warps=4,
        )  # fmt: skip
        if self.time is not None:
            slots, blocks = self.plan[2].shape
            sizes = dict(BS=block_size, TILE=max(block_size, LEAST_TILE.value), ASM=proven(prepared.device))
            grid = slots, min(8, blocks // CHUNK.value)
            run(
                bsa_edges_kernel, grid, seq_offsets, self.bias(prepared), seq_offsets.shape[0] - 1, **sizes, num_warps=1
            )
        return prepared


def table_origin(N: int) -> int:
    """Where distance 0 stands in a position table that is kept backwards, or in its gradient."""
    return cdiv(N + BEHIND, 16) * 16


@triton.jit(do_not_specialize=["pitch", "N", "buckets"])
def bsa_sums_kernel(
    tables, pitch, position, time, N, buckets, factor, COPIES: tl.constexpr, LANES: tl.constexpr, SIZE: tl.constexpr
):
    """Writes the tables' gradients, times factor: of each program SIZE distances and SIZE / 8 buckets."""
    if position is not None:
        distance = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        total = tl.load(tables.ahead + distance, mask=distance < N, other=0)
        if tables.backwards is not None:
            for copy in tl.static_range(COPIES):
                # Copies have distance 0 one place further each.
                place = tables.backwards + (copy * pitch + copy) - distance
                total += tl.load(place, mask=distance < N, other=0)
        _store_total(position + distance, total, tables.scale, factor, distance < N)
    if time is not None:
        bucket = tl.program_id(0) * (SIZE // 8) + tl.arange(0, SIZE // 8)
        inside = bucket < buckets
        cells = tables.time + bucket[:, None] * LANES + tl.arange(0, LANES)[None, :]
        total = tl.sum(tl.load(cells, mask=inside[:, None], other=0), 1)
        _store_total(time + bucket, total, tables.scale, factor, inside)


@triton.jit
def _store_total(place, total, scale, factor, mask):
    if scale is not None:
        total = (total.to(tl.float64) / tl.load(scale)).to(tl.float32)
    tl.store(place, total * factor, mask=mask)


class TableSums:
    """Memory for the tables' gradients, and their last sums.

    Under torch.use_deterministic_algorithms, whole multiples of a power of two small enough that `terms` times the
    greatest of all terms stays below 2^62. scattered: some kernel adds to the position table's pair by pair.
    """

    def __init__(self, position, time, do, v, gates, terms: int, scattered: bool):
        self.position, self.time, self.scale = position, time, None
        kind = dict(dtype=torch.float32, device=do.device)
        if torch.are_deterministic_algorithms_enabled():
            greatest = [x.abs().amax().float() for x in (do, v)] + [
                torch.stack([g.abs().amax() for g in gates]).amax().float()
            ]
            # SiLU's slope is at most 1.1.
            greatest = [x.double() for x in greatest]
            bound = 1.1 * v.shape[2] * terms * greatest[0] * greatest[1] * greatest[2]
            self.scale = fixed_point_unit(bound).view(1)
            kind["dtype"] = torch.int64
        N, buckets = (0 if x is None else x.shape[0] for x in (position, time))
        self.origin = table_origin(N)
        self.pitch = self.origin + BEHIND if scattered and N else 0
        sizes = (
            BEFORE + self.origin if N else 0,
            COPIES.value * self.pitch,
            (buckets + BEYOND) * LANES.value if buckets else 0,
        )
        ahead, backwards, cells = torch.zeros(sum(sizes), **kind).split(sizes)
        self.tables = TableGradients(
            ahead[BEFORE:] if N else None,
            backwards[self.origin :] if self.pitch else None,
            cells if buckets else None,
            self.scale,
        )

    def gradients(self, factor: float) -> list[torch.Tensor]:
        """[position's, time's], those that there are, times `factor`."""
        found = [None if x is None else torch.empty_like(x) for x in (self.position, self.time)]
        N, buckets = (0 if x is None else x.shape[0] for x in found)
        size = 128
        run(
            bsa_sums_kernel, (max(cdiv(N, size), cdiv(buckets, size // 8)),), self.tables, self.pitch, *found,
            N, buckets, factor, COPIES=COPIES, LANES=LANES, SIZE=size, num_warps=4,
        )  # fmt: skip
        return [x for x in found if x is not None]
