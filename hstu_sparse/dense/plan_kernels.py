"""Compute a plan: the schedule of tiles, and the part of their time buckets that all heads and layers share.

Letters: T tokens of the batch, B sequences; t and s: the positions of queries and keys in their sequence.
"""

import triton
import triton.language as tl

from hstu_sparse.bias.buckets import (
    EXACT_SECONDS,
    bucket_of,
    extremes,
    load_split_times,
    near_order,
    tile_entry,
)
from hstu_sparse.bias.scores import NEAR
from hstu_sparse.dense.ranges import find_sequence, key_ranges, query_ranges, visible
from hstu_sparse.tiles.rows import locate


@triton.jit
def _write_schedule(b, seq_offsets, schedule, num_seqs, num_slots, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Write the tiles (b, 0), (b, 1), ... of sequence b to their place in the schedule, longest sequences first."""
    begin = tl.load(seq_offsets + b)
    count = (tl.load(seq_offsets + b + 1) - begin + BLOCK - 1).to(tl.int32) // BLOCK
    before = 0
    total = 0
    for first in range(0, num_seqs, CHUNK):
        other = first + tl.arange(0, CHUNK)
        inside = other < num_seqs
        length = tl.load(seq_offsets + other + 1, inside, 0) - tl.load(seq_offsets + other, inside, 0)
        blocks = (length + BLOCK - 1).to(tl.int32) // BLOCK
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
    first_row, slot, begin, sequence, own_times, times, k_times, cells, tiles, row,
    HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
    BY_QUERY: tl.constexpr, HIDDEN: tl.constexpr, CHUNK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write the entries of a `TileMap` for the tile from `first_row` on."""
    length = sequence.length
    if BY_QUERY:
        _, low, high, end = key_ranges(first_row, sequence, HAS_TARGETS, HAS_WINDOW, OWN, OTHER)
    else:
        nearest_row, low, high, end = query_ranges(first_row, sequence, HAS_TARGETS, HAS_WINDOW, OTHER, OWN)
    own_times += begin
    times += begin
    origin = tl.load(k_times + begin)
    owned = first_row + tl.arange(0, OWN)
    own_first, own_last = extremes(own_times + owned, origin, owned < length, 0)
    low_block, high_block = low // OTHER, high // OTHER
    wide_first, wide_end = high_block, low_block
    for start in range(low_block, high_block + 2, CHUNK):
        block = start + tl.arange(0, CHUNK)
        inside = block < high_block
        token = block[:, None] * OTHER + tl.arange(0, OTHER)[None, :]
        other_first, other_last = extremes(times + token, origin, inside[:, None] & (token < length), 1)
        if BY_QUERY:
            value = tile_entry(own_first, own_last, other_first, other_last, cells, ASM)
        else:
            value = tile_entry(other_first, other_last, own_first, own_last, cells, ASM)
        value = tl.where((other_last - other_first < EXACT_SECONDS) & inside, value, -1)
        tl.store(tiles.entries + slot * row + block, value.to(tl.int16), block < high_block + 2)
        wide = inside & (value < 0)
        wide_first = tl.minimum(wide_first, tl.min(tl.where(wide, block, wide_first), 0))
        wide_end = tl.maximum(wide_end, tl.max(tl.where(wide, block + 1, wide_end), 0))
    if BY_QUERY:
        nearest = (end - 1) // OTHER
        first = tl.maximum(nearest - (NEAR - 1), low_block)
        last = nearest + 1
        run = tl.minimum(wide_first, first) * OTHER
    else:
        nearest = nearest_row // OTHER
        first = nearest
        run = tl.maximum(wide_end, tl.minimum(nearest + NEAR, high_block)) * OTHER
        last = tl.minimum((tl.minimum(run, end) + OTHER - 1) // OTHER, nearest + NEAR)
    tl.store(tiles.runs + slot, run)

    near = tiles.near + slot * (tl.minimum(row, NEAR) * OWN * OTHER)
    owned = owned[:, None]
    own_high, own_low = load_split_times(own_times + owned, owned < length)
    for block in range(first, last):
        other = (block * OTHER + tl.arange(0, OTHER))[None, :]
        other_high, other_low = load_split_times(times + other, other < length)
        buckets = bucket_of(tl.abs((own_high - other_high) + (own_low - other_low)), cells, ASM)
        t, s = (owned, other) if BY_QUERY else (other, owned)
        seen = visible(t, s, sequence, HAS_TARGETS, HAS_WINDOW)
        buckets = tl.where(seen, buckets, HIDDEN).to(tl.uint8)
        place = nearest - block if BY_QUERY else block - nearest
        where = place * (OWN * OTHER) + tl.arange(0, OWN * OTHER)
        tl.store(near + where, near_order(buckets, OWN, OTHER, True))


@triton.jit(
    do_not_specialize=["window_size", "row", "num_seqs", "num_slots"],
    do_not_specialize_on_alignment=["seq_offsets", "num_targets", "k_times", "q_times"],
)
def dense_attention_plan_kernel(
    seq_offsets, num_targets, q_times, k_times, cells, tiles, row, num_seqs, num_slots, window_size,
    HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
    BY_QUERY: tl.constexpr, HIDDEN: tl.constexpr, ASM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Fill the `TileMap` `tiles`: one program for each sequence writes the schedule.

    With times, one more program for each slot writes its tile.
    """
    program = tl.program_id(0)
    if program < num_seqs:
        _write_schedule(program, seq_offsets, tiles.schedule, num_seqs, num_slots, OWN, 256)
    elif k_times is not None:
        slot = program - num_seqs
        b, _, _, index = locate(seq_offsets, slot, num_seqs, OWN)
        begin, sequence = find_sequence(b, seq_offsets, num_targets, window_size)
        if index * OWN < sequence.length:
            own_times, times = (q_times, k_times) if BY_QUERY else (k_times, q_times)
            _map_tile(
                index * OWN, slot.to(tl.int64), begin, sequence, own_times, times, k_times, cells, tiles, row,
                HAS_TARGETS, HAS_WINDOW, OWN, OTHER, BY_QUERY, HIDDEN, CHUNK, ASM,
            )  # fmt: skip
