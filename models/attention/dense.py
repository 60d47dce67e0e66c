"""The kind `dense`."""

from typing import Any, Literal

from pydantic import Field
from torch import Tensor

import hstu_sparse
from data.batch import Batch
from models.attention.shared import HSTUAttention
from models.contract import AuxLoss


class DenseAttention(HSTUAttention):
    """Pointwise SiLU attention with relative position and time bias (arXiv 2402.17152, section 3.1)."""

    class Config(HSTUAttention.Config):
        kind: Literal["dense"]
        """The attention kind."""
        window_size: int = Field(0, ge=0)
        """The number of latest tokens, itself included, that a token sees; 0 for all."""

    config: Config

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        config, bias = self.config, self.bias(batch)
        options: dict[str, Any] = dict(window_size=config.window_size, bias=bias, backend=config.backend)
        offsets, longest = batch.seq_offsets, self.sizes.max_seq_len
        options["plan"] = hstu_sparse.attention_plan(q, v, offsets, longest, once=batch.once, **options)
        options |= dict(scale=config.scale, normalizer=self.normalizer)
        return hstu_sparse.hstu_attention(q, k, v, offsets, longest, **options), {}
