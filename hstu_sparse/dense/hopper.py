"""The forward kernel on Hopper without a bias, in Gluon, Triton's language of explicit layouts: `backend="hopper"`.

A program has tiles of 128 queries of one head, 64 for each of two groups of four warps (`attend`). One more warp
(`produce`) copies a tile's queries and, block by block, its keys and values into a ring in shared memory, by tensor
descriptor. Barriers in shared memory say which of the ring's stages are full and which are empty. While one group
computes SiLU the tensor cores multiply for the other, and for itself the weights of the block before with its values.

Blocks are walked from the diagonal back, so that the first one is the one with masks. It may reach past the sequence's
end, and its values there become zeros: a weight of zero times another sequence's infinity is no number.

Letters: T tokens of the batch, H heads, D query/key and value head size. t and s: the positions of queries and keys.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hstu_sparse.dense import ranges

find_sequence = gluon.jit(ranges.find_sequence.fn)
key_ranges = gluon.jit(ranges.key_ranges.fn)
visible = gluon.jit(ranges.visible.fn)

# Queries of a group.
HALF = gl.constexpr(64)
# Tiles and blocks in shared memory.
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# Eight rows of a block, by one warp.
EIGHT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))


class Work(NamedTuple):
    """Which tiles there are: a schedule (see `plan.TileMap`), and what `find_sequence` reads."""

    schedule: gl.tensor
    seq_offsets: gl.tensor
    num_targets: gl.tensor
    window_size: gl.tensor


class Kind(NamedTuple):
    """What the kernel is compiled for."""

    H: gl.constexpr
    HAS_TARGETS: gl.constexpr
    HAS_WINDOW: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    TURNS: gl.constexpr


class Shared(NamedTuple):
    """Shared memory: a tile's queries, blocks of keys and values, STAGES of them, and the barriers of each.

    turns    of the groups, whose turn it is to multiply
    cleared  for the block of values that gets zeros
    """

    query: gl.shared_memory_descriptor
    key: gl.shared_memory_descriptor
    value: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    cleared: gl.shared_memory_descriptor


def descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Return the descriptor of x [T, H, D], with its heads side by side, in blocks of `rows` rows of one head."""
    heads, size = x.shape[1:]
    if x.stride(0) < (heads - 1) * x.stride(1) + size:
        x = x.contiguous()
    return TensorDescriptor(x, [x.shape[0], (heads - 1) * x.stride(1) + size], [x.stride(0), 1], [rows, size], LAYOUT)


@gluon.jit
def tile_number(round):
    """The number of a program's tile. Rounds go to and fro, as a sequence's tiles are sorted by their work."""
    programs = gl.num_programs(0)
    return round * programs + gl.where(round % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))


@gluon.jit
def find_tile(number, tiles, work, kind: gl.constexpr):
    """(head, the sequence's first token, Sequence, first row, bounds of `key_ranges`); no keys if there is no tile."""
    entry = work.schedule + 2 * (gl.minimum(number, tiles - 1) // kind.H)
    b = gl.where(number < tiles, gl.load(entry), -1)
    begin, sequence = find_sequence(gl.maximum(b, 0), work.seq_offsets, work.num_targets, work.window_size)
    block = (sequence.length + kind.BLOCK_M - 1) // kind.BLOCK_M - 1 - gl.load(entry + 1)
    first_row = block * kind.BLOCK_M
    first, full, diagonal, end = key_ranges(
        first_row, sequence, kind.HAS_TARGETS, kind.HAS_WINDOW, kind.BLOCK_M, kind.BLOCK_N
    )
    end = gl.where(b < 0, first, end)
    return number % kind.H, begin, sequence, first_row, first, full, diagonal, end


@gluon.jit
def clear_rows(block, inside, ROWS: gl.constexpr):
    """Zeros to the rows of a block in shared memory from `inside` on, by one warp."""
    row = gl.arange(0, 8, gl.SliceLayout(1, EIGHT))[:, None]
    for part in gl.static_range(ROWS // 8):
        if inside < part * 8 + 8:
            rows = block.slice(part * 8, 8, 0)
            x = rows.load(EIGHT)
            rows.store(gl.where(row < inside - part * 8, x, 0.0))
    fence_async_shared()


@gluon.jit
def produce(sources, work, shared, tiles, kind: gl.constexpr):
    """Copies the queries and, block by block, the keys and values of the program's tiles."""
    q, k, v, q_stride_h, k_stride_h, v_stride_h = sources
    D: gl.constexpr = q.block_shape[1]
    i = 0
    cleared = 0
    done = 0
    for round in range((tiles + gl.num_programs(0) - 1) // gl.num_programs(0)):
        number = tile_number(round)
        head, begin, sequence, first_row, first, _, _, end = find_tile(number, tiles, work, kind)
        if first < end:
            token = begin.to(gl.int32)
            mbarrier.wait(shared.q_empty, done & 1 ^ 1)
            mbarrier.expect(shared.q_full, kind.BLOCK_M * D * 2)
            tma.async_copy_global_to_shared(q, [token + first_row, head * q_stride_h], shared.q_full, shared.query)
            done += 1
            for start in range((end - 1) // kind.BLOCK_N * kind.BLOCK_N, first - 1, -kind.BLOCK_N):
                stage = i % kind.STAGES
                phase = i // kind.STAGES & 1
                place = [token + start, head * k_stride_h]
                mbarrier.wait(shared.k_empty.index(stage), phase ^ 1)
                mbarrier.expect(shared.k_full.index(stage), kind.BLOCK_N * D * 2)
                tma.async_copy_global_to_shared(k, place, shared.k_full.index(stage), shared.key.index(stage))
                place = [token + start, head * v_stride_h]
                mbarrier.wait(shared.v_empty.index(stage), phase ^ 1)
                inside = sequence.length - start
                if inside >= kind.BLOCK_N:
                    mbarrier.expect(shared.v_full.index(stage), kind.BLOCK_N * D * 2)
                    tma.async_copy_global_to_shared(v, place, shared.v_full.index(stage), shared.value.index(stage))
                else:
                    mbarrier.expect(shared.cleared, kind.BLOCK_N * D * 2)
                    tma.async_copy_global_to_shared(v, place, shared.cleared, shared.value.index(stage))
                    mbarrier.wait(shared.cleared, cleared & 1)
                    cleared += 1
                    clear_rows(shared.value.index(stage), inside, kind.BLOCK_N)
                    mbarrier.arrive(shared.v_full.index(stage), count=1)
                i += 1


@gluon.jit
def tanh_approx(x):
    """As `tiles.tanh_approx`."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def rounded_pairs(x, DTYPE: gl.constexpr):
    """fp32 as int32 pairs of 16-bit numbers, which a loop would carry one by one."""
    low, high = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    if DTYPE.is_bf16():
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], gl.int32, True, 1)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], gl.int32, True, 1)


@gluon.jit
def left_operand(pairs, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """`rounded_pairs` as the left operand of a product of this layout; nothing moves between registers."""
    x = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(DTYPE, bitcast=True)
    x = gl.reshape(x, [pairs.shape[0], pairs.shape[1] * 2])
    return gl.convert_layout(x, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)


@gluon.jit
def attend(given, work, shared, tiles, turns, kind: gl.constexpr, WHICH: gl.constexpr):
    """64 queries of each of the program's tiles."""
    out, out_stride_t, out_stride_h, half_scale, inverse_n = given
    D: gl.constexpr = shared.value.shape[2]
    DTYPE: gl.constexpr = shared.key.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kind.BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    none = gl.zeros([HALF, kind.BLOCK_N], gl.float32, SCORES)
    i = 0
    turn = 0
    done = 0
    own = shared.query.slice(WHICH * HALF, HALF, 0)
    for round in range((tiles + gl.num_programs(0) - 1) // gl.num_programs(0)):
        number = tile_number(round)
        head, begin, sequence, first_row, first, full, diagonal, end = find_tile(number, tiles, work, kind)
        if first < end:
            t = first_row + WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
            s = gl.arange(0, kind.BLOCK_N, gl.SliceLayout(0, SCORES))
            last = (end - 1) // kind.BLOCK_N * kind.BLOCK_N
            mbarrier.wait(shared.q_full, done & 1)
            done += 1
            stage = i % kind.STAGES
            mbarrier.wait(shared.k_full.index(stage), i // kind.STAGES & 1)
            key = shared.key.index(stage).permute((1, 0))
            scores = warpgroup_mma(own, key, none, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(shared.k_empty.index(stage), count=1)
            half = scores * half_scale
            weights = half * tanh_approx(half) + half
            seen = visible(t[:, None], (last + s)[None, :], sequence, kind.HAS_TARGETS, kind.HAS_WINDOW)
            pairs = rounded_pairs(gl.where(seen, weights, 0.0), DTYPE)
            sums = gl.zeros([HALF, D], gl.float32, SUMS)
            # The blocks behind the first one in three parts, of which only the second needs no masks.
            for PART in gl.static_range(3):
                if PART == 1 or (PART == 0 and kind.HAS_TARGETS) or (PART == 2 and kind.HAS_WINDOW):
                    if PART == 0:
                        latest = last - kind.BLOCK_N
                        stop = diagonal
                    elif PART == 1:
                        latest = diagonal - kind.BLOCK_N
                        stop = full
                    else:
                        latest = full - kind.BLOCK_N
                        stop = first
                    for start in range(latest, stop - 1, -kind.BLOCK_N):
                        before = i % kind.STAGES
                        phase_before = i // kind.STAGES & 1
                        i += 1
                        stage = i % kind.STAGES
                        mbarrier.wait(shared.k_full.index(stage), i // kind.STAGES & 1)
                        if kind.TURNS:
                            mbarrier.wait(turns.index(WHICH), turn & 1 ^ (1 - WHICH))
                            turn += 1
                        key = shared.key.index(stage).permute((1, 0))
                        scores = warpgroup_mma(own, key, none, use_acc=False, is_async=True)
                        mbarrier.wait(shared.v_full.index(before), phase_before)
                        left = left_operand(pairs, DTYPE, SUMS)
                        sums = warpgroup_mma(left, shared.value.index(before), sums, is_async=True)
                        if kind.TURNS:
                            mbarrier.arrive(turns.index(1 - WHICH), count=1)
                        scores = warpgroup_mma_wait(1, deps=(scores,))
                        half = scores * half_scale
                        weights = half * tanh_approx(half) + half
                        if PART != 1:
                            seen = visible(
                                t[:, None], (start + s)[None, :], sequence, kind.HAS_TARGETS, kind.HAS_WINDOW
                            )
                            weights = gl.where(seen, weights, 0.0)
                        sums, left, weights = warpgroup_mma_wait(0, deps=(sums, left, weights))
                        mbarrier.arrive(shared.k_empty.index(stage), count=1)
                        mbarrier.arrive(shared.v_empty.index(before), count=1)
                        # Behind the wait: rounded sooner, ptxas would wait for the product before.
                        pairs = rounded_pairs(weights, DTYPE)
            stage = i % kind.STAGES
            mbarrier.wait(shared.v_full.index(stage), i // kind.STAGES & 1)
            left = left_operand(pairs, DTYPE, SUMS)
            sums = warpgroup_mma(left, shared.value.index(stage), sums, is_async=True)
            sums, left = warpgroup_mma_wait(0, deps=(sums, left))
            mbarrier.arrive(shared.v_empty.index(stage), count=1)
            i += 1
            # By way of the queries' place, so that a thread stores 16 bytes at a time.
            own.store((sums * inverse_n).to(DTYPE))
            result = own.load(STORE)
            mbarrier.arrive(shared.q_empty, count=1)
            row = first_row + WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, STORE))
            column = gl.arange(0, D, gl.SliceLayout(0, STORE))
            rows = out + head * out_stride_h + (begin + row) * out_stride_t
            gl.store(rows[:, None] + column[None, :], result, (row < sequence.length)[:, None])


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """[COUNT, 1]."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit(do_not_specialize=["window_size", "tiles"], do_not_specialize_on_alignment=["seq_offsets", "num_targets"])
def dense_attention_hopper_fwd_kernel(
    q, k, v, out, q_stride_h, k_stride_h, v_stride_h, out_stride_t, out_stride_h, seq_offsets, num_targets, window_size,
    half_scale, inverse_n, schedule, tiles,
    H: gl.constexpr, HAS_TARGETS: gl.constexpr, HAS_WINDOW: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 queries of one head, one for each program or several. q, k, v: see `descriptor`.

    tiles: the schedule's length times H. TURNS: the groups take turns to multiply.
    """
    kind: gl.constexpr = Kind(H, HAS_TARGETS, HAS_WINDOW, BLOCK_M, BLOCK_N, STAGES, TURNS)
    query = gl.allocate_shared_memory(q.dtype, q.block_shape, q.layout)
    key = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, k.block_shape[1]], k.layout)
    value = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, v.block_shape[1]], v.layout)
    q_full, q_empty, cleared = barriers(1).index(0), barriers(1).index(0), barriers(1).index(0)
    k_full, k_empty, v_full, v_empty = barriers(STAGES), barriers(STAGES), barriers(STAGES), barriers(STAGES)
    turns = barriers(2)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    mbarrier.init(cleared, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    for which in gl.static_range(2):
        mbarrier.init(turns.index(which), count=1)
    shared = Shared(query, key, value, q_full, q_empty, k_full, k_empty, v_full, v_empty, cleared)
    work = Work(schedule, seq_offsets, num_targets, window_size)
    given = out, out_stride_t, out_stride_h, half_scale, inverse_n
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (attend, (given, work, shared, tiles, turns, kind, FIRST)),
            (attend, (given, work, shared, tiles, turns, kind, SECOND)),
            (produce, ((q, k, v, q_stride_h, k_stride_h, v_stride_h), work, shared, tiles, kind)),
        ],
        [4, 1],
        # Registers of a thread; the first group has what these leave of 504, and one warp counts as four.
        [240, 24],
    )
