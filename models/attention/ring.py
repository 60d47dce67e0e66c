"""The kind `ring`. Letters: T tokens, D query/key head size."""

from typing import Any, ClassVar, Literal, Self, cast

import torch
from pydantic import Field
from torch import Tensor

import hstu_sparse
from data.batch import Batch
from models.attention.contract import BACKEND, AuxLosses, LayerSizes
from models.attention.shared import FlashAttention, HSTUAttention
from models.attention.spread import context_by
from models.protocols import RunOptions


class RingAttention(FlashAttention, HSTUAttention):
    """Softmax or dense HSTU attention; several ranks may share each sequence (parallel.context).

    Examples:
        >>> config = RingAttention.Config(kind="ring", inner="hstu")
        >>> attention = RingAttention(config, sizes)
        >>> attention(x, q, k, v, batch)[0].shape
        torch.Size([3, 2, 8])
    """

    class Config(FlashAttention.Config, HSTUAttention.Config):
        context_by: ClassVar[tuple[str, ...]] = ("ring", "heads")

        kind: Literal["ring"]
        """The attention kind."""
        inner: Literal["auto", "softmax", "hstu"] = "auto"
        """The attention: `hstu` is that of the kind `dense`; `auto` is `hstu` in an HSTU block, otherwise
        `softmax`. Biases are for `hstu`; dropout, num_kv_heads and the backend `cute` are for `softmax`."""
        scale: float | None = Field(None, gt=0)  # type: ignore[assignment]  # by default it depends on inner
        """The factor of the products of queries and keys; if absent, 1 for `hstu`, D ** -0.5 for `softmax`."""
        window_size: int = Field(0, ge=0)
        """The number of latest tokens, itself included, to which a token attends; 0 for all."""

        def for_model(self, sizes: LayerSizes) -> Self:
            inner = self.inner
            if inner == "auto":
                inner = "hstu" if sizes.block == "hstu" else "softmax"
            update: dict[str, object] = {"inner": inner}
            if inner == "softmax":
                update |= {} if "position_bias" in self.model_fields_set else {"position_bias": False}
                update |= {} if self.time_bias != "auto" else {"time_bias": False}
            return super().for_model(sizes).model_copy(update=update)

        def check_model(self, sizes: LayerSizes) -> None:
            super().check_model(sizes)
            if self.inner == "softmax" and (self.position_bias or self.time_bias):
                raise ValueError("position_bias and time_bias are for inner=hstu: set them to false")
            if self.inner == "hstu" and (self.dropout or self.num_kv_heads):
                raise ValueError("dropout and num_kv_heads are for inner=softmax: leave them out")
            if self.inner == "hstu" and self.backend == "cute":
                raise ValueError("backend=cute is for inner=softmax: use triton")

        def check_device(self, run: RunOptions, device: torch.device) -> None:
            super().check_device(run, device)
            if self.backend == "cute" and self.window_size and run.parallel.context > 1 and context_by(run) == "ring":
                raise ValueError(f"{BACKEND}=cute has no window_size with parallel.context_by=ring: use backend=triton")

    config: Config
    reads_input = False

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, AuxLosses]:
        c, cut, offsets = self.config, batch.cut, batch.seq_offsets
        if c.inner == "softmax":
            options: dict[str, Any] = dict(
                scale=c.scale, causal=True, window_size=(c.window_size - 1, -1), backend=c.backend
            )
            options["dropout"] = c.dropout if self.training else 0.0
            if cut is None:
                out: Any = hstu_sparse.flash_attention(q, k, v, offsets, **options)
            else:
                options |= dict(zigzag=True, group=cut.group, plan=cut.plan)
                out = hstu_sparse.ring_flash_attention(q, k, v, offsets, **options)
            return cast(Tensor, out), {}
        options = dict(
            scale=1.0 if c.scale is None else c.scale,
            normalizer=self.normalizer,
            window_size=c.window_size,
            bias=self.bias(batch),
            backend=c.backend,
        )
        if cut is None:
            return hstu_sparse.hstu_attention(q, k, v, offsets, self.sizes.max_seq_len, **options), {}
        options |= dict(seq_offsets=offsets, group=cut.group, plan=cut.plan)
        return hstu_sparse.ring_hstu_attention(q, k, v, batch.positions, self.sizes.max_seq_len, **options), {}
