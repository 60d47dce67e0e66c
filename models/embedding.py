"""Item, action and position embeddings of a batch, the tables held by torchrec.

Letters: T tokens, B sequences, E embedding size.
"""

import logging

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

import hstu_sparse
from data.batch import Batch
from data.ranking import RankingBatch

# torchrec asks a question of torch.fx whose answer is a warning in every process.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def truncated_normal_(weight: Tensor, std: float) -> Tensor:
    """Fills `weight` from a normal distribution of deviation `std`, cut off at two deviations (then 0.88 * std)."""
    return nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class InputEmbedding(nn.Module):
    """x[t] = item embedding * sqrt(E) (+ action embedding) + position embedding, then dropout: [T, E].

    In a ranking batch x[t] of an item token is its item's embedding, of an action token the sum of its action's and its
    item's, * sqrt(E), + position embedding. Positions count from the oldest event of the window. Tables start truncated
    normal, items (and actions) with standard deviation 0.02, positions with E ** -0.5. (The published HSTU then draws
    the latter anew, Xavier normal: no gain after 101 epochs, docs/evaluation.md.)
    """

    def __init__(
        self,
        num_items: int,
        num_actions: int,
        embedding_dim: int,
        max_seq_len: int,
        dropout: float,
        table_dtype: str = "float32",
    ):
        super().__init__()
        self.scale = embedding_dim**0.5
        self.dropout = dropout
        sizes = {"item": num_items} | ({"action": num_actions} if num_actions else {})
        self.tables = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=name,
                    embedding_dim=embedding_dim,
                    num_embeddings=size,
                    feature_names=[name],
                    init_fn=lambda weight: truncated_normal_(weight, 0.02),
                )
                for name, size in sizes.items()
            ]
        )
        # torchrec itself would take float16 for bfloat16.
        self.tables.to(getattr(torch, table_dtype))
        self.position = nn.Parameter(torch.empty(max_seq_len, embedding_dim))
        truncated_normal_(self.position, embedding_dim**-0.5)

    @property
    def item_weight(self) -> Tensor:
        """The item table, [num_items, E]."""
        return self.tables.embeddings["item"].weight

    def forward(self, batch: Batch) -> Tensor:
        features = {"item": batch.item_ids}
        if "action" in self.tables.embeddings:
            features["action"] = batch.actions
        tokens, sequences = batch.num_tokens, batch.num_sequences
        # torchrec takes no batch without sequences: an empty one stands in.
        lengths = batch.seq_offsets.diff() if sequences else batch.seq_offsets.new_zeros(1)
        # Lengths per key and stride are known on the host: given here, torchrec need not ask the device for them.
        looked_up = self.tables(
            KeyedJaggedTensor(
                keys=list(features),
                values=torch.cat(list(features.values())),
                lengths=lengths.repeat(len(features)),
                stride=max(1, sequences),
                length_per_key=[tokens] * len(features),
            )
        )
        rows = looked_up["item"].values()
        more = looked_up["action"].values() if "action" in features else None
        if isinstance(batch, RankingBatch):
            rows, more = torch.where(batch.is_action[:, None], more + rows, rows), None
        dropout = self.dropout if self.training else 0.0
        if rows.is_cuda and batch.cut is None:
            # The kernels draw their mask from a seed of their own.
            seed = torch.randint(2**62, (1,), device=rows.device) if dropout else None
            return hstu_sparse.embed_inputs(
                rows, self.position, batch.seq_offsets, scale=self.scale, more=more, dropout=dropout, seed=seed
            )
        x = rows * self.scale + self.position.index_select(0, batch.positions)
        if more is not None:
            x = x + more
        return F.dropout(x, self.dropout, self.training)
