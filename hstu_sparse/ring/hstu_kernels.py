"""Define and launch kernels for dense HSTU attention of a block of queries to a block of keys, with positions for both.

Letters: T queries, S keys, H heads, D query/key and V value head size, N max_seq_len; t and s: the positions of queries
and keys.

A program has a tile of queries (forward; dq and the gradients of the bias tables) or of keys (dk and dv), and loops
over tiles of the other side. It loads the positions of each, and skips tiles in which no query attends to a key. The
gradients of the tables are fp32 atomic additions, whose last bits depend on their order. All other results are
deterministic.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.bias.gradients import TableGradients, add_to_tables
from hstu_sparse.bias.scores import KernelBias, load_times, table_bias
from hstu_sparse.core.launch import LaunchConfig, configuration, padded_head, precision, run
from hstu_sparse.ring.hstu_reference import Block
from hstu_sparse.tiles.rows import Rows, as_rows, load_head, locate, silu, silu_and_grad

PER_BATCH = ["num_seqs", "window_size"]
CALLER_POINTERS = ["q_offsets", "k_offsets", "q_positions", "k_positions"]
# The positions of masked queries and keys, which attend to nothing and are hidden from all.
NO_QUERY, NO_KEY = tl.constexpr(-1), tl.constexpr(1 << 30)


class Tile(NamedTuple):
    """The tile of a program, of one head.

    head, b        the head and the sequence
    token, inside  the indices of the rows in memory, and the mask of those that are in the sequence
    position       the positions of the rows; NO_QUERY or NO_KEY for masked rows
    time           the timestamps of the rows; 0 without a time table
    any_valid      whether any row is in the sequence
    """

    head: tl.tensor
    b: tl.tensor
    token: tl.tensor
    inside: tl.tensor
    position: tl.tensor
    time: tl.tensor
    any_valid: tl.tensor


@triton.jit
def _program_tile(
    offsets, positions, times, num_seqs, NONE: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    b, begin, length, tile = locate(offsets, tl.program_id(0) // H, num_seqs, BLOCK)
    row = tile * BLOCK + tl.arange(0, BLOCK)
    token, inside = begin + row, row < length
    position = tl.load(positions + token, inside, NONE).to(tl.int32)
    time = load_times(times, token, inside)
    return Tile(tl.program_id(0) % H, b, token, inside, position, time, tile * BLOCK < length)


@triton.jit
def _load_tile(start, end, positions, NONE: tl.constexpr, BLOCK: tl.constexpr):
    """Return (BLOCK tokens from `start` on, the mask of those before `end`, their positions)."""
    token = start + tl.arange(0, BLOCK)
    inside = token < end
    return token, inside, tl.load(positions + token, inside, NONE).to(tl.int32)


@triton.jit
def _overlap(t, s, window_size, HAS_WINDOW: tl.constexpr):
    """Return whether a query of a tile may attend to a key. t, s: positions, including NO_QUERY and NO_KEY."""
    overlaps = tl.min(s, 0) <= tl.max(t, 0)
    if HAS_WINDOW:
        nearest = tl.max(tl.where(s == NO_KEY, NO_QUERY, s), 0)
        overlaps = overlaps & (tl.min(tl.where(t == NO_QUERY, NO_KEY, t), 0) - nearest < window_size)
    return overlaps


@triton.jit
def _scores(
    rows, columns, distance, q_time, k_time, bias, scale, window_size, HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (scores of a tile, the mask of visible pairs, time buckets); distance and times broadcast to the tile."""
    scores = tl.dot(rows, tl.trans(columns), input_precision=PRECISION) * scale
    seen = distance >= 0
    if HAS_WINDOW:
        seen = seen & (distance < window_size)
    biases, bucket = table_bias(bias, distance, seen, q_time, k_time)
    return scores + biases, seen, bucket


@triton.jit
def _add(target, head, token, inside, value, SIZE: tl.constexpr):
    """Add `value` to the rows `token` of a head of `target`, `Rows` [tokens, H, SIZE] fp32."""
    column = tl.arange(0, value.shape[1])
    rows = target.pointer + head * target.stride_h + token[:, None] * target.stride_t + column[None, :]
    mask = inside[:, None] & (column < SIZE)[None, :]
    tl.store(rows, tl.load(rows, mask, 0.0) + value, mask)


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=CALLER_POINTERS)
def ring_hstu_fwd_kernel(
    q, k, v, out, q_offsets, k_offsets, q_positions, k_positions, bias, num_seqs, scale, inverse_n, window_size,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, V_OUT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    PAD_V: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the keys to `out` (fp32) for BLOCK_M queries of one head; q, k, v, out: `Rows`."""
    tile = _program_tile(q_offsets, q_positions, bias.query_times, num_seqs, NO_QUERY, H, BLOCK_M)
    if not tile.any_valid:
        return
    head, token, inside, t = tile.head, tile.token, tile.inside, tile.position
    query = load_head(q, head, token, inside, D, PAD_D)
    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)
    k_end = tl.load(k_offsets + tile.b + 1).to(tl.int64)
    for start in range(tl.load(k_offsets + tile.b).to(tl.int64), k_end, BLOCK_N):
        other, k_inside, s = _load_tile(start, k_end, k_positions, NO_KEY, BLOCK_N)
        if _overlap(t, s, window_size, HAS_WINDOW):
            k_time = load_times(bias.key_times, other, k_inside)[None, :]
            key = load_head(k, head, other, k_inside, D, PAD_D)
            scores, seen, _ = _scores(
                query, key, t[:, None] - s[None, :], tile.time[:, None], k_time, bias, scale, window_size,
                HAS_WINDOW, PRECISION,
            )  # fmt: skip
            weights = tl.where(seen, silu(scores, FAST), 0.0)
            value = load_head(v, head, other, k_inside, V, PAD_V)
            acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
    _add(out, head, token, inside, acc * inverse_n, V_OUT)


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=CALLER_POINTERS)
def ring_hstu_bwd_dq_kernel(
    q, k, v, do, dq, tables, q_offsets, k_offsets, q_positions, k_positions, bias, num_seqs, scale, inverse_n,
    window_size,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    PAD_V: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the keys to `dq` (fp32) for BLOCK_M queries of one head, and to `tables` (fp32)."""
    tile = _program_tile(q_offsets, q_positions, bias.query_times, num_seqs, NO_QUERY, H, BLOCK_M)
    if not tile.any_valid:
        return
    head, token, inside = tile.head, tile.token, tile.inside
    query = load_head(q, head, token, inside, D, PAD_D)
    dout = load_head(do, head, token, inside, V, PAD_V)
    acc = tl.zeros([BLOCK_M, PAD_D], tl.float32)
    k_end = tl.load(k_offsets + tile.b + 1).to(tl.int64)
    for start in range(tl.load(k_offsets + tile.b).to(tl.int64), k_end, BLOCK_N):
        other, k_inside, s = _load_tile(start, k_end, k_positions, NO_KEY, BLOCK_N)
        if _overlap(tile.position, s, window_size, HAS_WINDOW):
            k_time = load_times(bias.key_times, other, k_inside)[None, :]
            key = load_head(k, head, other, k_inside, D, PAD_D)
            value = load_head(v, head, other, k_inside, V, PAD_V)
            distance = tile.position[:, None] - s[None, :]
            scores, seen, bucket = _scores(
                query, key, distance, tile.time[:, None], k_time, bias, scale, window_size, HAS_WINDOW, PRECISION
            )
            _, slope = silu_and_grad(scores, FAST)
            ds = slope * tl.dot(dout, tl.trans(value), input_precision=PRECISION) * inverse_n
            ds = tl.where(seen, ds, 0.0)
            acc = tl.dot(ds.to(key.dtype), key, acc, input_precision=PRECISION)
            add_to_tables(tables, ds, distance, seen, bucket)
    _add(dq, head, token, inside, acc * scale, D_OUT)


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=CALLER_POINTERS)
def ring_hstu_bwd_dkv_kernel(
    q, k, v, do, dk, dv, q_offsets, k_offsets, q_positions, k_positions, bias, num_seqs, scale, inverse_n, window_size,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the queries to dk and dv (fp32) for BLOCK_N keys of one head. Tiles: [keys, queries]."""
    tile = _program_tile(k_offsets, k_positions, bias.key_times, num_seqs, NO_KEY, H, BLOCK_N)
    if not tile.any_valid:
        return
    head, token, inside, s = tile.head, tile.token, tile.inside, tile.position
    key = load_head(k, head, token, inside, D, PAD_D)
    value = load_head(v, head, token, inside, V, PAD_V)
    acc_k = tl.zeros([BLOCK_N, PAD_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, PAD_V], tl.float32)
    q_end = tl.load(q_offsets + tile.b + 1).to(tl.int64)
    for start in range(tl.load(q_offsets + tile.b).to(tl.int64), q_end, BLOCK_M):
        other, q_inside, t = _load_tile(start, q_end, q_positions, NO_QUERY, BLOCK_M)
        if _overlap(t, s, window_size, HAS_WINDOW):
            q_time = load_times(bias.query_times, other, q_inside)[None, :]
            query = load_head(q, head, other, q_inside, D, PAD_D)
            dout = load_head(do, head, other, q_inside, V, PAD_V)
            scores, seen, _ = _scores(
                key, query, t[None, :] - s[:, None], q_time, tile.time[:, None], bias, scale, window_size,
                HAS_WINDOW, PRECISION,
            )  # fmt: skip
            weights, slope = silu_and_grad(scores, FAST)
            weights = tl.where(seen, weights, 0.0)
            acc_v = tl.dot(weights.to(dout.dtype), dout, acc_v, input_precision=PRECISION)
            ds = tl.where(seen, slope * tl.dot(value, tl.trans(dout), input_precision=PRECISION), 0.0)
            acc_k = tl.dot(ds.to(query.dtype), query, acc_k, input_precision=PRECISION)
    _add(dk, head, token, inside, acc_k * (scale * inverse_n), D_OUT)
    _add(dv, head, token, inside, acc_v * inverse_n, V_OUT)


@configuration
def tile_config(pad_d: int, pad_v: int, dtype: torch.dtype, biased: bool, backward: bool) -> LaunchConfig:
    """Return a configuration for all supported GPUs; a bias needs many registers."""
    widest = max(pad_d, pad_v)
    if dtype == torch.float32:
        return LaunchConfig(BLOCK_M=16 if backward else 32, BLOCK_N=32, num_warps=4, num_stages=1)
    if widest > 128:
        return LaunchConfig(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=1)
    warps = 8 if biased and widest > 64 else 4
    # With 64 rows and narrow values, ptxas 12.8 (Triton 3.6) leaves a register of wgmma unset in the forward kernel:
    # `python -m tests.operators.compiling ring_hstu 90` reports unset_registers.
    return LaunchConfig(BLOCK_M=32 if backward or pad_v < 64 else 64, BLOCK_N=64, num_warps=warps, num_stages=1)


def _launch(kernel, tile: str, block: Block, tensors, tables, **sizes) -> None:
    """Launch a kernel with a program for each head and tile. tile: "BLOCK_M" for queries, "BLOCK_N" for keys.

    tensors: q, k, v, and others, which become `Rows`. tables: [`TableGradients`] for dq, otherwise [].
    """
    q, k, v = tensors[:3]
    bias, q_offsets = block.bias, block.q_offsets
    biased = bias.position is not None or bias.time is not None
    heads = padded_head(q.shape[2]), padded_head(v.shape[2])
    config = tile_config(*heads, q.dtype, biased, kernel is not ring_hstu_fwd_kernel)
    tokens, num_seqs = (q if tile == "BLOCK_M" else k).shape[0], q_offsets.shape[0] - 1
    run(
        kernel, (tokens // config[tile] + num_seqs) * q.shape[1], *map(Rows.of, tensors), *tables,
        *(x.contiguous() for x in block[:4]),
        KernelBias.from_bias(bias), num_seqs, block.scale, 1.0 / block.normalizer, block.window_size,
        H=q.shape[1], D=q.shape[2], V=v.shape[2], HAS_WINDOW=block.window_size > 0,
        FAST=q.dtype != torch.float32, PRECISION=precision(q.dtype), PAD_D=heads[0], PAD_V=heads[1], **sizes, **config,
    )  # fmt: skip


def block_forward(q, k, v, block: Block, out) -> None:
    """Add the contribution of these keys to out [T, H, V] fp32."""
    if q.shape[0] and k.shape[0]:
        _launch(ring_hstu_fwd_kernel, "BLOCK_M", block, [*as_rows(q, k, v), out], [], V_OUT=v.shape[2])


def block_dq(grad, q, k, v, block: Block, dq, position_grad, time_grad) -> None:
    """Add the contribution of these keys to dq [T, H, D] and to the gradients of the tables (or None), all fp32.

    grad: the gradient of the output.
    """
    if q.shape[0] and k.shape[0]:
        sizes = (0 if x is None else x.shape[0] for x in (position_grad, time_grad))
        tables = [TableGradients(position_grad, time_grad, None, *sizes)]
        _launch(
            ring_hstu_bwd_dq_kernel, "BLOCK_M", block, [*as_rows(q, k, v, grad), dq], tables, D_OUT=q.shape[2]
        )  # fmt: skip


def block_dkv(grad, q, k, v, block: Block, dk, dv) -> None:
    """Add the contribution of these queries to dk [S, H, D] and dv [S, H, V] fp32. grad: the gradient of the output."""
    if q.shape[0] and k.shape[0]:
        _launch(
            ring_hstu_bwd_dkv_kernel, "BLOCK_N", block, [*as_rows(q, k, v, grad), dk, dv], [],
            D_OUT=q.shape[2], V_OUT=v.shape[2],
        )  # fmt: skip
