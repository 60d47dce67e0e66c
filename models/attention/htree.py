"""The kind `htree`."""

import math
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

import hstu_sparse
from data.batch import Batch
from data.options import chosen
from models.attention.contract import AuxLoss, LayerSizes
from models.attention.shared import AutoCount, AutoRate, FewKeys, few_kv_heads
from models.protocols import RunOptions

# max_seq_len from which `auto` means few key heads, and the greatest number of expanded nodes.
LONG, MOST_EXPANDED = 1024, 32


class HierarchicalTreeAttention(FewKeys):
    """Softmax attention over a tree of means that expands the nodes with the highest scores; RoPE by position among
    them.

    For RoPE by time set `model.rotary: {position: false, time: true}`, which rotates queries and keys before the means.

    Examples:
        >>> options = dict(kind="htree", num_kv_heads=2, compression_rate=2, selection_group=1)
        >>> attention = HierarchicalTreeAttention(HierarchicalTreeAttention.Config(**options), sizes)
        >>> attention(x, q, k, v, batch)[0].shape
        torch.Size([3, 2, 8])
    """

    class Config(FewKeys.Config):
        context_by: ClassVar[tuple[str, ...]] = ("heads",)

        kind: Literal["htree"]
        """The attention kind."""
        compression_rate: AutoRate = "auto"
        """The number of children of a node; `auto` is 16, up to max_seq_len 16 it is 8."""
        top_k: AutoCount = "auto"
        """The number of nodes that are expanded in each layer of the tree; `auto` follows from max_seq_len."""
        selection_group: AutoCount = "auto"
        """The number of neighbouring tokens that share a choice; it divides compression_rate."""
        rope_base: float = Field(10000.0, gt=0)
        """The base of the rotary embedding's wavelengths."""
        backend: Literal["auto", "triton", "reference"] = "auto"
        """The implementation: `auto` takes Triton kernels for CUDA tensors and the reference for CPU tensors."""

        def default_kv_heads(self, sizes: LayerSizes) -> int:
            return sizes.num_heads if sizes.max_seq_len < LONG else few_kv_heads(sizes)

        def for_model(self, sizes: LayerSizes) -> Self:
            """Choose a tree with 16 children a node, of which a query sees at most three quarters of the longest
            sequence as tokens; as many neighbours share a choice as a node has children.
            """
            rate, top_k, group = self.compression_rate, self.top_k, self.selection_group
            if rate == "auto":
                rate = 16 if sizes.max_seq_len > 16 else 8
                if group != "auto" and rate % group:
                    rate = group
            if top_k == "auto":
                most = 3 * sizes.max_seq_len // (4 * rate)
                top_k = min(MOST_EXPANDED, 1 << max(0, most.bit_length() - 1))
            if group == "auto":
                group = math.gcd(rate, 16)
            update = dict(compression_rate=rate, top_k=top_k, selection_group=group)
            return super().for_model(sizes).model_copy(update=update)

        def check_model(self, sizes: LayerSizes) -> None:
            super().check_model(sizes)
            if sizes.attention_dim % 2:
                raise ValueError(
                    f"rope_base: RoPE turns pairs of channels, and the heads have {sizes.attention_dim}: make it even"
                )
            if chosen(self.compression_rate) % chosen(self.selection_group):
                rate = f"compression_rate={self.compression_rate}"
                raise ValueError(f"selection_group={self.selection_group} does not divide {rate}")

        def check_device(self, run: RunOptions, device: torch.device) -> None:
            # With torch 2.13 the reference's loops over levels are unrolled for every shape, and compilation never
            # ends.
            if run.train.compile and device.type == "cpu":
                raise ValueError("train.compile: torch's compiler does not finish with htree on a CPU, set it to false")
            super().check_device(run, device)

    config: Config
    reads_input = False

    def __init__(self, config: Config, sizes: LayerSizes):
        super().__init__(config.for_model(sizes), sizes)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        c = self.config
        out = hstu_sparse.htree_attention(
            q,
            k,
            v,
            batch.seq_offsets,
            self.sizes.max_seq_len,
            compression_rate=chosen(c.compression_rate),
            top_k=chosen(c.top_k),
            selection_group=chosen(c.selection_group),
            rope_base=c.rope_base,
            backend=c.backend,
        )
        return out, {}
