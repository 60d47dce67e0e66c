"""Compute dq on Hopper, in Gluon: see hopper.py.

Letters: H heads, D query/key head size, V value head size.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from hstu_sparse.dense.hopper.tiles import (
    HALF,
    Batch,
    Kind,
    left_operand,
    loop_bounds,
    make_tiles,
    rounded_pairs,
    specialize,
    store_rows,
    tanh_approx,
    visible,
)


@gluon.jit
def silu_slope(half):
    """Return twice SiLU's derivative minus 1 of a tile of scores, which are passed halved: see ranges.py."""
    u = tanh_approx(half)
    return (half - half * u * u) + u


@gluon.jit
def dq_tile(tile, block, output, rows, slot, ring, stage, phase, turn, kind: gl.constexpr, WHICH: gl.constexpr):
    """Compute dq of 64 queries of a tile: the product of ds and keys overlaps the slopes of the next block."""
    dq, stride_t, stride_h, half_scale, factor = output
    queries, douts = rows[0][2], rows[1][2]
    D: gl.constexpr = ring.a.shape[2]
    DTYPE: gl.constexpr = queries.dtype
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    m, s, zeros = block
    t = tile.first_row + m
    query = queries.index(slot).slice(WHICH * HALF, HALF, 0)
    dout = douts.index(slot).slice(WHICH * HALF, HALF, 0)
    sums = gl.zeros([HALF, D], gl.float32, SUMS)
    mbarrier.wait(ring.a_full.index(stage), phase)
    scores = warpgroup_mma(query, ring.a.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(ring.b_full.index(stage), phase)
    dp = warpgroup_mma(dout, ring.b.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores, dp = warpgroup_mma_wait(0, deps=(scores, dp))
    mbarrier.arrive(ring.b_empty.index(stage), count=1)
    ds = dp * silu_slope(scores * half_scale) + dp
    mask = visible(t, tile.last + s, tile.sequence, kind.HAS_TARGETS, kind.HAS_WINDOW)
    pairs = rounded_pairs(gl.where(mask, ds, 0.0), DTYPE)
    for PART in gl.static_range(3):
        if PART == 1 or (PART == 0 and (kind.HAS_TARGETS or kind.OTHER < kind.OWN)) or (PART == 2 and kind.HAS_WINDOW):
            latest, stop = loop_bounds(tile, PART, kind)
            for start in range(latest, stop - 1, -kind.OTHER):
                before = stage
                stage = (stage + 1) % kind.STAGES
                phase ^= stage == 0
                mbarrier.wait(ring.a_full.index(stage), phase)
                key = ring.a.index(stage).permute((1, 0))
                scores = warpgroup_mma(query, key, zeros, use_acc=False, is_async=True)
                mbarrier.wait(ring.b_full.index(stage), phase)
                value = ring.b.index(stage).permute((1, 0))
                dp = warpgroup_mma(dout, value, zeros, use_acc=False, is_async=True)
                left = left_operand(pairs, DTYPE, SUMS)
                sums = warpgroup_mma(left, ring.a.index(before), sums, is_async=True)
                scores = warpgroup_mma_wait(2, deps=(scores,))
                slope = silu_slope(scores * half_scale)
                dp, slope = warpgroup_mma_wait(1, deps=(dp, slope))
                mbarrier.arrive(ring.b_empty.index(stage), count=1)
                ds = dp * slope + dp
                if PART != 1:
                    seen = visible(t, start + s, tile.sequence, kind.HAS_TARGETS, kind.HAS_WINDOW)
                    ds = gl.where(seen, ds, 0.0)
                sums, left, ds = warpgroup_mma_wait(0, deps=(sums, left, ds))
                mbarrier.arrive(ring.a_empty.index(before), count=1)
                pairs = rounded_pairs(ds, DTYPE)
    left = left_operand(pairs, DTYPE, SUMS)
    sums = warpgroup_mma(left, ring.a.index(stage), sums, is_async=True)
    sums, left = warpgroup_mma_wait(0, deps=(sums, left))
    mbarrier.arrive(ring.a_empty.index(stage), count=1)
    stage = (stage + 1) % kind.STAGES
    phase ^= stage == 0
    store_rows(dq, stride_t, stride_h, tile, tile.first_row + WHICH * HALF, sums * factor, query)
    return stage, phase, turn


@gluon.jit(do_not_specialize=["window_size", "slots"], do_not_specialize_on_alignment=["seq_offsets", "num_targets"])
def dense_attention_bwd_dq_hopper_kernel(
    q, k, v, do, dq, q_stride_h, k_stride_h, v_stride_h, do_stride_h, dq_stride_t, dq_stride_h, seq_offsets,
    num_targets, window_size, half_scale, factor, taken, slots, schedule,
    H: gl.constexpr, HAS_TARGETS: gl.constexpr, HAS_WINDOW: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute dq of a program's tiles of 128 queries. q, k, v, do: tensor descriptors [T, heads side by side]."""
    kind: gl.constexpr = Kind(H, BLOCK_M, BLOCK_N, STAGES, True, HAS_TARGETS, HAS_WINDOW)
    batch = Batch(schedule, slots, taken, seq_offsets, num_targets, window_size)
    output = dq, dq_stride_t, dq_stride_h, half_scale, factor
    rows = (q, q_stride_h, make_tiles(q, 2)), (do, do_stride_h, make_tiles(do, 2))
    specialize(dq_tile, output, rows, (k, k_stride_h), (v, v_stride_h), batch, kind, True, False)
