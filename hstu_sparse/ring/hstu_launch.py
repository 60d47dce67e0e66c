"""Launch the kernels of `ring_hstu_attention`, for one block of keys at a time.

Letters: T, S tokens of queries and of keys, H heads, D query/key and V value head size.
"""

import torch

from hstu_sparse.bias.buckets import device_cells, num_time_buckets
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.core.launch import LaunchConfig, configuration, padded_head, precision, run
from hstu_sparse.core.rows import as_rows
from hstu_sparse.ring.hstu_kernels import ring_hstu_bwd_dkv_kernel, ring_hstu_bwd_dq_kernel, ring_hstu_fwd_kernel
from hstu_sparse.tiles.rows import Rows


@configuration
def tile_config(pad_d: int, pad_v: int, dtype: torch.dtype, biased: bool, backward: bool) -> LaunchConfig:
    """Return tile sizes, warps and pipeline stages: small enough for every head size and architecture. A bias needs
    many registers.
    """
    widest = max(pad_d, pad_v)
    if dtype == torch.float32:
        return LaunchConfig(BLOCK_M=16 if backward else 32, BLOCK_N=32, num_warps=4, num_stages=1)
    if widest > 128:
        return LaunchConfig(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=1)
    warps = 8 if biased and widest > 64 else 4
    # Forward's keys and values alternate in one buffer. With narrow values, ptxas 12.8 then forgets to set a register
    # of wgmma (`ahead.report`: unset_registers), which does not happen with tiles of 32 rows.
    return LaunchConfig(BLOCK_M=32 if backward or pad_v < 64 else 64, BLOCK_N=64, num_warps=warps, num_stages=1)


def _launch(
    kernel, grid_tokens, block, tensors, extra, q_offsets, k_offsets, q_positions, k_positions, normalizer, scale,
    window_size, bias: RelativeBias, sizes: dict, config,
):  # fmt: skip
    """Call kernel[...](*tensors, *extra, ...), the tensors as `Rows`; the first are q, k, v, aligned."""
    q, _, v = tensors[:3]
    cells = None if bias.time is None else device_cells(num_time_buckets(bias.time), q.device)
    positions = 1 if bias.position is None else bias.position.shape[0]
    num_seqs = q_offsets.shape[0] - 1
    run(
        kernel, (grid_tokens // config[block] + num_seqs) * q.shape[1],
        *map(Rows.of, tensors), *extra, *(x.contiguous() for x in (q_offsets, k_offsets, q_positions, k_positions)),
        *(None if x is None else x.contiguous() for x in (bias.query_timestamps, bias.timestamps, *bias[:2])),
        cells, num_seqs, scale, 1.0 / normalizer, window_size,
        H=q.shape[1], D=q.shape[2], V=v.shape[2], N=positions, HAS_WINDOW=window_size > 0,
        FAST=q.dtype != torch.float32, PRECISION=precision(q.dtype), PAD_D=padded_head(q.shape[2]),
        PAD_V=padded_head(v.shape[2]), **sizes, **config,
    )  # fmt: skip


def _config(q, v, bias: RelativeBias, backward: bool) -> LaunchConfig:
    biased = bias.position is not None or bias.time is not None
    return tile_config(padded_head(q.shape[2]), padded_head(v.shape[2]), q.dtype, biased, backward)


def block_forward(q, k, v, *others) -> None:
    """Add these keys' part to out [T, H, V] fp32; arguments as `hstu_block`, then bias and out."""
    *layout_and_options, bias, out = others
    if q.shape[0] and k.shape[0]:
        rows = as_rows(q, k, v)
        _launch(
            ring_hstu_fwd_kernel, q.shape[0], "BLOCK_M", [*rows, out], [], *layout_and_options, bias,
            {"V_OUT": v.shape[2]},
            _config(q, v, bias, False),
        )  # fmt: skip


def block_dq(grad, q, k, v, *others) -> None:
    """Add these keys' part to dq [T, H, D] and to the tables' gradients, all fp32.

    Arguments: the output's gradient, those of `hstu_block`, bias, dq, the gradients of both tables or None.
    """
    *layout_and_options, bias, dq, position_grad, time_grad = others
    if q.shape[0] and k.shape[0]:
        _launch(
            ring_hstu_bwd_dq_kernel, q.shape[0], "BLOCK_M", [*as_rows(q, k, v, grad), dq],
            [position_grad, time_grad], *layout_and_options, bias, {"D_OUT": q.shape[2]}, _config(q, v, bias, True),
        )  # fmt: skip


def block_dkv(grad, q, k, v, *others) -> None:
    """Add these queries' part to dk [S, H, D] and dv [S, H, V], fp32; arguments as `block_dq`, with dk, dv behind
    bias.
    """
    *layout_and_options, bias, dk, dv = others
    if q.shape[0] and k.shape[0]:
        _launch(
            ring_hstu_bwd_dkv_kernel, k.shape[0], "BLOCK_N", [*as_rows(q, k, v, grad), dk, dv], [],
            *layout_and_options, bias, {"D_OUT": q.shape[2], "V_OUT": v.shape[2]}, _config(q, v, bias, True),
        )  # fmt: skip
