"""Launch the kernels of sparse attention; register them as torch.ops.hstu_sparse.sparse_attention_fwd and _bwd.

Letters: T tokens of the batch, H query heads, D query/key and V value head size, K chosen tokens per row of a choice, G
rows of a choice and R tokens that share one (see choices.py). Only choices that are shared take several key heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.core.launch import LaunchConfig, cdiv, configuration, next_power_of_2, padded_head, precision, run
from hstu_sparse.core.registration import Operator
from hstu_sparse.core.rows import as_rows
from hstu_sparse.indexer.attention import Sizes, sparse_attention_bwd_kernel, sparse_attention_fwd_kernel
from hstu_sparse.indexer.launch import BIAS, by_heads, kernel_bias, key_block, key_sums, table_sums
from hstu_sparse.tiles.rows import Rows


@configuration
def attention_config(
    kernel: str, dtype: torch.dtype, width: int, heads: int, group: int, top_k: int, key_heads: int = 1
) -> LaunchConfig:
    """Return the configuration of "fwd" or "bwd", which process TOKENS tokens of a group at a time, with BLOCK chosen
    keys and NEAR keys of the group a step. It is fixed rather than tuned at run time.

    width: that of a key and a value of one head, padded; heads: padded.
    """
    if group == 1:
        block = key_block(dtype, width)
        return LaunchConfig(4, 3, TOKENS=1, BLOCK=block if kernel == "fwd" else min(block, 32), NEAR=16)
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


class Arguments(NamedTuple):
    """The operator's arguments in the order of its schema. k: [T, D] or [T, Hkv, D]; rows: see choices.py."""

    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor
    rows: Tensor
    position: Tensor | None
    time: Tensor | None
    timestamps: Tensor | None
    query_timestamps: Tensor | None
    scale: float
    group: int

    @property
    def bias(self) -> RelativeBias:
        return RelativeBias(self.position, self.time, self.timestamps, self.query_timestamps)


def _launch(kernel, a: Arguments, q: Tensor, k: Tensor, v: Tensor, *arguments) -> None:
    """Launch a kernel for tensors whose rows kernels can read."""
    name = "fwd" if kernel is sparse_attention_fwd_kernel else "bwd"
    (_, H, D), key_heads, K, G = q.shape, k.shape[1], a.indices.shape[1], a.rows.shape[1]
    heads = padded_head(H) if a.group == 1 else next_power_of_2(H)
    sizes = Sizes(
        H, D, v.shape[2], a.q.shape[2], a.v.shape[-1], key_heads, heads, padded_head(D), padded_head(v.shape[2]),
        a.group, precision(q.dtype),
    )  # fmt: skip
    config = attention_config(name, q.dtype, sizes.BD + sizes.BV, heads, a.group, K, key_heads)
    grid = G, cdiv(a.group, config.TOKENS)
    run(kernel, grid, *arguments, kernel_bias(a.bias), a.scale, K, G, sizes=sizes, **config)


def _forward(*arguments) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp [T, H])."""
    a = Arguments(*arguments)
    (T, H, _), V = a.q.shape, a.v.shape[-1]
    out = torch.empty(T, H, V, dtype=a.q.dtype, device=a.q.device)
    lse = torch.empty(T, H, dtype=torch.float32, device=a.q.device)
    if T:
        q, k, v = as_rows(a.q, by_heads(a.k), by_heads(a.v))
        rows = map(Rows.of, (q, k, v))
        _launch(sparse_attention_fwd_kernel, a, q, k, v, *rows, a.indices, a.rows, out, lse)
    return out, lse


def _backward(do: Tensor, *arguments) -> list[Tensor]:
    a, out, lse = Arguments(*arguments[:-2]), *arguments[-2:]
    T, H, _ = a.q.shape
    dq = torch.empty(a.q.shape, dtype=a.q.dtype, device=a.q.device)
    if T == 0:
        return [dq, *(torch.zeros_like(x) for x in (a.k, a.v, *a.bias[:2]) if x is not None)]
    do, q, k, v = as_rows(do, a.q, by_heads(a.k), by_heads(a.v))

    def sum_of_scores() -> Tensor:
        """Bound |dscores| summed over the heads and keys of one query: weights (dweights - their mean)."""
        longest = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax() for x in (do, v)]
        return 2 * H * longest[0] * longest[1]

    dk = key_sums(a.k, T, lambda: sum_of_scores() * abs(a.scale) * q.abs().amax())
    dv = key_sums(a.v, T, lambda: H * do.abs().amax().float())
    tables = table_sums(a.bias, T, sum_of_scores)
    rows = map(Rows.of, (do, q, k, v))
    gradients = dq, dk, dv, tables.arguments
    _launch(sparse_attention_bwd_kernel, a, q, k, v, *rows, out, lse, a.indices, a.rows, *gradients)
    return [dq, dk.total(a.k.dtype), dv.total(a.v.dtype), *tables.gradients()]


def _fake(q, k, v, *_) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2], dtype=torch.float32)


sparse_attention_jagged = Operator(
    "sparse_attention",
    f"Tensor q, Tensor k, Tensor v, Tensor indices, Tensor rows, {BIAS}, float scale, SymInt group",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    differentiable=("q", "k", "v", "position", "time"),
    outputs=2,
    keep_output=True,
)


def sparse_attention_operator(*arguments) -> Tensor:
    """Call the registered operator and return the output alone."""
    return sparse_attention_jagged(*arguments)[0]
