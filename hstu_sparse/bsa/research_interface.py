"""The interface of the research code that this operator grew from, so that its published usage runs unchanged.

Letters: T tokens of the batch, B sequences, N padded length, H heads, D query/key and V value head size, S chosen
blocks.

An item and its action stand side by side in those sequences and share one choice of blocks: selection_group is 2
(1 where the block size is odd). The names say triton; on CPU tensors the reference runs.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hstu_sparse.bsa.api import bsa_attention
from hstu_sparse.jagged import jagged_to_padded
from hstu_sparse.validation import check_int, check_tensor

GateFunction = Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]
NORM_EPS = 1e-6


def triton_block_sparse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None,
    g_cmp: Tensor,
    g_slc: Tensor,
    g_swa: Tensor | None,
    block_counts: int,
    block_size: int,
    window_size: int = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`bsa_attention` on padded tensors: every sequence is taken to be N long.

    Args:
        q, k: [B, N, H, D], v: [B, N, H, V].
        u: not used by the attention; the caller multiplies it in.
        g_cmp, g_slc, g_swa: [B, N, H]; g_swa may be None when window_size is 0.
        scale: factor of the scores, D ** -0.5 by default.

    Returns:
        (output [B, N, H, V], block indices [B, H, N, S] int32, ascending, -1 behind them).
    """
    sizes: dict[str, int] = {}
    for name, x, shape in (("q", q, "B N H D"), ("k", k, "B N H D"), ("v", v, "B N H V")):
        check_tensor(name, x, shape, sizes)
    for name, gate in (("g_cmp", g_cmp), ("g_slc", g_slc), ("g_swa", g_swa)):
        if gate is not None or name != "g_swa":
            check_tensor(name, gate, "B N H", sizes)
    check_int("block_size", block_size, 1)
    batch, length = q.shape[:2]
    offsets = torch.arange(batch + 1, device=q.device) * length
    out, indices = bsa_attention(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        offsets,
        max(length, 1),
        (g_cmp.flatten(0, 1), g_slc.flatten(0, 1), None if g_swa is None else g_swa.flatten(0, 1)),
        block_size=block_size,
        block_counts=block_counts,
        window_size=window_size,
        selection_group=_group(block_size),
        scale=scale,
        return_block_indices=True,
    )
    return out.unflatten(0, (batch, length)), indices.unflatten(0, (batch, length)).transpose(1, 2)


def triton_hstu_attention_with_bsa(
    num_heads: int,
    attention_dim: int,
    linear_dim: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    x_offsets: Tensor,
    invalid_attn_mask: Tensor,
    gate_model: GateFunction,
    block_counts: int = 4,
    block_size: int = 32,
    window_size: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Block-sparse attention of one HSTU layer: LayerNorm over all heads (no affine) of the attention, times u.

    Args:
        num_heads, attention_dim, linear_dim: H, D, V.
        q, k: [T, H*D], v, u: [T, H*V].
        x_offsets: [B + 1], first 0, last T.
        invalid_attn_mask: its last size is N; the mask itself is always causal and is not read.
        gate_model: q [T, H, D] -> (g_cmp, g_slc, g_swa), each [T, H].

    Returns:
        (output [T, H*V], padded q [B, N, H, D], padded k [B, N, H, D]).
    """
    if not isinstance(invalid_attn_mask, Tensor) or not invalid_attn_mask.dim():
        raise TypeError("invalid_attn_mask must be a tensor whose last size is N")
    length = invalid_attn_mask.shape[-1]
    for name, size in (("num_heads", num_heads), ("attention_dim", attention_dim), ("linear_dim", linear_dim)):
        check_int(name, size, 1)
    check_int("block_size", block_size, 1)
    sizes = {"H*D": num_heads * attention_dim, "H*V": num_heads * linear_dim}
    for name, x, shape in (("q", q, "T H*D"), ("k", k, "T H*D"), ("v", v, "T H*V"), ("u", u, "T H*V")):
        check_tensor(name, x, shape, sizes)
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}")
    if not callable(gate_model):
        raise TypeError(f"gate_model must be a function of q, got {type(gate_model).__name__}")
    q, k = (x.unflatten(-1, (num_heads, attention_dim)) for x in (q, k))
    out = bsa_attention(
        q,
        k,
        v.unflatten(-1, (num_heads, linear_dim)),
        x_offsets,
        length,
        gate_model(q),
        block_size=block_size,
        block_counts=block_counts,
        window_size=window_size,
        selection_group=_group(block_size),
    )
    normed = F.layer_norm(out.flatten(1), (num_heads * linear_dim,), eps=NORM_EPS)
    return normed * u, jagged_to_padded(q, x_offsets, length), jagged_to_padded(k, x_offsets, length)


class TritonHSTUBSAAttention(nn.Module):
    """One HSTU layer without its residual: norm, uvqk projection with SiLU, attention, output projection."""

    def __init__(
        self,
        embedding_dim: int,
        linear_hidden_dim: int,
        attention_dim: int,
        num_heads: int,
        block_counts: int = 4,
        block_size: int = 32,
        window_size: int = 0,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.num_heads, self.attention_dim, self.linear_hidden_dim = num_heads, attention_dim, linear_hidden_dim
        self.block_counts, self.block_size, self.window_size = block_counts, block_size, window_size
        self.dropout = dropout
        self.norm = nn.LayerNorm(embedding_dim, eps=NORM_EPS)
        self.sizes = [num_heads * n for n in (linear_hidden_dim, linear_hidden_dim, attention_dim, attention_dim)]
        self.uvqk = nn.Parameter(torch.empty(embedding_dim, sum(self.sizes)).normal_(std=0.02))
        self.output = nn.Linear(num_heads * linear_hidden_dim, embedding_dim)
        nn.init.xavier_uniform_(self.output.weight)

    def forward(
        self, x: Tensor, x_offsets: Tensor, invalid_attn_mask: Tensor, gate_model: GateFunction
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, embedding_dim] -> (output [T, embedding_dim], padded q and padded k [B, N, H, D])."""
        u, v, q, k = F.silu(self.norm(x) @ self.uvqk).split(self.sizes, dim=-1)
        attended, padded_q, padded_k = triton_hstu_attention_with_bsa(
            self.num_heads,
            self.attention_dim,
            self.linear_hidden_dim,
            q,
            k,
            v,
            u,
            x_offsets,
            invalid_attn_mask,
            gate_model,
            self.block_counts,
            self.block_size,
            self.window_size,
        )
        return self.output(F.dropout(attended, self.dropout, self.training)), padded_q, padded_k


def _group(block_size: int) -> int:
    return 2 if block_size % 2 == 0 else 1
