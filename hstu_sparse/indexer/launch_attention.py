"""Launches the kernels of sparse attention and registers them as torch.ops.hstu_sparse.sparse_attention_fwd and _bwd.

Letters: T tokens of the batch, H heads, D query/key and V value head size, K chosen tokens per query.
"""

import torch
from torch import Tensor

from hstu_sparse.indexer.attention import (
    sparse_attention_bwd_dkv_kernel,
    sparse_attention_bwd_kernel,
    sparse_attention_fwd_kernel,
)
from hstu_sparse.indexer.launch import (
    POSITION_COPIES,
    TIME_COPIES,
    by_lists,
    kernel_bias,
    key_block,
    pairs_by_key,
    table_sums,
    token_begins,
)
from hstu_sparse.launch import LaunchConfig, configuration, next_power_of_2, padded_head, precision, run
from hstu_sparse.registration import Operator
from hstu_sparse.rows import as_rows


@configuration
def attention_config(kernel: str, dtype: torch.dtype, width: int) -> LaunchConfig:
    """The configuration of "fwd" or "bwd", which take BLOCK chosen keys a step. `width` is that of a key and a value,
    padded. Fixed rather than tuned at run time.
    """
    block = key_block(dtype, width)
    return LaunchConfig(4, 3, BLOCK=block if kernel == "fwd" else min(block, 32))


def _forward(q, k, v, indices, seq_offsets, position, time, timestamps, query_timestamps, scale):
    (T, H, _), V = q.shape, v.shape[1]
    out = torch.empty(T, H, V, dtype=q.dtype, device=q.device)
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device)
    if T == 0:
        return out, lse
    q, k, v = as_rows(q, k, v)
    bias = kernel_bias(position, time, timestamps, query_timestamps)
    arguments = (
        q, k, v, indices, token_begins(seq_offsets, T)[0], out, lse, *bias, *q.stride()[:2], k.stride(0), v.stride(0),
        scale, indices.shape[1],
    )  # fmt: skip
    constants = dict(H=H, D=q.shape[2], V=v.shape[1], OUT_V=V, PRECISION=precision(q.dtype))
    _run(sparse_attention_fwd_kernel, "fwd", q, v, arguments, constants)
    return out, lse


def _backward(do, q, k, v, indices, seq_offsets, position, time, timestamps, query_timestamps, scale, out, lse):
    (T, H, D), V, K = q.shape, v.shape[1], indices.shape[1]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lists = by_lists(torch.are_deterministic_algorithms_enabled())
    make = torch.empty if lists else torch.zeros
    dk, dv = (make(x.shape, dtype=x.dtype if lists else torch.float32, device=x.device) for x in (k, v))
    do, q, k, v = as_rows(do, q, k, v)
    bias = kernel_bias(position, time, timestamps, query_timestamps)

    def most() -> Tensor:
        """Of |dscores| summed over the heads and keys of one query: weights (dweights - their mean)."""
        longest = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax() for x in (do, v)]
        return 2 * H * longest[0] * longest[1]

    if T == 0:
        return [dq, dk.to(k.dtype), dv.to(v.dtype), *(torch.zeros_like(x) for x in (position, time) if x is not None)]
    tables = table_sums(bias, T, torch.are_deterministic_algorithms_enabled(), most)
    begins, delta = token_begins(seq_offsets, T)[0], torch.empty_like(lse)
    strides = (*do.stride()[:2], *q.stride()[:2], k.stride(0), v.stride(0))
    sizes = dict(H=H, D=q.shape[2], V=v.shape[1], OUT_D=D, OUT_V=V)
    arguments = (
        do, q, k, v, out, lse, indices, begins, dq, dk, dv, delta, tables.position, tables.time, tables.unit, *bias,
        0 if bias.time is None else bias.time.shape[0], *strides, scale, K,
    )  # fmt: skip
    constants = dict(POSITION_COPIES=POSITION_COPIES, TIME_COPIES=TIME_COPIES, ATOMIC=not lists)
    _run(sparse_attention_bwd_kernel, "bwd", q, v, arguments, sizes | constants | dict(PRECISION=precision(q.dtype)))
    if lists:
        heads = next_power_of_2(H)
        width = padded_head(max(q.shape[2], v.shape[1]))
        arguments = (
            do, q, k, v, lse, delta, *pairs_by_key(indices, begins), dk, dv, *bias, *strides, scale, K,
        )  # fmt: skip
        tiles = _tiles(q, v) | dict(BH=heads, QUERIES=max(1, 4096 // (heads * width)))
        run(sparse_attention_bwd_dkv_kernel, T, *arguments, **sizes, **tiles, num_warps=4, num_stages=2)
    return [dq, dk.to(k.dtype), dv.to(v.dtype), *tables.gradients()]


def _tiles(q: Tensor, v: Tensor) -> dict[str, int]:
    return dict(BH=padded_head(q.shape[1]), BD=padded_head(q.shape[2]), BV=padded_head(v.shape[1]))


def _run(kernel, part: str, q: Tensor, v: Tensor, arguments: tuple, constants: dict) -> None:
    tiles = _tiles(q, v)
    config = attention_config(part, q.dtype, tiles["BD"] + tiles["BV"])
    run(kernel, q.shape[0], *arguments, **constants, **tiles, **config)


def _fake(q, k, v, *_):
    return q.new_empty(*q.shape[:2], v.shape[1]), q.new_empty(q.shape[:2], dtype=torch.float32)


sparse_attention_jagged = Operator(
    "sparse_attention",
    "Tensor q, Tensor k, Tensor v, Tensor indices, Tensor seq_offsets, Tensor? position, Tensor? time, "
    "Tensor? timestamps, Tensor? query_timestamps, float scale",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    differentiable=("q", "k", "v", "position", "time"),
    outputs=2,
    keep_output=True,
)


def sparse_attention_operator(*arguments) -> Tensor:
    """Arguments as registered; the output alone."""
    return sparse_attention_jagged(*arguments)[0]
