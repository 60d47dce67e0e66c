"""The kind `htree`."""

from typing import Literal

from pydantic import Field
from torch import Tensor

import hstu_sparse
from data.batch import Batch
from models.attention.shared import SharedKeys
from models.contract import AuxLoss, LayerSizes


class HierarchicalTreeAttention(SharedKeys):
    """Softmax attention over a tree of means that opens up where the queries look; RoPE by position among what is seen.

    Time comes in by `model.rotary: {position: false, time: true}`, which turns queries and keys before means are taken.
    """

    class Config(SharedKeys.Config):
        """`compression_rate` children a node, `top_k` nodes expanded in a layer, by all heads of a key/value head."""

        kind: Literal["htree"]
        compression_rate: int = Field(16, ge=2)
        top_k: int = Field(64, ge=1)
        rope_base: float = Field(10000.0, gt=0)
        backend: Literal["auto", "triton", "reference"] = "auto"

        def check_model(self, sizes: LayerSizes) -> None:
            super().check_model(sizes)
            if sizes.attention_dim % 2:
                raise ValueError(
                    f"rope_base: RoPE turns pairs of channels, and the heads have {sizes.attention_dim}: make it even"
                )

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        c = self.config
        out = hstu_sparse.htree_attention(
            q,
            k,
            v,
            batch.seq_offsets,
            self.sizes.max_seq_len,
            compression_rate=c.compression_rate,
            top_k=c.top_k,
            rope_base=c.rope_base,
            backend=c.backend,
        )
        return out, {}
