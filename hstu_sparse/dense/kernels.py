"""Define the dense kernels: output, dq and table gradients by tiles of queries, dk and dv by tiles of keys.

Letters: T tokens of the batch, B sequences, H heads, D query/key head size, V value head size, N max_seq_len. m: query
rows of a tile, n: its key rows; t and s: their indices in the sequence.

A program has one tile of queries (or keys) of one head and iterates over blocks of keys (or queries). SiLU needs no
normaliser, so there is no running maximum and no rescaling of accumulators. The backward pass recomputes the scores
from the inputs. Constant factors (1/N, the scale, and the 2 in SiLU's slope) are applied once, to the accumulators.

SiLU: with h = x/2, x a score with its bias, y = SiLU(x) and u = tanh(h),
    y = h + h u,    2 dy/dx = 1 + u + h (1 - u^2)
need only one special-function instruction.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.bias.gradients import Gradients, add_position, add_time, exact_scale
from hstu_sparse.bias.scores import NEAR, TileBias, bias_position, half_bias, prefetch_entry, resident_bias
from hstu_sparse.bias.sums import RING, histogram_close, histogram_lane, histogram_open, ring_flush, ring_open
from hstu_sparse.tiles.ranges import (
    Extension,
    context_rows,
    find_sequence,
    key_ranges,
    prefix_tokens,
    query_ranges,
    visible,
)
from hstu_sparse.tiles.rows import (
    COMPILED,
    block_source,
    in_registers,
    load_block,
    row_pointer,
    silu_of_half,
    store_block,
    tanh_approx,
)

# Triton must not specialise on these arguments, or it would recompile kernels for other batches: numbers that differ
# between batches, and the caller's pointers, whose alignment may differ.
PER_BATCH = ["window_size", "row", "time_shift"]
CALLER_POINTERS = ["seq_offsets", "num_targets", "num_context"]
# A bit mask, greater than the number of tiles of any sequence.
MAX_TILES = tl.constexpr(2**24 - 1)


class Kind(NamedTuple):
    """The constants that a kernel is compiled for, besides the sizes of its tiles, as one constexpr.

    D_OUT and V_OUT: the sizes of heads in the results; D and V: in the inputs, which `as_rows` may have padded; PAD_D
    and PAD_V: in tiles. EXTENSION: further options of the mask, or None, from which the fields after it are computed:
    triton 3.8 passes the fields of a named tuple to functions, without its properties. HAS_PREFIX: whether keys before
    the window may be visible.
    """

    H: int
    D: int
    V: int
    D_OUT: int
    V_OUT: int
    PAD_D: int
    PAD_V: int
    HAS_TARGETS: bool
    HAS_WINDOW: bool
    HAS_POSITION: bool
    HAS_TIME: bool
    FAST: bool
    PRECISION: str
    ASM: bool
    EXTENSION: Extension | None
    HAS_CONTEXT: bool
    SEES_ALL: bool
    HAS_PREFIX: bool
    GROUP: int


@triton.jit
def scheduled_tile(schedule, H: tl.constexpr):
    """Return (the program's head, its sequence or -1 if there is none, the address of its entry in the schedule)."""
    entry = schedule + 2 * (tl.program_id(0) // H)
    return tl.program_id(0) % H, tl.load(entry), entry


@triton.jit
def find_query_tile(b, entry, seq_offsets, num_targets, num_context, window_size, BLOCK_M: tl.constexpr):
    """Return (first token, `Sequence`, the tile's index, its queries' indices) for an entry of a schedule.

    The schedule counts tiles of queries from the sequence's end, where queries see the most keys.
    """
    begin, sequence = find_sequence(b, seq_offsets, num_targets, window_size, num_context)
    block = (sequence.length + BLOCK_M - 1) // BLOCK_M - 1 - tl.load(entry + 1)
    return begin, sequence, block, block * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def silu_and_slope(h, FAST: tl.constexpr):
    """Return (SiLU, twice its derivative minus 1) of a tile of scores, which are passed halved."""
    if FAST and COMPILED:
        u = tanh_approx(h)
    else:
        u = 2.0 / (1.0 + tl.exp(-2.0 * h)) - 1.0
    return h * u + h, h * (1.0 - u * u) + u


@triton.jit
def query_tile_bias(
    b, begin, block, t, sequence, bias, tiles, row, kind: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return (bounds of the loops over keys, `TileBias`) for a tile of queries.

    Loop i covers the keys bounds[i] .. bounds[i + 1]: 0 the prefix, 1 invisible keys, 2 the window's begin and context,
    3 keys that need no mask, 4 blocks that are not narrow, 5 the last blocks. With a time bias loop 3 has narrow blocks
    and loop 5 the near ones (see `TileMap`); without a time bias, loop 4 is empty.
    """
    EXTENSION: tl.constexpr = kind.EXTENSION
    first, full, diagonal, end = key_ranges(
        block * BLOCK_M, sequence, kind.HAS_TARGETS, kind.HAS_WINDOW, BLOCK_M, BLOCK_N, EXTENSION
    )
    prefix = 0
    if kind.HAS_PREFIX:
        prefix = tl.minimum((prefix_tokens(sequence, EXTENSION) + BLOCK_N - 1) // BLOCK_N * BLOCK_N, first)
    if kind.HAS_TIME:
        slot = begin // BLOCK_M + b + block
        near = tiles.near + slot * (tl.minimum(row, NEAR) * BLOCK_M * BLOCK_N)
        nearest = (end - 1) // BLOCK_N
        diagonal = tl.load(tiles.runs + slot)
        near_start = tl.maximum(diagonal, (nearest - (NEAR - 1)) * BLOCK_N)
        tile = resident_bias(
            bias, bias.query_times, bias.key_times, begin, t, t < sequence.length, tiles.entries + slot * row, near,
            nearest,
        )  # fmt: skip
        return (0, prefix, first, full, diagonal, near_start, end), tile
    else:
        return (0, prefix, first, full, diagonal, diagonal, end), TileBias(0.0, 0.0, 0, 0, 0, 0, 0, 0)


@triton.constexpr_function
def has_loop(part, kind):
    """Return whether a kernel needs the loop `part` of `query_tile_bias`."""
    if part < 2:
        return part == 0 and kind.HAS_PREFIX
    return (part > 2 or kind.HAS_WINDOW or kind.HAS_CONTEXT) and (part != 4 or kind.HAS_TIME)


@triton.jit
def _attend(
    acc, q, first, last, t, first_row, sequence, k, v, k_stride, v_stride, half_scale, bias, tile, kind: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, IS_NEAR: tl.constexpr,
):  # fmt: skip
    """Add the keys first .. last to acc [BLOCK_M, V]; first is a multiple of BLOCK_N, last too unless MASKED."""
    n = tl.arange(0, BLOCK_N)
    EXTENSION: tl.constexpr = kind.EXTENSION
    place = bias_position(t, sequence, kind)[:, None]
    ahead = (0, 0.0, 0)
    if kind.HAS_TIME and not MASKED:
        ahead = prefetch_entry(first, last, bias, tile, BLOCK_N, kind.ASM)
    for start in range(first, last, BLOCK_N):
        key = load_block(k, start, n, k_stride, sequence.length, kind.D, kind.PAD_D, MASKED)
        scores = tl.dot(q, tl.trans(key), input_precision=kind.PRECISION)
        biases, _, ahead = half_bias(
            start, first_row, place, sequence, ahead, bias, tile, kind, MASKED, IS_NEAR, True, BLOCK_M, BLOCK_N
        )
        half = scores * half_scale
        if kind.HAS_POSITION or kind.HAS_TIME:
            half += biases
        weights = silu_of_half(half, kind.FAST)
        if MASKED and not (IS_NEAR and kind.HAS_TIME):
            mask = visible(t[:, None], (start + n)[None, :], sequence, kind.HAS_TARGETS, kind.HAS_WINDOW, EXTENSION)
            weights = tl.where(mask, weights, 0.0)
        value = load_block(v, start, n, v_stride, sequence.length, kind.V, kind.PAD_V, MASKED)
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=kind.PRECISION)
    return acc


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=CALLER_POINTERS)
def dense_attention_fwd_kernel(
    q, k, v, out, seq_offsets, num_targets, num_context, window_size, half_scale, inverse_n, tiles, row, bias,
    kind: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of BLOCK_M queries of one head in each program.

    q, k, v, out: `Rows`. tiles: `TileMap`, row: its `row`. bias: `KernelBias`.
    """
    head, b, entry = scheduled_tile(tiles.schedule, kind.H)
    if b < 0:
        return
    PAD_V: tl.constexpr = kind.PAD_V
    begin, sequence, block, t = find_query_tile(b, entry, seq_offsets, num_targets, num_context, window_size, BLOCK_M)
    first_row = block * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    query = load_block(row_pointer(q, begin, head), first_row, m, q.stride_t, sequence.length, kind.D, kind.PAD_D, True)
    bounds, tile = query_tile_bias(b, begin, block, t, sequence, bias, tiles, row, kind, BLOCK_M, BLOCK_N)
    keys, values = row_pointer(k, begin, head), row_pointer(v, begin, head)
    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)
    for part in tl.static_range(6):
        if has_loop(part, kind):  # noqa: SIM102  known to the compiler
            if bounds[part] < bounds[part + 1]:
                acc = _attend(
                    acc, query, bounds[part], bounds[part + 1], t, first_row, sequence, keys, values, k.stride_t,
                    v.stride_t, half_scale, bias, tile, kind, BLOCK_M, BLOCK_N, part != 3, part == 5,
                )  # fmt: skip
    target = row_pointer(out, begin + first_row, head)
    store_block(target, m, out.stride_t, t < sequence.length, acc * inverse_n, kind.V_OUT, kind.PAD_V)


@triton.jit
def _attend_dq(
    acc, ring_low, q, do, first, last, t, first_row, sequence, k, v, k_stride, v_stride, half_scale, bias, tile,
    gradients, kind: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    IS_NEAR: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add the keys first .. last to dq [BLOCK_M, D] and to the tables' gradients.

    Returns dq and the least distance in the ring (bias/sums.py).
    """
    n = tl.arange(0, BLOCK_N)
    EXTENSION: tl.constexpr = kind.EXTENSION
    place = bias_position(t, sequence, kind)[:, None]
    ahead = (0, 0.0, 0)
    if kind.HAS_TIME and not MASKED:
        ahead = prefetch_entry(first, last, bias, tile, BLOCK_N, kind.ASM)
    for start in range(first, last, BLOCK_N):
        key = load_block(k, start, n, k_stride, sequence.length, kind.D, kind.PAD_D, MASKED)
        value = load_block(v, start, n, v_stride, sequence.length, kind.V, kind.PAD_V, MASKED)
        scores = tl.dot(q, tl.trans(key), input_precision=kind.PRECISION)
        entry = ahead[0]
        biases, buckets, ahead = half_bias(
            start, first_row, place, sequence, ahead, bias, tile, kind, MASKED, IS_NEAR, True, BLOCK_M, BLOCK_N
        )
        # After the bias's branches, so that this product overlaps tanh.
        dp = tl.dot(do, tl.trans(value), input_precision=kind.PRECISION)
        half = scores * half_scale
        if kind.HAS_POSITION or kind.HAS_TIME:
            half += biases
        _, slope = silu_and_slope(half, kind.FAST)
        ds = dp * slope + dp
        if MASKED and not (IS_NEAR and kind.HAS_TIME):
            mask = visible(t[:, None], (start + n)[None, :], sequence, kind.HAS_TARGETS, kind.HAS_WINDOW, EXTENSION)
            ds = tl.where(mask, ds, 0.0)
        acc = tl.dot(ds.to(key.dtype), key, acc, input_precision=kind.PRECISION)
        if kind.HAS_POSITION:
            ring_low = add_position(gradients, ring_low, ds, t, first_row, start, sequence, kind, EXACT)
        if kind.HAS_TIME:
            add_time(gradients, ds, buckets, entry, start, bias, tile, MASKED, kind.ASM, EXACT)
    return acc, ring_low


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=CALLER_POINTERS)
def dense_attention_bwd_dq_kernel(
    q, k, v, do, dq, tables, time_shift, seq_offsets, num_targets, num_context, window_size, half_scale, half_inverse_n,
    scale, tiles, row, bias,
    kind: tl.constexpr, TABLE: tl.constexpr, COPIES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HOLD: tl.constexpr,
):  # fmt: skip
    """Compute dq of BLOCK_M queries of one head in each program, and add to the bias tables' gradients.

    tables: `TableGradients`, with norms if the sums are integers. HOLD: keep q and do in registers.
    """
    EXACT: tl.constexpr = tables.norms is not None
    head, b, entry = scheduled_tile(tiles.schedule, kind.H)
    if b < 0:
        return
    PAD_D: tl.constexpr = kind.PAD_D
    begin, sequence, block, t = find_query_tile(b, entry, seq_offsets, num_targets, num_context, window_size, BLOCK_M)
    first_row = block * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    query = load_block(row_pointer(q, begin, head), first_row, m, q.stride_t, sequence.length, kind.D, kind.PAD_D, True)
    dout = load_block(
        row_pointer(do, begin, head), first_row, m, do.stride_t, sequence.length, kind.V, kind.PAD_V, True
    )
    query, dout = in_registers(query, HOLD), in_registers(dout, HOLD)
    bounds, tile = query_tile_bias(b, begin, block, t, sequence, bias, tiles, row, kind, BLOCK_M, BLOCK_N)
    time_grad = tables.time
    ring, histogram, lane = 0, 0, 0
    sum_scale, time_scale = half_inverse_n, 1.0
    if EXACT:
        sum_scale = exact_scale(tables.norms)
        time_scale = sum_scale / (1 << time_shift).to(tl.float32)
    if kind.HAS_POSITION and EXACT and kind.ASM:
        ring = ring_open(sequence.length)
    if kind.HAS_TIME:
        # The small table has several copies, so that programs do not contend for one address.
        time_grad += (tl.program_id(0) % COPIES) * TABLE
        if kind.ASM:
            histogram = histogram_open(sequence.length)
            lane = histogram_lane(histogram)
    if ((kind.HAS_POSITION and EXACT) or kind.HAS_TIME) and kind.ASM:
        tl.debug_barrier()
    gradients = Gradients(tables.position, time_grad, ring, lane, sum_scale, time_scale)
    keys, values = row_pointer(k, begin, head), row_pointer(v, begin, head)
    acc = tl.zeros([BLOCK_M, PAD_D], tl.float32)
    ring_low = 1 << 30
    for part in tl.static_range(6):
        if has_loop(part, kind):  # noqa: SIM102  known to the compiler
            if bounds[part] < bounds[part + 1]:
                acc, ring_low = _attend_dq(
                    acc, ring_low, query, dout, bounds[part], bounds[part + 1], t, first_row, sequence,
                    keys, values, k.stride_t, v.stride_t, half_scale, bias, tile, gradients, kind, BLOCK_M, BLOCK_N,
                    part != 3, part == 5, EXACT,
                )  # fmt: skip
    if kind.HAS_POSITION and EXACT and kind.ASM:
        tl.debug_barrier()
        end = bounds[6]
        nearest = first_row - (end - 1) // BLOCK_N * BLOCK_N - (BLOCK_N - 1)
        farthest = tl.minimum(first_row - bounds[0 if kind.HAS_PREFIX else 2] + BLOCK_M, ring_low + RING)
        ring_flush(ring, tables.position, ring_low, tl.maximum(nearest, ring_low), farthest, sequence.length)
    if kind.HAS_TIME and kind.ASM:
        histogram_close(histogram, time_grad, half_inverse_n, time_shift, TABLE, EXACT)
    target = row_pointer(dq, begin + first_row, head)
    store_block(target, m, dq.stride_t, t < sequence.length, acc * (scale * half_inverse_n), kind.D_OUT, kind.PAD_D)


@triton.jit
def _attend_dkv(
    dk, dv, k, v, first, last, s, first_row, sequence, q, do, q_stride, do_stride, half_scale, bias, tile,
    kind: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, IS_NEAR: tl.constexpr,
    TMA: tl.constexpr, WITH_K: tl.constexpr, WITH_V: tl.constexpr,
):  # fmt: skip
    """Add the queries first .. last to dk [BLOCK_N, D] if WITH_K, and to dv [BLOCK_N, V] if WITH_V.

    Tiles are transposed: keys x queries.
    """
    m = tl.arange(0, BLOCK_M)
    EXTENSION: tl.constexpr = kind.EXTENSION
    place = bias_position(s, sequence, kind)[:, None]
    ahead = (0, 0.0, 0)
    if kind.HAS_TIME and not MASKED:
        ahead = prefetch_entry(first, last, bias, tile, BLOCK_M, kind.ASM)
    for start in range(first, last, BLOCK_M):
        query = load_block(q, start, m, q_stride, sequence.length, kind.D, kind.PAD_D, MASKED, TMA)
        dout = load_block(do, start, m, do_stride, sequence.length, kind.V, kind.PAD_V, MASKED, TMA)
        scores = tl.dot(k, tl.trans(query), input_precision=kind.PRECISION)
        biases, _, ahead = half_bias(
            start, first_row, place, sequence, ahead, bias, tile, kind, MASKED, IS_NEAR, False, BLOCK_N, BLOCK_M
        )
        half = scores * half_scale
        if kind.HAS_POSITION or kind.HAS_TIME:
            half += biases
        dp = tl.dot(v, tl.trans(dout), input_precision=kind.PRECISION)
        weights, slope = silu_and_slope(half, kind.FAST)
        if MASKED and not (IS_NEAR and kind.HAS_TIME):
            mask = visible((start + m)[None, :], s[:, None], sequence, kind.HAS_TARGETS, kind.HAS_WINDOW, EXTENSION)
            weights = tl.where(mask, weights, 0.0)
            slope = tl.where(mask, slope, -1.0)
        if WITH_V:
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=kind.PRECISION)
        if WITH_K:
            dk = tl.dot((dp * slope + dp).to(query.dtype), query, dk, input_precision=kind.PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=CALLER_POINTERS)
def dense_attention_bwd_dkv_kernel(
    q, k, v, do, dk, dv, seq_offsets, num_targets, num_context, window_size, half_scale, half_inverse_n, scale, tiles,
    row, bias,
    kind: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv, unless they are None, of BLOCK_N keys of one head in each program.

    TMA: load queries by tensor descriptor.
    """
    head, b, entry = scheduled_tile(tiles.schedule, kind.H)
    if b < 0:
        return
    PAD_D: tl.constexpr = kind.PAD_D
    PAD_V: tl.constexpr = kind.PAD_V
    begin, sequence = find_sequence(b, seq_offsets, num_targets, window_size, num_context)
    length = sequence.length
    # The bit mask tells the compiler that the index is not negative: divisions become shifts, with fewer registers.
    first_row = (tl.load(entry + 1) & MAX_TILES) * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    s = first_row + n
    key = load_block(row_pointer(k, begin, head), first_row, n, k.stride_t, length, kind.D, kind.PAD_D, True)
    value = load_block(row_pointer(v, begin, head), first_row, n, v.stride_t, length, kind.V, kind.PAD_V, True)
    EXTENSION: tl.constexpr = kind.EXTENSION
    begin_row, full, free, end = query_ranges(
        first_row, sequence, kind.HAS_TARGETS, kind.HAS_WINDOW, BLOCK_M, BLOCK_N, EXTENSION
    )
    tile = TileBias(0.0, 0.0, 0, 0, 0, 0, 0, 0)
    if kind.HAS_TIME:
        slot = begin // BLOCK_N + b + first_row // BLOCK_N
        near = tiles.near + slot * (tl.minimum(row, NEAR) * BLOCK_M * BLOCK_N)
        tile = resident_bias(
            bias, bias.key_times, bias.query_times, begin, s, s < length, tiles.entries + slot * row, near,
            begin_row // BLOCK_M,
        )  # fmt: skip
        full = tl.load(tiles.runs + slot)
    # Loops: 0 near blocks (without times all blocks before `full`), 1 (with times) further blocks up to the last that
    # needs a mask or is not narrow, 2 blocks that need no mask (with times narrow ones), 3 the sequence's end,
    # 4 context queries that see everything.
    wide = tl.minimum(full, end)
    near_end = tl.minimum(wide, begin_row + NEAR * BLOCK_M) if kind.HAS_TIME else wide
    front = 0
    if kind.SEES_ALL:
        front = context_rows(first_row, sequence, BLOCK_M, EXTENSION)
    ranges = ((begin_row, near_end), (near_end, wide), (full, free), (free, end), (0, tl.minimum(front, begin_row)))

    queries = block_source(row_pointer(q, begin, head), q.stride_t, length, kind.D, BLOCK_M, kind.PAD_D, TMA)
    douts = block_source(row_pointer(do, begin, head), do.stride_t, length, kind.V, BLOCK_M, kind.PAD_V, TMA)
    acc_k = tl.zeros([BLOCK_N, PAD_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, PAD_V], tl.float32)
    for part in tl.static_range(5):
        if (part != 1 or kind.HAS_TIME) and (part != 4 or kind.SEES_ALL):  # noqa: SIM102  known to the compiler
            # The condition saves registers with TMA and costs some without.
            if not TMA or ranges[part][0] < ranges[part][1]:
                acc_k, acc_v = _attend_dkv(
                    acc_k, acc_v, key, value, *ranges[part], s, first_row, sequence, queries, douts, q.stride_t,
                    do.stride_t, half_scale, bias, tile, kind, BLOCK_M, BLOCK_N, part != 2, part == 0, TMA,
                    dk is not None, dv is not None,
                )  # fmt: skip
    if dk is not None:
        target = row_pointer(dk, begin + first_row, head)
        store_block(target, n, dk.stride_t, s < length, acc_k * (scale * half_inverse_n), kind.D_OUT, kind.PAD_D)
    if dv is not None:
        target = row_pointer(dv, begin + first_row, head)
        store_block(target, n, dv.stride_t, s < length, acc_v * (2.0 * half_inverse_n), kind.V_OUT, kind.PAD_V)
