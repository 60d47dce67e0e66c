"""Item, action and position embeddings of a batch, the tables held by torchrec.

Letters: T tokens, B sequences, E embedding size.
"""

import logging
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

import hstu_sparse
from data.batch import Batch
from data.feature_vocabulary import FeatureVocabulary
from data.ranking import RankingBatch
from models.features import ContextFeatures, ItemFeatures, truncated_normal_

# torchrec asks a question of torch.fx whose answer is a warning in every process.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


class InputEmbedding(nn.Module):
    """x[t] = item embedding * sqrt(E) (+ action embedding) + position embedding, then dropout: [T, E].

    In a ranking batch x[t] of an item token is its item's embedding, of an action token the sum of its action's and its
    item's, * sqrt(E), + position embedding. Positions count from the oldest event of the window. Tables start truncated
    normal, items (and actions) with standard deviation 0.02, positions with E ** -0.5. (The published HSTU then draws
    the latter anew, Xavier normal: no gain after 101 epochs, docs/evaluation.md.)

    With features, x[t] has those of its item, its user, its event and its time added before * sqrt(E). The rows of
    items that training never saw are then zero, and stay so, since no loss has them.
    """

    def __init__(
        self,
        num_items: int,
        num_actions: int,
        embedding_dim: int,
        max_seq_len: int,
        dropout: float,
        table_dtype: str = "float32",
        features: FeatureVocabulary | None = None,
        id_dropout: float = 0.0,
    ):
        super().__init__()
        self.scale = embedding_dim**0.5
        self.dropout, self.id_dropout = dropout, id_dropout
        sizes = {"item": num_items} | ({"action": num_actions} if num_actions else {})
        dtype, trained = getattr(torch, table_dtype), None if features is None else features.trained
        # What an item that training never saw would draw must not change what the others draw.
        with nullcontext() if trained is None else torch.random.fork_rng(devices=[]):
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
        if trained is not None:
            for name, table in self.tables.embeddings.items():
                seen = torch.from_numpy(trained) if name == "item" else torch.ones(len(table.weight), dtype=torch.bool)
                rows = truncated_normal_(table.weight.new_empty(int(seen.sum()), embedding_dim), 0.02)
                table.weight.data.zero_()[seen] = rows
        # torchrec itself would take float16 for bfloat16.
        self.tables.to(dtype)
        self.position = nn.Parameter(torch.empty(max_seq_len, embedding_dim))
        truncated_normal_(self.position, embedding_dim**-0.5)
        self.items = self.context = None
        if features is not None and features.trained is not None:
            self.items = ItemFeatures(features, embedding_dim, dtype)
        if features is not None and (features.of("users") or features.of("events") or features.calendar):
            self.context = ContextFeatures(features, embedding_dim, dtype)

    @property
    def item_weight(self) -> Tensor:
        """The item table, [num_items, E]."""
        return self.tables.embeddings["item"].weight

    def item_rows(self, ids: Tensor | None = None) -> Tensor:
        """The representations of the items `ids` [R] int64 as [R, E], or of all, [num_items, E].

        The sum of an item's row and what its features add. With features of items, training has only items that it
        saw: these are then all.
        """
        rows = self.item_weight if ids is None else F.embedding(ids, self.item_weight)
        if self.items is None:
            return rows
        if ids is None and self.training and len(self.items.trained) < len(rows):
            rows = F.embedding(self.items.trained, rows)
        return self._with_features(rows, ids)

    def _with_features(self, rows: Tensor, ids: Tensor | None) -> Tensor:
        """The items' own rows [R, E], a share of them left out in training, and what their features add."""
        if self.training and self.id_dropout:
            rows = rows * (torch.rand(len(rows), 1, device=rows.device) >= self.id_dropout)
        return rows + self.items(ids).to(rows.dtype)

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
        if self.items is not None:
            rows = self._with_features(rows, batch.item_ids)
        if self.context is not None:
            rows = rows + self.context(batch).to(rows.dtype)
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
