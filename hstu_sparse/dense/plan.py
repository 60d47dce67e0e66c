"""Plan the dense kernels' work on a batch, once for all heads and layers.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key head size, V value head size; t and s:
the indices of queries and keys in their sequence.

The tiles, the order in which they start, and the time buckets of their pairs depend on the offsets, mask, timestamps
and tile sizes, but not on q, k, v or the bias tables.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.bias.buckets import (
    EXACT_SECONDS,
    TokenTimes,
    bucket_of,
    device_cells,
    extremes,
    load_split_times,
    masked_bucket,
    num_time_buckets,
    reorder_near,
    split_times,
    tile_entry,
)
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.bias.scores import NEAR
from hstu_sparse.core.jagged import fingerprint
from hstu_sparse.core.launch import architecture, cdiv, padded_head, run
from hstu_sparse.core.mask import MASK, Mask, context_times
from hstu_sparse.core.registration import register_preparation
from hstu_sparse.dense import configs
from hstu_sparse.dense.configs import Features
from hstu_sparse.tiles.assembly import proven
from hstu_sparse.tiles.ranges import Extension, find_sequence, key_ranges, query_ranges, visible
from hstu_sparse.tiles.rows import locate


@triton.jit
def _write_schedule(b, seq_offsets, schedule, num_seqs, num_slots, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Write the tiles (b, 0), (b, 1), ... of sequence b to their place in the schedule, longest sequences first."""
    begin = tl.load(seq_offsets + b)
    count = (tl.load(seq_offsets + b + 1) - begin + TILE - 1).to(tl.int32) // TILE
    before = 0
    total = 0
    for first in range(0, num_seqs, CHUNK):
        other = first + tl.arange(0, CHUNK)
        inside = other < num_seqs
        length = tl.load(seq_offsets + other + 1, inside, 0) - tl.load(seq_offsets + other, inside, 0)
        blocks = (length + TILE - 1).to(tl.int32) // TILE
        ahead = (blocks > count) | ((blocks == count) & (other < b))
        before += tl.sum(tl.where(ahead, blocks, 0), 0)
        total += tl.sum(blocks, 0)
    for first in range(0, count, CHUNK):
        block = first + tl.arange(0, CHUNK)
        slot = schedule + 2 * (before + block)
        tl.store(slot, tl.zeros_like(block) + b, block < count)
        tl.store(slot + 1, block, block < count)
    if b == 0:
        for first in range(total, num_slots, CHUNK):
            slot = first + tl.arange(0, CHUNK)
            tl.store(schedule + 2 * slot, tl.full([CHUNK], -1, tl.int32), slot < num_slots)


@triton.jit
def _map_tile(
    first_row, slot, begin, sequence, tile_times, block_times, k_times, cells, tiles, row, EXTENSION: tl.constexpr,
    HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    BY_QUERY: tl.constexpr, HIDDEN: tl.constexpr, CHUNK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write the entries of a `TileMap` for the tile from `first_row` on."""
    length = sequence.length
    if BY_QUERY:
        _, low, high, end = key_ranges(first_row, sequence, HAS_TARGETS, HAS_WINDOW, TILE, BLOCK, EXTENSION)
    else:
        nearest_row, low, high, end = query_ranges(first_row, sequence, HAS_TARGETS, HAS_WINDOW, BLOCK, TILE, EXTENSION)
    tile_times += begin
    block_times += begin
    origin = tl.load(k_times + begin)
    tile_rows = first_row + tl.arange(0, TILE)
    tile_first, tile_last = extremes(tile_times + tile_rows, origin, tile_rows < length, 0)
    low_block, high_block = low // BLOCK, high // BLOCK
    wide_first, wide_end = high_block, low_block
    for start in range(low_block, high_block + 2, CHUNK):
        block = start + tl.arange(0, CHUNK)
        inside = block < high_block
        token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        block_first, block_last = extremes(block_times + token, origin, inside[:, None] & (token < length), 1)
        if BY_QUERY:
            value = tile_entry(tile_first, tile_last, block_first, block_last, cells, ASM)
        else:
            value = tile_entry(block_first, block_last, tile_first, tile_last, cells, ASM)
        value = tl.where((block_last - block_first < EXACT_SECONDS) & inside, value, -1)
        tl.store(tiles.entries + slot * row + block, value.to(tl.int16), block < high_block + 2)
        wide = inside & (value < 0)
        wide_first = tl.minimum(wide_first, tl.min(tl.where(wide, block, wide_first), 0))
        wide_end = tl.maximum(wide_end, tl.max(tl.where(wide, block + 1, wide_end), 0))
    if BY_QUERY:
        nearest = (end - 1) // BLOCK
        first = tl.maximum(nearest - (NEAR - 1), low_block)
        last = nearest + 1
        run = tl.minimum(wide_first, first) * BLOCK
    else:
        nearest = nearest_row // BLOCK
        first = nearest
        run = tl.maximum(wide_end, tl.minimum(nearest + NEAR, high_block)) * BLOCK
        last = tl.minimum((tl.minimum(run, end) + BLOCK - 1) // BLOCK, nearest + NEAR)
    tl.store(tiles.runs + slot, run)

    near = tiles.near + slot * (tl.minimum(row, NEAR) * TILE * BLOCK)
    tile_rows = tile_rows[:, None]
    tile_high, tile_low = load_split_times(tile_times + tile_rows, tile_rows < length)
    for block in range(first, last):
        block_rows = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
        block_high, block_low = load_split_times(block_times + block_rows, block_rows < length)
        buckets = bucket_of(tl.abs((tile_high - block_high) + (tile_low - block_low)), cells, ASM)
        t, s = (tile_rows, block_rows) if BY_QUERY else (block_rows, tile_rows)
        seen = visible(t, s, sequence, HAS_TARGETS, HAS_WINDOW, EXTENSION)
        buckets = tl.where(seen, buckets, HIDDEN).to(tl.uint8)
        place = nearest - block if BY_QUERY else block - nearest
        where = place * (TILE * BLOCK) + tl.arange(0, TILE * BLOCK)
        tl.store(near + where, reorder_near(buckets, TILE, BLOCK, True))


@triton.jit(
    do_not_specialize=["window_size", "row", "num_seqs", "num_slots"],
    do_not_specialize_on_alignment=["seq_offsets", "num_targets", "num_context", "k_times", "q_times"],
)
def dense_attention_plan_kernel(
    seq_offsets, num_targets, num_context, q_times, k_times, cells, tiles, row, num_seqs, num_slots, window_size,
    EXTENSION: tl.constexpr, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, BY_QUERY: tl.constexpr, HIDDEN: tl.constexpr, ASM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Fill the `TileMap` `tiles`: a program for each sequence writes the schedule, a program for each slot its entries.

    Without times there are only the programs of the schedule.
    """
    program = tl.program_id(0)
    if program < num_seqs:
        _write_schedule(program, seq_offsets, tiles.schedule, num_seqs, num_slots, TILE, 256)
    elif k_times is not None:
        slot = program - num_seqs
        b, _, _, index = locate(seq_offsets, slot, num_seqs, TILE)
        begin, sequence = find_sequence(b, seq_offsets, num_targets, window_size, num_context)
        if index * TILE < sequence.length:
            tile_times, block_times = (q_times, k_times) if BY_QUERY else (k_times, q_times)
            _map_tile(
                index * TILE, slot.to(tl.int64), begin, sequence, tile_times, block_times, k_times, cells, tiles, row,
                EXTENSION, HAS_TARGETS, HAS_WINDOW, TILE, BLOCK, BY_QUERY, HIDDEN, CHUNK, ASM,
            )  # fmt: skip


class Tiling(NamedTuple):
    """The sizes of a kernel's tiles (of queries if by_query, else of keys) and of the blocks that it iterates over.

    Without a time bias nothing depends on `block_size` and `by_query`.
    """

    tile_size: int
    block_size: int
    by_query: bool


class TileMap(NamedTuple):
    """The plan of one tiling. tiles/rows.py explains slots.

    schedule  [slots, 2] int32: (sequence, tile) in the order in which programs start: the longest sequences first,
              and in a sequence the tile with the most work first. Unused entries follow, (-1, *): their programs return
    entries   [slots * row] int16 for each slot and each block that needs no mask: 8 * lowest bucket + number of bucket
              edges if tile and block are narrow, else -1. Two more -1 follow, since kernels read ahead. Narrow: no key
              is later than a query, the time differences include at most MAX_EDGES edges, and the block spans less
              than 2^24 seconds
    runs      [slots] int32: the first row after the run of narrow blocks; for tiles of keys, the first row of the run
    near      [slots, min(NEAR, row), tile_size * block_size] uint8: buckets of the pairs with the nearest blocks, which
              are not in the run; `masked_bucket` where the query does not see the key

    Without a time bias there is only the schedule.
    """

    schedule: torch.Tensor
    entries: torch.Tensor | None = None
    runs: torch.Tensor | None = None
    near: torch.Tensor | None = None

    @property
    def row(self) -> int:
        """The number of entries of a slot: one for each block of the longest sequence, and two to read ahead."""
        return 0 if self.entries is None else self.entries.shape[0] // self.schedule.shape[0]


class Purpose(NamedTuple):
    """The properties of a call that its plan depends on."""

    total: int
    num_seqs: int
    max_seq_len: int
    window_size: int
    targets: bool
    more: Extension | None
    num_buckets: int | None
    features: Features
    batch: str | None  # `fingerprint` of offsets, candidates, context and times

    @property
    def key(self) -> tuple:
        """The key that distinguishes the plans of one batch."""
        return "attention_plan", *self._replace(total=0, num_seqs=0)

    @property
    def tilings(self) -> tuple[Tiling, Tiling, Tiling]:
        """The tilings of the tile maps of forward, dq and dkv."""
        return _tilings(self.features)


class AttentionPlan(NamedTuple):
    """The result of `attention_plan`: times (None without a time bias) and tile maps (dq and dkv may be None)."""

    purpose: Purpose
    keys: TokenTimes | None
    queries: TokenTimes | None
    forward: TileMap
    dq: TileMap | None
    dkv: TileMap | None

    def flat(self) -> list[torch.Tensor | None]:
        """Return the tensors, for an operator's `Tensor?[]`."""
        return [x for part, kind in zip(self[1:], _PARTS) for x in (part or [None] * len(kind._fields))]

    @classmethod
    def from_flat(cls, purpose: Purpose, tensors: list[torch.Tensor | None]) -> "AttentionPlan":
        """Invert `flat`."""
        x = iter(tensors)
        parts: Any = ([next(x) for _ in kind._fields] for kind in _PARTS)
        bundles: Any = [None if part[0] is None else kind(*part) for kind, part in zip(_PARTS, parts)]
        return cls(purpose, *bundles)


_PARTS: Any = (TokenTimes, TokenTimes, TileMap, TileMap, TileMap)  # the types of a plan's fields after `purpose`


def features(q: torch.Tensor, v: torch.Tensor, position: bool, time: bool, hopper: bool = False) -> Features:
    """Return the features of a call with these tensors, with or without a position bias and a time bias."""
    return _features(q.shape[-1], v.shape[-1], q.dtype, position, time, architecture(q.device), hopper)


@functools.cache
def _features(d: int, v: int, *rest) -> Features:
    return Features(padded_head(d), padded_head(v), *rest)


def purpose_of(
    q, v, seq_offsets, mask: Mask, bias: RelativeBias, max_seq_len: int, hopper: bool | None = None
) -> Purpose:
    """Return the purpose of the plan for a call with these arguments. hopper: see `launch.Arguments`."""
    num_seqs, buckets = seq_offsets.shape[0] - 1, num_time_buckets(bias.time)
    position, time = bias.position is not None, bias.time is not None
    more = Extension.of(mask, mask.extension)
    if hopper is None:
        hopper = more is None and configs.prefers_hopper(q, v, position or time, num_seqs)
    f = features(q, v, position, time, hopper)
    batch = fingerprint(seq_offsets, *mask[:2], *(bias[2:] if f.time else ()))
    targets = mask.num_targets is not None
    return Purpose(q.shape[0], num_seqs, max_seq_len, mask.window_size, targets, more, buckets, f, batch)


def _tilings(f: Features) -> tuple[Tiling, Tiling, Tiling]:
    if f.hopper:
        fwd, dq, dkv = configs.hopper_fwd_config(f), configs.hopper_dq_config(f), configs.hopper_dkv_config(f)
    else:
        fwd, dq, dkv = configs.fwd_config(f), configs.bwd_dq_config(f), configs.bwd_dkv_config(f)
    if not f.time:
        return Tiling(fwd.BLOCK_M, 1, True), Tiling(dq.BLOCK_M, 1, True), Tiling(dkv.BLOCK_N, 1, True)
    return (
        Tiling(fwd.BLOCK_M, fwd.BLOCK_N, True),
        Tiling(dq.BLOCK_M, dq.BLOCK_N, True),
        Tiling(dkv.BLOCK_N, dkv.BLOCK_M, False),
    )


class _MapArguments(NamedTuple):
    """The arguments of the operator that makes a tile map, in the order of its schema."""

    seq_offsets: torch.Tensor
    mask: Mask
    timestamps: torch.Tensor | None
    query_timestamps: torch.Tensor | None
    total: int
    max_seq_len: int
    num_buckets: int
    tile_size: int
    block_size: int
    by_query: bool

    @classmethod
    def of(cls, flat: tuple) -> "_MapArguments":
        size = len(Mask._fields)
        return cls(flat[0], Mask(*flat[1 : 1 + size]), *flat[1 + size :])


def _new_map(a: _MapArguments, least) -> list[torch.Tensor]:
    slots = a.total // a.tile_size + a.seq_offsets.shape[0] - 1
    new = functools.partial(torch.empty, device=a.seq_offsets.device)
    tensors = [new(slots, 2, dtype=torch.int32)]
    if a.timestamps is not None:
        row = cdiv(least(a.max_seq_len, a.total), a.block_size) + 2
        tensors += [new(slots * row, dtype=torch.int16), new(slots, dtype=torch.int32)]
        tensors.append(new(slots, least(NEAR.value, row), a.tile_size * a.block_size, dtype=torch.uint8))
    return tensors


def _fake_map(*arguments) -> list[torch.Tensor]:
    return _new_map(_MapArguments.of(arguments), torch.sym_min)


def _map(*arguments) -> list[torch.Tensor]:
    a = _MapArguments.of(arguments)
    tensors = _new_map(a, min)
    num_seqs, timed = a.seq_offsets.shape[0] - 1, a.timestamps is not None
    if a.total == 0 or num_seqs == 0:
        return tensors
    tiles = TileMap(*tensors)
    slots = tiles.schedule.shape[0]
    constants = dict(
        EXTENSION=Extension.of(a.mask, a.mask.extension), HAS_TARGETS=a.mask.num_targets is not None,
        HAS_WINDOW=a.mask.window_size > 0,
        TILE=a.tile_size, BLOCK=a.block_size,
        BY_QUERY=a.by_query, HIDDEN=masked_bucket(a.num_buckets) if timed else 0, ASM=proven(a.seq_offsets.device),
        CHUNK=16, num_warps=8 if timed else 4,
    )  # fmt: skip
    run(
        dense_attention_plan_kernel, num_seqs + (slots if timed else 0), a.seq_offsets, *a.mask[:2],
        a.query_timestamps, a.timestamps, device_cells(a.num_buckets, a.seq_offsets.device) if timed else None, tiles,
        tiles.row, num_seqs, slots, a.mask.window_size, **constants,
    )  # fmt: skip
    return tensors


_SCHEMA = (
    f"Tensor seq_offsets, {MASK}, Tensor? timestamps, Tensor? query_timestamps, SymInt total, SymInt max_seq_len, "
    "int num_buckets, int tile_size, int block_size, bool by_query"
)
_map_operator = register_preparation("dense_tile_map", _SCHEMA, _map, _fake_map)


def tile_map(purpose: Purpose, tiling: Tiling, seq_offsets, mask: Mask, bias: RelativeBias) -> TileMap:
    """Return the map of one tiling."""
    timed = purpose.num_buckets is not None
    times = context_times(bias, mask.num_context, seq_offsets)[2:] if timed else (None, None)
    buckets = purpose.num_buckets if timed else 0
    return TileMap(
        *_map_operator(seq_offsets, *mask, *times, purpose.total, purpose.max_seq_len, buckets, *tiling),
    )


def with_backward(plan: AttentionPlan, seq_offsets, mask: Mask, bias: RelativeBias) -> AttentionPlan:
    """Return the plan with the tile maps of the backward pass; equal tilings share a map."""
    forward, dq, dkv = plan.purpose.tilings
    tile_maps = {dkv: plan.dkv, dq: plan.dq, forward: plan.forward}
    for tiling in (dq, dkv):
        if tile_maps[tiling] is None:
            tile_maps[tiling] = tile_map(plan.purpose, tiling, seq_offsets, mask, bias)
    return plan._replace(dq=tile_maps[dq], dkv=tile_maps[dkv])


def make_plan(purpose: Purpose, seq_offsets, mask: Mask, bias: RelativeBias, *, backward: bool) -> AttentionPlan:
    """Compute `attention_plan` for checked arguments; without `backward`, only the forward pass's part."""
    keys = queries = None
    if purpose.num_buckets is not None:
        times: Any = context_times(bias, mask.num_context, seq_offsets)[2:]
        keys, queries = split_times(seq_offsets, *times)
    tiling, dq, _ = purpose.tilings
    forward = tile_map(purpose, tiling, seq_offsets, mask, bias)
    plan = AttentionPlan(purpose, keys, queries, forward, forward if dq == tiling else None, None)
    return with_backward(plan, seq_offsets, mask, bias) if backward else plan
