"""The HSTU layer, the transformer (SASRec) layer, the stack and the model.

Source: Zhai et al., ICML 2024 (arXiv 2402.17152), with the settings of its public experiments; Kang and McAuley,
Self-Attentive Sequential Recommendation, ICDM 2018 (arXiv 1808.09781). A layer takes x [T, E] and the batch and
returns (x, auxiliary losses). Letters: T tokens, E embedding size, H heads, D query/key and V value head size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hstu_sparse
from data.batches import Batch
from models.attention import ATTENTION
from models.config import ModelConfig
from models.embedding import InputEmbedding

NORM_EPS = 1e-6


class HSTULayer(nn.Module):
    """x + output(dropout(norm(attention) * u)), with u, v, q, k = SiLU(norm(x) @ uvqk)."""

    def __init__(self, config: ModelConfig, attention: nn.Module):
        super().__init__()
        self.heads = config.num_heads
        attention_dim, linear_dim = head_dims(config)
        self.dropout = config.dropout
        self.attention = attention
        wide, narrow = self.heads * linear_dim, self.heads * attention_dim
        self.sizes = [wide, wide, narrow, narrow]
        self.uvqk = nn.Parameter(torch.empty(config.embedding_dim, sum(self.sizes)))
        self.output = nn.Linear(wide, config.embedding_dim)
        nn.init.normal_(self.uvqk, std=0.02)
        nn.init.xavier_uniform_(self.output.weight)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        normed = hstu_sparse.layer_norm(x, eps=NORM_EPS)
        u, v, q, k = F.silu(normed @ self.uvqk).split(self.sizes, dim=-1)
        heads = [part.unflatten(-1, (self.heads, -1)) for part in (q, k, v)]
        attended, aux = self.attention(*heads, batch)
        dropout = self.dropout if self.training else 0.0
        # The kernels draw their mask from a seed of their own; on a CPU the reference draws from torch's generator.
        seed = torch.randint(2**62, (1,), device=x.device) if dropout and x.is_cuda else None
        gated = hstu_sparse.norm_gate(attended.flatten(1), u, eps=NORM_EPS, dropout=dropout, seed=seed)
        return x + self.output(gated), aux


class TransformerLayer(nn.Module):
    """SASRec's block: attention whose queries and residual are normalised, then a position-wise feed-forward."""

    def __init__(self, config: ModelConfig, attention: nn.Module):
        super().__init__()
        size, heads = config.embedding_dim, config.num_heads
        self.heads = heads
        attention_dim, linear_dim = head_dims(config)
        self.dropout = config.dropout
        self.attention = attention
        self.attention_norm = nn.LayerNorm(size, eps=1e-8)
        self.query = nn.Linear(size, heads * attention_dim)
        self.key = nn.Linear(size, heads * attention_dim)
        self.value = nn.Linear(size, heads * linear_dim)
        self.output = nn.Linear(heads * linear_dim, size)
        self.feed_forward_norm = nn.LayerNorm(size, eps=1e-8)
        self.expand = nn.Linear(size, config.feed_forward_dim)
        self.contract = nn.Linear(config.feed_forward_dim, size)
        for linear in (self.query, self.key, self.value, self.output, self.expand, self.contract):
            nn.init.xavier_normal_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        normed = self.attention_norm(x)
        heads = [
            linear(source).unflatten(-1, (self.heads, -1))
            for linear, source in ((self.query, normed), (self.key, x), (self.value, x))
        ]
        attended, aux = self.attention(*heads, batch)
        x = self.feed_forward_norm(normed + self.output(attended.flatten(1)))
        hidden = F.dropout(F.relu(self.expand(x)), self.dropout, self.training)
        return x + F.dropout(self.contract(hidden), self.dropout, self.training), aux


BLOCKS = {"hstu": HSTULayer, "transformer": TransformerLayer}


def head_dims(config: ModelConfig) -> tuple[int, int]:
    """D and V: as configured, or the embedding spread over the heads."""
    default = config.embedding_dim // config.num_heads
    return config.attention_dim or default, config.linear_dim or default


class SequenceModel(nn.Module):
    """Batch -> (L2-normalised output [T, E] in fp32, auxiliary losses): out[t] predicts the item after token t."""

    def __init__(self, config: ModelConfig, num_items: int, num_actions: int = 0):
        super().__init__()
        self.embedding = InputEmbedding(
            num_items,
            num_actions if config.action_embedding else 0,
            config.embedding_dim,
            config.max_seq_len,
            config.dropout,
        )
        kinds = config.attention * (config.num_layers if len(config.attention) == 1 else 1)
        attention_dim, _ = head_dims(config)
        self.layers = nn.ModuleList(
            BLOCKS[config.block](
                config,
                ATTENTION[kind.kind](
                    kind, num_heads=config.num_heads, attention_dim=attention_dim, max_seq_len=config.max_seq_len
                ),
            )
            for kind in kinds
        )

    @property
    def item_weight(self) -> Tensor:
        return self.embedding.item_weight

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.embedding(batch)
        total: dict[str, Tensor] = {}
        for layer in self.layers:
            x, aux = layer(x, batch)
            for name, value in aux.items():
                total[name] = total[name] + value if name in total else value
        return F.normalize(x.float(), dim=-1, eps=NORM_EPS), total
