"""Ring attention: public functions, their validation, the single device as a special case.

Letters: B sequences, N tokens of each that this rank holds, T tokens that it holds in all, H heads of queries, Hkv of
keys and values, D head size, W ranks of the group.

Every form takes, besides its own arguments,

    dropout_p              probability of zeroing a weight, with `seed`: an int64 tensor of one element, by default
                           drawn from torch's generator. Equal seeds on all ranks give the mask of a single device
    softmax_scale          of the scores, D ** -0.5 by default
    causal, window_size    as flash_attention
    alibi_slopes           [H] or [B, H] fp32, the same on all ranks
    deterministic          accepted and always so: gradients are the same bits in every run
    return_attn_probs      return (out, log-sum-exp, None) in place of out
    group                  a torch.distributed process group, by default all processes. With one process, or without
                           torch.distributed, the result is flash_attention's. Over NCCL it should have been made with
                           ProcessGroupNCCL.Options(is_high_priority_stream=True): see docs/ring.md
    backend                "triton", "reference" or "auto": triton for CUDA tensors, reference for CPU tensors

and returns the output of this rank's tokens in q's shape and dtype. Gradients flow to q, k and v, in their dtypes; sums
over the ring are in fp32. All ranks have to call with the same shapes and options: a group's first call with them
compares them, each call with HSTU_SPARSE_DEBUG=1, and a difference raises ValueError on every rank; a rank that is lost
raises RuntimeError, which names it, within the group's timeout.

Source: Liu et al., Ring Attention (arXiv 2310.01889); the zigzag placement and the functions' forms: the
ring-flash-attention project.
"""

import torch

from hstu_sparse.jagged import check_jagged
from hstu_sparse.ring.communication import Ring
from hstu_sparse.ring.flash.api import check_heads, check_options, flash_attention
from hstu_sparse.ring.plan import RingPlan, check_plan, fixed_plan, ring_plan
from hstu_sparse.ring.softmax import RingSoftmax
from hstu_sparse.validation import check_kernel, choose_backend


def triton_ring_flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
    deterministic=False, return_attn_probs=False, group=None, *, seed=None, backend="auto",
):  # fmt: skip
    """Ring attention; rank r holds the r-th of W equal stretches of each sequence.

    q: [B, N, H, D], k, v: [B, N, Hkv, D], N the same on all ranks -> [B, N, H, D] (log-sum-exp: [B, H, N] fp32).
    """
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, seed
    return _fixed("triton_ring_flash_attn_func", q, k, v, options, return_attn_probs, group, backend, zigzag=False)


def zigzag_triton_ring_flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
    deterministic=False, return_attn_probs=False, group=None, *, seed=None, backend="auto",
):  # fmt: skip
    """Ring attention; of 2W equal stretches of each sequence rank r holds r and 2W-1-r, one behind the other.

    With a causal mask all ranks then have the same work. Shapes as `triton_ring_flash_attn_func`, N even.
    """
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, seed
    return _fixed(
        "zigzag_triton_ring_flash_attn_func", q, k, v, options, return_attn_probs, group, backend, zigzag=True
    )


def triton_ring_flash_attn_varlen_func(
    q, k, v, cu_seqlens, max_seqlen=None, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    alibi_slopes=None, deterministic=False, return_attn_probs=False, group=None, *, seed=None, plan=None,
    backend="auto",
):  # fmt: skip
    """Ring attention over jagged sequences; rank r holds a stretch of each, behind those of the ranks before it.

    q: [T, H, D], k, v: [T, Hkv, D]; cu_seqlens: [B+1] integers from 0 to T, this rank's own: stretches may be of any
    length, 0 included, but all ranks have the same B. max_seqlen is accepted and not needed. plan: `ring_plan` of
    cu_seqlens, made once for many calls; without one each call makes it, which waits for the device.
    -> [T, H, D] (log-sum-exp: [H, T] fp32).
    """
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, seed
    return _varlen(
        "triton_ring_flash_attn_varlen_func", q, k, v, cu_seqlens, options, return_attn_probs, group, plan, backend,
        zigzag=False,
    )  # fmt: skip


def zigzag_triton_ring_flash_attn_varlen_func(
    q, k, v, cu_seqlens, max_seqlen=None, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    alibi_slopes=None, deterministic=False, return_attn_probs=False, group=None, *, seed=None, plan=None,
    backend="auto",
):  # fmt: skip
    """The same where rank r holds chunks r and 2W-1-r of 2W of each sequence, as `cut_sequences` cuts them."""
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, seed
    return _varlen(
        "zigzag_triton_ring_flash_attn_varlen_func", q, k, v, cu_seqlens, options, return_attn_probs, group, plan,
        backend, zigzag=True,
    )  # fmt: skip


def triton_ring_flash_attn_kvpacked_func(q, kv, *args, **kwargs):
    """`triton_ring_flash_attn_func` with kv: [B, N, 2, Hkv, D]."""
    return triton_ring_flash_attn_func(q, *_unpacked("kv", kv, 2, 5), *args, **kwargs)


def triton_ring_flash_attn_qkvpacked_func(qkv, *args, **kwargs):
    """`triton_ring_flash_attn_func` with qkv: [B, N, 3, H, D]."""
    return triton_ring_flash_attn_func(*_unpacked("qkv", qkv, 3, 5), *args, **kwargs)


def zigzag_triton_ring_flash_attn_kvpacked_func(q, kv, *args, **kwargs):
    """`zigzag_triton_ring_flash_attn_func` with kv: [B, N, 2, Hkv, D]."""
    return zigzag_triton_ring_flash_attn_func(q, *_unpacked("kv", kv, 2, 5), *args, **kwargs)


def zigzag_triton_ring_flash_attn_qkvpacked_func(qkv, *args, **kwargs):
    """`zigzag_triton_ring_flash_attn_func` with qkv: [B, N, 3, H, D]."""
    return zigzag_triton_ring_flash_attn_func(*_unpacked("qkv", qkv, 3, 5), *args, **kwargs)


def triton_ring_flash_attn_varlen_kvpacked_func(q, kv, *args, **kwargs):
    """`triton_ring_flash_attn_varlen_func` with kv: [T, 2, Hkv, D]."""
    return triton_ring_flash_attn_varlen_func(q, *_unpacked("kv", kv, 2, 4), *args, **kwargs)


def triton_ring_flash_attn_varlen_qkvpacked_func(qkv, *args, **kwargs):
    """`triton_ring_flash_attn_varlen_func` with qkv: [T, 3, H, D]."""
    return triton_ring_flash_attn_varlen_func(*_unpacked("qkv", qkv, 3, 4), *args, **kwargs)


def zigzag_triton_ring_flash_attn_varlen_kvpacked_func(q, kv, *args, **kwargs):
    """`zigzag_triton_ring_flash_attn_varlen_func` with kv: [T, 2, Hkv, D]."""
    return zigzag_triton_ring_flash_attn_varlen_func(q, *_unpacked("kv", kv, 2, 4), *args, **kwargs)


def zigzag_triton_ring_flash_attn_varlen_qkvpacked_func(qkv, *args, **kwargs):
    """`zigzag_triton_ring_flash_attn_varlen_func` with qkv: [T, 3, H, D]."""
    return zigzag_triton_ring_flash_attn_varlen_func(*_unpacked("qkv", qkv, 3, 4), *args, **kwargs)


def _unpacked(name: str, packed: torch.Tensor, parts: int, dims: int) -> tuple[torch.Tensor, ...]:
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(packed).__name__}")
    if packed.dim() != dims or packed.shape[-3] != parts:
        shape = ["B, N", "T"][dims == 4]
        raise ValueError(f"{name} must be [{shape}, {parts}, H, D], got shape {list(packed.shape)}")
    return packed.unbind(-3)


def _fixed(name, q, k, v, options, return_lse, group, backend, *, zigzag):
    for letter, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{letter} must be a tensor, got {type(x).__name__}")
        if x.dim() != 4 or x.shape[:2] != q.shape[:2]:
            expected = "B, N" if x is q else f"B={q.shape[0]}, N={q.shape[1]}"
            raise ValueError(f"{letter} must be [{expected}, heads, D], got shape {list(x.shape)}")
    batch, tokens = q.shape[:2]
    ring = Ring(group)
    if zigzag and ring.world > 1 and tokens % 2:
        raise ValueError(f"zigzag: each rank holds two chunks of one length, so N must be even, got {tokens}")

    def plan():
        return fixed_plan(batch, tokens, ring.rank, ring.world, zigzag and ring.world > 1, q.device)

    shapes = {letter: list(x.shape) for letter, x in (("q", q), ("k", k), ("v", v))}
    flat = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = _attend(name, ring, *flat, plan, batch, options, backend, shapes)
    out = out.unflatten(0, (batch, tokens))
    return (out, lse.view(-1, batch, tokens).transpose(0, 1), None) if return_lse else out


def _varlen(name, q, k, v, cu_seqlens, options, return_lse, group, plan, backend, *, zigzag):
    check_heads(q, k, v)
    check_jagged(cu_seqlens, 2**31 - 1, q=q, k=k, v=v)
    check_plan(plan)
    ring = Ring(group)

    def make():
        if plan is None:
            return ring_plan(cu_seqlens, zigzag=zigzag and ring.world > 1, group=group)
        if plan.tokens[plan.rank] != q.shape[0] or plan.pieces != (2 if zigzag and ring.world > 1 else 1):
            raise ValueError(
                f"plan is for T={plan.tokens[plan.rank]} and {plan.pieces} pieces, got T={q.shape[0]}, {zigzag=}"
            )
        return plan

    shapes = {letter: list(x.shape[1:]) for letter, x in (("q", q), ("k", k), ("v", v))}
    out, lse = _attend(name, ring, q, k, v, make, cu_seqlens.shape[0] - 1, options, backend, shapes, cu_seqlens)
    return (out, lse, None) if return_lse else out


def _attend(name, ring, q, k, v, plan, batch, options, backend, shapes, cu_seqlens=None):
    """(out, log-sum-exp) of flat q, k, v; `plan` makes the RingPlan."""
    dropout, scale, causal, window, slopes, seed = options
    if ring.world == 1:
        if cu_seqlens is None:
            cu_seqlens = plan().offsets[0]
        return flash_attention(
            q, k, v, cu_seqlens, scale=scale, causal=causal, window_size=window, alibi_slopes=slopes,
            dropout=dropout, seed=seed, return_lse=True, backend=backend,
        )  # fmt: skip
    sizes = check_heads(q, k, v)
    chosen = check_options(q, batch, scale, causal, window, slopes, dropout, seed)
    backend = choose_backend(backend, q, name)
    if backend == "triton":
        check_kernel(name, q, {"D": sizes["D"], "V": sizes["V"]})
    numbers = [chosen.scale, chosen.left, chosen.right, chosen.dropout, slopes is not None]
    ring.agree(name, {**shapes, "dtype": str(q.dtype), "options": numbers, "backend": backend})
    made: RingPlan = plan()
    return RingSoftmax.apply(q, k, v, ring, made, chosen, backend)
