"""Define `paged_attention` and its validation.

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
    """Compute attention of new tokens to the cached tokens of their sequence in a pool, and to themselves.

        silu:     o[t] = (1/N) * sum over s of SiLU(scale * q[t].k[s] + b(t, s)) * v[s]
        softmax:  o[t] = sum over s of softmax(scale * q[t].k[s] + b(t, s)) * v[s]

    By default new token i of sequence b has position p = lengths[b] + i. It attends to positions s < p in the pages,
    and to itself by k and v. If a sequence has more than one new token, write them first (`PagePool.write`, with the
    same offsets, pages and lengths). Results do not depend on how tokens are divided into calls, whatever the format.

    With candidates=True all new tokens have position lengths[b]. Each attends to earlier positions and to itself, not
    to other candidates. Cached positions from lengths[b] on are not read. If each sequence has one new token, both
    modes return the same bits, and candidates=True is faster with a bias.

    With `window_size` W > 0 a token at position p attends to positions s with p - s < W only.

    With `num_context` the first tokens of a sequence are context, as in `hstu_attention`: they attend to one another
    only, all other tokens attend to them whatever the window, and they have the position before the first event. All
    context tokens of a sequence must come in one call, as its first new tokens. To get the results of
    `hstu_attention`, give them the time of the first event.

    Args:
        q: [Tq, H, D], k: [Tq, H, D], v: [Tq, H, V]: the new tokens, fp32, bf16 or fp16 (the reference also fp64); the
            dtype may differ from the pool's; any strides. The kernels support D and V up to 256.
        q_offsets: [B+1], int32 or int64, from 0 to Tq: the new tokens of each sequence, possibly none.
        pool: a pool of PageFormat(H, D, V, ...) without sparsity and with other than 3 bits.
        pages: [B, P] int32, the result of `PagePool.table`. New tokens of a row of -1, which pads the batch, attend to
            themselves only. Results of new tokens after dropped ones (`PagePool.write`) are undefined.
        lengths: [B], int32 or int64: the number of cached tokens of each sequence before the new ones, possibly 0.
        max_seq_len: N, at least the length of the longest sequence including its new tokens (candidates: one of them).
        layer: the layer of the pool.
        candidates: see above.
        window_size: W in tokens, including the token itself; 0 for no window.
        num_context: [B], int32 or int64, the number of context tokens of each sequence, cached or new; None for none.
        activation: "silu" or "softmax".
        scale: factor of the scores, D ** -0.5 by default.
        normalizer: a finite number above 0 in place of N in the factor 1/N of silu; `max_seq_len` by default.
        bias: the position table has at least max_seq_len entries, read at p - s. `timestamps` and `query_timestamps`
            are those of the new tokens, [Tq], or [B] with candidates, since all candidates of a sequence have the same
            time. The timestamps of cached tokens are in the pool (`PagePool.write_timestamps`).
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [Tq, H, V], dtype of q. Not differentiable. Results of candidates do not depend on their order.

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
        >>> out[0, 0, 0]  # the mean of three cached values 1 and the new value 0
        tensor(0.7500)

    Raises:
        TypeError, ValueError: with the expected and the actual value.

    Source: M-FALCON of Zhai et al., Actions Speak Louder than Words (arXiv 2402.17152); paged caches as in vLLM (arXiv
    2309.06180).
    """
    if not isinstance(pool, PagePool):
        raise TypeError(f"pool must be a PagePool, got {type(pool).__name__}")
    form = pool.format
    if form.bits == 3 or form.sparsity:
        raise ValueError(
            "paged_attention supports bits=None, 2, 4 or 8 and sparsity=0, got "
            f"bits={form.bits}, sparsity={form.sparsity}; use hstu_sparse.rotatekv_attention"
        )
    sizes = {"H": form.heads, "D": form.head_size, "V": form.value_size}
    check_tensor("q", q, "Tq H D", sizes, device=pool.device)
    check_tensor("k", k, "Tq H D", sizes, dtype=q.dtype, device=pool.device)
    check_tensor("v", v, "Tq H V", sizes, dtype=q.dtype, device=pool.device)
    check_int("max_seq_len", max_seq_len, 1)
    check_jagged(q_offsets, max(1, sizes["Tq"]), name="q_offsets", q=q, k=k, v=v)
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
            raise ValueError(f"a sequence has {longest} tokens with its new ones, more than max_seq_len={max_seq_len}")
    bias = check_bias(bias, max_seq_len, lengths.shape[0] if candidates else sizes["Tq"], q.device)
    scoring = check_scoring(activation, scale, normalizer, bias, max_seq_len, sizes["D"])._replace(window=window_size)
    queries = Queries(q, k, v, q_offsets, lengths, candidates, num_context)
    if choose_backend(backend, q, "paged_attention") == "reference":
        return paged_reference(queries, pool, layer, pages, scoring)
    from hstu_sparse.cache.paged.launch import attend_to_pool

    return attend_to_pool(queries, pool, layer, pages, scoring)


def check_context(num_context: Tensor, lengths: Tensor, new: Tensor) -> None:
    """Raise ValueError unless the context of each sequence is cached, or is at the beginning of its new tokens."""
    complete = (num_context <= lengths) | (lengths == 0) & (num_context <= new) | (new == 0)
    for b in (~complete | (num_context < 0)).nonzero()[:, 0].tolist():
        raise ValueError(
            f"num_context of sequence {b} must be from 0 to {int(lengths[b] or new[b])}, the number of its "
            f"{'cached' if lengths[b] else 'new'} tokens, got {int(num_context[b])}"
        )
