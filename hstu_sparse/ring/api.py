"""Define ring attention with softmax: `ring_flash_attention` and its validation.

Letters: B sequences, T tokens of this rank, H heads of queries, Hkv of keys and values, D query/key and V value head
size, W ranks of the group.
"""

import math

import torch

from hstu_sparse.core.jagged import check_jagged, check_storage
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import check_bool, check_heads
from hstu_sparse.flash.api import check_options, choose_flash_backend, flash_attention
from hstu_sparse.ring.communication import Ring
from hstu_sparse.ring.plan import MAX_LENGTH, RingPlan, check_plan, check_plan_fits, ring_plan
from hstu_sparse.ring.softmax import RingSoftmax, check_plan_for_cute


@without_autocast
def ring_flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    zigzag: bool = False,
    group=None,
    plan: RingPlan | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute flash_attention of jagged sequences that are distributed over the ranks of a group.

    Each sequence is divided into W contiguous parts in the order of the ranks. With `zigzag` it is divided into 2W
    chunks, and rank r has chunks r and 2W-1-r, concatenated, so that with a causal mask all ranks have the same work.
    `cut_sequences` returns both.

    All ranks must call the function with the same options and the same B. The first call of a group with these options
    compares them; with HSTU_SPARSE_DEBUG=1 every call does. With one process, or without torch.distributed, the result
    is that of flash_attention.

    Args:
        q: [T, H, D], the tokens of this rank, fp16, bf16 or fp32 (the reference also fp64); any strides.
        k, v: [T, Hkv, D] and [T, Hkv, V], dtype of q. Hkv divides H.
        seq_offsets: [B+1] int32 or int64, from 0 to T: this rank's parts of B sequences, which may be empty.
        scale, causal, window_size, alibi_slopes, dropout: as `flash_attention`, with positions in the whole sequences.
        seed: int64 tensor of one element on q's device; drawn from torch's generator by default. With equal seeds on
            all ranks the dropout mask is that of a single device.
        zigzag: see above.
        group: a torch.distributed process group, by default all processes. An NCCL group should be created with
            ProcessGroupNCCL.Options(is_high_priority_stream=True), see docs/ring.md.
        plan: `ring_plan` of seq_offsets, for many calls. Without a plan, each call exchanges the offsets of the ranks,
            which waits for the device.
        return_lse: also return the log-sum-exp of the scores, [H, T], fp32 (fp64 for fp64), without a gradient.
        backend: as `flash_attention`. "cute" supports a window only if all sequences have the same length.

    Returns:
        [T, H, V], dtype of q, and the log-sum-exp if requested. Gradients flow to q, k and v, in their dtypes.
        Results are deterministic: sums over the ring are in fp32, in a fixed order.

    Examples:
        >>> q, k, v = torch.randn(3, 12, 2, 16)  # without torch.distributed: a ring of one process
        >>> seq_offsets = torch.tensor([0, 8, 12])
        >>> out = hstu_sparse.ring_flash_attention(q, k, v, seq_offsets, causal=True)
        >>> torch.allclose(out, hstu_sparse.flash_attention(q, k, v, seq_offsets, causal=True))
        True

    Raises:
        TypeError, ValueError: with the expected and the actual value; on every rank if ranks disagree.
        RuntimeError: a rank does not respond within the group's timeout; the message names it, or both neighbours.

    Source: Liu et al., Ring Attention (arXiv 2310.01889); zigzag: the ring-flash-attention project.
    """
    name = "ring_flash_attention"
    check_bool("zigzag", zigzag)
    sizes = check_heads(q, k, v)
    check_jagged(seq_offsets, MAX_LENGTH, q=q, k=k, v=v)
    check_plan(plan)
    check_bool("return_lse", return_lse)
    ring = Ring(group)
    if ring.world == 1:
        if plan is not None:
            check_plan_fits(plan, seq_offsets, ring)
        return flash_attention(
            q, k, v, seq_offsets, scale=scale, causal=causal, window_size=window_size, alibi_slopes=alibi_slopes,
            dropout=dropout, seed=seed, return_lse=return_lse, backend=backend,
        )  # fmt: skip
    num_seqs = seq_offsets.shape[0] - 1
    options = check_options(q, num_seqs, scale, causal, window_size, alibi_slopes, dropout, seed)
    chosen = choose_flash_backend(name, backend, q, sizes["V"], (math.inf, 1), options)
    shapes = {letter: list(x.shape[1:]) for letter, x in (("q", q), ("k", k), ("v", v))}
    numbers = [options.scale, options.left, options.right, options.dropout, alibi_slopes is not None, zigzag]
    ring.check_agreement(name, {**shapes, "dtype": str(q.dtype), "options": numbers, "backend": chosen})
    if plan is None:
        check_storage("seq_offsets", seq_offsets, values=True)
        plan = ring_plan(seq_offsets, zigzag=zigzag, group=group)
    elif plan.tokens[plan.rank] != q.shape[0]:
        raise ValueError(f"plan is for T={plan.tokens[plan.rank]}, got T={q.shape[0]}")
    else:
        check_plan_fits(plan, seq_offsets, ring, 2 if zigzag else 1)
    if chosen == "cute":
        # All ranks must choose the same backend, whatever their numbers of tokens.
        size = sum(plan.tokens), ring.world * num_seqs
        chosen = choose_flash_backend(name, backend, q, sizes["V"], size, options)
        check_plan_for_cute(name, plan, options)
    out, lse = RingSoftmax.apply(q, k, v, ring, plan, options, chosen)
    return (out, lse) if return_lse else out
