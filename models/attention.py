"""The attention kinds that `model.attention.kind` names: one module with its Config for each, one entry in ATTENTION.

What a kind must bring: `AttentionKind` in contract.py. Letters: T tokens, B sequences, N normaliser, H heads, Hkv
key/value heads, D query/key and V value head size, E embedding size.
"""

import warnings
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

import hstu_sparse
from data.batches import Batch
from hstu_sparse.jagged import jagged_to_padded, padded_to_jagged
from hstu_sparse.relative_bias import RelativeBias, pair_bias
from models.contract import AttentionKind, AuxLoss, ContextBatch, LayerSizes
from models.gate import GateModel

# The room that the published HSTU adds to max_seq_len in its normaliser and bias tables.
EXTRA_POSITIONS = 11


class BiasedAttention(AttentionKind):
    """Kinds that add a relative bias by position and time to their scores; its tables serve all heads."""

    class Config(AttentionKind.Config):
        position_bias: bool = True
        time_bias: bool = True
        num_time_buckets: int = Field(128, ge=1)

        def check_data(self, dataset) -> None:
            if self.time_bias and not dataset.has_timestamps:
                raise ValueError(f"time_bias: {dataset.name} has no timestamps, set it to false")

    def __init__(self, config: Config, sizes: LayerSizes, positions: int):
        super().__init__(config, sizes)
        self.position_bias = nn.Parameter(torch.empty(positions)) if config.position_bias else None
        self.time_bias = nn.Parameter(torch.empty(config.num_time_buckets + 1)) if config.time_bias else None
        for table in (self.position_bias, self.time_bias):
            if table is not None:
                nn.init.normal_(table, std=0.02)

    def bias(self, batch: Batch) -> RelativeBias | None:
        if self.position_bias is None and self.time_bias is None:
            return None
        return RelativeBias(self.position_bias, self.time_bias, batch.timestamps, batch.query_timestamps)


class HSTUAttention(BiasedAttention):
    """What the SiLU kinds share: N, which is `normalizer` if it is given, else max_seq_len + 11."""

    class Config(BiasedAttention.Config):
        """`alpha` scales the logits."""

        alpha: float = 1.0
        normalizer: int | None = Field(None, ge=1)
        backend: Literal["auto", "triton", "reference"] = "auto"

        def check_model(self, model) -> None:
            if self.normalizer is not None and self.normalizer < model.max_seq_len:
                raise ValueError(f"normalizer={self.normalizer} is less than model.max_seq_len={model.max_seq_len}")

    def __init__(self, config: Config, sizes: LayerSizes):
        normalizer = config.normalizer or sizes.max_seq_len + EXTRA_POSITIONS
        super().__init__(config, sizes, positions=normalizer)
        self.normalizer = normalizer


class DenseAttention(HSTUAttention):
    """Pointwise SiLU attention with relative position and time bias (arXiv 2402.17152, section 3.1)."""

    class Config(HSTUAttention.Config):
        kind: Literal["dense"]
        window_size: int = Field(0, ge=0)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        out = hstu_sparse.hstu_attention(
            q,
            k,
            v,
            batch.seq_offsets,
            self.normalizer,
            alpha=self.config.alpha,
            window_size=self.config.window_size,
            bias=self.bias(batch),
            backend=self.config.backend,
        )
        return out, {}


class SoftmaxAttention(BiasedAttention):
    """Causal softmax attention, the transformer's own (arXiv 1706.03762); dropout on the attention weights."""

    class Config(BiasedAttention.Config):
        """`num_kv_heads` heads of keys and values are shared by all heads of queries; absent, each has its own."""

        kind: Literal["softmax"]
        dropout: float = Field(0.0, ge=0, lt=1)
        num_kv_heads: int | None = Field(None, ge=1)
        position_bias: bool = False
        time_bias: bool = False

        def check_model(self, model) -> None:
            if self.num_kv_heads and model.num_heads % self.num_kv_heads:
                raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide model.num_heads={model.num_heads}")

    def __init__(self, config: Config, sizes: LayerSizes):
        super().__init__(config, sizes, positions=sizes.max_seq_len)

    @classmethod
    def kv_heads(cls, config: Config, num_heads: int) -> int:
        return config.num_kv_heads or num_heads

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        if q.is_cuda and self.position_bias is None and self.time_bias is None:
            dropout = self.config.dropout if self.training else 0.0
            return hstu_sparse.flash_attention(q, k, v, batch.seq_offsets, causal=True, dropout=dropout), {}
        # On a GPU, padding to max_seq_len spares the host from waiting for the longest length of the batch.
        longest = self.sizes.max_seq_len
        if not q.is_cuda:
            longest = int(batch.seq_offsets.diff().max()) if batch.num_sequences else 0

        def pad(y: Tensor) -> Tensor:  # [T, ...] -> [B, longest, ...]
            return jagged_to_padded(y.flatten(1), batch.seq_offsets, longest).unflatten(-1, y.shape[1:])

        # Sequences start at 0, so the causal mask alone hides the padding behind them.
        mask = self.mask(batch, longest, q)
        out = F.scaled_dot_product_attention(
            *(pad(y).transpose(1, 2) for y in (q, k, v)),
            attn_mask=mask,
            dropout_p=self.config.dropout if self.training else 0.0,
            is_causal=mask is None,
            enable_gqa=k.shape[1] != q.shape[1],
        )
        out = padded_to_jagged(out.transpose(1, 2).flatten(2), batch.seq_offsets, q.shape[0])
        return out.unflatten(-1, (q.shape[1], v.shape[2])), {}

    def mask(self, batch: Batch, longest: int, q: Tensor) -> Tensor | None:
        """The relative bias as an additive mask [B or 1, 1, longest, longest], -inf where a query does not see."""
        bias = self.bias(batch)
        if bias is None:
            return None
        place = torch.arange(longest, device=q.device)
        distance = place[:, None] - place
        asked = seen = None
        if bias.time is not None:
            asked, seen = (
                jagged_to_padded(y, batch.seq_offsets, longest) for y in (bias.query_timestamps, bias.timestamps)
            )
            asked, seen = asked[:, :, None], seen[:, None, :]
        added = pair_bias(bias, distance, asked, seen)
        return added.view(-1, 1, longest, longest).to(q.dtype).masked_fill(distance < 0, float("-inf"))


# selection_group -> the length from which bsa's forward and backward together take less time than dense's, measured
# on an H200 (docs/bsa.md: bf16, 4 heads of 128, blocks of 64, 16 chosen).
BSA_CROSSOVER = {1: 7457, 2: 6900, 16: 6481, 64: 2710}


def warn_if_too_short(max_seq_len: int, selection_group: int) -> None:
    """Says so when no sequence of a run is long enough for block sparsity to pay."""
    group = max(size for size in BSA_CROSSOVER if size <= selection_group)
    if max_seq_len < BSA_CROSSOVER[group]:
        warnings.warn(
            f"bsa pays from about {BSA_CROSSOVER[group]:,} tokens a sequence on (selection_group={group}, measured on "
            f"an H200: docs/bsa.md); max_seq_len={max_seq_len} is less, so dense attention is faster here",
            stacklevel=2,
        )


class BlockSparseAttention(HSTUAttention):
    """Compression, block selection and sliding window, mixed by a gate on the queries."""

    class Config(HSTUAttention.Config):
        kind: Literal["bsa"]
        # The operator takes no bias yet.
        position_bias: Literal[False] = False
        time_bias: Literal[False] = False
        block_size: int = Field(32, ge=1)
        block_counts: int = Field(4, ge=1)
        window_size: int = Field(0, ge=0)
        selection_group: int = Field(1, ge=1)
        gate_hidden_dim: int = Field(32, ge=1)

        def check_model(self, model) -> None:
            super().check_model(model)
            if self.block_size % self.selection_group:
                raise ValueError(f"selection_group={self.selection_group} does not divide block_size={self.block_size}")

    def __init__(self, config: Config, sizes: LayerSizes):
        super().__init__(config, sizes)
        self.gate = GateModel(sizes.attention_dim, config.gate_hidden_dim)
        warn_if_too_short(sizes.max_seq_len, config.selection_group)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        c = self.config
        out = hstu_sparse.bsa_attention(
            q,
            k,
            v,
            batch.seq_offsets,
            self.normalizer,
            self.gate(q),
            block_size=c.block_size,
            block_counts=c.block_counts,
            window_size=c.window_size,
            selection_group=c.selection_group,
            alpha=c.alpha,
            backend=c.backend,
        )
        return out, {}


class RingAttention(HSTUAttention):
    """Softmax or dense HSTU attention whose sequences may be spread over the ranks of a ring (parallel.context)."""

    class Config(HSTUAttention.Config):
        """`alpha` defaults to D ** -0.5 for softmax and to 1 for hstu; with hstu the result is dense's."""

        kind: Literal["ring"]
        inner: Literal["softmax", "hstu"]
        alpha: float | None = Field(None, gt=0)
        window_size: int = Field(0, ge=0)
        position_bias: bool = False
        time_bias: bool = False
        # For softmax only, as in the kind of that name.
        dropout: float = Field(0.0, ge=0, lt=1)
        num_kv_heads: int | None = Field(None, ge=1)

        def check_model(self, model) -> None:
            super().check_model(model)
            if self.inner == "softmax" and (self.position_bias or self.time_bias):
                raise ValueError("position_bias and time_bias are for inner=hstu: set them to false")
            if self.inner == "hstu" and (self.dropout or self.num_kv_heads):
                raise ValueError("dropout and num_kv_heads are for inner=softmax: leave them out")
            if self.num_kv_heads and model.num_heads % self.num_kv_heads:
                raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide model.num_heads={model.num_heads}")

    @classmethod
    def kv_heads(cls, config: Config, num_heads: int) -> int:
        return config.num_kv_heads or num_heads

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        c, cut, offsets = self.config, isinstance(batch, ContextBatch), batch.seq_offsets
        if c.inner == "softmax":
            dropout = c.dropout if self.training else 0.0
            options = dict(causal=True, window_size=(c.window_size - 1, -1), backend=c.backend)
            if not cut:
                out = hstu_sparse.flash_attention(q, k, v, offsets, scale=c.alpha, dropout=dropout, **options)
            else:
                out = hstu_sparse.zigzag_triton_ring_flash_attn_varlen_func(
                    q,
                    k,
                    v,
                    offsets,
                    dropout_p=dropout,
                    softmax_scale=c.alpha,
                    group=batch.group,
                    plan=batch.plan,
                    **options,
                )
            return out, {}
        options = dict(
            alpha=1.0 if c.alpha is None else c.alpha,
            window_size=c.window_size,
            bias=self.bias(batch),
            backend=c.backend,
        )
        if not cut:
            return hstu_sparse.hstu_attention(q, k, v, offsets, self.normalizer, **options), {}
        out = hstu_sparse.ring_hstu_attention(
            q,
            k,
            v,
            batch.positions,
            self.normalizer,
            seq_offsets=offsets,
            group=batch.group,
            plan=batch.plan,
            **options,
        )
        return out, {}


ATTENTION: dict[str, type[AttentionKind]] = {
    "dense": DenseAttention,
    "softmax": SoftmaxAttention,
    "bsa": BlockSparseAttention,
    "ring": RingAttention,
}
