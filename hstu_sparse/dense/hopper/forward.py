"""Compute the output on Hopper, in Gluon: see hopper.py.

Letters: H heads, D query/key head size, V value head size, N max_seq_len.
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
    make_barriers,
    make_tiles,
    rounded_pairs,
    specialize,
    store_rows,
    tanh_approx,
    visible,
)


@gluon.jit
def output_tile(tile, block, output, rows, slot, ring, stage, phase, turn, kind: gl.constexpr, WHICH: gl.constexpr):
    """Compute 64 queries of a tile: the product with a block's values overlaps SiLU of the next block."""
    out, stride_t, stride_h, half_scale, inverse_n, turns = output
    queries = rows[0][2]
    V: gl.constexpr = ring.b.shape[2]
    DTYPE: gl.constexpr = queries.dtype
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    m, s, zeros = block
    t = tile.first_row + m
    query = queries.index(slot).slice(WHICH * HALF, HALF, 0)
    sums = gl.zeros([HALF, V], gl.float32, SUMS)
    mbarrier.wait(ring.a_full.index(stage), phase)
    scores = warpgroup_mma(query, ring.a.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(ring.a_empty.index(stage), count=1)
    half = scores * half_scale
    mask = visible(t, tile.last + s, tile.sequence, kind.HAS_TARGETS, kind.HAS_WINDOW)
    pairs = rounded_pairs(gl.where(mask, half * tanh_approx(half) + half, 0.0), DTYPE)
    for PART in gl.static_range(3):
        if PART == 1 or (PART == 0 and (kind.HAS_TARGETS or kind.OTHER < kind.OWN)) or (PART == 2 and kind.HAS_WINDOW):
            latest, stop = loop_bounds(tile, PART, kind)
            for start in range(latest, stop - 1, -kind.OTHER):
                before = stage
                phase_before = phase
                stage = (stage + 1) % kind.STAGES
                phase ^= stage == 0
                mbarrier.wait(ring.a_full.index(stage), phase)
                mbarrier.wait(turns.index(WHICH), turn)
                turn ^= 1
                key = ring.a.index(stage).permute((1, 0))
                scores = warpgroup_mma(query, key, zeros, use_acc=False, is_async=True)
                mbarrier.wait(ring.b_full.index(before), phase_before)
                weights = left_operand(pairs, DTYPE, SUMS)
                sums = warpgroup_mma(weights, ring.b.index(before), sums, is_async=True)
                mbarrier.arrive(turns.index(1 - WHICH), count=1)
                scores = warpgroup_mma_wait(1, deps=(scores,))
                half = scores * half_scale
                new = half * tanh_approx(half) + half
                if PART != 1:
                    seen = visible(t, start + s, tile.sequence, kind.HAS_TARGETS, kind.HAS_WINDOW)
                    new = gl.where(seen, new, 0.0)
                sums, weights, new = warpgroup_mma_wait(0, deps=(sums, weights, new))
                mbarrier.arrive(ring.a_empty.index(stage), count=1)
                mbarrier.arrive(ring.b_empty.index(before), count=1)
                # After the wait: before it, ptxas would insert a wait for the previous product.
                pairs = rounded_pairs(new, DTYPE)
    mbarrier.wait(ring.b_full.index(stage), phase)
    weights = left_operand(pairs, DTYPE, SUMS)
    sums = warpgroup_mma(weights, ring.b.index(stage), sums, is_async=True)
    sums, weights = warpgroup_mma_wait(0, deps=(sums, weights))
    mbarrier.arrive(ring.b_empty.index(stage), count=1)
    stage = (stage + 1) % kind.STAGES
    phase ^= stage == 0
    store_rows(out, stride_t, stride_h, tile, tile.first_row + WHICH * HALF, sums * inverse_n, query)
    return stage, phase, turn


@gluon.jit(do_not_specialize=["window_size", "slots"], do_not_specialize_on_alignment=["seq_offsets", "num_targets"])
def dense_attention_fwd_hopper_kernel(
    q, k, v, out, q_stride_h, k_stride_h, v_stride_h, out_stride_t, out_stride_h, seq_offsets, num_targets, window_size,
    half_scale, inverse_n, taken, slots, schedule,
    H: gl.constexpr, HAS_TARGETS: gl.constexpr, HAS_WINDOW: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the outputs of a program's tiles of 128 queries. q, k, v: tensor descriptors [T, heads side by side]."""
    kind: gl.constexpr = Kind(H, BLOCK_M, BLOCK_N, STAGES, True, HAS_TARGETS, HAS_WINDOW)
    batch = Batch(schedule, slots, taken, seq_offsets, num_targets, window_size)
    output = out, out_stride_t, out_stride_h, half_scale, inverse_n, make_barriers(2, 1)
    rows = ((q, q_stride_h, make_tiles(q, 2)),)
    specialize(output_tile, output, rows, (k, k_stride_h), (v, v_stride_h), batch, kind, False, True)
