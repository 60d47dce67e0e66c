"""The kind `htree`."""

import math
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

import hstu_sparse
from data.batch import Batch
from data.options import chosen
from models.attention.contract import AuxLosses, LayerSizes
from models.attention.shared import AutoCount, AutoRate, FewKeys, few_kv_heads
from models.protocols import RunOptions

LONG = 1024  # the max_seq_len from which `auto` means few key heads
MOST_EXPANDED = 32  # the greatest `auto` value of top_k


class HierarchicalTreeAttention(FewKeys):
    """Softmax attention over a tree: a node is the mean of its children, and the best nodes are expanded.

    Rotary embedding is by position among the nodes to which a query attends. For rotary embedding by time set
    `model.rotary: {position: false, time: true}`, which rotates queries and keys before the means are computed.

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
        """The number of children of a node; `auto` is 16, or 8 if max_seq_len is at most 16, or selection_group if that
        does not divide it."""
        top_k: AutoCount = "auto"
        """The number of nodes that are expanded in each layer of the tree; `auto` depends on max_seq_len."""
        selection_group: AutoCount = "auto"
        """The number of neighbouring tokens that expand the same nodes; it must divide compression_rate."""
        rope_base: float = Field(10000.0, gt=0)
        """The base of the rotary embedding's wavelengths."""

        def default_kv_heads(self, sizes: LayerSizes) -> int:
            return sizes.num_heads if sizes.max_seq_len < LONG else few_kv_heads(sizes)

        def for_model(self, sizes: LayerSizes) -> Self:
            """Resolve `auto`: usually a node has 16 children, and 16 tokens share a choice.

            Unless it is 1, top_k lets a query attend to at most 3/4 of the longest sequence as single tokens.
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
                    f"rope_base: rotary embedding takes an even number of channels per head, got {sizes.attention_dim}"
                )
            if chosen(self.compression_rate) % chosen(self.selection_group):
                rate = f"compression_rate={self.compression_rate}"
                raise ValueError(f"selection_group={self.selection_group} does not divide {rate}")

        def check_device(self, run: RunOptions, device: torch.device) -> None:
            # torch 2.13 unrolls the reference's loops over levels for every shape.
            if run.train.compile and device.type == "cpu":
                raise ValueError("train.compile: torch's compiler does not finish with htree on a CPU, set it to false")
            super().check_device(run, device)

    config: Config
    reads_input = False

    def __init__(self, config: Config, sizes: LayerSizes):
        super().__init__(config.for_model(sizes), sizes)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, AuxLosses]:
        c = self.config
        options: dict[str, Any] = {
            name: chosen(getattr(c, name)) for name in ("compression_rate", "top_k", "selection_group")
        }
        options |= dict(rope_base=c.rope_base, backend=c.backend)
        return hstu_sparse.htree_attention(q, k, v, batch.seq_offsets, self.sizes.max_seq_len, **options), {}
