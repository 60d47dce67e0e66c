"""Launch the kernels of sparse attention; register them as torch.ops.hstu_sparse.sparse_attention_fwd and _bwd.

Letters: T tokens of the batch, H query heads, D query/key and V value head size, K chosen tokens per query, G rows of a
choice and R tokens that share one (see choices.py). Only choices that are shared take several key heads.
"""

import torch
from torch import Tensor

from hstu_sparse.core.launch import (
    LaunchConfig,
    cdiv,
    configuration,
    next_power_of_2,
    padded_head,
    precision,
    run,
)
from hstu_sparse.core.registration import Operator
from hstu_sparse.core.rows import as_rows
from hstu_sparse.indexer.attention import (
    sparse_attention_bwd_dkv_kernel,
    sparse_attention_bwd_kernel,
    sparse_attention_fwd_kernel,
)
from hstu_sparse.indexer.choices import choice_rows, rows_shape
from hstu_sparse.indexer.groups import (
    group_attention_bwd_dkv_kernel,
    group_attention_bwd_kernel,
    group_attention_fwd_kernel,
)
from hstu_sparse.indexer.launch import (
    POSITION_COPIES,
    TIME_COPIES,
    by_lists,
    kernel_bias,
    key_block,
    key_layout,
    pairs_by_key,
    table_sums,
)


@configuration
def attention_config(kernel: str, dtype: torch.dtype, width: int) -> LaunchConfig:
    """Return the configuration of "fwd" or "bwd", which process BLOCK chosen keys a step. `width` is that of a key and
    a value, padded. It is fixed rather than tuned at run time.
    """
    block = key_block(dtype, width)
    return LaunchConfig(4, 3, BLOCK=block if kernel == "fwd" else min(block, 32))


@configuration
def group_config(
    kernel: str, dtype: torch.dtype, width: int, heads: int, group: int, top_k: int, key_heads: int = 1
) -> LaunchConfig:
    """Return the configuration for groups of `group` tokens, of which kernels process TOKENS at a time, with BLOCK
    chosen keys and NEAR keys of the group a step. `heads` is a power of two; width is that of one key head.
    """
    most = 64 if dtype.itemsize == 2 and width <= 256 else 32 if width <= 256 and key_heads == 1 else 16
    tokens = max(16 // heads, min(next_power_of_2(group), most // heads), 1)
    block = max(16, min(key_block(dtype, width * key_heads), next_power_of_2(top_k)))
    if kernel == "bwd" or tokens * heads > 32:
        block = min(block, 32)
    if dtype.itemsize == 4 and key_heads > 1:  # products in fp32 take many registers
        block = 16
    near = max(16, min(block, next_power_of_2(group)))
    # A third stage makes forward 40% slower; up to 32 rows two warps are as fast as four.
    is_small = tokens * heads <= 32 and width <= 128 and dtype.itemsize == 2
    warps = 8 if kernel == "bwd" and width > 256 else 2 if is_small else 4
    return LaunchConfig(warps, 2, TOKENS=tokens, BLOCK=block, NEAR=near)


def _forward(q, k, v, indices, seq_offsets, position, time, timestamps, query_timestamps, scale, group):
    (T, H, _), V = q.shape, v.shape[-1]
    out = torch.empty(T, H, V, dtype=q.dtype, device=q.device)
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device)
    rows = choice_rows(seq_offsets, T, group)
    if T == 0:
        return out, lse, rows
    q, k, v = as_rows(q, k, v)
    bias = kernel_bias(position, time, timestamps, query_timestamps)
    arguments = (
        q, k, v, indices, rows, out, lse, *bias, *q.stride()[:2], *_key_strides(k, v, group), scale, indices.shape[1],
    )  # fmt: skip
    constants = dict(H=H, D=q.shape[2], V=v.shape[-1], OUT_V=V, PRECISION=precision(q.dtype))
    _run("fwd", q, v, arguments, constants, rows, group, indices.shape[1])
    return out, lse, rows


def _backward(
    do, q, k, v, indices, seq_offsets, position, time, timestamps, query_timestamps, scale, group, out, lse, rows
):  # fmt: skip
    (T, H, D), V, K = q.shape, v.shape[-1], indices.shape[1]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lists = by_lists(torch.are_deterministic_algorithms_enabled())
    make = torch.empty if lists else torch.zeros
    dk, dv = (make(x.shape, dtype=x.dtype if lists else torch.float32, device=x.device) for x in (k, v))
    do, q, k, v = as_rows(do, q, k, v)
    bias = kernel_bias(position, time, timestamps, query_timestamps)

    def most() -> Tensor:
        """Bound |dscores| summed over the heads and keys of one query: weights (dweights - their mean)."""
        longest = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax() for x in (do, v)]
        return 2 * H * longest[0] * longest[1]

    if T == 0:
        return [dq, dk.to(k.dtype), dv.to(v.dtype), *(torch.zeros_like(x) for x in (position, time) if x is not None)]
    tables = table_sums(position, time, T, torch.are_deterministic_algorithms_enabled(), most)
    delta = torch.empty_like(lse)
    strides = (*do.stride()[:2], *q.stride()[:2], *_key_strides(k, v, group))
    sizes = dict(H=H, D=q.shape[2], V=v.shape[-1], OUT_D=D, OUT_V=V)
    arguments = (
        do, q, k, v, out, lse, indices, rows, dq, dk, dv, delta, tables.position, tables.time, tables.unit, *bias,
        0 if bias.time is None else bias.time.shape[0], *strides, scale, K,
    )  # fmt: skip
    constants = dict(POSITION_COPIES=POSITION_COPIES, TIME_COPIES=TIME_COPIES, ATOMIC=not lists)
    constants |= sizes | dict(PRECISION=precision(q.dtype))
    _run("bwd", q, v, arguments, constants, rows, group, K)
    if lists:
        heads = next_power_of_2(H)
        width = padded_head(max(q.shape[2], v.shape[-1]))
        pairs, starts, slots = pairs_by_key(indices, rows, T, group, local=group > 1)
        queries_a_step = max(1, 4096 // (heads * width))
        tiles = _tiles(q, v) | dict(BH=heads)
        if group == 1:
            arguments = (do, q, k, v, lse, delta, pairs, starts, dk, dv, *bias, *strides, scale, K)
            run(
                sparse_attention_bwd_dkv_kernel,
                T,
                *arguments,
                **sizes,
                **tiles,
                QUERIES=queries_a_step,
                num_warps=4,
                num_stages=2,
            )
        else:
            arguments = (
                do, q, k, v, lse, delta, rows, pairs, starts, dk, dv, *bias, *strides, scale, slots, rows.shape[1],
            )  # fmt: skip
            tiles |= dict(TOKENS=min(queries_a_step, next_power_of_2(group)), KEY_HEADS=key_layout(k)[0])
            grid = (T, tiles["KEY_HEADS"])
            run(group_attention_bwd_dkv_kernel, grid, *arguments, **sizes, **tiles, num_warps=4, num_stages=1)
    return [dq, dk.to(k.dtype), dv.to(v.dtype), *tables.gradients()]


def _tiles(q: Tensor, v: Tensor) -> dict[str, int]:
    return dict(BH=padded_head(q.shape[1]), BD=padded_head(q.shape[2]), BV=padded_head(v.shape[-1]))


def _key_strides(k: Tensor, v: Tensor, group: int) -> tuple[int, ...]:
    """Return the strides of keys and values that the kernels take: for groups, also those of key heads."""
    return (k.stride(0), v.stride(0)) if group == 1 else (*key_layout(k)[1], *key_layout(v)[1])


def _run(kernel: str, q: Tensor, v: Tensor, arguments: tuple, constants: dict, rows: Tensor, group: int, top_k: int):
    """Launch "fwd" or "bwd" for single queries, or for groups."""
    tiles = _tiles(q, v)
    width = tiles["BD"] + tiles["BV"]
    if group == 1:
        kernels = {"fwd": sparse_attention_fwd_kernel, "bwd": sparse_attention_bwd_kernel}
        run(kernels[kernel], q.shape[0], *arguments, **constants, **tiles, **attention_config(kernel, q.dtype, width))
        return
    kernels = {"fwd": group_attention_fwd_kernel, "bwd": group_attention_bwd_kernel}
    heads, key_heads, G = next_power_of_2(q.shape[1]), key_layout(v)[0], rows.shape[1]
    config = group_config(kernel, q.dtype, width, heads, group, top_k, key_heads)
    tiles |= dict(BH=heads, KEY_HEADS=key_heads)
    run(kernels[kernel], (G, cdiv(group, config.TOKENS)), *arguments, G, **constants, **tiles, **config)


def _fake(q, k, v, indices, seq_offsets, *bias_and_options):
    T, H, _ = q.shape
    rows = q.new_empty(rows_shape(T, seq_offsets, bias_and_options[-1]), dtype=torch.int64)
    return q.new_empty(T, H, v.shape[-1]), q.new_empty(T, H, dtype=torch.float32), rows


sparse_attention_jagged = Operator(
    "sparse_attention",
    "Tensor q, Tensor k, Tensor v, Tensor indices, Tensor seq_offsets, Tensor? position, Tensor? time, "
    "Tensor? timestamps, Tensor? query_timestamps, float scale, SymInt group",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    differentiable=("q", "k", "v", "position", "time"),
    outputs=3,
    keep_output=True,
)


def sparse_attention_operator(*arguments) -> Tensor:
    """Call the registered operator and return the output alone."""
    return sparse_attention_jagged(*arguments)[0]
