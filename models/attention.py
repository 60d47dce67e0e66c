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
from hstu_sparse.indexer import MOST_CHOSEN
from hstu_sparse.jagged import jagged_to_padded, padded_to_jagged, sequence_ids
from hstu_sparse.relative_bias import RelativeBias, pair_bias
from models.contract import AttentionKind, AuxLoss, ContextBatch, LayerSizes
from models.gate import GateModel

# The room that the published HSTU adds to max_seq_len in its normaliser and bias tables.
EXTRA_POSITIONS = 11


class BiasTables(nn.Module):
    """Tables of a relative bias, [positions] and [num_time_buckets + 1], None for one that there is not."""

    def __init__(self, positions: int | None, num_time_buckets: int | None):
        super().__init__()
        self.position = None if positions is None else nn.Parameter(torch.empty(positions))
        self.time = None if num_time_buckets is None else nn.Parameter(torch.empty(num_time_buckets + 1))
        for table in self.parameters():
            nn.init.normal_(table, std=0.02)

    def forward(self, batch: Batch) -> RelativeBias | None:
        if self.position is None and self.time is None:
            return None
        return RelativeBias(self.position, self.time, batch.timestamps, batch.query_timestamps)


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
        config, bias = self.config, self.bias(batch)
        options = dict(window_size=config.window_size, bias=bias, backend=config.backend)
        sizes = q.dtype, q.shape[2], v.shape[2]
        # Layers of the same settings share a plan, whatever their tables hold.
        plan = batch.once(
            (type(self), config, self.normalizer, *sizes),
            lambda: hstu_sparse.attention_plan(q, v, batch.seq_offsets, self.normalizer, **options),
        )
        out = hstu_sparse.hstu_attention(
            q, k, v, batch.seq_offsets, self.normalizer, alpha=config.alpha, plan=plan, **options
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
        if q.is_cuda and self.bias(batch) is None:
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
        added = added[:, None] if added.dim() == 3 else added[None, None]
        return added.to(q.dtype).masked_fill(distance < 0, float("-inf"))


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
        c, bias = self.config, self.bias(batch)
        # Layers of the same block size share a plan, whatever their tables hold.
        plan = batch.once(
            (type(self), c.block_size, c.time_bias, c.backend, self.normalizer),
            lambda: hstu_sparse.bsa_plan(
                q, batch.seq_offsets, self.normalizer, block_size=c.block_size, bias=bias, backend=c.backend
            ),
        )
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
            bias=bias,
            backend=c.backend,
            plan=plan,
        )
        return out, {}


class HierarchicalTreeAttention(AttentionKind):
    """Softmax attention over a tree of means that opens up where the queries look; RoPE by position among what is seen.

    Time comes in by `model.rotary: {position: false, time: true}`, which turns queries and keys before means are taken.
    """

    class Config(AttentionKind.Config):
        """`compression_rate` children a node, `top_k` nodes expanded in a layer, by all heads of a key/value head."""

        kind: Literal["htree"]
        compression_rate: int = Field(16, ge=2)
        top_k: int = Field(64, ge=1)
        num_kv_heads: int | None = Field(None, ge=1)
        rope_base: float = Field(10000.0, gt=0)
        backend: Literal["auto", "triton", "reference"] = "auto"

        def check_model(self, model) -> None:
            if self.num_kv_heads and model.num_heads % self.num_kv_heads:
                raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide model.num_heads={model.num_heads}")
            size = model.attention_dim or model.embedding_dim // model.num_heads
            if size % 2:
                raise ValueError(f"rope_base: RoPE turns pairs of channels, and the heads have {size}: make it even")

    @classmethod
    def kv_heads(cls, config: Config, num_heads: int) -> int:
        return config.num_kv_heads or num_heads

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


class IndexerAttention(BiasedAttention):
    """Softmax attention over the tokens that a lightning indexer chooses (DeepSeek-V3.2-Exp); one key and value head.

    The indexer sees the layer's input detached and learns from one loss of its own, KL(attention, indexer) over the
    chosen tokens; the rest of the model never learns from that. For the first `warmup_steps` the attention is dense,
    and the indexer learns from all tokens at or before each one.
    """

    class Config(BiasedAttention.Config):
        """`top_k` tokens are chosen by `num_index_heads` heads of `index_dim`; `index_*_bias` are the indexer's own."""

        kind: Literal["indexer"]
        top_k: int = Field(64, ge=1)
        num_index_heads: int = Field(4, ge=1)
        index_dim: int = Field(32, ge=1)
        index_position_bias: bool = True
        index_time_bias: bool = True
        loss_weight: float = Field(1.0, ge=0)
        warmup_steps: int = Field(0, ge=0)
        backend: Literal["auto", "triton", "reference"] = "auto"

        def check_model(self, model) -> None:
            if MOST_CHOSEN < self.top_k < model.max_seq_len and self.backend != "reference":
                raise ValueError(
                    f"top_k={self.top_k}: the kernels choose up to {MOST_CHOSEN:,} of "
                    f"model.max_seq_len={model.max_seq_len} tokens, or all"
                )

        def check_data(self, dataset) -> None:
            super().check_data(dataset)
            if self.index_time_bias and not dataset.has_timestamps:
                raise ValueError(f"index_time_bias: {dataset.name} has no timestamps, set it to false")

        def phase_ends(self) -> tuple[int, ...]:
            return (self.warmup_steps,)

    def __init__(self, config: Config, sizes: LayerSizes):
        super().__init__(config, sizes, positions=sizes.max_seq_len)
        self.index_query = nn.Linear(sizes.embedding_dim, config.num_index_heads * config.index_dim, bias=False)
        self.index_key = nn.Linear(sizes.embedding_dim, config.index_dim, bias=False)
        self.index_weight = nn.Linear(sizes.embedding_dim, config.num_index_heads, bias=False)
        self.index_tables = BiasTables(
            sizes.max_seq_len if config.index_position_bias else None,
            config.num_time_buckets if config.index_time_bias else None,
        )

    @classmethod
    def kv_heads(cls, config: Config, num_heads: int) -> int:
        return 1

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        c, offsets = self.config, batch.seq_offsets
        k, v, bias = k.squeeze(1), v.squeeze(1), self.bias(batch)
        iq, ik, w = self.index(x.detach())
        options = {"bias": self.index_tables(batch), "backend": c.backend}
        if batch.phase < c.warmup_steps or c.top_k >= self.sizes.max_seq_len:
            indices = self.every_index(batch, q.device)
            scores = hstu_sparse.index_scores(iq, ik, w, indices, offsets, **options) if self.training else None
        else:
            scores, indices = hstu_sparse.lightning_indexer(iq, ik, w, offsets, c.top_k, **options)
        out = hstu_sparse.sparse_attention(q, k, v, indices, offsets, bias=bias, backend=c.backend)
        if not self.training:
            return out, {}
        loss = hstu_sparse.indexer_loss(
            q.detach(), k.detach(), scores, indices, offsets, bias=bias, valid=batch.real, backend=c.backend
        )
        return out, {"indexer_loss": AuxLoss.of(loss, c.loss_weight)}

    def index(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(iq [T, J, E], ik [T, E], w [T, J]); keys of one length and weights for scores of order 1."""
        c = self.config
        iq = self.index_query(x).unflatten(-1, (c.num_index_heads, c.index_dim))
        ik = F.layer_norm(self.index_key(x), (c.index_dim,)).to(iq.dtype)
        return iq, ik, self.index_weight(x) * (c.num_index_heads * c.index_dim) ** -0.5

    def every_index(self, batch: Batch, device: torch.device) -> Tensor:
        """All tokens at or before each token: [T, longest] int32, -1 behind them."""
        # On a GPU, max_seq_len spares the host from waiting for the longest length of the batch.
        longest = self.sizes.max_seq_len
        if device.type != "cuda":
            longest = int(batch.seq_offsets.diff().max()) if batch.num_sequences else 0
        token = torch.arange(batch.num_tokens, device=device)
        place = token - batch.seq_offsets[sequence_ids(batch.seq_offsets, batch.num_tokens)]
        every = torch.arange(longest, dtype=torch.int32, device=device)
        return torch.where(every <= place[:, None], every, -1)


class RotateKVAttention(HSTUAttention):
    """Dense attention whose keys and values went through a rotated low-bit cache: a model made ready for its own.

    As with a cache, a token sees the others by what their codes say and itself as it is. Gradients pass straight
    through the codes.
    """

    class Config(HSTUAttention.Config):
        """The options of `hstu_sparse.rotatekv_compress`."""

        kind: Literal["rotatekv"]
        bits: Literal[2, 3, 4, 8] = 2
        head_group: Literal[1, 2, 4] = 2
        quant_group: int = Field(64, ge=1)
        sparsity: float = Field(0.0, ge=0, le=0.9)
        sink_tokens: int = Field(0, ge=0)

        def check_model(self, model) -> None:
            super().check_model(model)
            size = model.attention_dim or model.embedding_dim // model.num_heads
            try:
                hstu_sparse.RotateKVCache.check(model.num_heads, size, **self.cache_options())
            except ValueError as error:
                raise ValueError(f"head_group={self.head_group}: {error}") from None

        def cache_options(self) -> dict:
            names = ("bits", "head_group", "quant_group", "sparsity", "sink_tokens")
            return {name: getattr(self, name) for name in names}

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        c, bias = self.config, self.bias(batch)
        options = c.cache_options()
        found = hstu_sparse.rotatekv_round_trip(k, v, batch.seq_offsets, **options, backend=c.backend)
        # The differences are 0: they carry the gradients.
        cached_k, cached_v = (y + (x - x.detach()) for x, y in zip((k, v), found))
        out = hstu_sparse.hstu_attention(
            q, cached_k, cached_v, batch.seq_offsets, self.normalizer, alpha=c.alpha, bias=bias, backend=c.backend
        )
        own = own_token(q, k, v, bias, c.alpha, self.normalizer)
        return out + own - own_token(q, cached_k, cached_v, bias, c.alpha, self.normalizer), {}


def own_scores(q: Tensor, k: Tensor, bias: RelativeBias | None, alpha: float) -> Tensor:
    """Score of each token by itself, [T, H] fp32 (or fp64)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = alpha * (q.to(wide) * k.to(wide)).sum(-1)
    if bias is None:
        return scores
    here = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    return scores + pair_bias(bias, here, bias.query_timestamps, bias.timestamps)[:, None]


def own_token(q: Tensor, k: Tensor, v: Tensor, bias: RelativeBias | None, alpha: float, normalizer: int) -> Tensor:
    """What a token's own key and value give to its SiLU attention, [T, H, V]."""
    return (F.silu(own_scores(q, k, bias, alpha))[..., None] * v / normalizer).to(v.dtype)


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
    "htree": HierarchicalTreeAttention,
    "indexer": IndexerAttention,
    "rotatekv": RotateKVAttention,
    "ring": RingAttention,
}
