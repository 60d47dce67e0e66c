"""Define the functions of the research code that this package grew from, with their names and arguments.

Each calls this package's operators, so that programs written for the research code run unchanged. New programs should
call the operators. CPU tensors use the reference, although the names contain triton.

Letters: B sequences, N padded length (ring attention: tokens of each sequence on this rank), T tokens of a jagged
batch, H heads of queries, Hkv of keys and values, D query/key and V value head size, S chosen blocks, W ranks of a
group.

All functions of ring attention also have the arguments

    dropout_p, softmax_scale       `dropout` and `scale` of `ring_flash_attention`
    causal, window_size, alibi_slopes, seed, group, backend            as in `ring_flash_attention`
    plan                           the same, for varlen functions only
    deterministic                  accepted; the result is always deterministic
    return_attn_probs              return (out, log-sum-exp, None) in place of out

and return the output of this rank's tokens in q's shape and dtype.

Source: the ring-flash-attention project (ring attention); Mustafar (arXiv 2505.22913); DeepSeek-V3.2-Exp.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hstu_sparse.bsa import bsa_attention
from hstu_sparse.cache.rotatekv.api import rotatekv_decompress, unpacked_attention
from hstu_sparse.core.jagged import check_storage, jagged_to_padded
from hstu_sparse.core.validation import check_bool, check_fraction, check_int, check_number, check_tensor
from hstu_sparse.indexer.api import padded_indexer_loss
from hstu_sparse.layer.norm_gate import norm_gate
from hstu_sparse.ring.api import ring_flash_attention
from hstu_sparse.ring.communication import Ring
from hstu_sparse.ring.plan import RingPlan, fixed_plan

__all__ = [
    "TritonHSTUBSAAttention",
    "compute_index_loss_sparse",
    "mustafar_attention_with_rope",
    "mustafar_decompress_with_hadamard_inverse",
    "triton_block_sparse_attn",
    "triton_hstu_attention_with_bsa",
    "triton_ring_flash_attn_func",
    "triton_ring_flash_attn_kvpacked_func",
    "triton_ring_flash_attn_qkvpacked_func",
    "triton_ring_flash_attn_varlen_func",
    "triton_ring_flash_attn_varlen_kvpacked_func",
    "triton_ring_flash_attn_varlen_qkvpacked_func",
    "zigzag_triton_ring_flash_attn_func",
    "zigzag_triton_ring_flash_attn_kvpacked_func",
    "zigzag_triton_ring_flash_attn_qkvpacked_func",
    "zigzag_triton_ring_flash_attn_varlen_func",
    "zigzag_triton_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_triton_ring_flash_attn_varlen_qkvpacked_func",
]

GateFunction = Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]
NORM_EPS = 1e-6


def triton_ring_flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
    deterministic=False, return_attn_probs=False, group=None, *, seed=None, backend="auto",
):  # fmt: skip
    """Compute ring attention where rank r holds the r-th of W equal parts of each sequence.

    q: [B, N, H, D], k, v: [B, N, Hkv, D], the same N on all ranks -> [B, N, H, D] (log-sum-exp: [B, H, N] fp32).
    """
    options = _ring_options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, seed, backend)
    return _padded_ring("triton_ring_flash_attn_func", q, k, v, group, return_attn_probs, False, options)


def zigzag_triton_ring_flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
    deterministic=False, return_attn_probs=False, group=None, *, seed=None, backend="auto",
):  # fmt: skip
    """Compute ring attention where rank r holds parts r and 2W-1-r of each sequence's 2W equal parts, concatenated.

    With a causal mask this gives all ranks the same work. Shapes as in `triton_ring_flash_attn_func`, N even.
    """
    options = _ring_options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, seed, backend)
    return _padded_ring("zigzag_triton_ring_flash_attn_func", q, k, v, group, return_attn_probs, True, options)


def triton_ring_flash_attn_varlen_func(
    q, k, v, cu_seqlens, max_seqlen=None, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    alibi_slopes=None, deterministic=False, return_attn_probs=False, group=None, *, seed=None, plan=None,
    backend="auto",
):  # fmt: skip
    """Compute `ring_flash_attention` where the ranks hold consecutive parts of each sequence.

    q: [T, H, D], k, v: [T, Hkv, D]; cu_seqlens: [B+1] integers from 0 to T; max_seqlen is accepted and ignored.
    -> [T, H, D] (log-sum-exp: [H, T] fp32).
    """
    options = _ring_options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, seed, backend)
    return _jagged_ring(q, k, v, cu_seqlens, group, plan, return_attn_probs, False, options)


def zigzag_triton_ring_flash_attn_varlen_func(
    q, k, v, cu_seqlens, max_seqlen=None, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    alibi_slopes=None, deterministic=False, return_attn_probs=False, group=None, *, seed=None, plan=None,
    backend="auto",
):  # fmt: skip
    """Compute `ring_flash_attention` where rank r holds chunks r and 2W-1-r of each sequence's 2W (`cut_sequences`)."""
    options = _ring_options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, seed, backend)
    return _jagged_ring(q, k, v, cu_seqlens, group, plan, return_attn_probs, True, options)


def _ring_options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, seed, backend) -> dict:
    """Return the options under their names in `ring_flash_attention`."""
    return dict(
        dropout=dropout_p, scale=softmax_scale, causal=causal, window_size=window_size, alibi_slopes=alibi_slopes,
        seed=seed, backend=backend,
    )  # fmt: skip


def _padded_ring(name, q, k, v, group, return_lse, zigzag, options):
    for letter, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{letter} must be a tensor, got {type(x).__name__}")
        check_storage(letter, x)
        if x.dim() != 4 or x.shape[:2] != q.shape[:2]:
            expected = "B, N" if x is q else f"B={q.shape[0]}, N={q.shape[1]}"
            raise ValueError(f"{letter} must be [{expected}, heads, D], got shape {list(x.shape)}")
    check_bool("return_attn_probs", return_lse)
    num_seqs, tokens = q.shape[:2]
    ring = Ring(group)
    zigzag = zigzag and ring.world > 1
    if zigzag and tokens % 2:
        raise ValueError(f"N must be even for zigzag, which gives each rank two equal chunks, got {tokens}")
    # Unlike jagged parts, padded ones have the same shape on all ranks.
    ring.check_agreement(name, {letter: list(x.shape) for letter, x in (("q", q), ("k", k), ("v", v))})
    plan = fixed_plan(num_seqs, tokens, ring.rank, ring.world, zigzag, q.device)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    offsets = plan.sequences[plan.rank]
    out, lse = ring_flash_attention(*flat, offsets, zigzag=zigzag, group=group, plan=plan, return_lse=True, **options)
    out = out.unflatten(0, (num_seqs, tokens))
    return (out, lse.view(-1, num_seqs, tokens).transpose(0, 1), None) if return_lse else out


def _jagged_ring(q, k, v, cu_seqlens, group, plan: RingPlan | None, return_lse, zigzag, options):
    check_bool("return_attn_probs", return_lse)
    out, lse = ring_flash_attention(
        q, k, v, cu_seqlens, zigzag=zigzag, group=group, plan=plan, return_lse=True, **options
    )  # fmt: skip
    return (out, lse, None) if return_lse else out


def triton_ring_flash_attn_kvpacked_func(q, kv, *args, **kwargs):
    """Compute `triton_ring_flash_attn_func` with kv: [B, N, 2, Hkv, D]."""
    return triton_ring_flash_attn_func(q, *_unpacked("kv", kv, 2, 5), *args, **kwargs)


def triton_ring_flash_attn_qkvpacked_func(qkv, *args, **kwargs):
    """Compute `triton_ring_flash_attn_func` with qkv: [B, N, 3, H, D]."""
    return triton_ring_flash_attn_func(*_unpacked("qkv", qkv, 3, 5), *args, **kwargs)


def zigzag_triton_ring_flash_attn_kvpacked_func(q, kv, *args, **kwargs):
    """Compute `zigzag_triton_ring_flash_attn_func` with kv: [B, N, 2, Hkv, D]."""
    return zigzag_triton_ring_flash_attn_func(q, *_unpacked("kv", kv, 2, 5), *args, **kwargs)


def zigzag_triton_ring_flash_attn_qkvpacked_func(qkv, *args, **kwargs):
    """Compute `zigzag_triton_ring_flash_attn_func` with qkv: [B, N, 3, H, D]."""
    return zigzag_triton_ring_flash_attn_func(*_unpacked("qkv", qkv, 3, 5), *args, **kwargs)


def triton_ring_flash_attn_varlen_kvpacked_func(q, kv, *args, **kwargs):
    """Compute `triton_ring_flash_attn_varlen_func` with kv: [T, 2, Hkv, D]."""
    return triton_ring_flash_attn_varlen_func(q, *_unpacked("kv", kv, 2, 4), *args, **kwargs)


def triton_ring_flash_attn_varlen_qkvpacked_func(qkv, *args, **kwargs):
    """Compute `triton_ring_flash_attn_varlen_func` with qkv: [T, 3, H, D]."""
    return triton_ring_flash_attn_varlen_func(*_unpacked("qkv", qkv, 3, 4), *args, **kwargs)


def zigzag_triton_ring_flash_attn_varlen_kvpacked_func(q, kv, *args, **kwargs):
    """Compute `zigzag_triton_ring_flash_attn_varlen_func` with kv: [T, 2, Hkv, D]."""
    return zigzag_triton_ring_flash_attn_varlen_func(q, *_unpacked("kv", kv, 2, 4), *args, **kwargs)


def zigzag_triton_ring_flash_attn_varlen_qkvpacked_func(qkv, *args, **kwargs):
    """Compute `zigzag_triton_ring_flash_attn_varlen_func` with qkv: [T, 3, H, D]."""
    return zigzag_triton_ring_flash_attn_varlen_func(*_unpacked("qkv", qkv, 3, 4), *args, **kwargs)


def _unpacked(name: str, packed: Tensor, parts: int, dims: int) -> tuple[Tensor, ...]:
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(packed).__name__}")
    check_storage(name, packed)
    if packed.dim() != dims or packed.shape[-3] != parts:
        shape = ["B, N", "T"][dims == 4]
        raise ValueError(f"{name} must be [{shape}, {parts}, heads, D], got shape {list(packed.shape)}")
    return packed.unbind(-3)


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
    """Compute `bsa_attention` on padded tensors: every sequence has length N.

    Args:
        q, k: [B, N, H, D], v: [B, N, H, V].
        u: ignored; the caller multiplies the output by u.
        g_cmp, g_slc, g_swa: [B, N, H]; g_swa may be None when window_size is 0.
        scale: factor of the scores, D ** -0.5 by default.

    Returns:
        (output [B, N, H, V], block indices [B, H, N, S] int32, ascending, padded with -1).
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
    flat = [None if x is None else x.flatten(0, 1) for x in (q, k, v, g_cmp, g_slc, g_swa)]
    options = dict(block_size=block_size, block_counts=block_counts, window_size=window_size, scale=scale)
    out, indices = bsa_attention(
        *flat[:3], offsets, max(length, 1), tuple(flat[3:]), **options, selection_group=_selection_group(block_size),
        return_block_indices=True,
    )  # fmt: skip
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
    """Compute one HSTU layer's block-sparse attention, times u after LayerNorm over all heads (without affine).

    Args:
        num_heads, attention_dim, linear_dim: H, D, V.
        q, k: [T, H*D], v, u: [T, H*V].
        x_offsets: [B + 1], first 0, last T.
        invalid_attn_mask: only its last size, N, is read; the mask is always causal.
        gate_model: q [T, H, D] -> (g_cmp, g_slc, g_swa), each [T, H].

    Returns:
        (output [T, H*V], padded q [B, N, H, D], padded k [B, N, H, D]).
    """
    if not isinstance(invalid_attn_mask, Tensor) or not invalid_attn_mask.dim():
        raise TypeError("invalid_attn_mask must be a tensor whose last size is N")
    check_storage("invalid_attn_mask", invalid_attn_mask)
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
    v = v.unflatten(-1, (num_heads, linear_dim))
    options = dict(block_size=block_size, block_counts=block_counts, window_size=window_size)
    out = bsa_attention(
        q, k, v, x_offsets, length, gate_model(q), **options, selection_group=_selection_group(block_size)
    )
    gated = norm_gate(out.flatten(1), u, eps=NORM_EPS)
    return gated, jagged_to_padded(q, x_offsets, length), jagged_to_padded(k, x_offsets, length)


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
        sizes = dict(embedding_dim=embedding_dim, linear_hidden_dim=linear_hidden_dim, attention_dim=attention_dim)
        sizes |= dict(num_heads=num_heads, block_counts=block_counts, block_size=block_size)
        for name, size in sizes.items():
            check_int(name, size, 1)
        check_int("window_size", window_size, 0)
        self.num_heads, self.attention_dim, self.linear_hidden_dim = num_heads, attention_dim, linear_hidden_dim
        self.block_counts, self.block_size, self.window_size = block_counts, block_size, window_size
        self.dropout = check_fraction("dropout", dropout)
        self.norm = nn.LayerNorm(embedding_dim, eps=NORM_EPS)
        self.sizes = [num_heads * n for n in (linear_hidden_dim, linear_hidden_dim, attention_dim, attention_dim)]
        self.uvqk = nn.Parameter(torch.empty(embedding_dim, sum(self.sizes)).normal_(std=0.02))
        self.output = nn.Linear(num_heads * linear_hidden_dim, embedding_dim)
        nn.init.xavier_uniform_(self.output.weight)

    def forward(
        self, x: Tensor, x_offsets: Tensor, invalid_attn_mask: Tensor, gate_model: GateFunction
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute x [T, embedding_dim] -> (output [T, embedding_dim], padded q and padded k [B, N, H, D])."""
        u, v, q, k = F.silu(self.norm(x) @ self.uvqk).split(self.sizes, dim=-1)
        sizes = self.num_heads, self.attention_dim, self.linear_hidden_dim
        choice = self.block_counts, self.block_size, self.window_size
        attended, padded_q, padded_k = triton_hstu_attention_with_bsa(
            *sizes, q, k, v, u, x_offsets, invalid_attn_mask, gate_model, *choice
        )
        return self.output(F.dropout(attended, self.dropout, self.training)), padded_q, padded_k


def _selection_group(block_size: int) -> int:
    """Return the selection group: in the research code an item and its action are adjacent and share a choice."""
    return 2 if block_size % 2 == 0 else 1


def compute_index_loss_sparse(
    query: Tensor,
    key: Tensor,
    index_score: Tensor,
    indices: Tensor,
    scaling: float,
    chunk_offset: int = 0,
    eps: float = 1e-10,
    backend: str = "auto",
) -> Tensor:
    """Compute `hstu_sparse.indexer.api.padded_indexer_loss`, with `scaling` for its `scale`."""
    scale = check_number("scaling", scaling)
    return padded_indexer_loss(
        query, key, index_score, indices, scale=scale, chunk_offset=chunk_offset, eps=eps, backend=backend
    )


# The two stages of attention over a compressed cache: decompress its keys and values, then attend to them.
mustafar_decompress_with_hadamard_inverse = rotatekv_decompress
mustafar_attention_with_rope = unpacked_attention
