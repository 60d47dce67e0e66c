"""Write uncompressed keys and values into pages, and timestamps.

Letters: T new tokens, B sequences, P columns of a page table, H heads, D query/key and V value head size, R tokens of
a tile.
"""

import triton
import triton.language as tl

from hstu_sparse.tiles.rows import load_head, locate, store_rows


@triton.jit(do_not_specialize=["B", "P"])
def write_pages_kernel(
    k, v, offsets, lengths, pages, key_pages, value_pages, B, P,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, PAGE: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Write R new tokens of one head; k and v are `Rows`."""
    b, begin, count, tile = locate(offsets, tl.program_id(0), B, R)
    if tile * R >= count:
        return
    head = tl.program_id(1).to(tl.int64)
    index = tile * R + tl.arange(0, R)
    real = index < count
    position = tl.load(lengths + b).to(tl.int32) + index
    page = tl.load(pages + b.to(tl.int64) * P + position // PAGE, real, 0).to(tl.int64)
    real = real & (page >= 0)
    row = (page * H + head) * PAGE + position % PAGE
    x = load_head(k, head, begin + index, real, D, PAD_D)
    store_rows(key_pages, row, D, real, x, D, PAD_D)
    x = load_head(v, head, begin + index, real, V, PAD_V)
    store_rows(value_pages, row, V, real, x, V, PAD_V)


@triton.jit(do_not_specialize=["B", "P"])
def write_timestamps_kernel(
    new_times, offsets, lengths, pages, timestamps, B, P, SINKS: tl.constexpr, PAGE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write the seconds of R new tokens."""
    b, begin, count, tile = locate(offsets, tl.program_id(0), B, R)
    if tile * R >= count:
        return
    index = tile * R + tl.arange(0, R)
    real = index < count
    position = tl.load(lengths + b).to(tl.int32) + index
    page = tl.load(pages + b.to(tl.int64) * P + (1 if SINKS else 0) + position // PAGE, real, 0).to(tl.int64)
    real = real & (page >= 0)
    tl.store(timestamps + page * PAGE + position % PAGE, tl.load(new_times + begin + index, real, 0), real)
