"""Tiles of the attention: the kernel that schedules them, and what the kernels of both passes do with one.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key head size, V value head size. In the
kernels m: query rows of a tile, n: its key rows; t and s: the positions of queries and keys in their sequence.

One program owns one tile of queries (forward, dq) or of keys (dk and dv) of one head, and walks the other side in
blocks. The schedule lists the tiles, the longest sequences first and in a sequence the tile with the most work first,
so that the last tiles to start are short ones; the list is made on the device. Programs past its end stop at once.

SiLU: with h = x/2, x a score with its bias, y = SiLU(x) and u = tanh(h),
    y = h + h u,    2 dy/dx = 1 + u + h (1 - u^2)
take one special-function instruction for both.
"""

import triton
import triton.language as tl

from hstu_sparse._triton import COMPILED, tanh_approx

# Arguments by which Triton would otherwise tell batches apart and compile anew: numbers that differ between batches,
# and the caller's pointers, whose alignment may.
PER_BATCH = ["window_size", "row", "total", "time_shift"]
GIVEN = ["seq_offsets", "num_targets"]


@triton.jit
def _schedule(b, seq_offsets, tiles, num_seqs, num_slots, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Writes the tiles (b, 0), (b, 1), ... of sequence b at its place, longest sequences first."""
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
        slot = tiles + 2 * (before + block)
        tl.store(slot, tl.zeros_like(block) + b, block < count)
        tl.store(slot + 1, block, block < count)
    if b == 0:
        for first in range(total, num_slots, CHUNK):
            slot = first + tl.arange(0, CHUNK)
            tl.store(tiles + 2 * slot, tl.full([CHUNK], -1, tl.int32), slot < num_slots)


@triton.jit(do_not_specialize=["num_seqs", "num_slots"], do_not_specialize_on_alignment=["seq_offsets"])
def dense_attention_schedule_kernel(
    seq_offsets, tiles, num_seqs, num_slots, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """A program for each sequence."""
    _schedule(tl.program_id(0), seq_offsets, tiles, num_seqs, num_slots, BLOCK, CHUNK)


@triton.jit
def _sequence(b, seq_offsets, num_targets, HAS_TARGETS: tl.constexpr):
    """(begin, length, length of the history before all candidates) of sequence b."""
    begin = tl.load(seq_offsets + b).to(tl.int64)
    length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
    history = length
    if HAS_TARGETS:
        history = length - tl.load(num_targets + b).to(tl.int32)
    return begin, length, history


@triton.jit
def _matrix(base, stride, length, SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    """What `_load_rows` reads blocks of BLOCK rows from: `base`, or its tensor descriptor."""
    if TMA:
        return tl.make_tensor_descriptor(base, [length, SIZE], [stride, 1], [BLOCK, WIDTH])
    else:
        return base


@triton.jit
def _load_rows(
    base, start, rows, columns, stride, limit, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr = False,
):  # fmt: skip
    """Rows start + rows of a `_matrix`; zeros past `limit` (only MASKED looks) and past SIZE columns."""
    if TMA:
        return base.load([start, 0])
    else:
        pointers = base + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
        if MASKED:
            inside = (start + rows < limit)[:, None]
            if SIZE != WIDTH:
                inside = inside & (columns < SIZE)[None, :]
            return tl.load(pointers, inside, 0.0)
        elif SIZE != WIDTH:
            return tl.load(pointers, (columns < SIZE)[None, :], 0.0)
        else:
            return tl.load(pointers)


@triton.jit
def _visible(t, s, length, history, window_size, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Mask of the pairs (t, s), two tensors that broadcast against each other."""
    mask = (s <= t) & (t < length)
    if HAS_TARGETS:
        mask = mask & ((s < history) | (s == t))
    if HAS_WINDOW:
        mask = mask & (tl.minimum(t, history) - tl.minimum(s, history) < window_size)
    return mask


@triton.jit
def _key_ranges(
    first_row, length, history, window_size, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Multiples of BLOCK_N (begin, full, diagonal, end): only the keys in full .. diagonal need no mask."""
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
def _query_ranges(
    first_row, length, history, window_size, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(begin, full, free, end): only the queries in full .. free need no mask; multiples of BLOCK_M but `end`."""
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
def _silu(h, FAST: tl.constexpr):
    """SiLU of a tile of scores, given by their halves."""
    if FAST and COMPILED:
        return h * tanh_approx(h) + h
    else:
        return 2.0 * h / (1.0 + tl.exp(-2.0 * h))


@triton.jit
def _silu_and_slope(h, FAST: tl.constexpr):
    """(SiLU, twice its derivative less 1) of a tile of scores, given by their halves."""
    if FAST and COMPILED:
        u = tanh_approx(h)
    else:
        u = 2.0 / (1.0 + tl.exp(-2.0 * h)) - 1.0
    z = h * u
    return h + z, (h - z * u) + u
