"""Define the HSTU layer, the transformer layers (SASRec's and a pre-norm one) and the model.

Source: Zhai et al., ICML 2024 (arXiv 2402.17152), with the settings of its public experiments; Kang and McAuley,
Self-Attentive Sequential Recommendation, ICDM 2018 (arXiv 1808.09781). A layer takes x [T, E] and the batch and
returns (x, auxiliary losses). Letters: T tokens, E embedding size, H heads, Hkv key/value heads (set by the attention
kind), D query/key and V value head size.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hstu_sparse
from data.batch import Batch
from data.features.vocabulary import FeatureVocabulary
from hstu_sparse.core.jagged import sequence_ids
from models.attention import ATTENTION_KINDS
from models.attention.contract import AttentionKind, AuxLoss, AuxLosses
from models.attention.spread import attend
from models.embedding import InputEmbedding
from models.features import truncated_normal_
from models.heads import normalized
from models.options import ModelConfig
from models.protocols import ItemTable
from models.recompute import recomputed

NORM_EPS = 1e-6


def rotated(config: ModelConfig, q: Tensor, k: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Apply the rotary embedding `model.rotary` to q, with the times of targets, and to k, with the times of events."""
    if config.rotary is None:
        return q, k
    by_time = config.rotary.time
    options: dict[str, Any] = {"position": config.rotary.position, "origins": batch.origins if by_time else None}
    options["positions"] = batch.positions if batch.moved else None
    q, k = (
        hstu_sparse.rotary(x, batch.seq_offsets, config.max_seq_len, times=times if by_time else None, **options)
        for x, times in ((q, batch.query_timestamps), (k, batch.timestamps))
    )
    return q, k


def normed_input(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and its layer norm; the norm has autocast's dtype, which saves a conversion."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return hstu_sparse.residual_norm(x, eps=NORM_EPS, dtype=dtype)


def residual_linear(x: Tensor, linear: nn.Linear, inner: Tensor) -> Tensor:
    """Return x + linear(inner)."""
    if x.is_cuda:
        return hstu_sparse.residual_add(x, F.linear(inner, linear.weight), linear.bias)
    return x + linear(inner)


class SwiGLU(nn.Module):
    """Compute x + dropout(contract(SiLU(gate) * value)) with gate, value = expand(norm(x)) (arXiv 2002.05202)."""

    def __init__(self, size: int, hidden: int, dropout: float):
        super().__init__()
        self.expand = nn.Linear(size, 2 * hidden)
        self.contract = nn.Linear(hidden, size)
        self.dropout = dropout
        for linear in (self.expand, self.contract):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        x, normed = normed_input(x)
        gate, value = self.expand(normed).chunk(2, dim=-1)
        return x + F.dropout(self.contract(F.silu(gate) * value), self.dropout, self.training)


class Layer(nn.Module):
    """Base of the layers: attention with heads of queries, keys and values that a subclass projects."""

    def __init__(self, config: ModelConfig, attention: AttentionKind, kv_heads: int):
        super().__init__()
        self.config, self.dropout, self.attention = config, config.dropout, attention
        self.heads, self.kv_heads = config.num_heads, kv_heads

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, AuxLosses]:
        """Return (attention [T, H * V], auxiliary losses); x, q, k, v: [T, ...], heads concatenated."""
        q = q.unflatten(-1, (self.heads, -1))
        k, v = (part.unflatten(-1, (self.kv_heads, -1)) for part in (k, v))
        out, aux = attend(self.attention, x, *rotated(self.config, q, k, batch), v, batch)
        return out.flatten(1), aux


class HSTULayer(Layer):
    """Compute x + output(dropout(norm(attention) * u)), with u, v, q, k = SiLU(norm(x) @ uvqk).

    With `feed_forward_dim` a SwiGLU follows, which the published layer does not have.
    """

    def __init__(self, config: ModelConfig, attention: AttentionKind, kv_heads: int):
        super().__init__(config, attention, kv_heads)
        layer, heads = attention.sizes, config.num_heads
        self.sizes = [heads * layer.linear_dim, kv_heads * layer.linear_dim]
        self.sizes += [heads * layer.attention_dim, kv_heads * layer.attention_dim]
        self.uvqk = nn.Parameter(torch.empty(config.embedding_dim, sum(self.sizes)))
        self.output = nn.Linear(heads * layer.linear_dim, config.embedding_dim)
        nn.init.normal_(self.uvqk, std=0.02)
        nn.init.xavier_uniform_(self.output.weight)
        self.feed_forward = None
        if config.feed_forward_dim is not None:
            self.feed_forward = SwiGLU(config.embedding_dim, config.feed_forward_dim, config.dropout)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, AuxLosses]:
        x, normed = normed_input(x)
        u, v, q, k = hstu_sparse.silu_parts(normed @ self.uvqk, self.sizes)
        attended, aux = self.attend(normed, q, k, v, batch)
        dropout = self.dropout if self.training else 0.0
        # The kernels draw their dropout mask from this seed; on a CPU the reference uses torch's generator.
        seed = torch.randint(2**62, (1,), device=x.device) if dropout and x.is_cuda else None
        gated = hstu_sparse.norm_gate(attended, u, eps=NORM_EPS, dropout=dropout, seed=seed)
        x = residual_linear(x, self.output, gated)
        return x if self.feed_forward is None else self.feed_forward(x), aux


class TransformerLayer(Layer):
    """SASRec's layer: attention with normalised queries and residual, then a position-wise feed-forward network."""

    def __init__(self, config: ModelConfig, attention: AttentionKind, kv_heads: int):
        super().__init__(config, attention, kv_heads)
        layer, size, heads = attention.sizes, config.embedding_dim, config.num_heads
        self.attention_norm = nn.LayerNorm(size, eps=1e-8)
        self.query = nn.Linear(size, heads * layer.attention_dim)
        self.key = nn.Linear(size, kv_heads * layer.attention_dim)
        self.value = nn.Linear(size, kv_heads * layer.linear_dim)
        self.output = nn.Linear(heads * layer.linear_dim, size)
        self.feed_forward_norm = nn.LayerNorm(size, eps=1e-8)
        assert config.feed_forward_dim is not None  # required by the configuration
        self.expand = nn.Linear(size, config.feed_forward_dim)
        self.contract = nn.Linear(config.feed_forward_dim, size)
        for linear in (self.query, self.key, self.value, self.output, self.expand, self.contract):
            nn.init.xavier_normal_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, AuxLosses]:
        normed = self.attention_norm(x)
        attended, aux = self.attend(normed, self.query(normed), self.key(x), self.value(x), batch)
        x = self.feed_forward_norm(normed + self.output(attended))
        hidden = F.dropout(F.relu(self.expand(x)), self.dropout, self.training)
        return x + F.dropout(self.contract(hidden), self.dropout, self.training), aux


class PreNormLayer(Layer):
    """Compute x + dropout(output(attention(norm(x)))), then `SwiGLU`, as current language models do.

    Source: Xiong et al., On Layer Normalization in the Transformer Architecture (arXiv 2002.04745). The norms have no
    weights.
    """

    def __init__(self, config: ModelConfig, attention: AttentionKind, kv_heads: int):
        super().__init__(config, attention, kv_heads)
        layer, size, heads = attention.sizes, config.embedding_dim, config.num_heads
        self.query = nn.Linear(size, heads * layer.attention_dim, bias=False)
        self.key = nn.Linear(size, kv_heads * layer.attention_dim, bias=False)
        self.value = nn.Linear(size, kv_heads * layer.linear_dim, bias=False)
        self.output = nn.Linear(heads * layer.linear_dim, size)
        assert config.feed_forward_dim is not None  # required by the configuration
        self.feed_forward = SwiGLU(size, config.feed_forward_dim, config.dropout)
        for linear in (self.query, self.key, self.value, self.output):
            nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, AuxLosses]:
        x, normed = normed_input(x)
        attended, aux = self.attend(normed, self.query(normed), self.key(normed), self.value(normed), batch)
        x = x + F.dropout(self.output(attended), self.dropout, self.training)
        return self.feed_forward(x), aux


BLOCKS = {"hstu": HSTULayer, "transformer": TransformerLayer, "pre_norm": PreNormLayer}


def build_layer(config: ModelConfig, attention: AttentionKind.Config) -> nn.Module:
    """Return a layer of kind `config.block` with an attention module."""
    kind = ATTENTION_KINDS.class_of(attention.kind)
    kv_heads = kind.kv_heads(attention, config.num_heads)
    return BLOCKS[config.block](config, kind(attention, config.layer_sizes), kv_heads)


class SequenceModel(nn.Module):
    """Compute (L2-normalised outputs [T, E] fp32, auxiliary losses) of a batch; out[t] predicts the item after token t.

    head            scores outputs against items; None if the score is the cosine
    task_head       the module of a task other than retrieval, or None
    recompute       whether layers save only their inputs for the backward pass
    residual_dtype  the dtype of the residual sum and of `raw_output` in training; None: outputs are fp32

    user_tokens: whether a token for each feature of the user is added at the front of each sequence.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_items: int,
        num_actions: int = 0,
        task_head: nn.Module | None = None,
        features: FeatureVocabulary | None = None,
        table: ItemTable | None = None,
        user_tokens: bool = False,
    ):
        super().__init__()
        self.embedding = InputEmbedding(config, num_items, num_actions, features, table, user_tokens)
        # The number of context tokens, by which the layers' sequences are longer than the batch's.
        self.num_context = len(features.of("users")) if features is not None and user_tokens else 0
        if self.num_context:
            config = config.model_copy(update={"max_seq_len": config.max_seq_len + self.num_context})
        kinds = config.attention * (config.num_layers if len(config.attention) == 1 else 1)
        self.recompute = False
        self.residual_dtype: torch.dtype | None = None
        self.layers = nn.ModuleList(build_layer(config, kind) for kind in kinds)
        self.head = config.head.module(config.embedding_dim)
        self.item_dropout = config.head.item_dropout
        # The logarithm of the learned factor of loss.temperature.
        self.log_temperature = nn.Parameter(torch.zeros(())) if config.head.learned_temperature else None
        self.task_head: Any = task_head
        self.repeats = config.head.repeat_term(config.embedding_dim)
        self.targets = None  # the item table to score outputs against, if it is not that of the inputs
        if config.head.separate_targets:
            self.targets = nn.Parameter(truncated_normal_(torch.empty(num_items, config.embedding_dim), 0.02))

    @property
    def item_weight(self) -> Tensor:
        """The item table of the inputs, [num_items, E]."""
        return self.embedding.item_weight

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters, including those of a sharded table on all ranks."""
        table = self.embedding.sharded
        return sum(p.numel() for p in self.parameters()) + (0 if table is None else table.num_items * table.size)

    @property
    def item_table(self) -> Tensor:
        """The representations of all items, [num_items, E]: their rows plus their features, or `targets`."""
        return self.item_rows()

    def item_rows(self, ids: Tensor | None = None) -> Tensor:
        """Return the representations of the items `ids` [R] int64 to score outputs against, [R, E], or of all items."""
        if self.targets is None:
            return self.embedding.item_rows(ids)
        return self.targets if ids is None else F.embedding(ids, self.targets)

    def forward(self, batch: Batch) -> tuple[Tensor, AuxLosses]:
        x, aux = self.raw_output(batch)
        return normalized(x.float()), aux

    def raw_output(
        self, batch: Batch, rows: Tensor | None = None, share: Callable[[AuxLoss], AuxLoss] | None = None
    ) -> tuple[Tensor, AuxLosses]:
        """Compute `forward` without the normalisation of outputs.

        rows [T, E]: the representations of the batch's items, if they were looked up before. share: maps each layer's
        loss to a rank's share of the mean over all ranks.
        """
        batch = dataclasses.replace(batch)  # a copy, so that results of `Batch.once` live for this pass
        if batch.cut is not None and batch.cut.uncut is not None:
            batch.cut = batch.cut._replace(uncut=dataclasses.replace(batch.cut.uncut))
        narrow = self.residual_dtype if self.training else None
        x, places = self.embedding(batch.with_event_positions, rows, narrow), None
        if self.num_context and batch.cut is not None:
            x = self.with_user_tokens(x, batch)
        elif self.num_context:
            users, events = self.embedding.user_tokens(batch.user_features), x
            batch, places = batch.with_context(self.num_context)
            x = events.new_empty(batch.num_tokens, events.shape[1]).index_copy(0, places, events)
            front = batch.seq_offsets[:-1, None] + torch.arange(self.num_context, device=places.device)
            x = x.index_copy(0, front.flatten(), users.flatten(0, 1).to(x.dtype))
        total: AuxLosses = {}
        for layer in self.layers:
            x, aux = recomputed(layer, x, batch) if self.recompute and self.training else layer(x, batch)
            for name, loss in aux.items():
                loss = loss if share is None else share(loss)
                total[name] = total[name] + loss if name in total else loss
        x = x if places is None else x.index_select(0, places)
        return x if narrow is not None else x.float(), total

    def with_user_tokens(self, x: Tensor, batch: Batch) -> Tensor:
        """Return x [T, E] with the features of users as context tokens, for a rank's part of a batch."""
        assert batch.cut is not None and batch.cut.uncut is not None
        sequence = sequence_ids(batch.seq_offsets, batch.num_tokens)
        place = (batch.cut.index - batch.cut.uncut.seq_offsets[sequence]).clamp(max=self.num_context - 1)
        users = self.embedding.user_tokens(batch.user_features)[sequence, place]
        return torch.where((batch.positions == 0)[:, None], users.to(x.dtype), x)
