"""The kernel that prepares, once for all heads, what the attention kernels read: the map of the time buckets (bias.py
says what for), the halves of the bias tables, the timestamps, and the schedule.

Letters: T tokens of the batch, N max_seq_len; t and s: the positions of queries and keys in their sequence.
"""

import triton
import triton.language as tl

from hstu_sparse.dense.bias import MOST_EDGES, NEAR, _bucket, _near_order
from hstu_sparse.dense.tiles import _key_ranges, _query_ranges, _schedule, _sequence, _visible

# Half the bias of a pair that is not seen: SiLU and its slope are exactly zero there.
HIDDEN_BIAS = tl.constexpr(-1e30)


@triton.jit
def _halve_tables(
    first, position, time, half_position, half_time, N: tl.constexpr, TIMES: tl.constexpr, MARGIN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Halves of BLOCK entries of the bias tables in fp32, since the attention kernels want half the scores.

    Position [N] gets MARGIN zeros on both sides; time [TIMES] gets MOST_EDGES zeros behind and then HIDDEN_BIAS.
    """
    i = first + tl.arange(0, BLOCK)
    if position is not None:
        value = tl.load(position + i - MARGIN, (i >= MARGIN) & (i < MARGIN + N), 0.0).to(tl.float32)
        tl.store(half_position + i, 0.5 * value, i < N + 2 * MARGIN)
    if time is not None:
        value = 0.5 * tl.load(time + i, i < TIMES, 0.0).to(tl.float32)
        value = tl.where(i == TIMES + MOST_EDGES, HIDDEN_BIAS, value)
        tl.store(half_time + i, value, i <= TIMES + MOST_EDGES)


@triton.jit
def _split_times(times, inside):
    """int64 timestamps as two fp32 tensors, high and low part."""
    value = tl.load(times, inside, 0)
    high = value.to(tl.float32)
    return high, (value - high.to(tl.int64)).to(tl.float32)


@triton.jit
def _store_times(times, origin, split, offset, total, token, inside):
    """Timestamps as `split [2, T]`, fp32, and as `offset [T]`, int32, from the sequence's first, `origin`."""
    high, low = _split_times(times + token, inside)
    tl.store(split + token, high, inside)
    tl.store(split + total + token, low, inside)
    tl.store(offset + token, (tl.load(times + token, inside, 0) - origin).to(tl.int32), inside)


@triton.jit
def _extremes(times, origin, inside, AXIS: tl.constexpr):
    """The least and the greatest offset from `origin` of int64 timestamps, as int64 but in the range of int32.

    One that does not fit counts as the range's both ends, so that no tile with it passes for narrow.
    """
    offset = tl.load(times, inside, 0) - origin
    fits = (offset > -2147483648) & (offset < 2147483647)
    least = tl.where(inside, tl.where(fits, offset, -2147483648), 2147483647).to(tl.int32)
    greatest = tl.where(inside, tl.where(fits, offset, 2147483647), -2147483648).to(tl.int32)
    return tl.min(least, AXIS).to(tl.int64), tl.max(greatest, AXIS).to(tl.int64)


@triton.jit
def _map_tile(
    b, index, slot, seq_offsets, num_targets, window_size, own_times, times, k_times, cells, tile_buckets, runs, near,
    row, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
    OWN_IS_QUERY: tl.constexpr, HIDDEN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What `dense_attention_map_kernel` says of one tile."""
    begin, length, history = _sequence(b, seq_offsets, num_targets, HAS_TARGETS)
    first_row = index * OWN
    if OWN_IS_QUERY:
        _, low, high, end = _key_ranges(first_row, length, history, window_size, HAS_TARGETS, HAS_WINDOW, OWN, OTHER)
    else:
        nearest_row, low, high, end = _query_ranges(
            first_row, length, history, window_size, HAS_TARGETS, HAS_WINDOW, OTHER, OWN
        )
    own_times += begin
    times += begin
    origin = tl.load(k_times + begin)
    own = first_row + tl.arange(0, OWN)
    own_first, own_last = _extremes(own_times + own, origin, own < length, 0)
    low_block, high_block = low // OTHER, high // OTHER
    wide_first, wide_end = high_block, low_block
    for start in range(low_block, high_block + 2, CHUNK):
        block = start + tl.arange(0, CHUNK)
        inside = block < high_block
        token = block[:, None] * OTHER + tl.arange(0, OTHER)[None, :]
        other_first, other_last = _extremes(times + token, origin, inside[:, None] & (token < length), 1)
        if OWN_IS_QUERY:
            nearest_time = own_first - other_last
            farthest_time = own_last - other_first
        else:
            nearest_time = other_first - own_last
            farthest_time = other_last - own_first
        lowest = _bucket(tl.maximum(nearest_time, 0).to(tl.float32), cells)
        highest = _bucket(tl.maximum(farthest_time, 0).to(tl.float32), cells)
        narrow = (nearest_time >= 0) & (highest - lowest <= MOST_EDGES) & (other_last - other_first < 16777216) & inside
        value = tl.where(narrow, 8 * lowest + highest - lowest, -1)
        tl.store(tile_buckets + slot * row + block, value.to(tl.int16), block < high_block + 2)
        wide = inside & (value < 0)
        wide_first = tl.minimum(wide_first, tl.min(tl.where(wide, block, wide_first), 0))
        wide_end = tl.maximum(wide_end, tl.max(tl.where(wide, block + 1, wide_end), 0))
    if OWN_IS_QUERY:
        nearest = (end - 1) // OTHER
        first = tl.maximum(nearest - (NEAR - 1), low_block)
        last = nearest + 1
        run = tl.minimum(wide_first, first) * OTHER
    else:
        nearest = nearest_row // OTHER
        first = nearest
        run = tl.maximum(wide_end, tl.minimum(nearest + NEAR, high_block)) * OTHER
        last = tl.minimum((tl.minimum(run, end) + OTHER - 1) // OTHER, nearest + NEAR)
    tl.store(runs + slot, run)

    near += slot * (tl.minimum(row, NEAR) * OWN * OTHER)
    own = own[:, None]
    own_high, own_low = _split_times(own_times + own, own < length)
    for block in range(first, last):
        other = (block * OTHER + tl.arange(0, OTHER))[None, :]
        other_high, other_low = _split_times(times + other, other < length)
        bucket = _bucket(tl.abs((own_high - other_high) + (own_low - other_low)), cells)
        t, s = (own, other) if OWN_IS_QUERY else (other, own)
        seen = _visible(t, s, length, history, window_size, HAS_TARGETS, HAS_WINDOW)
        bucket = tl.where(seen, bucket, HIDDEN).to(tl.uint8)
        place = nearest - block if OWN_IS_QUERY else block - nearest
        where = place * (OWN * OTHER) + tl.arange(0, OWN * OTHER)
        tl.store(near + where, _near_order(bucket, OWN, OTHER, True))


@triton.jit(
    do_not_specialize=["window_size", "row", "total", "num_seqs", "num_slots", "table_programs"],
    do_not_specialize_on_alignment=[
        "seq_offsets", "num_targets", "k_times", "q_times", "position", "time", "k_split", "k_offset", "q_split",
        "q_offset",
    ],
)  # fmt: skip
def dense_attention_map_kernel(
    seq_offsets, num_seqs, num_slots, num_targets, window_size, k_times, q_times, cells, tile_buckets, runs, near, row,
    tiles, position, time, half_position, half_time, table_programs, k_split, k_offset, q_split, q_offset, total,
    HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
    OWN_IS_QUERY: tl.constexpr, HIDDEN: tl.constexpr, N: tl.constexpr, TIMES: tl.constexpr, MARGIN: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """What is computed once for all heads, a program for each tile. Of an own tile's pairs with the other side's blocks
    (with a time bias):

    tile_buckets[tile, block] int16, for blocks without a mask: of a narrow pair of tiles 8 times its lowest bucket plus
    the number of bucket edges in it, else -1, as for two more behind, since the attention kernels read ahead. Narrow:
    no key is younger than a query, the differences reach over MOST_EDGES edges at most, and the block of the other side
    is less than 2^24 seconds long.
    runs[tile] int32: where the run of narrow blocks ends (queries own: the first row after it), or begins.
    near[tile, min(row, NEAR), OWN * OTHER] uint8: the buckets of the pairs with the nearest blocks, which are not in
    the run; HIDDEN where the query does not see the key.

    Given `tiles`, more programs, in front, write the schedule (one for each sequence) and the halves of the bias tables
    (table_programs), and each tile's program its timestamps as the attention kernels read them: those of keys and, if
    they are others (`q_split`), of queries.

    Tile `index` of sequence b has slot seq_offsets[b] // OWN + b + index: room for every tile without a prefix sum.
    """
    slot = tl.program_id(0)
    if tiles is not None:
        if slot < num_seqs:
            _schedule(slot, seq_offsets, tiles, num_seqs, num_slots, OWN, 256)
        elif slot < num_seqs + table_programs:
            entry = (slot - num_seqs) * 1024
            _halve_tables(entry, position, time, half_position, half_time, N, TIMES, MARGIN, 1024)
        slot -= num_seqs + table_programs
    if k_times is not None and slot >= 0:
        b, beyond = 0, num_seqs
        while beyond - b > 1:
            middle = (b + beyond) // 2
            if tl.load(seq_offsets + middle) // OWN + middle <= slot:
                b = middle
            else:
                beyond = middle
        begin = tl.load(seq_offsets + b).to(tl.int64)
        length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
        index = slot - (begin // OWN).to(tl.int32) - b
        if index * OWN < length:
            own_times, times = (q_times, k_times) if OWN_IS_QUERY else (k_times, q_times)
            _map_tile(
                b, index, slot.to(tl.int64), seq_offsets, num_targets, window_size, own_times, times, k_times,
                cells, tile_buckets, runs, near, row, HAS_TARGETS, HAS_WINDOW, OWN, OTHER, OWN_IS_QUERY, HIDDEN,
                CHUNK,
            )  # fmt: skip
            if tiles is not None:
                token = index * OWN + tl.arange(0, OWN)
                origin = tl.load(k_times + begin)
                _store_times(k_times, origin, k_split, k_offset, total, begin + token, token < length)
                if q_split is not None:
                    _store_times(q_times, origin, q_split, q_offset, total, begin + token, token < length)
