"""Define paged attention in plain PyTorch, for any device and dtype: the specification.

Letters: Tq new tokens, B sequences, P columns of the page table, H heads, D query/key and V value head size, n the
largest number of cached tokens of a sequence, m the largest number of new tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hstu_sparse.bias.relative import RelativeBias, pair_bias
from hstu_sparse.cache import store
from hstu_sparse.cache.pool import PagePool
from hstu_sparse.core.jagged import jagged_to_padded, masked_product, padded_to_jagged
from hstu_sparse.core.precision import widened
from hstu_sparse.core.validation import check_bool, check_factors, check_number


class Queries(NamedTuple):
    """The new tokens.

    q            [Tq, H, D]
    k, v         their keys and values, or None
    q_offsets    [B+1], the new tokens of each sequence
    lengths      [B], the number of cached tokens of each sequence
    candidates   whether all new tokens of a sequence have the position after its last cached token
    num_context  [B], the number of context tokens of each sequence, or None
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    q_offsets: Tensor
    lengths: Tensor
    candidates: bool
    num_context: Tensor | None = None


class Scoring(NamedTuple):
    """The options that determine weights: activation, factors, bias, base of RoPE, window (0: none).

    return_lse: whether to compute the log-sum-exp of the scores.
    """

    softmax: bool
    scale: float
    normalizer: float
    bias: RelativeBias
    rope_base: float | None = None
    return_lse: bool = False
    window: int = 0


def check_scoring(
    activation: str,
    scale: float | None,
    normalizer: float | None,
    bias: RelativeBias,
    max_seq_len: int,
    head_size: int,
    rope_base: float | None = None,
    return_lse: bool = False,
) -> Scoring:
    """Check the options of an attention call and fill in defaults. bias: the result of `check_bias`."""
    if activation not in ("silu", "softmax"):
        raise ValueError(f"activation must be silu or softmax, got {activation!r}")
    check_bool("return_lse", return_lse)
    if return_lse and activation != "softmax":
        raise ValueError(f"return_lse needs activation='softmax', got {activation!r}")
    if normalizer is not None and activation != "silu":
        raise ValueError(f"normalizer={normalizer!r} needs activation='silu', got {activation!r}")
    if rope_base is not None:
        rope_base = check_number("rope_base", rope_base, above=0)
        if head_size % 2:
            raise ValueError(f"rope_base needs an even head size, got D={head_size}")
    scale, normalizer = check_factors(scale, normalizer, head_size, max_seq_len)
    return Scoring(activation == "softmax", scale, normalizer, bias, rope_base, return_lse)


def paged_mask(at: Tensor, token: Tensor, num_context: Tensor | None, window: int) -> tuple[Tensor, Tensor]:
    """Return (distances in positions, visible pairs) [B, m, n] of queries `at` [B, m] and keys `token` [n].

    All context tokens have the position before the first event, and attend to one another.
    """
    distance = at[:, :, None] - token
    seen = distance > 0
    if num_context is None:
        return distance, seen & (distance < window) if window else seen
    context = num_context.long()[:, None]
    distance = torch.maximum(at, context - 1)[:, :, None] - torch.maximum(token, context - 1)[:, None]
    key_is_context = (token < context)[:, None]
    if window:
        seen = seen & ((distance < window) | key_is_context)
    return distance, seen | (at < context)[:, :, None] & key_is_context & (at[:, :, None] != token)


def paged_reference(new: Queries, pool: PagePool, layer: int, pages: Tensor, scoring: Scoring) -> Tensor:
    """Compute `hstu_sparse.paged_attention`, [Tq, H, V], for checked arguments without defaults."""
    q, k, v, q_offsets, lengths, candidates, num_context = new
    bias, total, dtype, device = scoring.bias, q.shape[0], q.dtype, q.device
    assert k is not None and v is not None
    if total == 0:
        return q.new_zeros(0, q.shape[1], v.shape[2])
    counts, lengths = q_offsets.diff().long(), lengths.long()
    most = int(counts.max())
    q, k, v = widened(q, k, v)
    # If all sequences have the same number of new tokens, no padding is needed.
    equal = total == len(counts) * most

    def padded(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, most)) if equal else jagged_to_padded(x, q_offsets, most)

    queries, new_k, new_v = (padded(x).transpose(1, 2) for x in (q * scoring.scale, k, v))
    # The index of each new token in its sequence, [B, m].
    at = lengths[:, None] + (0 if candidates else torch.arange(most, device=device))
    # Padding has the index of the last new token, since the bias tables have no entry beyond N.
    at = torch.minimum(at, (lengths + counts.clamp(min=1) - 1)[:, None]).expand(-1, most)
    seen_from_last = lengths
    if not candidates:
        seen_from_last = lengths + counts - 1
        if num_context is not None:
            seen_from_last = torch.maximum(seen_from_last, num_context)
        seen_from_last = seen_from_last.masked_fill(pages[:, 0] < 0, 0)
    seen_from_last = torch.where(counts > 0, seen_from_last, 0)
    longest = int(seen_from_last.max())
    token = torch.arange(longest, device=device)
    inside = token < seen_from_last[:, None]  # [B, n]
    keys, values = store.read_padded(pool.tensors[layer], pool.format, pages, inside, q.dtype)  # [B, H, n, D] and V
    distance, seen = paged_mask(at, token, num_context, scoring.window)
    hidden = ~(inside[:, None] & seen)[:, None]  # [B, 1, m, n]
    scores = queries @ keys.transpose(2, 3)
    self_score = (queries * new_k).sum(-1, keepdim=True)  # [B, H, m, 1]
    if bias.position is not None or bias.time is not None:
        times, self_times = (), ()
        if bias.time is not None:
            columns = store.page_columns(pool.format, pages, longest, pool.num_pages)
            cached = pool.timestamps[columns].flatten(1)[:, :longest].masked_fill(~inside, 0)
            query_times, new_times = bias.query_timestamps[:, None], bias.timestamps[:, None]
            if not candidates:
                query_times, new_times = (padded(x[:, 0]) for x in (query_times, new_times))
            times, self_times = (query_times[:, :, None], cached[:, None]), (query_times, new_times)
        scores = scores + pair_bias(bias, distance[:, : 1 if candidates else most], *times)[:, None]
        self_bias = pair_bias(bias, torch.zeros_like(at[:, :1]), *self_times)
        self_score = self_score + self_bias[:, None, :, None]
    if not scoring.softmax:
        weights = F.silu(scores).masked_fill(hidden, 0) / scoring.normalizer
        self_weight = F.silu(self_score) / scoring.normalizer
    else:
        score_max = self_score
        if longest:
            score_max = torch.maximum(self_score, scores.masked_fill(hidden, float("-inf")).amax(-1, keepdim=True))
        weights = torch.exp(scores - score_max).masked_fill(hidden, 0)
        self_weight = torch.exp(self_score - score_max)
        total_weight = weights.sum(-1, keepdim=True) + self_weight
        weights, self_weight = weights / total_weight, self_weight / total_weight
    out = masked_product(weights, values, hidden) + self_weight * new_v
    out = out.transpose(1, 2)
    return (out.flatten(0, 1) if equal else padded_to_jagged(out, q_offsets, total)).to(dtype)
