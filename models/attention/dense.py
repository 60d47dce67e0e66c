"""The kind `dense`."""

from typing import Literal

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
        window_size: int = Field(0, ge=0)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        config, bias = self.config, self.bias(batch)
        options = dict(window_size=config.window_size, bias=bias, backend=config.backend)
        sizes = q.dtype, q.shape[2], v.shape[2]
        # Layers of the same settings share a plan, whatever their tables hold.
        plan = batch.once(
            (type(self), config, self.normalizer, *sizes),
            lambda: hstu_sparse.attention_plan(q, v, batch.seq_offsets, self.sizes.max_seq_len, **options),
        )
        out = hstu_sparse.hstu_attention(
            q,
            k,
            v,
            batch.seq_offsets,
            self.sizes.max_seq_len,
            scale=config.scale,
            normalizer=self.normalizer,
            plan=plan,
            **options,
        )
        return out, {}
