"""Define the dense kernels for Hopper in Gluon: the computations that `specialize` (tiles.py) runs on each tile.

For the output and dq, tiles are of queries and the ring has blocks of keys and values. For dk and dv, tiles are of keys
and the ring has blocks of queries and do; scores are transposed, keys x queries. q, k, v and do are tensor descriptors
[T, heads side by side], head_strides the strides between their heads; outputs are `Rows`. See docs/dense.md.

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
    out, factors, turns = output
    half_scale, inverse_n = factors
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
        if PART == 1 or (PART == 0 and (kind.HAS_TARGETS or kind.BLOCK < kind.TILE)) or (PART == 2 and kind.HAS_WINDOW):
            latest, stop = loop_bounds(tile, PART, kind)
            for start in range(latest, stop - 1, -kind.BLOCK):
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
    store_rows(out, tile, tile.first_row + WHICH * HALF, sums * inverse_n, query)
    return stage, phase, turn


@gluon.jit(do_not_specialize=["window_size", "slots"], do_not_specialize_on_alignment=["seq_offsets", "num_targets"])
def dense_attention_fwd_hopper_kernel(
    q, k, v, head_strides, out, seq_offsets, num_targets, window_size, factors, taken, slots, schedule,
    H: gl.constexpr, HAS_TARGETS: gl.constexpr, HAS_WINDOW: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Compute the outputs of a program's tiles of 128 queries. factors: half the scale, 1/N."""
    kind: gl.constexpr = Kind(H, BLOCK_M, BLOCK_N, STAGES, TILES, True, HAS_TARGETS, HAS_WINDOW)
    batch = Batch(schedule, slots, taken, seq_offsets, num_targets, window_size)
    output = out, factors, make_barriers(2, 1)
    rows = ((q, head_strides[0], make_tiles(q, TILES)),)
    specialize(output_tile, output, rows, (k, head_strides[1]), (v, head_strides[2]), batch, kind, False, True)


@gluon.jit
def silu_slope(half):
    """Return twice SiLU's derivative minus 1 of a tile of halved scores: see dense/kernels.py."""
    u = tanh_approx(half)
    return (half - half * u * u) + u


@gluon.jit
def dq_tile(tile, block, output, rows, slot, ring, stage, phase, turn, kind: gl.constexpr, WHICH: gl.constexpr):
    """Compute dq of 64 queries of a tile: the product of ds and keys overlaps the slopes of the next block."""
    dq, factors = output
    half_scale, factor = factors
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
        if PART == 1 or (PART == 0 and (kind.HAS_TARGETS or kind.BLOCK < kind.TILE)) or (PART == 2 and kind.HAS_WINDOW):
            latest, stop = loop_bounds(tile, PART, kind)
            for start in range(latest, stop - 1, -kind.BLOCK):
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
    store_rows(dq, tile, tile.first_row + WHICH * HALF, sums * factor, query)
    return stage, phase, turn


@gluon.jit(do_not_specialize=["window_size", "slots"], do_not_specialize_on_alignment=["seq_offsets", "num_targets"])
def dense_attention_bwd_dq_hopper_kernel(
    q, k, v, do, head_strides, dq, seq_offsets, num_targets, window_size, factors, taken, slots, schedule,
    H: gl.constexpr, HAS_TARGETS: gl.constexpr, HAS_WINDOW: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Compute dq of a program's tiles of 128 queries. factors: half the scale, and that divided by N."""
    kind: gl.constexpr = Kind(H, BLOCK_M, BLOCK_N, STAGES, TILES, True, HAS_TARGETS, HAS_WINDOW)
    batch = Batch(schedule, slots, taken, seq_offsets, num_targets, window_size)
    rows = (q, head_strides[0], make_tiles(q, TILES)), (do, head_strides[3], make_tiles(do, TILES))
    specialize(dq_tile, (dq, factors), rows, (k, head_strides[1]), (v, head_strides[2]), batch, kind, True, False)


@gluon.jit
def silu_and_slope(half):
    """Return (SiLU, twice its derivative minus 1) of a tile of halved scores: see dense/kernels.py."""
    u = tanh_approx(half)
    z = half * u
    return half + z, (half - z * u) + u


@gluon.jit
def dkv_tile(tile, block, output, rows, slot, ring, stage, phase, turn, kind: gl.constexpr, WHICH: gl.constexpr):
    """Compute dk and dv of 64 keys of a tile."""
    dk, dv, factors = output
    half_scale, half_inverse_n, scale = factors
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
        for start in range(latest, stop - 1, -kind.BLOCK):
            mbarrier.wait(ring.a_full.index(stage), phase)
            query = ring.a.index(stage)
            scores = warpgroup_mma(key, query.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(ring.b_full.index(stage), phase)
            dout = ring.b.index(stage)
            dp = warpgroup_mma(value, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            weights, slope = silu_and_slope(scores * half_scale)
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
    store_rows(dv, tile, row, sums_v * (2 * half_inverse_n), value)
    store_rows(dk, tile, row, sums_k * (scale * half_inverse_n), key)
    return stage, phase, turn


@gluon.jit
def dv_tile(tile, block, output, rows, slot, ring, stage, phase, turn, kind: gl.constexpr):
    """Compute dv of a tile of 64 keys, and store SiLU's slopes for the group that computes dk."""
    _, dv, factors, slopes, slopes_full = output
    half_scale, half_inverse_n, _ = factors
    keys = rows[0][2]
    V: gl.constexpr = ring.b.shape[2]
    DTYPE: gl.constexpr = keys.dtype
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    m, t, zeros = block
    s = tile.first_row + m
    key = keys.index(slot)
    sums = gl.zeros([HALF, V], gl.float32, SUMS)
    for PART in gl.static_range(3):
        latest, stop = loop_bounds(tile, PART, kind)
        if PART == 0:
            latest = tile.last
        for start in range(latest, stop - 1, -kind.BLOCK):
            mbarrier.wait(ring.a_full.index(stage), phase)
            query = ring.a.index(stage).permute((1, 0))
            scores = warpgroup_mma(key, query, zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(ring.a_empty.index(stage), count=1)
            weights, slope = silu_and_slope(scores * half_scale)
            if PART != 1:
                mask = visible(start + t, s, tile.sequence, kind.HAS_TARGETS, kind.HAS_WINDOW)
                weights = gl.where(mask, weights, 0.0)
                slope = gl.where(mask, slope, -1.0)
            # The queries' barriers guard the slopes, too: the other group releases both.
            slopes.index(stage).store(slope.to(gl.float16))
            mbarrier.arrive(slopes_full.index(stage), count=1)
            left = left_operand(rounded_pairs(weights, DTYPE), DTYPE, SUMS)
            mbarrier.wait(ring.b_full.index(stage), phase)
            sums = warpgroup_mma(left, ring.b.index(stage), sums, is_async=True)
            sums, left = warpgroup_mma_wait(0, deps=(sums, left))
            mbarrier.arrive(ring.b_empty.index(stage), count=1)
            stage = (stage + 1) % kind.STAGES
            phase ^= stage == 0
    store_rows(dv, tile, tile.first_row, sums * (2 * half_inverse_n), key)
    return stage, phase, turn


@gluon.jit
def dk_tile(tile, block, output, rows, slot, ring, stage, phase, turn, kind: gl.constexpr):
    """Compute dk of a tile of 64 keys with the slopes of `dv_tile`."""
    dk, _, factors, slopes, slopes_full = output
    _, half_inverse_n, scale = factors
    values = rows[1][2]
    D: gl.constexpr = ring.a.shape[2]
    DTYPE: gl.constexpr = values.dtype
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    zeros = block[2]
    value = values.index(slot)
    sums = gl.zeros([HALF, D], gl.float32, SUMS)
    for _ in range(tile.last, tile.first - 1, -kind.BLOCK):
        mbarrier.wait(ring.b_full.index(stage), phase)
        dout = ring.b.index(stage).permute((1, 0))
        dp = warpgroup_mma(value, dout, zeros, use_acc=False, is_async=True)
        mbarrier.wait(slopes_full.index(stage), phase)
        slope = slopes.index(stage).load(zeros.type.layout).to(gl.float32)
        dp, slope = warpgroup_mma_wait(0, deps=(dp, slope))
        mbarrier.arrive(ring.b_empty.index(stage), count=1)
        left = left_operand(rounded_pairs(dp * slope + dp, DTYPE), DTYPE, SUMS)
        mbarrier.wait(ring.a_full.index(stage), phase)
        sums = warpgroup_mma(left, ring.a.index(stage), sums, is_async=True)
        sums, left = warpgroup_mma_wait(0, deps=(sums, left))
        mbarrier.arrive(ring.a_empty.index(stage), count=1)
        stage = (stage + 1) % kind.STAGES
        phase ^= stage == 0
    store_rows(dk, tile, tile.first_row, sums * (scale * half_inverse_n), value)
    return stage, phase, turn


@gluon.jit
def dv_or_dk_tile(tile, block, output, rows, slot, ring, stage, phase, turn, kind: gl.constexpr, WHICH: gl.constexpr):
    """Compute dv of a tile of 64 keys in the first group, dk in the second: one group cannot hold both sums."""
    if WHICH == 0:
        return dv_tile(tile, block, output, rows, slot, ring, stage, phase, turn, kind)
    else:
        return dk_tile(tile, block, output, rows, slot, ring, stage, phase, turn, kind)


@gluon.jit(do_not_specialize=["window_size", "slots"], do_not_specialize_on_alignment=["seq_offsets", "num_targets"])
def dense_attention_bwd_dkv_hopper_kernel(
    q, k, v, do, head_strides, dk, dv, seq_offsets, num_targets, window_size, factors, taken, slots, schedule,
    H: gl.constexpr, HAS_TARGETS: gl.constexpr, HAS_WINDOW: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a program's tiles of 128 or 64 keys. factors: half the scale, half 1/N, the scale."""
    kind: gl.constexpr = Kind(H, BLOCK_N, BLOCK_M, STAGES, TILES, False, HAS_TARGETS, HAS_WINDOW)
    batch = Batch(schedule, slots, taken, seq_offsets, num_targets, window_size)
    rows = (k, head_strides[1], make_tiles(k, TILES)), (v, head_strides[2], make_tiles(v, TILES))
    queries, douts = (q, head_strides[0]), (do, head_strides[3])
    if BLOCK_N == HALF:
        SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(BLOCK_M * 2, 16, 2)
        slopes = gl.allocate_shared_memory(gl.float16, [STAGES, HALF, BLOCK_M], SWIZZLED)
        output = dk, dv, factors, slopes, make_barriers(STAGES, 1)
        specialize(dv_or_dk_tile, output, rows, queries, douts, batch, kind, True, True)
    else:
        specialize(dkv_tile, (dk, dv, factors), rows, queries, douts, batch, kind, True, True)
