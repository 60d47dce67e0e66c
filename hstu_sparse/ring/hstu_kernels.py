"""Dense HSTU attention of a block of queries to a block of keys, with positions given for both: Triton kernels.

Letters: H heads, D query/key and V value head size, N max_seq_len. m: query rows of a tile, n: its key rows; t and s:
their positions.

Plain kernels: each pair of tiles looks at its positions, and is left out where no query sees a key. A program owns a
tile of queries (forward, dq and the tables' gradients) or of keys (dk and dv). The tables' gradients are fp32 atomic
additions, whose last bits depend on their order; nothing else does.
"""

import triton
import triton.language as tl

from hstu_sparse.bias.gradients import add_pairs
from hstu_sparse.bias.scores import pair_bias
from hstu_sparse.tiles import load_rows, locate, silu, silu_and_grad

PER_BATCH = ["num_seqs", "window_size"]
GIVEN = ["q_offsets", "k_offsets", "q_positions", "k_positions", "q_times", "k_times", "position_table", "time_table"]
# Positions of rows that are none: such a query sees nothing, such a key is not seen.
NO_QUERY, NO_KEY = tl.constexpr(-1), tl.constexpr(1 << 30)


@triton.jit
def _times(times, token, inside, time_table):
    """Timestamps of tokens, 0 where no table asks for them."""
    if time_table is not None:
        return tl.load(times + token, inside, 0)
    else:
        return tl.zeros_like(token)


@triton.jit
def _own_tile(offsets, num_seqs, H: tl.constexpr, BLOCK: tl.constexpr):
    """(head, sequence, tokens, which of them are the sequence's, whether any is) of the tile that a program owns."""
    b, begin, length, tile = locate(offsets, tl.program_id(0) // H, num_seqs, BLOCK)
    row = tile * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(0) % H, b, begin + row, row < length, tile * BLOCK < length


@triton.jit
def _overlap(t, s, window_size, HAS_WINDOW: tl.constexpr):
    """Whether some query of a tile may see some key; t and s are vectors, with NO_QUERY and NO_KEY in them."""
    found = tl.min(s, 0) <= tl.max(t, 0)
    if HAS_WINDOW:
        nearest = tl.max(tl.where(s == NO_KEY, NO_QUERY, s), 0)
        found = found & (tl.min(tl.where(t == NO_QUERY, NO_KEY, t), 0) - nearest < window_size)
    return found


@triton.jit
def _visible(distance, window_size, HAS_WINDOW: tl.constexpr):
    seen = distance >= 0
    if HAS_WINDOW:
        seen = seen & (distance < window_size)
    return seen


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=GIVEN)
def ring_hstu_fwd_kernel(
    q, k, v, out, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, out_stride_t, out_stride_h,
    q_offsets, k_offsets, q_positions, k_positions, q_times, k_times, position_table, time_table, cells, num_seqs,
    scale, inverse_n, window_size,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, V_OUT: tl.constexpr, N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """Adds to `out` (fp32) of BLOCK_M queries of one head."""
    head, b, token, inside, some = _own_tile(q_offsets, num_seqs, H, BLOCK_M)
    if not some:
        return
    t = tl.load(q_positions + token, inside, NO_QUERY).to(tl.int32)
    q_time = _times(q_times, token, inside, time_table)[:, None]
    query = load_rows(q + head * q_stride_h, token, q_stride_t, inside, D, PAD_D)
    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)
    k_end = tl.load(k_offsets + b + 1).to(tl.int64)
    for start in range(tl.load(k_offsets + b).to(tl.int64), k_end, BLOCK_N):
        other = start + tl.arange(0, BLOCK_N)
        k_inside = other < k_end
        s = tl.load(k_positions + other, k_inside, NO_KEY).to(tl.int32)
        if _overlap(t, s, window_size, HAS_WINDOW):
            k_time = _times(k_times, other, k_inside, time_table)[None, :]
            key = load_rows(k + head * k_stride_h, other, k_stride_t, k_inside, D, PAD_D)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
            distance = t[:, None] - s[None, :]
            seen = _visible(distance, window_size, HAS_WINDOW)
            scores += pair_bias(distance, seen, q_time, k_time, position_table, time_table, cells, N)[0]
            weights = tl.where(seen, silu(scores, FAST), 0.0)
            value = load_rows(v + head * v_stride_h, other, v_stride_t, k_inside, V, PAD_V)
            acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
    e = tl.arange(0, PAD_V)
    target = out + head * out_stride_h + token[:, None] * out_stride_t + e[None, :]
    mask = inside[:, None] & (e < V_OUT)[None, :]
    tl.store(target, tl.load(target, mask, 0.0) + acc * inverse_n, mask)


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=GIVEN)
def ring_hstu_bwd_dq_kernel(
    q, k, v, do, dq, position_grad, time_grad, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    do_stride_t, do_stride_h, dq_stride_t, dq_stride_h, q_offsets, k_offsets, q_positions, k_positions, q_times,
    k_times, position_table, time_table, cells, num_seqs, scale, inverse_n, window_size,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """Adds to `dq` (fp32) of BLOCK_M queries of one head, and to the tables' gradients (fp32)."""
    head, b, token, inside, some = _own_tile(q_offsets, num_seqs, H, BLOCK_M)
    if not some:
        return
    t = tl.load(q_positions + token, inside, NO_QUERY).to(tl.int32)
    q_time = _times(q_times, token, inside, time_table)[:, None]
    query = load_rows(q + head * q_stride_h, token, q_stride_t, inside, D, PAD_D)
    dout = load_rows(do + head * do_stride_h, token, do_stride_t, inside, V, PAD_V)
    acc = tl.zeros([BLOCK_M, PAD_D], tl.float32)
    k_end = tl.load(k_offsets + b + 1).to(tl.int64)
    for start in range(tl.load(k_offsets + b).to(tl.int64), k_end, BLOCK_N):
        other = start + tl.arange(0, BLOCK_N)
        k_inside = other < k_end
        s = tl.load(k_positions + other, k_inside, NO_KEY).to(tl.int32)
        if _overlap(t, s, window_size, HAS_WINDOW):
            k_time = _times(k_times, other, k_inside, time_table)[None, :]
            key = load_rows(k + head * k_stride_h, other, k_stride_t, k_inside, D, PAD_D)
            value = load_rows(v + head * v_stride_h, other, v_stride_t, k_inside, V, PAD_V)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
            distance = t[:, None] - s[None, :]
            seen = _visible(distance, window_size, HAS_WINDOW)
            bias, bucket = pair_bias(distance, seen, q_time, k_time, position_table, time_table, cells, N)
            _, slope = silu_and_grad(scores + bias, FAST)
            ds = slope * tl.dot(dout, tl.trans(value), input_precision=PRECISION) * inverse_n
            ds = tl.where(seen, ds, 0.0)
            acc = tl.dot(ds.to(key.dtype), key, acc, input_precision=PRECISION)
            add_pairs(position_grad, time_grad, None, ds, distance, seen, bucket, N)
    d = tl.arange(0, PAD_D)
    target = dq + head * dq_stride_h + token[:, None] * dq_stride_t + d[None, :]
    mask = inside[:, None] & (d < D_OUT)[None, :]
    tl.store(target, tl.load(target, mask, 0.0) + acc * scale, mask)


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=GIVEN)
def ring_hstu_bwd_dkv_kernel(
    q, k, v, do, dk, dv, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, do_stride_t,
    do_stride_h, dk_stride_t, dk_stride_h, dv_stride_t, dv_stride_h, q_offsets, k_offsets, q_positions, k_positions,
    q_times, k_times, position_table, time_table, cells, num_seqs, scale, inverse_n, window_size,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr, N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """Adds to dk and dv (fp32) of BLOCK_N keys of one head; tiles are transposed, keys x queries."""
    head, b, token, inside, some = _own_tile(k_offsets, num_seqs, H, BLOCK_N)
    if not some:
        return
    s = tl.load(k_positions + token, inside, NO_KEY).to(tl.int32)
    k_time = _times(k_times, token, inside, time_table)[:, None]
    key = load_rows(k + head * k_stride_h, token, k_stride_t, inside, D, PAD_D)
    value = load_rows(v + head * v_stride_h, token, v_stride_t, inside, V, PAD_V)
    acc_k = tl.zeros([BLOCK_N, PAD_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, PAD_V], tl.float32)
    q_end = tl.load(q_offsets + b + 1).to(tl.int64)
    for start in range(tl.load(q_offsets + b).to(tl.int64), q_end, BLOCK_M):
        other = start + tl.arange(0, BLOCK_M)
        q_inside = other < q_end
        t = tl.load(q_positions + other, q_inside, NO_QUERY).to(tl.int32)
        if _overlap(t, s, window_size, HAS_WINDOW):
            q_time = _times(q_times, other, q_inside, time_table)[None, :]
            query = load_rows(q + head * q_stride_h, other, q_stride_t, q_inside, D, PAD_D)
            dout = load_rows(do + head * do_stride_h, other, do_stride_t, q_inside, V, PAD_V)
            scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * scale
            distance = t[None, :] - s[:, None]
            seen = _visible(distance, window_size, HAS_WINDOW)
            scores += pair_bias(distance, seen, q_time, k_time, position_table, time_table, cells, N)[0]
            weights, slope = silu_and_grad(scores, FAST)
            weights = tl.where(seen, weights, 0.0)
            acc_v = tl.dot(weights.to(dout.dtype), dout, acc_v, input_precision=PRECISION)
            ds = tl.where(seen, slope * tl.dot(value, tl.trans(dout), input_precision=PRECISION), 0.0)
            acc_k = tl.dot(ds.to(query.dtype), query, acc_k, input_precision=PRECISION)
    d = tl.arange(0, PAD_D)
    e = tl.arange(0, PAD_V)
    target = dk + head * dk_stride_h + token[:, None] * dk_stride_t + d[None, :]
    mask = inside[:, None] & (d < D_OUT)[None, :]
    tl.store(target, tl.load(target, mask, 0.0) + acc_k * (scale * inverse_n), mask)
    target = dv + head * dv_stride_h + token[:, None] * dv_stride_t + e[None, :]
    mask = inside[:, None] & (e < V_OUT)[None, :]
    tl.store(target, tl.load(target, mask, 0.0) + acc_v * inverse_n, mask)
