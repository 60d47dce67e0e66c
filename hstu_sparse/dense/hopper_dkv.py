"""Compute dk and dv on Hopper, in Gluon: see hopper.py.

Tiles are of keys, and the ring has blocks of queries and of do. Scores are transposed, keys x queries.

Letters: H heads, D query/key head size, V value head size.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hstu_sparse.dense.hopper import (
    HALF,
    Batch,
    Kind,
    find_tile,
    left_operand,
    loop_bounds,
    make_barriers,
    make_queue,
    make_ring,
    make_tiles,
    produce,
    rounded_pairs,
    store_rows,
    take,
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
def attend_dkv(outputs, keys, values, queue, ring, batch, kind: gl.constexpr, WHICH: gl.constexpr):
    """Compute dk and dv of 64 keys of each tile."""
    dk, dk_stride_t, dk_stride_h, dv, dv_stride_t, dv_stride_h, half_scale, half_inverse_n, scale = outputs
    D: gl.constexpr = ring.a.shape[2]
    V: gl.constexpr = ring.b.shape[2]
    DTYPE: gl.constexpr = keys.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kind.OTHER, 16])
    SUMS_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    SUMS_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    m = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))[:, None]
    t = gl.arange(0, kind.OTHER, gl.SliceLayout(0, SCORES))[None, :]
    none = gl.zeros([HALF, kind.OTHER], gl.float32, SCORES)
    n = 0
    stage = 0
    phase = 0
    head, b, index = take(queue, 0, 4)
    while b >= 0:
        tile = find_tile(head, b, index, batch, kind)
        s = tile.first_row + m
        key = keys.index(n % 2).slice(WHICH * HALF, HALF, 0)
        value = values.index(n % 2).slice(WHICH * HALF, HALF, 0)
        sums_k = gl.zeros([HALF, D], gl.float32, SUMS_K)
        sums_v = gl.zeros([HALF, V], gl.float32, SUMS_V)
        for PART in gl.static_range(3):
            latest, stop = loop_bounds(tile, PART, kind)
            if PART == 0:
                latest = tile.last
            for start in range(latest, stop - 1, -kind.OTHER):
                mbarrier.wait(ring.a_full.index(stage), phase)
                query = ring.a.index(stage)
                scores = warpgroup_mma(key, query.permute((1, 0)), none, use_acc=False, is_async=True)
                mbarrier.wait(ring.b_full.index(stage), phase)
                dout = ring.b.index(stage)
                dp = warpgroup_mma(value, dout.permute((1, 0)), none, use_acc=False, is_async=True)
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
        fence_async_shared()  # the next copy overwrites the results in shared memory
        mbarrier.arrive(queue.empty.index(n % 2), count=1)
        n += 1
        head, b, index = take(queue, n, 4)


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
    keys = make_tiles(k, 2)
    values = make_tiles(v, 2)
    queue = make_queue(2)
    ring = make_ring(q, do, STAGES)
    copied = make_barriers(2, 1)
    outputs = dk, dk_stride_t, dk_stride_h, dv, dv_stride_t, dv_stride_h, half_scale, half_inverse_n, scale
    rows = (k, k_stride_h, keys), (v, v_stride_h, values)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (attend_dkv, (outputs, keys, values, queue, ring, batch, kind, FIRST)),
            (attend_dkv, (outputs, keys, values, queue, ring, batch, kind, SECOND)),
            (produce, (rows, (q, q_stride_h), (do, do_stride_h), queue, ring, copied, batch, kind, True, True)),
        ],
        [4, 1],
        [240, 24],  # registers of a thread of the second group and of the warp that copies
    )
