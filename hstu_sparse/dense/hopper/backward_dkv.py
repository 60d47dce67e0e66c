"""Compute dk and dv on Hopper, in Gluon: see hopper.py.

Tiles are of keys, and the ring has blocks of queries and of do. Scores are transposed, keys x queries.

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
def weigh(half):
    """Return (SiLU, twice its slope minus 1) of a tile of scores, which are passed halved: see ranges.py."""
    u = tanh_approx(half)
    z = half * u
    return half + z, (half - z * u) + u


@gluon.jit
def dkv_tile(tile, block, output, rows, slot, ring, stage, phase, turn, kind: gl.constexpr, WHICH: gl.constexpr):
    """Compute dk and dv of 64 keys of a tile."""
    dk, dk_stride_t, dk_stride_h, dv, dv_stride_t, dv_stride_h, half_scale, half_inverse_n, scale = output
    keys, values = rows[0][2], rows[1][2]
    D: gl.constexpr = ring.a.shape[2]
    V: gl.constexpr = ring.b.shape[2]
    DTYPE: gl.constexpr = keys.dtype
    SUMS_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    SUMS_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    m, t, zeros = block
    s = tile.first_row + m
    key = keys.index(slot).slice(WHICH * HALF, HALF, 0)
    value = values.index(slot).slice(WHICH * HALF, HALF, 0)
    sums_k = gl.zeros([HALF, D], gl.float32, SUMS_K)
    sums_v = gl.zeros([HALF, V], gl.float32, SUMS_V)
    for PART in gl.static_range(3):
        latest, stop = loop_bounds(tile, PART, kind)
        if PART == 0:
            latest = tile.last
        for start in range(latest, stop - 1, -kind.OTHER):
            mbarrier.wait(ring.a_full.index(stage), phase)
            query = ring.a.index(stage)
            scores = warpgroup_mma(key, query.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(ring.b_full.index(stage), phase)
            dout = ring.b.index(stage)
            dp = warpgroup_mma(value, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            weights, slope = weigh(scores * half_scale)
            if PART != 1:
                mask = visible(start + t, s, tile.sequence, kind.HAS_TARGETS, kind.HAS_WINDOW)
                weights = gl.where(mask, weights, 0.0)
                slope = gl.where(mask, slope, -1.0)
            left_v = left_operand(rounded_pairs(weights, DTYPE), DTYPE, SUMS_V)
            sums_v = warpgroup_mma(left_v, dout, sums_v, is_async=True)
            dp, slope = warpgroup_mma_wait(1, deps=(dp, slope))
            left_k = left_operand(rounded_pairs(dp * slope + dp, DTYPE), DTYPE, SUMS_K)
            sums_k = warpgroup_mma(left_k, query, sums_k, is_async=True)
            sums_v, left_v, sums_k, left_k = warpgroup_mma_wait(0, deps=(sums_v, left_v, sums_k, left_k))
            mbarrier.arrive(ring.a_empty.index(stage), count=1)
            mbarrier.arrive(ring.b_empty.index(stage), count=1)
            stage = (stage + 1) % kind.STAGES
            phase ^= stage == 0
    row = tile.first_row + WHICH * HALF
    store_rows(dv, dv_stride_t, dv_stride_h, tile, row, sums_v * (2 * half_inverse_n), value)
    store_rows(dk, dk_stride_t, dk_stride_h, tile, row, sums_k * (scale * half_inverse_n), key)
    return stage, phase, turn


@gluon.jit(do_not_specialize=["window_size", "slots"], do_not_specialize_on_alignment=["seq_offsets", "num_targets"])
def dense_attention_bwd_dkv_hopper_kernel(
    q, k, v, do, dk, dv, q_stride_h, k_stride_h, v_stride_h, do_stride_h, dk_stride_t, dk_stride_h, dv_stride_t,
    dv_stride_h, seq_offsets, num_targets, window_size, half_scale, half_inverse_n, scale, taken, slots,
    schedule,
    H: gl.constexpr, HAS_TARGETS: gl.constexpr, HAS_WINDOW: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a program's tiles of 128 keys. q, k, v, do: tensor descriptors [T, heads side by side]."""
    kind: gl.constexpr = Kind(H, BLOCK_N, BLOCK_M, STAGES, False, HAS_TARGETS, HAS_WINDOW)
    batch = Batch(schedule, slots, taken, seq_offsets, num_targets, window_size)
    output = dk, dk_stride_t, dk_stride_h, dv, dv_stride_t, dv_stride_h, half_scale, half_inverse_n, scale
    rows = (k, k_stride_h, make_tiles(k, 2)), (v, v_stride_h, make_tiles(v, 2))
    specialize(dkv_tile, output, rows, (q, q_stride_h), (do, do_stride_h), batch, kind, True, True)
