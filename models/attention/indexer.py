"""The kind `indexer`.

Letters: T tokens, J heads of the indexer, E their size, G groups of neighbouring tokens, K chosen tokens of a group.
"""

from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

import hstu_sparse
from data.batch import Batch
from data.options import chosen
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.core.jagged import sequence_ids
from hstu_sparse.core.launch import next_power_of_2
from hstu_sparse.indexer.api import MAX_GROUP, MAX_KEY_CHANNELS, MAX_TOP_K
from models.attention.contract import AuxLoss, AuxLosses, LayerSizes
from models.attention.shared import (
    AutoCount,
    BiasedAttention,
    FewKeys,
    TimeBias,
    few_kv_heads,
    many_kv_heads,
    new_table,
    padded_channels,
    relative_bias,
)

# The most indices of a warm-up step: 4 GiB of int32, and twice as much for scores and gradients.
MOST_INDICES = 2**30


class BiasTables(nn.Module):
    """Tables of a relative bias, [positions] and [num_time_buckets + 1]; None for a table that is not used."""

    def __init__(self, positions: int | None, num_time_buckets: int | None):
        super().__init__()
        self.position = None if positions is None else new_table(positions)
        self.time = None if num_time_buckets is None else new_table(num_time_buckets + 1)

    def forward(self, batch: Batch) -> RelativeBias | None:
        return relative_bias(self.position, self.time, batch)


class IndexerAttention(FewKeys, BiasedAttention):
    """Softmax attention over tokens that a lightning indexer chooses for all heads (DeepSeek-V3.2-Exp).

    The indexer reads the layer's detached input and is only trained by an auxiliary loss, KL(attention, indexer) over
    the chosen tokens; no other parameter has a gradient from this loss. In the first `warmup_steps` attention is dense,
    and the loss is over all visible tokens.

    Examples:
        >>> config = IndexerAttention.Config(kind="indexer", num_kv_heads=2, top_k=2, selection_group=1)
        >>> out, losses = IndexerAttention(config, sizes)(x, q, k, v, batch)
        >>> out.shape, sorted(losses)
        (torch.Size([3, 2, 8]), ['indexer_loss'])
    """

    class Config(FewKeys.Config, BiasedAttention.Config):
        context_by: ClassVar[tuple[str, ...]] = ("heads",)

        kind: Literal["indexer"]
        """The attention kind."""
        top_k: AutoCount = "auto"
        """The number of chosen tokens; `auto` is max_seq_len // 8, rounded up to a power of two, from 8 to 128."""
        selection_group: AutoCount = "auto"
        """The number of neighbouring tokens that share a choice; `auto` is 8 up to max_seq_len 2,048, otherwise 16."""
        num_index_heads: int = Field(4, ge=1)
        """The number of heads of the indexer."""
        index_dim: int = Field(32, ge=1)
        """The size of a head of the indexer."""
        index_position_bias: bool = True
        """Whether the indexer's scores have a learned bias by the distance in positions."""
        index_time_bias: TimeBias = "auto"
        """Whether the indexer's scores have a learned bias by the distance in time; `auto`: if the data have times."""
        loss_weight: float = Field(1.0, ge=0)
        """The weight of the indexer's loss."""
        warmup_steps: int = Field(0, ge=0)
        """The number of first training steps with dense attention, in which the indexer's loss is over all tokens."""

        def default_kv_heads(self, sizes: LayerSizes) -> int:
            # Without groups the kernels run once per key head.
            return few_kv_heads(sizes) if self.selection_group == 1 else many_kv_heads(sizes)

        def for_model(self, sizes: LayerSizes) -> Self:
            """Resolve `auto` (docs/indexer.md)."""
            top_k, group = self.top_k, self.selection_group
            if top_k == "auto":
                top_k = min(128, max(8, next_power_of_2(sizes.max_seq_len // 8)))
            if group == "auto":
                group = 8 if sizes.max_seq_len <= 2048 else 16
            return super().for_model(sizes).model_copy(update=dict(top_k=top_k, selection_group=group))

        def check_model(self, sizes: LayerSizes) -> None:
            super().check_model(sizes)
            top_k, group = chosen(self.top_k), chosen(self.selection_group)
            if group > MAX_GROUP and self.backend != "reference":
                raise ValueError(f"selection_group={group}: the kernels take up to {MAX_GROUP} tokens in a group")
            key_heads = IndexerAttention.kv_heads(self, sizes.num_heads)
            channels = key_heads * padded_channels(sizes)
            if key_heads > 1 and channels > MAX_KEY_CHANNELS and self.backend != "reference":
                raise ValueError(
                    f"num_kv_heads={self.num_kv_heads}: the kernels take up to {MAX_KEY_CHANNELS} channels in all key "
                    f"heads, padded to powers of two, got {channels}"
                )
            if MAX_TOP_K < top_k < sizes.max_seq_len and self.backend != "reference":
                raise ValueError(
                    f"top_k={top_k}: the kernels choose up to {MAX_TOP_K:,} of "
                    f"model.max_seq_len={sizes.max_seq_len} tokens, or all"
                )

        def time_options(self) -> tuple[str, ...]:
            return (*super().time_options(), "index_time_bias")

        def phase_ends(self) -> tuple[int, ...]:
            return (self.warmup_steps,)

    config: Config

    def __init__(self, config: Config, sizes: LayerSizes):
        config = config.for_model(sizes)
        super().__init__(config, sizes, positions=sizes.max_seq_len)
        self.index_query = nn.Linear(sizes.embedding_dim, config.num_index_heads * config.index_dim, bias=False)
        self.index_key = nn.Linear(sizes.embedding_dim, config.index_dim, bias=False)
        self.index_weight = nn.Linear(sizes.embedding_dim, config.num_index_heads, bias=False)
        self.index_tables = BiasTables(
            sizes.max_seq_len if config.index_position_bias else None,
            config.num_time_buckets if config.index_time_bias else None,
        )

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, AuxLosses]:
        c, offsets = self.config, batch.seq_offsets
        bias = self.bias(batch)
        if k.shape[1] == 1:
            k, v = k.squeeze(1), v.squeeze(1)
        iq, ik, w = self.index(x.detach())
        top_k, group = chosen(c.top_k), chosen(c.selection_group)
        shared: dict[str, Any] = {"selection_group": group, "backend": c.backend}
        options: dict[str, Any] = {"bias": self.index_tables(batch), **shared}
        scores: Any = None  # not computed if no loss needs them
        if batch.phase < c.warmup_steps or top_k >= self.sizes.max_seq_len:
            indices: Any = batch.once(("every index", group), lambda: self.every_index(batch, q.device))
            if self.training:
                scores = hstu_sparse.index_scores(iq, ik, w, indices, offsets, **options)
        else:
            scores, indices = hstu_sparse.lightning_indexer(iq, ik, w, offsets, top_k, **options)
        out = hstu_sparse.sparse_attention(q, k, v, indices, offsets, bias=bias, **shared)
        if not self.training:
            return out, {}
        loss = hstu_sparse.indexer_loss(
            q.detach(), k.detach(), scores, indices, offsets, bias=bias, valid=batch.real, group=batch.heads, **shared
        )
        count = None if batch.whole is None or group == 1 else self.num_groups(batch, indices)
        return out, {"indexer_loss": AuxLoss.of(loss, c.loss_weight, count)}

    def num_groups(self, batch: Batch, indices: Tensor) -> Tensor:
        """Return the number of groups over which the index loss is a mean, 0-d; indices: [G, K]."""
        sequence, t = self.first_tokens(batch, len(indices), indices.device)
        starts = batch.seq_offsets[sequence] + t
        inside = starts < batch.seq_offsets[sequence + 1]
        return (inside & batch.real[torch.where(inside, starts, 0)] & (indices[:, 0] >= 0)).sum()

    def first_tokens(self, batch: Batch, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (the sequence [G], the position of the first token [G]) of each group; rows: G.

        The position of an unused row is at least the sequence's length.
        """
        group, row = chosen(self.config.selection_group), torch.arange(rows, device=device)
        first = batch.seq_offsets[:-1] // group + torch.arange(batch.num_sequences, device=device)
        sequence = torch.searchsorted(first, row, right=True) - 1
        return sequence, (row - first[sequence]) * group

    def index(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (iq [T, J, E], ik [T, E], w [T, J]), scaled so that scores are of order 1."""
        c = self.config
        iq = self.index_query(x).unflatten(-1, (c.num_index_heads, c.index_dim))
        ik = F.layer_norm(self.index_key(x), (c.index_dim,)).to(iq.dtype)
        return iq, ik, self.index_weight(x) * (c.num_index_heads * c.index_dim) ** -0.5

    def every_index(self, batch: Batch, device: torch.device) -> Tensor:
        """Return all tokens that each group may choose, [G, longest] int32, padded with -1."""
        longest, group = batch.longest(self.sizes.max_seq_len), chosen(self.config.selection_group)
        begins, offsets = batch.seq_offsets[:-1], batch.seq_offsets
        rows = batch.num_tokens if group == 1 else batch.num_tokens // group + batch.num_sequences
        if rows * longest > MOST_INDICES:
            raise ValueError(
                f"indexer: {rows:,} groups of up to {longest:,} tokens exceed {MOST_INDICES:,} indices; set "
                "warmup_steps: 0 and top_k below max_seq_len, or use a smaller batch or a larger selection_group"
            )
        if group == 1:
            last = torch.arange(rows, device=device) - begins[sequence_ids(offsets, rows)]
        else:
            sequence, t = self.first_tokens(batch, rows, device)
            last = torch.where(t < offsets.diff()[sequence], t, 0) - 1
        tokens = torch.arange(longest, dtype=torch.int32, device=device)
        return torch.where(tokens <= last[:, None], tokens, -1)
