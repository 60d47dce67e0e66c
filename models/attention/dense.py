"""The kind `dense`."""

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

import hstu_sparse
from data.batch import Batch
from models.attention.contract import BACKEND, AuxLosses, LayerSizes, PagedForm
from models.attention.shared import HSTUAttention, check_16_bits
from models.protocols import RunOptions


class DenseAttention(HSTUAttention):
    """Pointwise SiLU attention with relative position and time bias (arXiv 2402.17152, section 3.1).

    Examples:
        >>> config = DenseAttention.Config(kind="dense", time_bias=False, window_size=2)
        >>> attention = DenseAttention(config, sizes)
        >>> attention(x, q, k, v, batch)[0].shape
        torch.Size([3, 2, 8])
    """

    class Config(HSTUAttention.Config):
        portable: ClassVar[bool] = True
        context_by: ClassVar[tuple[str, ...]] = ("heads",)

        kind: Literal["dense"]
        """The attention kind."""
        window_size: int = Field(0, ge=0)
        """The number of latest tokens, itself included, to which a token attends; 0 for all."""
        backend: Literal["auto", "triton", "hopper", "reference"] = "auto"  # type: ignore[assignment]  # adds hopper
        """The implementation. `auto`: Triton kernels for CUDA tensors, the reference for CPU tensors. `hopper`: kernels
        for GPUs with sm_90 that need `train.autocast: bf16`, heads of 64, 128 or 256 and no bias; `auto` uses them if
        sequences have at least 1,024 tokens on average."""

        def check_model(self, sizes: LayerSizes) -> None:
            super().check_model(sizes)
            size, value_size = sizes.attention_dim, sizes.linear_dim
            if self.backend != "hopper":
                return
            if size not in (64, 128, 256) or size != value_size:
                got = f"{size} for queries and keys and {value_size} for values"
                raise ValueError(f"backend=hopper takes heads of one size, 64, 128 or 256, got {got}")
            if self.position_bias or self.time_bias:
                raise ValueError(
                    "backend=hopper takes no bias: set position_bias and time_bias to false, or use backend=triton"
                )

        def check_device(self, run: RunOptions, device: torch.device) -> None:
            if self.backend != "hopper":
                super().check_device(run, device)
                return
            if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
                raise ValueError(f"{BACKEND}=hopper needs a GPU with sm_90, got {device}: use backend=triton")
            check_16_bits("hopper", run)

    config: Config
    candidates = context = True
    reads_input = False

    def paged(self) -> PagedForm:
        return self.biased_form(window=self.config.window_size)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, AuxLosses]:
        config, bias = self.config, self.bias(batch)
        options: dict[str, Any] = dict(window_size=config.window_size, bias=bias, backend=config.backend)
        options |= dict(num_targets=batch.num_targets, num_context=batch.context_counts)
        offsets, longest = batch.seq_offsets, self.sizes.max_seq_len
        options["plan"] = hstu_sparse.attention_plan(q, v, offsets, longest, once=batch.once, **options)
        options |= dict(scale=config.scale, normalizer=self.normalizer)
        return hstu_sparse.hstu_attention(q, k, v, offsets, longest, **options), {}
