"""Launch the kernels of `ring_hstu_attention`, for one block of keys at a time.

Letters: T, S tokens of queries and of keys, H heads, D query/key and V value head size.
"""

import torch

from hstu_sparse.bias.gradients import TableGradients
from hstu_sparse.bias.scores import KernelBias
from hstu_sparse.core.launch import LaunchConfig, configuration, padded_head, precision, run
from hstu_sparse.core.rows import as_rows
from hstu_sparse.ring.hstu_kernels import ring_hstu_bwd_dkv_kernel, ring_hstu_bwd_dq_kernel, ring_hstu_fwd_kernel
from hstu_sparse.ring.hstu_reference import Block
from hstu_sparse.tiles.rows import Rows


@configuration
def tile_config(pad_d: int, pad_v: int, dtype: torch.dtype, biased: bool, backward: bool) -> LaunchConfig:
    """Return tile sizes, warps and stages small enough for all heads and GPUs; a bias needs many registers."""
    widest = max(pad_d, pad_v)
    if dtype == torch.float32:
        return LaunchConfig(BLOCK_M=16 if backward else 32, BLOCK_N=32, num_warps=4, num_stages=1)
    if widest > 128:
        return LaunchConfig(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=1)
    warps = 8 if biased and widest > 64 else 4
    # Forward's keys and values alternate in one buffer. With narrow values, ptxas 12.8 (Triton 3.6) then leaves a
    # register of wgmma unset, which does not happen with tiles of 32 rows: `python -m tests.operators.compiling
    # ring_hstu 90` reports unset_registers.
    return LaunchConfig(BLOCK_M=32 if backward or pad_v < 64 else 64, BLOCK_N=64, num_warps=warps, num_stages=1)


def _launch(kernel, tile: str, block: Block, tensors, tables, **sizes) -> None:
    """Launch a kernel with a program for each head and tile of config's `tile`, BLOCK_M queries or BLOCK_N keys.

    tensors: q, k, v, aligned, and others, which become `Rows`. tables: `TableGradients`, for dq.
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
        KernelBias.of(bias), num_seqs, block.scale, 1.0 / block.normalizer, block.window_size,
        H=q.shape[1], D=q.shape[2], V=v.shape[2], HAS_WINDOW=block.window_size > 0,
        FAST=q.dtype != torch.float32, PRECISION=precision(q.dtype), PAD_D=heads[0], PAD_V=heads[1], **sizes, **config,
    )  # fmt: skip


def block_forward(q, k, v, block: Block, out) -> None:
    """Add these keys' part to out [T, H, V] fp32."""
    if q.shape[0] and k.shape[0]:
        _launch(ring_hstu_fwd_kernel, "BLOCK_M", block, [*as_rows(q, k, v), out], [], V_OUT=v.shape[2])


def block_dq(grad, q, k, v, block: Block, dq, position_grad, time_grad) -> None:
    """Add these keys' part to dq [T, H, D] and to the tables' gradients (or None), all fp32; grad: the output's."""
    if q.shape[0] and k.shape[0]:
        sizes = (0 if x is None else x.shape[0] for x in (position_grad, time_grad))
        tables = [TableGradients(position_grad, time_grad, None, *sizes)]
        _launch(
            ring_hstu_bwd_dq_kernel, "BLOCK_M", block, [*as_rows(q, k, v, grad), dq], tables, D_OUT=q.shape[2]
        )  # fmt: skip


def block_dkv(grad, q, k, v, block: Block, dk, dv) -> None:
    """Add these queries' part to dk [S, H, D] and dv [S, H, V], fp32; grad: the output's."""
    if q.shape[0] and k.shape[0]:
        _launch(
            ring_hstu_bwd_dkv_kernel, "BLOCK_N", block, [*as_rows(q, k, v, grad), dk, dv], [],
            D_OUT=q.shape[2], V_OUT=v.shape[2],
        )  # fmt: skip
