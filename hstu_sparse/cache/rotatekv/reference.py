"""Compute RotateKV in plain PyTorch, on any device and in any float dtype: the specification.

Letters: T cached tokens, Tq queries, B sequences, N max_seq_len, H heads, D query/key and V value head size, G heads of
a head group, C its channels, HG = H / G head groups, K channels of a key that pruning retains.

Source: RotateKV (IJCAI 2025, arXiv 2501.16383), Mustafar (arXiv 2505.22913).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hstu_sparse.bias.relative import RelativeBias, pair_bias
from hstu_sparse.cache import store
from hstu_sparse.cache.format import PageFormat
from hstu_sparse.cache.rotatekv.cache import RotateKVCache
from hstu_sparse.cache.store import decode, encode
from hstu_sparse.core.jagged import jagged_to_padded, padded_index, padded_to_jagged
from hstu_sparse.core.precision import widened


def decompress_reference(cache: RotateKVCache, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return (k [T, H, D], v [T, H, V]) of a cache in `dtype`, by default the cache's."""
    dtype = dtype or cache.dtype
    return store.read(cache.tensors, cache.format, cache.pages, *cache.tokens(), dtype, cache.channel_order)


def round_trip_reference(k: Tensor, v: Tensor, sinks: Tensor, format: PageFormat, channel_order: Tensor | None):
    """Return decompress(compress(k, v)) without a cache; tokens where `sinks` [T] is True are unchanged."""
    packed = (x.masked_fill(sinks[:, None, None], 0) for x in (k, v))  # sinks may exceed the codes' range
    restored = decode(*encode(*packed, format, channel_order), format, channel_order, k.dtype)
    return tuple(torch.where(sinks[:, None, None], x, y) for x, y in zip((k, v), restored))


def self_term(
    q: Tensor, k: Tensor, v: Tensor, coded_k: Tensor, coded_v: Tensor, bias: RelativeBias, scale: float,
    normalizer: float,
) -> Tensor:  # fmt: skip
    """Return each token's attention to itself with its key and value, minus that with their codes: [T, H, V]."""
    zero_distance = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    self_bias = pair_bias(bias, zero_distance, bias.query_timestamps, bias.timestamps)
    if isinstance(self_bias, Tensor):
        self_bias = self_bias[:, None]
    wide = widened(q, k, v, coded_k, coded_v)

    def contribution(keys: Tensor, values: Tensor) -> Tensor:
        return F.silu(scale * (wide[0] * keys).sum(-1) + self_bias)[..., None] * values / normalizer

    return (contribution(*wide[1:3]) - contribution(*wide[3:])).to(v.dtype)


def rope(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Apply RoPE to x [T, H, D] at positions [T]: pair (i, i + D/2) is rotated by position * base ** (-2 i / D)."""
    half = x.shape[-1] // 2
    step = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.double()[:, None, None] * step
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention_reference(
    q: Tensor,
    q_offsets: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    *,
    activation: str,
    scale: float,
    normalizer: float = 1.0,
    bias: RelativeBias,
    rope_base: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Return (out [Tq, H, V], log-sum-exp [Tq, H] or None) of queries that attend to all keys of their sequence.

    For a sequence without keys, out is 0 and the log-sum-exp is -inf. normalizer: for silu.
    """
    lengths = seq_offsets.diff()
    num_queries = int(q_offsets.diff().max()) if len(lengths) else 0
    cached = int(lengths.max()) if len(lengths) else 0
    if num_queries == 0:
        return q.new_zeros(0, q.shape[1], v.shape[2]), q.new_zeros(0, q.shape[1])
    dtype = q.dtype
    q, k, v = widened(q, k, v)
    if rope_base is not None:
        begins = seq_offsets[:-1].repeat_interleave(lengths)
        k = rope(k, torch.arange(k.shape[0], device=k.device) - begins, rope_base)
        q = rope(q, lengths.repeat_interleave(q_offsets.diff()), rope_base)
    keys, values = (jagged_to_padded(x, seq_offsets, cached).transpose(1, 2) for x in (k, v))  # [B, H, n, ...]
    queries = jagged_to_padded(q * scale, q_offsets, num_queries).transpose(1, 2)
    scores = queries @ keys.transpose(2, 3)
    index, inside = padded_index(seq_offsets, cached)
    if bias.position is not None or bias.time is not None:
        distance = (lengths[:, None] - torch.arange(cached, device=q.device))[:, None]  # [B, 1, n]
        times = ()
        if bias.time is not None:
            query_index, _ = padded_index(q_offsets, num_queries)
            key_times = bias.timestamps[index] if len(bias.timestamps) else torch.zeros_like(index)
            times = bias.query_timestamps[query_index][:, :, None], key_times[:, None]
        scores = scores + pair_bias(bias, distance, *times)[:, None]
    hidden = ~inside[:, None, None]
    lse = None
    if activation == "silu":
        weights = F.silu(scores).masked_fill(hidden, 0)
        values = values / normalizer
    else:
        scores = scores.masked_fill(hidden, float("-inf"))
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0)[..., None])
        lse = padded_to_jagged(lse.transpose(1, 2), q_offsets, q.shape[0])
    out = (weights.to(v.dtype) @ values).transpose(1, 2)
    return padded_to_jagged(out, q_offsets, q.shape[0]).to(dtype), lse
