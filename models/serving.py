"""A model that answers from a packed cache: each sequence's last query against the codes of its history.

As a server would: keys and values of the history, in every layer, come from a pass over it and go into the cache; what
asks is the last token. It sees the history through the cache, and itself as it is.

Letters: T tokens, B sequences, H heads, Hkv key/value heads, D query/key head size, V value head size, N normaliser.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import hstu_sparse
from data.batch import Batch
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.jagged import offsets_from_lengths
from models.attention import DenseAttention, RotateKVAttention, SoftmaxAttention
from models.attention.rotatekv import own_scores, own_token
from models.contract import AttentionKind, AuxLoss

SERVED = (DenseAttention, RotateKVAttention, SoftmaxAttention)


class ServingError(ValueError):
    """A model that cannot be served from a cache, in one line."""


@dataclass
class CacheSize:
    """What the caches of all layers took, summed over the users that were served."""

    users: int = 0
    packed_bytes: int = 0
    whole_bytes: int = 0  # the same keys and values in bf16
    options: dict = field(default_factory=dict)

    def report(self) -> dict:
        users = max(1, self.users)
        return {
            "kind": "rotatekv",
            **self.options,
            "bytes_per_user": round(self.packed_bytes / users, 1),
            "bytes_per_user_bf16": round(self.whole_bytes / users, 1),
            "share_of_bf16": round(self.packed_bytes / max(1, self.whole_bytes), 4),
        }


class CachedAttention(nn.Module):
    """An attention kind whose last token of each sequence reads its history from a RotateKV cache."""

    def __init__(self, inner: AttentionKind, options: dict, size: CacheSize, first: bool):
        super().__init__()
        self.inner, self.options, self.size, self.first = inner, options, size, first

    @property
    def sizes(self):
        return self.inner.sizes

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        # Nothing attends to a last token, so that the history's own outputs are what they were without it.
        out, aux = self.inner(x, q, k, v, batch)
        last = batch.seq_offsets[1:] - 1
        if len(last):
            out = out.index_copy(0, last, self.answer(q, k, v, last, batch).to(out.dtype))
        return out, aux

    def answer(self, q: Tensor, k: Tensor, v: Tensor, last: Tensor, batch: Batch) -> Tensor:
        """[B, H, V], what the last tokens get from the cached history and themselves."""
        inner = self.inner
        history = torch.ones(len(k), dtype=torch.bool, device=k.device)
        history[last] = False
        offsets = offsets_from_lengths(batch.seq_offsets.diff() - 1)
        cache = hstu_sparse.rotatekv_compress(k[history], v[history], offsets, **self.options)
        if self.first:
            self.size.users += len(last)
        self.size.packed_bytes += cache.nbytes
        self.size.whole_bytes += 2 * (k[history].numel() + v[history].numel())

        bias = inner.bias(batch)
        cached = own = None
        if bias is not None:
            timed = bias.time is not None
            asked = bias.query_timestamps[last] if timed else None
            cached = bias._replace(timestamps=bias.timestamps[history] if timed else None, query_timestamps=asked)
            own = RelativeBias(bias.position, bias.time, bias.timestamps[last] if timed else None, asked)
        softmax = isinstance(inner, SoftmaxAttention)
        scale = q.shape[2] ** -0.5 if softmax else inner.config.scale
        longest = max(1, inner.sizes.max_seq_len - 1)
        found = hstu_sparse.rotatekv_attention(
            q[last],
            torch.arange(len(last) + 1, device=q.device),
            cache,
            longest,
            activation="softmax" if softmax else "silu",
            scale=scale,
            normalizer=None if softmax else inner.normalizer,
            bias=cached,
            return_lse=softmax,
        )
        if not softmax:
            return found + own_token(q[last], k[last], v[last], own, scale, inner.normalizer)
        found, lse = found
        share = torch.sigmoid(own_scores(q[last], k[last], own, scale) - lse)[..., None]
        return found * (1 - share) + v[last] * share


def serve_from_cache(model: nn.Module, **options) -> CacheSize:
    """Puts a cache between the layers of a model and its history; returns what is then counted of it.

    options: of `hstu_sparse.rotatekv_compress`. Evaluation only. ServingError for a kind that has no cache, or heads
    that it does not take.
    """
    size = CacheSize(options=options)
    for place, layer in enumerate(model.layers):
        inner = layer.attention
        if not isinstance(inner, SERVED):
            raise ServingError(
                f"layer {place} ({inner.config.kind}) cannot be served from a cache: dense, rotatekv and softmax can"
            )
        if getattr(inner.config, "window_size", 0):
            raise ServingError(f"layer {place} has window_size={inner.config.window_size}, a cache has no window")
        heads = inner.kv_heads(inner.config, inner.sizes.num_heads)
        if heads != inner.sizes.num_heads:
            raise ServingError(
                f"layer {place} shares {heads} key heads between {inner.sizes.num_heads}, a cache does not"
            )
        try:
            hstu_sparse.RotateKVCache.check(heads, inner.sizes.attention_dim, **options)
        except (TypeError, ValueError) as error:
            raise ServingError(str(error)) from None
        layer.attention = CachedAttention(inner, options, size, first=place == 0)
    return size
