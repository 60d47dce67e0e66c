"""Paged attention: the public function, its validation and the choice of implementation.

Letters: Tq new tokens, B sequences, P columns of the page table, H heads, D query/key and V value head size, N
max_seq_len.
"""

import torch
from torch import Tensor

from hstu_sparse.bias.relative import RelativeBias, check_bias
from hstu_sparse.cache.paged.reference import Queries, check_scoring, paged_reference
from hstu_sparse.cache.pool import PagePool
from hstu_sparse.core.jagged import check_jagged, readable
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import INTEGER, check_bool, check_int, check_tensor, choose_backend


@without_autocast
@torch.no_grad()
def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    pool: PagePool,
    pages: Tensor,
    lengths: Tensor,
    max_seq_len: int,
    *,
    layer: int = 0,
    candidates: bool = False,
    window_size: int = 0,
    num_context: Tensor | None = None,
    activation: str = "silu",
    scale: float | None = None,
    normalizer: float | None = None,
    bias: RelativeBias | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute attention of new tokens to the tokens of their sequence in a pool, and to themselves.

        silu:     o[t] = (1/N) * sum over s of SiLU(scale * q[t].k[s] + b(t, s)) * v[s]
        softmax:  o[t] = sum over s of softmax(scale * q[t].k[s] + b(t, s)) * v[s]

    By default the new tokens follow those in the pool: token i of sequence b stands at position p = lengths[b] + i. It
    sees positions s < p as the pages have them, and itself as k and v are. Where a sequence has more than one new
    token, they must have been written before (`PagePool.write`, with the same offsets, pages and lengths): so it does
    not matter in which portions tokens come, whatever the pages' format.

    With candidates=True each new token stands at position lengths[b], and sees the positions before it and itself, but
    no other new token. Nothing is read from the pages behind lengths[b]. With `window_size` W > 0 a token at position p
    sees positions s with p - s < W alone. Where each sequence has one new token both are
    the same, bit for bit, and candidates=True is faster with a bias.

    With `num_context` the first tokens of a sequence are context, as in `hstu_attention`: they see one another and
    nothing else, all others see them whatever the window, and they have the position before the first event's. They
    come all at once, as the first new tokens of their sequence. Their times are the caller's: the first event's
    for the results of `hstu_attention`.

    Args:
        q: [Tq, H, D], k: [Tq, H, D], v: [Tq, H, V]: the new tokens, fp32, bf16 or fp16 (the reference also fp64), which
            need not be the pool's dtype; any strides. D and V from 16 to 256 for the kernels.
        q_offsets: [B+1], int32 or int64, from 0 to Tq: the new tokens of each sequence, which may be none.
        pool: of PageFormat(H, D, V, ...); unpruned, and not of 3 bits.
        pages: [B, P] int32, of `PagePool.table`. New tokens of a row of -1, which is padding, see themselves alone; the
            results of others that come behind dropped tokens (`PagePool.write`) are arbitrary.
        lengths: [B], int32 or int64: tokens of each sequence in the pool before the new ones, which may be none.
        max_seq_len: N, at least the tokens of the longest sequence, new ones included (candidates: one of them).
        layer: whose pages of the pool.
        candidates: see above.
        window_size: W in tokens, the token itself included, 0 for none.
        num_context: [B], int32 or int64, the context tokens of each sequence, cached or new; None for none.
        activation: "silu" or "softmax".
        scale: factor of the scores, D ** -0.5 by default.
        normalizer: a finite number above 0 in place of N in the factor 1/N of silu; `max_seq_len` by default.
        bias: position table of at least max_seq_len entries, read at p - s; time table with the times of the new
            tokens, `timestamps` and `query_timestamps` [Tq], those of cached tokens being the pool's
            (`PagePool.write_timestamps`). With candidates both are [B]: all candidates of a sequence share a time.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [Tq, H, V], dtype of q. No gradients. Another order of candidates gives the same results in that order, bit for
        bit.

    Examples:
        >>> pool = hstu_sparse.PagePool(hstu_sparse.PageFormat(1, 16, 16), 8)  # 1 head of 16, 8 pages
        >>> row = pool.reserve((), 3)  # room for 3 tokens of one user
        >>> pages, length = pool.table([row]), torch.tensor([0])
        >>> k, v, offsets = torch.zeros(3, 1, 16), torch.ones(3, 1, 16), torch.tensor([0, 3])
        >>> pool.write(0, k, v, offsets, pages, length)
        >>> q = new = torch.zeros(1, 1, 16)
        >>> out = hstu_sparse.paged_attention(
        ...     q, new, new, torch.tensor([0, 1]), pool, pages, torch.tensor([3]), 4, activation="softmax"
        ... )
        >>> out[0, 0, 0]  # the mean of three cached ones and the new zero
        tensor(0.7500)

    Raises:
        TypeError, ValueError: what was expected and what came.

    Source: M-FALCON of Zhai et al., Actions Speak Louder than Words (arXiv 2402.17152); paged caches as in vLLM (arXiv
    2309.06180).
    """
    if not isinstance(pool, PagePool):
        raise TypeError(f"pool must be a PagePool, got {type(pool).__name__}")
    form = pool.format
    if form.bits == 3 or form.sparsity:
        raise ValueError(
            f"pages must be as they are or of 2, 4 or 8 bits unpruned, got bits={form.bits}, sparsity={form.sparsity}: "
            "hstu_sparse.rotatekv_attention takes those"
        )
    sizes = {"H": form.heads, "D": form.head_size, "V": form.value_size}
    check_tensor("q", q, "Tq H D", sizes, device=pool.device)
    check_tensor("k", k, "Tq H D", sizes, dtype=q.dtype, device=pool.device)
    check_tensor("v", v, "Tq H V", sizes, dtype=q.dtype, device=pool.device)
    check_int("max_seq_len", max_seq_len, 1)
    check_jagged(q_offsets, max(1, sizes["Tq"]), q=q, k=k, v=v)
    check_int("layer", layer, 0, pool.layers - 1)
    check_bool("candidates", candidates)
    check_int("window_size", window_size, 0)
    pool.check_table(pages, lengths, None if candidates else q_offsets)
    if lengths.shape[0] != q_offsets.shape[0] - 1:
        raise ValueError(f"lengths must be [B={q_offsets.shape[0] - 1}], got {list(lengths.shape)}")
    if num_context is not None:
        check_tensor("num_context", num_context, "B", {"B": lengths.shape[0]}, dtype=INTEGER, device=pool.device)
    if readable(lengths) and len(lengths):
        new = q_offsets.diff().clamp(max=1) if candidates else q_offsets.diff()
        if num_context is not None:
            check_context(num_context, lengths, new)
        longest = int((lengths + new).max())
        if longest > max_seq_len:
            raise ValueError(f"a sequence has {longest} tokens, new ones included, more than max_seq_len={max_seq_len}")
    bias = check_bias(bias, max_seq_len, lengths.shape[0] if candidates else sizes["Tq"], q.device)
    scoring = check_scoring(activation, scale, normalizer, bias, max_seq_len, sizes["D"])._replace(window=window_size)
    queries = Queries(q, k, v, q_offsets, lengths, candidates, num_context)
    if choose_backend(backend, q, "paged_attention") == "reference":
        return paged_reference(queries, pool, layer, pages, scoring)
    from hstu_sparse.cache.paged.launch import attend_to_pool

    return attend_to_pool(queries, pool, layer, pages, scoring)


def check_context(num_context: Tensor, lengths: Tensor, new: Tensor) -> None:
    """Raise ValueError unless the context of each sequence, [B], is in the pool or begins the new tokens."""
    complete = (num_context <= lengths) | (lengths == 0) & (num_context <= new) | (new == 0)
    for b in (~complete | (num_context < 0)).nonzero()[:, 0].tolist():
        raise ValueError(
            f"num_context of sequence {b} must be from 0 to its cached tokens, {int(lengths[b])}, or to its new ones, "
            f"{int(new[b])}, if none are cached, got {int(num_context[b])}"
        )
