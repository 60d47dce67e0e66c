"""The kind `rotatekv`."""

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

import hstu_sparse
from data.batch import Batch
from models.attention.contract import AuxLosses, LayerSizes, PagedForm
from models.attention.shared import HSTUAttention


class RotateKVAttention(HSTUAttention):
    """Dense attention to quantised keys and values, for a model that is served with a rotated low-bit cache.

    As with the cache, a token attends to the dequantised keys and values of other tokens, and to itself without
    quantisation. The gradient of the quantisation is the identity.

    Examples:
        >>> config = RotateKVAttention.Config(kind="rotatekv", bits=4)
        >>> attention = RotateKVAttention(config, sizes)
        >>> attention(x, q, k, v, batch)[0].shape
        torch.Size([3, 2, 8])
    """

    class Config(HSTUAttention.Config):
        context_by: ClassVar[tuple[str, ...]] = ("heads",)

        kind: Literal["rotatekv"]
        """The attention kind."""
        bits: Literal[2, 3, 4, 8] = 2
        """The number of bits per channel of a key or value."""
        head_group: Literal[1, 2, 4] = 2
        """The number of heads that are rotated and quantised together."""
        quant_group: int = Field(64, ge=1)
        """The number of channels that share a scale and a zero point."""
        sparsity: float = Field(0.0, ge=0, le=0.9)
        """The share of a rotated key's channels that are set to zero: the smallest ones of each token."""
        sink_tokens: int = Field(0, ge=0)
        """The number of tokens at the beginning of a sequence that are not quantised."""
        clip: float = Field(1.0, gt=0, le=1)
        """The share of the range of a group's values that the codes cover."""

        def check_model(self, sizes: LayerSizes) -> None:
            super().check_model(sizes)
            hstu_sparse.RotateKVCache.check(sizes.num_heads, sizes.attention_dim, **self.cache_options())

        def check_heads(self, sizes: LayerSizes, ranks: int) -> None:
            super().check_heads(sizes, ranks)
            if sizes.num_heads // ranks % self.head_group:
                raise ValueError(
                    f"model.attention.head_group={self.head_group} does not divide the heads of a rank, "
                    f"{sizes.num_heads // ranks} with parallel.context={ranks}"
                )

        def cache_options(self) -> dict:
            names = ("bits", "head_group", "quant_group", "sparsity", "sink_tokens", "clip")
            return {name: getattr(self, name) for name in names}

    config: Config
    reads_input = False

    def paged(self) -> PagedForm:
        if self.config.bits == 3:
            raise ValueError("has bits=3, but serving takes 2, 4 or 8")
        codes = self.config.cache_options()
        if sparsity := codes.pop("sparsity"):
            raise ValueError(f"has sparsity={sparsity}, which cannot be served")
        return self.biased_form(codes={"dtype": torch.float32, **codes})

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, AuxLosses]:
        config = self.config
        options: dict[str, Any] = dict(bias=self.bias(batch), backend=config.backend)
        offsets, longest = batch.seq_offsets, self.sizes.max_seq_len
        options["plan"] = hstu_sparse.attention_plan(q, v, offsets, longest, once=batch.once, **options)
        options |= dict(scale=config.scale, normalizer=self.normalizer) | config.cache_options()
        return hstu_sparse.rotatekv_self_attention(q, k, v, offsets, longest, **options), {}
