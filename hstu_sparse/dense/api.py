"""Dense HSTU attention over jagged tensors: the public function, its validation and the choice of implementation.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key head size, V value head size.
"""

import torch

from hstu_sparse.dense.reference import hstu_attention_reference
from hstu_sparse.jagged import check_jagged
from hstu_sparse.relative_bias import RelativeBias, check_bias

BACKENDS = ("auto", "triton", "reference")


def hstu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    *,
    alpha: float | None = None,
    num_targets: torch.Tensor | None = None,
    window_size: int = 0,
    bias: RelativeBias | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Causal attention with SiLU in place of softmax, a relative bias, and 1/N in place of the normaliser.

        o[t] = (1/N) * sum over visible s of SiLU(alpha * q[t].k[s] + b(t, s)) * v[s]

    Token t sees s <= t of its own sequence; with `window_size` W > 0 only t - s < W. With `num_targets` the last m_b
    tokens of sequence b are candidates: a candidate sees the history before all candidates, and itself; in window and
    bias it counts as standing at the first candidate's position.

    Args:
        q, k: [T, H, D], fp16, bf16 or fp32 (the reference also fp64); any strides.
        v: [T, H, V], dtype of q.
        seq_offsets: [B+1], int32 or int64, from 0 to T.
        max_seq_len: N, at least the longest sequence.
        alpha: scale of the scores, D ** -0.5 by default.
        num_targets: [B] int32 or int64, candidates at each sequence's end, 0 <= m_b <= n_b.
        window_size: W in tokens, 0 for none.
        bias: b(t, s) by relative position and time, see `RelativeBias`; both tables get gradients. On CUDA a time
            table has the buckets of a token's nearest neighbours kept for the backward pass, a byte each, at most 512
            for all heads.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [T, H, V], dtype of q. Gradients flow to q, k, v and both tables. On CUDA they are the same bits in every run,
        except the tables' in fp32, whose last bits depend on the order of additions.

    Raises:
        TypeError, ValueError: what was expected and what came.

    Source: Zhai et al., Actions Speak Louder than Words, ICML 2024, section 3.2 (arXiv 2402.17152).
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    _check(q, k, v, seq_offsets, max_seq_len, num_targets, window_size)
    bias = check_bias(bias, max_seq_len, q.shape[0], q.device)
    alpha = q.shape[2] ** -0.5 if alpha is None else float(alpha)
    options = dict(alpha=alpha, num_targets=num_targets, window_size=window_size)
    if backend == "auto":
        backend = "triton" if q.is_cuda else "reference"
    if backend == "reference":
        return hstu_attention_reference(q, k, v, seq_offsets, max_seq_len, **options, bias=bias)
    from hstu_sparse.dense.triton import hstu_attention_triton

    return hstu_attention_triton(q, k, v, seq_offsets, max_seq_len, **options, bias=bias)


def _check(q, k, v, seq_offsets, max_seq_len, num_targets, window_size):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != 3:
            raise ValueError(f"{name} must be [T, H, {'V' if name == 'v' else 'D'}], got shape {list(x.shape)}")
        if not x.is_floating_point() or x.dtype != q.dtype:
            raise TypeError(f"{name} must be floating point and of q's dtype {q.dtype}, got {x.dtype}")
    check_jagged(seq_offsets, max_seq_len, q=q, k=k, v=v)
    if k.shape != q.shape:
        raise ValueError(f"k must have q's shape {list(q.shape)}, got {list(k.shape)}")
    if v.shape[1] != q.shape[1]:
        raise ValueError(f"v must have H={q.shape[1]} heads as q, got {v.shape[1]}")
    if window_size < 0:
        raise ValueError(f"window_size must be 0 (none) or positive, got {window_size}")
    if num_targets is not None:
        if num_targets.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"num_targets must be int32 or int64, got {num_targets.dtype}")
        if num_targets.dim() != 1 or num_targets.shape[0] != seq_offsets.shape[0] - 1:
            raise ValueError(f"num_targets must be [B={seq_offsets.shape[0] - 1}], got {list(num_targets.shape)}")
        if num_targets.device != q.device:
            raise ValueError(f"num_targets is on {num_targets.device}, q on {q.device}")
