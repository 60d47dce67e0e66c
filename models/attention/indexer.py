"""The kind `indexer`. Letters: T tokens, J heads of the indexer, E their size."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

import hstu_sparse
from data.batch import Batch
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.indexer import MOST_CHOSEN
from hstu_sparse.jagged import sequence_ids
from models.attention.shared import BiasedAttention, TimeBias, new_table, relative_bias
from models.contract import AuxLoss, LayerSizes


class BiasTables(nn.Module):
    """Tables of a relative bias, [positions] and [num_time_buckets + 1], None for one that there is not."""

    def __init__(self, positions: int | None, num_time_buckets: int | None):
        super().__init__()
        self.position = None if positions is None else new_table(positions)
        self.time = None if num_time_buckets is None else new_table(num_time_buckets + 1)

    def forward(self, batch: Batch) -> RelativeBias | None:
        return relative_bias(self.position, self.time, batch)


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
        index_time_bias: TimeBias = "auto"
        loss_weight: float = Field(1.0, ge=0)
        warmup_steps: int = Field(0, ge=0)
        backend: Literal["auto", "triton", "reference"] = "auto"

        def check_model(self, sizes: LayerSizes) -> None:
            super().check_model(sizes)
            if MOST_CHOSEN < self.top_k < sizes.max_seq_len and self.backend != "reference":
                raise ValueError(
                    f"top_k={self.top_k}: the kernels choose up to {MOST_CHOSEN:,} of "
                    f"model.max_seq_len={sizes.max_seq_len} tokens, or all"
                )

        def time_options(self) -> tuple[str, ...]:
            return (*super().time_options(), "index_time_bias")

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
