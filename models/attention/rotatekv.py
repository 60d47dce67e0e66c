"""The kind `rotatekv`. Letters: T tokens, H heads, V value head size."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

import hstu_sparse
from data.batch import Batch
from hstu_sparse.bias.relative import RelativeBias, pair_bias
from models.attention.shared import HSTUAttention
from models.contract import AuxLoss, LayerSizes


class RotateKVAttention(HSTUAttention):
    """Dense attention whose keys and values went through a rotated low-bit cache: a model made ready for its own.

    As with a cache, a token sees the others by what their codes say and itself as it is. Gradients pass straight
    through the codes.
    """

    class Config(HSTUAttention.Config):
        kind: Literal["rotatekv"]
        """The attention kind."""
        bits: Literal[2, 3, 4, 8] = 2
        """The bits of a channel of a key or value."""
        head_group: Literal[1, 2, 4] = 2
        """The number of heads that are rotated and coded together."""
        quant_group: int = Field(64, ge=1)
        """The number of channels that share a scale and a zero point."""
        sparsity: float = Field(0.0, ge=0, le=0.9)
        """The share of a rotated key's channels that are left out, the smallest of each token."""
        sink_tokens: int = Field(0, ge=0)
        """The number of first tokens of a sequence that are kept as they are."""
        clip: float = Field(1.0, gt=0, le=1)
        """The share of a group's range that its codes cover."""

        def check_model(self, sizes: LayerSizes) -> None:
            super().check_model(sizes)
            try:
                hstu_sparse.RotateKVCache.check(sizes.num_heads, sizes.attention_dim, **self.cache_options())
            except ValueError as error:
                raise ValueError(f"head_group={self.head_group}: {error}") from None

        def cache_options(self) -> dict:
            names = ("bits", "head_group", "quant_group", "sparsity", "sink_tokens", "clip")
            return {name: getattr(self, name) for name in names}

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        c, bias = self.config, self.bias(batch)
        options = c.cache_options()
        found = hstu_sparse.rotatekv_round_trip(k, v, batch.seq_offsets, **options, backend=c.backend)
        # The differences are 0: they carry the gradients.
        cached_k, cached_v = (y + (x - x.detach()) for x, y in zip((k, v), found))
        out = hstu_sparse.hstu_attention(
            q,
            cached_k,
            cached_v,
            batch.seq_offsets,
            self.sizes.max_seq_len,
            scale=c.scale,
            normalizer=self.normalizer,
            bias=bias,
            backend=c.backend,
        )
        own = own_token(q, k, v, bias, c.scale, self.normalizer)
        return out + own - own_token(q, cached_k, cached_v, bias, c.scale, self.normalizer), {}


def own_scores(q: Tensor, k: Tensor, bias: RelativeBias | None, scale: float) -> Tensor:
    """Score of each token by itself, [T, H] fp32 (or fp64)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = scale * (q.to(wide) * k.to(wide)).sum(-1)
    if bias is None:
        return scores
    here = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    return scores + pair_bias(bias, here, bias.query_timestamps, bias.timestamps)[:, None]


def own_token(q: Tensor, k: Tensor, v: Tensor, bias: RelativeBias | None, scale: float, normalizer: int) -> Tensor:
    """What a token's own key and value give to its SiLU attention, [T, H, V]."""
    return (F.silu(own_scores(q, k, bias, scale))[..., None] * v / normalizer).to(v.dtype)
